"""Runs of random settings, each trained whole and in parts, compared: random_resumes.py OUT [--disturbed] [SEED ...].

A seed draws a case of differential_more or differential_random, settings of the run, and steps at which the second run
is stopped or killed; then it is started again, as a scheduler does. --disturbed: the starts after the first have
another l2, so that the runs must differ. By hand: `mpirun -np 2 python … /tmp/out 7` prints what differs.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import user_hooks
import yaml
from conftest import split_records
from facts import leave

from horovod_train import main
from horovod_train.config.settings import Config
from horovod_train.distributed.start import start
from horovod_train.training import run as training
from horovod_train.training.hooks import at
from horovod_train.training.hooks import evaluate as evaluating
from horovod_train.training.stopping import StopReason

group = start(Config().horovod, Config().device)
RANK = group.rank
from differential_cases import Case  # noqa: E402  making tensors fixes the number of threads
from differential_more import CASES, DATA  # noqa: E402
from differential_random import case_of  # noqa: E402

OUT = Path(sys.argv[1])
BATCH, EPOCHS = 16, 3
FORMS = ("arrays", "TFRecords", "damaged", "mixture", "fold", "stream")
DAMAGED = (5, *range(32, 48), 77)
"""The bad records of the 100 in damaged TFRecords. In the order of the files a step has no others."""
FIRST_ROWS = 30
"""Of the 100, in a mixture; they come twice in an epoch."""
LEAST_STEPS = EPOCHS * 4
"""With a fold, which leaves 75 rows, and data.drop_remainder."""
MOST_STARTS = 12
PLATEAU = {"name": "ReduceLROnPlateau", "options": {"monitor": "loss", "factor": 0.5, "patience": 1, "min_delta": 0.1}}
STOPPING = {"name": "EarlyStopping", "options": {"monitor": "loss", "patience": 1, "min_delta": 0.2}}
UNCOUNTED = "array progress/early_stopping_evaluations_since"
"""What a run without patience does not count from start to start."""
NOT_COMPARED = re.compile(
    r"seconds|_per_s|s_per_step|_s$|_share|slowest_rank|ranks_apart|unchanged_parameters|bound|memory"
)
"""Figures that no two runs have the same, and those of the last exchange, which no checkpoint has."""


def write_records() -> None:
    """Write the rows of each case's data, as `read_as` reads them."""
    for data, (features, inputs, targets) in DATA.items():
        for part, rows in {"": slice(None), "-first": slice(FIRST_ROWS), "-rest": slice(FIRST_ROWS, None)}.items():
            arrays: dict[str, Any] = {key: array[rows] for key, array in features.items()}
            np.savez(OUT / f"{data}{part}.npz", **arrays)
        names = ["--inputs", *inputs, *sorted(features.keys() & {"w"}), *(["--targets", *targets] if targets else [])]
        words = ["--file", str(OUT / f"{data}.npz"), "--out", str(OUT / data), "--shards", "3", *names]
        assert main.main(["prepare", "npz", *words]) == 0
        damage(shutil.copytree(OUT / data, OUT / f"{data}-damaged"))


def damage(folder: Path) -> None:
    """Change a bit in each of the records that are to be bad."""
    number = itertools.count()
    for path in sorted((folder / "train").glob("*.tfrecord")):
        records = [bytearray(record) for record in split_records(path.read_bytes())]
        for record in records:
            record[20] ^= next(number) in DAMAGED
        path.write_bytes(b"".join(records))


def read_as(form: str, case: Case) -> dict[str, Any]:
    """Return the settings of data: what is read, and how. The forms are FORMS."""
    _, inputs, targets = DATA[case.data]
    path, records = str(OUT / f"{case.data}.npz"), str(OUT / case.data / "train")
    mixture = [{"path": str(OUT / f"{case.data}-first.npz"), "repeats": 2}, str(OUT / f"{case.data}-rest.npz")]
    names = {"inputs": list(inputs), "targets": list(targets), **({"weight": "w"} if case.weighted else {})}
    forms: dict[str, dict[str, Any]] = {
        "arrays": {"train": path, "eval": path, **names},
        "TFRecords": {"train": records, "eval": records, **names},
        "damaged": {"train": f"{OUT}/{case.data}-damaged/train", "eval": records, "on_bad_record": "skip", **names},
        "mixture": {"train": mixture, "eval": path, **names},
        "fold": {"train": path, "eval": path, "fold": "2/4", **names},
        "stream": {"dataset": {"name": "user_streams:of_arrays", "options": {"path": path, **names}}},
    }
    return {"global_batch_size": BATCH, **forms[form]}


