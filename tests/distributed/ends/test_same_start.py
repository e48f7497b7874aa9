"""Ranks that were started on different things: what must be equal ends the run with one sentence, the rest is harmless.

The second rank, on a host of its own as far as it can tell, has its own folder with data of the same relative name.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import BIN, PROJECT, Finished, rank_environment, run_process, split_records, summary_of, train

CONFIG = """
data: {train: digits/train, eval: digits/eval, global_batch_size: 96}
model: user_models:small
loss: {name: sparse_categorical_crossentropy, options: {from_logits: true}}
lr_schedule: {base_lr: 0.1}
train: {max_steps: 16}
log: {tensorboard: false}
watch: {warn_after_s: 10, stop_after_s: 60, first_step_after_s: 60}
"""

SHIM = """
import os, platform
if "LISTED_BACKWARDS" in os.environ:
    listdir, scandir = os.listdir, os.scandir
    class Backwards:
        def __init__(self, path="."):
            with scandir(path) as found:
                self.entries = iter(sorted(found, key=lambda entry: os.fsdecode(entry.name), reverse=True))
        def __iter__(self): return self
        def __next__(self): return next(self.entries)
        def __enter__(self): return self
        def __exit__(self, *error): pass
        def close(self): pass
    os.listdir, os.scandir = lambda path=".": sorted(listdir(path), reverse=True), Backwards
if "OTHER_PYTHON" in os.environ:
    platform.python_version = lambda: os.environ["OTHER_PYTHON"]
"""
"""sitecustomize.py: what a file system that lists otherwise, and another Python, would show to the package."""

Prepare = Callable[[Path], Any]
"""Changes the second rank's folder, which holds `digits/`."""


class Rank:
    """How one rank is started, besides in its own folder."""

    def __init__(self, *, environment: Mapping[str, str] | None = None, umask: str = "022", words: Sequence[str] = ()):
        self.environment, self.umask, self.words = dict(environment or {}), umask, words

    def command(self, here: Path, output_dir: Path) -> list[str]:
        variables = [f"{name}={value.format(here=here)}" for name, value in self.environment.items()]
        shell = ["bash", "-c", f'umask {self.umask}; exec "$@"', "-"]
        program = [sys.executable, "-m", "horovod_train.main", "--config", "config.yaml", *self.words]
        return ["-np", "1", "-wdir", str(here), "env", *variables, *shell, *program, "--output-dir", str(output_dir)]


def launch(
    digits: Path,
    folder: Path,
    first: Rank,
    second: Rank,
    prepare: Prepare = lambda here: None,
    *,
    model: str = "small",
) -> Finished:
    for name in ("first", "second"):
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text(CONFIG.replace("user_models:small", f"user_models:{model}"))
        (folder / name / "vocabulary.txt").write_text("1 2 3")
        (folder / name / "sitecustomize.py").write_text(SHIM)
        shutil.copytree(digits, folder / name / "digits", copy_function=shutil.copyfile)  # copies of another time
        forget_counts(folder / name)
    prepare(folder / "second")
    ranks = [first.command(folder / "first", folder / "run"), second.command(folder / "second", folder / "run")]
    options = ["--oversubscribe", "--bind-to", "none"]
    return run_process([str(BIN / "mpirun"), *options, *ranks[0], ":", *ranks[1]], environment=rank_environment())


def shard(here: Path, split: str = "train") -> Path:
    return sorted((here / "digits" / split).glob("*.tfrecord"))[1]


def turn_round(path: Path) -> None:
    """The same records the other way round: size and counts stay."""
    path.write_bytes(b"".join([*split_records(path.read_bytes())][::-1]))


