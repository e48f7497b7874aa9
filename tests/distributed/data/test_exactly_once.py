"""Every record, every epoch, once: counted on what ranks really consumed, at any number of ranks."""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished, split_records, summary_of, train

RECORDS, BATCH, STEPS_PER_EPOCH = 1437, 96, 15

CONFIG = """
data: {{train: {data}, global_batch_size: 96, audit: true}}
model: user_models:small
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
lr_schedule: {{base_lr: 0.01}}
log: {{every_steps: 15, tensorboard: false}}
"""


@pytest.fixture(scope="session")
def uneven(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 1437 training digits in five files of very different sizes."""
    records = [
        record for path in sorted((digits / "train").glob("*.tfrecord")) for record in split_records(path.read_bytes())
    ]
    assert len(records) == RECORDS
    folder = tmp_path_factory.mktemp("uneven")
    shutil.copy(digits / "dataset.json", folder)
    (folder / "shards").mkdir()
    for number, end in enumerate([1, 38, 300, 1000, RECORDS]):
        start = [0, 1, 38, 300, 1000][number]
        (folder / "shards" / f"{number}.tfrecord").write_bytes(b"".join(records[start:end]))
    return folder / "shards"


@pytest.fixture(scope="session")
def config(uneven: Path) -> Path:
    path = uneven.parent / "config.yaml"
    path.write_text(CONFIG.format(data=uneven))
    return path


def consumed(run_dir: Path) -> dict[int, Counter[int]]:
    """Epoch → how often each record was used, over the files of all ranks and all starts of a run."""
    found: dict[int, Counter[int]] = {}
    for path in (run_dir / "audit").glob("*.jsonl"):
        for line in path.read_text().splitlines()[1:]:
            entry = json.loads(line)
            ids = [record for row in entry["ids"] for record in row if record >= 0]
            found.setdefault(entry["epoch"], Counter()).update(ids)
    return found


def assert_once(found: dict[int, Counter[int]], epochs: int) -> None:
    assert sorted(found) == list(range(epochs))
    for epoch, counts in found.items():
        missing = set(range(RECORDS)) - set(counts)
        twice = [record for record, count in counts.items() if count > 1]
        assert (len(missing), len(twice)) == (0, 0), f"epoch {epoch}"


@pytest.mark.long
def test_each_epoch_holds_each_record_once(config: Path, tmp_path: Path) -> None:
    words = ["--config", config, "--output-dir", tmp_path / "run", "train.epochs=2"]
    finished = train(words, launcher="mpirun", np=4)
    assert finished.returncode == 0, finished.text
    assert summary_of(tmp_path / "run")["steps"] == 2 * STEPS_PER_EPOCH
    assert_once(consumed(tmp_path / "run"), 2)
    verified = train(["check-data", "--audit", tmp_path / "run"])
    assert verified.returncode == 0, verified.text


Starts = tuple[tuple[int, int | str], ...]
"""The ranks of each start of a run, and the step at which it ends."""
AT_TWO_AND_THREE: Starts = ((2, 22), (3, "null"))
ResumedAt = Callable[[Starts], tuple[Finished, Path]]


@pytest.fixture(scope="module")
def resumed_at(config: Path, tmp_path_factory: pytest.TempPathFactory) -> ResumedAt:
    """The last start of a run, and its directory.

    With a batch per rank: the global batch and the length of the run stay those of the first start.
    """

    @functools.cache
    def resumed(starts: Starts) -> tuple[Finished, Path]:
        run_dir = tmp_path_factory.mktemp("resumed") / "run"
        batch = ["data.global_batch_size=null", "data.batch_size_per_rank=48", f"train.epochs={len(starts)}"]
        for np, max_steps in starts:
            words = ["--config", config, "--output-dir", run_dir, *batch, f"train.max_steps={max_steps}"]
            finished = train(words, launcher="none" if np == 1 else "mpirun", np=np)
            assert finished.returncode == 0, finished.text
        return finished, run_dir

    return resumed


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(AT_TWO_AND_THREE, id="2-3"),
        pytest.param(((2, STEPS_PER_EPOCH), (3, 37), (1, "null")), id="2-3-1", marks=pytest.mark.long),
    ],
)
def test_stopped_and_resumed_at_other_numbers_of_ranks_still_once(
    resumed_at: ResumedAt, config: Path, starts: Starts
) -> None:
    finished, run_dir = resumed_at(starts)
    epochs, (ranks, _) = len(starts), starts[-1]
    per_rank = f"data.batch_size_per_rank 48 would make it {48 * ranks} here"
    assert f"the global batch stays 96; {per_rank}" in finished.stdout
    assert summary_of(run_dir)["steps"] == epochs * STEPS_PER_EPOCH
    assert_once(consumed(run_dir), epochs)
    more = ["data.global_batch_size=48", f"train.epochs={epochs + 1}"]
    other = train(["--config", config, "--output-dir", run_dir, *more])
    assert other.returncode == 2
    steps = f"its {epochs * STEPS_PER_EPOCH} steps were {epochs} epochs of {STEPS_PER_EPOCH}"
    assert f"{steps}; with the data and data.global_batch_size 48 of this" in other.stderr
    verified = train(["check-data", "--audit", run_dir])
    assert verified.returncode == 0, verified.text


@pytest.mark.exhaustive
def test_a_resume_inside_an_epoch_on_other_data_of_the_same_counts_names_the_file(
    config: Path, uneven: Path, tmp_path: Path
) -> None:
    shutil.copytree(uneven.parent, tmp_path / "data")
    changed = tmp_path / "data/shards/2.tfrecord"
    words = ["--config", config, f"data.train={tmp_path}/data/shards", "--output-dir", tmp_path / "run"]
    assert train([*words, "train.max_steps=8"]).returncode == 0
    changed.write_bytes(b"".join([*split_records(changed.read_bytes())][::-1]))
    refused = train([*words, "train.max_steps=12"])
    assert refused.returncode == 2, refused.text
    (line,) = refused.stderr.splitlines()
    assert "of an epoch of other data: data.train now has other content in 2.tfrecord than the checkpoint" in line


def test_a_record_used_twice_or_never_is_found(resumed_at: ResumedAt, tmp_path: Path) -> None:
    """The negative: the audit of a run that read wrongly does not pass."""
    run_dir = shutil.copytree(resumed_at(AT_TWO_AND_THREE)[1], tmp_path / "run")
    path, *_ = sorted((run_dir / "audit").glob("*.jsonl"))
    head, first, *rest = path.read_text().splitlines()
    entry = json.loads(first)
    entry["ids"][0][0] = entry["ids"][0][1]
    path.write_text("\n".join([head, json.dumps(entry), *rest]) + "\n")
    with pytest.raises(AssertionError):
        assert_once(consumed(run_dir), 2)
    verified = train(["check-data", "--audit", run_dir])
    assert verified.returncode == 2
    assert "twice" in verified.stdout + verified.stderr
