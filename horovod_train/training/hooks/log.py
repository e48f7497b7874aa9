"""Logs mean training loss and metrics since the last log, the learning rate and the speed."""

from __future__ import annotations

from horovod_train.training.run_record import Run


class LogTraining:
    """first_step: the step at which the run starts or resumes; nothing is logged there."""

    def __init__(self, first_step: int) -> None:
        self._last_step, self._last_read = first_step, (0.0, 0, 0)

    def __call__(self, run: Run, step: int) -> None:
        if step == self._last_step:
            return  # no new steps
        self._last_step = step
        values = _losses_and_metrics(run) | _drift(run, step)
        values["learning_rate"] = float(run.state.optimizer.learning_rate)
        values |= self._speed(run)
        if skipped := int(run.parts.train_step.skipped):
            values["skipped_updates"] = skipped
        if bad := int(run.group.sum([run.parts.train.skipped])[0]):
            values["skipped_records"] = bad
        run.output.append_metrics("train", step, int(run.state.epoch), values | run.clock.take_blocked())

    def _speed(self, run: Run) -> dict[str, float]:
        read = run.clock.read()
        seconds, steps, records = (now - before for now, before in zip(read, self._last_read, strict=True))
        self._last_read = read
        if not (steps and seconds):
            return {}
        return {
            "examples_per_s": records / seconds,
            "examples_per_s_per_rank": records / seconds / run.group.size,
            "s_per_step": seconds / steps,
        }


def _losses_and_metrics(run: Run) -> dict[str, float]:
    values = run.parts.train_step.seen.result(run.group)
    averages = run.state.average_losses(run.group)
    for losses in (values, averages):
        losses["total_loss"] = losses["loss"] + losses["penalty"]
    if not values["penalty"]:  # without a penalty, total_loss is the loss
        for name in ("penalty", "total_loss"):
            del values[name], averages[name]
    return values | {f"{name}_average": average for name, average in averages.items()}


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
