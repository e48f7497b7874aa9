"""A Horovod script with its import changed trains as one process would on all rows; and what it gets wrong is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HANGS_AFTER_S, PROGRAMS, RankFacts, launcher_command, run_process, warm_python

# Two exchanges, and a number of ranks at which a process set leaves one out.
MORE_WAYS = [pytest.param(way, marks=pytest.mark.exhaustive) for way in (("mpirun", 3), ("mpirun", 2), ("srun", 3))]
HALF_PRECISION = {"fp16": 1e-3, "fp16_tape": 1e-3, "bf16": 2e-2, "half": 1e-2}
NOT_ONE_MODEL = {"process_set"}


def name_of(way: tuple[str, int]) -> str:
    return f"{way[0]}-{way[1]}"


@pytest.fixture(params=[("srun", 2), *MORE_WAYS], ids=name_of)
def way(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture
def trained(way: tuple[str, int], rank_facts: RankFacts) -> list[dict[str, Any]]:
    """What a program has left that trains in one way of each kind."""
    return rank_facts("drop_in", *way)


@pytest.fixture(params=["drop_in", pytest.param("drop_in_more", marks=pytest.mark.long)])
def in_twenty_steps(
    request: pytest.FixtureRequest, way: tuple[str, int], rank_facts: RankFacts
) -> list[dict[str, Any]]:
    """The same, and what one has left that trains in one more of a kind."""
    return rank_facts(request.param, *way)


@pytest.fixture(params=[pytest.param(("srun", 2), marks=pytest.mark.long), *MORE_WAYS], ids=name_of)
def ranks(request: pytest.FixtureRequest, rank_facts: RankFacts) -> list[dict[str, Any]]:
    """What a program has left that tries all else."""
    return rank_facts("drop_in_api", *request.param)


def test_twenty_steps_are_those_of_one_process_on_all_rows(in_twenty_steps: list[dict[str, Any]]) -> None:
    for facts in in_twenty_steps:
        errors = facts["errors"]
        assert not {name: error for name, error in errors.items() if not error < HALF_PRECISION.get(name, 1e-5)}
        # The narrow forms did travel: float32 on the wire would leave no such error.
        assert min(errors[name] for name in HALF_PRECISION.keys() & errors.keys()) > 1e-6


def test_stock_horovod_fails_the_same_test(trained: list[dict[str, Any]]) -> None:
    for facts in trained:
        assert facts["stock_fit"] > 1e-3
        assert facts.get("stock_tape_raises") or facts["stock_tape"] > 1e-3


def test_ranks_hold_the_same_weights_to_the_bit(in_twenty_steps: list[dict[str, Any]]) -> None:
    for name in in_twenty_steps[0]["sums"].keys() - NOT_ONE_MODEL:
        assert len({facts["sums"][name] for facts in in_twenty_steps}) == 1, name


def test_a_rank_outside_a_process_set_trains_alone(trained: list[dict[str, Any]]) -> None:
    weights = [facts["sums"]["process_set"] for facts in trained]
    assert (weights[0] == weights[1]) == (len(trained) > 2)
    assert len(set(weights)) == max(2, len(trained) - 1)


def test_local_layers_are_each_ranks_own(trained: list[dict[str, Any]]) -> None:
    assert len({facts["local_part"] for facts in trained}) == len(trained)
    assert len({facts["shared_part"] for facts in trained}) == 1


def test_ranks_may_have_different_numbers_of_local_variables(ranks: list[dict[str, Any]]) -> None:
    mean = (len(ranks) - 1) / 2
    for facts in ranks:
        assert facts["behind_local"] == [[-mean, -10 * mean]] * 2


def test_jacobians_of_a_distributed_tape_are_each_ranks_own(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["jacobians"][0] == facts["jacobians"][1]
    assert len({str(facts["jacobians"]) for facts in ranks}) == len(ranks)


def test_what_cannot_be_served_is_refused_in_one_line(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        refused = facts["refused"]
        assert all(text != "accepted" and "\n" not in text for text in refused.values()), refused
        assert refused["no_optimizer"].endswith("received str. Give keras.optimizers.get('sgd').")
        assert refused["twice"].endswith(" is distributed already; wrap it once.")
        for name in ("inside_loss_scale", "inside_multi"):
            assert "and LossScaleOptimizer and MultiOptimizer take only an optimizer that is not." in refused[name]
        assert refused["predivided_sum"].startswith("DistributedGradientTape: gradient_predivide_factor goes with")
        assert refused["half_twice"].endswith(" is distributed already; wrap it once.")
        assert refused["half_in_a_loop"].endswith("Differentiate optimizer.scale_loss(loss).")
        assert "give compile that one: optimizer = hvd.DistributedOptimizer(optimizer)" in refused["half_not_taken"]
        assert refused["gpu"].startswith("DistributedOptimizer: device_dense='/gpu:0', but this process sees no GPU.")
        for name in ("float8", "float8_sum", "float8_passes"):
            assert "is overwritten with its gradient (float8 quantization), which cannot be averaged" in refused[name]
        assert refused["adasum_of_some"].endswith("op adasum is over all ranks; leave process_set out.")
        assert "would skip the step alone. Use mixed_bfloat16" in refused["local_scaled"]
        assert "each rank would clip by another norm. Use clipnorm." in refused["local_clipped"]
        assert facts["bfloat16_by_fp16"] == [2.0]
        assert refused["bfloat16"].startswith("variable Variable:0 is bfloat16, which Horovod cannot exchange.")
        assert refused["barrier_in_a_step"].endswith("Call it outside tf.function.")
        assert refused["in_xla"].startswith("XLA cannot compile the exchange between ranks")
        assert refused["join_in_a_step"].endswith("keep the result. Call it outside tf.function.")
        assert "Build it, or call it once, before the state" in refused["elastic_unbuilt"]
        assert "[*model.weights, *optimizer.variables]" in refused["elastic_no_variables"]
        assert "value['seen'] is of type set" in refused["elastic_object"]
        assert "the first argument must be a state" in refused["elastic_no_state"]
        assert "hvd.broadcast_model(model)" in refused["global_variables"]


def test_gradients_that_were_added_up_before_ranks_changed_are_dropped(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        fresh, changed = facts["added_up"]
        assert fresh == changed != 1


def test_of_a_sync_that_a_lost_rank_breaks_off_nothing_stays(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["after_a_broken_sync"] == [1.0, 1.0]


def test_a_rank_0_that_has_just_been_started_gives_the_others_nothing(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["after_a_new_rank_0"] == [1.0, 1.0, 1]


def test_ranks_that_train_on_the_same_rows_are_told_once_by_root(ranks: list[dict[str, Any]]) -> None:
    """Where rows differ, and where gradients are equal because they are all 0 or NaN, nothing is said."""
    assert not any(facts["said_of_own_rows"] for facts in ranks)
    (line,) = ranks[0]["said_of_equal_rows"]
    assert line.startswith("all 2 ranks seem to train on the same rows" if len(ranks) == 2 else "all 3 ranks")
    assert not any(facts["said_of_equal_rows"] for facts in ranks[1:])


def test_weights_that_were_never_broadcast_are_found_at_the_tenth_exchange(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["failed_fit"] == "as it was told"  # before its broadcast: what comes after it is checked
        for text in facts["forgotten"]:
            assert "ranks hold different weights: " in text
            assert "BroadcastGlobalVariablesCallback(0)" in text
    assert len({facts["broadcast"] for facts in ranks}) == 1


def test_a_script_may_broadcast_after_its_first_update_however_many_exchanges_that_takes(
    ranks: list[dict[str, Any]],
) -> None:
    assert [facts["added_by_hand"] for facts in ranks] == ["accepted"] * len(ranks)


def test_weights_that_part_later_are_found_at_the_hundredth_exchange(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert "ranks hold different weights: " in facts["forgotten_later"]
        assert "A rank has changed its weights or its learning rate alone, or" in facts["forgotten_later"]


def test_ranks_join_after_any_number_of_steps_and_compare_their_weights_then(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    for facts in ranks:
        assert facts["after_join"] == pytest.approx(-6 * (size - 1) - 12, rel=1e-5)  # joined ranks give zeros
        assert "ranks hold different weights: " in facts["after_join_only"]


def test_ranks_that_broadcast_other_variables_than_root_are_named_with_the_first_variable(
    ranks: list[dict[str, Any]],
) -> None:
    last = len(ranks) - 1
    for facts in ranks:
        texts, compiled = facts["unlike"], facts["unlike_in_a_step"]
        assert texts == ranks[0]["unlike"]
        start = "hvd.broadcast_variables: all ranks must give the same variables; variable"
        for text in (texts["optimizer"], compiled):
            assert f"{start} 3 is adam/" in text
            assert f"_momentum, float32 of shape (6, 8), on rank {last}, " in text
            assert "missing on rank 0. Build the same model and optimizer" in text
        assert f"kernel, float32 of shape (8, 3), on rank {last}, " in texts["model"]
        assert "kernel, float32 of shape (8, 1), on rank 0." in texts["model"]
        assert texts["state on root only"].startswith(f"{start} 1 is missing on rank {last}, and sgd")
        assert "float64 of shape ()," in texts["dtype"]
        assert f"beta, float32 of shape (4,), on rank {last}, " in texts["order"]
        assert texts["root_rank"] == (
            f"hvd.broadcast_variables: root_rank must be equal on all ranks; received 0 on rank 0, 1 on rank {last}."
        )


def test_one_compiled_step_broadcasts_twice(ranks: list[dict[str, Any]]) -> None:
    """As Horovod's own example does: a model and its optimizer. Their exchanges overlap, so their names must differ.

    In functions inside the step they have the same names, so they must not overlap.
    """
    for facts in ranks:
        assert facts["two_broadcasts"] == [list(range(60))] * 3


def test_variables_are_broadcast_in_place_whatever_their_names_are(ranks: list[dict[str, Any]]) -> None:
    assert [facts["in_place"] for facts in ranks] == [ranks[-1]["in_place"]] * len(ranks)
    assert ranks[0]["in_place"][1:] == [len(ranks) - 1, [2 * (len(ranks) - 1)]]


def test_ways_that_part_by_design_are_not_taken_for_disagreement(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["partial_in_fit"] == facts["process_set_in_fit"] == "accepted"
        assert "Train with hvd.DistributedOptimizer(optimizer)" in facts["plain_in_fit"]


def test_the_best_model_is_written_by_root_whichever_rank_that_is(ranks: list[dict[str, Any]]) -> None:
    assert all(facts["best_of_root_1"] for facts in ranks)
    assert [facts["writes_best"] for facts in ranks] == [rank == 1 for rank in range(len(ranks))]


def test_the_best_model_is_that_of_the_mean_over_ranks_unless_root_evaluates_alone(ranks: list[dict[str, Any]]) -> None:
    mean = sum(facts["kept_as_best"][1] for facts in ranks) / len(ranks)
    best, own, _ = ranks[0]["kept_as_best"]
    assert best == pytest.approx(mean, rel=1e-5)
    assert abs(own - mean) > 0.1
    assert {facts["kept_as_best"][2] for facts in ranks} == {best}
    best, own, _ = ranks[0]["kept_as_best_on_root"]
    assert best == pytest.approx(own, rel=1e-5)


def test_a_model_without_variables_may_take_sixteen_steps_before_it_is_broadcast(ranks: list[dict[str, Any]]) -> None:
    assert {facts["unbuilt_16_a_call"] for facts in ranks} == {"accepted"}
    assert len({facts["unbuilt_weights"] for facts in ranks}) == 1


def test_the_first_batch_has_the_weights_of_root_where_a_layer_is_not_built(ranks: list[dict[str, Any]]) -> None:
    """And what a layer has added to the loss of a rank's own rows, before `fit`, is not compared."""
    for facts in ranks:
        assert facts["with_a_branch"] == "accepted"
        assert set(facts["seen_by_the_first_batch"]) == {1.0}


