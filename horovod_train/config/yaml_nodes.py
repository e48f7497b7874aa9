"""Parses YAML documents into nodes with line numbers, restricted to values that JSON can hold.

Does not know what they mean; see loader.
"""

from __future__ import annotations

import math
from typing import Any

import yaml

from horovod_train.errors import UserError, one_line

_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_NOT_PLAIN = {"timestamp": "a date", "binary": "binary data"}

_MOST_CHARACTERS = 1_000_000
_MOST_VALUES = 1_000_000
"""With each alias counted as what it stands for."""
_MOST_LEVELS = 100
_TOO_DEEP = f"expected values within values at most {_MOST_LEVELS} deep; received deeper ones"


def compose(text: str, name: str) -> yaml.Node | None:
    """Return the one document in a text, or None. Raises UserError with `name` and the line of the problem."""
    if len(text) > _MOST_CHARACTERS:
        raise UserError(
            f"{name}: expected settings, of at most {_MOST_CHARACTERS} characters; received {len(text)}. Keep data in "
            "a file that your function reads."
        )
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_plain(node, name, inside=(), checked={})
        return node
    except RecursionError as error:
        raise UserError(f"{name}: {_TOO_DEEP}.") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{name}:{line}: not valid YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {one_line(error)}.") from error


def _check_plain(node: yaml.Node, name: str, inside: tuple[yaml.Node, ...], checked: dict[yaml.Node, int]) -> int:
    """Raise UserError for values that JSON cannot hold, because checkpoints store the config as JSON.

    Return the number of values in a node. checked: those of nodes that are known to be plain.
    """
    where = f"{name}:{node.start_mark.line + 1}"
    if node in inside:
        raise UserError(f"{where}: expected values; received one that contains itself.")
    if node in checked:
        return checked[node]
    if len(inside) > _MOST_LEVELS:
        raise UserError(f"{where}: {_TOO_DEEP}.")
    count = 1
    if node.tag not in _PLAIN:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        text = f"{node.value} is " if isinstance(node, yaml.ScalarNode) else ""
        raise UserError(
            f"{where}: expected what JSON can hold; {text}{_NOT_PLAIN.get(kind, kind)}. "
            "Put it in quotes to have a string."
        )
    if node.tag.endswith(":float") and not math.isfinite(plain_value(node)):
        raise UserError(f"{where}: expected a finite number; received {node.value}.")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            count += _check_plain(item, name, (*inside, node), checked)
    if isinstance(node, yaml.MappingNode):
        is_in_list = any(isinstance(outer, yaml.SequenceNode) for outer in inside)
        places: dict[str, str] = {}
        for key, value in node.value:
            place = f"{name}:{key.start_mark.line + 1}"
            # Outside lists a key becomes a string, whatever it looks like.
            if not isinstance(key, yaml.ScalarNode) or (is_in_list and not key.tag.endswith((":str", ":merge"))):
                raise UserError(f"{place}: expected a string as key; put it in quotes.")
            if key.value in places:
                first = places[key.value]
                raise UserError(f"{place}: {key.value} is given twice; it was set at {first} already.")
            places[key.value] = place
            count += _check_plain(value, name, (*inside, node), checked)
    if count > _MOST_VALUES:
        raise UserError(f"{where}: expected at most {_MOST_VALUES} values; received {count}, with those of aliases.")
    checked[node] = count
    return count


def plain_value(node: yaml.Node) -> Any:
    """Convert a node to Python. Raises UserError for a tag that is not plain YAML."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except (yaml.MarkedYAMLError, ValueError) as error:  # ValueError: 0x_ is an int to YAML, but not to Python
        problem = getattr(error, "problem", error)
        raise UserError(f"line {node.start_mark.line + 1}: not a plain value: {problem}.") from error
    finally:
        loader.dispose()
