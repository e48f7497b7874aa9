"""The command `build-horovod`: which compiled wheel serves, and what is missing to compile one. Compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from conftest import PROJECT, run_process

from horovod_train.commands import build_horovod
from horovod_train.errors import UserError
from horovod_train.main import main


@pytest.fixture(autouse=True)
def other_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks for a build that neither this environment nor any cache has."""
    monkeypatch.setenv("CFLAGS", "-DNO_SUCH_BUILD")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command refuses."""
    assert main(["build-horovod", *words]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (
            "CXX",
            "no-such-compiler",
            "error: build-horovod: no-such-compiler is no C++17 compiler: apt-get install g++.",
        ),
        ("PATH", "/nowhere", "error: build-horovod: make is not on PATH: apt-get install make."),
    ],
)
def test_a_missing_tool_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    expected: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert said(capsys, "--mpi", "wheel", "--cache", str(tmp_path)).startswith(expected)
    assert not list(tmp_path.iterdir())


def test_a_missing_mpi_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "--mpi system: mpicc is not on PATH" in said(capsys, "--mpi", "system", "--cache", str(tmp_path))


def test_a_missing_nvcc_or_nccl_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    environment = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": "/nowhere"}
    of_nvcc, problem = build_horovod._missing_gpu_tools(environment, "no-such-compiler")
    assert "pip install nvidia-cuda-nvcc nvidia-cuda-crt" in of_nvcc
    assert of_nvcc.endswith("and set HOROVOD_CUDA_HOME, as docs/install.md shows.")
    assert problem.startswith("NCCL is missing: pip install 'tensorflow[and-cuda]' brings it")


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert "Give --cache DIR." in said(capsys, "--cache", str(tmp_path / "file" / "cache"))


def test_a_relative_cache_folder_is_no_place_for_wheels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The XDG Base Directory Specification calls such a path invalid, and the first run ignores it, too."""
    for name in (".cache", "relative"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert f"cannot make {tmp_path}/.cache/horovod_train/horovod-" in said(capsys)


def test_a_folder_of_another_content_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "horovod-cp311-of-somebody"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"holds thesis\.tex"):
        build_horovod._make_room(folder)
    assert (folder / "thesis.tex").exists()


def test_a_wheel_serves_if_all_that_shaped_it_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dict(os.environ)
    name = build_horovod._name("wheel", here)
    assert build_horovod._name("wheel", here | {"LANG": "C", "HOME": "/nowhere"}) == name
    for other in ({"CXX": "clang++"}, {"HOROVOD_GPU_OPERATIONS": "NCCL"}, {"HOROVOD_CUDA_HOME": "/opt/cuda"}):
        assert build_horovod._name("wheel", here | other) != name
    assert build_horovod._name("none", here) != name


