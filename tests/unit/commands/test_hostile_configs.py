"""Configs that are hostile or broken: too deep, too long, exploding, with paths that nothing takes. One line, soon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_remote_paths import SETTINGS

from horovod_train.main import main

BUILT_IN = ["--config", "digits_convnet"]
READ = ["data.train", "data.eval"]


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "model: {name: convnet, options: {" + ", ".join(lines) + "}}"


def merges(levels: int) -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    return "model: {name: convnet, options: {" + ", ".join(lines) + "}}"


CONFIGS = {
    "deep": ("model: {name: convnet, options: {x: " + "[" * 5000 + "]" * 5000 + "}}", "at most 100 deep"),
    "deep mappings": ("model: {options: " + "{x: " * 5000 + "1" + "}" * 5001, "at most 100 deep"),
    "rather deep": ("model: {name: convnet, options: {x: " + "[" * 150 + "]" * 150 + "}}", "at most 100 deep"),
    "long": (
        "model:\n  options:\n" + "".join(f"    k{i}: {i}\n" for i in range(500_000)),
        "at most 1000000 characters",
    ),
    "laughs": (laughs(11), "at most 1000000 values"),
    "merges": (merges(11), "at most 1000000 values"),
    "NUL": ('output_dir: "a\\0b"', "must not hold a NUL character"),
    "NUL in an option": ('model: {options: {x: ["a\\0b"]}}', "must not hold a NUL character"),
    "not UTF-8": ('output_dir: "a\\udcff"', "expected a path in UTF-8"),
    "long name": (f"output_dir: {'x' * 5000}", "with names of at most 255"),
    "many names": (f"output_dir: {'x/' * 2500}", "of at most 4095 bytes"),
}


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) <= 2010
    return said


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_hostile_config_is_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = CONFIGS[kind]
    (file := tmp_path / "c.yaml").write_text(text)
    found = refusal(["--print-config", *BUILT_IN, str(file)], capsys)
    assert said in found
    assert str(file) in found


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1"])
def test_a_path_that_tensorflow_would_read_as_another_is_one_line(
    encoding: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    said = refusal(["--print-config", *BUILT_IN, "output_dir=runs/\u00e9t\u00e9"], capsys)
    assert f"the encoding of this locale is {encoding}, and TensorFlow's is UTF-8" in said
    assert said.endswith("Set LC_ALL=C.UTF-8.\n")


def test_a_large_config_is_read_in_linear_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of 20 000 options twice: what was said first is forgotten in linear time."""
    text = "model:\n  options:\n" + "".join(f"    k{i}:\n      k: {i}\n" for i in range(5_000))
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(text + f"seed: [{name}]\n")
    assert "b.yaml" in refusal(["plan", "--fast", *BUILT_IN, f"{tmp_path}/a.yaml", f"{tmp_path}/b.yaml"], capsys)


@pytest.mark.parametrize("key", [*SETTINGS, *READ, "model", "optimizer", "loss"])
def test_a_setting_of_5000_characters_is_at_most_one_line(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "x" * 5000
    if key.startswith(("metrics.", "data.augment.")):
        key, _, own = key.rpartition(".")
        value = f"[{{{own}: {value}}}]"
    words = ["plan", "--fast", *BUILT_IN, f"data.train={tmp_path}", f"output_dir={tmp_path}/run", f"{key}={value}"]
    assert main(words) in (0, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 1
    assert max(map(len, lines), default=0) <= 2010


ARGUMENTS = [
    [*BUILT_IN, "--output-dir", "{}"],
    ["plan", "--fast", *BUILT_IN, "--output-dir", "{}"],
    ["plan", "--fast", "--config", "{}"],
    *([command, "{}"] for command in ("explain", "watch", "report", "check-data", "index")),
    ["report", "--out", "{}", "runs"],
    ["check-data", "--audit", "{}"],
]


@pytest.mark.parametrize("words", ARGUMENTS, ids=lambda words: " ".join(words))
@pytest.mark.parametrize("length", [300, 5000])
def test_a_long_argument_is_one_line(
    words: list[str], length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refusal([word.format("x" * length) for word in words], capsys)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "words", [["output_dir=größe"], ["model=größe:x"], ["metrics=[größe]"], ["--output-dir=größe"]]
)
def test_in_a_locale_of_ascii_there_is_one_line(words: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (config := tmp_path / "c.yaml").write_text(
        "".join(f"{word.replace('=', ': ')}\n" for word in words if "--" not in word)
    )
    arguments = ["plan", "--fast", *BUILT_IN, str(config), *(word for word in words if "--" in word)]
    command = [sys.executable, "-m", "horovod_train.main", *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    assert done.returncode in (0, 2)
    assert done.stderr.decode().count("\n") <= 1
    done.stdout.decode("ascii")
