"""A stream of the user's as one rank's batches. Several real ranks: test_streams_on_ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import user_streams
from made_records import as_numpy

from horovod_train.config.loader import load
from horovod_train.config.settings import DataConfig, Spec
from horovod_train.data.pipeline import Ranks
from horovod_train.data.stream import Stream, StreamPipeline, open_stream
from horovod_train.errors import ReadFailed, UserError


def stream(name: str, rank: int = 0, size: int = 1, *, training: bool = True, **options: Any) -> Stream:
    data = DataConfig(dataset=Spec(f"user_streams:{name}", options), global_batch_size=8)
    found = open_stream(data, Ranks(rank, size), seed=3, training=training)
    assert found is not None
    return found


def pipelines(name: str, size: int, rows: int, **options: Any) -> list[StreamPipeline]:
    """Those of all ranks, as training.streams builds them."""
    streams = [stream(name, rank, size, **options) for rank in range(size)]
    lengths = [one.count() for one in streams]
    steps = -(-max(lengths) // rows)
    return [StreamPipeline(one, rows * size, steps, lengths, prefetch_batches=None) for one in streams]


def batches(made: StreamPipeline, epoch: int = 0, first_step: int = 0, epochs: int = 1) -> list[Any]:
    with made.explaining():
        return [as_numpy(batch) for batch in made.batches(epoch, first_step, epochs)]


def same(one: list[Any], other: list[Any]) -> bool:
    leaves = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return all(np.array_equal(a, b) for a, b in leaves)


def test_each_record_comes_once_and_all_ranks_take_as_many_steps() -> None:
    made = pipelines("uneven", 3, rows=4)
    found = [batches(one) for one in made]
    assert {len(one) for one in found} == {made[0].steps_per_epoch} == {17}
    real = [x for one in found for batch in one for x, w in zip(batch.inputs, batch.weights, strict=True) if w]
    expected = [user_streams.record(number)[0] for number in range(89)]
    assert sorted(x.tolist() for x in real) == sorted(x.tolist() for x in expected)
    ids = [number for one in found for batch in one for number in batch.ids.tolist() if number >= 0]
    assert len(set(ids)) == 89
    counts = [sum(int((one[step].ids >= 0).sum()) for one in found) for step in range(17)]
    assert counts == [int(found[0][step].count) for step in range(17)] == [made[0].count(step) for step in range(17)]


def test_a_step_has_the_given_number_of_records_also_where_ranks_do_not_divide_it() -> None:
    streams = [stream("shuffled", rank, 3) for rank in range(3)]
    made = [StreamPipeline(one, 20, 5, [30, 30, 29], prefetch_batches=None) for one in streams]
    by_step = [[int((batch.ids >= 0).sum()) for batch in batches(one)] for one in made]
    assert by_step == [[7, 7, 7, 7, 2], [7, 7, 7, 7, 2], [6, 6, 6, 6, 5]]
    assert [made[0].count(step) for step in range(5)] == [20, 20, 20, 20, 9]


def test_rows_after_the_end_repeat_the_first_record_and_weigh_nothing() -> None:
    _, longest, empty = pipelines("uneven", 3, rows=4)
    last = batches(longest)[-1]
    assert last.weights.tolist() == [1, 1, 1, 0]  # 67 records in 17 steps of 4 rows
    first = batches(longest)[0].inputs[0]
    assert all(np.array_equal(x, first) for x, w in zip(last.inputs, last.weights, strict=True) if not w)
    for batch in batches(empty):
        assert not batch.inputs.any()
        assert not batch.weights.any()
        assert (batch.ids == -1).all()


@pytest.mark.parametrize(
    ("name", "epoch", "first_step"),
    [
        ("uneven", 1, 16),
        ("shuffled", 1, 3),
        *(pytest.param(*more, marks=pytest.mark.long) for more in [("uneven", 1, 1), ("shuffled", 0, 3)]),
    ],
)
def test_a_pass_from_a_step_gives_what_the_whole_pass_gives_from_there(name: str, epoch: int, first_step: int) -> None:
    for made in pipelines(name, 3, rows=4):
        assert same(batches(made, epoch, first_step), batches(made, epoch)[first_step:])


def test_epochs_follow_each_other_and_the_function_is_called_for_each() -> None:
    (made,) = pipelines("uneven", 1, rows=4)
    both = batches(made, 0, 0, 2)
    assert same(both, [*batches(made, 0), *batches(made, 1)])
    assert not same(both[: len(both) // 2], both[len(both) // 2 :])


def test_weights_and_inputs_by_name_are_the_functions() -> None:
    made = pipelines("weighted", 3, rows=2)
    found = [batch for one in made for batch in batches(one)]
    weights = sorted(itertools.chain(*(batch.weights.tolist() for batch in found)))
    assert weights == [0, 0, 0, *range(1, 10)]  # record 0 weighs nothing, and two rows are no record
    assert all(batch.inputs["a"].shape == (2, 1) for batch in found)


def test_first_rows_tell_streams_apart_if_they_are_not_all_alike() -> None:
    found = {}
    for name, options in {"shuffled": {}, "unsharded": {"batch": 3}, "constant": {}}.items():
        made = pipelines(name, 2, rows=4, **options)
        assert [one.first_rows for one in made] == ["", ""]
        for one in made:
            batches(one)
        first_rows = [one.first_rows for one in made]
        for one in made:
            batches(one, epoch=1)
        assert [one.first_rows for one in made] == first_rows
        found[name] = len({*first_rows}), all(first_rows)
    assert found == {"shuffled": (2, True), "unsharded": (1, True), "constant": (1, False)}


def test_batches_are_told_from_records() -> None:
    assert stream("unsharded", batch=3).has_batches
    assert not stream("shuffled").has_batches


def test_a_weight_below_zero_is_refused() -> None:
    (made,) = pipelines("weighted", 1, rows=2, least=-3)
    with pytest.raises(UserError, match=r"weighted\(.*\): expected weights of 0 or more; received -3\.$"):
        batches(made)


def test_a_later_epoch_that_is_shorter_is_filled_and_one_that_is_longer_ends_the_run() -> None:
    (made,) = pipelines("of_size", 1, rows=4, epoch_0=9, epoch_1=5, epoch_2=13)
    assert [int((batch.ids >= 0).sum()) for batch in batches(made, 1)] == [4, 1, 0]
    with pytest.raises(UserError) as raised:
        batches(made, 2)
    assert str(raised.value) == (
        "data.dataset: of_size(rank=0, size=1, epoch=2, training=True) gives more records than an epoch has room for: "
        "3 steps, as the ranks gave in epoch 0. Give data.steps_per_epoch."
    )
    full = pipelines("of_size", 1, rows=4, epoch_0=8, epoch_1=9)[0]
    with pytest.raises(UserError, match="more records than an epoch has room for"):
        batches(full, 1)


def test_with_steps_given_an_endless_stream_is_cut() -> None:
    made = StreamPipeline(stream("endless", 1, 2), 8, 5, None, prefetch_batches=1)
    found = batches(made, 0, 0, 3)
    assert len(found) == 15
    assert found[4].inputs[:, 0].tolist() == [33, 35, 37, 39]
    assert found[5].inputs[:, 0].tolist() == [1, 3, 5, 7]
    with pytest.raises(UserError, match=r"endless\(.*\) never ends\. Give data\.steps_per_epoch"):
        stream("endless").count()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "RuntimeError: no connection"),
        ("list", "must return a tf.data.Dataset; received list."),
        ("none", "must return a tf.data.Dataset; received None."),
        ("single", "must give records (inputs, targets) or (inputs, targets, weight); received TensorSpec(shape=()"),
        (
            "batched",
            "inputs must be a tensor, or tensors by name, of known shapes; received TensorSpec(shape=(None",
        ),
        ("weights", "the weight of a record must be one number; received TensorSpec(shape=(6,)"),
    ],
)
def test_a_function_that_does_not_give_a_stream_is_named(how: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        stream("broken", how=how)
    assert str(raised.value).startswith("data.dataset: ")
    assert "\n" not in str(raised.value)
    assert said in str(raised.value)


def test_what_a_generator_raises_is_one_line_with_the_call() -> None:
    made = StreamPipeline(stream("broken", how="torn"), 4, 8, [30], prefetch_batches=None)
    assert len(batches(made)) == 8
    with pytest.raises(UserError) as raised:
        batches(made, 1)
    assert str(raised.value) == (
        "data.dataset: broken(rank=0, size=1, epoch=1, training=True): ValueError: page 21 of 1 is torn."
    )
    with pytest.raises(
        ReadFailed, match=r"epoch=1, training=True\): ConnectionResetError: \[Errno 104\] Connection reset"
    ):
        batches(StreamPipeline(stream("broken", how="cut off"), 4, 8, [30], prefetch_batches=None), 1)
    with pytest.raises(UserError, match="epoch 0 gave"):
        batches(StreamPipeline(stream("broken", how="other"), 4, 8, [30], prefetch_batches=None), 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.dataset=convnet"], "data.dataset: expected package.module:function; received 'convnet'."),
        (["data.dataset=a:b", "data.train=here"], "data.train: has no effect beside data.dataset"),
        (["data.dataset=a:b", "data.eval=here"], "data.eval: has no effect beside data.dataset"),
        (["data.dataset=a:b", "data.shuffle=false"], "data.shuffle: has no effect beside data.dataset"),
        (["data.dataset=a:b", "data.audit=true"], "data.audit: has no effect beside data.dataset"),
        (["data.dataset=a:b", "data.steps_per_epoch=0"], "data.steps_per_epoch: must be at least 1"),
        (["data.train=here", "data.steps_per_epoch=9"], "data.steps_per_epoch: has no effect unless data.dataset"),
    ],
)
def test_settings_that_do_not_go_with_a_stream_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        load([], ["data.global_batch_size=8", "train.epochs=1", *words])
    assert str(raised.value).removeprefix("command line: ").startswith(said)


def test_a_name_or_an_option_that_the_function_has_not_is_named() -> None:
    with pytest.raises(UserError, match="user_streams has no 'unevn'; did you mean uneven"):
        stream("unevn")
    with pytest.raises(UserError, match=r"data\.dataset\.options: user_streams:uneven: .*it takes: .*records"):
        stream("uneven", recrods=3)
