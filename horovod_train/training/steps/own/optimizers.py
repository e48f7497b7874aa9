"""Finds the optimizers in a model, and makes each combine its gradients over the ranks. Applies none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from horovod_train.distributed.optimizer import GradientExchange, distribute
from horovod_train.distributed.sync_batch_norm import layers_inside
from horovod_train.subclass import take_class
from horovod_train.training.nonfinite import are_finite, gradient_values


def optimizers_in(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return the optimizers that a model and its layers hold, by the attribute, as `optimizer` or `critic.optimizer`.

    Looks into lists, tuples and dictionaries too; one that several attributes hold comes once.
    """
    by_id: dict[int, tuple[str, keras.optimizers.Optimizer]] = {}
    for layer in layers_inside(model):
        prefix = "" if layer is model else f"{layer.name}."
        # Keras keeps copies of what `compile` was given under names that begin with an underscore.
        for name, value in sorted(vars(layer).items(), key=lambda item: item[0].startswith("_")):
            for path, optimizer in _inside(f"{prefix}{name}", value):
                by_id.setdefault(id(optimizer), (path, optimizer))
    return dict(by_id.values())


def _inside(path: str, value: Any) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            yield from _inside(f"{path}.{key}", part)


class Optimizers:
    """The optimizers that a model applies in its train_step; a CombiningOptimizer that training only looks at.

    failed, is_cause: bool variables: whether combined gradients were not finite, and whether because of this rank's.
    """

    built = True
    enter: Callable[..., tf.Operation]
    """Records the phase of the step, as PhaseVariable.enter; set before the step is compiled."""

    def __init__(
        self, optimizers: Mapping[str, keras.optimizers.Optimizer], *, are_kept_by_the_model: bool = True
    ) -> None:
        """are_kept_by_the_model: False if it is that of Keras' own `compile`, which settings of the config change."""
        self._by_attribute, self.are_kept_by_the_model = optimizers, are_kept_by_the_model
        self.by_path: dict[str, keras.optimizers.Optimizer] = {}
        """Those that the step applies, known after `only_noted`."""
        self.failed, self.is_cause = (tf.Variable(False, trainable=False) for _ in range(2))

    @property
    def paths(self) -> list[str]:
        """The attributes that hold them."""
        return list(self._by_attribute)

    @property
    def scaling_loss(self) -> list[str]:
        """The attributes that hold a LossScaleOptimizer."""
        kind = keras.optimizers.LossScaleOptimizer
        return [path for path, optimizer in self._by_attribute.items() if isinstance(optimizer, kind)]

    @property
    def all_variables(self) -> list[Any]:
        """The variables of all of them, applied or not."""
        return [variable for optimizer in self._by_attribute.values() for variable in optimizer.variables]

    @property
    def variables(self) -> list[Any]:
        """The slots and counters of those that are applied."""
        return [variable for optimizer in self.by_path.values() for variable in optimizer.variables]

    @property
    def learning_rates(self) -> dict[str, Any]:
        """The rates, by the names under which they are shown: `learning_rate`, if there is one optimizer."""
        if len(self.by_path) == 1:
            (optimizer,) = self.by_path.values()
            return {"learning_rate": optimizer.learning_rate}
        return {f"{path}_learning_rate": optimizer.learning_rate for path, optimizer in self.by_path.items()}

    @contextmanager
    def only_noted(self) -> Iterator[None]:
        """Inside the block, `apply` only builds an optimizer and notes that it is applied. It may raise ValueError."""
        slots: dict[str, set[int]] = {}

        def noting(path: str, optimizer: keras.optimizers.Optimizer) -> Callable[..., None]:
            def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
                if not gradient_values(grads):
                    raise ValueError(f"{path} is applied without any gradient")
                variables = list(trainable_variables or ())
                if not optimizer.built:
                    if not variables:
                        raise ValueError(f"{path} is applied without variables before it is built")
                    slots[path] = {id(variable) for variable in variables}
                    with tf.init_scope():  # slots must exist before the broadcast
                        optimizer.build(variables)
                if path in slots and not {id(variable) for variable in variables} <= slots[path]:
                    raise ValueError(f"{path} is applied to other variables than before; build it with all of them")
                self.by_path[path] = optimizer

            return apply

        for path, optimizer in self._by_attribute.items():
            optimizer.apply = noting(path, optimizer)

        try:
            yield
        finally:
            for optimizer in self._by_attribute.values():
                del optimizer.apply

    def distribute(self, exchange: GradientExchange) -> None:
        """Make each combine its gradients over the ranks, and apply them only if they are finite. Raises UserError."""
        for path, optimizer in self.by_path.items():
            distribute(optimizer, self._combining(exchange, path))
            take_class(optimizer, self._only_finite(type(optimizer)))

    def _combining(self, exchange: GradientExchange, path: str) -> Callable[..., list[Any]]:
        def combine(grads: Sequence[Any], variables: Sequence[Any] | None, name: str) -> list[Any]:
            # Not after all gradients, so that each is exchanged as soon as it is computed; but after something of this
            # step: TensorFlow moves an exchange of constants out of the loop over steps, and where the graphs of ranks
            # differ, only on some of them.
            with tf.control_dependencies([self.enter("compute")]):
                combined = exchange.combine_each(grads, f"{path}.gradient")
            waiting = self.enter("exchange", after=grads)
            with tf.control_dependencies([waiting]):
                applying = self.enter("compute", after=combined)
            with tf.control_dependencies([applying]):
                return [
                    None if gradient is None else tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
                    for gradient in combined
                ]

        return combine

    def _only_finite(self, base: type) -> type:
        def note(local_gradients: Sequence[Any]) -> tf.Tensor:
            self.is_cause.assign(tf.logical_or(self.is_cause, tf.logical_not(are_finite(local_gradients))))
            return tf.constant(True)

        class OnlyFinite(base):  # `this` is the optimizer, `self` what it shares with the others
            def apply(this, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
                combined = this.combine(grads, trainable_variables)

                def update() -> tf.Tensor:
                    this.apply_combined(combined, trainable_variables)
                    return self.failed.read_value()

                self.failed.assign(tf.cond(are_finite(combined), update, lambda: note(grads)))

        return OnlyFinite
