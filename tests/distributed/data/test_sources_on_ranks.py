"""Records read by number, on real ranks: each once an epoch, at any number of ranks; bad input ends all in one line."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import BIN, rank_environment, run_process, split_records, summary_of, train
from made_stores import write_hdf5, write_npy, write_npz, write_parquet

from horovod_train.data.audit import audit
from horovod_train.data.subsets import parts_of_records

RECORDS, STEPS_PER_EPOCH = 1437, 15

CONFIG = """
data: {{train: {data}, inputs: [{inputs}], targets: label, global_batch_size: 96, audit: true, features: {features}}}
model: user_models:{model}
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
lr_schedule: {{base_lr: 0.01}}
log: {{every_steps: 15, tensorboard: false}}
"""
IMAGE = "image: {scale: 0.00392156862745098, offset: -0.5}"
LISTS = f"{{{IMAGE}, words: {{max_length: 11}}}}"

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="session")
def arrays(digits: Path) -> Arrays:
    """The 1437 training digits, in the order of their files."""
    rows = []
    for path in sorted((digits / "train").glob("*.tfrecord")):
        for record in split_records(path.read_bytes()):
            stored = tf.train.Example.FromString(record[12:-4]).features.feature
            pixels = np.frombuffer(stored["image_raw"].bytes_list.value[0], np.uint8).reshape(28, 28, 1)
            rows.append((pixels, stored["label"].int64_list.value[0]))
    assert len(rows) == RECORDS
    return {"image": np.stack([pixels for pixels, _ in rows]), "label": np.array([label for _, label in rows])}


def as_npy(folder: Path, arrays: Arrays) -> str:
    return CONFIG.format(data=write_npy(folder, arrays), inputs="image", features=f"{{{IMAGE}}}", model="small")


def as_hdf5(folder: Path, arrays: Arrays) -> str:
    path = write_hdf5(folder, arrays, [range(record % 12) for record in range(RECORDS)])
    return CONFIG.format(data=path, inputs="image, words", features=LISTS, model="of_lists")


def as_parquet(folder: Path, arrays: Arrays) -> str:
    path = write_parquet(folder, arrays, [range(record % 12) for record in range(RECORDS)])
    return CONFIG.format(data=path, inputs="image, words", features=LISTS, model="of_lists")


def as_class(folder: Path, arrays: Arrays) -> str:
    path = write_npz(folder, arrays)
    text = CONFIG.format(data=path, inputs="image", features=f"{{{IMAGE}}}", model="small")
    return text.replace("data: {", "data: {source: user_sources:Digits, ")


Store = Callable[[Path, Arrays], str]
FORMS = [
    pytest.param(as_hdf5, marks=pytest.mark.long),
    *(pytest.param(form, marks=pytest.mark.exhaustive) for form in (as_npy, as_parquet, as_class)),
]


@pytest.mark.parametrize("store", FORMS)
def test_stopped_and_resumed_at_other_numbers_of_ranks_each_record_once(
    store: Store, arrays: Arrays, tmp_path: Path
) -> None:
    """Stopped at 2 ranks inside the first epoch, at 3 inside the third, and ended at 1."""
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(store(tmp_path, arrays))
    words = ["--config", config, "--output-dir", run_dir, "train.epochs=3"]
    for np_, max_steps in [(2, 7), (3, 37), (1, "null")]:
        finished = train([*words, f"train.max_steps={max_steps}"], launcher="none" if np_ == 1 else "mpirun", np=np_)
        assert finished.returncode == 0, finished.text
    assert summary_of(run_dir)["steps"] == 3 * STEPS_PER_EPOCH
    found = [(one.is_whole, one.sizes, one.records, one.missing, one.twice) for one in audit(str(run_dir))]
    assert found == [
        (True, (2, 3), RECORDS, [], []),
        (True, (3,), RECORDS, [], []),
        (True, (3, 1), RECORDS, [], []),
    ]
    verified = train(["check-data", "--audit", run_dir])
    assert verified.returncode == 0, verified.text
    assert "data.train holds what the run read" in verified.stdout


@pytest.mark.exhaustive  # see unit/test_mixture
def test_a_mixture_is_read_as_its_repeats_say(arrays: Arrays, tmp_path: Path) -> None:
    """Stopped at 2 ranks inside the first epoch, and ended at 3."""
    parts = {"first": slice(0, 400), "second": slice(400, None)}
    for name, rows in parts.items():
        (tmp_path / name).mkdir()
        text = as_npy(tmp_path / name, {key: array[rows] for key, array in arrays.items()})
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    train_on = f"[{{path: {tmp_path}/first/arrays, repeats: 3}}, {tmp_path}/second/arrays]"
    config.write_text(text.replace(f"train: {tmp_path}/second/arrays", f"train: {train_on}"))
    words = ["--config", config, "--output-dir", run_dir]
    for np_, max_steps in [(2, 7), (3, 24)]:
        finished = train([*words, f"train.max_steps={max_steps}"], launcher="mpirun", np=np_)
        assert finished.returncode == 0, finished.text
    (epoch,) = audit(str(run_dir))
    assert (epoch.sizes, epoch.missing, epoch.twice) == ((2, 3), [], [])
    assert [(one.repeats, one.records) for one in epoch.data_sets] == [(3, 1200), (1, RECORDS - 400)]
    verified = train(["check-data", "--audit", run_dir])
    assert verified.returncode == 0, verified.text
    assert re.search(r"0 +3 × +1200 +0 +0 +0 +/", verified.stdout), verified.stdout


@pytest.mark.exhaustive  # see unit/test_fold
def test_a_fold_is_left_out_and_evaluated(arrays: Arrays, tmp_path: Path) -> None:
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(as_hdf5(tmp_path, arrays))
    fold = ["data.fold=2/5", f"data.eval={tmp_path}/a.h5"]
    finished = train(["--config", config, "--output-dir", run_dir, "train.epochs=1", *fold], launcher="mpirun", np=2)
    assert finished.returncode == 0, finished.text
    left_out = int((parts_of_records(RECORDS, 5) == 1).sum())
    (epoch,) = audit(str(run_dir))
    assert (epoch.records, epoch.missing, epoch.twice) == (RECORDS - left_out, [], [])
    evaluated = train(["evaluate", run_dir], launcher="mpirun", np=3)
    assert evaluated.returncode == 0, evaluated.text
    assert f"records {left_out} " in evaluated.stdout
    predicted = train(["predict", run_dir, "--data", tmp_path / "a.h5", "--out", tmp_path / "all.npz"])
    assert f"{RECORDS} records" in predicted.stdout, predicted.text


@pytest.mark.long
def test_the_weights_are_those_of_tfrecords_of_the_same_records(digits: Path, arrays: Arrays, tmp_path: Path) -> None:
    """Shuffled by the same plan: the records lie in one file, so that both have the same blocks."""
    (tmp_path / "records").mkdir()
    shutil.copy(digits / "dataset.json", tmp_path)
    shards = sorted((digits / "train").glob("*.tfrecord"))
    (tmp_path / "records" / "all.tfrecord").write_bytes(b"".join(path.read_bytes() for path in shards))
    config = tmp_path / "config.yaml"
    config.write_text(as_npy(tmp_path, arrays))
    weights = {}
    stored = {
        "arrays": [],
        "records": [f"data.train={tmp_path}/records", "data.inputs=image_raw", "data.features=null"],
    }
    for name, words in stored.items():
        given = ["--config", config, "--output-dir", tmp_path / name, "train.epochs=2", *words]
        finished = train(given, launcher="mpirun", np=2)
        assert finished.returncode == 0, finished.text
        weights[name] = summary_of(tmp_path / name)["weights_sha256"]
    assert weights["arrays"] == weights["records"]


@pytest.mark.long
def test_a_torn_record_is_named_on_all_ranks_or_left_out(arrays: Arrays, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(as_class(tmp_path, arrays))
    words = ["--config", config, "train.epochs=1", "data.source.options.torn=[1000]"]
    refused = train([*words, "--output-dir", tmp_path / "run"], launcher="mpirun", np=2)
    assert refused.returncode == 2, refused.text
    said = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(r"stored\.npz: record 1000: ValueError: torn page .*Read by rank [01] of 2; ", said[0])
    assert len(said) == 1
    skipping = [*words, "data.on_bad_record=skip", "--output-dir", tmp_path / "skipping"]
    skipped = train(skipping, launcher="mpirun", np=2)
    assert skipped.returncode == 0, skipped.text
    (epoch,) = audit(str(tmp_path / "skipping"))
    assert (epoch.records, epoch.skipped, epoch.missing) == (RECORDS - 1, [1000], [])


@pytest.mark.long
def test_files_that_changed_before_a_resume_are_named(arrays: Arrays, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(as_npy(tmp_path, arrays))
    words = ["--config", config, "--output-dir", tmp_path / "run"]
    assert train([*words, "train.max_steps=7"]).returncode == 0
    as_npy(tmp_path, arrays | {"label": np.roll(arrays["label"], 1)})
    refused = train([*words, "train.max_steps=9"])
    assert refused.returncode == 2, refused.text
    (line,) = refused.stderr.splitlines()
    assert "of an epoch of other data: data.train now has other content in arrays than the checkpoint" in line


@pytest.mark.long
def test_other_data_on_one_rank_is_named(arrays: Arrays, tmp_path: Path) -> None:
    """The second rank has its own folder, with a file of the same name."""
    ranks: list[str] = []
    for name, shift in (("first", 0), ("second", 1)):
        here = tmp_path / name
        here.mkdir()
        config = as_npy(here, arrays | {"label": np.roll(arrays["label"], shift)})
        (here / "config.yaml").write_text(config.replace(f"{here}/", ""))
        program = [sys.executable, "-m", "horovod_train.main", "--config", "config.yaml", "train.max_steps=2"]
        ranks += [":", "-np", "1", "-wdir", str(here), *program, "--output-dir", str(tmp_path / "run")]
    options = ["--oversubscribe", "--bind-to", "none"]
    refused = run_process([str(BIN / "mpirun"), *options, *ranks[1:]], environment=rank_environment())
    assert refused.returncode == 2, refused.text
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: data.train: ranks see different records: rank 1 (")
    assert "has other content in arrays than rank 0" in line


@pytest.mark.exhaustive
def test_batches_by_length_are_the_same_at_any_number_of_ranks(tmp_path: Path) -> None:
    """Stopped at 2 ranks inside the first epoch, at 3 inside the second, and ended at 1; or all on one rank."""
    fewer = ["--records", "1437", "--vocabulary", "100", "--max-length", "30"]
    assert train(["prepare", "token-samples", *fewer, "--out", tmp_path / "tokens"]).returncode == 0
    config = tmp_path / "config.yaml"
    config.write_text(f"""
