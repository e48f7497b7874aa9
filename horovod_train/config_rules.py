"""The rules between settings that are right each by itself. Looks at nothing but the config."""

from __future__ import annotations

from collections.abc import Iterator

from horovod_train.config import Config, HorovodConfig, LogConfig


def broken_rules(config: Config) -> Iterator[tuple[str, str]]:
    """What is wrong between values that are right each by itself: (key, problem). Looks at nothing but the config."""
    data, train, schedule, stops = config.data, config.train, config.lr_schedule, config.early_stopping
    if data.global_batch_size and data.batch_size_per_rank:
        yield "data.batch_size_per_rank", "give either this or data.global_batch_size, not both."
    if not (data.global_batch_size or data.batch_size_per_rank):
        yield "data.global_batch_size", "is required (or data.batch_size_per_rank)."
    if not data.train:
        yield "data.train", "is required: a folder of *.tfrecord files, or a glob."
    if not (train.epochs or train.max_steps):
        yield "train.epochs", "is required (or train.max_steps)."
    if schedule.scaling != "none" and not schedule.base_batch_size:
        yield "lr_schedule.base_batch_size", f"is required with scaling: {schedule.scaling}."
    if config.eval.every_steps and not data.eval:
        yield "eval.every_steps", "there is nothing to evaluate: data.eval is not given."
    if not 0 < config.watch.warn_after_s < config.watch.stop_after_s <= config.watch.first_step_after_s:
        yield "watch.warn_after_s", "must be above 0 and less than stop_after_s, and that at most first_step_after_s."
    if (config.checkpoint.best or stops.patience or stops.target is not None) and not data.eval:
        yield "data.eval", "is required: checkpoint.best and early_stopping watch a metric of the evaluation."
    if (train.synchronization == "local") != (train.average_every_steps is not None):
        yield "train.average_every_steps", "goes with train.synchronization: local, and local needs it."
    if train.ema_decay is not None and train.ema_decay >= 1:
        yield "train.ema_decay", f"must be less than 1; received {train.ema_decay}."
    if train.synchronization != "every_step" and config.precision == "mixed_float16":
        yield "precision", f"mixed_float16 needs train.synchronization: every_step; received {train.synchronization}."
    if train.synchronization == "local" and train.non_finite == "skip":
        yield (
            "train.non_finite",
            "skip does not go with synchronization: local, where each rank would skip its own.",
        )
    for name in ("op", "compression", "predivide", "sparse_as_dense"):
        if train.synchronization == "local" and getattr(config.horovod, name) != getattr(HorovodConfig(), name):
            yield f"horovod.{name}", "does not go with synchronization: local, which exchanges no gradients."
    if config.horovod.predivide != 1.0 and (config.horovod.op != "average" or config.horovod.compression == "bf16"):
        yield "horovod.predivide", "goes with op: average, and not with compression: bf16."
    if train.sync_batch_norm and train.synchronization == "local":
        yield "train.sync_batch_norm", "does not go with synchronization: local, where ranks do not meet in a step."
    if train.sync_batch_norm and config.jit_compile:
        yield "train.sync_batch_norm", "does not go with jit_compile: XLA cannot compile the exchange inside a pass."
    if config.device.per_rank > 1 and config.jit_compile:
        yield "device.per_rank", "does not go with jit_compile: XLA compiles for one device."
    if config.optimizer.options.get("use_ema"):
        yield "optimizer.options.use_ema", "nothing would read these averages; give train.ema_decay instead."
    yield from _broken_log_rules(config.log)
    if config.device.cut_before and config.device.per_rank != len(config.device.cut_before) + 1:
        stages = len(config.device.cut_before) + 1
        yield "device.cut_before", f"cuts the model into {stages} stages; device.per_rank must be {stages} too."
    if config.deterministic and config.horovod.op == "adasum" and config.horovod.fusion_threshold_mb:
        yield "horovod.fusion_threshold_mb", "must be left out with adasum and deterministic: true, which set it to 0."


def _broken_log_rules(log: LogConfig) -> Iterator[tuple[str, str]]:
    shown = {
        "log.histograms_every_steps": log.histograms_every_steps,
        "log.graph": log.graph,
        "log.profile_at_steps": log.profile_at_steps,
    }
    for key, value in shown.items():
        if value and not log.tensorboard:
            yield key, "needs log.tensorboard: true, which was switched off."
    if log.activations and not log.histograms_every_steps:
        yield "log.activations", "needs log.histograms_every_steps, the steps between two histograms."
    if log.graph_names and not log.graph:
        yield "log.graph_names", "needs log.graph: true."
    if any(step < 2 for step in log.profile_at_steps):
        yield "log.profile_at_steps", "must be 2 or later: the first step is the one that is compiled."
