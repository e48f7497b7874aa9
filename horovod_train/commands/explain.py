"""The command `explain`: what happened to a run, from the files that its ranks have left, and what to do next.

python -m horovod_train.main explain runs/digits_convnet

Exit code 0 if the run has finished, 1 if not, 2 for a folder that is no run directory. Reads the newest checkpoint byte
by byte, and if it is damaged the one before it: a run would resume from the checkpoint that is called good. Needs no
TensorFlow, and changes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import re
import shlex
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from horovod_train.checkpoint import layout
from horovod_train.checkpoint.layout import CHECKPOINTS, Damaged, newest_whole, reason, step_name
from horovod_train.commands.cli import require_run
from horovod_train.config.loader import compose, plain_value
from horovod_train.distributed.launch.local import launch_command
from horovod_train.errors import InUse, RanksDisagree, RunError, UserError, reading
from horovod_train.host import has_run_since
from horovod_train.output.console import to_stderr, to_stdout
from horovod_train.output.files import STOP_FILE, each_line, json_text, read_json, read_whole
from horovod_train.output.lease import POLL_S, REFRESH_S, UNNAMED, read_lease
from horovod_train.output.rank_log import (
    FOLDER,
    MOST_CLOCKS_DIFFER_S,
    Entry,
    RankStory,
    launch_log,
    log_file,
    name_ranks,
    read_line,
    read_phase,
    read_starts_of_root,
    read_stories,
    stamp,
)
from horovod_train.shown_text import error_line

State = Literal["finished", "stopped", "failed", "crashed", "disappeared", "stalled", "running", "unknown"]
WATCH_S = 2 * REFRESH_S
LAUNCH_LINES = 6
"""How many of the last lines of the command launch are shown: those of about three starts."""
START_WITHIN_S = 300.0
"""How long after launch has said something rank 0 begins its log: hosts are asked, TensorFlow is loaded, ranks meet."""
_PAUSE = re.compile(r"; next start in (\d{1,9}) s$")
_REFUSED = f"stopped: exit code {InUse.exit_code}: "
"""How launch tells that another run has the directory."""
_ASKED = "stopped: asked by "
"""How it tells that it was asked to stop."""
_WAITED = "; it has been so for "
"""What it adds if it has waited for the directory after starts of its own."""
_NAMED_RANK = re.compile(r"\brank (\d{1,9}) \(")
_DISAPPEARED = re.compile(r"rank (\d{1,9}) \(.*\) disappeared")
_USERS_LINE = re.compile(r"\(at (\S+:\d+)\)")
"""What registry.raised_at adds to an error of the user's code."""
_SLURM = ("srun", "srun-pmix")
_STARTS_EACH = ("torchrun", "tf-config", "indexed-job", "pals")
"""Launchers that are told what a rank runs by a file or a service, not by a command."""
_ON_EACH_HOST = re.compile(r"rank\(s\), (\d+)( on each of \d+ hosts of [\w-]+)")
"""In what launch says of a start, if something else has started one launch on each host."""
_STEP = re.compile(r'"step": (\d{1,18})\b')
_FATAL = re.compile(r"Fatal Python error: (.+)")
_CURRENT = re.compile(r"^Current thread 0x.*\n((?:  .*\n?)*)", re.MULTILINE)
"""The frames of the thread that crashed, among those of all threads."""

