"""A model begins with trained weights and trains some of them: digits 0–4, and then 5–9 with a new head."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import yaml
from conftest import Finished, metrics_of, rank_environment, summary_of, train
from sklearn.datasets import load_digits

PROTECTED = ["first.kernel", "first.bias", "norm.gamma", "norm.beta", "norm.moving_mean", "norm.moving_variance"]
FREEZE = "model.freeze=['^first/', '^norm/']"
NEW_HEAD = "model.options={head: new_head}"
STEPS_OF_EPOCH = 12


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits 0–4 and 5–9, run.yaml, and a run and files with weights trained on 0–4."""
    folder = tmp_path_factory.mktemp("digits")
    x, y = load_digits(return_X_y=True)
    for name, mine, first in (("low", y < 5, 0), ("high", y >= 5, 5)):
        arrays = {"x": (x[mine] / 16).astype(np.float32)[:384], "y": (y[mine] - first)[:384]}
        np.savez(folder / f"{name}.npz", **arrays)
        words = ["--file", folder / f"{name}.npz", "--inputs", "x", "--targets", "y", "--out", folder / name]
        assert train(["prepare", "npz", *words]).returncode == 0
    config = {
        "data": {"train": str(folder / "low/train"), "eval": str(folder / "low/train"), "global_batch_size": 32},
        "model": "user_models:small_digits",
        "loss": {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}},
        "metrics": [{"name": "sparse_categorical_accuracy", "options": {"name": "accuracy"}}],
        "optimizer": {"name": "sgd", "options": {"momentum": 0.9}},
        "lr_schedule": {"base_lr": 0.1},
        "train": {"epochs": 3},
        "log": {"tensorboard": False, "every_steps": 4},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    trained = train(["--config", folder / "run.yaml", "--output-dir", folder / "low-run"], launcher="mpirun", np=2)
    assert trained.returncode == 0, trained.text
    assert train(["export", folder / "low-run", "--out", folder / "low.keras"]).returncode == 0
    (folder / "text.keras").write_text("these are no weights")
    (folder / "text.weights.h5").write_text("these are no weights")
    return folder


Start = Callable[..., Finished]


@pytest.fixture
def start(here: Path, tmp_path: Path) -> Start:
    def start_run(words: list[Any], *, np_: int = 1, out: str = "run", command: tuple[str, ...] = ()) -> Finished:
        launched: dict[str, Any] = {"launcher": "mpirun", "np": np_} if np_ > 1 else {}
        data = [f"data.train={here / 'high/train'}", f"data.eval={here / 'high/train'}"]
        environment = rank_environment() | {"USERS_FILE": str(here / "low.keras")}
        given = ["--config", here / "run.yaml", *data, *words, "--output-dir", tmp_path / out]
        return train([*command, *given], environment=environment, fresh=False, **launched)

    return start_run


def done(finished: Finished) -> str:
    assert finished.returncode == 0, finished.text
    return finished.stdout


def weights(run_dir: Path, rank: int, step: int) -> dict[str, np.ndarray]:
    with np.load(run_dir / f"weights-{rank}-{step}.npz") as found:
        return dict(found)


@pytest.fixture(scope="module")
def before(here: Path) -> dict[str, np.ndarray]:
    """The weights trained on 0–4. Those of BatchNormalization are the mean over the ranks, as in the checkpoint."""
    model = keras.saving.load_model(here / "low.keras")
    return {weight.path.replace("/", "."): weight.numpy() for weight in model.weights}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], names: list[str]) -> list[bool]:
    return [one[name].tobytes() == other[name].tobytes() for name in names]


@pytest.mark.long
def test_frozen_weights_are_bit_equal_before_and_after_on_all_ranks(
    start: Start, here: Path, tmp_path: Path, before: dict[str, np.ndarray]
) -> None:
    words = [f"model.init_from={here / 'low-run'}", FREEZE, NEW_HEAD, "hooks=user_hooks:keep_weights_every_step"]
    said = done(start(words, np_=2))
    assert "8 weights taken: first/kernel, first/bias, norm/gamma, norm/beta" in said
    assert "2 left: head/bias, head/kernel; 2 new: new_head/kernel, new_head/bias" in said
    for rank in (0, 1):
        for step in (1, 3 * STEPS_OF_EPOCH):
            assert all(same(before, weights(tmp_path / "run", rank, step), PROTECTED))
        changed = ["second.kernel", "second.bias"]
        assert not any(same(before, weights(tmp_path / "run", rank, 3 * STEPS_OF_EPOCH), changed))
    rows = metrics_of(tmp_path / "run", "eval")
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.exhaustive
def test_without_freezing_they_change(start: Start, here: Path, tmp_path: Path, before: dict[str, np.ndarray]) -> None:
    done(start([f"model.init_from={here / 'low-run'}", NEW_HEAD, "hooks=user_hooks:keep_weights"]))
    assert not any(same(before, weights(tmp_path / "run", 0, 3 * STEPS_OF_EPOCH), PROTECTED))


