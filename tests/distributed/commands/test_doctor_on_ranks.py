"""The command `doctor` alone and under real launchers, and its checks on ranks where something is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished, RankFacts, launcher_command, run_process, train

pytestmark = pytest.mark.long

CHECKS = [
    "versions", "same everywhere", "horovod", "launcher", "hosts", "devices", "threads", "settings", "averaging",
    "group sums", "exchange speed", "network", "file system", "clocks",
]  # fmt: skip


Visit = tuple[str, Finished, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=["mpirun", pytest.param("horovodrun", marks=pytest.mark.exhaustive)])
def visit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    """Launcher, what was shown and the findings, at np=2."""
    out = tmp_path_factory.mktemp("doctor") / "found.json"
    finished = train(["doctor", "--json", out, "--dir", out.parent], launcher=request.param, np=2, fresh=True)
    assert finished.returncode == 0, finished.text
    return request.param, finished, json.loads(out.read_text())["checks"]


def by_name(checks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in checks}


def test_every_check_gives_one_line_and_nothing_fails(visit: Visit) -> None:
    _, finished, checks = visit
    assert [check["name"] for check in checks] == CHECKS
    assert {check["level"] for check in checks} <= {"ok", "warning"}
    for check in checks:
        lines = [line for line in finished.stdout.splitlines() if check["text"] in line]
        assert len(lines) == 1, check
        assert check["level"] in lines[0]
    assert "\x1b" not in finished.stdout  # no colours in a file, though mpirun gives its ranks a terminal


def test_what_the_ranks_use_is_told(visit: Visit) -> None:
    launcher, _, checks = visit
    found = by_name(checks)
    exchange = {"horovodrun": "gloo", "mpirun": "MPI"}[launcher]
    assert found["horovod"]["facts"]["exchange"] == found["horovod"]["facts"]["controller"] == exchange
    assert {"gloo", "MPI"} <= set(found["horovod"]["facts"]["built"])
    assert found["launcher"]["facts"]["counts"] == {"Horovod": 2} | ({"MPI": 2} if launcher == "mpirun" else {})
    settings = {setting["name"]: setting for setting in found["settings"]["facts"]["settings"]}
    assert settings["HOROVOD_CYCLE_TIME"]["origin"] == "default"
    # conftest's rank_environment sets this one.
    assert settings["HOROVOD_STALL_CHECK_TIME_SECONDS"]["origin"] == "environment"


def test_speed_is_measured_beside_mpi_where_mpi_runs(visit: Visit) -> None:
    launcher, _, checks = visit
    rows = by_name(checks)["exchange speed"]["facts"]["allreduce"]
    assert [row["bytes"] for row in rows] == [4, 4096, 65536, 1 << 20, 16 << 20]
    for row in rows:
        assert row["seconds"] > 0
        assert (row["mpi_s"] is not None) == (launcher == "mpirun")
    assert rows[-1]["gb_per_s"] > rows[0]["gb_per_s"]


def test_alone_it_examines_the_machine() -> None:
    finished = train(["doctor", "--json"])
    assert finished.returncode == 0, finished.text
    found = by_name(json.loads(finished.stdout)["checks"])
    assert found["launcher"]["facts"]["launcher"] == "none"
    assert "one rank has nothing to average" in found["averaging"]["text"]


@pytest.fixture(scope="module")
def doctored(rank_facts: RankFacts) -> dict[str, list[str]]:
    facts = rank_facts("doctored", "srun", 2)
    levels = [{name: level for name, (level, _) in rank["found"].items()} for rank in facts]
    assert levels[0] == levels[1]  # all ranks come to one verdict
    assert facts[0]["left"] == []
    return facts[0]["found"]


@pytest.mark.parametrize("name", ["right", "shared", "clocks"])
def test_what_is_right_is_found_right(doctored: dict[str, list[str]], name: str) -> None:
    assert doctored[name][0] == "ok", doctored[name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stock", "weights are off the mean"),  # Horovod's own wrapper under Keras 3
        ("apart", "does not see root's file"),
        ("nowhere", "root cannot write to /nowhere"),
        ("config", "on config: rank 1"),
    ],
)
def test_what_is_wrong_is_found_wrong(doctored: dict[str, list[str]], name: str, text: str) -> None:
    level, said = doctored[name]
    assert level == "fail"
    assert text in said


def test_settings_that_are_shown_are_those_that_horovod_finds(rank_facts: RankFacts) -> None:
    for facts in rank_facts("doctored", "srun", 2):
        assert facts["settings"]
        assert all(shown == set_ for shown, set_ in facts["settings"].values())


def test_a_check_that_hangs_on_one_rank_is_named_with_it_after_what_was_found_before(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(
        "import os, threading\n"
        "from horovod_train.main import entry\n"
        "if os.environ['HOROVOD_RANK'] == '1':\n"
        "    from horovod_train.output import logs\n"
        "    logs.load_tensorflow()\n"
        "    from horovod_train.commands import doctor_checks\n"
        "    doctor_checks.list_interfaces = lambda: threading.Event().wait()\n"
        "entry()\n"
    )
    words = [sys.executable, str(program), "doctor", "--timeout", "60", "--dir", str(tmp_path)]
    finished = run_process([*launcher_command("horovodrun", 2), *words])
    assert finished.returncode, finished.text  # horovodrun ends with 1 whatever a rank ends with
    shown = finished.stdout + finished.stderr
    assert "ends at the mean on all ranks" in shown
    assert "rank 1" in shown
    assert "in network for" in shown
    assert "Traceback" not in finished.stdout


def test_a_rank_that_does_not_come_is_not_waited_for_forever(tmp_path: Path) -> None:
    script = tmp_path / "late.sh"
    script.write_text(
        'if [ "$HOROVOD_RANK" = 1 ]; then exec sleep 600; fi\n'
        f'exec "{sys.executable}" -m horovod_train.main doctor --timeout 3\n'
    )
    finished = run_process([*launcher_command("horovodrun", 2), "sh", str(script)])
    assert finished.returncode != 0
    assert "the ranks did not come together within 3 s" in finished.stdout + finished.stderr, finished.text