class Drawn(NamedTuple):
    case: str
    form: str
    """Of its records, one of FORMS."""
    settings: dict[str, Any]
    """By section."""
    interruptions: dict[int, str]
    """How it is interrupted, by step."""
    steps_per_call: list[int]
    """By start."""
    stops_at_once: list[bool]
    """By start: whether a signal comes before its first step."""
    in_evaluation: int | None
    """The evaluation, from 1, at whose beginning a signal comes; one that is made up for counts again."""


def drawn(seed: int) -> Drawn:
    """Return what a seed draws."""
    draw = random.Random(seed)
    names = [name for name, case in CASES.items() if not case.refused]
    name = draw.choice([draw.choice(names), f"random {draw.randrange(10_000)}"])
    form = draw.choice(FORMS)

    def some(share: float, *values: Any, otherwise: Any = None) -> Any:
        return draw.choice(values) if draw.random() < share else otherwise

    local = {"synchronization": "local", "average_every_steps": draw.randint(2, 5)}
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "shuffle": some(0.7, True, otherwise=False),
            "shuffle_window": some(0.5, 20, 50),
            "drop_remainder": some(0.2, True),
            "cache": some(0.2, "memory"),
            "audit": some(0.3, True),
            "on_bad_record": some(0.2, "skip"),
            "steps_per_epoch": some(0.7, 4, 9),
        },
        "train": {
            "clip_norm": some(0.15, 0.5),
            "l2": some(0.15, 0.01),
            "ema_decay": some(0.2, 0.9),
            "non_finite": some(0.2, "skip"),
            "accumulate_steps": some(0.1, 2),
            "check_agreement_every_steps": some(0.6, 1, 5),
            **some(0.3, local, {"synchronization": "stale"}, otherwise={}),
        },
        "eval": {"every_epochs": some(0.7, 1, 2), "every_steps": some(0.4, 3, 4, 5)},
        "checkpoint": {
            "every_epochs": some(0.7, 1, 2),
            "every_steps": some(0.6, 2, 3, 5),
            "keep": draw.randint(1, 3),
            "best": some(0.4, {"metric": "loss"}),
        },
        "early_stopping": {"patience": some(0.25, 1, 2), "min_delta": draw.choice([0.0, 1e-3, 10.0])},
        "lr_schedule": {"warmup_epochs": some(0.2, 0.5, 1.0), "decay": some(0.3, "cosine", "polynomial")},
        "log": {
            "every_steps": draw.randint(1, 9),
            "progress": "plain",
            "trackers": some(0.4, ["csv"]),
            **some(0.1, {"histograms_every_steps": 4}, otherwise={"tensorboard": False}),
        },
        "horovod": {"compression": some(0.2, "fp16", "bf16"), "predivide": some(0.1, 2.0), "op": some(0.05, "sum")},
        "model": some(0.2, {"freeze": ["kernel"]}, {"freeze": ["kernel"], "unfreeze": {"1": ["kernel"]}}, otherwise={}),
    }
    by_default_not_null = ("every_epochs", "check_agreement_every_steps")
    settings: dict[str, Any] = {
        section: {key: value for key, value in values.items() if value is not None or key in by_default_not_null}
        for section, values in sections.items()
    }
    settings["callbacks"] = some(0.2, [PLATEAU], [STOPPING], otherwise=[])
    _leave_out_what_does_not_go_together(settings, form)
    steps = draw.sample(range(1, LEAST_STEPS), draw.randint(1, 3))
    interruptions = {step: draw.choice(["stop", "kill", "signal"]) for step in steps}
    steps_per_call = [draw.choice([1, 3, 10]) for _ in range(MOST_STARTS)]
    if form in ("TFRecords", "damaged"):
        settings["data"] |= some(0.3, {"stage_dir": str(OUT / "staged")}, otherwise={})
    settings["train"] |= some(0.2, {"max_steps": 10}, otherwise={})
    settings["eval"] |= some(0.3, {"batch_size_per_rank": 7}, otherwise={})
    at_once = some(0.3, *range(1, 4))
    stops_at_once = [number == at_once for number in range(MOST_STARTS)]
    return Drawn(name, form, settings, interruptions, steps_per_call, stops_at_once, some(0.3, 1, 2, 3))


