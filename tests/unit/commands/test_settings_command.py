"""The reference of all settings follows the dataclasses, and the schema takes what a run takes."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml
from conftest import PROJECT

from horovod_train.commands.settings import entries, json_schema, markdown
from horovod_train.config.loader import as_dict
from horovod_train.config.settings import Config
from horovod_train.main import main

# Links are the old names of configs.
CONFIGS = sorted(path for path in (PROJECT / "configs").glob("*.yaml") if not path.is_symlink())


def errors(values: object) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(json_schema()).iter_errors(values)]


def test_the_page_of_settings_is_current() -> None:
    assert (PROJECT / "docs" / "configuration.md").read_text() == markdown(), (
        "run: python -m horovod_train.main settings --markdown > docs/configuration.md"
    )


def test_no_key_is_broken_over_lines_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    first_words = [line.split(" ", 1)[0] for line in capsys.readouterr().out.splitlines()]
    assert [entry.key for entry in entries() if entry.key not in first_words] == []


def test_every_setting_has_a_meaning() -> None:
    assert all(entry.meaning for entry in entries())


def test_the_schema_is_one() -> None:
    validator = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)
    assert [error.message for error in validator.iter_errors(json_schema())] == []
    assert not validator.is_valid({**json_schema(), "type": "mapping"})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_schema_takes_each_config(path: Path) -> None:
    assert not errors(yaml.safe_load(path.read_text()))


def test_the_schema_takes_the_resolved_config_of_a_run_directory() -> None:
    assert not errors(as_dict(Config()))


@pytest.mark.parametrize(
    "values",
    [
        {"trian": {"epochs": 1}},
        {"train": {"epoch": 1}},
        {"train": {"epochs": 0}},
        {"train": {"epochs": "two"}},
        {"seed": 2**32},
        {"data": {"eval_fraction": 1.5}},
        {"train": {"max_time": "1:2"}},
        {"horovod": {"op": "mean"}},
        {"model": {"nam": "mlp"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_a_run_refuses(values: object) -> None:
    assert errors(values)


def test_the_command_shows_a_section_and_refuses_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "checkpoint"]) == 0
    shown = capsys.readouterr().out
    assert "checkpoint.keep" in shown
    assert "horovod.op" not in shown
    assert main(["settings", "chekpoint"]) == 2
    assert "did you mean checkpoint" in capsys.readouterr().err
