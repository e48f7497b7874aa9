"""The command `doctor`: checks whether this machine, or this job, is fit to train on. One line per check.

python -m horovod_train.main doctor                                   this machine
horovodrun -np 4 python -m horovod_train.main doctor                  the job, as it would be started to train

Brings the ranks together, runs the checks and shows the results. The checks are in doctor_checks.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from horovod_train.commands.cli import (
    above_0,
    add_config,
    check_out,
    load_from_arguments,
    nearest_existing,
    open_screen,
    write_out,
)
from horovod_train.config.settings import Config, WatchConfig
from horovod_train.distributed.launch import launcher
from horovod_train.errors import AlreadySaid, RunError, one_line
from horovod_train.output import logs
from horovod_train.output.files import Artifact, json_text
from horovod_train.output.rank_log import RankLog

FINDINGS = Artifact(
    "a file that doctor wrote", ".+", content_matches=lambda path: path.read_bytes().startswith(b'{\n  "checks": ')
)
COLOURS = {"ok": "green", "warning": "yellow", "fail": "red"}
_NOT_TOGETHER = (
    "the ranks did not come together within {:.0f} s. Are all hosts up, and can they reach one another? With several "
    "networks name theirs: horovodrun --network-interfaces"
)

Level = Literal["ok", "warning", "fail"]
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class CheckResult:
    """level "fail": a run here would fail, hang or be wrong. "warning": all or part of it would be slow."""

    name: str
    level: Level
    text: str
    do: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """The figures behind the line, in types that JSON can hold."""
    rows: tuple[str, ...] = ()
    """Lines of a table to show below."""


def ok(name: str, text: str, facts: Facts | None = None, rows: Sequence[str] = ()) -> CheckResult:
    return CheckResult(name, "ok", text, "", dict(facts or {}), tuple(rows))


def warning(name: str, text: str, do: str, facts: Facts | None = None, rows: Sequence[str] = ()) -> CheckResult:
    return CheckResult(name, "warning", text, do, dict(facts or {}), tuple(rows))


def fail(name: str, text: str, do: str, facts: Facts | None = None) -> CheckResult:
    return CheckResult(name, "fail", text, do, dict(facts or {}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "check with the horovod, device and output_dir of these config files")
    parser.add_argument("--dir", metavar="DIR", help="folder that all ranks should see; default: output_dir, or here")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the findings as JSON, to FILE if given")
    parser.add_argument(
        "--timeout",
        type=above_0,
        default=60.0,
        metavar="S",
        help="seconds in which all ranks must start, and each check be over; default %(default)g",
    )


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if no check failed, 1 if one did. Collective."""
    config = load_from_arguments(arguments.config) if arguments.config else None
    if arguments.json not in (None, "-"):
        check_out("--json", arguments.json, FINDINGS)
    logs.load_tensorflow()
    findings = []
    for finding, is_root in _examine(config, arguments):
        findings.append(finding)
        if is_root and arguments.json != "-":
            _show(finding)
    if is_root and arguments.json is not None:
        _write(findings, arguments.json)
    return int(any(finding.level == "fail" for finding in findings))


def _examine(config: Config | None, arguments: argparse.Namespace) -> Iterator[tuple[CheckResult, bool]]:
    """Yield each finding when there is one, the same on all ranks, and whether this rank shows it."""
    from horovod_train.distributed.start import start
    from horovod_train.distributed.watchdog.watchdog import RunEnd, open_watchdog, stall_environment

    chosen = config or Config()
    within_s = arguments.timeout
    limits = WatchConfig(
        chosen.watch.enabled, warn_after_s=within_s / 3, stop_after_s=within_s, first_step_after_s=within_s
    )
    try:
        environment = stall_environment(limits)
        with _end_unless_together(within_s):
            group = start(chosen.horovod, chosen.device, deterministic=chosen.deterministic, environment=environment)
    except AlreadySaid:
        yield fail("start", "another rank could not start; it says why", ""), False
        return
    except Exception as error:  # libraries may raise anything here
        rank = launcher.detect().rank
        # Usually the same on all ranks: root reports it, and its end ends the others before they report.
        time.sleep(0.0 if rank == 0 else launcher.ROOT_REPORTS_FIRST_S)
        if isinstance(error, RunError):
            yield fail("start", str(error), ""), True
            return
        text = f"Horovod does not start on rank {rank} ({socket.gethostname()}): {one_line(error)[:300]}"
        yield fail("start", text, "See docs/install.md."), True
        return
    from horovod_train.commands.doctor_checks import run_checks  # after Horovod has started

    folder = Path(arguments.dir or (config.output_dir if config and config.output_dir else "."))
    no_log = RankLog()
    with RunEnd(group, no_log, open_watchdog(group, no_log, limits)) as run_end:
        group.heartbeat.has_stepped = True  # an error of a check is none of the user's
        for finding in run_checks(group, config, nearest_existing(folder).resolve()):
            # Figures differ between ranks; the exit code must not.
            yield CheckResult(**group.broadcast_object(vars(finding))), group.is_root
        group.close()
        run_end.close()


def _write(findings: Sequence[CheckResult], to: str) -> None:
    checks = [{key: value for key, value in vars(finding).items() if key != "rows"} for finding in findings]
    text = json_text({"checks": checks}, indent=2)
    if to == "-":
        print(text, flush=True)
    else:
        write_out("--json", to, text + "\n", FINDINGS)


def _show(finding: CheckResult) -> None:
    console = open_screen(launched=launcher.detect().launcher != "none")
    # In one write: launchers put a prefix before each part.
    level, text = f"{finding.level:<8}", f"{finding.name:<16}{finding.text}" + f". {finding.do}" * bool(finding.do)
    console.print(Text.assemble((level, COLOURS[finding.level]), text))
    for row in finding.rows:
        console.print(f"{'':<24}{row}", markup=False)
    sys.stdout.flush()


@contextmanager
def _end_unless_together(timeout_s: float) -> Iterator[None]:
    """End the process if Horovod waits forever for a rank that does not arrive: no exception can interrupt it."""

    def end() -> None:
        print(f"fail    start           {_NOT_TOGETHER.format(timeout_s)}.", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    # MPI may wait while it holds Python's lock, and then no Python thread can run.
    faulthandler.dump_traceback_later(timeout_s + 2, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
