"""The most expensive ops of profiled steps, from what TensorFlow's profiler wrote. Does not profile; see tensorboard.

    python -m horovod_train.output.profile FILE.xplane.pb …       prints them as JSON

The package xprof reads the profiles. It runs in another process, because it is C++ that logs to standard error,
and whose failure must not end a run.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horovod_train.config.registry import import_extra
from horovod_train.errors import UserError

MOST_OPS = 10
READ_WITHIN_S = 60.0

_LOOP = re.compile(r"(?<![\w-])while/(body/_\d+/)?")
"""A part of each name, from the loop over the steps of a compiled call."""


class Op(NamedTuple):
    """An op, or all of its occurrences in the step. ms: own time, without what it calls, in all threads together."""

    kind: str
    name: str
    ms: float


class Costs(NamedTuple):
    """The ops of a profiled step. place: "Host" or "Device"; ms: of all its ops. problem: why there are none, or ""."""

    step: int
    place: str
    ms: float
    ops: Sequence[Op]
    problem: str = ""

    @property
    def heading(self) -> str:
        if self.problem:
            return f"profile of step {self.step}: {self.problem}"
        return f"profile of step {self.step}: {self.ms:.1f} ms in ops on the {self.place.lower()}, all threads together"

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield ms, share, kind and name of each of the most expensive ops."""
        for op in self.ops:
            yield f"{op.ms:.2f}", f"{op.ms / self.ms:.1%}".replace("%", " %"), op.kind, op.name

    def text(self) -> str:
        """Return the heading and, below it, a line for each op."""
        lines = [f"{ms:>10} ms  {share:>6}  {kind:<36}  {name}" for ms, share, kind, name in self.rows()]
        return "\n".join([self.heading, *lines])


def find_profiles(run_dir: Path) -> list[Path]:
    """Return the folders of profiled steps, in their order."""
    return sorted((run_dir / "tensorboard" / "plugins" / "profile").glob("step-*"))


def read_profiles(folders: Sequence[Path]) -> list[Costs]:
    """Return what the ops in each folder cost, or why that cannot be read."""
    files = [next(folder.glob("*.xplane.pb"), None) for folder in folders]
    steps = [int(folder.name.split("-")[1]) for folder in folders]
    existing_files = [str(file) for file in files if file]
    costs_by_file, problem = _read_in_subprocess(existing_files) if existing_files else ({}, "")
    costs = []
    for step, file in zip(steps, files, strict=True):
        why = problem or ("" if file else "there is no file *.xplane.pb")
        place, ms, ops = costs_by_file.get(str(file), ("", 0.0, []))
        if not why and not ops:
            why = f"{file} holds no ops"
        costs.append(Costs(step, place, ms, [Op(*op) for op in ops], why and f"cannot be read: {why}."))
    return costs


def _read_in_subprocess(files: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Run this module; return what it prints, and what went wrong or ""."""
    if importlib.util.find_spec("xprof") is None:
        return {}, "it needs xprof: pip install 'horovod_train[profile]'"
    command = [sys.executable, "-m", __name__, *files]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=READ_WITHIN_S, stdin=subprocess.DEVNULL
        )
        return json.loads(completed.stdout.splitlines()[-1]), ""
    except subprocess.TimeoutExpired:
        return {}, f"xprof took more than {READ_WITHIN_S:.0f} s"
    except subprocess.CalledProcessError as error:
        messages = error.stderr.strip().splitlines() or ["no word"]
        return {}, f"xprof ended with exit code {error.returncode}: {messages[-1]}"
    except (OSError, ValueError, IndexError) as error:
        return {}, f"{type(error).__name__}: {error}"


def most_expensive(file: str) -> tuple[str, float, list[Op]]:
    """Return place, ms of all ops, and the most expensive ops. A step that used a GPU is told by its ops there.

    Raises UserError if xprof is not installed.
    """
    convert: Any = import_extra("xprof.convert.raw_to_tool_data", "profile", "log.profile_at_steps")
    with tempfile.TemporaryDirectory() as folder:  # xprof leaves a file next to the profile
        link = Path(folder) / Path(file).name
        link.symlink_to(Path(file).resolve())
        answer, _ = convert.xspace_to_tool_data([str(link)], "framework_op_stats", {})
    tables = json.loads(answer or b"[]")  # as Google Charts take them
    if not tables:
        return "", 0.0, []
    columns = [column["id"] for column in tables[0]["cols"]]
    rows = [dict(zip(columns, (cell["v"] for cell in row["c"]), strict=True)) for row in tables[0]["rows"]]
    busy = [row for row in rows if row["type"] != "IDLE" and row["total_self_time"] > 0]
    place = "Device" if any(row["host_or_device"] == "Device" for row in busy) else "Host"
    ops = [
        Op(str(row["type"]), _LOOP.sub("", str(row["operation"])), row["total_self_time"] / 1000)
        for row in busy
        if row["host_or_device"] == place
    ]
    ops.sort(key=lambda op: op.ms, reverse=True)
    return place, sum(op.ms for op in ops), ops[:MOST_OPS]


if __name__ == "__main__":
    try:
        print(json.dumps({file: most_expensive(file) for file in sys.argv[1:]}))
    except UserError as error:
        sys.exit(str(error))
