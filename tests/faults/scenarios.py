"""What is tried under faults: parts of the package and whole runs, each with what must hold whatever call fails.

Written once for all scenarios (see `judge`): no traceback and no signal; a bad end is one line that begins "error:",
or on several ranks "stopped:"; what is lost against the run without faults has been said; every checkpoint that has its
name is whole and holds what that of the plain run holds; and a run that has not come to its end does so when it is
started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

KNOWN_EXIT_CODES = frozenset({0, 1, 2, 75, 86, 87})
Lost = Callable[[Path, Path], list[str]]


def nothing() -> int:
    return 0


@dataclass
class Scenario:
    """run: called in a folder that holds what `prepare` left, the data below it excepted; returns the exit code.

    lost, broken: (folder, folder of the plain run) → what the first lacks; what in it is not what its name says.
    resumes: whether a second start must come to the end.
    """

    name: str
    run: Callable[[], int]
    prepare: Callable[[], int] = nothing
    lost: Lost = lambda here, plain: []
    broken: Callable[[Path, Path], list[str]] = lambda here, plain: []
    ranks: int = 1
    kinds: frozenset[str] = frozenset()
    limit_s: float = 60.0
    exit_codes: frozenset[int] = KNOWN_EXIT_CODES
    resumes: bool = False
    load: Callable[[], None] = field(default=lambda: None)

    def judge(self, zygote: Any, plain: Any, finished: Any) -> list[str]:
        found = self._ends_well(finished)
        here, plain_here = zygote.here, zygote.plain
        found += self.broken(here, plain_here)
        is_whole = not any(finished.exit_codes)
        lost = self.lost(here, plain_here) if is_whole else []
        if lost and "warning:" not in finished.stdout + finished.stderr:
            found.append(f"lost without a word: {lost}")
        if not found and self.resumes and not is_whole:
            again = zygote.start_again()
            if any(again.exit_codes) or self.broken(here, plain_here):
                found.append(f"does not resume: {self.broken(here, plain_here)} {again.text}")
        return found

    def _ends_well(self, finished: Any) -> list[str]:
        found = []
        said = finished.stdout + finished.stderr
        if "Traceback (most recent call last)" in said:
            found.append("a traceback")
        errors = [line for line in said.splitlines() if line.startswith("error:")]
        for exit_code in finished.exit_codes:
            if exit_code not in self.exit_codes:
                found.append(f"exit code {exit_code}")
        if self.ranks > 1:
            errors = (errors + [line for line in said.splitlines() if line.startswith("stopped:")])[:1]
        if any(finished.exit_codes) and len(errors) != 1:
            found.append(f"{len(errors)} lines that begin with error: for exit codes {finished.exit_codes}")
        if not any(finished.exit_codes) and errors:
            found.append("exit code 0 after an error")
        repeated = [line for line in set(said.splitlines()) if said.splitlines().count(line) > 1 and "warning:" in line]
        return found + [f"said more than once: {line}" for line in repeated]


# Whole commands.

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
    from horovod_train.output import tensorflow_noise

    tensorflow_noise.load_tensorflow()
    import horovod_train.inference.run
    import horovod_train.training.run  # noqa: F401


def make_data() -> int:
    """70 records, a packed file among them, and the config. Outside the folder that faults come to."""
    import gzip

    sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
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
    from horovod_train.checkpoint.manifest import Damaged
    from horovod_train.checkpoint.tensors import verify

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


# Parts.


def keep_files() -> int:
    """All that root writes beside checkpoints and TensorBoard's files, from the lease to the summary."""
    from horovod_train.data.audit import AuditLog, Start
    from horovod_train.output import rank_log
    from horovod_train.output.lease import open_lease
    from horovod_train.output.run_dir import open_output

    output = open_output("run", is_root=True, tensorboard=False, progress="plain", launched=False)
    lease = open_lease(output.directory, output.say, refresh_s=0.005)
    rank_log.make_folder(output.directory)
    log = rank_log.open_rank_log("run", 0, "here", said="begins")
    output.rewind(2)
    output.write_config("seed: 1\n")
    audit = AuditLog("run", Start(0, 0, 0, 1, num_records=8, global_batch_size=2, steps_per_epoch=4))
    for step in range(4):
        audit.append(0, step, np.arange(2 * step, 2 * step + 2)[None])
        output.append_metrics("train", step + 3, 0, {"loss": 1.0})
        log.write("phase", f"step {step}")
        assert lease.is_ours()
    audit.close()
    output.write_summary({"steps": 4, "weights_sha256": ""})
    output.close()
    lease.close()
    log.end("done", 0)
    return 0


