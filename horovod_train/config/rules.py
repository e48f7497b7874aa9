"""Checks settings that are each valid alone against each other, and resolves a config for a number of ranks.

Looks only at the config. Also checks class weights for the losses that use them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from horovod_train.config.paths import record_path_problems
from horovod_train.config.settings import Config, DataConfig, Spec, default_of
from horovod_train.errors import UserError

_EVALUATED = "data.eval or data.dataset"
_EVALUATIONS = (_EVALUATED, "eval.every_epochs or eval.every_steps")
_STOPS_EARLY = ("early_stopping.patience or early_stopping.target",)
_GRADIENTS_ARE_EXCHANGED = ("train.synchronization: not local",)

NEEDS: dict[str, tuple[str, ...]] = {
    "data.shuffle_window": ("data.shuffle: true",),
    "data.shuffle_mb": ("data.shuffle: true",),
    "data.bucket_by_length": ("data.shuffle: true",),
    "data.bucket_steps": ("data.bucket_by_length",),
    "model.init_exclude": ("model.init_from",),
    "model.unfreeze": ("model.freeze", "train.synchronization: every_step"),
    "lr_schedule.base_batch_size": ("lr_schedule.scaling: not none",),
    "train.average_every_steps": ("train.synchronization: local",),
    "train.max_skips_in_a_row": ("train.non_finite: skip",),
    "data.steps_per_epoch": ("data.dataset",),
    "eval.every_epochs": (_EVALUATED,),
    "eval.every_steps": (_EVALUATED,),
    "eval.batch_size_per_rank": (_EVALUATED,),
    "checkpoint.best": _EVALUATIONS,
    "early_stopping.metric": _STOPS_EARLY,
    "early_stopping.mode": _STOPS_EARLY,
    "early_stopping.patience": _EVALUATIONS,
    "early_stopping.min_delta": ("early_stopping.patience",),
    "early_stopping.target": _EVALUATIONS,
    "log.histograms_every_steps": ("log.tensorboard: true",),
    "log.activations": ("log.histograms_every_steps",),
    "log.graph": ("log.tensorboard: true",),
    "log.graph_names": ("log.graph: true",),
    "log.profile_at_steps": ("log.tensorboard: true",),
    "horovod.op": _GRADIENTS_ARE_EXCHANGED,
    "horovod.compression": _GRADIENTS_ARE_EXCHANGED,
    "horovod.predivide": _GRADIENTS_ARE_EXCHANGED,
    "horovod.sparse_as_dense": _GRADIENTS_ARE_EXCHANGED,
    "watch.warn_after_s": ("watch.enabled: true",),
    "watch.stop_after_s": ("watch.enabled: true",),
    "watch.first_step_after_s": ("watch.enabled: true",),
}
"""For each setting, what it needs to have an effect; without that it is refused. All needs must hold: `section.key`
(given), `section.key: value` or `section.key: not value`, or several alternatives with ` or `. Settings not listed here
are always used, or refused where their part is built. tests/unit/config/test_settings_are_used.py checks that.
"""

_GO_WITH = {"dataset", "steps_per_epoch", "global_batch_size", "batch_size_per_rank", "prefetch_batches"}

PER_OUTPUT = "per_output"
"""The loss that is a sum of one for each output; its options map outputs to losses."""


def broken_rules(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong between values that are each valid alone: (key, problem). Looks only at the config."""
    data = config.data
    if data.global_batch_size and data.batch_size_per_rank:
        yield "data.batch_size_per_rank", "give either this or data.global_batch_size, not both."
    if not (data.global_batch_size or data.batch_size_per_rank):
        yield "data.global_batch_size", "is required (or data.batch_size_per_rank)."
    yield from _stream_problems(data)
    yield from _without_files(data)
    yield from _wrong_fold(data)
    yield from _wrong_buckets(config)
    yield from _wrong_training(config)
    yield from _wrong_exchange(config)
    yield from _wrong_objective(config)
    yield from _wrong_logs(config)
    yield from _wrong_fine_tuning(config)
    yield from record_path_problems(config)
    yield from _without_effect(config)
    if not (data.train or data.dataset):
        yield "data.train", "is required: a folder, file or glob of records; see docs/data.md."


