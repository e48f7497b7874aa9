"""A path on another machine is refused in one line, and nothing is made for it here; except where records are read."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_train.commands.cli import Parser
from horovod_train.config.loader import load
from horovod_train.config.settings import Config
from horovod_train.errors import UserError
from horovod_train.main import COMMANDS, _parser, main

REMOTE = "gs://bucket/runs/a"


def string_settings(cls: Any, prefix: str = "") -> Iterator[str]:
    """Every setting that takes a string."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, path = hints[field.name], f"{prefix}{field.name}"
        if typing.get_origin(hint) is dict:
            continue  # options of somebody's function, which may take addresses
        inner = [one for one in types_in(hint) if isinstance(one, type)]
        for nested in filter(dataclasses.is_dataclass, inner):
            yield from string_settings(nested, f"{path}.")
        if str in inner:
            yield path


def types_in(hint: Any) -> list[Any]:
    return [hint, *(inner for argument in typing.get_args(hint) for inner in types_in(argument))]


READ = {"data.train", "data.train.path", "data.eval"}
"""Those that name records, which are read from some remote places; see test_object_stores."""
SETTINGS = [key for key in string_settings(Config) if key not in READ]


def test_the_settings_that_are_known_to_be_paths_are_among_those_tried() -> None:
    known = {"output_dir", "data.index_dir", "data.stage_dir", "checkpoint.resume"}
    assert known <= set(SETTINGS)
    assert set(string_settings(Config)) >= READ


@pytest.mark.parametrize(
    ("key", "path"),
    [
        *((key, REMOTE) for key in SETTINGS),
        *(("output_dir", path) for path in ("s3://a", "hdfs://host:9000/x", "file:///x", "S3A://a")),
    ],
)
def test_no_setting_takes_a_remote_path(key: str, path: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("data: {train: here, global_batch_size: 8}\ntrain: {epochs: 1}\n")
    name, value = key, path
    if key.startswith(("metrics.", "data.augment.")):
        name, _, own = key.rpartition(".")
        value = f"[{{name: x, {own}: '{path}'}}]" if own != "name" else f"[{{name: '{path}'}}]"
    with pytest.raises(UserError, match=rf"^command line: {name}.*: expected a local path; received {path}\. "):
        load([str(config)], [f"{name}={value}"])


WITH_SECRETS = ["http://user:s3cret@host:9/x", "s3://b/x?key=s3cret", "postgresql://user:s3cret@db"]
OPTIONS = [f"{key}.options.uri" for key in ("model", "loss", "optimizer", "data.source", "data.dataset")]
LISTS = ["log.trackers", "callbacks", "metrics", "data.augment"]


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        *((key, WITH_SECRETS[0]) for key in [*SETTINGS, *sorted(READ), *OPTIONS, "data.features.x", *LISTS]),
        *(("output_dir", secret) for secret in WITH_SECRETS[1:]),
    ],
)
def test_no_setting_takes_a_secret_and_none_is_repeated(key: str, secret: str) -> None:
    name, value = key, f"'{secret}'"
    if key in LISTS:
        value = f"[{{name: x, options: {{a: [{{uri: '{secret}'}}]}}}}]"
    if key.startswith(("metrics.", "data.augment.", "data.train.")):
        name, _, own = key.rpartition(".")
        value = f"[{{{own}: '{secret}'}}]"
    words = ["data.global_batch_size=8", "train.epochs=1", "data.train=here"]
    said = rf"^command line: {name}[\w.]*: must not hold a password or a key; "
    with pytest.raises(UserError, match=said) as error:
        load([], [*words, f"{name}={value}"])
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("secret", WITH_SECRETS)
def test_no_error_repeats_a_secret(secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        [secret],
        ["--config", secret],
        ["--config", "digits_convnet", f"{secret}"],
        ["--config", "digits_convnet", f"train.epochs={secret}"],
        ["--config", "digits_convnet", f"model.options=[{{'{secret}'"],
        ["--config", "digits_convnet", f"model.options={{'{secret}': 1}}"],
        ["--config", "digits_convnet", "--output-dir", secret],
        ["explain", secret],
        ["check-data", secret],
    ):
        assert main(words) == 2
        said = capsys.readouterr()
        assert "s3cret" not in said.out + said.err
        assert said.err.count("\n") == 1


