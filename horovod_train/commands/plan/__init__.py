"""The command `plan`: what a config means on N ranks, before anything starts.

python -m horovod_train.main plan --config configs/digits_convnet.yaml --np 64
python -m horovod_train.main plan --config … --np 64 --examples-per-s 20000 --time 04:00:00
python -m horovod_train.main plan --config … --fast                                       without TensorFlow

Checks every path, and builds the model and what it is trained with on the CPU. Starts no ranks, writes nothing but an
index. The numbers come from facts; model builds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.markup import escape

from horovod_train.checkpoint.layout import CHECKPOINTS, lack_of_room, most_at_once
from horovod_train.commands.cli import (
    above_0,
    add_config_arguments,
    count,
    files_or_folder,
    load_config,
    missing_data,
    nearest_existing,
    open_screen,
    require_output_dir,
)
from horovod_train.commands.plan.facts import Facts, Pace, Sizes, collect, find_resume, open_outlook
from horovod_train.config.loader import parse_seconds
from horovod_train.config.settings import Config
from horovod_train.errors import UserError
from horovod_train.optim.schedules import Horizon, build_formula
from horovod_train.output import logs

T = TypeVar("T")

NOT_CHECKED = (
    "--fast: model, loss, metrics, optimizer, data.augment and data.parse were not built: their names and options are "
    "not checked, and memory is not known"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--np", type=count, default=1, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--fast", action="store_true", help="build no model: answers in a second, without TensorFlow")
    parser.add_argument(
        "--examples-per-s",
        type=above_0,
        metavar="X",
        help="speed over all ranks, as a run logs it; for the time it takes",
    )
    parser.add_argument(
        "--time", metavar="[D-]HH:MM:SS", help="time of a job; for the number of jobs, or the speed that is needed"
    )
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    config, origins = load_config(arguments)
    if config.data.dataset:
        stream = config.data.dataset.name
        raise UserError(f"plan: data.dataset: {stream} is a stream, of which only a run knows how many steps it has.")
    time_s = None if arguments.time is None else parse_seconds(arguments.time, "--time")
    if time_s is not None and not time_s > 0:
        raise UserError(f"--time: must be above 0; received {time_s:g}.")
    facts, notes, faults = _look(
        config, missing_data(config, origins), arguments.np, arguments.fast, Pace(arguments.examples_per_s, time_s)
    )
    if arguments.json:
        print(json.dumps({**(facts or {}), "notes": notes, "faults": faults}, indent=2))
    else:
        _show(facts, notes, faults)
    if faults:
        raise UserError(f"plan: {len(faults)} {'fault' if len(faults) == 1 else 'faults'} in the config.")
    return 0


def _look(
    config: Config, missing: list[str], ranks: int, fast: bool, pace: Pace
) -> tuple[Facts | None, list[str], list[str]]:
    """Return the facts, if the records can be read; what may be unintended; and what is wrong.

    missing: what is wrong with the paths of the data.
    """
    faults = [*missing]
    _attempt(lambda: require_output_dir(config), faults)
    faults += _wrong_paths(config)
    start, notes = _attempt(lambda: find_resume(config), faults) or (None, [])
    outlook = None if missing else _attempt(lambda: open_outlook(config, ranks, start), faults)
    if fast:
        notes = [*notes, NOT_CHECKED]
        if ":" not in config.lr_schedule.decay.name:
            _attempt(lambda: build_formula(config.lr_schedule, Horizon(1, 1, 1)), faults)
        sizes: Sizes | None = None
    else:
        logs.load_tensorflow()
        from horovod_train.commands.plan import model as plan_model

        sizes, model_faults = plan_model.build(config, outlook)
        faults += model_faults
    if sizes is None and start is not None:
        sizes = Sizes(f"as the checkpoint of step {start.step}", start.size)
    known = sizes or Sizes("unknown, because the model was not built")
    facts, second_notes = (outlook and _attempt(lambda: collect(outlook, known, pace), faults)) or (None, [])
    lack = _attempt(lambda: _lack_of_room(config, facts), faults)
    return facts, [*notes, *second_notes, *filter(None, [lack])], list(dict.fromkeys(faults))


def _attempt(do: Callable[[], T], faults: list[str]) -> T | None:
    """Return the result; if it is a UserError, add its sentence to `faults`."""
    try:
        return do()
    except UserError as error:
        faults.append(str(error))
        return None


def _lack_of_room(config: Config, facts: Facts | None) -> str | None:
    """Return a sentence if the disk cannot hold the run's checkpoints. Raises UserError if it has room for none."""
    saved = facts["checkpoints"] if facts else {}
    if config.output_dir is None or saved.get("bytes_each") is None:
        return None
    most = most_at_once(config.checkpoint, saved["count"])
    return lack_of_room(Path(config.output_dir) / CHECKPOINTS, saved["bytes_each"], most)


