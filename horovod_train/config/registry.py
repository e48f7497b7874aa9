"""Finds an object by the name in a config and calls it with its options; loads a preset of keras_hub by its folder.

Contains no list of names. A wrong name, option or pattern is the user's mistake: one line with the nearest names, or
with the signature.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from horovod_train.config.settings import Spec
from horovod_train.errors import RunError, UserError, kind_of, one_line, unreadable
from horovod_train.shown_text import listed

if TYPE_CHECKING:
    import keras

_LIBRARIES = {"keras", "tensorflow", "numpy", "horovod"}
_STDLIB = sysconfig.get_path("stdlib")
_PACKAGE = Path(__file__).parent.parent
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_USERS_FUNCTION = re.compile(r"((?!\d)[\w.]+):\w+")
_NUMBER = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([-+]?)(\d+)")
"""With an exponent: YAML 1.1 reads it as text unless it has a point and the exponent a sign."""


def load_function(name: str, where: str) -> Any:
    """Import what `package.module:function` names. `where` is the config key, for the error."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"{where}: cannot import {name!r}: {error}. Is its folder on PYTHONPATH?") from error
    except SyntaxError as error:
        raise UserError(f"{where}: {error.filename}:{error.lineno}: {error.msg}.") from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        text = one_line(error)
        raise UserError(
            f"{where}: {module_name} cannot be imported: {type(error).__name__}: {text}{raised_at(error)}."
        ) from error
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UserError(f"{where}: {module_name} has no {attribute!r}; {suggest(attribute, public)}")
    return getattr(module, attribute)


def import_extra(module: str, extra: str, where: str) -> ModuleType:
    """Import a module that only an optional extra installs; raise UserError with the command if it is missing.

    where: the command or setting that needs it, for the error.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"{where}: needs {package} ({error}): pip install 'horovod_train[{extra}]'.") from error


def load_task(folder: str) -> keras.Model:
    """Load the model of a task that keras_hub has saved in a local folder, with its weights, as plain layers.

    What it was compiled with is left out. Its inputs are what its preprocessor gives. Raises UserError.
    """
    import keras

    task = load_preset(folder, "task.json", "model.name")
    # A task's own compile, fit and predict preprocess texts; here a pipeline has done that.
    return keras.Model(task.input, task.output, name=task.name)


def load_preset(folder: str, file_name: str, setting: str) -> Any:
    """Load a task that keras_hub has saved in a local folder, or its preprocessor. Raises UserError."""
    path = Path(folder, file_name)
    if not path.is_file():
        raise UserError(f"{setting}: {folder} is no preset of a keras_hub task: it has no {file_name}.")
    import_extra("keras_hub", "keras_hub", f"{setting}: {folder}")  # registers its classes
    from keras.saving import get_registered_object

    try:
        name = json.loads(path.read_text(encoding="utf-8"))["registered_name"]
        saved_class = get_registered_object(name)
        if saved_class is None:
            raise ValueError(f"this keras_hub has no {name}")
        return saved_class.from_preset(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        text = one_line(error)[:300]
        raise UserError(f"{setting}: {folder}: cannot be loaded: {text}") from error


def users_modules(config: Any) -> set[str]:
    """Return the module of every `package.module:function` in a config."""
    if isinstance(config, Mapping):
        config = list(config.values())
    if isinstance(config, list | tuple):
        return {name for value in config for name in users_modules(value)}
    match = _USERS_FUNCTION.fullmatch(config) if isinstance(config, str) else None
    return {match[1]} if match else set()


_seen: dict[str, tuple[Any, bytes]] = {}
"""By a user's module its import, which `importlib.reload` replaces, and what its file held then."""


def _loaded_files(config: Any) -> dict[str, Path]:
    """Map each imported module, of every `package.module:function` in a config, to its source file."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(users_modules(config))}
    return {name: Path(file) for name, file in files.items() if file and Path(file).is_file()}


def note_loaded_code(config: Any) -> None:
    """Note what the files of a config's modules hold that were imported since this was called last."""
    for name, path in _loaded_files(config).items():
        imported = sys.modules[name].__spec__
        if name not in _seen or _seen[name][0] is not imported:
            _seen[name] = imported, path.read_bytes()


