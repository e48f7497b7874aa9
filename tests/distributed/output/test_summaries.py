"""Histograms show what the ranks train on, and computing them leaves no trace in the run."""

from __future__ import annotations

import pytest
from conftest import RankFacts

pytestmark = pytest.mark.long


WAYS = [pytest.param("none", 1, marks=pytest.mark.exhaustive), ("mpirun", 2)]


@pytest.mark.parametrize(("launcher", "np"), WAYS)
@pytest.mark.parametrize("name", ["alone", "update", "accumulated", "loss_scale", "outputs"])
def test_values_are_those_of_one_process_on_the_records_of_all_ranks(
    rank_facts: RankFacts, launcher: str, np: int, name: str
) -> None:
    for facts in rank_facts("summaries", launcher, np):
        assert facts["errors"][name] < 2e-5


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_the_gradient_of_some_of_the_records_is_another(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("summaries", launcher, np):
        assert facts["own_is_not_enough"] > 1e-2


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_seeds_statistics_metrics_and_weights_stay_as_they_were(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("summaries", launcher, np):
        assert facts["finite"]
        assert facts["left_as_it_was"]
        assert facts["call_is_the_layers_own"]


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_a_forward_pass_in_training_would_not_leave_them(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("summaries", launcher, np):
        assert not facts["forward_leaves_it"]


def test_weights_outputs_and_gradients_have_the_names_of_their_layers(rank_facts: RankFacts) -> None:
    for facts in rank_facts("summaries", "mpirun", 2):
        weights = ["plain/hidden/kernel", "plain/hidden/bias", "plain/logits/kernel", "plain/logits/bias"]
        assert facts["names"] == [*weights, *(f"gradients/{name}" for name in weights), "y_hidden", "also"]
        assert facts["both_names"]


def test_a_subclassed_model_shows_each_call_of_a_layer_and_the_rows_of_a_sparse_gradient(rank_facts: RankFacts) -> None:
    for facts in rank_facts("summaries", "mpirun", 2):
        assert {"twice/0", "twice/1"} <= {*facts["subclassed"]}
        assert "twice/2" not in facts["subclassed"]
        assert len([name for name in facts["subclassed"] if name.startswith("gradients/")]) == 5
        held, looked_up = facts["sparse_rows"]
        assert held == looked_up


def test_an_unknown_layer_is_named_with_those_near_it(rank_facts: RankFacts) -> None:
    for facts in rank_facts("summaries", "mpirun", 2):
        expected = "log.activations.y_hidden: the model has no layer 'hiden'; did you mean hidden?"
        assert facts["unknown_layer"] == expected