@pytest.mark.long
@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this Keras has none")
def test_an_optimizer_whose_slots_begin_as_weights_begins_with_those_given(
    start: Start, here: Path, tmp_path: Path, before: dict[str, np.ndarray]
) -> None:
    """After a step of a tiny rate weights are what the slots say."""
    optimizer = ["optimizer={name: ScheduleFreeAdamW}", "lr_schedule.base_lr=1.e-6", "train.max_steps=1"]
    done(
        start([f"model.init_from={here / 'low-run'}", NEW_HEAD, *optimizer, "hooks=user_hooks:keep_weights_every_step"])
    )
    found = weights(tmp_path / "run", 0, 1)
    assert all(np.allclose(found[name], before[name], atol=1e-5) for name in ("first.kernel", "second.kernel"))


@pytest.mark.exhaustive
def test_the_same_weights_come_from_a_run_from_files_and_from_a_function(
    start: Start, here: Path, tmp_path: Path
) -> None:
    keras.saving.load_model(here / "low.keras").save_weights(here / "low.weights.h5")
    sources = [
        here / "low-run",
        here / "low.keras",
        here / "low.weights.h5",
        "user_models:loaded_digits",
        "user_models:arrays_of_digits",
    ]
    found = []
    for number, source in enumerate(sources):
        said = done(start([f"model.init_from={source}", NEW_HEAD, "train.max_steps=2"], out=f"{number}"))
        assert "8 weights taken" in said
        found.append(summary_of(tmp_path / f"{number}")["weights_sha256"])
    done(start([NEW_HEAD, "train.max_steps=2"], out="none"))
    assert len(set(found)) == 1
    assert summary_of(tmp_path / "none")["weights_sha256"] not in found


@pytest.mark.long
def test_a_run_that_resumes_does_not_read_its_source_again(start: Start, here: Path, tmp_path: Path) -> None:
    source = tmp_path / "gone.keras"
    shutil.copy(here / "low.keras", source)
    words = [f"model.init_from={source}", NEW_HEAD, "train.ema_decay=0.9"]
    done(start(words, out="whole"))
    done(start([*words, "train.epochs=1"], out="parts"))
    source.unlink()
    done(start(words, out="parts"))
    shas = [summary_of(tmp_path / name)["weights_sha256"] for name in ("whole", "parts")]
    assert shas[0] == shas[1]
    assert "not those of" in done(start(words, out="parts", command=("plan",)))


@pytest.mark.exhaustive
def test_unfrozen_weights_train_from_their_epoch_on_and_a_resume_changes_nothing(
    start: Start, here: Path, tmp_path: Path, before: dict[str, np.ndarray]
) -> None:
    """Stopped at the end of the first epoch, where they are unfrozen, and in the middle of the second."""
    words = [f"model.init_from={here / 'low.keras'}", FREEZE, "model.unfreeze={1: '^first/'}", NEW_HEAD]
    words += ["train.ema_decay=0.9", "hooks=user_hooks:keep_weights_every_step", "checkpoint.every_steps=4"]
    words += ["train.epochs=2"]
    histograms = ["log.tensorboard=true", "log.histograms_every_steps=6"]  # before and after; they change nothing
    said = done(start([*words, *histograms], np_=2, out="whole"))
    assert "after epoch 1: 2 more weights are trained: first/bias, first/kernel" in said
    for rank in (0, 1):
        at_epoch, later = (weights(tmp_path / "whole", rank, STEPS_OF_EPOCH + more) for more in (0, 1))
        assert all(same(before, at_epoch, PROTECTED))
        assert same(before, later, PROTECTED) == [False, False, True, True, True, True]
    for steps in (STEPS_OF_EPOCH, STEPS_OF_EPOCH + 4):
        done(start([*words, f"train.max_steps={steps}"], np_=2, out="parts"))
    done(start(words, np_=2, out="parts"))
    shas = [summary_of(tmp_path / name)["weights_sha256"] for name in ("whole", "parts")]
    assert shas[0] == shas[1]