def edit_dataset(here: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = here / "digits/dataset.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def forget_counts(here: Path) -> None:
    """As with records that were made elsewhere: only the other ranks can tell that a file is missing."""
    edit_dataset(here, lambda content: content.pop("counts"))


def rescale(here: Path) -> None:
    edit_dataset(here, lambda content: content["features"]["image_raw"].update(scale=0.5))


def edit_code(here: Path) -> None:
    shutil.copytree(PROJECT / "horovod_train", here / "horovod_train", ignore=shutil.ignore_patterns("__pycache__"))
    with (here / "horovod_train/training/losses.py").open("a") as file:
        file.write("# edited on one host\n")


def edit_users_code(here: Path) -> None:
    code = (PROJECT / "tests/user_models.py").read_text()
    (here / "user_models.py").write_text(f"{code}# edited on one host\n")


OWN_CODE = {"PYTHONPATH": f"{{here}}:{PROJECT}:{PROJECT / 'tests'}"}

DIFFERENT: dict[str, tuple[Rank, Prepare, str]] = {
    "missing file": (
        Rank(),
        lambda here: shard(here).unlink(),
        "error: data.train: ranks see different records: rank 1 ({host}) lacks 00001-of-00005.tfrecord, which rank 0 "
        "({host}) has; 1 of 2 ranks see the same as rank 0. Give every rank the same files.",
    ),
    "other content": (
        Rank(),
        lambda here: turn_round(shard(here)),
        "error: data.train: ranks see different records: rank 1 ({host}) has other content in 00001-of-00005.tfrecord "
        "than rank 0",
    ),
    "other evaluation": (
        Rank(),
        lambda here: turn_round(shard(here, "eval")),
        "error: data.eval: ranks see different records: rank 1 ({host}) has other content in 00001-of-00005.tfrecord",
    ),
    "truncated file": (
        Rank(),
        lambda here: shard(here).write_bytes(shard(here).read_bytes()[:-1]),
        "error: rank 1 ({host}): digits/train/00001-of-00005.tfrecord: record 28",
    ),
    "no data": (
        Rank(),
        lambda here: shutil.rmtree(here / "digits"),
        "error: rank 1 ({host}): data.train: digits/train does not exist",
    ),
    "other dataset.json": (
        Rank(),
        rescale,
        "error: ranks disagree at the start on what a record of data.train holds: rank 1 ({host}) has",
    ),
    "config": (
        Rank(words=["seed=2"]),
        lambda here: None,
        "error: ranks disagree at the start on setting seed: rank 1 ({host}) has '2'; 1 of 2 have '1'.",
    ),
    "code": (
        Rank(environment=OWN_CODE),
        edit_code,
        "error: ranks disagree at the start on code of horovod_train: rank 1 ({host}) has",
    ),
    "code of the user": (
        Rank(environment=OWN_CODE),
        edit_users_code,
        "error: ranks disagree at the start on code of user_models: rank 1 ({host}) has",
    ),
    "versions": (
        Rank(environment=OWN_CODE | {"OTHER_PYTHON": "3.10.0"}),
        lambda here: None,
        "error: ranks disagree at the start on version of python: rank 1 ({host}) has '3.10.0'; 1 of 2 have",
    ),
}
ONCE = "missing file"  # the others are one more of a kind


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == ONCE else pytest.mark.exhaustive) for n in DIFFERENT]
)
def test_what_must_be_equal_ends_the_run_before_training_with_one_sentence(
    digits: Path, tmp_path: Path, name: str
) -> None:
    second, prepare, said = DIFFERENT[name]
    finished = launch(digits, tmp_path, Rank(), second, prepare)
    check_refused(finished, said, tmp_path / "run")


def check_refused(finished: Finished, said: str, run_dir: Path) -> None:
    assert finished.returncode == 2, finished.text
    (line,) = [line for line in finished.stderr.splitlines() if "error: " in line]
    host = line.partition("rank 1 (")[2].partition(")")[0]
    assert line.startswith(said.format(host=host)), line
    assert "Traceback" not in finished.stderr
    assert not (run_dir / "metrics.jsonl").exists()
    assert not list(run_dir.glob("checkpoints/*"))


