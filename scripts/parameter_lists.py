"""The API page lists the parameters of a docstring, which stand in the source as `name: text`. For mkdocs.yml."""

import re
from typing import Any

import griffe


class ParameterLists(griffe.Extension):
    """Makes each parameter of a paragraph an item of a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a function or class."""
        if not isinstance(obj, griffe.Function | griffe.Class) or not obj.docstring or not list(obj.parameters):
            return
        name = "|".join(parameter.name for parameter in obj.parameters)
        start = re.compile(rf"(?:^|(?<=[.;])\s+)((?:{name})(?:, (?:{name}))*):\s")
        paragraphs = []
        for paragraph in obj.docstring.value.split("\n\n"):
            text, *parameters = start.split(paragraph)
            items = zip(parameters[::2], parameters[1::2], strict=True)
            paragraphs += [text, "\n".join(f"- `{names}`: {' '.join(what.split())}" for names, what in items)]
        obj.docstring.value = "\n\n".join(filter(None, paragraphs))
