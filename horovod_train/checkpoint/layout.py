"""Checkpoints on disk: names of folders, manifests, the newest complete one, and whether the disk has room for more.

Also chooses the checkpoint from which a run starts. The only module that knows the names of the folders. A manifest,
`manifest.json`, has facts of the run, the SHA-256 of each file, and a SHA-256 of itself; tensors writes it, and writes
and reads the arrays. This module writes nothing and does not import TensorFlow. A run verifies a checkpoint before it
loads it, explain verifies it, and plan reads only its manifest.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from horovod_train.config.loader import as_dict, by_key
from horovod_train.config.paths import link_to_nothing
from horovod_train.config.settings import CheckpointConfig, Config
from horovod_train.errors import ReadFailed, UserError, unreadable, unusable
from horovod_train.output.files import is_gone, parse_json, read_json, read_whole

CHECKPOINTS = "checkpoints"
"""Folder of a run directory with its checkpoints."""

BEST = "best"
"""Symbolic link, next to the checkpoints, to the best one. For people: every manifest records the best step."""

FORMER_BEST = f"former-{BEST}-"
"""What links to former best ones begin with, before the name of each; these are never removed. After them the best was
sought anew, because the value came to mean something else."""

SAVED = "saved.json"
"""File of a run directory that tells the step of the newest checkpoint, also when the checkpoints are gone."""

STEP_NAME = r"step-\d{9,}"
"""Pattern of the names of checkpoints."""

FORMAT = 1
MANIFEST = "manifest.json"
PREFIX = "state"
"""Prefix of the names of TensorFlow's files: `tf.train.load_checkpoint(folder / PREFIX)` opens them."""
_REQUIRED_FILES = (f"{PREFIX}.index", f"{PREFIX}.data-00000-of-00001")
_PAUSES_S = (0.5, 2.0)
"""Before each further attempt to read."""
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN, errno.EBADMSG}
"""Errors that say that a file is missing or its content lost. Others, such as EACCES, say nothing about the content."""
_MOST_SHOWN = 60
"""Characters of a setting in a line about settings that have changed."""

Result = TypeVar("Result")


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name; None for any other name, such as `step-000000460.abandoned`."""
    return int(name.removeprefix("step-")) if re.fullmatch(STEP_NAME, name) else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a checkpoints folder, whole or not, newest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((step for name in names if (step := step_of(name)) is not None), reverse=True)


class Damaged(Exception):
    """A checkpoint differs from what was written; the text names the file, the expected and the found value."""


@dataclass(frozen=True)
class Best:
    """The best evaluation so far. If a checkpoint was saved at its step, it is never removed."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class Facts:
    """What a checkpoint records besides its arrays. `config` and `versions` contain only values that JSON can hold."""

    step: int
    epoch: int
    records: int
    ranks: int
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    best: Best | None = None
    data: str = ""
    """Fingerprint of the order and content of the training records; if equal, `records` has the same meaning."""
    data_files: str = ""
    """The training files, as data.source packs them; "" of a stream."""
    callbacks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The state of Keras callbacks: values that JSON can hold."""
    built_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The learning rates that the config or the model gave, by name; callbacks may have changed what the arrays hold.
    {} if they follow schedules."""
    class_names: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """The names of classes in the training records, by feature."""
    features: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """What the training records hold, as data.features says it; {} of streams, and of versions that did not keep it."""
    began_at: str = ""
    """The path in checkpoint.resume at which the run began; "" if at none."""
    eval_data: str = ""
    """Digest of the evaluation records; "" if there are none, or none is known."""
    contents: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the model computed with besides weights when that start began: digests of contents, options, code."""
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the model got of a record, as data.model_inputs packs it; {} of versions that did not keep it."""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the numbers in the array of figures of training are; {} of versions that did not keep any."""
    skipped: int = 0
    """Updates that were left out because of non-finite numbers."""
    skipped_in_a_row: int = 0
    """Those since the last that was not."""
    evaluates_averages: bool = True
    """Whether the run's evaluations saw the averages of weights that the arrays hold, if they hold any; True of
    versions that did not keep it."""

    def setting(self, path: str) -> Any:
        """Return a setting of the run that wrote it, by `section.key`; today's default if that version lacked it."""
        value: Any = self.config
        default: Any = as_dict(Config())
        for key in path.split("."):
            default = default[key]
            value = value[key] if isinstance(value, Mapping) and key in value else default
        return value

    def changes(
        self, config: Config, keys: Sequence[str] = (), features: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, str]:
        """Return how settings differ from those of the run that wrote it, by `section.key`, as "then → now".

        keys: the settings and sections to compare; default: all that matter to the result of the run. features: of the
        records that there are now; data.features then stands for what the records of both have, wherever it is said.
        """
        then, now = {**_flat(as_dict(Config())), **_flat(self.config)}, _flat(as_dict(config))
        if features is not None and self.features:
            common = sorted(features.keys() & self.features.keys())
            for flat, known in ((then, self.features), (now, features)):
                for path in [path for path in flat if _is_in(path, ["data.features"])]:
                    del flat[path]
                flat |= _flat({"data": {"features": {name: known[name] for name in common}}})
        changed = {
            path: (then.get(path, _UNSET), now.get(path, _UNSET))
            for path in {**then, **now}
            if _is_in(path, keys) or (not keys and not _is_in(path, _NOT_OF_THE_RESULT))
        }
        nothing: list[Any] = [_UNSET, None, {}, []]
        return {
            path: _difference(old, new)
            for path, (old, new) in changed.items()
            if old != new and not (old in nothing and new in nothing)
        }


