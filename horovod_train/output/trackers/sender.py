"""Hands rows of metrics to one tracker, from a thread, so that a tracker can neither slow down nor end training.

Says what a tracker must do, but not what it does with rows. Those of this start wait in a bounded queue; those of
earlier starts are read again, one at a time. trackers/NAME.json in the run directory holds the id of the run in that
tracker, and what has been logged there; NAME.id.json the id alone, which survives a power cut.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from horovod_train.config.registry import raised_at
from horovod_train.errors import UserError, one_line
from horovod_train.output.files import Artifact, begins, json_text, must_be_writable, read_json, write_atomically
from horovod_train.output.logs import ANY_RANK

MOST_ROWS = 10_000
"""Of this start that wait; beyond them the oldest are dropped. Some tens of MB."""
CONNECT_WITHIN_S = 120.0
"""How long the first start of a run waits for a tracker."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a failed call is repeated; each pause is twice as long as the one before."""
RECORD = Artifact(
    "the record of a run's tracker", r".+\.json", content_matches=lambda path: begins(path, '{"run_id": ')
)

log = logging.getLogger(__name__)

Ended = Literal["done", "stopped", "failed"]
"""How a start of a run ended. stopped: it has saved its state and can be started again."""


class Row(NamedTuple):
    """A line of metrics. split: "train" or "eval"; time: seconds since 1970; values: may be NaN or infinite."""

    step: int
    epoch: int
    split: str
    values: Mapping[str, float]
    time: float


ReadRows: TypeAlias = "Callable[[], Iterable[Row]]"


class Tracker(Protocol):
    """Keeps the metrics of a run. Root makes it with the options of the config, which must not connect to anything.

    All other calls come from one thread, one after another. What they raise never ends training: ValueError and
    TypeError mean that the tracker refuses a row, which is left out; after any other exception the call is repeated.
    Only the first start of a run is refused if `start` raises.

    A tracker that can tell what it has kept may also have `last_steps() -> dict[str, int]`: by split, the last step.
    Otherwise the run directory remembers what was logged.
    """

    def start(self, directory: Path, run_id: str | None, step: int, config: Mapping[str, Any]) -> str:
        """Begin a run, or continue the run of that id at `step`; return its id.

        directory: of the run. config: all settings, as plain mappings, lists and scalars.
        """

    def log(self, row: Row) -> None:
        """Keep one row. Each is logged once, also if the run is resumed from an earlier step.

        Two hooks may log two rows of one split at one step.
        """

    def finish(self, ended: Ended, files: Sequence[Path]) -> None:
        """Keep these files of the run directory, and return when all is kept."""


