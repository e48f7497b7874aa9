"""For which gradients the exchanges of a compiled step wait; each should wait for its own only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from stepping import build_step
from uneven import CROSS_ENTROPY, FULL, batches, group, share

from horovod_train.config.settings import Config
from horovod_train.data.batch_source import Cursor
from horovod_train.distributed.optimizer import SMALL_BYTES
from horovod_train.training.steps.step import TrainStep
from horovod_train.training.sync import CombineList, Exchanged, SyncStrategy


class AfterAll(SyncStrategy):
    """Exchanges nothing before the whole backward pass is over."""

    def exchange(self, combine: CombineList, local_gradients: Sequence[Any], *more: Any) -> Exchanged:
        with tf.control_dependencies(list(local_gradients)):
            return super().exchange(combine, local_gradients, *more)


def facts() -> dict[str, list[int]]:
    return {strategy.__name__: waiting_for_the_first_layer(strategy) for strategy in (SyncStrategy, AfterAll)}


def waiting_for_the_first_layer(strategy: type[SyncStrategy]) -> list[int]:
    """Return the gradients whose exchange begins after that of the first layer's kernel, 0, is computed."""
    nodes = {node.name: node for node in _nodes_around_exchanges(_build_step(strategy))}

    def comes_before(name: str) -> set[str]:
        found, ahead = set(), [name]
        while ahead:
            node = nodes.get(ahead.pop())
            if node is not None and node.name not in found:
                found.add(node.name)
                ahead += [source.lstrip("^").split(":")[0] for source in node.input]
        return found

    exchanges = {
        int(re.findall(r"gradient\.(\d+)", node.name)[0]): node
        for node in nodes.values()
        if node.op == "HorovodAllreduce"
    }
    if not exchanges:  # one rank
        return []
    last = exchanges[0].input[0].split(":")[0]
    return sorted(index for index, node in exchanges.items() if last in comes_before(node.name))


def _build_step(strategy: type[SyncStrategy]) -> TrainStep:
    large = SMALL_BYTES // 4 // 8 + 1  # so that gradients are not exchanged together
    head = [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(large)]
    model = keras.Sequential(head)
    model.compile(keras.optimizers.SGD(0.1), CROSS_ENTROPY)
    return build_step(model, share(0), group, Config(), synchronization=strategy())


def _nodes_around_exchanges(step: TrainStep) -> Sequence[Any]:
    """Return the nodes of the function in which the step exchanges gradients; of any other, if it does not."""
    graphs: list[Any] = []

    def run(cursor: Cursor) -> tuple[Cursor, Any]:
        graphs.append(tf.compat.v1.get_default_graph())
        return step._run_steps(cursor, tf.constant(1), FULL)

    batches().call(tf.function(run, autograph=False))
    bodies = [body.node_def for body in graphs[0].as_graph_def().library.function]
    return next((body for body in bodies if any(node.op == "HorovodAllreduce" for node in body)), bodies[0])
