"""The command `plan`: what a config means on N ranks, before anything starts.

python -m horovod_train.main plan --config configs/digits_convnet.yaml --np 64
python -m horovod_train.main plan --config … --np 64 --examples-per-s 20000 --time 04:00:00
python -m horovod_train.main plan --config … --fast                                       without TensorFlow

Checks every path, and builds the model and what it is trained with on the CPU; see plan_model. Starts no ranks, writes
nothing but an index. The numbers are collected from the records' index and the manifests of checkpoints: reads no
records and no arrays.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.filesize import decimal
from rich.markup import escape

from horovod_train.checkpoint.layout import (
    CHECKPOINTS,
    Checkpoint,
    count_multiples,
    count_saves,
    find_start,
    lack_of_room,
    most_at_once,
    read_manifest,
)
from horovod_train.commands.cli import (
    above_0,
    add_config_arguments,
    count,
    duration,
    files_or_folder,
    load_config,
    missing_data,
    nearest_existing,
    open_screen,
    require_output_dir,
)
from horovod_train.config.loader import left_out_options
from horovod_train.config.paths import link_to_nothing
from horovod_train.config.rules import kept_batch, resolve, weights_of_outputs
from horovod_train.config.settings import Config
from horovod_train.data.dataset import (
    Records,
    beside_training,
    build_plan,
    check_room_to_shuffle,
    open_records,
    with_inputs_of,
)
from horovod_train.data.sampler import Plan, padding_share
from horovod_train.errors import RunError, UserError
from horovod_train.optim.schedules import Horizon, build_formula, build_horizon
from horovod_train.output import logs
from horovod_train.output.files import json_text
from horovod_train.shown_text import counted

T = TypeVar("T")
Json = dict[str, Any]
_RATE_ROWS = 10

NOT_CHECKED = (
    "--fast: model, loss, metrics, optimizer, data.augment and data.parse were not built: their names and options are "
    "not checked, nor whether the checkpoint to resume from goes with the records, and memory is not known"
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
        "--time",
        type=duration,
        metavar="[D-]HH:MM:SS",
        help="time of a job; for the number of jobs, or the speed that is needed",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    config, origins = load_config(arguments)
    if config.data.dataset:
        stream = config.data.dataset.name
        raise UserError(f"plan: data.dataset: {stream} is a stream, of which only a run knows how many steps it has.")
    facts, notes, faults = _look(config, missing_data(config, origins), arguments)
    notes = [*left_out_options(config, origins), *notes]
    if arguments.json:
        print(json_text({**(facts or {}), "notes": notes, "faults": faults}, indent=2))
    else:
        _show(facts, notes, faults)
    if faults:
        raise UserError(f"plan: {counted(len(faults), 'fault')} in the config.")
    return 0


def _look(
    config: Config, missing: list[str], arguments: argparse.Namespace
) -> tuple[Json | None, list[str], list[str]]:
    """Return the facts, if the records can be read; what may be unintended; and what is wrong.

    missing: what is wrong with the paths of the data.
    """
    faults = [*missing]
    _attempt(lambda: require_output_dir(config), faults)
    faults += _wrong_paths(config)
    start, notes = _attempt(lambda: find_resume(config), faults) or (None, [])
    outlook = None if missing else _attempt(lambda: open_outlook(config, arguments.np, start), faults)
    if arguments.fast:
        notes = [*notes, NOT_CHECKED]
        if ":" not in config.lr_schedule.decay.name:
            _attempt(lambda: build_formula(config.lr_schedule, Horizon(1, 1, 1)), faults)
        sizes: Sizes | None = None
    else:
        logs.load_tensorflow(on_cpu=True)
        from horovod_train.commands import plan_model

        sizes, model_faults = plan_model.build(config, outlook)
        faults += model_faults
    if sizes is None and start is not None:
        sizes = Sizes(f"as the checkpoint of step {start.facts.step}", start.size)
    known = sizes or Sizes("unknown, because the model was not built")
    pace = arguments.examples_per_s, arguments.time
    facts, second_notes = (outlook and _attempt(lambda: collect(outlook, known, *pace), faults)) or (None, [])
    lack = _attempt(lambda: _lack_of_room(config, facts), faults)
    return facts, [*notes, *second_notes, *filter(None, [lack])], list(dict.fromkeys(faults))


def _attempt(do: Callable[[], T], faults: list[str]) -> T | None:
    """Return the result; if it is a RunError, add its sentence to `faults`."""
    try:
        return do()
    except RunError as error:
        faults.append(str(error))
        return None


def _lack_of_room(config: Config, facts: Json | None) -> str | None:
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
        if problem := link_to_nothing(path):
            yield f"{where}: {problem}"
        elif not place.is_dir():
            yield f"{where}: {path} cannot be made: {place} is no folder."
        elif not os.access(place, os.W_OK | os.X_OK):
            yield f"{where}: cannot write to {place}. Choose another folder."


# --- the facts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outlook:
    """A run that has not begun, as its config and records determine it. `unresolved`: the config before `resolve`."""

    unresolved: Config
    config: Config
    ranks: int
    start: Checkpoint | None
    records: Records
    eval_records: Records | None
    plan: Plan
    horizon: Horizon


@dataclass(frozen=True)
class Sizes:
    """Bytes that the run needs, by what uses them. source: where the figures come from, in words."""

    source: str
    checkpoint_bytes: int | None = None
    parameters: int | None = None
    trainable_parameters: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    rate_of: str = ""
    """What brings a learning rate that is not in the config."""
    fine_tuning: Mapping[str, str] = field(default_factory=dict)
    """What the model begins with and what of it is trained, in words, by what it is about."""
    warnings: tuple[str, ...] = ()
    """As the run's log has them."""


