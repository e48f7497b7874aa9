"""Damages configs, weights and records at random, hands them to the program, and writes how each case ended.

python tests/fuzzed.py KIND SEED CASES FOLDER prints a line of JSON for each case. A process of its own, since damaged
files may crash or hang C code; its last line then names the case before. One case again: SEED CASES from its line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 60
"""Of a case. Most take a tenth of a second; the machine may do much else."""

NASTY = [
    *("null", "true", "-1", "0", "1e400", ".nan", "2**9", "9" * 30, "''", "'\\0'", '"\\0"', '"\\u2028"', "[]", "{}"),
    *("x" * 5000, "../..", "/", "/dev/null", "/proc/self/mem", "~", "*", "**/*", "[", "{a: {b: {c: [1, {d: 2}]}}}"),
    *("!!python/object/apply:os.getcwd []", "&a [*a]", "2024-01-01", "0x_", "1:30", "no", "größe", "- a", "a: b: c"),
    *("http://u:p@h/x", "s3://b/x?key=k", "file:///x", "nowhere:nothing", "name", "{name: x, options: 3}", "[1, [2]]"),
]  # fmt: skip
KEYS = [
    *("data", "model", "loss", "metrics", "optimizer", "lr_schedule", "train", "eval", "checkpoint", "early_stopping"),
    *("log", "horovod", "device", "watch", "output_dir", "seed", "precision", "name", "options", "train.epochs", "<<"),
    *("features", "callbacks", "hooks", "weighted_metrics"),
]  # fmt: skip


def mutate_text(text: str, draw: random.Random) -> str:
    lines = text.splitlines()
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(lines)) if lines else 0
        match draw.randrange(7):
            case 0 if lines:
                lines[at] = f"{lines[at].partition(':')[0]}: {draw.choice(NASTY)}"
            case 1 if lines:
                del lines[at]
            case 2 if lines:
                lines.insert(draw.randrange(len(lines)), lines[at])
            case 3:
                lines.insert(at, f"{draw.choice(KEYS)}: {draw.choice(NASTY)}")
            case 4 if lines:
                lines[at] = " " * draw.randrange(5) + lines[at].strip()
            case 5 if lines:
                where = draw.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:where] + draw.choice("{}[]:,#&*!|>'\"%@`-?\t\x07é\u2028") + lines[at][where:]
            case _:
                lines.append(f"{draw.choice(KEYS)}: {{{draw.choice(KEYS)}: {draw.choice(NASTY)}}}")
    return "\n".join(lines)


def mutate_bytes(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        size = len(changed)
        at, length = draw.randrange(size + 1), draw.choice((1, 4, 8, 64, 512))
        if draw.random() < 0.5:  # where the structure is described, mostly
            at = draw.choice((at % 600, size - at % 600)) if size > 600 else at
        match draw.randrange(6):
            case 0 | 1:
                for place in range(at, min(at + draw.choice((1, 2, 8)), size)):
                    changed[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
            case 2:
                del changed[at:]
            case 3:
                changed[at : at + length] = bytes(min(length, size - at))
            case 4:
                changed[at:at] = changed[at // 2 : at // 2 + length]
            case 5:
                del changed[at : at + length]
    return bytes(changed)


def ended(words: list[str]) -> str:
    """Run the program; return what is wrong about how it ended, or nothing."""
    from horovod_train.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    lines = err.getvalue().split("\n")[:-1]
    is_plain = all(character.isprintable() or character in "\n\t" for character in out.getvalue() + err.getvalue())
    is_good = code in (0, 2) and len(lines) == (code == 2) and is_plain and all(len(line) < 2100 for line in lines)
    return "" if is_good else f"exit code {code}: {err.getvalue()[-3000:]}"


def damage_config(folder: Path) -> Callable[[random.Random], str]:
    from made_records import make_images

    from horovod_train.config.loader import BUILT_IN

    make_images(folder / "data/train", [40])
    texts = [path.read_text() for path in sorted(BUILT_IN.glob("*.yaml"))]

    def case(draw: random.Random) -> str:
        (folder / "case.yaml").write_text(mutate_text(draw.choice(texts), draw))
        words = [f"output_dir={folder}/run", f"data.train={folder}/data/train"] if draw.random() < 0.8 else []
        return ended(["plan", "--fast", "--config", f"{folder}/case.yaml", *words])

    return case


def damage_weights(folder: Path) -> Callable[[random.Random], str]:
    import keras
    from keras import layers

    from horovod_train.config.settings import ModelSpec
    from horovod_train.errors import UserError
    from horovod_train.training.fine_tuning import match

    parts = [
        keras.Input((3,)),
        layers.Dense(8, name="dense"),
        layers.BatchNormalization(),
        layers.Dense(2, name="head"),
    ]
    model = keras.Sequential(parts, name="net")
    model.compile("adam", "mse")
    model.save(folder / "a.keras")
    model.save_weights(folder / "a.weights.h5")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def case(draw: random.Random) -> str:
        name = draw.choice(sorted(files))
        path = folder / f"case-{name}"
        path.write_bytes(mutate_bytes(files[name], draw))
        try:
            match(model, ModelSpec("x", init_from=str(path)))
        except UserError as error:
            said = str(error)
            return "" if len(said.splitlines()) == 1 and said.startswith("model.init_from: ") else said
        return ""

    return case


def damage_records(folder: Path) -> Callable[[random.Random], str]:
    """Without lists of any length in HDF5: its library never returns from some damaged heaps, which hold them."""
    import made_stores
    import numpy as np
    from made_records import image_record, make_images

    arrays = {"x": np.arange(160.0, dtype=np.float32).reshape(40, 2, 2), "y": np.arange(40)}
    made = [
        made_stores.write_npy(folder, arrays),
        made_stores.write_npz(folder, arrays),
        made_stores.write_packed_npz(folder, arrays),
        made_stores.write_hdf5(folder, arrays),
        made_stores.write_parquet(folder, arrays),
        made_stores.write_feather(folder, arrays),
        made_stores.write_hugging_face(folder, arrays),
        made_stores.write_array_record(folder / "records/a.array_record", [image_record(n) for n in range(40)]),
        make_images(folder / "images/train", [40]),
    ]
    (folder / "table.csv").write_text("a,b\n" + "".join(f"{n},{n / 2}\n" for n in range(40)))
    made.append(folder / "table.csv")
    schema = (folder / "images/dataset.json").read_text()

    def case(draw: random.Random) -> str:
        source = draw.choice(made)
        shutil.rmtree(folder / "case", ignore_errors=True)
        path = folder / "case" / source.name
        path.parent.mkdir()
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
        if source.suffix in ("", ".array_record") and source.name in ("train", "a.array_record"):
            (path.parent / "dataset.json").write_text(schema)
        inside = sorted(file for file in path.parent.rglob("*") if file.is_file())
        changed = draw.choice(inside)
        changed.write_bytes(mutate_bytes(changed.read_bytes(), draw))
        problem = ended(["check-data", str(path)])
        return problem and f"{changed.relative_to(path.parent)}: {problem}"

    return case


KINDS = {"config": damage_config, "weights": damage_weights, "records": damage_records}


def _stop(*_: object) -> None:
    raise TimeoutError(f"took more than {LIMIT_S} s")


def main_of_fuzz(kind: str, seed: int, cases: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    case = KINDS[kind](folder)
    signal.signal(signal.SIGALRM, _stop)
    for number in range(seed, seed + cases):
        began = time.monotonic()
        signal.alarm(LIMIT_S)
        try:
            problem = case(random.Random(number))
        except Exception as error:
            import traceback

            problem = f"{type(error).__name__}: " + "".join(traceback.format_exception(error))[-3000:]
        signal.alarm(0)
        print(json.dumps({"case": number, "problem": problem, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main_of_fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
