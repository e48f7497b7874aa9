"""Names of a graph that fold: nothing is lost, nothing is connected otherwise. Of real steps: distributed/output."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from horovod_train.errors import UserError
from horovod_train.training.steps.histograms import check_names, fold, show_branches


def graph(*nodes: str) -> Any:
    """Nodes written as `name < input, input`."""
    made = tf.compat.v1.GraphDef()
    for line in nodes:
        name, _, inputs = line.partition(" < ")
        made.node.add(name=name, op="NoOp", input=[given for given in inputs.split(", ") if given])
    return made


def written(graph_def: Any) -> list[str]:
    return [f"{node.name} < {', '.join(node.input)}".removesuffix(" < ") for node in graph_def.node]


def test_scopes_get_their_names_and_edges_follow() -> None:
    given = graph("w", "rank/m_1/dense_1/MatMul < w, w:1", "exchange/sum < rank/m_1/dense_1/MatMul, ^w")
    folded = fold(given, variables={"w": "dense/kernel"}, names={"rank": "rank_0"}, layers={"m", "dense"})
    assert written(folded) == [
        "dense/kernel",
        "rank_0/m/dense/MatMul < dense/kernel, dense/kernel:1",
        "exchange/sum < rank_0/m/dense/MatMul, ^dense/kernel",
    ]


def test_an_unfolded_part_leaves_no_two_nodes_of_one_name() -> None:
    folded = fold(graph("Const", "rank/Const < Const"), variables={}, names={"rank": None}, layers=())
    assert written(folded) == ["Const", "Const_1 < Const"]


def test_a_layer_whose_own_name_ends_in_a_number_keeps_it() -> None:
    given = graph("dense_1/a", "dense_1_2/b")  # `dense` and `dense_1`, as Keras opens their scopes
    folded = fold(given, variables={}, names={}, layers={"dense", "dense_1"})
    assert written(folded) == ["dense/a", "dense_1/b"]


def test_gradients_come_into_the_fold_of_their_rank() -> None:
    folded = fold(graph("gradient_tape/rank/x"), variables={}, names={"rank": "rank_0"}, layers=())
    assert written(folded) == ["rank_0/gradient_tape/x"]


def test_what_a_condition_would_run_is_shown_below_it() -> None:
    kept = tf.Variable(1.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("update"):
            if x > 0:
                kept.assign_add(x)
            else:
                kept.assign_sub(x)
        return kept.read_value()

    traced = tf.function(step).get_concrete_function(tf.TensorSpec([], tf.float32)).graph.as_graph_def()
    names = [node.name for node in show_branches(traced).node]
    assert {"update/cond/then/AssignAddVariableOp", "update/cond/else/AssignSubVariableOp"} <= {*names}
    assert not any("AssignAddVariableOp" in node.name for node in traced.node)
    known = {*names}
    for node in show_branches(traced).node:
        assert {source.lstrip("^").split(":")[0] for source in node.input} <= known


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"rnak": "r"}, "log.graph_names.rnak: the graph has no such part; did you mean rank"),
        ({"rank": 3}, "log.graph_names.rank: expected a name of letters"),
        ({"rank": "my rank"}, "log.graph_names.rank: expected a name of letters"),
    ],
)
def test_names_of_no_part_are_refused(names: dict[str, Any], expected: str) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")], name="m")
    check_names(model, {"rank": None, "m": None, "out": "layer2", "gradient_tape": "train_step/gradients"})
    with pytest.raises(UserError, match=expected):
        check_names(model, names)