@pytest.mark.long
def test_rates_are_multiplied_by_the_first_pattern_that_matches(start: Start, tmp_path: Path) -> None:
    words = ["optimizer=sgd", "train.max_steps=2", "hooks=user_hooks:keep_weights_every_step"]
    plain = ["model.options={head: head}", *words]
    done(start(plain, out="plain"))
    done(start([*plain, "optimizer.lr_multipliers={first/kernel: 0.1, first: 2}"], out="multiplied"))
    done(start([*plain, "lr_schedule.base_lr=0"], out="still"))
    origin, one, other = (weights(tmp_path / name, 0, 1) for name in ("still", "plain", "multiplied"))
    for name, factor in {"first.kernel": 0.1, "first.bias": 2.0, "second.kernel": 1.0, "head.bias": 1.0}.items():
        moved, expected = other[name] - origin[name], factor * (one[name] - origin[name])
        assert np.abs(expected).max() > 0
        assert np.allclose(moved, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.long
def test_lora_trains_what_it_adds_and_leaves_the_kernels(
    start: Start, here: Path, tmp_path: Path, before: dict[str, np.ndarray]
) -> None:
    words = [f"model.init_from={here / 'low-run'}", "model.lora={'first|second': 2}", NEW_HEAD]
    said = done(start([*words, FREEZE, "hooks=user_hooks:keep_weights_every_step"], np_=2))
    assert "6 new: first/lora_kernel_a" in said
    for rank in (0, 1):
        first, last = (weights(tmp_path / "run", rank, step) for step in (1, 3 * STEPS_OF_EPOCH))
        assert all(same(before, last, [*PROTECTED, "second.kernel"]))
        assert not any(same(first, last, ["first.lora_kernel_a", "second.lora_kernel_b", "second.bias"]))
    evaluated = train(["evaluate", tmp_path / "run"])
    assert evaluated.returncode == 0, evaluated.text
    exported = train(["export", tmp_path / "run", "--out", tmp_path / "merged.keras"])  # compares outputs
    assert exported.returncode == 0, exported.text


WRONG: dict[str, tuple[list[str], str]] = {
    "no such file": (
        ["model.init_from={here}/no.keras"],
        "no.keras: cannot be read as a file of Keras 3: No such file",
    ),
    "no Keras file": (
        ["model.init_from={here}/text.keras"],
        "text.keras: cannot be read as a file of Keras 3: File is",
    ),
    "no weights file": (["model.init_from={here}/text.weights.h5"], "text.weights.h5: cannot be read as a file of"),
    "no run": (
        ["model.init_from={here}/high"],
        "model.init_from: no checkpoint at {here}/high; expected a run directory",
    ),
    "no function": (["model.init_from=user_models:nothing"], "model.init_from: user_models has no 'nothing'"),
    "a function that gives no weights": (
        ["model.init_from=user_models:not_a_model"],
        "user_models:not_a_model must return a keras.Model or arrays by path; it returned int.",
    ),
    "another shape": (
        ["model.init_from={here}/low.keras", "model.options.classes=7"],
        "head/kernel has shape [8, 5] there and [8, 7] in the model. Give the layer another name, or leave it as it is",
    ),
    "another shape in a run": (
        ["model.init_from={here}/low-run", "model.options.classes=7"],
        "head/kernel has shape [8, 5] there and [8, 7] in the model.",
    ),
    "nothing in common": (
        ["model={{name: user_models:foreign_digits, init_from: {here}/low.keras}}"],
        "no weight of it is one of the model's. It has first/0, first/1",
    ),
    "a source besides a checkpoint": (
        ["model.init_from={here}/low.keras", "checkpoint.resume={here}/low-run"],
        "model.init_from: has no effect with checkpoint.resume: PATH",
    ),
    "exclude without a source": (
        ["model.init_exclude=head"],
        "model.init_exclude: has no effect unless model.init_from",
    ),
    "exclude of nothing": (
        ["model.init_from={here}/low.keras", "model.init_exclude=tail"],
        "model.init_exclude[0]: 'tail' is in none of first/kernel, first/bias",
    ),
    "exclude by no regular expression": (
        ["model.init_from={here}/low.keras", "model.init_exclude='['"],
        "model.init_exclude[0]: '[' is no regular expression",
    ),
    "freeze of nothing": (["model.freeze=fist"], "model.freeze: 'fist' is in none of first/kernel, first/bias"),
    "no regular expression": (["model.freeze='('"], "model.freeze: '(' is no regular expression"),
    "everything frozen": (["model.freeze=."], "model.freeze: . leaves nothing to train at the start."),
    "unfreeze without freeze": (["model.unfreeze={1: first}"], "model.unfreeze: has no effect unless model.freeze"),
    "unfreeze after the end": (
        ["model.freeze=first", "model.unfreeze={3: first}"],
        "model.unfreeze.3: has no effect: the run ends after train.epochs, 3.",
    ),
    "unfreeze of what is not frozen": (
        ["model.freeze=first", "model.unfreeze={1: second}"],
        "model.unfreeze.1: 'second' is in none of first/bias, first/kernel.",
    ),
    "unfreeze at no epoch": (
        ["model.freeze=first", "model.unfreeze={soon: first}"],
        "model.unfreeze: expected complete epochs, 1 or more; received 'soon'.",
    ),
    "unfreeze with late gradients": (
        ["model.freeze=first", "model.unfreeze={1: first}", "train.synchronization=stale"],
        "model.unfreeze: has no effect unless train.synchronization: every_step",
    ),
    "no rank": (["model.lora={first: 0}"], "model.lora.first: expected a rank of 1 or more; received 0."),
    "LoRA of nothing": (["model.lora={norm: 2}"], "model.lora.norm: 'norm' is in none of first, second, head."),
    "LoRA in stages": (
        ["model.lora={first: 2}", "device.cut_before=second", "device.per_rank=2"],
        "model.lora: does not go with device.cut_before",
    ),
    "no factor": (
        ["optimizer.lr_multipliers={first: 0}"],
        "optimizer.lr_multipliers.first: expected a factor above 0; received 0. Weights that are not to change: model.",
    ),
    "a factor in words": (["optimizer.lr_multipliers={first: half}"], "expected a factor above 0; received 'half'."),
    "a factor of nothing": (
        ["optimizer.lr_multipliers={fist: 0.1}"],
        "optimizer.lr_multipliers.fist: 'fist' is in none of first/kernel",
    ),
}


ONE_MORE = {"no Keras file", "no weights file", "another shape in a run", "exclude by no regular expression"}
ONE_MORE |= {"no regular expression", "LoRA of nothing", "a factor in words", "a factor of nothing"}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n in ONE_MORE)) for n in WRONG])
def test_a_mistake_is_one_line_before_training(start: Start, here: Path, name: str) -> None:
    words, expected = WRONG[name]
    finished = start([word.format(here=here) if "{here}" in word else word for word in words])
    assert finished.returncode == 2, finished.text
    (line,) = finished.stderr.splitlines()
    assert expected.replace("{here}", str(here)) in line