data: {{train: {tmp_path}/tokens/train, eval: {tmp_path}/tokens/eval, global_batch_size: 96, audit: true,
        bucket_by_length: tokens, bucket_steps: 4}}
model: {{name: transformer, options: {{vocabulary: 100, width: 16, heads: 2, blocks: 1, max_length: 30, dropout: 0.0}}}}
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
optimizer: {{name: sgd, options: {{momentum: 0.9}}}}
lr_schedule: {{base_lr: 0.01}}
log: {{every_steps: 15, tensorboard: false}}
train: {{epochs: 2}}
""")
    for np_, max_steps in [(2, 7), (3, 19), (1, "null")]:
        words = ["--config", config, "--output-dir", tmp_path / "several", f"train.max_steps={max_steps}"]
        finished = train(words, launcher="none" if np_ == 1 else "mpirun", np=np_)
        assert finished.returncode == 0, finished.text
    alone = train(["--config", config, "--output-dir", tmp_path / "one"])
    assert alone.returncode == 0, alone.text
    found = [(one.sizes, one.records, one.missing, one.twice) for one in audit(str(tmp_path / "several"))]
    assert found == [((2, 3), RECORDS, [], []), ((3, 1), RECORDS, [], [])]
    several, one = (summary_of(tmp_path / name)["eval"]["loss"] for name in ("several", "one"))
    assert several == pytest.approx(one, rel=1e-5)
    for name in ("several", "one"):
        exported = train(["export", tmp_path / name, "--out", tmp_path / f"{name}.keras"])
        assert exported.returncode == 0, exported.text
    weights = [keras.saving.load_model(tmp_path / f"{name}.keras").get_weights() for name in ("several", "one")]
    assert max(float(np.abs(a - b).max()) for a, b in zip(*weights, strict=True)) < 1e-5