_BY_TEXT = (
    (
        r"File too large",
        "raise the limit on the size of a file (ulimit -f), or see what the file system of {run_dir} takes",
    ),
    (
        r"Disk quota exceeded",
        "remove files of yours there, or ask for a larger quota (quota -s, or the file system's own command)",
    ),
    (
        r"No space left on device|the disk of .* has .* free",
        "free space on the disk that is full (df {run_dir})",
    ),
    (r"output_dir: .* is gone: removed, renamed", "bring {run_dir} back, or choose another --output-dir"),
    (r"longer than gloo waits", "set HOROVOD_GLOO_TIMEOUT_SECONDS to more seconds than the job is suspended for"),
    (r"another run has taken the directory", "stop the other run, or choose another --output-dir"),
    (
        r"checkpoint could not be saved|saves? (in a row )?ha(s|ve) failed",
        "see to the disk of {run_dir}, where saves fail",
    ),
    (
        r"Model diverged at .* not once they are combined",
        "set horovod.compression to bf16 or none, or lower lr_schedule.base_lr",
    ),
    (
        r"Model diverged",
        "lower lr_schedule.base_lr, or look for values in the data that are not finite (check-data)",
    ),
    (
        r"ResourceExhausted|[Oo]ut of memory|OUT_OF_MEMORY|MemoryError|Unable to allocate|bad_alloc",
        "take a smaller data.global_batch_size, or more train.accumulate_steps, to need less memory",
    ),
)
"""What to do about an error, by a pattern of its text; the first that matches."""


class Outcome(NamedTuple):
    """How the run ended, in a sentence; the rank where that began, and when."""

    state: State
    what: str
    rank: int | None = None
    time: datetime | None = None


@dataclass(frozen=True)
class LastGood:
    """The newest checkpoint that a run can resume from."""

    path: str
    step: int


@dataclass(frozen=True)
class Explanation:
    """followed: ranks that ended because of another; silent: ranks whose logs do not say how they ended."""

    run_dir: str
    state: State
    what: str
    rank: int | None
    time: str | None
    followed: list[int]
    silent: list[int]
    slow: list[str]
    earlier: str
    """How an earlier start ended the run, if the last start did not get as far as its first step; or ""."""
    launched: list[str]
    """The last lines of the command launch, if that started the ranks."""
    last_step: int | None
    checkpoint: LastGood | None
    damaged: list[str]
    steps_lost: int | None
    next: str

    def lines(self) -> Iterator[str]:
        yield f"{self.run_dir}: {self.what}"
        if self.time:
            yield f"when: {self.time}"
        if self.followed:
            yield f"ended because of another rank: {name_ranks(self.followed)}"
        if self.silent:
            yield f"no end in their logs: {name_ranks(self.silent)}"
        yield from (f"before that: {sentence}" for sentence in [*self.slow, *filter(None, [self.earlier])])
        yield from self.launched
        yield from (f"damaged checkpoint: {problem}" for problem in self.damaged)
        if self.state != "finished":
            last = "none" if self.checkpoint is None else f"{self.checkpoint.path}, step {self.checkpoint.step}"
            lost = "" if self.steps_lost is None else f"; steps lost: {self.steps_lost}"
            yield f"last good checkpoint: {last}{lost}"
        yield f"next: {self.next}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the output_dir of a run")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")


def run(arguments: argparse.Namespace) -> int:
    explanation = explain(Path(arguments.run_dir))
    to_stdout(json_text(dataclasses.asdict(explanation)) if arguments.json else "\n".join(explanation.lines()))
    return 0 if explanation.state == "finished" else 1


