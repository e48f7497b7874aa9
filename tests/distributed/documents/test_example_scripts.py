"""The example scripts, run on two ranks as their heads say."""

from __future__ import annotations

import re

import pytest
from conftest import PROJECT, launcher_command, run_process, warm_python


def last_figure(script: str) -> float:
    """Of what rank 0 prints."""
    finished = run_process([*launcher_command("srun", 2), *warm_python(), str(PROJECT / "examples" / f"{script}.py")])
    assert finished.returncode == 0, finished.text
    assert not re.search(r"^(error|stopped|warning):", finished.stderr, re.MULTILINE), finished.text
    return float(re.findall(r"\d+\.\d+", finished.stdout)[-1])


@pytest.mark.parametrize(
    "script",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("fit", "elastic")),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("tape", "data_service")),
    ],
)
def test_scripts_that_classify_digits_learn_to(script: str) -> None:
    assert last_figure(script) > 0.85


@pytest.mark.exhaustive  # see test_own_steps and test_users_parts
def test_the_model_with_its_own_step_reproduces_digits() -> None:
    assert last_figure("train_step") < 0.06  # 0.14 is the variance of the pixels


@pytest.mark.long
def test_the_two_optimizers_of_the_gan_train() -> None:
    assert 0.3 < last_figure("gan") < 1.38  # 1.386 is a discriminator that knows nothing


@pytest.mark.exhaustive
def test_a_new_head_on_a_frozen_network_trains() -> None:
    assert last_figure("transfer") > 0.25
