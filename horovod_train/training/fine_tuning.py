"""Which weights of a model are trained, at the start and after so many epochs: model.freeze, unfreeze and lora.

Does not compile steps: hooks.unfreeze, which changes in a run what is trained, compiles the step again.

Learning rates that differ between weights: optimizer.lr_multipliers. Does not know schedules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from horovod_train.config.registry import find
from horovod_train.config.settings import ModelSpec
from horovod_train.distributed.group import as_tf_variable
from horovod_train.distributed.sync_batch_norm import layers_inside
from horovod_train.errors import UserError, one_line
from horovod_train.subclass import take_class

_LORA = re.compile(r"/lora_(kernel|embeddings)_[ab]$")
"""The paths of what `enable_lora` adds: these weights exist to be trained, so `freeze` leaves them alone."""


class Freezing:
    """Sets `trainable` of a model's weights and layers.

    A layer all of whose weights are frozen is frozen itself, so that a BatchNormalization uses its moving statistics
    and does not change them.
    """

    def __init__(self, model: keras.Model, spec: ModelSpec) -> None:
        """model: built, with every variable; `apply` changes it. Raises UserError for patterns that match nothing."""
        self._layers = [(layer, layer.trainable) for layer in layers_inside(model)]
        self._weights = [(weight, weight.trainable) for weight in model.weights]
        paths = [weight.path for weight in model.weights if not is_lora(weight.path)]
        self._frozen = _matching(spec.freeze, paths, "model.freeze")
        self._unfrozen: dict[int, set[str]] = {}
        for epoch, patterns in spec.unfrozen_by_epoch():
            where, earlier = f"model.unfreeze.{epoch}", {path for paths in self._unfrozen.values() for path in paths}
            self._unfrozen[epoch] = _matching(patterns, sorted(self._frozen - earlier), where)
        if self._frozen and not any(was and weight.path not in self._frozen for weight, was in self._weights):
            raise UserError(f"model.freeze: {', '.join(spec.freeze)} leaves nothing to train at the start.")

    @property
    def epochs(self) -> tuple[int, ...]:
        """The numbers of complete epochs after which more is trained."""
        return tuple(self._unfrozen)

    def apply(self, epoch: float) -> list[str]:
        """Freeze what is frozen after so many complete epochs, or for ever (infinity); return the weights' paths."""
        frozen = self._frozen.difference(
            *(paths for first_epoch, paths in self._unfrozen.items() if first_epoch <= epoch)
        )
        for layer, was in self._layers if self._frozen else ():
            # This sets the layers inside it too; they follow in the list, with their own values.
            layer.trainable = was and not (layer.weights and all(weight.path in frozen for weight in layer.weights))
        for weight, was in self._weights if self._frozen else ():
            weight.trainable = was and weight.path not in frozen
        return sorted(frozen)

    def unfrozen_at(self, epoch: int) -> list[str]:
        """Return the paths of the weights that are trained from the end of an epoch on."""
        return sorted(self._unfrozen.get(epoch, ()))


def enable_lora(model: keras.Model, ranks: Mapping[str, int]) -> None:
    """Call Keras' `enable_lora` of the layers that patterns name, by their paths. Raises UserError.

    ranks: pattern → rank. It freezes the kernels of these layers and adds two narrow matrices to each (Hu et al. 2021,
    arXiv:2106.09685).
    """
    capable = {layer.path: layer for layer in layers_inside(model) if hasattr(layer, "enable_lora")}
    for pattern, rank in ranks.items():
        where = f"model.lora.{pattern}"
        for path in find(pattern, capable, where):
            try:
                capable[path].enable_lora(rank)
            except (ValueError, NotImplementedError) as error:
                raise UserError(f"{where}: layer {path}: {one_line(error)}") from error


def is_lora(path: str) -> bool:
    """Return whether a weight is one that `enable_lora` adds."""
    return _LORA.search(path) is not None


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return names for a line of the log: all of them, or the first and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _matching(patterns: Sequence[str], paths: Sequence[str], where: str) -> set[str]:
    return {path for pattern in patterns for path in find(pattern, paths, where)}


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
