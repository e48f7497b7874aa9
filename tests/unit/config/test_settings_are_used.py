"""Every setting is either used, or refused together with what makes it useless: all pairs that one rank can build.

"Used" is what a run of one rank reads of its config, beside what looks at all settings alike; see runs_of_settings. So
a setting that nothing reads fails here, and so does one that nothing reads beside some other one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from conftest import rank_environment, run_process
from made_records import make_images
from setting_samples import (
    ELSEWHERE,
    PAIRS,
    REFUSED_WHEN_BUILT,
    SAMPLES,
    Sample,
    Values,
    as_tree,
    built,
    cover,
    is_refused_when_built,
    leaves,
    merged,
    refusal,
    required,
    values_of,
)

from horovod_train.config.rules import NEEDS, keys_of
from horovod_train.config.settings import Config


class Job(NamedTuple):
    values: Values
    exit_code: int
    stderr: str
    read: set[str]

    def unread(self) -> set[str]:
        """Settings that are not at their default, and that the run had no use for."""
        config = built(self.values)
        given = {key for key, _, field in leaves() if _is_given(config, key, field)}
        return given - self.read - set(ELSEWHERE)


def _is_given(config: Config, key: str, field: dataclasses.Field[Any]) -> bool:
    value: Any = config
    for name in key.split("."):
        if value is None:
            return False
        value = getattr(value, name)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(value != default)


def run(folder: Path, all_values: Iterable[Values], unchecked: Sequence[Values] = ()) -> list[Job]:
    """Trains with each, on one rank. unchecked: some of them, with which the rules between settings are left out."""
    make_images(folder / "data" / "train", [20, 7])
    make_images(folder / "data" / "eval", [9])
    jobs, tried = [], list(all_values)
    for number, values in enumerate(tried):
        path = folder / f"{number}.yaml"
        path.write_text(yaml.safe_dump(as_tree(values)).replace("{here}", str(folder)))
        words = ["--config", str(path), "--output-dir", str(folder / f"run-{number}")]
        jobs.append({"words": words, "unchecked": values in unchecked})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).parent / "runs_of_settings.py"
    environment = rank_environment()
    environment["PYTHONPATH"] += f":{script.parent}"
    command = [sys.executable, str(script), str(folder / "jobs.json"), str(folder / "found.json")]
    finished = run_process(command, timeout_s=1200, environment=environment)
    assert finished.returncode == 0, finished.text
    found = json.loads((folder / "found.json").read_text())
    return [
        Job(values, job["exit_code"], job["stderr"], set(job["read"])) for values, job in zip(tried, found, strict=True)
    ]


def assert_all_are_used(jobs: Iterable[Job]) -> None:
    for job in jobs:
        assert job.exit_code == 0, job.stderr
        assert not job.unread(), job.values


# --- what the rules say -----------------------------------------------------------------------------------------------


def test_each_setting_alone_is_accepted() -> None:
    assert {s.name: refused for s in SAMPLES if (refused := refusal(merged([s])))} == {}


def test_each_pair_is_accepted_or_refused_in_one_line_that_names_a_setting() -> None:
    refused = [said for pair in PAIRS if (said := refusal(merged(pair)))]
    keys = {key for key, _, _ in leaves()}
    assert len(refused) < len(PAIRS) / 10
    assert all("\n" not in said and said.partition(": ")[0] in keys for said in refused)


@pytest.mark.parametrize(("key", "need"), [(key, need) for key, needs in NEEDS.items() for need in needs])
def test_a_setting_is_refused_without_what_it_needs(key: str, need: str) -> None:
    sample = next(sample for sample in SAMPLES if sample.key == key)
    kinds = {name: (hint, field) for name, hint, field in leaves()}
    said = []
    for other in itertools.product(*([None, kinds[k][1].default, *values_of(k, *kinds[k])] for k in keys_of(need))):
        without = [
            Sample(k, list(value) if value == () else value, {}) for k, value in zip(keys_of(need), other, strict=True)
        ]
        without = [one._replace(required=required(one)) for one in without]
        said.append(refusal(merged([sample]) | merged(without)))
    assert any(line and line.startswith(f"{key}: has no effect unless {need}; ") for line in said)


# --- what runs do -----------------------------------------------------------------------------------------------------


IGNORED: Values = {"train.max_skips_in_a_row": 11, "train.average_every_steps": 2, "log.activations": {}}
"""Two settings that the rules refuse because nothing would read them, and one that is at its default."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Job]]:
    """One start of TensorFlow for all: what goes together, what is refused when built, what is ignored."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {
        "used": list(map(merged, cover((s,) for s in SAMPLES if not is_refused_when_built([s])))),
        "refused": [merged(named(names)) for names in REFUSED_WHEN_BUILT],
        "ignored": [IGNORED],
    }
    done = iter(run(folder, itertools.chain(*kinds.values()), unchecked=kinds["ignored"]))
    return {kind: list(itertools.islice(done, len(values))) for kind, values in kinds.items()}


def named(names: Iterable[str]) -> list[Sample]:
    return [next(sample for sample in SAMPLES if name in (sample.key, sample.name)) for name in names]


@pytest.mark.long
def test_each_setting_is_read_by_a_run(jobs: dict[str, list[Job]]) -> None:
    assert_all_are_used(jobs["used"])


@pytest.mark.long
def test_what_only_the_parts_of_a_run_can_refuse_they_do(jobs: dict[str, list[Job]]) -> None:
    for job, said in zip(jobs["refused"], REFUSED_WHEN_BUILT.values(), strict=True):
        assert job.exit_code == 2
        (line,) = job.stderr.splitlines()
        assert line.startswith(f"error: {said}")


@pytest.mark.long
def test_a_setting_that_nothing_reads_is_found(jobs: dict[str, list[Job]]) -> None:
    (job,) = jobs["ignored"]
    assert job.unread() == {"train.max_skips_in_a_row", "train.average_every_steps"}
    with pytest.raises(AssertionError):
        assert_all_are_used([job])


@pytest.mark.exhaustive
def test_each_setting_is_read_beside_each_other_one(tmp_path: Path) -> None:
    accepted = (pair for pair in PAIRS if not is_refused_when_built(pair) and refusal(merged(pair)) is None)
    assert_all_are_used(run(tmp_path, map(merged, cover(accepted))))