def loaded_code(config: Any) -> dict[str, bytes]:
    """Map each imported module, of every `package.module:function` in a config, to the code that was noted for it.

    Where nothing was noted since its import, that is what its file holds now.
    """
    note_loaded_code(config)
    return {name: _seen[name][1] for name in _loaded_files(config)}


def edited_modules(config: Any) -> list[str]:
    """Return the imported modules in a config whose files hold another code now.

    A notebook keeps what it has imported, while other processes import what is there now.
    """
    code = loaded_code(config)
    return [name for name, path in _loaded_files(config).items() if path.read_bytes() != code[name]]


def is_users(name: str) -> bool:
    """Return whether a name in a config is that of a user's `package.module:function`."""
    return bool(_USERS_FUNCTION.fullmatch(name))


def choose(choices: Mapping[str, Callable[..., Any]], name: str, where: str) -> Callable[..., Any]:
    """Return one of `choices` by name, or a user's `package.module:function`."""
    if ":" in name:
        return load_function(name, where)
    if name not in choices:
        raise UserError(
            f"{where}: unknown name {name!r}; {suggest(name, list(choices))} Your own is package.module:function."
        )
    return choices[name]


def _keras_classes(module: ModuleType, base: type) -> dict[str, type]:
    """Return the public classes of a Keras module that derive from `base`, by their folded names."""
    return {
        fold(name): value for name, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)
    }


def find_keras(module: ModuleType, base: type, name: str) -> type | None:
    """Return a Keras class by name, also in snake case, or by a short one that Keras' `get` knows: `mse`."""
    classes = _keras_classes(module, base)
    return classes.get(fold(name)) or classes.get(fold(_spelled_out(module, name)))


def is_short(module: ModuleType, base: type, name: str) -> bool:
    """Return whether a name is one of Keras' short names for something of that module, such as `mse`.

    Keras is not asked about the name of a class: it would make an object, and number the name of the next one.
    """
    return fold(name) not in _keras_classes(module, base) and fold(_spelled_out(module, name)) != fold(name)


def _spelled_out(module: ModuleType, name: str) -> str:
    """Return the name of what Keras' `get` finds: a function, or an object of a class."""
    try:
        found = module.get(name)
    except (AttributeError, TypeError, ValueError):  # keras.callbacks has no get
        return name
    return found.__name__ if inspect.isfunction(found) else type(found).__name__


