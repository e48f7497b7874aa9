"""What a user gets wrong is said in one line, with exit code 2, before anything is trained."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import train, without_tensorflow

CONFIG = """
data: {{train: {data}/train, eval: {data}/eval, global_batch_size: 96}}
model: user_models:small
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
lr_schedule: {{base_lr: 0.1}}
train: {{max_steps: 2}}
"""

BEFORE_TENSORFLOW = {
    "unknown key": (["trian.epochs=3"], "command line: trian: unknown key; did you mean train"),
    "wrong type": (["train.epochs=many"], "train.epochs: expected an int; received 'many'"),
    "number for a switch": (["data.shuffle=1"], "data.shuffle: expected true or false; received 1"),
    "not among the choices": (["horovod.op=mean"], "horovod.op: expected one of average, sum, adasum"),
    "not an override": (["epochs"], "argument 'epochs': expected section.key=value"),
    "both batch sizes": (["data.batch_size_per_rank=8"], "data.batch_size_per_rank: give either this or"),
    "scaling without a base": (["lr_schedule.scaling=linear"], "lr_schedule.base_batch_size: is required"),
    "profile of the first step": (["log.profile_at_steps=[1]"], "log.profile_at_steps: must be 2 or later"),
    "config is a folder": (["--config", "."], "--config .: cannot be read: Is a directory"),
    "broken yaml": (["--config", "{here}/broken.yaml"], "broken.yaml:3: not valid YAML"),
    "key twice": (["--config", "{here}/twice.yaml"], "twice.yaml:2: seed is given twice; it was set at"),
    "no such data": (["data.train={here}/nothing"], "data.train: {here}/nothing"),
    "empty folder": (["data.train={here}/empty"], "data.train: {here}/empty"),
    "not a TFRecord": (["data.train={here}/text/*.tfrecord"], "text/a.tfrecord"),
    "truncated TFRecord": (["data.train={here}/cut"], "cut/"),
    "source of a known kind": (["data.source=hdf5"], "data.source: expected package.module:Class; received 'hdf5'"),
    "no such source": (
        ["data.source=user_sources:Item"],
        "data.source: user_sources has no 'Item'; did you mean Items",
    ),
    "index of a source": (
        ["data.source=user_sources:Items", "data.index_dir={here}/empty"],
        "data.index_dir: is for files, and has no effect beside data.source",
    ),
    "source of another length": (
        ["data.source={{name: user_sources:Items, options: {{says: 200}}}}"],
        "data.source: user_sources:Items: its __len__ is 200, but record 199 raises IndexError: no record 199",
    ),
    "output is a file": (["--output-dir", "{here}/broken.yaml"], "output_dir: cannot write to"),
    "output not writable": (["--output-dir", "/proc/run"], "output_dir: cannot write to /proc/run"),
}

WITH_TENSORFLOW = {
    "unknown model": (["model=convent"], "model.name: unknown name 'convent'; did you mean convnet"),
    "model does not fit": (
        ["model=mlp"],
        "loss: label has classes from 0 to 9, as",
    ),
    "more passes than records": (
        ["train.accumulate_steps=97"],
        "train.accumulate_steps must be at most the records of",
    ),
    "unknown metric to stop by": (
        ["early_stopping.metric=acuracy", "early_stopping.patience=2"],
        "early_stopping.metric: the evaluation has no 'acuracy'; it has loss.",
    ),
    "unknown metric of the best": (
        ["checkpoint.best={{metric: acuracy, mode: max}}"],
        "checkpoint.best.metric: the evaluation has no 'acuracy'; it has loss.",
    ),
    "unknown part of the graph": (
        ["log.graph=true", "log.graph_names.inputs=data"],
        "log.graph_names.inputs: the graph has no such part; did you mean input_data",
    ),
    "checkpoint path": (["checkpoint.resume={here}/empty"], "checkpoint.resume: no checkpoint at"),
}


LATER = ["model=user_faults:fails_later", "train.max_steps=6", "train.steps_per_call=1"]
EXHAUSTIVE = pytest.mark.exhaustive
USERS_CODE: list[Any] = [
    pytest.param(["model=user_faults:missing_key"], "model: user_faults:missing_key: KeyError: 'hidden'", id="model"),
    pytest.param(["model=user_faults:no_network"], "Exception: URL fetch failure on", id="download", marks=EXHAUSTIVE),
    pytest.param(
        ["model=user_faults:unfinished"],
        "NotImplementedError: Exception encountered when calling Unfinished.call(). mixing comes",
        id="call",
        marks=EXHAUSTIVE,
    ),
    pytest.param(["loss=user_faults:loss"], "object has no attribute 'no_such_attribute'", id="loss", marks=EXHAUSTIVE),
    pytest.param(["metrics=[user_faults:metric]"], "RuntimeError: no metric today", id="metric", marks=EXHAUSTIVE),
    pytest.param(
        ["callbacks=[user_faults:Callback]"], "RuntimeError: nothing to call back", id="callback", marks=EXHAUSTIVE
    ),
    pytest.param(
        ["data.source=user_faults:Source"], "AttributeError: 'dict' object has", id="source", marks=EXHAUSTIVE
    ),
    pytest.param(
        ["model=user_faults:by_text", "jit_compile=true"],
        "jit_compile: true, but XLA cannot",
        id="XLA",
        marks=pytest.mark.long,
    ),
]


@pytest.fixture(scope="session")
def here(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "good.yaml").write_text(CONFIG.format(data=digits))
    (folder / "broken.yaml").write_text("data:\n  train: [a\n")
    (folder / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    (folder / "empty").mkdir()
    (folder / "text").mkdir()
    shutil.copy(digits / "dataset.json", folder / "text")
    (folder / "text" / "a.tfrecord").write_text("these are no records, only words")
    shutil.copytree(digits / "train", folder / "cut")
    shutil.copy(digits / "dataset.json", folder / "cut")
    victim = sorted((folder / "cut").glob("*.tfrecord"))[0]
    victim.write_bytes(victim.read_bytes()[:-100])
    return folder


def attempt(here: Path, words: list[str], **options: Any) -> str:
    words = [word.format(here=here) for word in words]
    before = sorted(path for path in here.rglob("*") if path.suffix != ".npz")
    finished = train(["--config", here / "good.yaml", "--output-dir", here / "run", *words], **options)
    assert finished.returncode == 2, finished.text
    assert not re.search(r"(train|eval) +step ", finished.stdout)
    assert "Traceback" not in finished.stderr, finished.text
    after = sorted(path for path in here.rglob("*") if path.suffix != ".npz" and "run" not in path.parts)
    assert after == [path for path in before if "run" not in path.parts]
    return finished.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", BEFORE_TENSORFLOW)
def test_named_before_tensorflow_is_loaded(here: Path, name: str, tmp_path: Path) -> None:
    words, expected = BEFORE_TENSORFLOW[name]
    stderr = attempt(here, words, environment=without_tensorflow(tmp_path))
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    assert expected.format(here=here) in line


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_TENSORFLOW)
def test_named_before_the_first_step(here: Path, name: str) -> None:
    words, expected = WITH_TENSORFLOW[name]
    stderr = attempt(here, words)
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    assert expected.format(here=here) in line


@pytest.mark.parametrize(("words", "expected"), USERS_CODE)
def test_an_error_in_the_users_code_is_a_line_that_names_its_place(here: Path, words: list[str], expected: str) -> None:
    (line,) = attempt(here, words).splitlines()
    assert line.startswith("error: ")
    assert expected in line
    assert re.search(r"\(at \S+/user_faults\.py:\d+\)", line)


def test_an_error_of_training_in_the_users_code_is_a_line_and_its_traceback_in_the_log(here: Path) -> None:
    finished = train(["--config", here / "good.yaml", "--output-dir", here / "run-later", *LATER])
    assert finished.returncode == 1, finished.text
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: ")
    assert "KeyError: 'in the third step' (at " in line
    assert re.search(r"user_faults\.py:\d+\); the traceback is in logs/rank-0\.log$", line)
    assert "Traceback" in (here / "run-later" / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
@pytest.mark.parametrize("table", ["early", "late"])
def test_one_line_from_several_ranks_and_none_is_left(here: Path, launcher: str, table: str) -> None:
    words, expected = (BEFORE_TENSORFLOW["unknown key"], WITH_TENSORFLOW["unknown model"])[table == "late"]
    # What is wrong early is said by processes without TensorFlow: their end is quick, and rank 1 waits for root's.
    stderr = attempt(here, words, launcher=launcher, np=2, fresh=table == "early")
    said = [line for line in stderr.splitlines() if "error: " in line]
    assert len(said) == 1
    assert expected in said[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "np_", "expected"),
    [
        ("srun", 2, "adasum needs MPI; the ranks of this run meet over gloo. Start it with mpirun."),
        ("mpirun", 3, "adasum needs a power of two of ranks; received 3."),
    ],
)
def test_adasum_where_there_is_none(here: Path, launcher: str, np_: int, expected: str) -> None:
    stderr = attempt(here, ["horovod.op=adasum"], launcher=launcher, np=np_)
    (said,) = [line for line in stderr.splitlines() if "error: " in line]
    assert said.endswith(f"error: horovod: op {expected}")


@pytest.mark.long
def test_fewer_records_than_ranks_in_a_batch(here: Path) -> None:
    stderr = attempt(here, ["data.global_batch_size=1"], launcher="mpirun", np=2)
    assert "data.global_batch_size must be at least the number of ranks (2); received 1" in stderr


@pytest.mark.long
def test_a_command_that_is_none_is_answered_with_one_that_is() -> None:
    finished = train(["evalute", "runs/x"])
    assert finished.returncode == 2
    said = "there is no command 'evalute'; did you mean evaluate? To train: --config FILE, no command."
    assert finished.stderr == f"error: {said}\n"
