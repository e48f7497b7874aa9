"""Draws docs/timeline.svg: one step in the timeline that Horovod wrote in a real run on two ranks.

python examples/timeline_picture.py docs/timeline.svg
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, ROW, LEFT, TOP = 560, 22, 150, 30
STEP = 20
"""Which exchange of each gradient is shown: late enough for all ranks to be warm."""
COLOURS = {"NEGOTIATE": "#cccccc", "MEMCPY": "#e69f00", "GLOO": "#0072b2", "MPI": "#0072b2", "NCCL": "#0072b2"}
LEGEND = {"NEGOTIATE_…": "#cccccc", "MEMCPY_…_FUSION_BUFFER": "#e69f00", "GLOO_ALLREDUCE": "#0072b2"}


class Bar(NamedTuple):
    """A bar, or a tick if it takes no time. begin, end: microseconds."""

    name: str
    begin: float
    end: float


def run(folder: Path) -> list[dict[str, Any]]:
    """Train on two ranks; the events of the timeline."""
    words = ["--config", "configs/digits_convnet.yaml", f"train.max_steps={2 * STEP}", "horovod.timeline=true"]
    command = ["horovodrun", "--gloo", "-np", "2", sys.executable, "-m", "horovod_train.main", *words]
    every_tick = os.environ | {"HOROVOD_CACHE_CAPACITY": "0"}
    subprocess.run([*command, "--output-dir", str(folder)], check=True, stdin=subprocess.DEVNULL, env=every_tick)
    (path,) = (folder / "timeline").iterdir()
    return json.loads(path.read_text())


def bars_of(events: list[dict[str, Any]], pid: int) -> list[Bar]:
    """What happened to one tensor in its exchange STEP. A bar ends before those that began before it."""
    bars: list[Bar] = []
    begun: list[tuple[str, float]] = []
    number = 0
    for event in (event for event in events if event.get("pid") == pid and event["ph"] in "BEX"):
        if event["ph"] == "B":
            number += event["name"].startswith("NEGOTIATE")
            begun.append((event["name"], event["ts"]))
        elif event["ph"] == "E":
            name, begin = begun.pop()
            bars += [Bar(name, begin, event["ts"])] * (number == STEP)
        elif number == STEP:
            bars.append(Bar(event["name"], event["ts"], event["ts"]))
    return bars


def row(number: int, name: str, bars: list[Bar], begin: float, scale: float) -> str:
    y = TOP + number * ROW
    parts = [f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>']
    for bar in sorted(bars, key=lambda bar: bar.begin - bar.end):  # the long ones below
        x, width = LEFT + (bar.begin - begin) * scale, (bar.end - bar.begin) * scale
        colour = next((colour for word, colour in COLOURS.items() if bar.name.startswith(word)), "")
        if colour:
            parts.append(f'<rect x="{x:.1f}" y="{y + 3}" width="{max(width, 0.5):.1f}" height="14" fill="{colour}"/>')
        elif bar.name.isdigit():
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 20}" stroke="#d55e00"/>')
            parts.append(f'<text x="{x + 2:.1f}" y="{y + 9}" font-size="9" fill="#d55e00">{bar.name}</text>')
        else:
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="18" fill="none" stroke="#000" '
                'stroke-width="0.7"/>'
            )
    return "\n".join(parts)


def axis(longest_ms: float) -> list[str]:
    between = next(ms for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if longest_ms / ms <= 6)
    return [
        f'<text x="{LEFT + WIDTH * ms / longest_ms:.1f}" y="18" text-anchor="middle">{ms} ms</text>'
        for ms in range(0, int(longest_ms) + 1, between)
    ]


def legend(y: int) -> str:
    parts, x = [], LEFT
    for name, colour in LEGEND.items():
        parts.append(f'<rect x="{x}" y="{y - 10}" width="14" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{name}</text>')
        x += 34 + 8 * len(name)
    parts.append(f'<rect x="{x}" y="{y - 10}" width="14" height="10" fill="none" stroke="#000"/>')
    parts.append(f'<text x="{x + 18}" y="{y}">ALLREDUCE</text>')
    parts.append(f'<text x="{LEFT}" y="{y + 18}" fill="#d55e00">| when rank 0 and rank 1 had the tensor</text>')
    return "\n".join(parts)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        events = run(Path(folder) / "run")
    names = {event["pid"]: event["args"].get("name", "") for event in events if event.get("name") == "process_name"}
    gradients = {pid: name for pid, name in names.items() if re.search(r"\.gradient\b", name)}
    rows = {name: bars_of(events, pid) for pid, name in sorted(gradients.items(), key=lambda item: item[1])}
    begin = min(bar.begin for bars in rows.values() for bar in bars)
    end = max(bar.end for bars in rows.values() for bar in bars)
    scale, bottom = WIDTH / (end - begin), TOP + len(rows) * ROW
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {bottom + 75}"',
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{LEFT + WIDTH + 20}" height="{bottom + 75}" fill="white"/>',
        *axis((end - begin) / 1000),
        *(row(number, name, bars, begin, scale) for number, (name, bars) in enumerate(rows.items())),
        legend(bottom + 26),
        "</svg>",
    ]
    Path(sys.argv[1]).write_text("\n".join(svg) + "\n")


if __name__ == "__main__":
    main()