def explain(run_dir: Path, watch_s: float = WATCH_S) -> Explanation:
    """Explain a run. Raises UserError if no run has written to `run_dir`; OSError if that may not be read.

    watch_s: how long to watch a lease.
    """
    require_run(run_dir)
    stories = read_stories(run_dir)
    summary = read_json(run_dir / "summary.json")
    launched = read_launched(run_dir)
    counted = _not_refused(launched)
    find_holder = functools.cache(lambda: _find_running(run_dir, watch_s))
    alive = _alive(run_dir, stories)
    outcome = _without_logs(counted, stories, alive, find_holder) or _started_again(counted, stories)
    outcome = outcome or _judge(stories, summary, alive, find_holder)
    if outcome.state in ("disappeared", "unknown") and outcome.rank is None:
        # It may have ended while its files and its lease were looked at, which takes seconds.
        stories, summary = read_stories(run_dir), read_json(run_dir / "summary.json")
        outcome = _judge(stories, summary, _alive(run_dir, stories), lambda: None)
    if outcome.state == "unknown" and (log := _log_without_start(run_dir)):
        outcome = outcome._replace(what=f"{log} does not begin with a start, as after a rotation: it tells no more")
    checkpoint, damaged = _last_good_checkpoint(run_dir)
    is_lost = checkpoint is None and (bool(damaged) or layout.steps_told(run_dir) > 0)
    steps = [_last_step_in_metrics(run_dir), *(story.last_step for story in stories.values())]
    last_step = max((step for step in steps if step is not None), default=None)
    followed = [rank for rank, story in stories.items() if rank != outcome.rank and _ended_by_another(story)]
    is_over = outcome.state not in ("finished", "running")
    slow = [entry.text for story in stories.values() for entry in story.find("slow")]
    if outcome.state == "stalled":
        slow = slow[:-1]  # the beginning of this stall
    return Explanation(
        run_dir=str(run_dir),
        **outcome._asdict() | {"time": outcome.time and stamp(outcome.time)},
        followed=followed,
        silent=[rank for rank, story in stories.items() if is_over and not story.end and rank not in followed],
        slow=slow[-3:],
        earlier=_earlier(outcome, stories, summary),
        launched=[f"{stamp(line.time)} {line.kind} {line.text}" for line in launched[-LAUNCH_LINES:]],
        last_step=last_step,
        checkpoint=checkpoint,
        damaged=damaged,
        steps_lost=max(0, last_step - (checkpoint.step if checkpoint else 0)) if is_over and last_step else None,
        next=_next(run_dir, outcome, stories, counted, checkpoint, has_damaged=bool(damaged), is_lost=is_lost),
    )


def _log_without_start(run_dir: Path) -> Path | None:
    """Return a rank's log that is not empty; for a run of whose logs none has the start of a rank."""
    logs = sorted((run_dir / FOLDER).glob("rank-*.log"))
    return next((path for path in logs if path.stat().st_size), None)


def read_launched(run_dir: Path) -> list[Entry]:
    """Return what the command launch has said of its starts."""
    try:
        lines = list(each_line(launch_log(run_dir)))
    except OSError:
        return []
    return [entry for line in lines if (entry := read_line(line)) and entry.kind == "launch:"]


def _starts_of(launched: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in launched if entry.text.startswith("start ")]


def was_launched(run_dir: Path, launched: Sequence[Entry]) -> bool:
    """Return whether the command launch has started the last start's ranks, or tried to later."""
    begun, starts = _starts_of(launched), read_starts_of_root(run_dir)
    return bool(begun and starts) and all(before.began < begun[-1].time for before in starts[:-1])


def _not_refused(launched: Sequence[Entry]) -> list[Entry]:
    """Return what launch has said, without its starts that ended because another run had the directory."""
    kept: list[Entry] = []
    for entry in launched:
        if not entry.text.startswith(_REFUSED) or _WAITED in entry.text:
            kept.append(entry)
            continue
        starts = [number for number, earlier in enumerate(kept) if earlier.text.startswith("start ")]
        del kept[starts[-1] if starts else len(kept) :]
    return kept


def _without_logs(
    launched: Sequence[Entry],
    stories: Mapping[int, RankStory],
    alive: Collection[int],
    find_holder: Callable[[], str | None],
) -> Outcome | None:
    """Return how the last start of launch ended, if its ranks left no logs: those that are there tell of another."""
    begun = _starts_of(launched)
    if not begun or not launched[-1].text.startswith("stopped: "):
        return None
    for rank, story in stories.items():
        if story.began >= begun[-1].time or story.entries[-1].time > launched[-1].time or rank in alive:
            return None
    if find_holder():
        return None
    what = f"the last start ended before its ranks had logs: {launched[-1].text.removeprefix('stopped: ')}"
    return Outcome("failed", what, None, launched[-1].time)


def starts_again(launched: Sequence[Entry], last_start: datetime | None) -> bool:
    """Return whether launch is starting the ranks: it has said so after the last start in rank 0's log.

    Nothing tells whether launch itself still runs, so what it said counts for as long as the pause that it announces
    and a start may take.
    """
    counted = _not_refused(launched)
    if not counted or counted[-1].text.startswith(("stopped: ", "done, ")):
        return False
    said = counted[-1].time
    if last_start is not None and said <= last_start:
        return False
    pause = _PAUSE.search(counted[-1].text)
    age = datetime.now().astimezone() - said
    return age.total_seconds() < START_WITHIN_S + (float(pause[1]) if pause else 0.0)