def _leave_out_what_does_not_go_together(settings: dict[str, Any], form: str) -> None:
    synchronization = settings["train"].get("synchronization")
    data = settings["data"]
    if form == "stream":
        settings["data"] = {key: value for key, value in data.items() if key == "steps_per_epoch"}
    else:
        data.pop("steps_per_epoch", None)
    if not data["shuffle"]:
        data.pop("shuffle_window", None)
    if synchronization == "local":
        settings["horovod"] = {}
        settings["train"].pop("non_finite", None)
    if synchronization == "stale":
        settings["horovod"]["sparse_as_dense"] = True
    if synchronization:
        settings["model"].pop("unfreeze", None)
    if PLATEAU in settings["callbacks"]:
        settings["lr_schedule"] = {}
    if not settings["eval"]["every_epochs"] and "every_steps" not in settings["eval"]:
        settings["checkpoint"].pop("best", None)
        settings["early_stopping"] = {}
    if "patience" not in settings["early_stopping"]:
        settings["early_stopping"] = {}


def config_of(name: str, form: str, settings: dict[str, Any]) -> dict[str, Any]:
    case = case_of(name)
    of_case: dict[str, Any] = {
        "data": read_as(form, case),
        "model": {"name": "differential_random:build", "options": {"case": name}},
        "train": {"epochs": EPOCHS},
        "eval": {"batch_size_per_rank": 32},
    }
    for sections in (settings, case.config):
        for section, values in sections.items():
            is_section = isinstance(values, dict)
            of_case[section] = {**of_case.get(section, {}), **values} if is_section else values
    of_case["train"]["epochs"] = EPOCHS
    return of_case


def train(config: dict[str, Any], run_dir: Path, steps_per_call: int) -> int:
    path = OUT / f"config-{RANK}.yaml"
    config = {**config, "train": {**config["train"], "steps_per_call": steps_per_call}}
    path.write_text(yaml.safe_dump(config))
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    return main.main(["--config", str(path), "--output-dir", str(run_dir)])


def ask_to_stop(on_rank: int) -> None:
    if on_rank % group.size == RANK:
        os.kill(os.getpid(), signal.SIGTERM)


def train_in_parts(config: dict[str, Any], run_dir: Path, drawn: Drawn) -> tuple[list[int], list[int]]:
    """Train until a start ends by itself; return the exit code of each start, and on root where some were stopped."""
    left = dict(drawn.interruptions)
    killed, is_killed = run_dir.with_name(f"{run_dir.name}-killed"), False
    evaluations = itertools.count(1)
    begin, evaluate_all = evaluating.begin_callbacks, evaluating._evaluate_all

    def interrupt(run: Any, step: int) -> Any:
        nonlocal is_killed
        how = left.pop(step, None)
        is_killed = is_killed or how == "kill"
        if how == "kill" and RANK == 0:
            run.store.wait()
            # A tracker's thread renames its partial files meanwhile.
            ignored = shutil.ignore_patterns("lease.json", "*.partial")
            shutil.copytree(run_dir, killed, symlinks=True, ignore=ignored)
        if how == "signal":
            ask_to_stop(on_rank=step)
            return None
        return StopReason("that is enough", restartable=True) if how else None

    def evaluate_and_stop(*arguments: Any) -> Any:
        if next(evaluations) == drawn.in_evaluation:
            ask_to_stop(on_rank=1)
        return evaluate_all(*arguments)

    def begin_and_stop(run: Any) -> None:
        begin(run)
        if drawn.stops_at_once[len(codes)]:
            ask_to_stop(on_rank=0)

    codes: list[int] = []
    stops: list[int] = []
    for per_call in drawn.steps_per_call:
        is_killed = False
        vars(user_hooks)["interrupted"] = at(sorted(left), interrupt)
        hooks = ["user_hooks:interrupted"] if left else []
        disturbed = {"train": {**config["train"], "l2": 0.5}} if codes and "--disturbed" in sys.argv else {}
        with (
            mock.patch.object(training, "begin_callbacks", begin_and_stop),
            mock.patch.object(evaluating, "_evaluate_all", evaluate_and_stop),
        ):
            codes.append(train({**config, "hooks": hooks, **disturbed}, run_dir, per_call))
        signal.alarm(0)
        if RANK == 0 and is_killed:
            shutil.rmtree(run_dir)
            killed.rename(run_dir)
        elif RANK == 0 and codes[-1] == 75:
            stops.append(json.loads((run_dir / "summary.json").read_text())["steps"])
        if codes[-1] != 75 and not is_killed:
            break
    return codes, stops