def keep_files_before() -> int:
    """An earlier start's: a lease of a process that has died, metrics to take back, an audit that is void."""
    code = keep_files()
    run = Path("run")
    dead = {"host": "here", "pid": 2**22 + 1, "job": "", "since": "", "started": "1", "token": "0"}
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    dead["machine"] = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    (run / "lease.json").write_text(json.dumps(dead))
    return code


def lost_files(here: Path, plain: Path) -> list[str]:
    found = [name for name in ("config.yaml", "summary.json") if not (here / "run" / name).exists()]
    found += [] if rows(here / "run") == rows(plain / "run") else ["metrics"]
    files = [folder / "run" / "logs" / "rank-0.log" for folder in (here, plain)]
    steps = [file.read_text(errors="replace").count("step") if file.exists() else 0 for file in files]
    found += [] if steps[0] == steps[1] else ["log"]
    found += [] if (here / "run/logs/rank-0.end.json").exists() else ["end"]
    return found + lost_audit(here)


def repeated_files(here: Path, plain: Path) -> list[str]:
    """A line that came twice, or half of one."""
    try:
        found = rows(here / "run")
    except ValueError as error:
        return [f"metrics.jsonl: {error}"]
    return [] if len(found) == len(set(found)) else ["metrics.jsonl: a line twice"]


def save_checkpoints() -> int:
    """Finds where to start, saves three times, and keeps two and the best."""
    from horovod_train.checkpoint.manager import open_store
    from horovod_train.checkpoint.tensors import Best, Facts
    from horovod_train.errors import RunError

    run = Path("run")
    run.mkdir(exist_ok=True)
    store = open_store(run, keep=2, say=print)
    found = store.find("auto")
    first = found.facts.step if found else 0
    store.rewind(first)
    config = {"seed": 1, "checkpoint": {"resume": "auto"}}
    for step in range(first + 1, first + 4):
        arrays = {"model/kernel": np.full((3, 5), step, np.float32), "progress/step": np.asarray(step, np.int64)}
        store.save(arrays, Facts(step, 1, 64, 2, config, {"keras": "3"}, best=Best("loss", 0.5, first + 1)))
    if failure := store.wait():
        raise RunError(failure)
    return 0


def checkpoints_before() -> int:
    """Three checkpoints, the newest of them damaged, and what a save left that was cut short."""
    code = save_checkpoints()
    damaged = Path("run/checkpoints/step-000000003/state.index")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    cut = Path("run/checkpoints/.step-000000009.00000000.partial")
    cut.mkdir()
    (cut / "state.index").write_bytes(b"half")
    return code


def lost_checkpoints(here: Path, plain: Path) -> list[str]:
    names = {path.name for path in (plain / "run/checkpoints").iterdir()}
    best = "run/checkpoints/best"
    found = [name for name in sorted(names) if not (here / "run/checkpoints" / name).exists()]
    return found + ([] if os.readlink(here / best) == os.readlink(plain / best) else ["best"])


def one_good_checkpoint(here: Path, plain: Path) -> list[str]:
    """What was good before is there, or a newer one is; nothing that has its name is half."""
    folder = here / "run/checkpoints"
    found = (
        [] if any(re.fullmatch(r"step-\d{9}", path.name) for path in folder.iterdir()) else ["no checkpoint is left"]
    )
    return found + broken_checkpoints(folder, plain / "run/checkpoints", {"step-000000003"})


def write_predictions(name: str) -> Callable[[], int]:
    def run() -> int:
        from horovod_train.inference.predictions import open_predictions

        specs = {"output": ((3,), np.dtype(np.float32)), "label": ((), np.dtype(np.int64))}
        with contextlib.closing(open_predictions(name, specs, 10, is_root=True)) as file:
            for first in (0, 5):
                ids = np.arange(first, first + 5)
                rows = {"output": np.repeat(ids[:, None], 3, axis=1).astype(np.float32), "label": ids}
                file.put(ids, rows)
            file.finish()
        return 0

    return run