@pytest.mark.long
def test_a_head_of_another_shape_may_be_left_as_it_is(start: Start, here: Path) -> None:
    words = [f"model.init_from={here / 'low.keras'}", "model.options.classes=7", "model.init_exclude=^head/"]
    said = done(start([*words, "train.max_steps=1"]))
    assert "2 left: head/kernel, head/bias; 2 new: head/kernel, head/bias" in said


@pytest.mark.long
def test_plan_says_what_is_taken_frozen_and_multiplied(start: Start, here: Path) -> None:
    words = [f"model.init_from={here / 'low.keras'}", FREEZE, "model.unfreeze={1: '^first/'}", NEW_HEAD]
    words += ["model.lora={second: 2}", "optimizer.lr_multipliers={new_head: 2}"]
    said = " ".join(done(start(words, command=("plan",))).split())
    assert "low.keras: 8 weights taken: first/kernel" in said
    assert "frozen 6 weights: first/bias" in said
    assert "after epoch 1 trained: first/bias, first/kernel" in said
    assert "LoRA second/lora_kernel_a, second/lora_kernel_b" in said
    assert "rates new_head × 2" in said
    shown = yaml.safe_load(done(start([*words, "--print-config"])))
    assert shown["model"]["freeze"] == ["^first/", "^norm/"]
    assert shown["optimizer"]["lr_multipliers"] == {"new_head": 2}