def _started_again(launched: Sequence[Entry], stories: Mapping[int, RankStory]) -> Outcome | None:
    """Return that launch is starting the ranks, if it is: what the logs tell is of an earlier start."""
    root = stories.get(0)
    if not starts_again(launched, root.began if root else None):
        return None
    return Outcome("running", f"still running: launch starts it{' again' if stories else ''}: {launched[-1].text}")


def _last_step_in_metrics(run_dir: Path) -> int | None:
    try:
        steps = (int(step) for line in each_line(run_dir / "metrics.jsonl") for step in _STEP.findall(line))
        return max(steps, default=None)
    except OSError:
        return None


def _last_good_checkpoint(run_dir: Path) -> tuple[LastGood | None, list[str]]:
    """Return the newest checkpoint that a run can resume from, and what is wrong with newer ones.

    Reads them byte by byte, as a run would. Raises UserError if the folder cannot be read.
    """
    folder = run_dir / CHECKPOINTS
    try:
        newest, damaged = newest_whole(folder, _verify)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot read its checkpoints: {reason(error)}.") from error
    found = LastGood(str(newest.folder), newest.facts.step) if newest else None
    return found, [f"{folder / step_name(step)}: {error}" for step, error in damaged.items()]


def _verify(folder: Path) -> layout.Checkpoint:
    try:
        return layout.verify(folder)
    except UserError as error:  # Only a later version can read it.
        raise Damaged(str(error).removeprefix(f"{folder}: ")) from error


def _judge(
    stories: Mapping[int, RankStory],
    summary: Mapping[str, Any],
    alive: Sequence[int],
    find_holder: Callable[[], str | None],
) -> Outcome:
    """Return what went wrong first. alive: ranks whose processes are on this host."""
    stories = _on_one_clock(stories)
    ends = {rank: story.end for rank, story in stories.items() if story.end}
    went_wrong = [*_failures(ends), *_stalls(ends), *_disappearances(stories)]
    if went_wrong:
        return min(went_wrong, key=operator.attrgetter("time"))
    reason = summary.get("ended", "done")
    is_finished = bool(summary) and summary.get("finished", reason == "done")
    steps = summary.get("steps", "?")
    finished = Outcome("finished", f"finished after {steps} steps" + ("" if reason == "done" else f" ({reason})"))
    if 0 in ends and ends[0]["ended"] == "done":
        return finished._replace(time=ends[0]["time"])
    if 0 in ends:
        why = ends[0].get("error") or reason
        return Outcome("stopped", f"stopped at step {ends[0].get('step')}: {why}", None, ends[0]["time"])
    if alive:
        return Outcome("running", f"still running: the process of rank {alive[0]} is on this host")
    if holder := find_holder():
        return Outcome("running", f"still running: {holder}")
    # A run that trains has removed the summary of an earlier end.
    if summary and (0 not in stories or any(read_phase(said.text)[0] == "train" for said in stories[0].find("phase"))):
        return finished if is_finished else Outcome("stopped", f"stopped after {steps} steps: {reason}")
    if not stories:
        return Outcome("unknown", "there are no logs of ranks: the run ended before its ranks had connected")
    last = max((story.entries[-1] for story in stories.values()), key=lambda entry: entry.time)
    sign = " ".join(filter(None, [last.kind, last.text.partition("\n")[0]]))
    what = f"all ranks were killed together, from outside; last line in the logs: {sign}"
    return Outcome("disappeared", what, None, last.time)


