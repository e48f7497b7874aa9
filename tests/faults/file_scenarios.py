"""Parts of the package that write files, each tried by itself; and what the judge must find."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from command_scenarios import broken_checkpoints, load_tensorflow, lost_audit, rows
from scenario import Lost, Scenario, nothing


def keep_files() -> int:
    """All that root writes beside checkpoints and TensorBoard's files, from the lease to the summary."""
    from horovod_train.config.settings import LogConfig
    from horovod_train.data.audit import AuditLog, Start
    from horovod_train.output import logs, rank_log
    from horovod_train.output.lease import open_lease
    from horovod_train.output.run_dir import open_output

    with logs.to_console(is_root=True):
        output = open_output("run", LogConfig(tensorboard=False), is_root=True, launched=True)
        lease = open_lease(output.directory, refresh_s=0.005)
        rank_log.make_folder(output.directory)
        log = rank_log.open_rank_log("run", 0, "here", start_text="begins")
        with logs.to_file(log.write):
            output.rewind(2)
            output.write_config("seed: 1\n")
            audit = AuditLog("run", Start(0, 0, 0, 1, num_records=8, global_batch_size=2, steps_per_epoch=4, data=""))
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


def save_checkpoints(resume: str = "auto", course: float = 0.0) -> int:
    """Finds where to start, saves three times, and keeps two and the best. What is saved tells the course."""
    from horovod_train.output import logs

    with logs.to_console(is_root=True):
        return save_three_times(resume, course)


def save_three_times(resume: str, course: float) -> int:
    from horovod_train.checkpoint.layout import CHECKPOINTS, Best, Facts, path_in
    from horovod_train.checkpoint.manager import CheckpointStore
    from horovod_train.checkpoint.tensors import read_arrays
    from horovod_train.errors import RunError

    run = Path("run")
    if not run.exists():  # a call of this scenario's own must not be one that fails
        run.mkdir()
    store = CheckpointStore(run / CHECKPOINTS, keep=2)
    found = store.find(resume)
    first = found.facts.step if found else 0
    store.rewind(first)
    config = {"seed": 1, "checkpoint": {"resume": resume}}
    for step in range(first + 1, first + 4):
        arrays: dict[str, np.ndarray] = {
            "model/kernel": np.full((3, 5), step + course, np.float32),
            "progress/step": np.asarray(step, np.int64),
        }
        best, began_at = Best("loss", 0.5, first + 1), path_in(resume)
        store.save(arrays, Facts(step, 1, 64, 2, config, {"keras": "3"}, best=best, began_at=began_at))
    if failure := store.wait():
        raise RunError(failure)
    newest = store.find("auto")
    assert newest is not None
    assert newest.facts.step == first + 3  # and not one that was left
    assert (read_arrays(newest)["model/kernel"] == first + 3 + course).all()
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


FIRST_CHECKPOINT = "run/checkpoints/step-000000001"


def leave_a_course() -> int:
    """Goes back to the first of three checkpoints, so that the others are of a course that was left."""
    return save_checkpoints(FIRST_CHECKPOINT, 100.0)


def of_either_course(here: Path, plain: Path) -> list[str]:
    """What has its name is whole, and of the old course or of the new one."""
    from horovod_train.checkpoint.layout import Damaged, steps_in, verify
    from horovod_train.checkpoint.tensors import read_arrays

    folder, found = here / "run/checkpoints", []
    for step in steps_in(folder):
        try:
            kernel = read_arrays(verify(folder / f"step-{step:09d}"))["model/kernel"]
        except Damaged as error:
            found.append(f"step {step}: {error}")
            continue
        found += [] if float(kernel.min()) in (step, step + 100) else [f"step {step}: of neither course"]
    return found


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
        from horovod_train.inference.predictions import PredictionsFile

        specs: dict[str, Any] = {"output": ((3,), np.dtype(np.float32)), "label": ((), np.dtype(np.int64))}
        with contextlib.closing(PredictionsFile(Path(name), specs, 10)) as file:
            for first in (0, 5):
                ids = np.arange(first, first + 5)
                rows: dict[str, Any] = {"output": np.repeat(ids[:, None], 3, axis=1).astype(np.float32), "label": ids}
                file.put(ids, rows)
            for _ in file.write():
                pass
        return 0

    return run


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


# What the judge must find.


def careless() -> int:
    """Writes as this package must not: failures are ignored, and a checkpoint has its name before it is whole."""
    from contextlib import suppress

    from horovod_train.checkpoint.layout import Facts
    from horovod_train.checkpoint.tensors import write

    place = Path("run/checkpoints/step-000000001")
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(Exception):
        write(place, {"model/kernel": np.ones(3)}, Facts(1, 1, 64, 1, {}, {}))
    with suppress(OSError), open("run/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"split": "train", "step": 1}\n')
    one, other = socket.socketpair()
    one.sendall(b"somebody reads this")
    other.close()
    return 0


def lost_metrics(here: Path, plain: Path) -> list[str]:
    one, other = (folder / "run/metrics.jsonl" for folder in (here, plain))
    return [] if one.exists() and one.read_bytes() == other.read_bytes() else ["metrics"]


FILE_SCENARIOS = [
    Scenario(
        "careless (to be found)",
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
    Scenario(
        "rewound checkpoints",
        leave_a_course,
        save_checkpoints,
        lost_checkpoints,
        of_either_course,
        resumes=True,
        load=load_tensorflow,
    ),
    Scenario("npz", write_predictions("out.npz"), broken=whole_npz, load=load_tensorflow),
    Scenario("csv", write_predictions("out.csv"), broken=whole_or_not_there("out.csv"), load=load_tensorflow),
]
