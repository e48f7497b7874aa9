"""Settings to try: each at a value that is not its default, with what it requires; and how they go together.

Derived from the dataclasses of config and from NEEDS; the tables here say what neither can. Used by
test_settings_are_used.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import yaml
from made_records import FEATURES

from horovod_train.config.loader import _build
from horovod_train.config.rules import NEEDS, broken_rules, holds, keys_of
from horovod_train.config.settings import Config, Seconds, Spec, Watched
from horovod_train.errors import UserError

Values = dict[str, Any]
"""Values by `section.key`."""

WITH_LIST = {**FEATURES, "words": {"type": "int64", "max_length": 3}}
"""What records hold, with a list that is empty in all of them; a class gives some."""

VALUES: dict[str, list[Any]] = {
    "data.eval": [[]],
    "data.features": [WITH_LIST],
    "data.inputs": ["image_raw"],
    "data.targets": ["label"],
    "data.weight": ["label"],
    "data.parse": ["runs_of_settings:parse"],
    "data.fold": ["1/3"],
    "data.eval_fraction": [0.25],
    "data.source": ["runs_of_settings:Images"],
    "data.dataset": ["runs_of_settings:stream"],
    "data.bucket_by_length": ["words"],
    "data.preprocess": ["runs_of_settings:preprocess"],
    "data.index_dir": ["{here}/indexes"],
    "data.stage_dir": ["{here}/stage"],
    "data.augment": [["flip"]],
    "data.global_batch_size": [16],
    "data.batch_size_per_rank": [12],
    "lr_schedule.decay": ["cosine"],
    "train.max_steps": [2],
    "train.weight_decay_exclude": [["kernel"]],
    "checkpoint.best": [{}],
    "checkpoint.best.metric": ["accuracy"],
    "checkpoint.resume": ["never"],
    "early_stopping.metric": ["accuracy"],
    "log.writers": [["runs_of_settings:Writer"]],
    "log.trackers": [["csv"]],
    "log.activations": [{"shown": "first"}],
    "log.graph_names": [{"input_data": "input"}],
    "log.profile_at_steps": [[2]],
    "device.per_rank": [2],
    "device.cut_before": [["last"]],
    "model.init_from": ["runs_of_settings:weights"],
    "model.init_exclude": ["bias"],
    "model.lora": [{"first": 2}],
    "model.freeze": ["first"],
    "model.unfreeze": [{"1": "first"}],
    "optimizer.lr_multipliers": [{"last": 0.5}],
    "loss.class_weight": [{"1": 2.0}],
    "weighted_metrics": [[{"name": "sparse_categorical_accuracy", "options": {"name": "weighted_accuracy"}}]],
    "optimizer": [{"name": "adam"}],
    "hooks": [["runs_of_settings:hook"]],
    "callbacks": [["runs_of_settings:Callback"]],
}
"""Values to try, where the type of a setting does not say one."""

FIXED = ("output_dir", "data.train", "data.eval", "model", "loss", "metrics")
"""Set in every run here, each to one value, and read."""

WITH: dict[str, Values] = {
    "data.features": {"data.inputs": "image_raw", "data.targets": "label"},
    "data.parse": {"data.inputs": "image_raw", "data.targets": "label"},
    "data.fold": {"data.eval": "{here}/data/train"},
    "data.eval_fraction": {"data.eval": "{here}/data/train"},
    "data.source": {"data.features": WITH_LIST, "data.inputs": "image_raw", "data.targets": "label"},
    "data.dataset": {"data.train": [], "data.eval": []},
    "data.bucket_by_length": {"data.features": WITH_LIST, "data.inputs": "image_raw", "data.targets": "label"},
    "data.retry_s": {"data.train": "memory://made/train"},
    "data.batch_size_per_rank": {"data.global_batch_size": None},
    "lr_schedule.scaling": {"lr_schedule.base_batch_size": 4},
    "train.synchronization=local": {"train.average_every_steps": 2},
    "train.weight_decay_1d": {"optimizer": {"name": "adamw"}},
    "train.weight_decay_exclude": {"optimizer": {"name": "adamw"}},
    "device.per_rank": {"device.cut_before": ["last"]},
    "device.cut_before": {"device.per_rank": 2},
    "weighted_metrics": {"data.weight": "label"},
}
"""What a setting, or one value of it, requires besides NEEDS."""

ELSEWHERE = {"device.memory_growth": "read where there is a GPU"}
"""Settings that a run on this machine has no use for."""

REFUSED_WHEN_BUILT = {
    ("horovod.op=adasum",): "horovod: op adasum needs MPI",
    ("data.features", "data.parse"): "data.parse: takes the place of data.features; give one of them.",
    ("data.parse", "data.augment"): "data.augment: is for inputs [height, width, channels]",
    ("optimizer", "train.weight_decay_1d"): "train.weight_decay_1d: there is no weight decay",
    ("optimizer", "train.weight_decay_exclude"): "train.weight_decay_exclude: there is no weight decay",
}
"""Single settings and pairs that only the parts of a run refuse: the beginning of the sentence."""


class Sample(NamedTuple):
    """A setting at a value that is not its default, and what it requires."""

    key: str
    value: Any
    required: Values

    @property
    def name(self) -> str:
        return f"{self.key}={json.dumps(self.value)}".replace('"', "")


def leaves(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """(key, type, field) of every setting."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        is_section = dataclasses.is_dataclass(hints[field.name]) and hints[field.name] is type(field.default)
        if is_section and "doc" not in field.metadata:
            yield from leaves(hints[field.name], f"{key}.")
        else:
            yield key, hints[field.name], field
        if isinstance(field.default, Spec) and cls is Config:
            own = leaves(type(field.default), f"{key}.")
            yield from (leaf for leaf in own if leaf[0] not in (f"{key}.name", f"{key}.options"))
        if hints[field.name] == Watched | None:
            yield from leaves(Watched, f"{key}.")


