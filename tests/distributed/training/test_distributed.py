"""The exchange between ranks, on real ranks under each launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from conftest import RankFacts, run_process

# Both exchanges. At four ranks an order in which sums are added is one of several.
SEVERAL = [
    ("srun", 2),
    pytest.param("horovodrun", 2, marks=pytest.mark.exhaustive),
    pytest.param("srun", 4, marks=pytest.mark.long),
    pytest.param("mpirun", 4, marks=pytest.mark.long),
]
ALONE = pytest.param("none", 1, marks=pytest.mark.exhaustive)
WAYS = [ALONE, *SEVERAL]
# Four ranks that wait for one another in many small calls of model.fit take minutes on two cores.
IN_MODEL_FIT = [("srun", 2), pytest.param("mpirun", 4, marks=pytest.mark.exhaustive)]
# SGD, Adam, one that clips and one that scales the loss; then others.
IN_PROGRAMS = ["optimizers", pytest.param("optimizers_more", marks=pytest.mark.long)]


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_collectives_reduce_over_all_ranks(rank_facts: RankFacts, launcher: str, np: int) -> None:
    total = np * (np - 1) / 2
    for rank, facts in enumerate(rank_facts("collectives", launcher, np)):
        assert (facts["rank"], facts["size"], facts["launcher"]) == (rank, np, launcher)
        assert facts["sum"] == [total + np, [[np, total], [2.0 * np, 3.0 * np]]]
        assert facts["sum_counts_exactly"]
        assert facts["average"] == total / np
        assert facts["are_sums_of_group"]
        assert facts["group_problem"] is None
        assert facts["gather"] == [{"rank": other} for other in range(np)]
        assert facts["broadcast_object"] == "from 0"
        assert facts["broadcast"] == [0.0, 7.0]
        assert facts["gathered_bytes"] == [[list(range(other)), "x" * other] for other in range(np)]
        of_all = [[100 * other + 3 * row + column for column in range(3)] for other in range(np) for row in range(4)]
        assert facts["to_root"] == facts["to_root_in_pieces"] == (of_all if facts["rank"] == 0 else [])
        assert facts["too_large"].startswith("group.gather: an exchange carries at most 10 bytes over all ranks; rec")


@pytest.mark.parametrize(
    "launcher",
    [
        "srun",
        pytest.param("srun-bound", marks=pytest.mark.long),
        pytest.param("horovodrun", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_share_the_cores_of_their_host_however_they_are_bound(rank_facts: RankFacts, launcher: str) -> None:
    """Under srun with task/affinity each rank sees its own cores only, and they are not divided once more."""
    here = sorted(os.sched_getaffinity(0))
    facts = rank_facts("placed", launcher, 2)
    bound = [here[:1], here[1:2] or here[:1]] if launcher == "srun-bound" else [here, here]
    cores = len({core for mine in bound for core in mine})
    assert [rank["bound"] for rank in facts] == bound
    for rank in facts:
        assert rank["found"] == f"0 GPUs; {cores} cores for 2 ranks of this host"
        assert rank["threads"] == max(1, cores // 2)
        assert rank["soft_placement"] is False
        assert rank["doctor"] == "ok" or cores == 1


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_exchanged_gradients_are_the_mean_to_the_precision_of_the_wire(
    rank_facts: RankFacts, launcher: str, np: int
) -> None:
    for facts in rank_facts("collectives", launcher, np):
        errors = facts["exchange_errors"]
        assert errors["average"] < 1e-6
        assert errors["sum"] < 1e-6
        assert errors["predivided"] < 1e-6
        assert facts.get("of_half", 0.0) < 1e-6  # a process set of half the ranks
        assert ("of_half" in facts) == (np > 1)
        assert errors["fp16"] < 2e-3
        assert errors["bf16"] < 2e-2
        # The narrow forms did travel: a wire of float32 would leave no error at all.
        assert min(errors["fp16"], errors["bf16"]) > 1e-6


@pytest.mark.long
def test_sums_in_the_order_of_ranks_are_the_same_to_the_bit_over_gloo_and_mpi(rank_facts: RankFacts) -> None:
    over = {launcher: rank_facts("collectives", launcher, 4) for launcher in ("mpirun", "srun")}
    assert [facts[0]["exchange"] for facts in over.values()] == ["MPI", "gloo"]
    facts = [*over["mpirun"], *over["srun"]]
    for name, bits in facts[0]["bits"].items():
        assert {other["bits"][name] for other in facts} == {bits}, name
    assert max(other["in_order_error"] for other in facts) < 1e-6
    assert len({other["bits_of_allreduce"] for other in facts}) == 2  # each adds in an order of its own


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_sparse_gradients_are_gathered_with_each_row_once(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("collectives", launcher, np):
        assert facts["sparse_stays_sparse"]
        assert facts["sparse_equals_dense"] < 1e-6
        assert sorted(facts["sparse_rows"]) == list(range(np + 2))


WITH_ADASUM = [
    pytest.param("mpirun", 2, marks=pytest.mark.long),
    pytest.param("mpirun", 4, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("launcher", "np"), WITH_ADASUM)
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_equal(
    rank_facts: RankFacts, launcher: str, np: int
) -> None:
    for facts in rank_facts("adasum", launcher, np):
        assert facts["exchange"] == "MPI"
        assert max(facts["errors"].values()) < 1e-6  # "drawn" is the paper's formula
        assert min(facts["from_mean"], facts["from_sum"]) > 1e-2


@pytest.mark.parametrize(("launcher", "np"), WITH_ADASUM)
def test_adasum_of_one_record_is_its_gradient(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("adasum", launcher, np):
        assert facts["one_record"] < 1e-5


@pytest.mark.parametrize(("launcher", "np"), WITH_ADASUM)
def test_ranks_train_with_adasum_and_stay_bit_equal(rank_facts: RankFacts, launcher: str, np: int) -> None:
    ranks = rank_facts("adasum", launcher, np)
    assert len({facts["weights"] for facts in ranks}) == 1
    losses = ranks[0]["losses"]
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(("launcher", "np"), SEVERAL)
def test_exchange_follows_the_launcher(rank_facts: RankFacts, launcher: str, np: int) -> None:
    expected = {"horovodrun": "gloo", "srun": "gloo", "mpirun": "MPI"}[launcher]
    assert {facts["exchange"] for facts in rank_facts("collectives", launcher, np)} == {expected}


@pytest.mark.parametrize(("launcher", "np"), SEVERAL)
def test_first_difference_is_named_with_its_ranks(rank_facts: RankFacts, launcher: str, np: int) -> None:
    messages = {facts["disagreement"] for facts in rank_facts("collectives", launcher, np)}
    assert len(messages) == 1
    message = messages.pop()
    assert f"at step 7 on weight: rank {np - 1} (" in message
    assert f"has 'odd'; {np - 1} of {np} have 'same'" in message


@pytest.mark.parametrize(("launcher", "np"), SEVERAL)
def test_what_one_rank_cannot_do_ends_all_with_its_words(rank_facts: RankFacts, launcher: str, np: int) -> None:
    *others, failed = rank_facts("collectives", launcher, np)
    assert failed["together"].startswith(f"own: rank {np - 1} (")
    assert failed["together"].endswith("file missing")
    assert {facts["together"] for facts in others} == {"elsewhere: 2"}


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_stock_horovod_lets_ranks_drift_apart(rank_facts: RankFacts, launcher: str, np: int) -> None:
    ranks = rank_facts("optimizers_more", launcher, np)
    assert len({facts["stock_horovod"] for facts in ranks}) == np
    assert len({facts["unwrapped"] for facts in ranks}) == np


@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
@pytest.mark.parametrize("program", IN_PROGRAMS)
def test_ours_keeps_ranks_bit_equal_in_model_fit(rank_facts: RankFacts, launcher: str, np: int, program: str) -> None:
    ranks = rank_facts(program, launcher, np)
    for name in ranks[0]["ours"]:
        assert len({facts["ours"][name] for facts in ranks}) == 1, name
        assert ranks[0]["ours"][name] not in {facts["unwrapped"] for facts in ranks}, name


@pytest.mark.parametrize(("launcher", "np"), [ALONE, *IN_MODEL_FIT])
@pytest.mark.parametrize("program", IN_PROGRAMS)
def test_n_ranks_in_model_fit_equal_one_process_on_their_batches(
    rank_facts: RankFacts, launcher: str, np: int, program: str
) -> None:
    for facts in rank_facts(program, launcher, np):
        assert max(facts["error_against_one_process"].values()) < 1e-4


@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_keras_gradient_accumulation_keeps_ranks_equal(rank_facts: RankFacts, launcher: str, np: int) -> None:
    assert len({facts["accumulating"] for facts in rank_facts("optimizers", launcher, np)}) == 1


@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_different_initial_weights_are_mended_by_the_broadcast_alone(
    rank_facts: RankFacts, launcher: str, np: int
) -> None:
    ranks = rank_facts("optimizers", launcher, np)
    assert len({facts["without_broadcast"] for facts in ranks}) == np
    assert len({facts["with_broadcast"] for facts in ranks}) == 1


@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_a_model_compiled_for_xla_trains_without_it(rank_facts: RankFacts, launcher: str, np: int) -> None:
    """Keras compiles for XLA by itself where there is a GPU; the weights are those of jit_compile=False."""
    for facts in rank_facts("optimizers", launcher, np):
        assert facts["xla_with_broadcast"] == facts["ours"]["sgd"]


@pytest.mark.parametrize(("launcher", "np"), [ALONE, *IN_MODEL_FIT])
@pytest.mark.parametrize("name", ["xla_without_broadcast", "xla_with_synchronised_batch_norm"])
def test_an_exchange_inside_xla_is_refused_in_one_line(
    rank_facts: RankFacts, launcher: str, np: int, name: str
) -> None:
    for facts in rank_facts("optimizers", launcher, np):
        assert "XLA cannot compile the exchange between ranks: give compile(..., jit_compile=False)" in facts[name]


@pytest.mark.long  # a script whose ranks have different numbers of rows: ends/test_scripts.py
@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_ranks_with_different_numbers_of_batches_end_each_epoch_after_the_fewest(
    rank_facts: RankFacts, launcher: str, np: int
) -> None:
    for facts in rank_facts("unequal_epochs", launcher, np):
        assert facts["uneven"]["arrays"] == facts["even"]["3"]
        assert facts["uneven"]["two_steps_a_call"] == facts["even"]["2"]
        assert facts["even"]["2"] != facts["even"]["3"]
        assert facts["uneven"]["steps_of_parts"] == 2 * 3
        assert facts["uneven"]["steps_given"] == 3 * 3


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_ranks_with_different_numbers_of_batches_are_refused_if_wanted(
    rank_facts: RankFacts, launcher: str, np: int
) -> None:
    others = "rank 1" if np == 2 else "ranks " + ", ".join(map(str, range(1, np)))
    for facts in rank_facts("unequal_epochs", launcher, np):
        assert f"received rank 0: epoch 1 of 3 batches; {others}: epoch 1 of 4 batches." in facts["uneven_refused"]


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_ranks_of_which_one_stops_early_all_end_with_its_number(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("unequal_epochs", launcher, np):
        assert "received rank 0: stops after epoch 1; rank" in facts["stopped_alone"]
        assert "epoch 2 of 4 batches." in facts["stopped_alone"]


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_epochs_that_are_short_on_all_ranks_alike_end_as_in_keras(
    rank_facts: RankFacts, launcher: str, np: int
) -> None:
    for facts in rank_facts("unequal_epochs", launcher, np):
        distributed, by_keras = facts["short_alike"]
        assert distributed == by_keras
        assert by_keras < 3 * 3


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_data_of_unknown_length_is_refused_until_its_steps_are_given(
    rank_facts: RankFacts, launcher: str, np: int
) -> None:
    for facts in rank_facts("unequal_epochs", launcher, np):
        assert "received data of unknown length. Give fit(steps_per_epoch=...)" in facts["unknown_length"]
        assert facts["known_length"] == "accepted"


@pytest.mark.parametrize(("launcher", "np"), [ALONE, *IN_MODEL_FIT])
def test_variables_that_horovod_cannot_send_are_refused(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("optimizers", launcher, np):
        assert "kernel is bfloat16, which Horovod cannot exchange. Keep variables in float32" in facts["bfloat16"]


@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_logged_metrics_are_means_over_ranks(rank_facts: RankFacts, launcher: str, np: int) -> None:
    assert {facts["averaged_log"] for facts in rank_facts("optimizers", launcher, np)} == {(np - 1) / 2}


@pytest.mark.parametrize(("launcher", "np"), [ALONE, *IN_MODEL_FIT])
def test_variables_without_a_gradient_are_left_alone(rank_facts: RankFacts, launcher: str, np: int) -> None:
    assert {facts["none_gradients"] for facts in rank_facts("optimizers", launcher, np)} == {1}


@pytest.mark.parametrize(("launcher", "np"), IN_MODEL_FIT)
def test_an_overflow_on_one_rank_skips_the_update_on_all(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("optimizers", launcher, np):
        assert facts["overflow"] == {"scale": 2.0, "weight": [1.0, 2.0]}
        mean_rank_plus_one = (np + 1) / 2
        assert facts["after_overflow"]["scale"] == 2.0
        assert facts["after_overflow"]["weight"] == pytest.approx([1.0 - 0.1, 2.0 - 0.1 * mean_rank_plus_one])
        assert facts["recovered_scale"] == 4.0  # after two updates without an overflow


def test_misuse_is_refused_in_one_line(rank_facts: RankFacts) -> None:
    facts = rank_facts("optimizers", "srun", 2)[0]
    assert "is distributed already" in facts["wrapped_twice"]
    assert "op must be one of average, sum, adasum; received 'mean'" in facts["unknown_op"]
    assert "compression must be none, fp16 or bf16; received 'zip'" in facts["unknown_compression"]
    assert "gradient_predivide_factor goes with op average" in facts["predivided_sum"]


@pytest.mark.long
def test_saved_model_loads_and_trains_without_horovod(rank_facts: RankFacts, tmp_path: Path) -> None:
    facts = rank_facts("optimizers_more", "srun", 2)[0]
    script = f"""
import sys
sys.modules["horovod"] = None  # an import of it would raise
import keras, numpy as np
model = keras.saving.load_model({facts["saved_model"]!r})
rng = np.random.default_rng(0)
x = rng.normal(size=(32, 6)).astype(np.float32)
print(type(model.optimizer).__name__, int(model.optimizer.iterations), *model.predict(x, verbose=0).ravel())
model.fit(x, x[:, :1], verbose=0)
"""
    finished = run_process([sys.executable, "-c", script], cwd=tmp_path)
    assert finished.returncode == 0, finished.text
    name, iterations, *prediction = finished.stdout.split()
    assert (name, iterations) == ("Adam", "8")
    assert [float(value) for value in prediction] == pytest.approx(facts["saved_prediction"], rel=1e-4, abs=1e-5)
