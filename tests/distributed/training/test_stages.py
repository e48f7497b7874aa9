"""Stages of a model on several devices of each rank, and several ranks. Placement is looked up, not assumed."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import PROJECT, Finished, RankFacts, metrics_of, run_process, summary_of, train

pytestmark = pytest.mark.long
WAYS = [pytest.param("none", 1, marks=pytest.mark.exhaustive), ("srun", 2)]


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_weights_slots_and_averages_lie_on_their_stages_device(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("staged", launcher, np):
        assert facts["lines"] == ["weights on CPU:0: first, norm", "weights on CPU:1: second, out"]
        assert facts["lines_uncut"] == ["weights on CPU:0: first, norm, second, out"]
        kept = {name: device for name, device in facts["devices"].items() if re.search("momentum|velocity|^ema", name)}
        assert len(kept) == 3 * 8  # Adam's two slots and the moving average of each trainable weight
        for name, device in kept.items():
            assert device == ("CPU:1" if re.search("/(second|out)[_/]", name) else "CPU:0")


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_forward_and_backward_run_on_their_stages_device(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("staged", launcher, np):
        assert facts["traced"] == {
            "first forward": ["/device:CPU:0"],
            "second forward": ["/device:CPU:1"],
            "out forward": ["/device:CPU:1"],
            "first backward": ["/device:CPU:0"],
            "second backward": ["/device:CPU:1"] * 2,
            "out backward": ["/device:CPU:1"] * 2,
        }


def test_without_following_their_inputs_gradients_have_no_device(rank_facts: RankFacts) -> None:
    """The negative of the above: device scopes around layers alone leave the backward pass to the first device."""
    facts = rank_facts("staged", "srun", 2)[0]
    assert facts["traced_without_following"]["second forward"] == ["/device:CPU:1"]
    assert facts["traced_without_following"]["second backward"] == [""] * 2


def test_a_device_that_is_not_there_shows(rank_facts: RankFacts) -> None:
    """The run compares these lines with device.per_rank, so that soft placement hides nothing."""
    facts = rank_facts("staged", "srun", 2)[0]
    assert len(facts["lines_of_a_missing_device"]) == 1


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_a_cut_model_trains_like_the_uncut(rank_facts: RankFacts, launcher: str, np: int) -> None:
    """Dropout, BatchNorm, a clipped Adam, tensors that cross the cut twice; slots and counters too."""
    for facts in rank_facts("staged", launcher, np):
        assert all(facts["same_at_first"])
        assert facts["names"]["cut"] == facts["names"]["uncut"]
        assert facts["difference"] < 1e-6
        assert facts["difference_accumulated"] < 1e-6
        assert facts["difference_synchronised"] < 1e-6
        assert np == 1 or facts["synchronised_is_another"] > 1e-3
        assert facts["moved"] > 1e-2


def test_a_mask_crosses_the_cut(rank_facts: RankFacts) -> None:
    facts = rank_facts("staged", "srun", 2)[0]
    assert facts["masked_cut"] == facts["masked_uncut"]
    assert facts["masked_cut"] != facts["unmasked"]


def test_a_saved_cut_model_is_a_plain_one(rank_facts: RankFacts, tmp_path: Path) -> None:
    facts = rank_facts("staged", "srun", 2)[0]
    script = f"""
import sys
sys.modules["horovod"] = sys.modules["horovod_train"] = None  # an import of them would raise
import keras, numpy as np
model = keras.saving.load_model({facts["saved"]!r})
print(*model.predict(np.ones((2, 6), np.float32), verbose=0).ravel())
"""
    finished = run_process([sys.executable, "-c", script], cwd=tmp_path)
    assert finished.returncode == 0, finished.text
    expected = [value for row in facts["prediction"] for value in row]
    assert [float(word) for word in finished.stdout.split()] == pytest.approx(expected, rel=1e-5)


MLP = ["--config", PROJECT / "configs" / "mlp_model_parallel.yaml"]
UNCUT = ["device.per_rank=1", "device.cut_before=[]"]


@pytest.fixture(scope="session")
def mlp_samples(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Where the samples of the configs mlp_* lie, as overrides of a config."""
    folder = tmp_path_factory.mktemp("data") / "mlp"
    prepared = train(["prepare", "mlp-samples", "--out", folder])
    assert prepared.returncode == 0, prepared.text
    return [f"data.train={folder / 'train'}", f"data.eval={folder / 'eval'}"]