def choose_keras(
    module: ModuleType, base: type, name: str, where: str, short: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return a Keras class by name, or the user's function or class; see find_keras.

    short: other names that are known, to suggest rather than a class of that name.
    """
    if ":" in name:
        return load_function(name, where)
    chosen = find_keras(module, base, name)
    if chosen is None:
        readable = sorted({cls.__name__ for cls in _keras_classes(module, base).values()} - {base.__name__})
        raise UserError(f"{where}: Keras has no {name!r}; {suggest(name, [*readable, *short])}")
    return chosen


def call(function: Callable[..., Any], spec: Spec, where: str, **arguments: Any) -> Any:
    """Call `function(**arguments, **spec.options)`; an unknown option is reported as the user's error."""
    if not callable(function):
        raise UserError(f"{where}: {spec.name} must be a function or a class; it is {type(function).__name__}.")
    if where != "log.trackers":  # whose options are names
        check_numbers(spec, where)
    try:
        inspect.signature(function).bind(**arguments, **spec.options)
    except TypeError as error:
        signature = inspect.signature(function)
        takes = ", ".join(name for name in signature.parameters if name not in arguments and name != "self")
        former = "" if spec.options else " Options that a file gives to another name do not apply."
        raise UserError(f"{where}.options: {spec.name}: {error}; it takes: {takes}.{former}") from error
    except ValueError:
        pass  # a class in C++ may not tell what it takes
    try:
        return function(**arguments, **spec.options)
    except RunError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        is_refusal = ":" not in spec.name and isinstance(error, TypeError | ValueError)  # by a class of Keras
        kind = "" if is_refusal else f"{kind_of(error)}: "
        given = f" with options {spec.options}" if spec.options else ""
        raise unreadable(error)(
            f"{where}: {spec.name}{given}: {kind}{one_line(error)}{raised_at(error)}{_advice(error)}"
        ) from error


def check_methods(built: Any, methods: Sequence[str], who: str) -> None:
    """Raise UserError unless what a user's class has made has methods that can be called so, as "log(row)"."""
    for method in methods:
        name, _, arguments = method.rstrip(")").partition("(")
        try:
            inspect.signature(getattr(built, name)).bind(*filter(None, arguments.split(", ")))
        except ValueError:
            continue  # a method in C may not tell what it takes
        except (AttributeError, TypeError) as error:
            raise UserError(f"{who} must have {', '.join(methods[:-1])} and {methods[-1]}: {error}.") from error


def check_numbers(spec: Spec, where: str) -> None:
    """Raise UserError for an option that is meant as a number and was read as text. A user's function may want text."""
    for name, value in spec.options.items() if ":" not in spec.name else ():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and (number := _NUMBER.fullmatch(text)):
                digits, sign, power = number.groups()
                written = f"{digits}{'' if '.' in digits else '.0'}e{sign or '+'}{power}"
                raise UserError(
                    f"{where}.options.{name}: expected a number; received {text!r}. YAML reads {text} as text: write "
                    f"{written}."
                )


def _advice(error: BaseException) -> str:
    """Return what to do about an error that many meet; "" if that is not known."""
    if "URL fetch failure" in str(error):  # keras.utils.get_file
        return ". Without internet here, run `plan` with this config where there is some, and copy ~/.keras from there."
    return ""


def raised_at(error: BaseException) -> str:
    """Return ` (at FILE:LINE)` for the innermost line of the user's code in a traceback; "" if there is none.

    TensorFlow puts the traceback of a function that it calls, and that of an operation's making, into its message. So
    does AutoGraph, which runs a file of its own in place of the user's.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).name.startswith("__autograph_generated_file"):
            break
        if not _is_library(Path(frame.filename)):
            return f" (at {frame.filename}:{frame.lineno})"
    return _line_in_text(str(error))


def _line_in_text(text: str) -> str:
    """Return the last line of the user's code in tracebacks in a text, as `raised_at` does.

    Lines before the first of ours or of TensorFlow's are those of the program that trains.
    """
    found, is_inside = "", False
    for line in text.splitlines():
        if "(most recent call last)" in line:
            is_inside = False
        is_inside |= "in user code:" in line  # AutoGraph's has no lines of the program
        if not (frame := _FRAME.search(line)):
            continue
        named = Path(frame[1])
        # XLA leaves out the folders that all files of a traceback are in, ours among them.
        places = (named, *(folder / named for folder in _PACKAGE.parents))
        file = next((place for place in places if place.is_file()), named)
        if not _is_library(file):
            found = f" (at {file}:{frame[2]})" if is_inside else found
        is_inside |= file.is_relative_to(_PACKAGE) or not _LIBRARIES.isdisjoint(file.parts)
    return found


def failure_of(error: SystemExit) -> RunError:
    """Return sys.exit in the user's code as a failure. It would end one rank, maybe with 0, while the others wait."""
    why = "raise an exception in its place, or return a StopReason from a hook"
    return RunError(f"sys.exit({error.code!r}) was called{raised_at(error)} and is no end of a run: {why}.")


def _is_library(file: Path) -> bool:
    if file.is_relative_to(_PACKAGE):
        return True
    for name in ("site-packages", "dist-packages"):
        if name in file.parts:
            return file.parts[file.parts.index(name) + 1] in _LIBRARIES
    return not file.is_file() or file.is_relative_to(_STDLIB)


def fold(name: str) -> str:
    """Return the same string for `AdamW`, `adam_w` and `adamw`."""
    return name.replace("_", "").lower()


def suggest(name: str, known: list[str]) -> str:
    """Return the end of an error about a wrong name: the known ones that are similar to it, or else the first ones."""
    by_fold = {fold(candidate): candidate for candidate in known}
    if near := difflib.get_close_matches(fold(name), by_fold, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(by_fold[fold] for fold in near)}?"
    return f"expected one of {', '.join([*known[:12], *['…'] * (len(known) > 12)])}." if known else "there is none."


def find(pattern: str, names: Iterable[str], where: str) -> list[str]:
    """Return the names in which a pattern matches anywhere (re.search).

    where: the key of the config, for the UserError if it is no regular expression or matches nothing.
    """
    names = list(names)
    try:
        matching = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise UserError(f"{where}: {pattern!r} is no regular expression: {error}.") from error
    if not matching:
        raise UserError(f"{where}: {pattern!r} is in none of {listed(names) or 'nothing'}.")
    return matching
