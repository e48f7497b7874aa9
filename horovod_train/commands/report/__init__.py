"""The command `report`: one page of what runs were, to read in a browser or to send.

python -m horovod_train.main report runs/a runs/b --out report.html

The page holds curves, starts and settings of one run, or of several side by side. It loads nothing from a server.
"""

from __future__ import annotations

import argparse
import html
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from horovod_train.commands.cli import check_out, write_out
from horovod_train.commands.report.charts import UNITS, Drawer, build_charts
from horovod_train.commands.report.story import Run, Start, read_run
from horovod_train.errors import UserError
from horovod_train.output.console import to_stdout
from horovod_train.output.removal import Artifact, begins
from horovod_train.shown_text import printable, without_secrets

HEAD = "<!doctype html>\n<!-- Written by horovod_train: a report of runs -->\n"
_PAGE = Artifact("a report", r".+\.html", content_matches=lambda path: begins(path, HEAD))
_ROWS_SHOWN = 20
_NAME = re.compile(r"\w+(\.\w+)*")
_OF_A_START = ["began", "ranks", "root on", "by", "steps", "training s", "evaluating s", "saving s", "start s", "end"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --grid: #ddd; --soft: #f4f4f4;
  --curve-0: #0072b2; --curve-1: #d55e00; --curve-2: #009e73; --curve-3: #aa4499; --curve-4: #8a6d00; --curve-5: #555; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181b; --grid: #3a3d42; --soft: #22252a;
  --curve-0: #56b4e9; --curve-1: #ff9d5c; --curve-2: #2ecc9b; --curve-3: #e39bc9; --curve-4: #f0e442;
  --curve-5: #aaa; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1rem;
  max-width: 72rem; }