def outcome(run_dir: Path, left_out: list[int]) -> dict[str, Any]:
    """What a run has left, without times. left_out: steps without their lines of training: a stop writes one."""
    from horovod_train.checkpoint.layout import open_checkpoint
    from horovod_train.checkpoint.tensors import read_arrays

    def without_times(row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if not NOT_COMPARED.search(key)}

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["split"] != "train" or line["step"] not in left_out]
    summary = json.loads((run_dir / "summary.json").read_text())
    del summary["config"]
    parts = {key: without_times(value) if isinstance(value, dict) else value for key, value in summary.items()}
    checkpoint = open_checkpoint(str(run_dir), "here")
    best = run_dir / "checkpoints" / "best"
    found: dict[str, Any] = {f"row {number}": without_times(row) for number, row in enumerate(rows)}
    found |= {f"summary {key}": value for key, value in without_times(parts).items()}
    found |= {f"array {name}": array.tobytes() for name, array in read_arrays(checkpoint).items()}
    found["best"] = str(best.readlink()) if best.is_symlink() else None
    for path in sorted((run_dir / "csv").glob("*")):
        head, *lines = [line.split(",") for line in path.read_text().splitlines()]
        keep = [number for number, key in enumerate(head) if not NOT_COMPARED.search(key)]
        kept = [line for line in [head, *lines] if not line[0].isdigit() or int(line[0]) not in left_out]
        found |= {f"{path.name} {n}": [line[i] for i in keep] for n, line in enumerate(kept)}
    return found


def differences(seed: int) -> dict[str, Any]:
    """Train whole and in parts; return what was drawn, the exit codes, and on root what differs."""
    all_drawn = drawn(seed)
    settings = all_drawn.settings
    config = config_of(all_drawn.case, all_drawn.form, settings)
    told: dict[str, Any] = all_drawn._asdict()
    whole, parts = OUT / f"{seed}-whole", OUT / f"{seed}-parts"
    told["whole"] = train(config, whole, 10)
    signal.alarm(0)
    if told["whole"]:
        return told
    told["codes"], stops = train_in_parts(config, parts, all_drawn)
    if RANK == 0:
        one, other = outcome(whole, stops), outcome(parts, stops)
        if "patience" not in settings["early_stopping"]:
            del one[UNCOUNTED], other[UNCOUNTED]
        told["differ"] = {
            key: "…" if key.startswith("array") else (one.get(key), other.get(key))
            for key in {**one, **other}
            if repr(one.get(key)) != repr(other.get(key))
        }
        for folder in (whole, parts):
            shutil.rmtree(folder)
    return told


if __name__ == "__main__":
    if group.is_root:
        write_records()
    group.barrier()
    group.close()
    found = {}
    for seed in [word for word in sys.argv[2:] if not word.startswith("--")]:
        found[seed] = differences(int(seed))
        if RANK == 0:
            print("SEED", seed, json.dumps(found[seed], default=str), flush=True)
        if found[seed]["whole"]:
            break  # a rank that was refused may still be told so, in the next run
    leave(RANK, {"cases": found})