class Record:
    """What root knows of one tracker. A disk that is full costs one warning."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir, self._name = run_dir, name
        self._path = run_dir / "trackers" / f"{name.replace(':', '.')}.json"
        self._id_path = self._path.with_suffix(".id.json")
        self._id_in_file: str | None = None
        """That this process has written to NAME.id.json."""
        self.run_id: str | None = None
        self.logged: dict[str, int] = {}
        """By split, the last step that was logged."""
        self.is_logged_known = True
        """False after a power cut: the run is known, but not what was logged."""
        self._is_failing = False

    def load(self) -> None:
        """Read what an earlier start has written, if anything; in a copy of a run directory nothing. Raises UserError.

        A directory that was moved is no copy: there is none of this run any more where it was.
        """
        if not self._path.exists():
            return
        try:
            text = self._path.read_text(encoding="utf-8")
            if _is_unwritten(text):
                self.is_logged_known = False
                text = self._id_path.read_text(encoding="utf-8") if self._id_path.exists() else ""
            if _is_unwritten(text):
                log.warning(
                    f"log.trackers: {self._path} is empty, as after a power cut: which run of the tracker it was of is "
                    "not known, and a new run begins"
                )
                return
            content = json.loads(text)
            first = content.get("directory", "")
            of_first = read_json(Path(first) / "trackers" / self._path.name) if first else {}
            is_there = of_first.get("run_id") == content["run_id"]
            if is_there and not os.path.samefile(first, self._run_dir):
                log.warning(
                    f"log.trackers: {self._name}: {self._run_dir} is a copy of {first}, to which run "
                    f"{content['run_id']} belongs; a new run begins"
                )
                return
            self.run_id = str(content["run_id"])
            self.logged = {str(split): int(step) for split, step in content["logged"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"log.trackers: {self._path}: expected a record of a run's tracker: {error}. Remove the file to begin "
                "a new run in the tracker."
            ) from error

    def save_first(self) -> None:
        """Write it where nothing may fail yet. Raises UserError."""
        with must_be_writable(self._path):
            self._write()

    def save(self) -> None:
        try:
            self._write()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                lost = "After a kill, the tracker may get rows twice."
                log.warning(f"{self._path} cannot be written: {error.strerror}. {lost} Training continues.")
            self._is_failing = True

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        if self._id_in_file != self.run_id:
            write_atomically(self._id_path, self._text({}), RECORD)
            self._id_in_file = self.run_id
        # Not synchronised with the disk, which each row would wait for: a power cut may leave it empty.
        write_atomically(self._path, self._text(self.logged), RECORD, sync=False)

    def _text(self, logged: Mapping[str, int]) -> str:
        content = {"run_id": self.run_id, "logged": logged, "directory": os.path.realpath(self._run_dir)}
        return json_text(content) + "\n"


def _is_unwritten(text: str) -> bool:
    """Return whether a file has none of its content, as a power cut may leave it: no bytes, or NUL bytes."""
    return not text.strip("\0")


class Sender:
    """Calls one tracker from a thread, in the order start, log, log, …, finish. Root calls its methods."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run_dir: Path,
        *,
        most_rows: int = MOST_ROWS,
        pause_s: float = FIRST_PAUSE_S,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """is_ours: whether the run still owns its directory; if not, another run continues that of the tracker."""
        self._name, self._tracker, self._run_dir, self._is_ours = name, tracker, run_dir, is_ours
        self._most_rows, self._pause_s = most_rows, pause_s
        self._record = Record(run_dir, name)
        self._logged_before: dict[str, int] = {}
        """By split, the last step that an earlier start has logged, or that was read of its rows."""
        self._counts_as_logged = -1
        """The last step of which all rows count as logged."""
        self._rows: deque[Row] = deque()
        self._changed = threading.Condition()
        """Guards _rows, _end and _lost, and tells that they have changed."""
        self._end: tuple[Ended, Sequence[Path]] | None = None
        self._lost = 0
        self._is_failing = self._has_refused = self._has_caught_up = self._is_finished = False
        self._thread: threading.Thread | None = None

    def start(self, step: int, config: Mapping[str, Any], rows: ReadRows, *, anew: bool) -> None:
        """Begin or continue the run in the tracker; then send it the rows that it lacks.

        rows: reads those of the run so far, until `step`; called in the thread. anew: begin another run, even if the
        directory names one. Raises UserError if a run cannot begin. A run that continues does not wait for its tracker.
        """
        if not anew:
            self._record.load()
        begin = partial(self._begin, step, config)
        begun: Future[None] | None = Future() if self._record.run_id is None else None
        self._thread = threading.Thread(target=self._work, args=(begin, begun, rows), name=self._name, daemon=True)
        self._thread.start()
        if begun is not None:
            self._wait_for(begun)

    def write(self, row: Row) -> None:
        with self._changed:
            self._rows.append(row)
            if len(self._rows) > self._most_rows:
                self._rows.popleft()
                self._lost += 1
            self._changed.notify_all()

    def ask_to_finish(self, ended: Ended, files: Sequence[Path]) -> None:
        """Let the thread end when it has sent all rows, or when a call fails that it makes from now on."""
        with self._changed:
            self._end = (ended, files)
            self._changed.notify_all()

    def wait_until_finished(self, deadline: float) -> None:
        """Wait for the thread; say what the tracker lacks. deadline: on time.monotonic's clock."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        is_running, self._thread = self._thread.is_alive(), None
        with self._changed:
            lost = self._lost + len(self._rows)
        also = " It had not answered when the run ended." if is_running else ""
        if not self._has_caught_up:
            also = f" It may also lack rows of earlier starts.{also}"
        if lost:
            self._warn(f"lacks {lost} row{'s' * (lost > 1)} of metrics, which metrics.jsonl has.{also}")
        elif not self._is_finished:
            self._warn(f"may lack the files and the end of the run.{also}")

    def _wait_for(self, begun: Future[None]) -> None:
        try:
            begun.result(CONNECT_WITHIN_S)
        except (Exception, SystemExit) as error:  # a tracker may raise anything
            self._thread = None
            if isinstance(error, UserError):
                raise
            why = self._describe(error) if begun.done() else f"no answer within {CONNECT_WITHIN_S:.0f} s."
            raise UserError(f"log.trackers: {self._name}: cannot begin a run: {why}") from error

    def _work(self, begin: Callable[[], None], begun: Future[None] | None, rows: ReadRows) -> None:
        """Run in the thread. begun: gets the outcome of the first start of a run."""
        if begun is None:
            if not self._repeat_until_success("continue the run", begin):
                return
        else:
            try:
                begin()
                self._record.save_first()
            except (Exception, SystemExit) as error:
                begun.set_exception(error)
                return
            begun.set_result(None)
        for row in itertools.chain(self._read(rows), self._take_rows()):
            if row.step <= max(self._counts_as_logged, self._logged_before.get(row.split, -1)):
                continue  # logged by an earlier start, from which the run may have gone back, or read below
            if not self._repeat_until_success(f"log step {row.step}", partial(self._send, row)):
                return
        assert self._end is not None
        self._is_finished = self._repeat_until_success("finish", partial(self._tracker.finish, *self._end))

    def _begin(self, step: int, config: Mapping[str, Any]) -> None:
        record = self._record
        run_id = self._tracker.start(self._run_dir, record.run_id, step, config)
        if not isinstance(run_id, str) or not run_id:
            raise TypeError(f"start must return the id of the run, a string; it returned {run_id!r}")
        last_steps = getattr(self._tracker, "last_steps", None)
        if record.run_id not in (None, run_id):
            log.info(f"log.trackers: {self._name}: run {record.run_id} is gone, and {run_id} takes its place")
            record.logged = {}
        elif record.run_id and not record.is_logged_known and last_steps is None:
            self._counts_as_logged = step  # rather than send all of them twice
            self._warn(
                f"may lack rows until step {step}: its record was empty, as after a power cut, and they count as sent. "
                "metrics.jsonl has them."
            )
        record.run_id, record.is_logged_known = run_id, True
        if last_steps is not None:
            record.logged = dict(last_steps())
        self._logged_before = dict(record.logged)
        self._save()

    def _read(self, rows: ReadRows) -> Iterator[Row]:
        """Yield the rows of earlier starts, as far as they can be read.

        They may include the evaluation that this start has begun with, whose row is in the queue too.
        """
        read: dict[str, int] = {}
        try:
            for row in rows():
                yield row
                read[row.split] = max(row.step, read.get(row.split, -1))
            self._has_caught_up = True
        except UserError as error:
            self._warn(f"may lack rows of earlier starts: {error}")
        for split, step in read.items():
            self._logged_before[split] = max(step, self._logged_before.get(split, -1))

    def _take_rows(self) -> Iterator[Row]:
        """Yield rows until the run ends. A row stays in the queue until it is sent, and may be dropped from there."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._end)
                if not self._rows:
                    return
                row = self._rows[0]
            yield row
            with self._changed:
                if self._rows and self._rows[0] is row:
                    self._rows.popleft()
                else:
                    self._lost -= 1  # sent while it was dropped

    def _send(self, row: Row) -> None:
        try:
            self._tracker.log(row)
        except (ValueError, TypeError) as error:
            with self._changed:
                self._lost += 1
            if not self._has_refused:
                self._warn(f"refuses the row of step {row.step}: {self._describe(error)} Such rows are left out.")
            self._has_refused = True
        self._record.logged[row.split] = max(row.step, self._record.logged.get(row.split, -1))
        self._save()

    def _save(self) -> None:
        if self._is_ours():  # the process may have been suspended while the tracker answered
            self._record.save()

    def _repeat_until_success(self, what: str, call: Callable[[], None]) -> bool:
        """Repeat a call until it succeeds.

        Return False if a call fails that was made after the run had ended, or if another run has the directory.
        """
        pause_s = self._pause_s
        while True:
            is_last = self._end is not None
            if not self._is_ours():
                return False
            try:
                call()
            except (Exception, SystemExit) as error:  # a tracker may raise anything
                if not self._is_failing and self._thread is not None:  # else the run has ended without it
                    again = "" if self._end else " Training continues, and it is tried again."
                    self._warn(f"cannot {what}: {self._describe(error)}{again}")
                self._is_failing = True
            else:
                if self._is_failing:
                    log.info(f"log.trackers: {self._name}: works again")
                self._is_failing = False
                return True
            if is_last:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._end, pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _warn(self, text: str) -> None:
        log.warning(f"log.trackers: {self._name}: {text}", extra=ANY_RANK)

    def _describe(self, error: BaseException) -> str:
        """Return an error as one short sentence."""
        text = one_line(error)
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        # Clients of servers put addresses first, and the reason, such as a certificate, last.
        short = text if len(text) <= 300 else f"{text[:100]} … {text[-200:]}"
        where = raised_at(error) if ":" in self._name else ""  # of the user's own class
        return f"{type(error).__name__}{': ' * bool(short)}{short.rstrip('.')}{where}."
