"""benchmarks/growth.py finds the costs that points were made with; benchmarks/projection.py finds its limits."""

from __future__ import annotations

import itertools
import json
import sys

import growth
import projection
import pytest
from conftest import PROJECT, run_process
from growth import Costs, Model, Point, Topology, fit, fit_lines, hops, sent_bytes
from projection import MOST_SHARE, Network, Part, build_parts, find_rank_limit, measure_rank_costs

from horovod_train.training import stopping

pytestmark = pytest.mark.long


CORES = 2
SIZES = {"convnet": (13_000_000, 0.04), "mlp": (284, 0.0004)}


def points(costs: Costs, topology: Topology, errors: tuple[float, ...] = (0.0,)) -> list[Point]:
    """What would be measured if the model were right, up to relative errors."""
    found, error, model = [], itertools.cycle(errors), Model(topology, CORES, costs)
    for ranks, (system, (size, compute_s)) in itertools.product((1, 2, 4, 8, 16), SIZES.items()):
        bare = Point(system, ranks, size, compute_s * max(1, ranks / CORES), 1.0, cycle_s=1e-4)
        step_s = model.predict(bare) * (1 + next(error))
        found.append(bare._replace(step_s=step_s))
    return found


@pytest.mark.parametrize("topology", ["ring", "tree"])
@pytest.mark.parametrize("costs", [Costs(2e-5, 1e-9, 1.1), Costs(1e-4, 0.0, 1.0), Costs(3e-6, 5e-10, 1.0)])
def test_the_fit_finds_the_costs_that_points_were_made_with(costs: Costs, topology: Topology) -> None:
    found = fit(points(costs, topology), topology, CORES)
    assert found.costs == pytest.approx(costs, rel=1e-6, abs=1e-18)


def test_residuals_say_how_far_points_are_from_the_model() -> None:
    made = points(Costs(2e-5, 1e-9, 1.0), "tree", errors=(0.05, -0.05, 0.0))
    model = fit(made, "tree", CORES)
    assert 0.01 < max(abs(model.residual(point)) for point in made) < 0.1
    *_, verdict, shared = fit_lines(made, model)
    assert "within the 15%" in verdict
    assert "with more than 2 ranks" in shared
    wrong = [point._replace(step_s=2 * point.step_s) if point.ranks == 4 else point for point in made]
    *_, verdict, _ = fit_lines(wrong, fit(wrong, "tree", CORES))
    assert "beyond the 15%" in verdict


def test_a_step_that_exchanges_waits_half_a_cycle_more() -> None:
    model = Model("tree", CORES, Costs(2e-5, 1e-9, 1.0))
    alone, shared = (Point("mlp", ranks, 284, 1e-3, 1.0, cycle_s=2e-3) for ranks in (1, 2))
    for point, wait_s in ((alone, 0.0), (shared, 1e-3)):
        without = point._replace(cycle_s=0.0)
        assert model.predict(point) - model.predict(without) == pytest.approx(wait_s)


def test_costs_are_never_negative() -> None:
    """Points whose steps are faster than those without exchange would give a negative α."""
    made = [point._replace(step_s=0.5 * point.compute_s / point.ranks) for point in points(Costs(0, 0, 1), "tree")]
    assert min(fit(made, "tree", CORES).costs) >= 0


def test_messages_go_round_a_ring_or_up_and_down_a_tree() -> None:
    assert [hops("ring", ranks) for ranks in (1, 2, 512)] == [0, 2, 1022]
    assert [hops("tree", ranks) for ranks in (1, 2, 3, 512)] == [0, 1, 2, 9]
    assert sent_bytes(1, 100) == 0
    assert sent_bytes(4, 100) == 150


@pytest.fixture(scope="module")
def parts() -> dict[str, Part]:
    return {part.name: part for part in build_parts(measure_rank_costs(512), step_s=0.1)}


RING, TREE = (Network(25e9, 20e-6, topology) for topology in ("ring", "tree"))


def test_what_this_machine_takes_is_measured(parts: dict[str, Part]) -> None:
    assert min(measure_rank_costs(64)) > 0
    for part in parts.values():
        assert 0 < part.seconds(64, TREE) <= part.seconds(512, TREE) <= part.seconds(512, RING)


@pytest.mark.parametrize("network", [RING, TREE])
def test_the_limit_is_where_the_share_passes_it(parts: dict[str, Part], network: Network) -> None:
    for part in parts.values():
        if part.interval_s is not None and (limit := find_rank_limit(part, network)) is not None and limit > 2:
            assert part.share(limit - 1, network) <= MOST_SHARE < part.share(limit, network)


def test_a_vote_stays_below_a_percent_only_because_hundreds_of_ranks_vote_less_often(
    parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_rank_limit(parts["vote"], RING) is None
    monkeypatch.setattr(stopping, "RING_RANKS", 10**9)
    limit = find_rank_limit(parts["vote"], RING)
    assert limit is not None
    assert 64 < limit < 512


@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ("growth.py", ["--np", "1,x"], "--np: expected a whole number of at least 1; received 'x'"),
        ("growth.py", ["--np", "1,2"], "--np: a fit needs two numbers above 1, such as 1,2,4; received fewer."),
        ("growth.py", ["--contender", "gloo"], "--contender: invalid choice: 'gloo' (choose from "),
        ("growth.py", ["--rounds", "0"], "--rounds: expected a whole number of at least 1"),
        ("projection.py", ["--to", "1"], "--to: expected numbers of at least 2 ranks; received 1."),
        ("projection.py", ["--gbit", "0"], "--gbit: expected a number above 0; received '0'"),
        ("projection.py", ["--gbit", "inf"], "--gbit: expected a number above 0; received 'inf'"),
        ("projection.py", ["--hop-us", "-1"], "--hop-us: expected a number above 0; received '-1'"),
    ],
)
def test_bad_words_are_one_line(
    script: str, words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit, match="2"):
        {"growth.py": growth, "projection.py": projection}[script].main()
    line = capsys.readouterr().err.splitlines()[-1]
    assert expected in line


@pytest.mark.exhaustive
def test_three_numbers_of_ranks_are_measured_and_fitted() -> None:
    words = ["--np", "1,2,3", "--rounds", "1", "--seconds", "0.5", "--json"]
    finished = run_process([sys.executable, str(PROJECT / "benchmarks" / "growth.py"), *words])
    assert finished.returncode == 0, finished.text
    found = json.loads(finished.stdout)
    assert [(row["ranks"], row["system"]) for row in found["points"]] == [
        (ranks, system) for ranks in (1, 2, 3) for system in ("convnet", "mlp")
    ]
    topology: Topology = "tree" if found["contender"].startswith("MPI") else "ring"
    model = Model(topology, found["cores"], Costs(**found["costs"]))
    for row in found["points"]:
        point = Point(*(row[name] for name in Point._fields))
        assert row["residual"] == pytest.approx(model.residual(point))