def test_the_one_rank_that_fails_is_heard_over_mpi(digits: Path, tmp_path: Path) -> None:
    """mpirun kills all ranks when the first one ends: the two that only follow must not be that."""
    (tmp_path / "config.yaml").write_text(CONFIG.replace("user_models:small", "user_faults:missing_on_the_last_rank"))
    words = [f"data.train={digits}/train", f"data.eval={digits}/eval", "--output-dir", tmp_path / "run"]
    finished = train(["--config", tmp_path / "config.yaml", *words], launcher="mpirun", np=3)
    assert finished.returncode == 2, finished.text
    said = [line for line in finished.stderr.splitlines() if "error: " in line]
    assert len(said) == 1, finished.text
    assert "No module named 'no_such_module'" in said[0]
    assert "rank 2 (" in said[0]


def write_keras_json(here: Path) -> None:
    (here / "keras").mkdir()
    (here / "keras/keras.json").write_text('{"backend": "tensorflow", "epsilon": 1e-05}')


HASHED = {"PYTHONHASHSEED": "0"}
OTHER_MODELS: dict[str, tuple[str, Rank, Prepare, str]] = {
    "constant": ("with_a_constant", Rank(), lambda here: None, "constant factors of layer scaled"),
    "order": (
        "in_the_order_of_a_set",
        Rank(environment={"PYTHONHASHSEED": "1"}),
        lambda here: None,
        "weight 2 of the model: rank 1 ({host}) has 'g/kernel (4, 4) float32'; 1 of 2 have 'f/kernel (4, 4) float32'",
    ),
    "vocabulary": (
        "with_a_vocabulary",
        Rank(),
        lambda here: (here / "vocabulary.txt").write_text("1 2 4"),
        "table lookup_table of layer lookup",
    ),
    "keras.json": (
        "small",
        Rank(environment={"KERAS_HOME": "{here}/keras"}),
        write_keras_json,
        "Keras' settings (keras.json)",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "order" else pytest.mark.exhaustive) for n in OTHER_MODELS]
)
def test_models_that_differ_though_their_files_are_the_same_are_refused(
    digits: Path, tmp_path: Path, name: str
) -> None:
    model, second, prepare, what = OTHER_MODELS[name]
    second.environment = HASHED | second.environment
    finished = launch(digits, tmp_path, Rank(environment=HASHED), second, prepare, model=model)
    check_refused(finished, f"error: ranks disagree at the start on {what}", tmp_path / "run")


HARMLESS: dict[str, Rank] = {
    "locale": Rank(environment={"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "time zone": Rank(environment={"TZ": "Asia/Kathmandu"}),
    "listing order": Rank(environment=OWN_CODE | {"LISTED_BACKWARDS": "1"}),
    "umask": Rank(umask="077"),
    "hash seed": Rank(environment={"PYTHONHASHSEED": "1"}),
}
ALL = Rank(environment={k: v for rank in HARMLESS.values() for k, v in rank.environment.items()}, umask="077")


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run on two equal ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finished = launch(digits, folder, Rank(), Rank())
    assert finished.returncode == 0, finished.text
    return str(summary_of(folder / "run")["weights_sha256"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["all", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in HARMLESS)])
def test_what_may_differ_does_not_change_the_weights(digits: Path, tmp_path: Path, undisturbed: str, name: str) -> None:
    finished = launch(digits, tmp_path, Rank(), HARMLESS.get(name, ALL))
    assert finished.returncode == 0, finished.text
    assert summary_of(tmp_path / "run")["weights_sha256"] == undisturbed


@pytest.mark.exhaustive
def test_root_may_differ_as_well(digits: Path, tmp_path: Path, undisturbed: str) -> None:
    finished = launch(digits, tmp_path, ALL, Rank(environment={"PYTHONHASHSEED": "2"}))
    assert finished.returncode == 0, finished.text
    assert summary_of(tmp_path / "run")["weights_sha256"] == undisturbed
