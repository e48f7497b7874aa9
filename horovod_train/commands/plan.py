"""The command `plan`: what a config means on N ranks, before anything starts. Needs neither GPU nor TensorFlow.

python -m horovod_train.main plan --config configs/digits_convnet.yaml --np 64
python -m horovod_train.main plan --config … --np 64 --parameters 25.6M --examples-per-s 20000 --time 04:00:00

Follows every path and every name in the config as far as files tell. Starts nothing, writes nothing but an index.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from rich.markup import escape

from horovod_train.commands.plan_facts import Facts, check_positive, collect
from horovod_train.commands.plan_names import wrong_names
from horovod_train.commands.plan_paths import wrong_paths
from horovod_train.commands.plan_resume import Start, find_resume
from horovod_train.commands.tables import open_screen
from horovod_train.config.loader import load, parse_seconds
from horovod_train.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", nargs="+", required=True, metavar="YAML", help="as for training, overrides too")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--output-dir", metavar="DIR", help="the same as output_dir=DIR")
    parser.add_argument("--np", type=int, default=1, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--parameters", metavar="COUNT", help="of the model, such as 25.6M: for sizes")
    parser.add_argument("--examples-per-s", type=float, metavar="X", help="over all ranks, as a run logs it: for time")
    parser.add_argument("--time", metavar="[D-]HH:MM:SS", help="until the scheduler ends the job")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    words = [*arguments.config, *arguments.overrides]
    config, _ = load([word for word in words if "=" not in word], [word for word in words if "=" in word])
    if arguments.output_dir:
        config = dataclasses.replace(config, output_dir=arguments.output_dir)
    if arguments.np < 1:
        raise UserError(f"--np: must be at least 1; received {arguments.np}.")
    check_positive(arguments.examples_per_s, "--examples-per-s")
    time_s = None if arguments.time is None else parse_seconds(arguments.time, "--time")
    check_positive(time_s, "--time")
    faults = [*wrong_paths(config), *wrong_names(config)]
    start: Start | None = None
    passed_over: list[str] = []
    try:
        start, passed_over = find_resume(config)
    except UserError as error:
        faults.append(str(error))
    try:
        facts, notes = collect(
            config,
            arguments.np,
            start,
            parameters=arguments.parameters,
            examples_per_s=arguments.examples_per_s,
            time_s=time_s,
        )
    except UserError as error:
        facts, notes = None, []
        faults = list(dict.fromkeys([*faults, str(error)]))
    notes = [*passed_over, *notes]
    if arguments.json:
        print(json.dumps({**(facts or {}), "notes": notes, "faults": faults}, indent=2))
    else:
        _show(facts, notes, faults)
    if faults:
        raise UserError(f"plan: {len(faults)} {'fault' if len(faults) == 1 else 'faults'} in the config.")
    return 0


def _show(facts: Facts | None, notes: Sequence[str], faults: Sequence[str]) -> None:
    console = open_screen()
    if facts is not None:
        for name, line in _lines(facts):
            console.print(f"[bold]{name:<17}[/]{escape(line)}")
    for note in notes:
        console.print(f"note: {note}", markup=False)
    for fault in faults:
        console.print(f"fault: {fault}", markup=False)


def _lines(facts: Facts) -> list[tuple[str, str]]:
    batch, steps, share = facts["batch"], facts["steps"], facts["records_per_rank"]
    rows = batch["rows_per_rank"]
    per_rank = ", ".join(f"{row} on {count} rank{'s' * (count > 1)}" for row, count in rows.items())
    lines = [("ranks", f"{facts['ranks']}")]
    for split, found in facts["records"].items():
        if found:
            shown = f"{found['records']:,} records in {found['files']} files, {_bytes(found['bytes'])}"
            names = f"{', '.join(found['inputs'])} → {', '.join(found['targets']) or 'nothing'}"
            lines.append((f"{split} data", f"{shown}; {names}"))
    last = steps["records_in_last_of_epoch"]
    partial = "" if last == batch["global"] else f", the last with {last}"
    epochs = f"{steps['epochs']:g} epoch{'s' * (steps['epochs'] != 1)}"
    lines += [
        ("batch", f"{batch['global']:,} over all ranks: {per_rank}"),
        ("steps", f"{steps['per_epoch']:,} an epoch{partial}; {steps['total']:,} in {epochs}"),
        ("records per rank", f"{_range(share['least'], share['most'])} an epoch"),
        *_rate_lines(facts),
        *_size_lines(facts),
    ]
    if facts["resume"]:
        found = facts["resume"]
        lines.append(
            (
                "resumes from",
                f"step {found['step']:,} of {found['ranks']} ranks; {found['steps_left']:,} steps are left",
            )
        )
    if facts["time"]:
        lines.append(("time", _time_line(facts["time"])))
    return lines


def _rate_lines(facts: Facts) -> list[tuple[str, str]]:
    rates = facts["learning_rate"]
    if isinstance(rates, str):
        return [("learning rate", f"as {rates} says; its values need TensorFlow")]
    head = f"{'epoch':>10}  {'step':>12}  rate"
    rows = [f"{row['epoch']:>10,.2f}  {row['step']:>12,}  {row['rate']:.6g}" for row in rates]
    return [("learning rate", head), *(("", row) for row in rows)]


def _size_lines(facts: Facts) -> list[tuple[str, str]]:
    saved, memory = facts["checkpoints"], facts["memory_per_rank"]
    clock = f" and one every {saved['every_minutes']:g} minutes" if saved["every_minutes"] is not None else ""
    size = ""
    if saved["bytes_each"] is not None:
        size = f", {_bytes(saved['bytes_each'])} each, at most {_bytes(saved['bytes_at_most'])} on the disk"
    parts = ", ".join(f"{name} {_bytes(value)}" for name, value in memory["bytes"].items() if value)
    total = _bytes(sum(memory["bytes"].values()))
    parameters = "" if memory["parameters"] is None else f"{memory['parameters']:,} "
    return [
        ("checkpoints", f"{saved['count']:,}{clock}, {saved['kept']} kept{size}"),
        ("parameters", f"{parameters}({memory['source']})"),
        ("memory per rank", f"{total} and activations: {parts}"),
    ]


def _time_line(time: Facts) -> str:
    if "needs_examples_per_s" in time:
        return f"to end within {_clock(time['walltime_s'])} takes {time['needs_examples_per_s']:,.0f} records/s"
    line = f"{_clock(time['seconds'])} for {time['records']:,} records, evaluation counted as training"
    if time["jobs"] is None:
        return line
    if time["jobs"] == 1:
        return f"{line}; fits into {_clock(time['walltime_s'])}, {time['seconds'] / time['walltime_s']:.0%} of it"
    return f"{line}; takes {time['jobs']} jobs of {_clock(time['walltime_s'])}, each going on where the last stopped"


def _range(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _clock(seconds: float) -> str:
    days, rest = divmod(round(seconds), 86400)
    return f"{f'{days}-' if days else ''}{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
