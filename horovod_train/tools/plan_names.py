"""For `plan`: do the names in a config lead anywhere, and take their options? Read off source files, imports nothing.

What only running the code would show stays unseen: a name that comes from `import *`, a function behind a decorator.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod_train.config import Config, Spec
from horovod_train.errors import UserError
from horovod_train.lookup import fold, nearest
from horovod_train.schedules import Horizon, build_formula

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_FURTHEST = 8  # imports to follow from one module to the next


@dataclass(frozen=True)
class Found:
    """A name that is there; `definition` where its source can be read."""

    definition: Definition | None


def wrong_names(config: Config) -> Iterator[str]:
    """A sentence for each name that leads nowhere and each option that would be refused, as far as source tells."""
    ours = "horovod_train.models"
    yield from _check(config.model, "model", in_table=(ours, "MODELS"))
    yield from _check(config.loss, "loss", in_keras="keras.losses", given=2)
    for number, metric in enumerate(config.metrics):
        yield from _check(metric, f"metrics[{number}]", in_keras="keras.metrics")
    table = ("horovod_train.optim", "OPTIMIZERS")
    yield from _check(
        config.optimizer, "optimizer", in_table=table, in_keras="keras.optimizers", named=("learning_rate",)
    )
    if ":" in config.lr_schedule.decay.name:
        yield from _check(config.lr_schedule.decay, "lr_schedule.decay", named=("lr", "horizon"))
    else:
        try:
            build_formula(config.lr_schedule, Horizon(1, 1, 1))
        except UserError as error:
            yield str(error)
    for number, change in enumerate(config.data.augment):
        table = ("horovod_train.data.augment", "AUGMENTATIONS")
        yield from _check(change, f"data.augment[{number}]", in_table=table, given=2 if ":" in change.name else 0)
    if config.data.parse:
        yield from _check(Spec(config.data.parse), "data.parse", given=1)


def _check(
    spec: Spec,
    where: str,
    *,
    in_table: tuple[str, str] | None = None,
    in_keras: str | None = None,
    given: int = 0,
    named: Sequence[str] = (),
) -> Iterator[str]:
    """given: arguments that the trainer passes by place; named: those that it passes by name."""
    if ":" in spec.name:
        module, _, attribute = spec.name.partition(":")
        try:
            tree = _read(module)
        except SyntaxError as error:
            yield f"{where}.name: {error.filename}:{error.lineno}: {error.msg}."
            return
        if tree is None:
            yield f"{where}.name: cannot find the module of {spec.name!r}. Is its folder on PYTHONPATH?"
            return
        found = _look_up(module, attribute)
        if found is None:
            near = nearest(attribute, [name for name in _names(tree) if not name.startswith("_")])
            yield f"{where}.name: {module} has no {attribute!r}; it has {near}."
            return
    elif in_table and (table := _table(*in_table)) is not None and (spec.name in table or not in_keras):
        if spec.name not in table:
            near = nearest(spec.name, list(table))
            yield f"{where}.name: unknown name {spec.name!r}; known here: {near}, or package.module:function."
            return
        found = table[spec.name]
    elif in_keras and (tree := _read(in_keras)) is not None:
        classes = {fold(name): name for name in _names(tree) if name[:1].isupper()}
        if fold(spec.name) not in classes:
            near = nearest(spec.name, sorted(classes.values()))
            yield f"{where}.name: Keras has no {spec.name!r}; near it: {near}."
            return
        found = _look_up(in_keras, classes[fold(spec.name)])
    else:
        return
    yield from _check_options(found, spec, where, given, named, bool(in_keras) and ":" not in spec.name)


def _check_options(
    found: Found | None, spec: Spec, where: str, given: int, named: Sequence[str], is_keras: bool
) -> Iterator[str]:
    definition = found.definition if found else None
    if isinstance(definition, ast.ClassDef):
        made = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        definition, given = (made[0] if made else None), 1
    if definition is None or definition.decorator_list or definition.args.vararg:
        return
    # Keras' optimizers have one, and refuse whatever comes by it.
    if definition.args.kwarg and not (is_keras and where == "optimizer"):
        return
    places = [argument.arg for argument in [*definition.args.posonlyargs, *definition.args.args]]
    takes = [*places[given:], *(argument.arg for argument in definition.args.kwonlyargs)]
    offered = [name for name in takes if name not in named]
    for option in spec.options:
        if option not in offered:
            yield f"{where}.options: {spec.name} does not take {option!r}; it takes: {', '.join(offered) or 'none'}."
    optional = places[len(places) - len(definition.args.defaults) :] + [
        argument.arg
        for argument, default in zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True)
        if default is not None
    ]
    for name in offered:
        if name not in optional and name not in spec.options:
            yield f"{where}.options: {spec.name} needs {name!r}."


# --- reading sources --------------------------------------------------------------------------------------------


@functools.cache
def _read(module: str) -> ast.Module | None:
    """The source of a module; an empty one where it is there without source; None where it is not there.

    Raises SyntaxError.
    """
    spec = _find(module)
    if spec is None:
        return None
    if not spec.origin or not spec.origin.endswith(".py"):
        return ast.Module([], [])
    try:
        return ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except OSError:
        return ast.Module([], [])


def _find(module: str) -> importlib.machinery.ModuleSpec | None:
    """As importlib.util.find_spec, but without importing the packages that the module is in."""
    path, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(path)
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            path = f"{path}.{part}"
            spec = importlib.machinery.PathFinder.find_spec(path, spec.submodule_search_locations)
    except (ImportError, ValueError):
        return None
    return spec


def _look_up(module: str, name: str, hops: int = 0) -> Found | None:
    """None only where it is certain that the module has no such name."""
    try:
        tree = _read(module)
    except SyntaxError:
        return Found(None)
    if tree is None or not tree.body or hops > _FURTHEST:
        return Found(None)
    node = _names(tree).get(name)
    if isinstance(node, Definition):
        return Found(node)
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
        return _look_up(node.module, original, hops + 1) or Found(None)
    return Found(None) if node is not None or {"*", "__getattr__"} & _names(tree).keys() else None


def _names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Name → the statement outside of functions and classes that binds it last."""
    found: dict[str, ast.stmt] = {}
    todo: list[ast.stmt] = list(tree.body)
    for node in todo:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found[node.name] = node
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name.partition(".")[0]: node for alias in node.names}
            case ast.Assign(targets=targets):
                names = (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
                found |= {n.id: node for n in names if isinstance(n.ctx, ast.Store)}  # `SGD.__doc__ = …` binds nothing
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                parts = list(ast.iter_child_nodes(node))
                handled = [child for part in parts if isinstance(part, ast.ExceptHandler) for child in part.body]
                todo += [part for part in parts if isinstance(part, ast.stmt)] + handled
    return found


def _table(module: str, name: str) -> dict[str, Found | None] | None:
    """A dict of functions as it stands in a module of ours: {"convnet": convnet.build}."""
    tree = _read(module)
    node = _names(tree).get(name) if tree else None
    if tree is None or not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
        return None
    return {
        str(key.value): _value(module, tree, value)
        for key, value in zip(node.value.keys, node.value.values, strict=True)
        if isinstance(key, ast.Constant)
    }


def _value(module: str, tree: ast.Module, value: ast.expr) -> Found | None:
    match value:
        case ast.Name(id=name):
            return _look_up(module, name)
        case ast.Attribute(value=ast.Name(id=room), attr=name):
            node = _names(tree).get(room)
            return _look_up(f"{node.module}.{room}", name) if isinstance(node, ast.ImportFrom) else None
    return None
