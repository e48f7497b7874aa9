"""Synchronised BatchNorm on N ranks is BatchNorm in one process on the records of all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import RankFacts, run_process

WAYS = [("none", 1), ("srun", 2), ("mpirun", 3), ("mpirun", 4)]

pytestmark = pytest.mark.exhaustive  # test_differential.py holds one against fit


@pytest.mark.parametrize(("launcher", "np"), WAYS)
@pytest.mark.parametrize("kind", ["weights", "statistics"])
def test_n_ranks_normalise_like_one_process(rank_facts: RankFacts, launcher: str, np: int, kind: str) -> None:
    """Images and features, a layer in a model inside, one called twice, and a last step with uneven shares."""
    for facts in rank_facts("sync_batch_norm", launcher, np):
        assert facts["errors"][kind] < 2e-5


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_weights_and_statistics_are_equal_to_the_bit_on_all_ranks(
    rank_facts: RankFacts, launcher: str, np: int
) -> None:
    assert len({facts["sha"] for facts in rank_facts("sync_batch_norm", launcher, np)}) == 1


@pytest.mark.parametrize(("launcher", "np"), WAYS[1:])
@pytest.mark.parametrize("name", ["plain", "keras_synchronized"])
def test_batch_norm_of_each_rank_by_itself_is_another(rank_facts: RankFacts, launcher: str, np: int, name: str) -> None:
    """The negative of the above; and Keras' own synchronized=True knows nothing of Horovod's ranks."""
    for facts in rank_facts("sync_batch_norm", launcher, np):
        assert facts[name]["weights"] > 1e-2
        assert facts[name]["statistics"] > 1e-2


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_each_accumulated_part_is_normalised_over_all_ranks(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("sync_batch_norm", launcher, np):
        assert max(facts["in_parts"].values()) < 2e-5


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_variance_is_exact_far_from_zero(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("sync_batch_norm", launcher, np):
        assert facts["far_from_zero"] < 1e-3  # what float32 resolves at 3000: 0.0002


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_masked_positions_do_not_count(rank_facts: RankFacts, launcher: str, np: int) -> None:
    for facts in rank_facts("sync_batch_norm", launcher, np):
        assert facts["masked"] < 1e-5
        assert facts["masked_statistics"] < 1e-5


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_inference_exchanges_nothing(rank_facts: RankFacts, launcher: str, np: int) -> None:
    assert rank_facts("sync_batch_norm", launcher, np)[0]["inference"] < 1e-4


def test_what_cannot_be_synchronised_is_refused(rank_facts: RankFacts) -> None:
    facts = rank_facts("sync_batch_norm", "srun", 2)[0]
    none, renorm, own = facts["refused"]
    assert none == "hvd.synchronise_batch_norm: the model has no BatchNormalization layer. Leave it out."
    assert renorm.startswith("hvd.synchronise_batch_norm: cannot synchronise layer ")
    assert renorm.endswith("/re: it has renorm=True.")
    assert own.endswith("/own: it has its own call() (Own).")


def test_saved_model_has_plain_layers(rank_facts: RankFacts, tmp_path: Path) -> None:
    facts = rank_facts("sync_batch_norm", "srun", 2)[0]
    script = f"""
import sys
sys.modules["horovod"] = sys.modules["horovod_train"] = None  # an import of them would raise
import keras, numpy as np
model = keras.saving.load_model({facts["saved"]!r})
x = np.random.default_rng(0).normal(5.0, 2.0, size=(8, 4, 4, 2)).astype(np.float32)[:2]
print(*model.predict(x, verbose=0).ravel())
"""
    finished = run_process([sys.executable, "-c", script], cwd=tmp_path)
    assert finished.returncode == 0, finished.text
    expected = [value for row in facts["prediction"] for value in row]
    assert [float(word) for word in finished.stdout.split()] == pytest.approx(expected, rel=1e-4, abs=1e-5)
