"""For `report`: what a run was, from the files in its directory. Needs no TensorFlow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from horovod_train.commands.explain import Explanation, explain, read_json
from horovod_train.config.loader import by_key
from horovod_train.data.audit import FOLDER, audit
from horovod_train.errors import UserError
from horovod_train.output.files import lines_in
from horovod_train.output.metrics import Row, metrics_in
from horovod_train.output.profile import Costs, find_profiles, read_profiles
from horovod_train.output.rank_log import TROUBLE, RankStory, read_phase, read_starts_of_root

_RESUMED = re.compile(r"resumed from .+ at step (\d+)$")
_CODE = re.compile(r"code: (.+)")
_MOST_AUDITED = 50_000_000
"""Bytes of an audit; larger ones take minutes to read."""
_REMARKED = (*TROUBLE, "warning")


class Phase(NamedTuple):
    """What root was doing, and when, in seconds since the first start of the run."""

    name: str
    begin: float
    end: float
    step: int | None


@dataclass(frozen=True)
class Start:
    """One start of a run, as root's log tells it. Times: seconds since the first start of the run."""

    began_at: datetime
    ranks: int
    host: str
    launcher: str
    from_step: int
    trained: bool
    """Whether it came as far as training, before which it writes no metrics and removes none."""
    begin: float
    end: float
    phases: tuple[Phase, ...]
    code: str
    """The commit that it ran; empty outside a repository."""
    ended: str
    remarks: tuple[str, ...]

    def seconds_in(self, phase: str) -> float:
        return sum(each.end - each.begin for each in self.phases if each.name == phase)

    @property
    def last_step(self) -> int:
        return max((phase.step for phase in self.phases if phase.step is not None), default=self.from_step)


@dataclass(frozen=True)
class Run:
    name: str
    explanation: Explanation
    settings: Mapping[str, Any]
    """`section.key` → value, of the newest start."""
    summary: Mapping[str, Any]
    starts: Sequence[Start]
    rows: Sequence[Row]
    """Of metrics.jsonl; seconds: since the first start of the run."""
    audit: str
    """Whether each record was read once an epoch, in a sentence."""
    profiles: Sequence[Costs]

    @property
    def metrics(self) -> list[str]:
        """The names of all values in the rows, in the order in which they appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))


def read_run(run_dir: Path) -> Run:
    """Raises UserError if no run has written to the directory, or its files cannot be read."""
    explanation = explain(run_dir)
    try:
        starts = list(_starts(read_starts_of_root(run_dir)))
        config = run_dir / "config.yaml"
        settings = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}
        rows = list(_rows(run_dir / "metrics.jsonl", starts))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{run_dir}: cannot be read: {error}.") from error
    by_name = dict(by_key(settings if isinstance(settings, dict) else {}))
    summary = read_json(run_dir / "summary.json")
    profiles = read_profiles(find_profiles(run_dir))
    name = os.fsencode(run_dir).decode(errors="replace")
    return Run(name, explanation, by_name, summary, starts, rows, _audit(run_dir), profiles)


def _audit(run_dir: Path) -> str:
    if not (run_dir / FOLDER).exists():
        return "none; data.audit: true writes one"
    stored = sum(path.stat().st_size for path in (run_dir / FOLDER).glob("*.jsonl"))
    if stored > _MOST_AUDITED:
        return f"not read, because it has {stored / 1e9:.1f} GB: check-data --audit {run_dir}"
    try:
        epochs = audit(str(run_dir))
    except UserError as error:
        return str(error)
    wrong = [
        f"epoch {epoch.epoch}: {len(epoch.missing)} missing, {len(epoch.twice)} twice"
        for epoch in epochs
        if epoch.missing or epoch.twice
    ]
    complete = sum(epoch.is_whole for epoch in epochs)
    skipped = len({record for epoch in epochs for record in epoch.skipped})
    left_out = f"; {skipped} records could not be used and were skipped" * bool(skipped)
    right = f"every record once in {complete} whole epoch(s), none twice in {len(epochs)} begun"
    return ("; ".join(wrong) or right) + left_out


def _starts(stories: Sequence[RankStory]) -> Iterator[Start]:
    first = datetime.fromisoformat(stories[0].entries[0].time) if stories else None
    for story in stories:
        entry_times = [datetime.fromisoformat(entry.time) for entry in story.entries]
        times = [(time - (first or time)).total_seconds() for time in entry_times]
        infos = [entry.text for entry in story.find("info")]
        resumed = [_RESUMED.search(text) for text in infos]
        yield Start(
            began_at=entry_times[0],
            ranks=story.size,
            host=story.host,
            launcher=story.launcher,
            from_step=max((int(step[1]) for step in resumed if step), default=0),
            trained=any(text.startswith("ends at step ") for text in infos),
            begin=times[0],
            end=times[-1],
            phases=tuple(_phases(story, times)),
            code=next((code[1] for code in map(_CODE.match, infos) if code), ""),
            ended=next((entry.text for entry in story.find("end")), "its log ends without a word"),
            remarks=tuple(f"{entry.time} {entry.text}" for entry in story.entries if entry.kind in _REMARKED),
        )


def _phases(story: RankStory, times: Sequence[float]) -> Iterator[Phase]:
    """Yield the phases of a start. The first is "start"; one ends where the next begins."""
    name, begin, step = "start", times[0], None
    for entry, time in zip(story.entries, times, strict=True):
        if entry.kind == "phase":
            yield Phase(name, begin, time, step)
            begin, (name, step) = time, read_phase(entry.text)
    yield Phase(name, begin, times[-1], step)


def _rows(path: Path, starts: Sequence[Start]) -> Iterator[Row]:
    """Yield the lines of metrics.jsonl; the last may be cut short.

    A resume removes the lines after its step, so a line is of the last start that trained from before its step.
    """
    if not path.exists():
        return
    begins = [(start.from_step, start.begin) for start in starts if start.trained] or [(0, 0.0)]
    for row in metrics_in(lines_in(path.read_bytes())):
        begin = next((time for from_step, time in reversed(begins) if from_step < row.step), begins[0][1])
        yield row._replace(seconds=begin + row.seconds)
