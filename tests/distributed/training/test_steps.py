"""A step on N ranks is the step of one process on the same records, uneven shares included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import RankFacts

WAYS = [
    pytest.param("none", 1, marks=pytest.mark.exhaustive),
    ("srun", 2),
    pytest.param("mpirun", 3, marks=pytest.mark.exhaustive),
    pytest.param("mpirun", 4, marks=pytest.mark.exhaustive),
]


def by(program: str, *names: str) -> list[Any]:
    """Cases of a program; those of steps_more are one more of a kind."""
    marks = [pytest.mark.long] if program == "steps_more" else []
    return [pytest.param(program, name, id=name, marks=marks) for name in names]


@pytest.mark.parametrize(("launcher", "np_"), WAYS)
@pytest.mark.parametrize(
    ("program", "name"),
    [
        *by("steps", "sgd", "l2", "sparse"),
        *by("steps_more", "lars", "sparse_accumulated", "sparse_as_dense", "sparse_clipped", "sparse_adam"),
    ],
)
def test_update_is_the_gradient_of_the_mean_over_all_records(
    rank_facts: RankFacts, launcher: str, np_: int, program: str, name: str
) -> None:
    for facts in rank_facts(program, launcher, np_):
        assert facts["errors"][name] < 2e-5


@pytest.mark.parametrize(("launcher", "np_"), WAYS[1:])
def test_a_mean_of_means_would_be_another_update(rank_facts: RankFacts, launcher: str, np_: int) -> None:
    for facts in rank_facts("steps", launcher, np_):
        assert facts["errors"]["mean_of_means"] > 1e-2


@pytest.mark.parametrize(("launcher", "np_"), WAYS)
def test_training_loss_is_the_mean_over_records_and_penalties(rank_facts: RankFacts, launcher: str, np_: int) -> None:
    for facts in rank_facts("steps", launcher, np_):
        ours, alone = facts["loss"]
        assert ours == pytest.approx(alone, rel=1e-5)
        assert facts["loss_average"][0] == pytest.approx(facts["loss_average"][1], rel=1e-5)
        assert facts["steps"] == 3
        ours, alone = facts["penalised_loss"]
        assert ours == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(("launcher", "np_"), WAYS)
@pytest.mark.parametrize(
    ("program", "name"), [*by("steps", "ema", "ema_in_place", "stale", "local_2"), *by("steps_more", "local_1")]
)
def test_moving_averages_and_other_exchanges_are_those_written_out(
    rank_facts: RankFacts, launcher: str, np_: int, program: str, name: str
) -> None:
    for facts in rank_facts(program, launcher, np_):
        assert facts["modes"][name] < 2e-5


@pytest.mark.parametrize(("launcher", "np_"), WAYS[1:])
def test_ranks_differ_between_local_averages_and_only_there(rank_facts: RankFacts, launcher: str, np_: int) -> None:
    ranks = rank_facts("steps", launcher, np_)
    for name, is_equal in {"every_step": True, "stale": True, "local": False}.items():
        ends = {str(facts["ends"][name]) for facts in ranks}
        assert (len(ends) == 1) == is_equal
    every_step, stale = (np.array(ranks[0]["ends"][name]) for name in ("every_step", "stale"))
    assert np.max(np.abs(every_step - stale)) > 1e-2


@pytest.mark.parametrize(("launcher", "np_"), WAYS)
def test_evaluation_counts_every_record_once(rank_facts: RankFacts, launcher: str, np_: int) -> None:
    for facts in rank_facts("steps", launcher, np_):
        ours, alone = facts["evaluation"]
        assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert ours["accuracy"] == pytest.approx(alone["accuracy"], rel=1e-6)


@pytest.mark.parametrize(("launcher", "np_"), WAYS)
def test_the_state_that_a_metric_makes_late_is_summed_over_ranks(
    rank_facts: RankFacts, launcher: str, np_: int
) -> None:
    for facts in rank_facts("steps", launcher, np_):
        ours, alone = facts["late_metric"]
        assert ours == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(("launcher", "np_"), WAYS)
def test_each_batch_of_an_evaluation_is_progress_to_the_watchdog(
    rank_facts: RankFacts, launcher: str, np_: int
) -> None:
    for facts in rank_facts("steps", launcher, np_):
        assert len(facts["counted"]) == 3
        for done, counted in enumerate(facts["counted"]):  # the count has no place within the step
            assert counted in (f"batch {done}", f"batch {done + 1}")


@pytest.mark.parametrize(("launcher", "np_"), WAYS)
def test_dropout_masks_differ_by_rank_and_step_and_repeat_on_a_second_run(
    rank_facts: RankFacts, launcher: str, np_: int
) -> None:
    ranks = rank_facts("steps", launcher, np_)
    assert len({str(facts["mask"]) for facts in ranks}) == np_
    for facts in ranks:
        assert facts["mask"] == facts["mask_again"]
        assert facts["mask"] != facts["mask_later"]
        assert 0 < np.count_nonzero(facts["mask"]) < np.size(facts["mask"])


@pytest.mark.parametrize(("launcher", "np_"), WAYS[1:])
def test_statistics_are_equal_on_all_ranks_and_under_local_averages_averaged_for_a_save(
    rank_facts: RankFacts, launcher: str, np_: int
) -> None:
    ranks = rank_facts("steps", launcher, np_)
    assert len({str(facts["statistics every_step"]) for facts in ranks}) == 1
    assert len({str(facts["statistics local"]) for facts in ranks}) == np_
    mean = np.mean([facts["statistics local"] for facts in ranks], axis=0)
    for facts in ranks:
        assert np.allclose(facts["statistics local, settled"], mean)
        assert facts["statistics every_step, settled"] == facts["statistics every_step"]


@pytest.mark.parametrize(("launcher", "np_"), WAYS[1:])
def test_frozen_weights_are_saved_once_and_must_be_equal_on_all_ranks(
    rank_facts: RankFacts, launcher: str, np_: int
) -> None:
    for facts in rank_facts("steps", launcher, np_):
        found = facts["frozen"]
        if facts["rank"] == 0:
            assert found["bytes"] < found["bytes_saved"] < 1.1 * found["bytes"]
        else:
            assert found["bytes_saved"] == 0, "root alone makes the copies that are saved"
        assert found["agreement"] == "yes"
        assert f"ranks disagree now on model/held/frozen/kernel: rank {np_ - 1} (" in found["agreement_after"]


NUMBERS = {
    "small": {"HorovodAllreduce": 1},
    "small, deterministic": {"HorovodAlltoall": 1, "HorovodAllgather": 1},
    "large": {"HorovodAllreduce": 2},  # each begins as soon as it is computed
    "of two dtypes": {"HorovodAllreduce": 2},
    "some sparse, some none": {"HorovodAllreduce": 1, "HorovodAllgather": 2},
}


@pytest.mark.parametrize(("launcher", "np_"), WAYS)
def test_small_gradients_travel_together_and_one_rank_exchanges_nothing(
    rank_facts: RankFacts, launcher: str, np_: int
) -> None:
    for facts in rank_facts("steps", launcher, np_):
        for name, expected in NUMBERS.items():
            assert facts["together"][name] == (expected if np_ > 1 else {}), name


@pytest.mark.parametrize(("launcher", "np_"), WAYS[1:])
def test_gradients_are_exchanged_beside_the_rest_of_the_backward_pass(
    rank_facts: RankFacts, launcher: str, np_: int
) -> None:
    for facts in rank_facts("steps", launcher, np_):
        assert facts["waiting"] == {"SyncStrategy": [0], "AfterAll": [0, 1, 2, 3]}


@pytest.mark.parametrize(("launcher", "np_"), WAYS[:2])
def test_those_that_travel_together_have_the_bits_of_those_that_travel_alone(
    rank_facts: RankFacts, launcher: str, np_: int
) -> None:
    for facts in rank_facts("steps", launcher, np_):
        assert set(map(tuple, facts["together"]["same"].values())) == {(True,) * 4}
