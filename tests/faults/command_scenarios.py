"""Whole commands: training, a resume, `prepare` and `export`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from scenario import Lost, Scenario

DATA = """
data: {train: DATA/train, eval: DATA/eval, global_batch_size: 16, audit: true, index_dir: index, stage_dir: stage}
model: {name: image_mlp, options: {image_size: 4, hidden: 4}}
loss: {name: sparse_categorical_crossentropy, options: {from_logits: true}}
optimizer: {name: sgd, options: {momentum: 0.9}}
train: {epochs: 2, steps_per_call: 2}
checkpoint: {every_steps: 3, keep: 2, best: {metric: loss}}
log: {every_steps: 2, histograms_every_steps: 5, graph: true}
device: {intra_op_threads: 1, inter_op_threads: 1}
"""


def command(*words: str) -> Callable[[], int]:
    """A command line, as a process of its own would run it."""

    def run() -> int:
        from horovod_train.main import main

        return main(words)

    return run


def load_tensorflow() -> None:
    from horovod_train.output import logs

    logs.load_tensorflow()
    import horovod_train.inference.run
    import horovod_train.training.run  # noqa: F401


def make_data() -> int:
    """70 records, a packed file among them, and the config. Outside the folder that faults come to."""
    import gzip

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from made_records import make_images

    data = Path.cwd().parent / "data"
    for split in ("train", "eval"):
        folder = make_images(data / split)
        (folder / "1.tfrecord").write_bytes(gzip.compress((folder / "1.tfrecord").read_bytes()))
    (data / "config.yaml").write_text(DATA.replace("DATA", str(data)))
    return 0


TRAIN = ("--config", "../data/config.yaml", "--output-dir", "run")


def trained(*more: str) -> Callable[[], int]:
    def prepare() -> int:
        return make_data() or command(*TRAIN, *more)()

    return prepare


def half_trained() -> int:
    """Stopped inside its second epoch; the newest checkpoint has gone bad, and a save was cut short."""
    code = trained("train.max_steps=8")()
    newest = max(Path("run/checkpoints").glob("step-*"))
    whole = (newest / "state.data-00000-of-00001").read_bytes()
    (newest / "state.data-00000-of-00001").write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    cut = Path("run/checkpoints/.step-000000009.00000000.partial")
    cut.mkdir()
    (cut / "state.index").write_bytes(b"half")
    return code


def rows(run: Path) -> list[tuple[str, int]]:
    file = run / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(row["split"], row["step"]) for row in found]


def lost_of_run(here: Path, plain: Path) -> list[str]:
    """What a run that has ended well lacks."""
    found = []
    for name in ("config.yaml", "summary.json"):
        if not (here / "run" / name).exists():
            found.append(name)
        elif name == "summary.json" and steps_of(here) != steps_of(plain):
            found.append("summary.json is that of an earlier start")
    if rows(here / "run") != rows(plain / "run"):
        found.append(f"metrics: {rows(here / 'run')}")
    for name in ("checkpoints", "audit", "logs"):
        names = ({path.name for path in (folder / "run" / name).glob("*")} for folder in (here, plain))
        if missing := [one for one in list(names)[::-1][0] if not (here / "run" / name / one).exists()]:
            found.append(f"{name}: {missing}")
    if not (here / "index").exists() or not list((here / "index").glob("*.npz")):
        found.append("index")
    found += lost_events(here, plain) + lost_audit(here)
    return found


def other_end(here: Path, plain: Path) -> list[str]:
    """Whether a run that was resumed has ended with other weights, steps or last metrics than one without faults."""
    one, other = (json.loads((folder / "run" / "summary.json").read_text()) for folder in (here, plain))
    names = ("steps", "epochs", "weights_sha256", "eval")
    return [f"summary.json: {name}: {one[name]}, not {other[name]}" for name in names if one[name] != other[name]]


def steps_of(folder: Path) -> int:
    return int(json.loads((folder / "run" / "summary.json").read_text())["steps"])


def lost_events(here: Path, plain: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    def count(folder: Path) -> int:
        files = folder.glob("run/tensorboard/*/*")
        return sum(sum(1 for _ in RawEventFileLoader(str(file)).Load()) for file in files)

    return ["events"] if count(here) < count(plain) else []


def lost_audit(here: Path) -> list[str]:
    from horovod_train.data.audit import audit
    from horovod_train.errors import UserError

    try:
        epochs = audit(str(here / "run"))
    except UserError as error:
        return [f"audit: {error}"]
    return [f"audit: {epoch}" for epoch in epochs if epoch.missing or epoch.twice or not epoch.is_whole]


def broken_run(here: Path, plain: Path, damaged: Collection[str] = ()) -> list[str]:
    """Checkpoints that are not what they are called; a summary of other weights; half a line. damaged: before."""
    found = broken_checkpoints(here / "run" / "checkpoints", plain / "run" / "checkpoints", damaged)
    summaries = [folder / "run" / "summary.json" for folder in (here, plain)]
    if all(file.exists() for file in summaries):
        one, other = (json.loads(file.read_text()) for file in summaries)
        if one["steps"] == other["steps"] and one["weights_sha256"] != other["weights_sha256"]:
            found.append("summary.json: other weights than without faults")
    try:
        rows(here / "run")
    except ValueError as error:
        found.append(f"metrics.jsonl: {error}")
    return found


def broken_resumed(here: Path, plain: Path) -> list[str]:
    """The checkpoint that `half_trained` damaged keeps its name where the start that found it could not rename it."""
    return broken_run(here, plain, {"step-000000008"})


def broken_checkpoints(folder: Path, plain: Path, expected: Collection[str] = ()) -> list[str]:
    """expected: those that were damaged before."""
    from horovod_train.checkpoint.layout import Damaged, verify

    found = []
    for place in folder.glob("step-*"):
        if re.fullmatch(r"step-\d{9}", place.name):
            try:
                verify(place)
            except Damaged as error:
                found += [] if place.name in expected else [f"{place.name}: {error}"]
                continue
            name = "state.data-00000-of-00001"
            if (plain / place.name).exists() and (place / name).read_bytes() != (
                plain / place.name / name
            ).read_bytes():
                found.append(f"{place.name}: another content than without faults")
    return found


def export(out: str, *more: str) -> Callable[[], int]:
    return command("export", "run", "--out", out, *more)


def whole_model(out: str, *, was_there: bool) -> Lost:
    def broken(here: Path, plain: Path) -> list[str]:
        names = sorted(str(path.relative_to(plain)) for path in [plain / out, *(plain / out).rglob("*")])
        missing = [name for name in names if not (here / name).exists()]
        return [f"{name} is missing" for name in missing] if was_there or (here / out).exists() else []

    return broken


def table() -> int:
    lines = [f"{number},{number * 2},{number % 2}" for number in range(40)]
    (Path.cwd().parent / "table.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")
    return 0


PREPARE = ("prepare", "csv", "--file", "../table.csv", "--targets", "y", "--out", "made", "--shards", "2")


def prepared() -> int:
    return table() or command(*PREPARE)()


def whole_dataset(here: Path, plain: Path) -> list[str]:
    """A folder of this name holds what that of the plain run holds, dataset.json last of all."""
    if not (here / "made").exists():
        return []
    names = {str(path.relative_to(plain)) for path in (plain / "made").rglob("*") if path.suffix != ".npz"}
    return [name for name in sorted(names) if not (here / name).exists()] + [
        f"{name} is half"
        for name in sorted(names)
        if (plain / name).is_file()
        and (here / name).exists()
        and (here / name).read_bytes() != (plain / name).read_bytes()
    ]


def dataset_kept(here: Path, plain: Path) -> list[str]:
    """Where not even the name can be given back, the folder set aside is what was there, and the error names it."""
    is_there = (here / "made").exists() or any(here.glob(".made.*.replaced/dataset.json"))
    return whole_dataset(here, plain) if is_there else ["neither the old nor the new one is there"]


REWIND = (*TRAIN, "checkpoint.keep=5", "checkpoint.resume=run/checkpoints/step-000000003")

COMMAND_SCENARIOS = [
    Scenario("prepare", command(*PREPARE), table, broken=whole_dataset, load=load_tensorflow),
    Scenario("prepare --force", command(*PREPARE, "--force"), prepared, broken=dataset_kept, load=load_tensorflow),
    Scenario(
        "export", export("m.keras"), trained(), broken=whole_model("m.keras", was_there=False), load=load_tensorflow
    ),
    Scenario("saved model", export("m"), trained(), broken=whole_model("m", was_there=False), load=load_tensorflow),
    Scenario(
        "train",
        command(*TRAIN),
        make_data,
        lost_of_run,
        broken_run,
        resumes=True,
        limit_s=900.0,
        differs=other_end,
        load=load_tensorflow,
    ),
    Scenario(
        "resume",
        command(*TRAIN),
        half_trained,
        lost_of_run,
        broken_resumed,
        resumes=True,
        limit_s=900.0,
        differs=other_end,
        load=load_tensorflow,
    ),
    Scenario(
        "rewind",
        command(*REWIND),
        trained("train.max_steps=8", "checkpoint.keep=5"),
        lost_of_run,
        broken_run,
        resumes=True,
        load=load_tensorflow,
    ),
]