def _wrong_paths(config: Config) -> Iterator[str]:
    """Yield a sentence for each folder that the run could not write to. Creates nothing there."""
    for where, path in (("output_dir", config.output_dir), ("data.index_dir", config.data.index_dir)):
        if not path:
            continue
        place = nearest_existing(Path(path))
        if not place.is_dir():
            yield f"{where}: {path} cannot be made: {place} is no folder."
        elif not os.access(place, os.W_OK | os.X_OK):
            yield f"{where}: cannot write to {place}. Choose another folder."


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
    for split, records in facts["records"].items():
        if records:
            where = f"from {records['source']}" if records["source"] else f"in {files_or_folder(records['files'])}"
            summary = f"{records['records']:,} records {where}, {_bytes(records['bytes'])}"
            if records["fold"]:
                summary += f", {'only' if split == 'eval' else 'without'} part {records['fold']}"
            if records["eval_fraction"]:
                summary += f", {'only' if split == 'eval' else 'without'} the {records['eval_fraction']:g} held out"
            names = f"{', '.join(records['inputs'])} → {', '.join(records['targets']) or 'nothing'}"
            names += f", weighted by {records['weight']}" if records["weight"] else ""
            lines.append((f"{split} data", f"{summary}; {names}"))
            lines += [("", line) for line in _data_set_lines(records["data_sets"])]
    for where, weights in facts["class_weights"].items():
        by_class = ", ".join(f"class {name}: {weight:g}" for name, weight in weights.items())
        lines.append(("weights", f"{where}: {by_class}, others: 1"))
    last = steps["records_in_last_of_epoch"]
    partial = "" if last == batch["global"] else f", the last with {last}"
    to_most = "" if share["least"] == share["most"] else f" to {share['most']:,}"
    epochs = f"{steps['epochs']:g} epoch{'s' * (steps['epochs'] != 1)}"
    lines += [
        ("batch", f"{batch['global']:,} over all ranks: {per_rank}"),
        *(("", f"by length: {share:.0%} of {name} is padding") for name, share in batch["padding"].items()),
        ("steps", f"{steps['per_epoch']:,} an epoch{partial}; {steps['total']:,} in {epochs}"),
        ("records per rank", f"{share['least']:,}{to_most} an epoch"),
        *_rate_lines(facts),
        *_size_lines(facts),
    ]
    lines += facts["fine_tuning"].items()
    if facts["resume"]:
        start = facts["resume"]
        left = f"{start['steps_left']:,} steps are left"
        lines.append(("resumes from", f"step {start['step']:,} of {start['ranks']} ranks; {left}"))
    if facts["time"]:
        lines.append(("time", _time_line(facts["time"])))
    return lines


def _data_set_lines(data_sets: Sequence[Facts]) -> list[str]:
    """Return a line for each data set, if any of them is repeated."""
    if all(data_set["repeats"] == 1 for data_set in data_sets):
        return []
    return [f"{each['records']:,} of {each['name']}, {each['repeats']} × an epoch" for each in data_sets]


def _rate_lines(facts: Facts) -> list[tuple[str, str]]:
    rates = facts["learning_rate"]
    if isinstance(rates, str):
        return [("learning rate", f"as {rates} says")]
    if len({row["rate"] for row in rates}) == 1:
        return [("learning rate", f"{rates[0]['rate']:.6g}, constant")]
    head = f"{'epoch':>10}  {'step':>12}  rate"
    rows = [f"{row['epoch']:>10,.2f}  {row['step']:>12,}  {row['rate']:.6g}" for row in rates]
    return [("learning rate", head), *(("", row) for row in rows)]


def _size_lines(facts: Facts) -> list[tuple[str, str]]:
    saved, memory = facts["checkpoints"], facts["memory_per_rank"]
    clock = f" and one every {saved['every_minutes']:g} minutes" if saved["every_minutes"] is not None else ""
    size = f"; size {saved['source']}"
    if saved["bytes_each"] is not None:
        size = f", {_bytes(saved['bytes_each'])} each, at most {_bytes(saved['bytes_at_most'])} on the disk"
    lines = [("checkpoints", f"{saved['count']:,}{clock}, {saved['kept']} kept{size}")]
    if memory["parameters"] is not None:
        parts = ", ".join(f"{name} {_bytes(value)}" for name, value in memory["bytes"].items() if value)
        total = _bytes(sum(memory["bytes"].values()))
        lines += [
            ("parameters", f"{memory['parameters']:,}, of which {memory['trainable_parameters']:,} are trained"),
            ("memory per rank", f"{total} and activations: {parts}"),
        ]
    return lines


def _time_line(time: Facts) -> str:
    if "needs_examples_per_s" in time:
        return f"to end within {_clock(time['walltime_s'])} takes {time['needs_examples_per_s']:,.0f} records/s"
    line = f"{_clock(time['seconds'])} for {time['records']:,} records, evaluation counted as training"
    if time["jobs"] is None:
        return line
    if time["jobs"] <= 1:
        return f"{line}; fits into {_clock(time['walltime_s'])}, {time['seconds'] / time['walltime_s']:.0%} of it"
    return f"{line}; takes {time['jobs']} jobs of {_clock(time['walltime_s'])}, each resuming where the last stopped"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _clock(seconds: float) -> str:
    days, day_seconds = divmod(round(seconds), 86400)
    return f"{f'{days}-' if days else ''}{day_seconds // 3600:02}:{day_seconds // 60 % 60:02}:{day_seconds % 60:02}"
