"""Logs mean training loss and metrics since the last log, the learning rate, the speed, and what limits it."""

from __future__ import annotations

import numpy as np

from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.output.metrics import NO_ASIDE, Aside
from horovod_train.training.phase_times import JUDGED_FROM_S, MEASURED_PHASES, judge
from horovod_train.training.run_record import Run


class LogTraining:
    """first_step: the step at which the run starts or resumes; nothing is logged there."""

    def __init__(self, first_step: int) -> None:
        self._last_step, self._last_read = first_step, (0.0, 0, 0)
        self._phases = np.zeros(len(MEASURED_PHASES))
        self._phase_steps = 0

    def __call__(self, run: Run, step: int) -> None:
        if step == self._last_step:
            return  # no new steps
        self._last_step = step
        values = _losses_and_metrics(run) | _drift(run, step)
        values |= {name: float(rate) for name, rate in run.state.learning_rates.items()}
        steps, speed = self._speed(run)
        values |= speed
        if skipped := int(run.parts.train_step.skipped):
            values["skipped_updates"] = skipped
        if bad := int(run.group.sum([run.parts.train.skipped])[0]):
            values["skipped_records"] = bad
        values |= run.clock.take_blocked()
        run.output.append_metrics("train", step, int(run.state.epoch), values, self._where_time_went(run, step, steps))

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
        run.output.append_times(step, verdict, dict(zip(MEASURED_PHASES, seconds.T.tolist(), strict=True)))
        shares = zip(MEASURED_PHASES, seconds.sum(axis=0) / seconds.sum(), strict=True)
        busy = seconds[:, :-1].sum(axis=1) / judged_steps  # without the exchange, where ranks wait for each other
        figures = {f"{phase}_share": float(share) for phase, share in shares if share or phase != HOOK}
        figures |= {"own_s_per_step_min": busy.min(), "own_s_per_step_median": np.median(busy)}
        figures |= {"own_s_per_step_max": busy.max(), "slowest_rank": float(busy.argmax())}
        return Aside(figures, verdict)


def _losses_and_metrics(run: Run) -> dict[str, float]:
    values = run.parts.train_step.figures.result(run.group)
    return values | run.state.average_loss(run.group)


def _drift(run: Run, step: int) -> dict[str, float]:
    """Return how far ranks move apart between exchanges, if they do; write it for each parameter."""
    drift = run.state.synchronization.drift()
    if drift is None:
        return {}
    values = {"ranks_apart": drift.ranks_apart}
    if drift.moves:
        values["unchanged_parameters"] = sum(not changed for each in drift.moves.values() for changed in each.changed)
        run.output.append_parameters(step, {path: each._asdict() for path, each in drift.moves.items()})
    return values