def _on_one_clock(stories: Mapping[int, RankStory]) -> Mapping[int, RankStory]:
    """Return the stories with times as on rank 0's host, where another host's clock is wrong by more than a minute.

    All ranks begin their logs when they have met, so at the same moment.
    """
    if 0 not in stories:
        return stories
    root, aligned = stories[0], dict(stories)
    for rank, story in stories.items():
        ahead = story.began - root.began
        if story.host != root.host and abs(ahead.total_seconds()) > MOST_CLOCKS_DIFFER_S:
            entries = [dataclasses.replace(entry, time=entry.time - ahead) for entry in story.entries]
            end = story.end and {**story.end, "time": story.end["time"] - ahead}
            aligned[rank] = dataclasses.replace(story, entries=entries, end=end)
    return aligned


def _failures(ends: Mapping[int, Mapping[str, Any]]) -> Iterator[Outcome]:
    failed = {rank: end for rank, end in ends.items() if end["ended"] == "failed"}
    for rank, end in failed.items():
        if _cause(rank, failed) == rank:
            place = "" if end.get("step") is None else f" at step {end['step']}"
            what = f"rank {rank} ({end['host']}) failed in {end.get('phase', 'start')}{place}: {end.get('error')}"
            yield Outcome("failed", what, rank, end["time"])