def values_of(key: str, hint: Any, field: dataclasses.Field[Any]) -> list[Any]:
    """Values to try, none of them the default."""
    if key in VALUES:
        return VALUES[key]
    default: Any = field.default
    if typing.get_origin(hint) is Literal:
        return [choice for choice in typing.get_args(hint) if choice != default]
    kinds = [kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None)]
    (kind,) = kinds
    if kind is bool:
        return [not default]
    if kind is int:
        return [(default or field.metadata["minimum"]) + 1]
    if kind in (float, Seconds):
        return [default / 2 if default else 3600.0 if kind is Seconds else 0.5]
    raise AssertionError(f"{key}: give a value to try in VALUES")


def samples() -> list[Sample]:
    found = []
    for key, hint, field in leaves():
        for value in values_of(key, hint, field) if key not in FIXED else []:
            sample = Sample(key, value, {})
            found.append(sample._replace(required=required(sample)))
    return found


def built(values: Values) -> Config:
    """Raises UserError. The rules between settings are not looked at."""
    config: Config = _build(Config, as_tree(values), "", {})
    return config


def as_tree(values: Values) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "output_dir": "{here}/run",
        "data": {"train": "{here}/data/train", "eval": "{here}/data/eval", "global_batch_size": 8},
        "model": {"name": "runs_of_settings:model"},
        "loss": {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}},
        "metrics": [{"name": "sparse_categorical_accuracy", "options": {"name": "accuracy"}}],
        "train": {"max_steps": 3},
    }
    for key, value in sorted(values.items(), key=lambda item: item[0].count(".")):
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner[section] = dict(inner.get(section) or {})
            inner = inner[section]
        inner[last] = value
    return tree


def required(sample: Sample) -> Values:
    """What a sample does not go without, by NEEDS and WITH."""
    values: Values = {**WITH.get(sample.key, {}), **WITH.get(sample.name, {})}
    if sample.key.startswith("checkpoint.best."):
        values["checkpoint.best"] = {}
    kinds = {key: (hint, field) for key, hint, field in leaves()}
    for need in NEEDS.get(sample.key, ()):
        (key, *_), (*_, wanted) = keys_of(need), need.split(" or ")[0].partition(": ")
        if holds(need, built({})):
            continue
        value = values_of(key, *kinds[key])[0] if not wanted or wanted.startswith("not ") else yaml.safe_load(wanted)
        values |= {**required(Sample(key, value, {})), key: value}
    return values


SAMPLES = samples()


def merged(chosen: Iterable[Sample]) -> Values:
    """All of them in one config: what one is asked to be wins over what another requires."""
    chosen = list(chosen)
    values: Values = {}
    for sample in chosen:
        values |= sample.required
    return values | {sample.key: sample.value for sample in chosen}


def refusal(values: Values) -> str | None:
    """What the config's checks say to these values; None where they are accepted."""
    try:
        config = built(values)
    except UserError as error:
        return str(error)
    return next((f"{key}: {problem}" for key, problem in broken_rules(config)), None)


PAIRS = [(one, two) for one, two in itertools.combinations(SAMPLES, 2) if one.key != two.key]


def is_refused_when_built(chosen: Iterable[Sample]) -> bool:
    given = {name for sample in chosen for name in (sample.key, sample.name)}
    return any(given.issuperset(names) for names in REFUSED_WHEN_BUILT)


def cover(targets: Iterable[tuple[Sample, ...]]) -> Iterator[list[Sample]]:
    """Groups of samples that go together, so that each target is in one of them, and few groups."""
    left = {frozenset(sample.name for sample in target): target for target in targets}
    while left:
        group = list(next(iter(left.values())))
        names = {sample.name for sample in group}
        gains = {s.name: sum(s.name in target for target in left) for s in SAMPLES}
        for sample in sorted(SAMPLES, key=lambda sample: -gains[sample.name]):
            grown = [*group, sample]
            is_new = sample.key not in {other.key for other in group}
            if is_new and not is_refused_when_built(grown) and refusal(merged(grown)) is None:
                group, names = grown, names | {sample.name}
        left = {name: target for name, target in left.items() if not name <= names}
        yield group