def export(out: str, *more: str) -> Callable[[], int]:
    return command("export", "run", "--out", out, *more)


def whole_model(out: str, *, was_there: bool) -> Lost:
    def broken(here: Path, plain: Path) -> list[str]:
        names = sorted(str(path.relative_to(plain)) for path in [plain / out, *(plain / out).rglob("*")])
        missing = [name for name in names if not (here / name).exists()]
        return [f"{name} is missing" for name in missing] if was_there or (here / out).exists() else []

    return broken


def whole_or_not_there(name: str) -> Lost:
    """A file of this name is that of the plain run."""

    def broken(here: Path, plain: Path) -> list[str]:
        is_there = (here / name).exists()
        return [f"{name} is half"] if is_there and (here / name).read_bytes() != (plain / name).read_bytes() else []

    return broken


def whole_npz(here: Path, plain: Path) -> list[str]:
    if not (here / "out.npz").exists():
        return []
    with np.load(here / "out.npz") as one, np.load(plain / "out.npz") as other:
        return [name for name in other.files if not np.array_equal(one[name], other[name])]


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


# What the judge must find.


def careless() -> int:
    """Writes as this package must not: failures are ignored, and a checkpoint has its name before it is whole."""
    from contextlib import suppress

    from horovod_train.checkpoint.tensors import Facts, write

    place = Path("run/checkpoints/step-000000001")
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(Exception):
        write(place, {"model/kernel": np.ones(3)}, Facts(1, 1, 64, 1, {}, {}))
    with suppress(OSError), open("run/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"split": "train", "step": 1}\n')
    return 0


def lost_metrics(here: Path, plain: Path) -> list[str]:
    one, other = (folder / "run/metrics.jsonl" for folder in (here, plain))
    return [] if one.exists() and one.read_bytes() == other.read_bytes() else ["metrics"]


ALL = [
    Scenario(
        "careless",
        careless,
        lost=lost_metrics,
        broken=lambda here, plain: broken_checkpoints(here / "run/checkpoints", plain / "run/checkpoints"),
        load=load_tensorflow,
    ),
    Scenario("files", keep_files, keep_files_before, lost_files, repeated_files),
    Scenario("new files", keep_files, nothing, lost_files, repeated_files),
    Scenario(
        "checkpoints", save_checkpoints, checkpoints_before, lost_checkpoints, one_good_checkpoint, load=load_tensorflow
    ),
    Scenario("npz", write_predictions("out.npz"), broken=whole_npz, load=load_tensorflow),
    Scenario("csv", write_predictions("out.csv"), broken=whole_or_not_there("out.csv"), load=load_tensorflow),
    Scenario("prepare", command(*PREPARE), table, broken=whole_dataset, load=load_tensorflow),
    Scenario("prepare --force", command(*PREPARE, "--force"), prepared, broken=dataset_kept, load=load_tensorflow),
    Scenario(
        "export", export("m.keras"), trained(), broken=whole_model("m.keras", was_there=False), load=load_tensorflow
    ),
    Scenario("saved model", export("m"), trained(), broken=whole_model("m", was_there=False), load=load_tensorflow),
    Scenario("train", command(*TRAIN), make_data, lost_of_run, broken_run, resumes=True, load=load_tensorflow),
    Scenario("resume", command(*TRAIN), half_trained, lost_of_run, broken_resumed, resumes=True, load=load_tensorflow),
    Scenario(
        "ranks",
        command(*TRAIN, "log.tensorboard=false", "log.graph=false", "log.histograms_every_steps=null"),
        make_data,
        broken=broken_run,
        ranks=2,
        kinds=frozenset({"send"}),
        # Horovod's C++ knows no other end where the rendezvous fails for good; the launcher then ends the other rank.
        exit_codes=KNOWN_EXIT_CODES | {-signal.SIGABRT, -signal.SIGTERM},
        resumes=True,
        load=load_tensorflow,
    ),
]
SCENARIOS = {scenario.name: scenario for scenario in ALL}
