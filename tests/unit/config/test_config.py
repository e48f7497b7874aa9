"""Config files, overrides and what they become."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from horovod_train.config.loader import as_dict, dump, load
from horovod_train.config.rules import lookup, resolve
from horovod_train.config.settings import LossSpec, MetricSpec, OptimizerSpec
from horovod_train.errors import UserError

LEAST = "data: {train: here, global_batch_size: 8}\ntrain: {epochs: 1}\n"


@pytest.fixture
def least(tmp_path: Path) -> str:
    path = tmp_path / "least.yaml"
    path.write_text(LEAST)
    return str(path)


def test_later_files_and_overrides_win(least: str, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("train: {epochs: 2, steps_per_call: 5}\nseed: 3\n")
    config, origins = load([least, str(later)], ["seed=4"])
    assert (config.train.epochs, config.train.steps_per_call, config.seed) == (2, 5, 4)
    assert origins["data.global_batch_size"] == f"{least}:1"
    assert origins["train.epochs"] == f"{later}:1"
    assert origins["seed"] == "command line"
    assert "log.every_steps" not in origins


def test_dumped_config_loads_to_the_same(least: str, tmp_path: Path) -> None:
    config, _ = load(
        [least], ["metrics=[accuracy, {name: AUC, options: {curve: PR}}]", "optimizer.options.momentum=.9"]
    )
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert load([str(again)])[0] == config


def test_printed_config_says_where_each_value_came_from(least: str) -> None:
    config, origins = load([least], ["seed=4"])
    lines = {
        line.split("#")[0].strip(): line.split("#")[1].strip()
        for line in dump(config, origins).splitlines()
        if "#" in line
    }
    assert lines["seed: 4"] == "command line"
    assert lines["global_batch_size: 8"] == f"{least}:1"
    assert lines["precision: float32"] == "default"


def test_origins_of_keys_in_quotes_and_values_of_several_lines_are_printed(least: str, tmp_path: Path) -> None:
    config, origins = load([least], ["loss.class_weight={3: 2.5}", "model.freeze=['a: b']", 'output_dir="a\\n b"'])
    text = dump(config, origins)
    assert re.search(r"'3': 2\.5 +# command line", text)
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load([str(again)])[0] == config


def test_what_yaml_takes_for_a_number_and_python_does_not_is_one_line(least: str) -> None:
    with pytest.raises(UserError, match="not a plain value: invalid literal"):
        load([least], ["seed=0x_"])


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optimizer=adam", {"optimizer": OptimizerSpec("adam")}),
        ("optimizer.options.momentum=0.9", {"optimizer": OptimizerSpec("auto", {"momentum": 0.9})}),
        ("loss.class_weight={3: 2.5}", {"loss": LossSpec("auto", {}, {"3": 2.5})}),
        ("metrics=accuracy", {"metrics": (MetricSpec("accuracy"),)}),
        ("lr_schedule.base_lr=1e-3", {"lr_schedule.base_lr": 0.001}),
        ("data.train=[a, b]", {"data.train": ("a", "b")}),
        ("train.clip_norm=1", {"train.clip_norm": 1.0}),
        ("eval.every_epochs=null", {"eval.every_epochs": None}),
    ],
)
def test_short_forms(least: str, override: str, read: dict[str, object]) -> None:
    config, _ = load([least], [override])
    for key, expected in read.items():
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        assert value == expected
        assert type(value) is type(expected)


def test_a_bare_name_keeps_its_name_beside_keys_given_later(least: str, tmp_path: Path) -> None:
    first = tmp_path / "first.yaml"
    first.write_text("loss: mean_squared_error\nmodel: mlp\n")
    config, _ = load([least, str(first)], ["loss.class_weight.1=2", "model.freeze=[hidden]"])
    assert config.loss == LossSpec("mean_squared_error", {}, {"1": 2})
    assert (config.model.name, config.model.freeze) == ("mlp", ("hidden",))


def test_another_name_given_later_leaves_behind_the_options_of_the_former(least: str, tmp_path: Path) -> None:
    first = tmp_path / "first.yaml"
    first.write_text("optimizer: {name: sgd, options: {momentum: 0.9}}\n")
    assert load([least, str(first)], ["optimizer.name=rmsprop"])[0].optimizer == OptimizerSpec("rmsprop")
    assert load([least, str(first)], ["optimizer=adam"])[0].optimizer == OptimizerSpec("adam")
    nesterov = "optimizer={name: sgd, options: {nesterov: true}}"
    assert load([least, str(first)], [nesterov])[0].optimizer == OptimizerSpec(
        "sgd", {"momentum": 0.9, "nesterov": True}
    )
    config, origins = load([least, str(first)], ["optimizer={name: lars, options: {weight_decay: 0.1}}"])
    assert config.optimizer == OptimizerSpec("lars", {"weight_decay": 0.1})
    assert "optimizer.options.momentum" not in origins


@pytest.mark.parametrize(("np", "expected"), [(1, 8), (2, 8), (3, 8)])
def test_global_batch_size_is_kept_at_any_number_of_ranks(least: str, np: int, expected: int) -> None:
    config, _ = load([least])
    assert resolve(config, np).data.global_batch_size == expected


def test_batch_size_per_rank_becomes_a_global_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: {train: here, batch_size_per_rank: 8}\ntrain: {epochs: 1}\n")
    config = resolve(load([str(path)])[0], 3)
    assert (config.data.global_batch_size, config.data.batch_size_per_rank) == (24, None)


def test_more_ranks_than_records_in_a_batch_are_refused(least: str) -> None:
    with pytest.raises(UserError, match=r"at least the number of ranks \(9\); received 8"):
        resolve(load([least])[0], 9)


def test_a_rule_broken_by_a_mapping_points_at_it_and_not_at_its_neighbours(least: str, tmp_path: Path) -> None:
    earlier, later = tmp_path / "earlier.yaml", tmp_path / "later.yaml"
    earlier.write_text("log: {every_steps: 10}\n")
    later.write_text("log:\n  activations: {y_hidden: hidden1}\n")
    with pytest.raises(
        UserError, match=r"later.yaml:2: log.activations: has no effect unless log.histograms_every_steps"
    ):
        load([least, str(earlier), str(later)])


LOCAL = ["train.synchronization=local", "train.average_every_steps=2"]


@pytest.mark.parametrize(
    "setting",
    [
        "horovod.op=sum",
        "horovod.op=adasum",
        "horovod.compression=fp16",
        "horovod.predivide=4",
        "horovod.sparse_as_dense=true",
    ],
)
def test_how_gradients_are_exchanged_is_no_setting_where_they_are_not(least: str, setting: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(
        UserError, match=f"^command line: {key}: has no effect unless train.synchronization: not local;"
    ):
        load([least], [*LOCAL, setting])
    load([least], [setting])
    load([least], [setting, "train.synchronization=stale"])
    load([least], [*LOCAL, "horovod.op=average", "horovod.cycle_time_ms=2"])


def test_as_dict_holds_plain_values_only(least: str) -> None:
    import json

    config, _ = load([least])
    assert json.loads(json.dumps(as_dict(config))) == as_dict(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("released: 2024-01-01", "4: expected what JSON can hold; 2024-01-01 is a date"),
        ("key: !!binary aGk=", "4: expected what JSON can hold; aGk= is binary data"),
        ("names: !!set {a, b}", "4: expected what JSON can hold; set"),
        ("rate: .nan", r"4: expected a finite number; received \.nan"),
        ("rates:\n  - 1.0\n  - -.inf", r"6: expected a finite number; received -\.inf"),
        ("weights: [{0: 1.0, 10: 2.0}]", "4: expected a string as key"),
        ("layers:\n  - a: 1\n    a: 2", "6: a is given twice; it was set at .*:5 already"),
        ("a: &a [*a]", "4: expected values; received one that contains itself"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_where_it_stands(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    body = "\n".join(f"    {line}" for line in text.splitlines())
    path.write_text(f"model:\n  name: mlp\n  options:\n{body}\n{LEAST}")
    with pytest.raises(UserError, match=rf"^{path}:{said}"):
        load([str(path)])


def test_shared_values_are_no_values_that_contain_themselves(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    options = "{a: &a [1], b: *a, c: &c {d: 1}, e: *c, f: [{<<: *c}]}"
    path.write_text(f"{LEAST}model: {{name: mlp, options: {options}}}\n")
    assert load([str(path)])[0].model.options == {"a": [1], "b": [1], "c": {"d": 1}, "e": {"d": 1}, "f": [{"d": 1}]}


def test_merged_keys_are_those_of_the_mapping_and_its_own_win(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    options = "{a: &a {x: 1, y: 2}, b: &b {x: 5, z: 6}, c: {<<: *a, y: 3}, d: {y: 4, <<: [*a, *b]}}"
    path.write_text(f"{LEAST}model: {{name: mlp, options: {options}}}\n")
    found = load([str(path)])[0].model.options
    assert (found["c"], found["d"]) == ({"x": 1, "y": 3}, {"x": 1, "y": 4, "z": 6})
    path.write_text(f"{LEAST}model: {{name: mlp, options: {{<<: 3}}}}\n")
    with pytest.raises(UserError, match=rf"^{path}:3: not valid YAML: expected a mapping"):
        load([str(path)])


@pytest.mark.parametrize("key", ["loss.class_weight", "model.options", "model.lora", "optimizer.options"])
def test_nothing_clears_a_mapping(least: str, key: str) -> None:
    """And leaves a section as it is."""
    given = f"{key}={{'0': 1}}"
    assert lookup(load([least], [given])[0], key)
    config, origins = load([least], [given, f"{key}={{}}", f"{key.split('.')[0]}={{}}"])
    assert lookup(config, key) == {}
    assert origins[key] == "command line"
    assert lookup(load([least], [given, f"{key.split('.')[0]}={{}}"])[0], key)


@pytest.mark.parametrize("key", ["metrics", "callbacks", "data.augment", "log.trackers", "data.eval"])
def test_null_clears_a_list(least: str, key: str) -> None:
    config, _ = load([least], [f"{key}=[a]", f"{key}=null"])
    assert (as_dict(config) if "." not in key else as_dict(config)[key.split(".")[0]])[key.split(".")[-1]] == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lr_schedule.base_lr=.nan", "finite number; received .nan"),
        ("lr_schedule.base_lr=.inf", "finite number; received .inf"),
        ("lr_schedule.base_lr=inf", "expected a number; received 'inf'"),
        ("lr_schedule.base_lr=1.0e+999", "finite number; received 1.0e+999"),
        ("horovod.fusion_threshold_mb=.inf", "finite number; received .inf"),
        ("horovod.fusion_threshold_mb=1e30", "must be at most 1000000; received 1e+30"),
        ("seed=4294967296", "must be at most 4294967295; received 4294967296"),
        ("train.epochs=100000000000000000000", "must be at most 9007199254740992"),
    ],
)
def test_numbers_that_no_run_can_take_are_refused(least: str, override: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        load([least], [override])
    assert said in str(raised.value)
    assert override.partition("=")[0] in str(raised.value)


def test_the_largest_seed_is_taken(least: str) -> None:
    assert load([least], ["seed=4294967295"])[0].seed == 2**32 - 1


def test_features_with_slashes_in_their_names_can_be_set_on_the_command_line(least: str) -> None:
    config, _ = load([least], ["data.features.image/encoded.resize=crop", "data.features.image/class-label.classes=3"])
    assert config.data.features == {"image/encoded": {"resize": "crop"}, "image/class-label": {"classes": 3}}
    for wrong in ("data..train=x", "=x", "data.train", ".data=x", "data train=x"):
        with pytest.raises(UserError, match=r"expected section\.key=value"):
            load([least], [wrong])