@pytest.mark.parametrize("value", ["{path}", "[here, '{path}']", "[{{path: '{path}', repeats: 2}}]"])
def test_records_are_read_from_remote_places_that_there_are_drivers_for(value: str) -> None:
    words = ["data.global_batch_size=8", "train.epochs=1"]
    for path in (REMOTE, "s3://a", "hdfs://host:9000/x", "memory://a"):
        config, _ = load([], [*words, f"data.train={value.format(path=path)}"])
        assert path in config.data.paths("train")
    for path in ("file:///x", "S3A://a", "ftp://a"):
        with pytest.raises(UserError, match=r"^command line: data\.train.*: expected a local path, or one that begins"):
            load([], [*words, f"data.train={value.format(path=path)}"])


def arguments(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every argument of a command and of the commands below it that takes any string: words that give it, its name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from arguments(below, (*words, name))
        elif action.nargs != 0 and action.type is None and not action.choices:
            name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
            needed = (
                other for other in parser._actions if other.required and other.nargs not in ("*", argparse.REMAINDER)
            )
            required = [other for other in needed if other is not action]
            yield (*words, *(word for other in required for word in _give(other, "x")), *_give(action, REMOTE)), name


def _give(action: argparse.Action, word: str) -> list[str]:
    if isinstance(action, argparse._SubParsersAction):
        return []
    value = word
    if word == "x" and action.type is not None:
        value = "1"
    elif word == "x" and "--time" in action.option_strings:
        value = "1:00:00"
    # "=", since several words may follow an option.
    return [f"{action.option_strings[0]}={value}"] if action.option_strings else [value]


def all_arguments() -> Iterator[tuple[tuple[str, ...], str]]:
    yield from arguments(_parser(), ())
    for name, (module, _) in COMMANDS.items():
        parser = Parser(prog=f"horovod_train.main {name}")
        importlib.import_module(module).add_arguments(parser)
        yield from arguments(parser, (name,))


GIVEN = list(all_arguments())


def test_the_arguments_that_are_known_to_be_paths_are_among_those_tried() -> None:
    tried = {(words[0] if words[0] in COMMANDS else "", name) for words, name in GIVEN}
    known = {
        *(("", name) for name in ("--config", "--output-dir", "--resume")),
        *(("prepare", name) for name in ("--out", "--images", "--labels", "--file", "--eval-file")),
        *(("predict", name) for name in ("--out", "--checkpoint", "--config")),
        *((name, "--out") for name in ("export", "evaluate")),
        *(("index", name) for name in ("PATH", "--index-dir")),
        ("explain", "RUN_DIR"),
        *(("report", name) for name in ("RUN_DIR", "--out")),
        ("check-data", "--audit"),
        ("bench", "PATH"),
        ("doctor", "--json"),
        ("doctor", "--dir"),
    }
    assert known <= tried


@pytest.mark.parametrize(("words", "name"), GIVEN, ids=[" ".join(words) for words, _ in GIVEN])
def test_no_argument_takes_a_remote_path(
    words: tuple[str, ...],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{name.split()[0]}" in said
    assert f"expected a local path; received {REMOTE}" in said
    assert os.listdir(tmp_path) == []


def test_settings_on_the_command_line_and_local_names_with_colons_are_not_taken_for_remote(tmp_path: Path) -> None:
    parsed = _parser().parse_args(["--config", "a:b.yaml", "--output-dir", "C:/x", "--resume", "./gs:/x"])
    assert (parsed.config, parsed.output_dir, parsed.resume) == (["a:b.yaml"], "C:/x", "./gs:/x")
