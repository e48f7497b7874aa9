"""Hooks of the user's own on two ranks."""

from __future__ import annotations

from pathlib import Path

from conftest import PROJECT, RankFacts, train

WAY = ("mpirun", 2)


def test_users_hooks_are_called_on_every_rank_at_their_steps(rank_facts: RankFacts) -> None:
    for facts in rank_facts("hooked", *WAY):
        assert facts["without"]["called"] == []
        assert facts["noted"]["called"] == [4, 5, 8, 10, 12]


def test_a_hook_that_looks_changes_nothing(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("hooked", *WAY)
    assert root["noted"]["weights_sha256"] == root["without"]["weights_sha256"] is not None


def test_a_reason_of_one_rank_stops_all_ranks_at_this_step(rank_facts: RankFacts) -> None:
    found = rank_facts("hooked", *WAY)
    assert [facts["stopped"]["code"] for facts in found] == [75, 75]
    assert found[0]["stopped"]["steps"] == 6
    assert found[0]["stopped"]["ended"] == "rank 1 has had enough"


def test_a_run_that_a_hook_has_stopped_resumes_where_it_stopped(rank_facts: RankFacts) -> None:
    found = rank_facts("hooked", *WAY)
    assert [facts["resumed"]["code"] for facts in found] == [0, 0]
    assert [facts["resumed"]["called"] for facts in found] == [[8, 12], [8, 12]]
    assert found[0]["resumed"]["weights_sha256"] == found[0]["without"]["weights_sha256"]


def test_a_hook_that_fails_on_one_rank_ends_all_though_the_others_wait_for_it(digits: Path, tmp_path: Path) -> None:
    config = PROJECT / "configs" / "digits_convnet.yaml"
    words = ["--config", config, f"data.train={digits}/train", f"data.eval={digits}/eval", "model=user_models:small"]
    words += ["log={every_steps: 2, tensorboard: false}", "hooks=user_hooks:fail_while_others_meet"]
    finished = train([*words, "--output-dir", tmp_path / "run"], launcher="mpirun", np=2)
    assert finished.returncode == 1, finished.text
    assert "hooks: user_hooks:fail_while_others_meet failed after step 2: ValueError: the hook has slipped" in (
        finished.stderr
    )
    assert "rank 1 (" in finished.stderr
    assert "Traceback" not in finished.stderr
