"""benchmarks/peers.py compares trainings that exchange, and refuses words that it cannot use."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import peers
import pytest
from conftest import PROJECT, run_process
from peers import BARE, CEILING, table
from rank_programs import timing

from horovod_train.errors import RunError

pytestmark = pytest.mark.long


OURS = peers.PROJECT


def test_ratios_are_of_medians_and_of_the_fastest_way_of_this_project() -> None:
    rates = {
        CEILING: [1000.0, 900.0, 2000.0],
        f"{OURS} over MPI": [800.0, 850.0, 100.0],
        f"{OURS} over gloo": [500.0, 500.0, 500.0],
        "another": [400.0, 300.0, 900.0],
    }
    _, _, *rows = table(rates, records=100)
    assert rows == [
        f"| {CEILING} | 1,000 | 10.0 | 900 to 2,000 | 1.00 | 1.25 |",
        f"| {OURS} over MPI | 800 | 8.0 | 100 to 850 | 0.80 | 1.00 |",
        f"| {OURS} over gloo | 500 | 5.0 | 500 to 500 | 0.50 | 0.62 |",
        "| another | 400 | 4.0 | 300 to 900 | 0.40 | 0.50 |",
    ]
    *_, row = table({CEILING: [10.0], "another": [5.0]}, records=10)
    assert row == "| another | 5 | 0.5 | 5 to 5 | 0.50 | — |"
    *_, row = table({BARE: [10.0], OURS: [5.0]}, records=10)
    assert row == f"| {OURS} | 5 | 0.5 | 5 to 5 | 0.50 | 1.00 |"


def test_the_first_fifth_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def call() -> None:
        nonlocal now
        now += 100.0 if now < 200 else 1.0  # the first two calls compile

    system = timing.SYSTEMS["convnet"]
    assert timing.measure(call, system, 100, size=2) == pytest.approx(64 * 2 * system.steps_per_call / 1.0)


@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_train_models_of_their_own_are_no_contender(tmp_path: Path, same: bool) -> None:
    for rank in range(2):
        found = {"records_per_s": 100.0, "weights_sha256": "a" if same else f"{rank}"}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(found))
    if same:
        assert peers.read_speed(tmp_path, 2) == 100.0
    else:
        with pytest.raises(RunError, match="its ranks have ended with different weights: they train 2 models"):
            peers.read_speed(tmp_path, 2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--np", "0"], "--np: expected a whole number of at least 1"),
        (["--rounds", "0"], "--rounds: expected a whole number of at least 1"),
        (["--steps", "10"], "--steps must be at least 100; received 10."),
        (["--system", "mlp", "--steps", "1999"], "--steps must be at least 2000; received 1999."),
        (["--records", "100", "--np", "2"], "--records must be at least 128"),
        (["--only", "jax"], "--only ['jax']: no contender's name holds it; there are "),
    ],
)
def test_bad_words_are_one_line(
    words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", *words])
    with pytest.raises(SystemExit, match="2"):
        peers.main()
    assert expected in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("system", "steps"), [("convnet", 100), ("mlp", 2000)])
def test_stock_horovod_and_tf_distribute_run_beside_this_project(system: str, steps: int) -> None:
    names = [word for name in ("over gloo", "MultiWorker") for word in ("--only", name)]
    found = measured("--system", system, "--steps", str(steps), *names)
    tuned = ["stock"] * (system == "mlp")
    firsts = [name.split()[0] for name in found if not name.startswith("PyTorch")]
    assert firsts == ["this", "this", "stock", *tuned, "tf.distribute"]


@pytest.mark.exhaustive
def test_one_rank_runs_beside_a_loop_of_tensorflow() -> None:
    assert list(measured("--np", "1", "--system", "mlp", "--steps", "2000")) == [BARE, OURS]


def measured(*words: str) -> dict[str, list[float]]:
    """Records a second by contender, of one round."""
    command = [sys.executable, str(PROJECT / "benchmarks" / "peers.py"), *words]
    finished = run_process([*command, "--rounds", "1", "--records", "640", "--json"])
    assert finished.returncode == 0, finished.text
    found: dict[str, list[float]] = json.loads(finished.stdout)["records_per_s"]
    assert all(len(rates) == 1 and rates[0] > 0 for rates in found.values())
    return found
