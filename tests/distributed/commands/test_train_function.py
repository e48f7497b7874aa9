"""`horovod_train.train`: in this process, twice; on two ranks from a notebook; and what it refuses, before any rank."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS, PROJECT, rank_environment, run_process, warm_python

import horovod_train
from horovod_train import train_function
from horovod_train.errors import UserError

BASE = """
data: {{train: {data}/train, eval: {data}/eval, global_batch_size: 96}}
model: user_models:small
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
lr_schedule: {{base_lr: 0.1}}
log: {{tensorboard: false}}
"""


def test_runs_in_one_process_resume_and_leave_it_as_it_was(digits: Path, tmp_path: Path) -> None:
    """Keras numbers names by process, and the names of variables in checkpoints are Keras'.

    A third one, with another setting, has nothing left to do: it says so, and leaves the files of the second. So has a
    fourth, on a rank of its own.
    """
    (tmp_path / "config.yaml").write_text(BASE.format(data=digits) + "precision: mixed_bfloat16\n")
    program = str(PROGRAMS / "trained_twice.py")
    finished = run_process([*warm_python(), program, str(tmp_path), str(tmp_path / "config.yaml")])
    assert finished.returncode == 0, finished.text
    found = json.loads((tmp_path / "found.json").read_text())
    first, second = found["runs"]
    assert (first["steps"], second["steps"]) == (15, 30)
    assert first["weights"] != second["weights"]
    assert "resumed from" in finished.stdout
    begun = [line for line in finished.stdout.splitlines() if line.startswith(("changed since", "nothing is left"))]
    assert begun == [
        "changed since this checkpoint: train.epochs 1 → 2",
        "changed since this checkpoint: train.l2 0.0 → 0.1",
        *["nothing is left to train: the run has come to its end at step 30"] * 2,
    ]
    assert found["kept"] == ["config.yaml", "summary.json"]
    assert found["variables"] == []
    assert found["evaluated"] == 0, finished.text
    assert found["horovod"]  # which the caller had started
    left = found["left"]  # after three runs in this process, and one on a rank of its own
    assert len(left) == 4
    assert {(one["policy"], one["same_states"]) for one in left} == {("float32", True)}
    assert len({one["drawn"] for one in left}) == 4
    assert len({one["name"] for one in left}) == 4


@pytest.mark.exhaustive
def test_the_notebook_trains_predicts_and_calls_a_function_on_two_ranks(tmp_path: Path) -> None:
    """Its cells in one process without a file, as a kernel runs them."""
    cells = json.loads((PROJECT / "examples" / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = "\n".join([*code[:-1], "print(trained.summary['eval']['accuracy'], trained.summary['ranks'])", code[-1]])
    last = script.rpartition("\n")[2]
    script = f"{script.removesuffix(last)}print('means', {last})"
    environment = rank_environment()
    finished = run_process([sys.executable, "-c", script], cwd=tmp_path, environment=environment)
    assert finished.returncode == 0, finished.text
    lines = finished.stdout.splitlines()
    accuracy, ranks = next(line.split() for line in lines if line.startswith("0.") and len(line.split()) == 2)
    assert (float(accuracy) > 0.8, ranks) == (True, "2")
    assert "means [1.5, 1.5]" in lines
    assert any("2 rank(s) on 1 host(s)" in line for line in lines)  # what ranks print is shown in the notebook


REFUSED: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "a misspelt key": ({"optimiser": "sgd"}, None, "optimiser: unknown key; did you mean optimizer?"),
    "no folder": ({"data": {"train": "t.csv", "global_batch_size": 8}, "train": {"epochs": 1}}, None, "output_dir"),
    "no data": (
        {"output_dir": "runs/a", "data": {"train": "nowhere", "global_batch_size": 8}, "train": {"epochs": 1}},
        None,
        "nowhere does not exist",
    ),
    "no rank": (
        {"output_dir": "runs/a", "data": {"train": "t.csv", "global_batch_size": 8}, "train": {"epochs": 1}},
        0,
        "np must be at least 1; received 0",
    ),
    "an object": ({"model": object()}, None, "expected what YAML can hold"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_raised_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, np_, said = REFUSED[name]
    with pytest.raises(UserError, match=said):
        horovod_train.train(config, np=np_)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("np_", "more"), [(None, ""), (2, ", and not as its ranks import it")])
def test_a_module_that_was_edited_after_its_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, np_: int | None, more: str
) -> None:
    """A notebook keeps the functions that it has, and other processes import what the file holds now."""
    file, name = tmp_path / f"edited{np_}.py", f"edited{np_}"
    file.write_text("def build(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    data = {"train": "nowhere", "global_batch_size": 8}
    config = {"model": f"{name}:build", "output_dir": str(tmp_path / "run"), "data": data, "train": {"epochs": 1}}

    def train() -> None:
        with pytest.raises(UserError, match="nowhere does not exist"):
            horovod_train.train(config, np=np_)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train()
        train()
    file.write_text("def build(): return 12\n")
    with pytest.warns(UserWarning, match=f"{name} has been edited since .* as it was then{more}. Call importlib.rel"):
        train()
    importlib.reload(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train()


HAS_COMPUTED = """
import sys
import tensorflow as tf
import horovod_train
tf.zeros(1) + 1
for word in ("device.intra_op_threads=3", "device.per_rank=2"):
    try:
        horovod_train.train(sys.argv[1], "train.epochs=1", word)
    except horovod_train.errors.UserError as error:
        print(word, error)
