"""Finds the optimizers of a step, and makes each exchange its gradients over the ranks before it applies them.

The model calls its optimizers itself, in its `train_step`. So whatever a step does, clipping, accumulation, skipping
and the way to exchange are the same. When ranks exchange is decided in sync.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from horovod_train.distributed.allreduce import with_values
from horovod_train.distributed.group import as_tf_variable
from horovod_train.distributed.layer_contents import all_parts_in, layers_inside
from horovod_train.distributed.optimizer import GradientExchange, distribute
from horovod_train.keras_seams import is_conditional, method_replaced, weights_of
from horovod_train.training.nonfinite import (
    are_finite,
    gradient_values,
    poison_if_nonfinite,
    seem_finite,
    small_gradient_values,
)
from horovod_train.training.steps.shares import Shares
from horovod_train.training.sync import Exchanged, SyncStrategy

LARGEST_SCALE = 2.0**126
"""Where a loss scale stops growing. Keras doubles it until it is infinite, from which it does not come back."""


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
    """The optimizers that a step applies: each combines its gradients over the ranks and applies them if finite.

    It is what a TrainState asks for slots and rates.
    """

    def __init__(self, optimizers: Mapping[str, keras.optimizers.Optimizer]) -> None:
        """optimizers: by the attribute."""
        self.by_attribute = optimizers
        self.by_path: dict[str, keras.optimizers.Optimizer] = {}
        """Those that the step applies, known after `only_noted`."""
        self.updated: list[Any] = []
        """What they are given gradients of in a step, call by call; known after `only_noted` too."""
        self.inside: dict[str, bool] = {}
        """So too, those that are applied in a branch, a loop or a tf.function inside the step; of a function False."""
        self.failed, self.is_cause = (tf.Variable(False, trainable=False) for _ in range(2))
        """bool: whether combined gradients of the step were not finite; whether because of this rank's."""

    @property
    def scales_loss(self) -> bool:
        """Whether one of those applied is a LossScaleOptimizer, which leaves out updates to find its scale."""
        return any(isinstance(each, keras.optimizers.LossScaleOptimizer) for each in self.by_path.values())

    @property
    def variables(self) -> list[Any]:
        """Of those that are applied; see variables_of."""
        return variables_of(self.by_path.values())

    @property
    def learning_rates(self) -> dict[str, Any]:
        """The rates, by the names under which they are shown: `learning_rate`, if there is one optimizer."""
        rates: dict[str, Any] = {}
        for path, optimizer in self.by_path.items():
            try:
                rates[path] = optimizer.learning_rate
            except AttributeError:  # a MultiOptimizer, perhaps in a loss scale, has those of the optimizers inside it
                inside = [inner for inner in inside_optimizer(optimizer) if hasattr(inner, "learning_rate")]
                rates |= {f"{path}.{inner.name}": inner.learning_rate for inner in inside}
        if len(rates) == 1:
            return {"learning_rate": next(iter(rates.values()))}
        return {f"{path}_learning_rate": rate for path, rate in rates.items()}

    def only_noted(self) -> AbstractContextManager[None]:
        """Inside the block, `apply` only builds an optimizer and notes that it is applied. It may raise ValueError."""
        paths = {id(optimizer): path for path, optimizer in self.by_attribute.items()}
        slots: dict[str, set[int]] = {}
        self.updated.clear()  # a step may be tried twice
        self.inside.clear()
        graph = tf.compat.v1.get_default_graph()

        def noting(optimizer: keras.optimizers.Optimizer, _: Callable[..., Any]) -> Callable[..., None]:
            path = paths[id(optimizer)]

            def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
                gradients = list(grads)
                if not gradient_values(gradients):
                    raise ValueError(f"{path} is applied without any gradient")
                variables = list(trainable_variables or ())
                if not optimizer.built:
                    if not variables:
                        raise ValueError(f"{path} is applied without variables before it is built")
                    slots[path] = {id(variable) for variable in variables}
                    _build_with_inner(optimizer, variables)
                if path in slots and not {id(variable) for variable in variables} <= slots[path]:
                    raise ValueError(f"{path} is applied to other variables than before; build it with all of them")
                variables = variables or weights_of(optimizer)
                if len(gradients) != len(variables):
                    raise ValueError(
                        f"{path} is applied to {len(variables)} variables with gradients for {len(gradients)}"
                    )
                self.by_path[path] = optimizer
                if (here := tf.compat.v1.get_default_graph()) is not graph:
                    self.inside[path] = self.inside.get(path, False) or is_conditional(here, graph)
                self.updated += [each for each, of in zip(variables, gradients, strict=True) if of is not None]

            return apply

        return method_replaced(self.by_attribute.values(), "apply", noting)

    def distribute(self, update: Update) -> None:
        """Make each do `update` in place of its own `apply`. Raises UserError."""
        for path, optimizer in self.by_path.items():
            distribute(optimizer, functools.partial(update.apply, path))


