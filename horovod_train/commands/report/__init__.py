"""The command `report`: one page of what runs were, to read in a browser or to send.

python -m horovod_train.main report runs/a runs/b --out report.html

The page holds curves, starts and settings of one run, or of several side by side. It loads nothing from a server.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from horovod_train.commands.out_files import check_out, write_out
from horovod_train.commands.report.page import HEAD, build_page
from horovod_train.commands.report.story import read_run
from horovod_train.errors import UserError
from horovod_train.output.console import to_stdout
from horovod_train.output.removal import Artifact, begins

_PAGE = Artifact("a report", r".+\.html", content_matches=lambda path: begins(path, HEAD))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="the output_dir of a run")
    parser.add_argument(
        "--out", default="report.html", metavar="FILE.html", help="the page to write; default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    if out.suffix != ".html":
        raise UserError(f"--out: expected a name that ends in .html; received {out}.")
    check_out("--out", arguments.out, _PAGE)
    page = build_page([read_run(Path(run_dir)) for run_dir in arguments.run_dirs])
    write_out("--out", arguments.out, page, _PAGE)
    to_stdout(f"{out}: {len(page) / 1e6:.1f} MB")
    return 0