_UNSET = object()
_NOT_OF_THE_RESULT = (
    *("output_dir", "log", "watch", "device", "eval.batch_size_per_rank"),
    *(
        f"checkpoint.{key}"
        for key in ["every_steps", "every_epochs", "every_minutes", "keep", "max_failed_saves", "resume"]
    ),
    *(f"data.{key}" for key in ["index_dir", "stage_dir", "cache", "read_threads", "read_ahead_chunks"]),
    *(f"data.{key}" for key in ["parallel_parse_calls", "prefetch_batches", "audit", "retry_s"]),
    *(f"train.{key}" for key in ["steps_per_call", "max_time", "check_agreement_every_steps"]),
    *(f"horovod.{key}" for key in ["cycle_time_ms", "fusion_threshold_mb", "timeline"]),
)
"""Settings and sections that may differ between two starts of a run without another result."""


def _is_in(path: str, keys: Sequence[str]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in keys)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by `section.key`, as JSON gives them back."""
    return dict(by_key(json.loads(json.dumps(config, default=str))))


def _difference(then: Any, now: Any) -> str:
    """Return both values, "then → now"; of long ones a part that holds where they begin to differ."""
    if isinstance(then, list) and isinstance(now, list):
        same = {json.dumps(value) for value in then} & {json.dumps(value) for value in now}
        if len(same) < max(len(then), len(now)):  # else only the order differs
            then, now = ([value for value in values if json.dumps(value) not in same] for values in (then, now))
    texts = [_text(value) for value in (then, now)]
    pairs = enumerate(zip(*texts, strict=False))
    common = next((place for place, (a, b) in pairs if a != b), min(map(len, texts)))
    begin = max(0, common - _MOST_SHOWN // 3) if max(map(len, texts)) > _MOST_SHOWN else 0
    return " → ".join(_cut(text, begin) for text in texts)


def _text(value: Any) -> str:
    if value is _UNSET:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, begin: int) -> str:
    shown = f"…{text[begin:]}" if begin else text
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 1]}…"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was whole when it was read."""

    folder: Path
    facts: Facts
    files: Mapping[str, Mapping[str, Any]]
    """The `bytes` and the `sha256` of each file but the manifest."""

    @property
    def size(self) -> int:
        """Bytes of these files."""
        return sum(file["bytes"] for file in self.files.values())


def verify(folder: Path) -> Checkpoint:
    """Read every byte of a checkpoint.

    Raises Damaged, UserError for a format that only later versions know, and OSError for what cannot be read.
    """
    checkpoint = read_manifest(folder)
    with _failures_are_damage():
        for name, expected in checkpoint.files.items():
            if (checksum := _retry(sha256, folder / name)) != expected["sha256"]:
                raise Damaged(f"{name}: expected SHA-256 {expected['sha256'][:12]}…, found {checksum[:12]}…")
    return checkpoint


