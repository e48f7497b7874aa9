"""Draws docs/ranks.svg from real runs of averaging.py: held-out loss by epoch of each of four ranks, and of one alone.

python examples/picture.py docs/ranks.svg
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 350, 200, 45, 40
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
TITLES = ("Stock Horovod 0.28.1 under Keras 3: four models", "horovod_train: one model")


def measure(ranks: int, *words: str) -> list[list[float]]:
    """Train; the held-out loss of each rank after each epoch."""
    script = Path(__file__).with_name("averaging.py")
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = ["horovodrun", "--gloo", "-np", str(ranks), sys.executable, str(script), *words, "--json", file.name]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        return json.loads(Path(file.name).read_text())


def line(values: list[float], top: float, style: str) -> str:
    step = WIDTH / (len(values) - 1)
    points = " ".join(f"{i * step:.1f},{HEIGHT - HEIGHT * value / top:.1f}" for i, value in enumerate(values))
    return f'<polyline points="{points}" fill="none" {style}/>'


def panel(number: int, ranks: list[list[float]], alone: list[float], top: float) -> str:
    parts = [f'<g transform="translate({LEFT + number * (WIDTH + 60)},{TOP})">']
    parts.append(f'<text x="0" y="-14" font-weight="bold">{TITLES[number]}</text>')
    for tick in range(0, int(top * 10) + 1, 2):
        y = HEIGHT - HEIGHT * tick / 10 / top
        parts.append(f'<line x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{tick / 10}</text>')
    parts.append(line(alone, top, 'stroke="#999" stroke-width="7" opacity="0.5"'))
    for rank, values in enumerate(ranks):
        dash = "" if number == 0 else f' stroke-dasharray="4 12" stroke-dashoffset="{-4 * rank}"'
        parts.append(line(values, top, f'stroke="{COLOURS[rank]}" stroke-width="2"{dash}'))
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 20}" text-anchor="middle">epoch, 1 to {len(alone)}</text></g>')
    return "\n".join(parts)


def legend() -> str:
    parts = [f'<g transform="translate({LEFT},{TOP + HEIGHT + 42})">']
    entries = [("loss on 389 held-out digits of rank 0", COLOURS[0])]
    entries += [(f"rank {rank}", COLOURS[rank]) for rank in (1, 2, 3)] + [("one rank alone, all data", "#999")]
    x = 0
    for text, colour in entries:
        parts.append(f'<rect x="{x}" y="-9" width="14" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 19}">{text}</text>')
        x += 45 + 6 * len(text)
    return "\n".join([*parts, "</g>"])


def main() -> None:
    stock, ours, alone = measure(4, "stock"), measure(4), measure(1)[0]
    top = max(max(map(max, stock)), max(map(max, ours)), max(alone))
    width, height = LEFT + 2 * WIDTH + 80, TOP + HEIGHT + 60
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        panel(0, stock, alone, top),
        panel(1, ours, alone, top),
        legend(),
        "</svg>",
    ]
    Path(sys.argv[1]).write_text("\n".join(svg) + "\n")


if __name__ == "__main__":
    main()
