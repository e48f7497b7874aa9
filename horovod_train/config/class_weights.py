"""Weights of records by class, as a loss in a config gives them: what they are, and what is wrong with them.

Does not apply them; see training.losses. Imports the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from horovod_train.config.settings import Spec

PER_OUTPUT = "per_output"
"""The loss that is a sum of one for each output; its options map outputs to losses."""


def class_weight_problem(weights: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a mapping class → weight; None if nothing is. Keys are strings, as YAML gives them."""
    for name, weight in weights.items():
        if not str(name).isascii() or not str(name).isdigit():
            return f"expected classes, which are integers from 0 on; received {name!r}."
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            return f"expected a weight of 0 or more for class {name}; received {weight!r}."
    classes = [int(name) for name in weights]
    twice = next((name for name in classes if classes.count(name) > 1), None)
    return None if twice is None else f"class {twice} is given twice."


def weights_of_outputs(loss: Spec) -> dict[str, Mapping[str, Any]]:
    """Return the class weights inside per_output, by output. Weights that are no mapping are left out."""
    terms = loss.options.items() if loss.name == PER_OUTPUT else ()
    by_output = {output: term.get("class_weight") for output, term in terms if isinstance(term, Mapping)}
    return {output: weights for output, weights in by_output.items() if isinstance(weights, Mapping) and weights}
