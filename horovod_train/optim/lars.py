"""LARS: layer-wise adaptive rates for large batches. Does not know schedules or ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("horovod_train")
class LARS(keras.optimizers.Optimizer):
    """Momentum SGD whose rate is scaled for each variable by the ratio of the norms of weight and gradient.

    You, Gitman, Ginsburg 2017 (arXiv:1708.03888), algorithm 1: with g the gradient, w the weight, λ the weight decay,
    η the trust coefficient and μ the momentum,

        local = η ‖w‖ / (‖g‖ + λ ‖w‖)
        v ← μ v + learning_rate · local · (g + λ w)
        w ← w − v

    If ‖w‖ or ‖g‖ + λ ‖w‖ is 0, local is 1, so that weights that start at 0 can change. Norms are taken in float32
    at least. Defaults: μ and λ are those of AlexNet (Krizhevsky et al. 2012), η that of TensorFlow 1's LARSOptimizer.

    Excluded variables are updated with local = 1 and λ = 0, as momentum SGD would: biases and the scales and offsets
    of norms, that is, variables with fewer than two axes; or, if called, those that `exclude_from_weight_decay` names.
    Sparse gradients are made dense. Other arguments are those of keras.optimizers.Optimizer.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0005,
        trust_coefficient: float = 0.001,
        name: str = "lars",
        **options: Any,
    ) -> None:
        """Raise ValueError for a momentum outside [0, 1), weight_decay < 0 or trust_coefficient <= 0."""
        # weight_decay is not passed to Keras, which would subtract it from the weights as well.
        super().__init__(learning_rate=learning_rate, name=name, **options)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1; received {momentum}")
        if weight_decay is None or weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0; received {weight_decay}")
        if trust_coefficient <= 0:
            raise ValueError(f"trust_coefficient must be above 0; received {trust_coefficient}")
        self.momentum, self.decay, self.trust_coefficient = momentum, weight_decay, trust_coefficient
        self.excluded_ids: list[int] | None = None
        self.excluded_names: list[str] = []

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Set the variables that are neither scaled nor decayed, instead of those with fewer than two axes.

        Call it before `build`. var_names: as in Keras, regular expressions for their names. Raises ValueError once
        built.
        """
        if self.built:
            raise ValueError("exclude_from_weight_decay must be called before the optimizer is built")
        super().exclude_from_weight_decay(var_list, var_names)
        self.excluded_ids = [id(variable) for variable in var_list or ()]
        self.excluded_names = [*(var_names or ())]

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "velocity")
        self.is_excluded = [self._is_to_be_excluded(variable) for variable in variables]

    def _is_to_be_excluded(self, variable: Any) -> bool:
        if self.excluded_ids is None:
            return len(variable.shape) < 2
        matches_name = any(re.search(pattern, variable.name) for pattern in self.excluded_names)
        return matches_name or id(variable) in self.excluded_ids

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index = self._get_variable_index(variable)
        velocity = self.velocities[index]
        weight, gradient = tf.convert_to_tensor(variable), tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        rate = tf.cast(learning_rate, variable.dtype)
        if not self.is_excluded[index]:
            rate *= self._trust_ratio(weight, gradient)
            gradient += self.decay * weight
        self.assign(velocity, self.momentum * tf.convert_to_tensor(velocity) + rate * gradient)
        self.assign_sub(variable, velocity)

    def _trust_ratio(self, weight: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Return the paper's local rate, a scalar of the weight's dtype."""
        norm_dtype = tf.float64 if weight.dtype == tf.float64 else tf.float32
        weight_norm, gradient_norm = (tf.norm(tf.cast(tensor, norm_dtype)) for tensor in (weight, gradient))
        denominator = gradient_norm + self.decay * weight_norm
        ratio = tf.math.divide_no_nan(self.trust_coefficient * weight_norm, denominator)
        return tf.cast(tf.where(ratio > 0, ratio, tf.ones_like(ratio)), weight.dtype)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "momentum": self.momentum,
            "weight_decay": self.decay,
            "trust_coefficient": self.trust_coefficient,
        }
