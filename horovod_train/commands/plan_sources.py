"""For `plan`: where a name is defined, read from source files with ast. Imports nothing, so it needs no TensorFlow.

Cannot see what only running the code would show: a name that comes from `import *`, a function behind a decorator.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
from dataclasses import dataclass
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_FURTHEST = 8  # imports to follow from one module to the next


@dataclass(frozen=True)
class Found:
    """A name that exists; `definition` if its source can be read."""

    definition: Definition | None


@functools.cache
def read_source(module: str) -> ast.Module | None:
    """Return the source of a module; an empty one if the module exists without source; None if it does not exist.

    Raises SyntaxError.
    """
    spec = find_module(module)
    if spec is None:
        return None
    if not spec.origin or not spec.origin.endswith(".py"):
        return ast.Module([], [])
    try:
        return ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except OSError:
        return ast.Module([], [])


def find_module(module: str) -> importlib.machinery.ModuleSpec | None:
    """Do as importlib.util.find_spec, but without importing the packages that contain the module."""
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


def look_up(module: str, name: str, hops: int = 0) -> Found | None:
    """Return None only if it is certain that the module has no such name."""
    try:
        tree = read_source(module)
    except SyntaxError:
        return Found(None)
    if tree is None or not tree.body or hops > _FURTHEST:
        return Found(None)
    node = bound_names(tree).get(name)
    if isinstance(node, Definition):
        return Found(node)
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
        return look_up(node.module, original, hops + 1) or Found(None)
    return Found(None) if node is not None or {"*", "__getattr__"} & bound_names(tree).keys() else None


def bound_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return name → the statement outside of functions and classes that binds it last."""
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


def find_table(module: str, name: str) -> dict[str, Found | None] | None:
    """Return a dict of functions that stands in a module of this package: {"convnet": convnet.build}."""
    tree = read_source(module)
    node = bound_names(tree).get(name) if tree else None
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
            return look_up(module, name)
        case ast.Attribute(value=ast.Name(id=room), attr=name):
            node = bound_names(tree).get(room)
            return look_up(f"{node.module}.{room}", name) if isinstance(node, ast.ImportFrom) else None
    return None
