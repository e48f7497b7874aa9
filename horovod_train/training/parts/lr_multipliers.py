"""Learning rates that differ between weights: optimizer.lr_multipliers. Does not know schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from horovod_train.config.patterns import find
from horovod_train.distributed.group import as_tf_variable
from horovod_train.subclass import take_class


def multiply_rates(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], multipliers: Mapping[str, float]
) -> dict[str, float]:
    """Make an optimizer multiply its learning rate for the weights that patterns name; return the factors by path.

    variables: those that are trained. multipliers: pattern → factor; of several patterns that match a weight's path the
    first counts. Decoupled weight decay (AdamW's, or `weight_decay` of any Keras optimizer) is not multiplied: it is no
    part of `update_step`, Keras' method for the update of one variable. Raises UserError for a pattern that matches
    nothing.
    """
    factors: dict[str, float] = {}
    for pattern, factor in multipliers.items():
        paths = find(pattern, [variable.path for variable in variables], f"optimizer.lr_multipliers.{pattern}")
        factors = dict.fromkeys(paths, float(factor)) | factors
    if factors:
        by_id = {
            id(as_tf_variable(variable)): factors[variable.path] for variable in variables if variable.path in factors
        }
        updating = getattr(optimizer, "inner_optimizer", optimizer)
        take_class(updating, _with_own_rates(type(updating), by_id))
    return factors


def _with_own_rates(base: type, factors: Mapping[int, float]) -> type:
    class WithOwnRates(base):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            factor = factors.get(id(as_tf_variable(variable)))  # Keras passes the inner tf.Variable
            super().update_step(gradient, variable, learning_rate if factor is None else learning_rate * factor)

    return WithOwnRates
