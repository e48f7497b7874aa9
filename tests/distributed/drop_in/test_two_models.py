"""Two models in one step of a script train as in one process, also if their exchanges are under way together."""

from __future__ import annotations

import pytest
from conftest import RankFacts

pytestmark = pytest.mark.long


@pytest.mark.parametrize("what", ["batch_norm", "one_name"])
def test_exchanges_of_two_models_are_not_mixed_up(rank_facts: RankFacts, what: str) -> None:
    """Synchronised BatchNorm in both; two optimizers that were given the same name."""
    for facts in rank_facts("two_models", "srun", 2):
        assert isinstance(facts[what], float), facts[what]
        assert facts[what] < 1e-4