def _stream_problems(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the settings of a stream, and those that have no effect with one: (key, problem)."""
    if data.dataset is None:
        return
    if ":" not in data.dataset.name:
        yield "data.dataset", f"expected package.module:function; received {data.dataset.name!r}."
    for field in dataclasses.fields(data):
        if field.name not in _GO_WITH and getattr(data, field.name) != default_of(field):
            problem = "has no effect beside data.dataset, whose function gives the records. Leave it out."
            yield f"data.{field.name}", problem


def _without_files(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield settings that are about files, next to a source that may have none."""
    if data.source is None:
        return
    if ":" not in data.source.name:
        problem = (
            f"expected package.module:Class; received {data.source.name!r}. Files of a known kind need none: "
            "data.train alone names them."
        )
        yield "data.source", problem
    for key in ("parse", "index_dir", "stage_dir"):
        if getattr(data, key):
            yield f"data.{key}", "is for files, and has no effect beside data.source. Leave it out."


def _wrong_fold(data: DataConfig) -> Iterator[tuple[str, str]]:
    key = "data.fold" if data.fold is not None else "data.eval_fraction"
    if data.fold is not None and data.eval_fraction is not None:
        yield "data.eval_fraction", "give either this or data.fold, not both."
    if data.eval_fraction in (0, 1):
        yield "data.eval_fraction", f"must be above 0 and below 1; received {data.eval_fraction:g}."
    if (data.fold or data.eval_fraction) and data.eval and data.paths("eval") != data.paths("train"):
        problem = "parts the records of data.train, so data.eval must name the same, or be left out"
        received = f"received data.train {', '.join(data.paths('train'))} and data.eval {', '.join(data.paths('eval'))}"
        yield key, f"{problem} (data.eval=[]); {received}. To evaluate on other records: {key}=null."
    if data.fold is None:
        return
    parts = re.fullmatch(r"(\d{1,6})/(\d{1,6})", data.fold)
    if not parts or not (1 <= int(parts[1]) <= int(parts[2]) and int(parts[2]) >= 2):
        yield "data.fold", f"expected k/K with k from 1 to K, and K at least 2, like 1/5; received {data.fold}."


def _wrong_buckets(config: Config) -> Iterator[tuple[str, str]]:
    key, data = "data.bucket_by_length", config.data
    if not data.bucket_by_length:
        return
    if data.parse:
        yield key, "needs features, whose max_length says which are lists; data.parse replaces them."
    if data.preprocess:
        yield key, "does not go with data.preprocess, which may change the length of a list."
    if config.jit_compile:
        yield key, "does not go with jit_compile: XLA would compile a step for each length."


def _wrong_training(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong about how long, how fast and with which updates the run trains."""
    train, schedule = config.train, config.lr_schedule
    if not (train.epochs or train.max_steps):
        yield "train.epochs", "is required (or train.max_steps)."
    if schedule.scaling != "none" and not schedule.base_batch_size:
        yield "lr_schedule.base_batch_size", f"is required with scaling: {schedule.scaling}."
    if not 0 < config.watch.warn_after_s < config.watch.stop_after_s <= config.watch.first_step_after_s:
        yield "watch.warn_after_s", "must be above 0, less than stop_after_s, which must be at most first_step_after_s."
    if train.synchronization == "local" and train.average_every_steps is None:
        yield "train.average_every_steps", "is required with train.synchronization: local."
    if train.clip_norm == 0:
        yield "train.clip_norm", "must be above 0; received 0, which would make every gradient 0. Leave it out."
    if train.ema_decay is not None and train.ema_decay >= 1:
        yield "train.ema_decay", f"must be less than 1; received {train.ema_decay}."
    if train.synchronization != "every_step" and config.precision == "mixed_float16":
        yield "precision", f"mixed_float16 needs train.synchronization: every_step; received {train.synchronization}."
    if train.synchronization == "local" and train.non_finite == "skip":
        problem = "skip cannot be combined with synchronization: local, where each rank would skip its own."
        yield "train.non_finite", problem


def _wrong_exchange(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong about how ranks exchange, and about the devices of a rank."""
    train = config.train
    if config.horovod.predivide != 1.0 and (config.horovod.op != "average" or config.horovod.compression == "bf16"):
        yield "horovod.predivide", "goes with op: average, and not with compression: bf16."
    if train.sync_batch_norm and train.synchronization == "local":
        yield "train.sync_batch_norm", "does not go with synchronization: local, where ranks do not meet in a step."
    if train.sync_batch_norm and config.jit_compile:
        yield "train.sync_batch_norm", "does not go with jit_compile: XLA cannot compile the exchange inside a pass."
    if config.deterministic and config.horovod.op == "adasum" and config.horovod.fusion_threshold_mb:
        yield "horovod.fusion_threshold_mb", "must be left out with adasum and deterministic: true, which set it to 0."
    if config.device.per_rank > 1 and config.jit_compile:
        yield "device.per_rank", "does not go with jit_compile: XLA compiles for one device."
    if config.device.cut_before and config.device.per_rank != len(config.device.cut_before) + 1:
        stages = len(config.device.cut_before) + 1
        yield "device.cut_before", f"cuts the model into {stages} stages; device.per_rank must be {stages} too."


def _wrong_objective(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong between optimizer, loss, metrics and the weights of records."""
    yield from _averages_twice(config)
    if config.loss.class_weight and config.loss.name == PER_OUTPUT:
        yield "loss.class_weight", "with per_output give it to an output: loss.options.OUTPUT.class_weight."
    elif problem := class_weight_problem(config.loss.class_weight):
        yield "loss.class_weight", problem
    if config.weighted_metrics and not (
        config.data.weight or config.loss.class_weight or weights_of_outputs(config.loss)
    ):
        yield "weighted_metrics", "needs data.weight or a class_weight of the loss; without one, write metrics."


def _averages_twice(config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings of Keras' averages that have no effect, or keep averages that train.ema_decay keeps too."""
    options = config.optimizer.options
    if options.get("use_ema") and config.train.ema_decay is not None:
        yield "train.ema_decay", "optimizer.options.use_ema keeps averages too; give one of the two."
    if not options.get("use_ema") and ":" not in config.optimizer.name:
        yield from (
            (f"optimizer.options.{name}", "has no effect without use_ema: true.")
            for name in ("ema_momentum", "ema_overwrite_frequency")
            if options.get(name) is not None
        )


def _wrong_logs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong about what is logged."""
    if any(step < 2 for step in config.log.profile_at_steps):
        yield "log.profile_at_steps", "must be 2 or later: the first step is the one that is compiled."
    names = [tracker.name for tracker in config.log.trackers]
    if twice := [name for name in names if names.count(name) > 1]:
        yield "log.trackers", f"expected each tracker once; received {twice[0]} {len(twice)} times."


def _wrong_fine_tuning(config: Config) -> Iterator[tuple[str, str]]:
    model, epochs = config.model, config.train.epochs
    if model.init_from and config.checkpoint.resume not in ("auto", "never"):
        yield "model.init_from", "has no effect with checkpoint.resume: PATH, which gives the model all its weights."
    for epoch, entry in model.unfreeze.items():
        if not (epoch.isascii() and epoch.isdigit() and int(epoch) > 0):
            yield "model.unfreeze", f"expected complete epochs, 1 or more; received {epoch!r}."
        elif epochs is not None and int(epoch) >= epochs:
            yield f"model.unfreeze.{epoch}", f"has no effect: the run ends after train.epochs, {epochs}."
        patterns = entry if isinstance(entry, list | tuple) else (entry,)
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            yield f"model.unfreeze.{epoch}", f"expected patterns of weights; received {entry!r}."
    for pattern, rank in model.lora.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            yield f"model.lora.{pattern}", f"expected a rank of 1 or more; received {rank!r}."
    if model.lora and config.device.cut_before:
        yield "model.lora", "does not go with device.cut_before, which makes layers again from their configs."
    for pattern, factor in config.optimizer.lr_multipliers.items():
        if not _is_finite(factor) or factor <= 0:
            problem = f"expected a factor above 0; received {factor!r}. Weights that are not to change: model.freeze."
            yield f"optimizer.lr_multipliers.{pattern}", problem


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings that differ from their default but lack what they need: if accepted, they would be ignored."""
    for key, needs in NEEDS.items():
        value, default = lookup(config, key), lookup(Config(), key)
        if value == default or not _requests_anything(value):
            continue
        for need in filter(lambda need: not holds(need, config), needs):
            values = "; ".join(f"{name} is {_as_yaml(lookup(config, name))}" for name in keys_of(need))
            default_text = _as_yaml(default)
            yield key, f"has no effect unless {need}; {values}. Leave it out, or give its default: {default_text}."


def keys_of(need: str) -> list[str]:
    """Return the settings that one of NEEDS mentions."""
    return [term.partition(": ")[0] for term in need.split(" or ")]


def lookup(config: Config, key: str) -> Any:
    """Return the value of `section.key`."""
    return functools.reduce(getattr, key.split("."), config)


def refuse_given(config: Config, keys: Iterable[str], why: str) -> None:
    """Raise UserError for the first of these settings that is not its default. why: what follows its name."""
    for key in keys:
        if lookup(config, key) != lookup(Config(), key):
            raise UserError(f"{key}: {why}")


def holds(need: str, config: Config) -> bool:
    """Return whether one of NEEDS is fulfilled."""
    return any(_is_true(term, config) for term in need.split(" or "))


def _is_true(term: str, config: Config) -> bool:
    key, _, required_value = term.partition(": ")
    value = lookup(config, key)
    if not required_value:
        return _requests_anything(value)
    if required_value.startswith("not "):
        return _as_yaml(value) != required_value.removeprefix("not ")
    return _as_yaml(value) == required_value


def _requests_anything(value: Any) -> bool:
    return not (value is None or value is False or value in ((), {}))


def _as_yaml(value: Any) -> str:
    """Format a value as one would write it in a config."""
    return json.dumps(value).strip('"')


def resolve(config: Config, size: int, batch_before: int | None = None) -> Config:
    """Return the config as `size` ranks run it: with the global batch size filled in.

    batch_before: the global batch size of a run that resumes; batch_size_per_rank does not change it.
    Raises UserError where some rank would have nothing to do.
    """
    data = config.data
    batch = data.global_batch_size or batch_before or data.global_batch(size)
    if batch < size:
        raise UserError(
            f"data.global_batch_size must be at least the number of ranks ({size}); received {batch}. "
            "Start fewer ranks or raise it."
        )
    per_rank = -(-batch // size)
    if per_rank < config.train.accumulate_steps:
        raise UserError(
            f"train.accumulate_steps must be at most the records of one rank's batch ({per_rank}); "
            f"received {config.train.accumulate_steps}."
        )
    data = dataclasses.replace(data, global_batch_size=batch, batch_size_per_rank=None)
    return dataclasses.replace(config, data=data)


def kept_batch(config: Config, resolved: Config, size: int) -> str:
    """Return a sentence if a run that resumes keeps another global batch than its config would make; else ""."""
    batch, alone = resolved.data.global_batch_size, config.data.global_batch(size)
    asked = f"data.batch_size_per_rank {config.data.batch_size_per_rank} would make it {alone} here"
    return "" if batch == alone else f"the global batch stays {batch}; {asked}"


def class_weight_problem(weights: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a mapping class → weight; None if nothing is. Keys are strings, as YAML gives them."""
    for name, weight in weights.items():
        if not str(name).isascii() or not str(name).isdigit():
            return f"expected classes, which are integers from 0 on; received {name!r}."
        if not _is_finite(weight) or weight < 0:
            return f"expected a weight of 0 or more for class {name}; received {weight!r}."
    classes = [int(name) for name in weights]
    twice = next((name for name in classes if classes.count(name) > 1), None)
    return None if twice is None else f"class {twice} is given twice."


def weights_of_outputs(loss: Spec) -> dict[str, Mapping[str, Any]]:
    """Return the class weights inside per_output, by output. Weights that are no mapping are left out."""
    terms = loss.options.items() if loss.name == PER_OUTPUT else ()
    by_output = {output: term.get("class_weight") for output, term in terms if isinstance(term, Mapping)}
    return {output: weights for output, weights in by_output.items() if isinstance(weights, Mapping) and weights}