@pytest.mark.parametrize("of", ["folder", "wheel"])
@pytest.mark.parametrize("how", ["writable", "owned", "link"])
def test_a_wheel_that_another_user_could_have_written_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], of: str, how: str
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    environment = {**os.environ, "MPI": "wheel", "HOROVOD_GPU_OPERATIONS": ""}
    folder = tmp_path / build_horovod._name("wheel", environment)
    folder.mkdir()
    wheel = folder / "horovod-0.whl"
    wheel.touch()
    path = folder if of == "folder" else wheel
    if how == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "writable":
        path.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    else:
        os.chown(path, 12345, 12345)
    assert main(["build-horovod", "--mpi", "wheel", "--cache", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "no-such-compiler is no C++17 compiler" in err
    assert f"{path} " in out
    assert out.endswith(": compiling Horovod anew\n")
    assert "installing" not in out


def test_open_mpi_finds_one_prefix_in_a_rank(tmp_path: Path) -> None:
    """It hangs if OPAL_PREFIX differs from mpirun's PMIX_INSTALL_PREFIX: by a link, or under another's mpirun."""
    venv.create(tmp_path / "made", symlinks=True)
    (packages,) = (tmp_path / "made").glob("lib/python3.*/site-packages")
    (packages / build_horovod.PREFIX_FILE.what).write_text(build_horovod.PREFIX_LINES)
    (tmp_path / "linked").symlink_to(tmp_path / "made")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").touch()
    names = ("OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "PATH", "OMPI_MCA_plm_rsh_agent")
    code = f"import os, sys; print(sys.prefix, *[os.environ.get(name) for name in {names}])"
    command = [str(tmp_path / "linked/bin/python"), "-c", code]
    for of_mpirun, expected in ({}, "None"), ({"PMIX_INSTALL_PREFIX": "/other"}, str((tmp_path / "made").resolve())):
        environment = {"PATH": f"{tmp_path}/bin"} | of_mpirun
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        linked = str(tmp_path / "linked")
        assert said == [linked, str((tmp_path / "made").resolve()), expected, f"{linked}/bin:{tmp_path}/bin", "None"]


@pytest.mark.skipif(shutil.which("mpirun") != str(Path(sys.executable).with_name("mpirun")), reason="of the wheel")
@pytest.mark.parametrize("with_prefix", [True, False])
def test_ranks_of_this_host_start_where_there_is_no_ssh(with_prefix: bool, tmp_path: Path) -> None:
    """As in a small container. Open MPI would refuse, though it calls ssh for other hosts only."""
    for program in ("hostname", "false"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    environment = {"PATH": str(tmp_path), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [shutil.which("mpirun"), "--oversubscribe", "-np", "2", "hostname"]
    code = f"import subprocess; print(subprocess.run({command}, capture_output=True, text=True).stdout)"
    option = [] if with_prefix else ["-S"]  # which leaves out `site`, and with it the lines of PREFIX_FILE
    python = [sys.executable, *option, "-c", code]
    said = subprocess.run(python, env=environment, capture_output=True, text=True, check=True).stdout
    assert len(said.split()) == (2 if with_prefix else 0)


def test_an_older_environment_gets_the_new_prefix_without_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_horovod, "_is_installed", lambda name: True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert main(["build-horovod", "--mpi", "none"]) == 0
    assert not list(tmp_path.iterdir())
    assert main(["build-horovod", "--mpi", "wheel"]) == 0
    assert (tmp_path / build_horovod.PREFIX_FILE.what).read_text() == build_horovod.PREFIX_LINES


NOTES_THE_BUILD = """\
#!/bin/sh
case "$*" in *build-horovod*) env | grep ^HOROVOD_ | sort > "$(dirname "$0")/built" ;; esac
"""


def test_make_install_builds_as_the_command_did_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an update would put a Horovod without NCCL in the place of one with NCCL. The pip here does nothing."""
    for name in ("scripts/install.sh", "constraints.txt", "pyproject.toml", "horovod_train/commands/build_horovod.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, tmp_path / name)
    cached = tmp_path / "horovod_train" / f"horovod-cp{sys.version_info.major}{sys.version_info.minor}-x"
    cached.mkdir()
    (cached / "a.whl").touch()
    of_venv = tmp_path / ".venv"
    (of_venv / "bin").mkdir(parents=True)
    (of_venv / "bin" / "python").write_text(NOTES_THE_BUILD)
    (of_venv / "bin" / "python").chmod(0o755)
    python = getattr(sys, "_base_executable", sys.executable)
    settings = f"ROOT={tmp_path}\nPYTHON={python}\nMPI=wheel\nTENSORFLOW=tensorflow\nHOROVOD_GPU_OPERATIONS=\n"
    (of_venv / "install-settings").write_text(settings)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "MPI"))}

    def built(**variables: str) -> list[str]:
        """With which variables `make install` builds Horovod, after an update."""
        (of_venv / "install-done").unlink(missing_ok=True)
        given = environment | {"XDG_CACHE_HOME": str(tmp_path)} | variables
        finished = run_process(["bash", str(tmp_path / "scripts" / "install.sh")], environment=given)
        assert finished.returncode == 0, finished.text
        assert finished.text.count("making .venv") == 0, finished.text
        return (of_venv / "bin" / "built").read_text().split()

    assert built() == ["HOROVOD_GPU_OPERATIONS="]
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(of_venv))
    monkeypatch.setattr(build_horovod, "_is_installed", lambda name: True)
    nccl = {"HOROVOD_BUILD_CUDA_CC_LIST": "80,90", "HOROVOD_CUDA_HOME": "/opt/cuda", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    for name, value in nccl.items():
        monkeypatch.setenv(name, value)
    assert main(["build-horovod", "--mpi", "none"]) == 0
    assert built() == [f"{name}={value}" for name, value in nccl.items()]
    (of_venv / "bin" / "built").unlink()
    assert run_process(["bash", str(tmp_path / "scripts" / "install.sh")], environment=environment).returncode == 0
    assert not (of_venv / "bin" / "built").exists()  # .venv is up to date
    assert built(HOROVOD_GPU_OPERATIONS="") == ["HOROVOD_GPU_OPERATIONS="]
    assert built(HOROVOD_BUILD_CUDA_CC_LIST="120")[0] == "HOROVOD_BUILD_CUDA_CC_LIST=120"


def test_comments_of_the_script_do_not_shape_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = build_horovod.SCRIPT.read_text()
    before = build_horovod._shape({})
    monkeypatch.setattr(build_horovod, "SCRIPT", tmp_path / "script.sh")
    build_horovod.SCRIPT.write_text(text.replace("\nset -euo pipefail\n", "\n# another comment\nset -euo pipefail\n"))
    assert build_horovod._shape({}) == before
    build_horovod.SCRIPT.write_text(text.replace("version=0.28.1", "version=0.28.2"))
    assert build_horovod._shape({}) != before


def test_help_says_what_it_needs_and_where_it_caches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["build-horovod", "--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("C++17", "cmake", "MPI is optional", "$XDG_CACHE_HOME/horovod_train"))