def _build_with_inner(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    with tf.init_scope():  # slots must exist before the broadcast
        optimizer.build(variables)
        for inner in inside_optimizer(optimizer):
            if not inner.built:
                inner.build(variables)


@dataclass(eq=False, repr=False)
class Update:
    """What happens when an optimizer of the step is given gradients, in the pass that is being traced.

    They are multiplied by the rank's share, added to those of earlier passes, exchanged, and applied.
    """

    optimizers: Optimizers
    exchange: GradientExchange
    synchronization: SyncStrategy
    shares: Shares
    step: tf.Variable
    enter: Callable[..., tf.Operation]
    """Records the phase of the step, as PhaseVariable.enter."""
    holds_back: bool = True
    """Whether no gradient is applied before all are known to be finite, because training continues where they are not.
    Otherwise the run ends at that step, and each is applied as soon as it is combined."""

    def __post_init__(self) -> None:
        self.earlier: Mapping[str, Sequence[Any]] = {}
        """By optimizer and call, as `optimizer` and `optimizer#2`: gradients of earlier passes, to be added."""
        self.collected: dict[str, list[Any]] | None = None
        """Where gradients are put instead of being applied, by optimizer and call; None: apply them."""
        self._calls: Counter[str] = Counter()
        self.loss: tf.Tensor | None = None
        """The loss of the pass times its share, if it is known; float scalar."""
        self.factor: tf.Tensor | None = None
        """What gradients are multiplied by besides the share of their pass, float32 scalar; None: 1."""
        self.variables: dict[str, list[tf.Variable]] = {}
        """By optimizer and call: what its gradients are of."""

    def begin_pass(self) -> None:
        """Count anew how often each optimizer is applied: gradients of passes are added up call by call."""
        self._calls.clear()

    @contextmanager
    def collecting(self) -> Iterator[dict[str, list[Any]]]:
        """Inside the block, put gradients into the dict, times the share of their pass; apply none."""
        self.collected = {}
        try:
            yield self.collected
        finally:
            self.collected = None

    def apply(self, path: str, optimizer: Any, local_gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """In the compiled step: take the gradients that a model gives one of its optimizers."""
        gradients = [self.shares.scaled(gradient) for gradient in local_gradients]
        if (factor := self.factor) is not None:
            gradients = [with_values(each, lambda values: values * tf.cast(factor, values.dtype)) for each in gradients]
        self._calls[path] += 1
        key = path if self._calls[path] == 1 else f"{path}#{self._calls[path]}"
        self.variables[key] = [as_tf_variable(variable) for variable in variables]
        if self.collected is not None:
            self.collected[key] = gradients
            return
        gradients = add_lists(self.earlier.get(key), gradients)
        loss = None if self.loss is None else tf.cast(self.loss, tf.float32)
        if loss is not None and (self.holds_back or not self.is_alone):
            gradients, loss = poison_if_nonfinite(loss, gradients), None
        combined, local = self._exchange(path, gradients, variables)
        # With a slash: beside the scope of the model's pass, which calls this, and not inside it.
        with tf.name_scope("update_parameters/"):
            if self.holds_back:
                self._apply_if_finite(optimizer, combined, local, variables)
            else:
                optimizer.apply_combined(combined, variables)
                self._note_if_nonfinite([*combined, None if loss is None else 0.0 * loss], local)

    def _exchange(self, path: str, gradients: list[Any], variables: Sequence[Any]) -> Exchanged:
        """Collective: return the gradients to apply, and this rank's part of them."""
        combine = functools.partial(self.exchange.combine_each, name=f"{path}.gradient")
        if self.is_alone:
            step = tf.identity(self.step)
            return self.synchronization.exchange(combine, gradients, variables, step)
        # Not after all gradients, so that each is exchanged as soon as it is computed; but after something of this
        # step: TensorFlow moves an exchange of constants out of the loop over steps, and where the graphs of ranks
        # differ, only on some of them.
        with tf.name_scope("exchange/"):  # with a slash: see apply
            step = self.step.read_value()
            with tf.control_dependencies([step]):
                exchanged = self.synchronization.exchange(combine, gradients, variables, step)
            with tf.control_dependencies([self.enter("exchange", after=gradients)]):
                self.enter("compute", after=exchanged.gradients)
        return exchanged

    @property
    def is_alone(self) -> bool:
        return self.shares.group.size == 1

    def _note_if_nonfinite(self, gradients: Sequence[Any], local: Sequence[Any]) -> None:
        """In the compiled step: note whether the combined gradients are not finite, and whether because of this rank's.

        A failure remains noted.
        """
        failed, is_cause = self.optimizers.failed, self.optimizers.is_cause
        before, is_bad = failed.read_value(), tf.logical_not(seem_finite(small_gradient_values(gradients)))
        if self.is_alone:
            is_cause.assign(True)
        else:
            is_first = tf.logical_and(is_bad, tf.logical_not(before))
            tf.cond(
                is_first,
                lambda: is_cause.assign(tf.logical_not(are_finite(small_gradient_values(local)))),
                lambda: is_cause,
            )
        failed.assign(tf.logical_or(before, is_bad))

    def _apply_if_finite(
        self, optimizer: Any, gradients: list[Any], local: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        failed, is_cause = self.optimizers.failed, self.optimizers.is_cause
        scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if scales_loss:  # skips non-finite gradients itself and lowers its scale
            optimizer.apply_combined(gradients, variables)
            optimizer.dynamic_scale.assign(tf.minimum(optimizer.dynamic_scale, LARGEST_SCALE))

        def update() -> tf.Tensor:
            if not scales_loss:
                # A user's `apply` may compute with them: they must be tensors of this branch.
                optimizer.apply_combined([_identity(gradient) for gradient in gradients], variables)
            return failed.read_value()

        def skip() -> tf.Tensor:
            is_cause.assign(tf.logical_or(is_cause, tf.logical_not(are_finite(local))))
            only_count(optimizer)
            return tf.constant(True)

        def look() -> tf.Tensor:  # scaled gradients become large before they become infinite
            return tf.cond(are_finite(gradients), update, skip)

        failed.assign(tf.cond(seem_finite(gradients), update, look if scales_loss else skip))


def only_count(optimizer: keras.optimizers.Optimizer) -> None:
    """In a compiled step: count a step whose update is left out, for schedules, which count the steps of the run.

    A LossScaleOptimizer counts those that it applies, and one that accumulates gradients itself those that it adds up:
    its window waits. One that keeps averages (use_ema) begins them at step 0, which must be an update.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    for each in (optimizer, *inside_optimizer(optimizer)):
        if not each.gradient_accumulation_steps:
            steps = each.iterations
            steps.assign_add(tf.cast(steps.value > 0, steps.dtype) if each.use_ema else 1)


def _identity(gradient: Any) -> Any:
    return None if gradient is None else tf.nest.map_structure(tf.identity, gradient, expand_composites=True)


def add_lists(first: Sequence[Any] | None, second: Sequence[Any]) -> list[Any]:
    """Return the sums of gradients, each of one variable. first: None: there are none."""
    if first is None:
        return list(second)
    return [add_gradients(*pair) for pair in zip(first, second, strict=True)]


def add_gradients(first: Any, second: Any) -> Any:
    """Return the sum of two gradients of one variable; sparse ones keep all rows. None: not part of the loss."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        values = tf.concat([first.values, second.values], axis=0)
        return tf.IndexedSlices(values, tf.concat([first.indices, second.indices], axis=0), second.dense_shape)
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)


def inside_optimizer(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that one holds, such as that of a LossScaleOptimizer, and those inside them."""
    _, *inside = all_parts_in(optimizer, keras.optimizers.Optimizer)
    return inside


def variables_of(optimizers: Iterable[keras.optimizers.Optimizer]) -> list[Any]:
    """Return the slots and counters of optimizers, and of those inside them, each once."""
    each = [part for optimizer in optimizers for part in (optimizer, *inside_optimizer(optimizer))]
    return list({id(variable): variable for part in each for variable in part.variables}.values())