a { color: var(--curve-0); } a:focus-visible, summary:focus-visible, .wide:focus-visible { outline: 3px solid; }
h2 { border-top: 2px solid var(--grid); padding-top: 1rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  overflow-wrap: break-word; min-width: 3rem; } td:nth-child(2):last-child { overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
figure { margin: 0; overflow-x: auto; } svg { width: 100%; min-width: 22rem; height: auto; }
figcaption { font-weight: 600; }
pre { background: var(--soft); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
pre span { white-space: nowrap; }
"""


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


def build_page(runs: Sequence[Run]) -> str:
    """Return the report of runs, as HTML. Raises UserError if what draws is not installed."""
    drawer = Drawer()
    title = _text(f"Report of {', '.join(run.name for run in runs)}")
    parts = [
        HEAD + f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><nav>",
        " · ".join(f'<a href="#{anchor}">{_text(label)}</a>' for anchor, label in _contents(runs)),
        "</nav><main>",
        *_curves(runs, drawer),
        *(_different_settings(runs) if len(runs) > 1 else ()),
        *(part for number, run in enumerate(runs) for part in _summary(run, number)),
        *(part for number, run in enumerate(runs) for part in _details(run, number, drawer)),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _contents(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    yield "curves", "curves"
    if len(runs) > 1:
        yield "settings", "different settings"
    yield from ((f"run-{number}", run.name) for number, run in enumerate(runs))
    yield from ((f"details-{number}", f"starts of {run.name}") for number, run in enumerate(runs))


def _different_settings(runs: Sequence[Run]) -> Iterator[str]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [[key, *(_value(run.settings.get(key)) for run in runs)] for key in keys]
    different = [row for row in rows if len(set(row[1:])) > 1]
    yield '<h2 id="settings">Different settings</h2>'
    if not different:
        yield "<p>None.</p>"
        return
    table = _table(["setting", *(run.name for run in runs)], different)
    is_long = len(different) > _ROWS_SHOWN
    yield f"<details><summary>{len(different)} settings</summary>{table}</details>" if is_long else table


def _curves(runs: Sequence[Run], drawer: Drawer) -> Iterator[str]:
    charts = build_charts(runs)
    yield '<h2 id="curves">Curves</h2>'
    if not charts:
        yield "<p>No metrics were written.</p>"
        return
    figures = {False: list[str](), True: list[str]()}  # those of the model, and those of speed and time
    for number, chart in enumerate(charts):
        svg = drawer.chart(chart, runs, f"chart-{number}")
        label = _text(f"{chart.name}: {len(chart.curves)} curves")
        caption = _text(chart.name)
        figure = f'<figure role="img" aria-label="{label}"><figcaption>{caption}</figcaption>{svg}</figure>'
        figures[chart.name.removesuffix(" by step") in UNITS].append(figure)
    yield f'<div class="charts">{"".join(figures[False])}</div>'
    if more := figures[True]:
        yield f"<details{'' if figures[False] else ' open'}><summary>Speed, time and rates: {len(more)}</summary>"
        yield f'<div class="charts">{"".join(more)}</div></details>'


def _summary(run: Run, number: int) -> Iterator[str]:
    yield f'<h2 id="run-{number}">{_text(run.name)}</h2>'
    story = _text("\n".join(run.explanation.lines()))
    story = re.sub("(--[a-z-]+)", r"<span>\1</span>", story)  # browsers break --output-dir after its hyphens
    yield f"<pre>{story}</pre>"
    yield _table(["", ""], [list(fact) for fact in _facts(run)])


def _details(run: Run, number: int, drawer: Drawer) -> Iterator[str]:
    yield f'<h2 id="details-{number}">Starts of {_text(run.name)}</h2>'
    if run.starts:
        label = _text(f"what {run.name} was doing, by start")
        yield f'<figure role="img" aria-label="{label}">{drawer.timeline(run, f"timeline-{number}")}</figure>'
        yield _table(_OF_A_START, [_start(start) for start in run.starts])
    remarks = [remark for start in run.starts for remark in start.remarks]
    if remarks:
        yield f"<details><summary>{len(remarks)} warnings and failures in root's log</summary>"
        yield f"<pre>{_text(chr(10).join(remarks))}</pre></details>"
    for costs in run.profiles:
        yield f"<h3>{_text(costs.heading[0].upper() + costs.heading[1:])}</h3>"
        if costs.ops:
            yield _table(["ms", "share", "op", "name"], [list(row) for row in costs.rows()])
    if run.rows:
        yield f"<details><summary>The last {_ROWS_SHOWN} lines of metrics</summary>{_last_rows(run)}</details>"
    settings = [[key, _value(value)] for key, value in run.settings.items()]
    yield f"<details><summary>All settings</summary>{_table(['setting', 'value'], settings)}</details>"


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    versions = run.summary.get("versions") or {}
    if versions:
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if code := list(dict.fromkeys(start.code for start in run.starts if start.code)):
        yield "code", "; ".join(code)
    yield "audit", run.audit
    # Before it has ended, there is no summary, or that of an earlier start; what was written says how far it came.
    summary = run.summary if run.explanation.state in ("finished", "stopped") else {}
    reached = {"steps": run.rows[-1].step, "epochs": run.rows[-1].epoch} if run.rows else {}
    for key, label in (("steps", "steps"), ("epochs", "epochs"), ("weights_sha256", "SHA-256 of the weights")):
        if key in summary:
            yield label, str(summary[key])
        elif key in reached:
            yield label, f"{reached[key]}, of the last line of metrics"
    for split in ("train", "eval"):
        rows = [row for row in run.rows if row.split == split]
        last = summary.get(split) or (rows[-1].values if rows else {})
        values = {name: value for name, value in last.items() if name not in UNITS}
        if values:
            yield f"last {split}", ", ".join(f"{name} {_value(value)}" for name, value in values.items())


def _start(start: Start) -> list[str]:
    other_seconds = start.end - start.begin - sum(start.seconds_in(name) for name in ("train", "evaluate", "save"))
    spent = [start.seconds_in("train"), start.seconds_in("evaluate"), start.seconds_in("save"), other_seconds]
    steps = f"{start.from_step} to {start.last_step}"
    began = start.began_at.isoformat(sep=" ", timespec="seconds")
    return [began, str(start.ranks), start.host, start.launcher, steps, *(f"{s:.1f}" for s in spent), start.ended]


def _last_rows(run: Run) -> str:
    names = run.metrics
    rows = [
        [str(row.step), row.split, f"{row.seconds:.1f}", *(_value(row.values.get(name, "")) for name in names)]
        for row in run.rows[-_ROWS_SHOWN:]
    ]
    return _table(["step", "split", "s since the first start", *names], rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(title)}</th>' for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{_breaking(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = f"<thead><tr>{head}</tr></thead>" if any(titles) else ""
    return f'<div class="wide" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


def _text(text: str) -> str:
    """Return text for HTML, also for an attribute. It has no other characters than HTML may have."""
    return html.escape(printable(without_secrets(text)))


def _breaking(text: str) -> str:
    """Return text for HTML; a name such as data.global_batch_size may go on in the next line after `.` and `_`."""
    shown = _text(text)
    return re.sub(r"(?<=[A-Za-z])([._])(?=[A-Za-z])", r"\1<wbr>", shown) if _NAME.fullmatch(text) else shown


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or value in ({}, [], ""):
        return "–"
    return value if isinstance(value, str) else json.dumps(value)