def find_resume(config: Config) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that a run of this config would resume from, and sentences about others that it skips.

    Finds it as the run does, but checks only its manifest and the sizes of its files. Raises UserError if the run would
    refuse to start.
    """
    if config.output_dir is None:
        return None, []
    folder = Path(config.output_dir) / CHECKPOINTS
    point = find_start(folder, config.checkpoint.resume, read_manifest)
    notes = [f"the checkpoint of step {step} is damaged: {error}" for step, error in point.damaged.items()]
    return point.checkpoint, [*notes, *filter(None, [point.note])]


def open_outlook(config: Config, ranks: int, start: Checkpoint | None) -> Outlook:
    """Open the records and lay out the epochs. Raises UserError. start: the checkpoint to resume from."""
    batch_before = start.facts.setting("data.global_batch_size") if start else None
    unresolved, config = config, resolve(config, ranks, batch_before)
    records = open_records(config.data, "train")
    eval_records = None
    if config.data.eval:
        eval_records = open_records(with_inputs_of(config.data, records), "eval")
        eval_records = beside_training(eval_records, records, config.data)
    batch = config.data.global_batch(ranks)
    plan = build_plan(records, config.data, seed=config.seed, training=True, global_batch_size=batch)
    check_room_to_shuffle(plan, records, config.data, ranks)
    horizon = build_horizon(config.train, batch, plan.steps_per_epoch)
    return Outlook(unresolved, config, ranks, start, records, eval_records, plan, horizon)


def collect(
    outlook: Outlook, sizes: Sizes, examples_per_s: float | None, time_s: float | None
) -> tuple[Json, list[str]]:
    """Return the facts by section, in JSON types, and a sentence for each that may be unintended.

    examples_per_s: over all ranks. time_s: until the scheduler ends the job.
    """
    config, ranks, plan, horizon = outlook.config, outlook.ranks, outlook.plan, outlook.horizon
    batch = plan.global_batch_size
    saves = count_saves(config.checkpoint, horizon.steps_per_epoch, horizon.total_steps)
    shares = records_by_rank(plan, ranks)
    most = most_at_once(config.checkpoint, saves)  # one of them may still be being written
    facts: Json = {
        "ranks": ranks,
        "records": {
            "train": _records(outlook.records, config),
            "eval": _records(outlook.eval_records, config) if outlook.eval_records else None,
        },
        "class_weights": {
            **({"loss": config.loss.class_weight} if config.loss.class_weight else {}),
            **weights_of_outputs(config.loss),
        },
        "batch": {
            "global": batch,
            "rows_per_rank": dict(sorted(Counter(rows_by_rank(batch, ranks)).items())),
            "padding": padding_share(plan),
        },
        "steps": {
            "per_epoch": horizon.steps_per_epoch,
            "total": horizon.total_steps,
            "epochs": round(horizon.total_steps / horizon.steps_per_epoch, 4),
            "records_in_last_of_epoch": plan.count(horizon.steps_per_epoch - 1),
        },
        "records_per_rank": {"least": min(shares), "most": max(shares)},
        "learning_rate": sizes.rate_of or learning_rates(config, horizon),
        "checkpoints": {
            "count": saves,
            "every_minutes": config.checkpoint.every_minutes,
            "kept": min(most, config.checkpoint.keep + (config.checkpoint.best is not None)),
            "bytes_each": sizes.checkpoint_bytes,
            "bytes_at_most": None if sizes.checkpoint_bytes is None else most * sizes.checkpoint_bytes,
            "source": sizes.source,
        },
        "memory_per_rank": {
            "parameters": sizes.parameters,
            "trainable_parameters": sizes.trainable_parameters,
            "bytes": dict(sizes.memory),
        },
        "fine_tuning": dict(sizes.fine_tuning),
        "resume": _resume(outlook.start, horizon),
        "time": _time(outlook, examples_per_s, time_s),
    }
    notes = [*filter(None, [kept_batch(outlook.unresolved, config, ranks)]), *outlook.records.notes]
    notes += outlook.eval_records.notes if outlook.eval_records else ()
    return facts, [*dict.fromkeys(notes), *sizes.warnings, *_second_look(config, facts)]


def rows_by_rank(global_batch_size: int, ranks: int) -> list[int]:
    """Return the records of a whole batch on each rank: neighbouring lanes of the plan, cut as evenly as possible."""
    return np.diff(np.arange(ranks + 1) * global_batch_size // ranks).tolist()


def records_by_rank(plan: Plan, ranks: int) -> list[int]:
    """Return the records of an epoch on each rank. Only the last step may have fewer than its batch."""
    last = plan.steps_per_epoch - 1
    before_last = last * np.array(rows_by_rank(plan.global_batch_size, ranks))
    in_last = [plan.positions(rank, ranks, last, last + 1)[1].sum() for rank in range(ranks)]
    return (before_last + in_last).tolist()


def learning_rates(config: Config, horizon: Horizon) -> list[dict[str, float]] | str:
    """Return epoch, step and rate at about a dozen steps: first, last, end of warm-up, jumps of the rate.

    For a user's own decay returns its name.
    """
    decay = config.lr_schedule.decay
    if ":" in decay.name:
        return decay.name
    rate, last = build_formula(config.lr_schedule, horizon), horizon.total_steps - 1
    steps = {0, last, *(round(last * part / _RATE_ROWS) for part in range(_RATE_ROWS))}
    if config.lr_schedule.warmup_epochs:
        steps.add(horizon.steps(config.lr_schedule.warmup_epochs) - 1)
    for epochs in decay.options.get("boundaries_epochs", []):
        steps |= {horizon.steps(epochs) - 1, horizon.steps(epochs)}
    chosen = np.array(sorted(step for step in steps if 0 <= step <= last), np.float64)
    rates = rate(chosen, np) + np.zeros_like(chosen)
    return [
        {"epoch": step / horizon.steps_per_epoch, "step": int(step), "rate": float(value)}
        for step, value in zip(chosen, rates, strict=True)
    ]


def _records(records: Records, config: Config) -> Json:
    parts = records.stored or records.source.parts
    return {
        "records": records.num_records,
        "files": len(parts),
        "bytes": sum(part.size for part in parts),
        "inputs": list(records.schema.inputs),
        "targets": list(records.schema.targets),
        "data_sets": [data_set._asdict() for data_set in records.data_sets],
        "fold": config.data.fold,
        "eval_fraction": config.data.eval_fraction,
        "source": config.data.source.name if config.data.source else None,
        "weight": config.data.weight,
    }


def _resume(start: Checkpoint | None, horizon: Horizon) -> Json | None:
    if start is None:
        return None
    left = max(0, horizon.total_steps - start.facts.step)
    return {"path": str(start.folder), "step": start.facts.step, "ranks": start.facts.ranks, "steps_left": left}


def _time(outlook: Outlook, examples_per_s: float | None, time_s: float | None) -> Json | None:
    """Return the seconds of what is left of the run at a throughput, which also counts for evaluation.

    If a time is given instead, return the throughput that it needs.
    """
    done = min(outlook.start.facts.step, outlook.horizon.total_steps) if outlook.start else 0
    work = _records_used(outlook, outlook.horizon.total_steps) - _records_used(outlook, done)
    if examples_per_s is not None:
        seconds = work / examples_per_s
        jobs = None if time_s is None else math.ceil(seconds / time_s)
        return {"records": work, "seconds": seconds, "walltime_s": time_s, "jobs": jobs}
    if time_s is not None:
        return {"records": work, "walltime_s": time_s, "needs_examples_per_s": work / time_s}
    return None


def _records_used(outlook: Outlook, steps: int) -> int:
    """Return how many records the first steps of the run train and evaluate; it also evaluates after its last step."""
    horizon, evaluated = outlook.horizon, outlook.config.eval
    whole_epochs, last_steps = divmod(steps, horizon.steps_per_epoch)
    per_epoch = min(outlook.plan.num_records, horizon.steps_per_epoch * horizon.global_batch_size)
    trained = whole_epochs * per_epoch + last_steps * horizon.global_batch_size
    if outlook.eval_records is None:
        return trained
    by_epoch = (evaluated.every_epochs or 0) * horizon.steps_per_epoch
    every = [step for step in (evaluated.every_steps, by_epoch) if step]
    evaluations = count_multiples(every, steps, with_last=steps == horizon.total_steps)
    return trained + evaluations * outlook.eval_records.num_records


def _second_look(config: Config, facts: Json) -> Iterator[str]:
    """Yield what is valid but may be unintended."""
    rows, ranks, data = facts["batch"]["rows_per_rank"], facts["ranks"], config.data
    if len(rows) > 1:
        batch = facts["batch"]["global"]
        even = -(-batch // ranks) * ranks
        yield f"the ranks' shares of a batch differ: those with fewer records wait. Even: a global batch of {even}"
    if facts["steps"]["records_in_last_of_epoch"] < ranks:
        yield "some ranks have no record in the last step of an epoch; they take part in the exchange with zeros"
    schedule = config.lr_schedule
    if schedule.warmup_epochs > facts["steps"]["epochs"]:
        yield f"lr_schedule.warmup_epochs: {schedule.warmup_epochs:g} is more than the run has: the rate only rises"
    if facts["resume"] and not facts["resume"]["steps_left"]:
        yield f"{config.output_dir} holds this run's last step already: there is nothing left to train"
    if data.stage_dir:
        yield f"data.stage_dir: {data.stage_dir} is a folder of the nodes and was not looked at from here"


# --- how they are shown -----------------------------------------------------------------------------------------


def _show(facts: Json | None, notes: Sequence[str], faults: Sequence[str]) -> None:
    console = open_screen()
    if facts is not None:
        for name, line in _lines(facts):
            console.print(f"[bold]{name:<17}[/]{escape(line)}")
    for note in notes:
        console.print(f"note: {note}", markup=False)
    for fault in faults:
        console.print(f"fault: {fault}", markup=False)


def _lines(facts: Json) -> list[tuple[str, str]]:
    batch, steps, share = facts["batch"], facts["steps"], facts["records_per_rank"]
    rows = batch["rows_per_rank"]
    per_rank = ", ".join(f"{row} on {counted(count, 'rank')}" for row, count in rows.items())
    lines = [("ranks", f"{facts['ranks']}")]
    for split, records in facts["records"].items():
        if records:
            where = f"from {records['source']}" if records["source"] else f"in {files_or_folder(records['files'])}"
            summary = f"{records['records']:,} records {where}, {decimal(records['bytes'])}"
            if records["fold"]:
                summary += f", {'only' if split == 'eval' else 'without'} part {records['fold']}"
            if records["eval_fraction"]:
                summary += f", {'only' if split == 'eval' else 'without'} the {records['eval_fraction']:g} held out"
            names = f"{', '.join(records['inputs'])} → {', '.join(records['targets']) or 'nothing'}"
            names += f", weighted by {records['weight']}" if records["weight"] else ""
            lines.append((f"{split} data", f"{summary}; {names}"))
            sets = records["data_sets"]
            if any(each["repeats"] > 1 for each in sets):
                lines += [("", f"{each['records']:,} of {each['name']}, {each['repeats']} × an epoch") for each in sets]
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


def _rate_lines(facts: Json) -> list[tuple[str, str]]:
    rates = facts["learning_rate"]
    if isinstance(rates, str):
        return [("learning rate", f"as {rates} says")]
    if len({row["rate"] for row in rates}) == 1:
        return [("learning rate", f"{rates[0]['rate']:.6g}, constant")]
    head = f"{'epoch':>10}  {'step':>12}  rate"
    rows = [f"{row['epoch']:>10,.2f}  {row['step']:>12,}  {row['rate']:.6g}" for row in rates]
    return [("learning rate", head), *(("", row) for row in rows)]


def _size_lines(facts: Json) -> list[tuple[str, str]]:
    saved, memory = facts["checkpoints"], facts["memory_per_rank"]
    clock = f" and one every {saved['every_minutes']:g} minutes" if saved["every_minutes"] is not None else ""
    size = f"; size {saved['source']}"
    if saved["bytes_each"] is not None:
        size = f", {decimal(saved['bytes_each'])} each, at most {decimal(saved['bytes_at_most'])} on the disk"
    lines = [("checkpoints", f"{saved['count']:,}{clock}, {saved['kept']} kept{size}")]
    if memory["parameters"] is not None:
        parts = ", ".join(f"{name} {decimal(value)}" for name, value in memory["bytes"].items() if value)
        total = decimal(sum(memory["bytes"].values()))
        lines += [
            ("parameters", f"{memory['parameters']:,}, of which {memory['trainable_parameters']:,} are trained"),
            ("memory per rank", f"{total} and activations: {parts}"),
        ]
    return lines


def _time_line(time: Json) -> str:
    if "needs_examples_per_s" in time:
        return f"to end within {_clock(time['walltime_s'])} takes {time['needs_examples_per_s']:,.0f} records/s"
    line = f"{_clock(time['seconds'])} for {time['records']:,} records, evaluation counted as training"
    if time["jobs"] is None:
        return line
    if time["jobs"] <= 1:
        return f"{line}; fits into {_clock(time['walltime_s'])}, {time['seconds'] / time['walltime_s']:.0%} of it"
    return f"{line}; takes {time['jobs']} jobs of {_clock(time['walltime_s'])}, each resuming where the last stopped"


def _clock(seconds: float) -> str:
    days, day_seconds = divmod(round(seconds), 86400)
    return f"{f'{days}-' if days else ''}{day_seconds // 3600:02}:{day_seconds // 60 % 60:02}:{day_seconds % 60:02}"