def read_manifest(folder: Path) -> Checkpoint:
    """Return what the manifest of a checkpoint says; check the sizes of its files but do not read them.

    Raises as `verify` does.
    """
    with _failures_are_damage():
        content = _read(folder)
        if content["format"] > FORMAT:
            raise UserError(
                f"{folder}: is in format {content['format']}; this version of horovod_train reads up to {FORMAT}. "
                "Resume with the version that wrote it."
            )
        files = content["files"]
        _check_names(files)
        for name, expected in files.items():
            _check_size(folder / name, expected["bytes"])
        for name in _REQUIRED_FILES:
            if name not in files:
                raise Damaged(f"{MANIFEST}: does not name {name}, which TensorFlow reads")
        best = None if content["best"] is None else Best(**content["best"])
        facts = {field.name: content[field.name] for field in dataclasses.fields(Facts) if field.name in content}
        return Checkpoint(folder, Facts(**{**facts, "best": best}), files)


def pack(content: Mapping[str, Any]) -> bytes:
    """Return a manifest as bytes, including the SHA-256 of its other entries."""
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": checksum}, indent=2) + "\n").encode()


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def reason(error: Exception) -> str:
    """Return a short text for an error of the file system or of TensorFlow."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    # TensorFlow: "{{function_node ...}} PATH; No space left on device [Op:SaveV2]"
    path, _, problem = first_line.rpartition("}} ")[2].partition(" [Op:")[0].rpartition("; ")
    return f"{problem}: {path}" if path else problem


def _retry(read: Callable[[Path], Result], path: Path) -> Result:
    """Return read(path); try again after an OSError, because NFS and other file systems may fail for a moment."""
    for pause_s in _PAUSES_S:
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError:
            time.sleep(pause_s)
    return read(path)


def _read(folder: Path) -> dict[str, Any]:
    try:
        packed = _retry(read_whole, folder / MANIFEST)
        content = parse_json(packed)
        content.pop("sha256")
        is_unchanged = packed == pack(content)
    except FileNotFoundError as error:
        raise Damaged(f"{MANIFEST} is missing") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST}: expected JSON with its own sha256, found something else: {error}") from error
    # Check this first, before the format is read: manifests of every format are packed like this.
    if not is_unchanged:
        raise Damaged(f"{MANIFEST}: its entries do not match its own sha256")
    return content


def _check_names(files: Mapping[str, Any]) -> None:
    """Raise Damaged unless there are names, and each is that of a file directly in the folder."""
    if not files:
        raise Damaged(f"{MANIFEST}: names no files")
    for name in files:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise Damaged(f"{MANIFEST}: names {name!r}, which is not a file of this folder")


@contextmanager
def _failures_are_damage() -> Iterator[None]:
    """Raise Damaged where reading a checkpoint fails, or its manifest has other entries than this format."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise Damaged(reason(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST}: expected the entries of format {FORMAT}, found others: {error}") from error