def _cause(rank: int, failed: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the rank at which a failed rank's error began.

    An error that is raised on several ranks together names that rank, or is about what root writes. Which rank notes it
    first says nothing.
    """
    text = str(failed[rank].get("error"))
    sharing = [other for other, end in failed.items() if str(end.get("error")) == text]
    named = [int(number) for number in _NAMED_RANK.findall(text) if int(number) in failed]
    return (named or sharing)[0] if len(sharing) > 1 else rank


def _stalls(ends: Mapping[int, Mapping[str, Any]]) -> Iterator[Outcome]:
    stalled = [end for end in ends.values() if end["ended"] == "stalled"]
    if stalled:
        # The most common text, because a rank that was frozen and then continues reports the others instead.
        text = Counter(str(end["error"]) for end in stalled).most_common(1)[0][0].removeprefix("stopped: ")
        suspect = re.match(r"(?:the other ranks have ended: )?rank (\d{1,9}) ", text)
        first = min(end["time"] for end in stalled)
        yield Outcome("stalled", f"stalled: {text}", int(suspect[1]) if suspect else None, first)


def _disappearances(stories: Mapping[int, RankStory]) -> Iterator[Outcome]:
    for story in stories.values():
        for entry in story.find("cause"):
            gone = _DISAPPEARED.match(entry.text)
            story_of_gone = stories.get(int(gone[1])) if gone else None
            # A rank whose log has an end has only lost its connection.
            if gone and not (story_of_gone and story_of_gone.end):
                crash = _crash(story_of_gone) if story_of_gone else ""
                what = entry.text.partition(" disappeared")[0] + f" crashed: {crash}" if crash else entry.text
                yield Outcome("crashed" if crash else "disappeared", what, int(gone[1]), entry.time)


def _crash(story: RankStory) -> str:
    """Return what Python noted of a crash in C code, as "Segmentation fault, at model.py:27"; "" if it noted none."""
    text = story.entries[-1].text
    fatal = _FATAL.search(text)
    if fatal is None:
        return ""
    current = _CURRENT.search(text, fatal.end())  # none if Python does not know the thread
    frames = re.findall(r'File "([^"\n]+)", line (\d+) in', current[1] if current else "")
    own = [f"{path}:{line}" for path, line in frames if "site-packages" not in path and "/lib/python" not in path]
    return f"{fatal[1]}, at {own[0]}" if own else fatal[1]


def _alive(run_dir: Path, stories: Mapping[int, RankStory]) -> list[int]:
    """Return the ranks whose processes are on this host: the same process, not a later one with its number.

    Containers, and hosts of one image, may share a name: that another machine of it has the lease contradicts. So does
    a lease of another folder: this one is a copy, whose run may train on.
    """
    here = socket.gethostname()
    with suppress(OSError):
        holder, _, _ = read_lease(run_dir)
        if holder is not None and holder.host == here and not holder.is_of_this_machine:
            return []
        if holder is not None and holder.folder not in (0, run_dir.stat().st_ino):
            return []
    return [
        rank
        for rank, story in stories.items()
        if story.host == here and has_run_since(story.pid, story.began.timestamp())
    ]


def _find_running(run_dir: Path, watch_s: float) -> str | None:
    """Return which run has the directory and how that shows, in words; None if no run has it.

    A lease refreshed within watch_s is valid. A lease that looks older is watched for that long, because the clock that
    stamps it may differ from ours.
    """
    try:
        holder, first, runs_here = read_lease(run_dir)
    except OSError:
        return None
    name = str(holder or UNNAMED)
    if runs_here is not None:
        return f"{name}, a process on this host" if runs_here else None
    if 0 <= time.time() - first <= watch_s:
        return f"{name}, whose lease was refreshed {time.time() - first:.0f} s ago"
    to_stderr(f"{run_dir}: is held by {name}. Watching its lease for {watch_s:.0f} s …")
    end = time.monotonic() + watch_s
    while time.monotonic() < end:
        time.sleep(POLL_S)
        try:
            holder, now, _ = read_lease(run_dir)
        except OSError:
            return None
        if now != first:
            return f"{name if holder is None else holder}, whose lease was refreshed just now"
    return None


def _earlier(outcome: Outcome, stories: Mapping[int, RankStory], summary: Mapping[str, Any]) -> str:
    story = None if outcome.rank is None else stories.get(outcome.rank)  # a rank may keep no log
    end = story.end if story else None
    if outcome.state != "failed" or not summary or (end and end.get("step") is not None):
        return ""
    return f"an earlier start ended after {summary.get('steps', '?')} steps: {summary.get('ended', 'done')}"


def _ended_by_another(story: RankStory) -> bool:
    """Return whether this rank ended because of another. A launcher may have ended it before it logged its own end."""
    return story.end["ended"] == "followed" if story.end else bool(story.find("cause"))


def _next(
    run_dir: Path,
    outcome: Outcome,
    stories: Mapping[int, RankStory],
    launched: Sequence[Entry],
    checkpoint: LastGood | None,
    *,
    has_damaged: bool,
    is_lost: bool,
) -> str:
    """is_lost: whether the run had checkpoints, and can resume from none."""
    logs, folder = run_dir / FOLDER, run_dir / CHECKPOINTS
    if outcome.state == "finished":
        lost = f"finished, but none of its checkpoints can be read: restore {folder} from a copy"
        return lost if is_lost else "nothing to do"
    if outcome.state == "running":
        return f"wait; its progress is in {logs}"
    story = None if outcome.rank is None else stories.get(outcome.rank)
    host = story.host if story else "its host"
    log = log_file(logs, story.rank) if story else logs
    end = story.end if story is not None and story.end is not None else {}
    remedy = "read what the ranks have printed; only the terminal, or the job's output, has it"
    if outcome.rank is not None:
        remedy = _remedy(str(end.get("error")), end.get("exit_code", 1), run_dir, log)
    first = {
        "failed": f"{remedy}; then ",
        "crashed": f"see the stack in {log}; then ",
        "disappeared": f"see whether {host} ran out of memory, the likely reason (dmesg, or the scheduler's "
        "record), and take a smaller data.global_batch_size then; or whether the scheduler ended the job; then ",
        "stalled": f"see in {logs} where each rank stood (stacks), and whether {host} is well; then ",
    }.get(outcome.state, "")
    if outcome.state == "disappeared" and launched and _ASKED in launched[-1].text:
        first = ""  # launch has killed what did not end
    stop_file = run_dir / STOP_FILE
    if stop_file.exists():
        first += f"remove {stop_file}, which would stop the run again; then "
    if not (run_dir / "config.yaml").exists():
        return f"{first}start it again with the same command"
    resume = resume_of(run_dir)
    words = [] if resume != "never" else ["checkpoint.resume=auto"]
    does = "resume with" if checkpoint else "start again with"
    # The run refuses to begin anew over what it has come to, unless it is told from which checkpoint.
    if is_lost and (has_damaged or resume in ("auto", "never")):
        words = ["--resume", "never"]
        anew = f"remove {folder} and start with" if has_damaged else "start with"
        does = f"bring {folder} back, whole, from a copy; to begin anew, {anew}"
    is_launched = was_launched(run_dir, launched)
    is_slurm = not is_launched and any(story.launcher in _SLURM for story in stories.values())
    if is_slurm and not is_lost:
        told = "".join(f" with {word} in it" for word in words)
        # It has what SLURM was asked for, such as GPUs and nodes, which the logs do not tell.
        first += f"submit its batch script again{told} (sbatch), unless SLURM has requeued it already (squeue); "
        does = f"inside an allocation {does}"
    return f"{first}{does}: {_command(run_dir, list(stories.values()), words, launched if is_launched else [])}"


def _remedy(error: str, exit_code: int, run_dir: Path, log: Path) -> str:
    """Return what to do about the error that ended a rank, as an imperative without a full stop."""
    shown = error_line(error)  # short, because a pattern may begin at each word
    for pattern, advice in _BY_TEXT:
        if re.search(pattern, shown):
            return advice.format(run_dir=run_dir)
    if exit_code == RanksDisagree.exit_code:
        return f"find what changes that variable on some ranks only; {log} has the traceback"
    if exit_code == UserError.exit_code:
        return "fix that"
    if line := _USERS_LINE.search(error):
        return f"fix {line[1]}; the traceback is in {log}"
    return f"read the traceback in {log}"


def _command(run_dir: Path, stories: Sequence[RankStory], resume: Sequence[str], launched: Sequence[Entry]) -> str:
    """Return the command that starts the run again as it was started, on each rank if a scheduler has started those.

    resume: the words that say from where, if its config does not. launched: what the command launch has said, if it has
    started the ranks, by mpirun for example.
    """
    words = ["--config", str(run_dir / "config.yaml"), *resume, "--output-dir", str(run_dir)]
    main = ["python", "-m", "horovod_train.main"]
    launcher, size = (stories[0].launcher, str(stories[0].size)) if stories else ("none", "1")
    per_host = Counter(story.host for story in stories)
    hosts = ["-H", ",".join(f"{host}:{count}" for host, count in per_host.items())] if len(per_host) > 1 else []
    begun = _starts_of(launched)
    if begun and (each := _ON_EACH_HOST.search(begun[-1].text)):
        return f"{shlex.join([*main, 'launch', '--slots', each[1], '--', *words])},{each[2]}"
    if launcher == "launch" or launched:
        return shlex.join([*main, "launch", *(hosts or ["-np", size]), "--", *words])
    if launcher == "torchrun" and not hosts:
        return shlex.join(["torchrun", "--nproc-per-node", size, *main[1:], *words])
    start: dict[str, list[str]] = {
        "horovodrun": ["horovodrun", "--gloo", "-np", size, *hosts],
        "mpirun": ["mpirun", "-np", size, *hosts] if hosts else launch_command("mpirun", int(size)),
        "srun": ["srun", "--mpi=none", "-n", size],
        "srun-pmix": ["srun", "--mpi=pmix", "-n", size],
        "jsrun": ["jsrun", "-n", size],
        "flux": ["flux", "run", "-n", size],
    }
    command = shlex.join([*start.get(launcher, []), *main, *words])
    return f"{command}, on each of the {size} ranks of {launcher}" if launcher in _STARTS_EACH else command


def resume_of(run_dir: Path) -> str:
    """Return checkpoint.resume of its config; auto, the default, if that cannot be read."""
    try:
        return str(settings_of(run_dir)["checkpoint"]["resume"])
    except (RunError, KeyError, TypeError):
        return "auto"


def settings_of(run_dir: Path) -> dict[str, Any]:
    """Return what the config of a run holds; nothing without one. Raises UserError as the loader does; ReadFailed."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return {}
    with reading(str(path), text=True):
        text = read_whole(path).decode()
    node = compose(text, str(path))
    settings = None if node is None else plain_value(node)
    return settings if isinstance(settings, dict) else {}