def run_mlp(
    run_dir: Path, overrides: list[str], *, launcher: str = "none", np: int = 1, max_steps: int = 120
) -> tuple[Finished, Path]:
    arguments = [*MLP, *overrides, f"train.max_steps={max_steps}", "log.every_steps=10", "--output-dir", run_dir]
    return train(arguments, launcher=launcher, np=np), run_dir


@pytest.fixture(scope="session")
def cut_run(mlp_samples: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """mlp_model_parallel on two ranks, with the device of every operation."""
    run_dir = tmp_path_factory.mktemp("mlp_model_parallel") / "cut"
    return run_mlp(run_dir, [*mlp_samples, "device.log_placement=true"], launcher="horovodrun", np=2)


@pytest.fixture(scope="session")
def uncut_run(mlp_samples: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """The same model whole, on one rank that takes the batches of both."""
    overrides = [*mlp_samples, *UNCUT, "device.log_placement=true", "data.batch_size_per_rank=200"]
    return run_mlp(tmp_path_factory.mktemp("mlp_model_parallel") / "uncut", overrides)


def products(stdout: str) -> set[tuple[str, str]]:
    """(layer and pass, device) of each matrix product of the training loop, as TensorFlow's placer put it."""
    line = re.compile(
        r"^(?P<path>\S*/)(?P<layer>hidden1|out_layer)\w*/MatMul\S*: \(MatMul\): \S*device:(?P<device>\w+:\d+)", re.M
    )

    def name(match: re.Match[str]) -> str:
        return f"{match['layer']} {'backward' if 'gradient_tape/' in match['path'] else 'forward'}"

    return {(name(match), match["device"]) for match in line.finditer(stdout)}


@pytest.mark.exhaustive
def test_s3_runs_its_stages_on_different_devices_of_every_rank(cut_run: tuple[Finished, Path]) -> None:
    finished, _ = cut_run
    assert finished.returncode == 0, finished.text
    assert "uses CPU as 2 devices" in finished.stdout
    assert "weights on CPU:0: hidden1\n" in finished.stdout
    assert "weights on CPU:1: out_layer\n" in finished.stdout
    for rank in (0, 1):
        own = [line for line in finished.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert products("\n".join(own)) == {
            ("hidden1 forward", "CPU:0"),
            ("hidden1 backward", "CPU:0"),
            ("out_layer forward", "CPU:1"),
            ("out_layer backward", "CPU:1"),
        }


@pytest.mark.exhaustive
def test_s3_uncut_runs_on_one_device(uncut_run: tuple[Finished, Path]) -> None:
    finished, _ = uncut_run
    assert finished.returncode == 0, finished.text
    found = products(finished.stdout)
    assert len(found) == 4
    assert {device for _, device in found} == {"CPU:0"}


@pytest.mark.exhaustive
def test_s3_on_two_ranks_trains_like_the_whole_model_on_one(
    cut_run: tuple[Finished, Path], uncut_run: tuple[Finished, Path]
) -> None:
    cut, uncut = ([row["loss"] for row in metrics_of(run_dir, "train")] for _, run_dir in (cut_run, uncut_run))
    assert len(cut) == 12
    assert cut == pytest.approx(uncut, rel=1e-6)
    assert cut[-1] < cut[0]


@pytest.mark.exhaustive
def test_a_checkpoint_of_stages_goes_on_uncut_on_one_rank(
    cut_run: tuple[Finished, Path], mlp_samples: list[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(cut_run[1], run_dir)
    finished, _ = run_mlp(run_dir, [*mlp_samples, *UNCUT, "data.batch_size_per_rank=200"], max_steps=130)
    assert finished.returncode == 0, finished.text
    assert "at step 120" in finished.stdout
    assert summary_of(run_dir)["steps"] == 130


def test_devices_without_a_stage_are_refused_before_training(mlp_samples: list[str], tmp_path: Path) -> None:
    finished, run_dir = run_mlp(tmp_path / "run", [*mlp_samples, "device.cut_before=[]"])
    assert finished.returncode == 2, finished.text
    assert "device.per_rank: 2 devices, but the model has weights on CPU:0: hidden1, out_layer. Cut" in finished.stderr
    assert not (run_dir / "metrics.jsonl").exists()
