"""A model cut into stages on two devices of each rank, and the same uncut: where things lie, and what comes out."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave
from keras import layers
from stepping import build_step

from horovod_train.config.settings import Config, DeviceConfig, HorovodConfig, TrainConfig
from horovod_train.data.batch_source import Batch, Batches, Cursor, StepSize
from horovod_train.distributed.start import start
from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm
from horovod_train.models.model_parallel import cut_into_stages, stage_lines
from horovod_train.training.state import TrainState
from horovod_train.training.steps.step import TrainStep

ROWS, STEPS, CUT = 8, 4, ["second"]
FULL = StepSize(rows=ROWS, is_full=True)
ON_ONE, ON_TWO = DeviceConfig(), DeviceConfig(per_rank=2)
group = start(HorovodConfig(), ON_TWO)
devices = group.devices[group.rank].logical


def build_model() -> keras.Model:
    """What crosses the cut: the first stage's output, by two ways."""
    keras.utils.set_random_seed(3)
    x = keras.Input((6,))
    first = layers.Dense(8, activation="relu", name="first")(x)
    normal = layers.BatchNormalization(name="norm")(first)
    second = layers.Dense(8, activation="relu", name="second")(layers.Dropout(0.3, name="drop")(normal))
    both = layers.Concatenate(name="both")([second * 2.0, first])
    return keras.Model(x, layers.Dense(3, name="out")(both), name="net")


def batches() -> Batches:
    rng = np.random.default_rng(group.rank)
    parts = Batch(
        inputs=rng.normal(size=(STEPS, ROWS, 6)).astype(np.float32),
        targets=rng.integers(0, 3, (STEPS, ROWS)),
        weights=np.ones((STEPS, ROWS), np.float32),
        ids=np.zeros((STEPS, ROWS), np.int64),
        count=np.full(STEPS, ROWS * group.size, np.int64),
    )
    return Batches(tf.data.Dataset.from_tensor_slices(parts).batch(1))


def train(
    model: keras.Model, device: DeviceConfig = ON_ONE, accumulate_steps: int = 1, steps: int = STEPS
) -> TrainState:
    step = compile_step(
        model,
        keras.optimizers.Adam(0.05, global_clipnorm=1.0, name="adam"),
        Config(device=device, train=TrainConfig(ema_decay=0.9, accumulate_steps=accumulate_steps)),
    )
    if steps:
        step.run(batches(), steps, FULL)
    return step.state


def compile_step(model: keras.Model, optimizer: keras.optimizers.Optimizer, config: Config) -> TrainStep:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return build_step(model, next(batches()), group, config)


def traced(device: DeviceConfig) -> dict[str, list[str]]:
    """Of each layer's matrix products, forward and backward, the devices that the compiled step asks for."""
    cut = cut_into_stages(build_model(), CUT, devices)
    step = compile_step(cut, keras.optimizers.SGD(0.1), Config(device=device))
    graphs: list[Any] = []

    def run(cursor: Cursor) -> tuple[Cursor, Any]:
        graphs.append(tf.compat.v1.get_default_graph())
        return step._run_steps(cursor, tf.constant(1), FULL)

    batches().call(tf.function(run, autograph=False))
    found: dict[str, list[str]] = collections.defaultdict(list)
    for body in graphs[0].as_graph_def().library.function:
        for node in body.node_def:
            if node.op == "MatMul":
                pass_ = "backward" if "gradient_tape" in node.name else "forward"
                layer = next(name for name in ("first", "second", "out") if f"/{name}" in node.name)
                found[f"{layer} {pass_}"].append(node.device)
    return found


def weights(state: TrainState) -> np.ndarray:
    return np.concatenate([variable.numpy().ravel() for variable in state.variables().values()])


def short(device: str) -> str:
    return device.rsplit("device:", 1)[-1]


uncut, cut = build_model(), cut_into_stages(build_model(), CUT, devices)
facts: dict[str, Any] = {"rank": group.rank, "lines": stage_lines(cut), "lines_uncut": stage_lines(uncut)}
facts["same_at_first"] = [
    bool(np.array_equal(a, b)) for a, b in zip(uncut.get_weights(), cut.get_weights(), strict=True)
]
states = {"uncut": train(uncut), "cut": train(cut, ON_TWO)}
facts["names"] = {name: list(state.variables()) for name, state in states.items()}
facts["devices"] = {name: short(variable.device) for name, variable in states["cut"].variables().items()}
facts["difference"] = np.max(np.abs(weights(states["cut"]) - weights(states["uncut"])))
parts = [
    train(build_model(), accumulate_steps=2),
    train(cut_into_stages(build_model(), CUT, devices), ON_TWO, 2),
]
facts["difference_accumulated"] = np.max(np.abs(weights(parts[0]) - weights(parts[1])))
wholes = [synchronise_batch_norm(build_model()) for _ in range(2)]
synchronised = train(wholes[0]), train(cut_into_stages(wholes[1], CUT, devices), ON_TWO)
facts["difference_synchronised"] = np.max(np.abs(weights(synchronised[0]) - weights(synchronised[1])))
facts["synchronised_is_another"] = np.max(np.abs(weights(synchronised[0]) - weights(states["uncut"])))
facts["moved"] = np.max(np.abs(weights(states["cut"]) - weights(train(build_model(), steps=0))))
facts["traced"], facts["traced_without_following"] = traced(ON_TWO), traced(ON_ONE)
# A mask crosses the cut with the tensor that it hangs on.
words = keras.Input((4,), dtype="int32")
mean = layers.GlobalAveragePooling1D(name="mean")(layers.Embedding(5, 3, mask_zero=True)(words))
masked = keras.Model(words, mean)
ids = np.array([[1, 2, 0, 0], [3, 0, 0, 0]])
facts["masked_uncut"] = masked(ids).numpy()
facts["masked_cut"] = cut_into_stages(masked, ["mean"], devices)(ids).numpy()
facts["unmasked"] = masked.get_layer("embedding").embeddings.numpy()[ids].mean(axis=1)

# Soft placement puts what names a device that is not there somewhere else, without a word.
facts["lines_of_a_missing_device"] = stage_lines(cut_into_stages(build_model(), CUT, ["CPU:0", "CPU:7"]))

saved = str(Path(sys.argv[1]) / f"cut-{group.rank}.keras")
cut.save(saved)
x = np.ones((2, 6), np.float32)
facts["saved"], facts["prediction"] = saved, cut(x).numpy()
leave(group.rank, facts)
group.close()
