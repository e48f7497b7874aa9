"""What the benchmarks take, and how commands show tables. They measure nothing here."""

from __future__ import annotations

import argparse
import io
import sys

import pytest
from conftest import PROJECT, run_process
from rich.console import Console

from horovod_train.commands import bench
from horovod_train.commands.cli import build_table


def test_earlier_names_of_what_is_trained_still_work() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert parser.parse_args(["exchange", "--system", "s6", "--system", "mlp"]).system == ["convnet", "mlp"]
    with pytest.raises(SystemExit):
        parser.parse_args(["exchange", "--system", "s5"])


@pytest.mark.parametrize("script", sorted((PROJECT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_says_how_to_run_it(script: str) -> None:
    finished = run_process([sys.executable, str(script), "--help"])
    assert finished.returncode == 0
    assert f"python benchmarks/{PROJECT.joinpath(script).name} " in finished.stdout


def test_cells_of_a_table_are_text_and_not_markup() -> None:
    console = Console(file=io.StringIO(), width=40)
    console.print(build_table(("type",), [("list[str]",)], left=("type",)))
    assert "list[str]" in console.file.getvalue()  # type: ignore[attr-defined]