def _check_size(file: Path, expected: int) -> None:
    try:
        status = _retry(Path.stat, file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{file.name} is missing") from error
    if not stat.S_ISREG(status.st_mode):  # a pipe or a device may never end
        raise Damaged(f"{file.name}: is no file")
    if status.st_size != expected:
        raise Damaged(f"{file.name}: expected {expected} bytes, found {status.st_size}")


Read = Callable[[Path], Checkpoint]
"""How a checkpoint is read: `verify` or `read_manifest`."""


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints, whole or not, that a path stands for, newest first.

    The path is a checkpoint, a checkpoints folder or a run directory. Raises OSError.
    """
    for folder in (path, path / CHECKPOINTS):
        if (folder / MANIFEST).exists() or (folder.is_dir() and step_of(folder.resolve().name) is not None):
            return [folder]
        if steps := steps_in(folder):
            return [folder / step_name(step) for step in steps]
    return []


def newest_whole(folder: Path, read: Read) -> tuple[Checkpoint | None, dict[int, Damaged]]:
    """Return the newest checkpoint in a checkpoints folder that `read` accepts as not damaged.

    Also returns, by step, the damage of newer ones. Where one can be read, those that seemed damaged because the file
    system did not answer are read once more: it answers now. A checkpoint that a running run removes meanwhile is not
    damaged: the folder is listed again, because that run has saved a newer one. Raises OSError.
    """
    damaged: dict[int, Damaged] = {}
    for step in steps_in(folder):
        try:
            whole = read(folder / step_name(step))
        except Damaged as error:
            if step not in steps_in(folder):
                return newest_whole(folder, read)
            damaged[step] = error
            continue
        for newer in [step for step, damage in damaged.items() if _may_be_whole(damage)]:
            try:
                return read(folder / step_name(newer)), {step: damaged[step] for step in damaged if step > newer}
            except Damaged as error:
                damaged[newer] = error
        return whole, damaged
    return None, damaged


def open_checkpoint(path: str, where: str, read: Read = verify) -> Checkpoint:
    """Return the checkpoint at a path: a checkpoint, or the newest in a checkpoints folder or run directory.

    Changes nothing there. A run that goes on may remove it for a newer one, which is read instead. where: the setting
    that the path came from, for the UserError if there is none or it is damaged.
    """
    try:
        folder = next(iter(checkpoints_at(Path(path))), None)
        if folder is None:
            expected = f"expected a run directory, its checkpoints folder, or a {step_name(0)} in that"
            raise UserError(f"{where}: {link_to_nothing(path) or f'no checkpoint at {path}; {expected}.'}")
        return read(folder)
    except Damaged as error:
        if folder is not None and is_gone(folder):
            return open_checkpoint(path, where, read)
        if _may_be_whole(error):
            raise ReadFailed(f"{where}: {folder}: {error}. Start again when its file system answers.") from error
        raise UserError(f"{where}: {folder} is damaged: {error}. Choose another checkpoint.") from error
    except OSError as error:
        raise unusable(f"{where}: cannot read {path}", error, "") from error


def path_in(resume: str) -> str:
    """Return the path in checkpoint.resume; "" for auto and never."""
    return "" if resume in ("auto", "never") else resume


class ResumePoint(NamedTuple):
    """The checkpoint that a run starts from; by step, the damaged ones that are skipped."""

    checkpoint: Checkpoint | None
    damaged: Mapping[int, Damaged]
    note: str = ""
    """What is to be said about the choice."""


def find_start(folder: Path, resume: str, read: Read) -> ResumePoint:
    """Return the checkpoint that a run starts from: the newest whole one (auto), none (never), or the one at a path.

    folder: the run's checkpoints. A run that began at a path and is given it again, for example if it is requeued,
    resumes from the newest whole checkpoint in `folder`, also if it was resumed by auto meanwhile.

    Raises UserError for a path without a whole checkpoint, if all are damaged, and in a folder that has checkpoints for
    "never", because they would be lost, and for a path of another run, because two runs would be mixed.
    """
    try:
        if folder.is_symlink() and (gone := link_to_nothing(folder)):
            raise UserError(f"checkpoint.resume: {resume}: {gone}")
        if resume == "never":
            if steps_in(folder):
                raise UserError(
                    f"checkpoint.resume: never, but {folder} holds checkpoints, which the run would replace. "
                    "Choose another --output-dir, remove them, or resume from them: --resume auto."
                )
            return ResumePoint(None, {})
        checkpoint, damaged = newest_whole(folder, read)
    except OSError as error:
        raise unusable(f"checkpoint.resume: {resume}: cannot read {folder}", error, "") from error
    if resume == "auto":
        if checkpoint is None and damaged:
            _raise_all_damaged(folder, resume, damaged)
        if checkpoint is None:
            _check_not_gone(folder, "choose another --output-dir, or say so: --resume never.")
        return ResumePoint(checkpoint, damaged)
    began_at = checkpoint.facts.began_at if checkpoint else ""
    if began_at and os.path.abspath(began_at) == os.path.abspath(resume):
        note = (
            f"checkpoint.resume: this run began at {resume}, and resumes from its own newest checkpoint. "
            "To begin there again, choose another --output-dir."
        )
        return ResumePoint(checkpoint, damaged, note)
    start = open_checkpoint(resume, "checkpoint.resume", read)
    if not steps_in(folder):
        _check_not_gone(folder, "or choose another --output-dir.")
    elif folder.resolve() not in {path.resolve().parent for path in checkpoints_at(Path(resume))}:
        if checkpoint is None and damaged:
            _raise_all_damaged(folder, resume, damaged)
        raise UserError(
            f"checkpoint.resume: {resume} is of another run than the checkpoints in {folder}. "
            "Choose another --output-dir, or resume from these: --resume auto."
        )
    return ResumePoint(start, {})


def _check_not_gone(folder: Path, advice: str) -> None:
    """Raise UserError if there were checkpoints, by what else there is of the run. For a folder without any."""
    if steps := steps_told(folder.parent):
        raise UserError(
            f"output_dir: {folder.parent} has the metrics of a run that came to step {steps}, but not its checkpoints, "
            f"and beginning there anew would remove them. Bring {folder} back, {advice}"
        )


def steps_told(run_dir: Path) -> int:
    """Return the steps that a run's files other than its checkpoints tell that it has saved; 0 without one.

    These are summary.json, which is away while a run trains, and saved.json, which is not after a kill.
    """
    told = (read_json(run_dir / "summary.json").get("steps"), read_json(run_dir / SAVED).get("step"))
    return max((steps for steps in told if isinstance(steps, int)), default=0)


def _may_be_whole(damage: Damaged) -> bool:
    """Return whether a checkpoint counts as damaged because its file system does not answer."""
    return damage.__cause__ is not None and unreadable(damage.__cause__) is ReadFailed


def _raise_all_damaged(folder: Path, resume: str, damaged: Mapping[int, Damaged]) -> NoReturn:
    newest_step = max(damaged)
    if any(map(_may_be_whole, damaged.values())):
        raise ReadFailed(
            f"checkpoint.resume: {resume}: none of the {len(damaged)} checkpoint(s) in {folder} can be read; the "
            f"newest, step {newest_step}: {damaged[newest_step]}. Start again when its file system answers."
        )
    raise UserError(
        f"checkpoint.resume: {resume}, but none of the {len(damaged)} checkpoint(s) in {folder} is undamaged; "
        f"the newest, step {newest_step}: {damaged[newest_step]}. Choose another --output-dir, or remove "
        "them to start anew."
    )


def count_saves(config: CheckpointConfig, steps_per_epoch: int, total_steps: int) -> int:
    """Return how many checkpoints are saved, except saves that depend on the clock or on an evaluation."""
    every = [step for step in (config.every_steps, (config.every_epochs or 0) * steps_per_epoch) if step]
    return count_multiples(every, total_steps, with_last=True)


def count_multiples(every: Sequence[int], last: int, *, with_last: bool) -> int:
    """Return how many steps up to the last are a multiple of one of at most two numbers; with_last: or are the last."""
    count = sum(last // step for step in every)
    if len(every) == 2:
        count -= last // math.lcm(*every)
    return count + (with_last and all(last % step for step in every))


def most_at_once(config: CheckpointConfig, saves: int) -> int:
    """Return how many checkpoints exist at most. saves: of the run, by `count_saves`."""
    most = config.keep + (config.best is not None) + 1  # one more exists while it is being written
    has_others = config.every_minutes is not None or config.best is not None
    return most if has_others else min(saves, most)


def lack_of_room(folder: Path, bytes_each: int, most: int) -> str | None:
    """Return a sentence if a disk has less room than `most` checkpoints take, with those there; None if it has enough.

    folder: of the checkpoints; it need not exist yet. Raises UserError if there is no room for one more.
    """
    try:
        existing = len(steps_in(folder)) if folder.is_dir() else 0
        folder = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        disk = shutil.disk_usage(folder)
    except OSError:  # a save will report it
        return None
    needed = max(1, most - existing)
    if disk.total == 0 or disk.free >= needed * bytes_each:  # some file systems do not tell their size
        return None
    free, each, wanted = (f"{count / 1e6:,.1f} MB" for count in (disk.free, bytes_each, needed * bytes_each))
    if disk.free < bytes_each:
        raise UserError(
            f"output_dir: the disk of {folder} has {free} free; expected {each} or more, which one checkpoint takes. "
            "Free space there, or choose another --output-dir."
        )
    return (
        f"output_dir: the disk of {folder} has {free} free; checkpoints will take up to {wanted}, {each} each. Free "
        "space there, lower checkpoint.keep, or choose another --output-dir."
    )
