"""Logs mean training loss and metrics since the last log, the learning rate, the speed, and what limits it.

In a synchronous step every rank waits, in the exchange, for the rank that comes last. So a slow rank is known by the
time it spends elsewhere, and the cost of the exchange itself by the rank that waits least.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from horovod_train.data.stream import StreamPipeline
from horovod_train.distributed import consistency
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.output.metrics import NO_ASIDE, Aside
from horovod_train.training.open_run import LOOK_EVERY_S, MEASURED_PHASES, Run

log = logging.getLogger(__name__)

JUDGED_FROM_S = 0.5
"""Seconds of steps that each rank must have seen before they are judged: five looks."""

SLOW_FROM = 0.15
"""A rank is a straggler if the others wait for it during so much of a step, beyond what chance explains."""


class LogTraining:
    """Writes a line of training; see the module.

    first_step: the step at which the run starts or resumes; nothing is logged there. evaluated_every: the steps between
    evaluations whose lines show these figures, too.
    """

    def __init__(self, first_step: int, evaluated_every: int | None = None) -> None:
        self._evaluated_every = evaluated_every
        self._last_step, self._last_read = first_step, (0.0, 0, 0)
        self._phases = np.zeros(len(MEASURED_PHASES))
        self._phase_steps = 0
        self._skipped: set[int] = set()
        """The records that any rank has skipped, as known at the last line."""
        self._has_compared_rows = False

    def __call__(self, run: Run, step: int, *, keep: bool = False) -> None:
        """keep: whether the next line, as after a resume, counts these figures too."""
        if step == self._last_step:
            return  # no new steps
        self._last_step = step
        if isinstance(run.parts.train, StreamPipeline) and not self._has_compared_rows:
            self._has_compared_rows = True
            _warn_of_equal_rows(run.group, run.parts.train)
        values = run.parts.train_step.figures.result(run.group, keep=keep)
        values |= run.state.average_loss(run.group) | _drift(run, step)
        values |= {name: float(rate) for name, rate in run.state.optimizer.learning_rates.items()}
        steps, speed = self._speed(run)
        values |= speed
        if skipped := int(run.parts.train_step.skipped):
            values["skipped_updates"] = skipped
        self._skipped |= run.group.union(run.parts.train.skipped - self._skipped)
        run.parts.train.check_used(len(self._skipped), "data.train")
        if self._skipped:
            values["skipped_records"] = len(self._skipped)
        values |= run.clock.blocked
        run.clock.blocked.clear()
        aside = self._where_time_went(run, step, steps)
        is_shown_later = self._evaluated_every is not None and step % self._evaluated_every == 0
        aside = aside._replace(shown=not is_shown_later)
        run.output.append_metrics("train", step, int(run.state.epoch), values, aside)

    def _speed(self, run: Run) -> tuple[int, dict[str, float]]:
        """Return the steps since the last call that were timed, and how fast they were."""
        read = run.clock.read()
        seconds, steps, records = (now - before for now, before in zip(read, self._last_read, strict=True))
        self._last_read = read
        if not (steps and seconds):
            return 0, {}
        return int(steps), {
            "examples_per_s": records / seconds,
            "examples_per_s_per_rank": records / seconds / run.group.size,
            "s_per_step": seconds / steps,
        }

    def _where_time_went(self, run: Run, step: int, steps: int) -> Aside:
        """Collective: return what limits the run, and figures for it; write each rank's.

        Lines too short to judge are joined with those after them. steps: timed since the last line.
        """
        taken = run.phase_times.take()
        if steps:  # not the first call, which compiles
            self._phases += taken
            self._phase_steps += steps
        table = np.zeros((run.group.size, len(MEASURED_PHASES)))
        table[run.group.rank] = self._phases
        (seconds,) = run.group.sum([table])
        if seconds.sum(axis=1).min() < JUDGED_FROM_S:
            return NO_ASIDE
        judged_steps, self._phase_steps = self._phase_steps, 0
        self._phases = np.zeros(len(MEASURED_PHASES))
        verdict = judge(seconds, run.group.name)
        of_ranks = seconds.T.round(3).tolist()  # a line for thousands of ranks, for days
        run.output.append_times(step, verdict, dict(zip(MEASURED_PHASES, of_ranks, strict=True)))
        shares = zip(MEASURED_PHASES, seconds.sum(axis=0) / seconds.sum(), strict=True)
        busy = seconds[:, :-1].sum(axis=1) / judged_steps  # without the exchange, where ranks wait for each other
        figures = {f"{phase}_share": float(share) for phase, share in shares if share or phase != HOOK}
        figures |= {"own_s_per_step_min": busy.min(), "own_s_per_step_median": np.median(busy)}
        figures |= {"own_s_per_step_max": busy.max(), "slowest_rank": float(busy.argmax())}
        return Aside(figures, verdict)


def _warn_of_equal_rows(group: WorkerGroup, train: StreamPipeline) -> None:
    """Collective: say so if the stream has given all ranks the same first records."""
    if said := consistency.of_equal_rows(group.gather(train.first_rows)):
        log.warning(
            f"data.dataset: {said}: the first records are equal to the bit. The function must give each rank its own, "
            "as by dataset.shard(size, rank)."
        )


def _drift(run: Run, step: int) -> dict[str, float]:
    """Return how far ranks move apart between exchanges, if they do; write it for each parameter."""
    drift = run.state.synchronization.drift()
    if drift is None:
        return {}
    values = {"ranks_apart": drift.ranks_apart}
    if drift.moves:
        changes = (change for moves in drift.moves.values() for change in moves["changed"])
        values["unchanged_parameters"] = sum(not change for change in changes)
        run.output.append_parameters(step, drift.moves)
    return values


def judge(seconds: np.ndarray, name: Callable[[int], str]) -> str:
    """Say what limits the run: `compute-bound`, or `straggler rank 3 (node2): 38 % slower in compute`.

    seconds: [ranks, MEASURED_PHASES], with a sum above 0. name: of a rank.
    """
    busy = seconds[:, :-1].sum(axis=1)
    slowest = int(busy.argmax())
    if len(seconds) > 1:
        others = np.delete(seconds, slowest, axis=0)
        lead = busy[slowest] - np.median(np.delete(busy, slowest))
        elapsed = seconds.sum(axis=1).max()
        # Two standard deviations, at most, of the difference of two ranks' shares of time, each from so many looks.
        chance = 2 * np.sqrt(2 * 0.25 / (elapsed / LOOK_EVERY_S))
        if lead > (SLOW_FROM + chance) * elapsed:
            reason = _describe_slow(seconds[slowest], np.median(others, axis=0))
            return f"straggler {name(slowest)}: {reason}"
    costs = seconds[:, :-1].mean(axis=0)
    if len(seconds) > 1:  # a single rank exchanges nothing
        costs = np.append(costs, seconds[:, -1].min())
    return f"{MEASURED_PHASES[int(costs.argmax())]}-bound"


def _describe_slow(seconds: np.ndarray, usual: np.ndarray) -> str:
    """Say in which phase a rank is slower than others usually are, and by how much. Both: [MEASURED_PHASES]."""
    phase = int((seconds - usual)[:-1].argmax())
    if usual[phase] < seconds[phase] / 10:  # a percentage of next to nothing says nothing
        return f"{seconds[phase] / seconds.sum():.0%} of its time in {MEASURED_PHASES[phase]}".replace("%", " %")
    return f"{seconds[phase] / usual[phase] - 1:.0%} slower in {MEASURED_PHASES[phase]}".replace("%", " %")