def test_the_state_of_every_optimizer_of_a_model_is_broadcast(ranks: list[dict[str, Any]]) -> None:
    assert [facts["slots_of_two"] for facts in ranks] == [[1.0, 1.0]] * len(ranks)


def test_slots_of_local_variables_are_each_ranks_own(ranks: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(ranks):
        assert facts["slots_of_local"] == [[1.0] * count + [rank] * count for count in (2, 6)]


def test_a_copy_from_the_config_is_distributed_as_the_original_is(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert max(facts["of_its_config"]) < 1e-5
        assert facts["nothing_to_train"] == "accepted"


def test_sums_over_passes_belong_to_their_variables(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["two_sets"] == [-19.0, -1.0]
        assert facts["late_none"] == [-4.0]


def test_metrics_of_any_shape_are_averaged_and_different_ones_refused(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["averaged_array"] == [(len(ranks) - 1) / 2, 1.0]
        assert "all ranks must log the same metrics; rank 0 logs loss, rank 1 logs loss, val_loss" in facts["different"]


def test_shard_gives_each_record_once_and_all_ranks_equally_many(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    for kind in ("shard", "shard_of_dataset", "shard_of_dict"):
        shares = [facts[kind] for facts in ranks]
        assert {len(column) for share in shares for column in share} == {5}
        real = [value for x, _, weights in shares for value, weight in zip(x, weights, strict=True) if weight]
        assert sorted(real) == list(range(4 * size + 1))
        assert all(y == [2 * value for value in x] for x, y, _ in shares)


def test_what_has_no_rows_is_refused_by_shard_in_one_line_each(ranks: list[dict[str, Any]]) -> None:
    refused = ranks[0]["shard_refused"]
    assert refused.pop("empty") == "accepted"
    assert refused.pop("lengths").endswith(
        "same number of rows; received argument 1: 8, argument 2['a']: 8, argument 2['b']: 7."
    )
    assert "argument 2['b'] must be an array with one row for each record; received None." in refused.pop("dict")
    for name, text in refused.items():
        assert text.startswith("hvd.shard: argument 2 must be an array with one row for each record; received "), name
        assert "\n" not in text
    assert ranks[0]["shard_of_nothing"].endswith("received nothing.")


def test_a_dataset_that_may_be_in_another_order_on_each_rank_is_not_sharded(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        *refused, accepted = facts["shard_of_shuffled"]
        advice = [f"Apply {cause} to what hvd.shard returns." for cause in [*["shuffle"] * 3, "sample_from_datasets"]]
        for text, what in zip(refused, [*advice, "Leave it out, also after hvd.shard."], strict=True):
            assert text.endswith(f"so records would be lost. {what}")
        assert accepted == "accepted"


def test_ranks_that_shard_their_rows_in_other_orders_are_refused_at_the_next_broadcast(
    ranks: list[dict[str, Any]],
) -> None:
    for facts in ranks:
        said = facts["shard_in_other_order"]
        rows, others = 4 * len(ranks), "1" if len(ranks) == 2 else "1, 2"
        assert f"hvd.shard: argument 1, argument 2, of {rows} rows, differ on rank {others} from" in said["arrays"]
        assert f"hvd.shard: part 1 of a record, part 2 of a record, of {rows} rows, differ" in said["dataset"]
        assert f"received {rows} of them on rank 0, {rows + 1} on rank 1" in said["numbers of rows"]
        assert "hvd.shard: argument 1, of" in said["fit"]
        for name in ("one order", "one rank alone", "nothing", "unchecked"):
            assert said[name] == "accepted"
        assert not [text for text in said.values() if "\n" in text]


def test_root_warns_of_batches_that_are_sharded_as_records(ranks: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(ranks):
        of_batches, of_records = facts["shard_of_batches"]
        assert [line[:37] for line in of_batches] == ["hvd.shard: the dataset is of batches,"] * (rank == 0)
        assert not of_records


def test_values_of_all_kinds_are_exchanged(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    for rank, facts in enumerate(ranks):
        assert facts["values"] == {
            "allreduce": [pytest.approx((size - 1) / 2), 1.0],
            "mean_of_large_integers": 70_000 + (size - 1) / 2,
            "mean_of_integers": [pytest.approx((size - 1) / 2)] * 2,
            "sum_of_integers": [size * (size - 1) // 2],
            "summed": [float(size)],
            "allgather": list(range(size)),
            "broadcast": [float(size - 1)],
            "reducescatter": [float(size * rank)],
            "objects": [{"rank": other} for other in range(size)],
            "object": ["from", 0],
        }


def test_rates_are_those_that_horovod_documents(ranks: list[dict[str, Any]]) -> None:
    """Four epochs of three batches; `warmup` ends after two epochs, `staircase` holds in epochs 1 and 2."""
    size, at = len(ranks), [epoch + batch / 3 for epoch in range(4) for batch in range(3)]
    warm = [0.8 / size * ((size - 1) * (epoch + 1 / 3) / 2 + 1) for epoch in at[:6]]
    for facts in ranks:
        assert facts["warmup"] == pytest.approx([*warm, *[0.8] * 6], rel=1e-6)
        assert facts["staircase"] == pytest.approx([*[0.05] * 3, *[0.2] * 3, *[0.1] * 6], rel=1e-6)
        assert facts["smooth"] == pytest.approx([0.4 * 0.5**epoch for epoch in at], rel=1e-6)


def test_that_a_number_is_taken_to_the_power_of_the_epoch_is_said_once_by_root(ranks: list[dict[str, Any]]) -> None:
    start, end = "LearningRateScheduleCallback: multiplier=", " For a constant factor: multiplier=lambda epoch: "
    assert ranks[0]["said_of_powers"] == [
        f"{start}0.5 is raised to the power epoch - 0: rate 0.4 in epoch 0, 0.2 in epoch 1, 0.1 in epoch 2.{end}0.5.",
        f"{start}0.1 is raised to the power epoch - 2: rate 0.4 in epoch 2, 0.04 in epoch 3.{end}0.1.",
    ]
    assert not any(facts["said_of_powers"] for facts in ranks[1:])
    assert not any(facts["said_of_constants"] for facts in ranks)


def test_momentum_is_corrected_when_the_rate_changes(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert np.max(np.abs(np.subtract(facts["corrected"], facts["corrected_by_hand"]))) < 1e-5
        assert np.max(np.abs(np.subtract(facts["corrected"], facts["uncorrected_by_hand"]))) > 1e-3


def test_a_list_of_callbacks_that_fit_was_given_can_be_given_again(ranks: list[dict[str, Any]]) -> None:
    """What stands in for some of them, such as TerminateOnNaN, is there for one `fit`."""
    for facts in ranks:
        assert facts["list_given_again"] == [[True, True]] * 2


def test_a_model_goes_through_a_file_with_its_optimizer_and_trains_on(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["loaded_slots"] == 0
    assert len({weights for facts in ranks for weights in facts["trained_on"]}) == 1


@pytest.mark.long
@pytest.mark.parametrize("what", ["batch_norm", "one_name", "two_calls"])
def test_exchanges_of_two_models_are_not_mixed_up(rank_facts: RankFacts, what: str) -> None:
    """Synchronised BatchNorm in both; two optimizers that were given the same name; one model called twice."""
    for facts in rank_facts("two_models", "srun", 2):
        assert isinstance(facts[what], float), facts[what]
        assert facts[what] < 1e-4


@pytest.mark.long
def test_what_layers_hold_besides_weights_is_that_of_root_or_refused(rank_facts: RankFacts) -> None:
    """A Normalization that root has adapted, again before the second fit; vocabularies in another order."""
    for facts in rank_facts("derived", "srun", 2):
        assert max(facts[name] for name in ("weights", "outputs", "broadcast", "differ")) < 1e-5, facts
        for refused, what in (("refused", "string_lookup"), ("refused options", "rescaling")):
            assert facts[refused].startswith("model.fit: ranks 0 and 1 differ in "), facts
            assert f" of layer {what}, so that they compute something else of the same record." in facts[refused]


DISTRIBUTED_AT_LEAST = 250
"""Calls of `compile` in those tests; fewer would mean that the program no longer finds where they compile."""


@pytest.mark.exhaustive
def test_what_passes_in_one_process_passes_on_two_ranks(tmp_path: Path) -> None:
    def outcomes(launcher: str, np: int) -> list[dict[str, Any]]:
        out = tmp_path / str(np)
        out.mkdir()
        command = [*launcher_command(launcher, np), *warm_python(), str(PROGRAMS / "keras_own.py"), str(out)]
        finished = run_process(command, timeout_s=8 * HANGS_AFTER_S)
        assert finished.returncode == 0, finished.text
        return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(np)]

    (alone,) = outcomes("none", 1)
    for facts in outcomes("mpirun", 2):
        assert facts["distributed"] > DISTRIBUTED_AT_LEAST
        failed = {name: facts["failed"].get(name, "not run") for name in set(alone["passed"]) - set(facts["passed"])}
        assert not failed, failed