"""


@pytest.mark.long
def test_a_process_that_has_used_tensorflow_is_told_to_train_first(digits: Path, tmp_path: Path) -> None:
    """Whether threads are set too late, or devices, as on a GPU: TensorFlow has another text for each."""
    (tmp_path / "config.yaml").write_text(f"{BASE.format(data=digits)}output_dir: {tmp_path}/run\n")
    (tmp_path / "has_computed.py").write_text(HAS_COMPUTED)
    finished = run_process([*warm_python(), str(tmp_path / "has_computed.py"), str(tmp_path / "config.yaml")])
    assert finished.returncode == 0, finished.text
    said = "train: this process has used TensorFlow already, so its threads and devices cannot be set any more."
    assert [line.partition(" ")[2][: len(said)] for line in finished.stdout.splitlines()] == [said, said]


NETS = """
import keras
noise = {noise}
def build():
    return keras.Sequential([keras.Input((28, 28, 1)), noise, keras.layers.Flatten(), keras.layers.Dense(10)])
"""
NOTEBOOK = """
import sys
import horovod_train
import nets
{look}
trained = horovod_train.train(sys.argv[1], "train.epochs=1", np=1)
print("trained", trained.summary["steps"], trained.model.weights[0].path)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("noise", "look", "path"),
    [
        ("keras.layers.Identity()", "nets.build().summary()", "sequential/dense/kernel"),
        ("keras.Sequential([keras.layers.GaussianNoise(0.1)])", "", "sequential_1/dense/kernel"),
    ],
    ids=["a model was built before", "its module has layers"],
)
def test_what_ranks_have_trained_is_loaded_into_a_process_that_has_models(
    digits: Path, tmp_path: Path, noise: str, look: str, path: str
) -> None:
    """Keras numbers names by process: after another model, this one has other names here than on the ranks."""
    config = BASE.format(data=digits).replace("user_models:small", "nets:build") + f"output_dir: {tmp_path}/run\n"
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "nets.py").write_text(NETS.format(noise=noise))
    (tmp_path / "notebook.py").write_text(NOTEBOOK.format(look=look))
    words = [str(tmp_path / "notebook.py"), str(tmp_path / "config.yaml")]
    finished = run_process([*warm_python(), *words], cwd=tmp_path)
    assert finished.returncode == 0, finished.text
    assert f"trained 15 {path}\n" in finished.stdout, finished.text


@pytest.mark.long
def test_a_call_without_its_guard_says_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import horovod_train\nhorovod_train.run(print, np=2, use_gloo=True)\n")
    finished = run_process([sys.executable, str(script)])
    assert finished.returncode != 0
    assert 'if __name__ == "__main__":' in finished.text


def test_the_package_shows_what_it_has() -> None:
    assert {"train", "run", "keras", "tensorflow", "errors"} <= {*dir(horovod_train)}
    with pytest.raises(AttributeError, match="it has Trained"):
        horovod_train.trian  # noqa: B018
    script = "import sys, horovod_train; horovod_train.train; print('tensorflow' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found == "False\n"


SAVES_ON_SIGTERM = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
print("a hook prints", flush=True)
open(sys.argv[1], "w").close()
print("saved", flush=True)
"""


def test_an_interrupted_cell_shows_how_its_ranks_save_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if len(shown) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_function, "to_stdout", show)
    with pytest.raises(KeyboardInterrupt):
        train_function._shown([sys.executable, "-c", SAVES_ON_SIGTERM, str(tmp_path / "checkpoint")], os.environ)
    assert shown == ["ready", "a hook prints", "saved"]
    assert (tmp_path / "checkpoint").exists()
