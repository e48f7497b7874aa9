"""The first hour of someone with data: init → plan → train on two ranks → evaluate → predict → export → load.

From the built wheel, in an environment that knows nothing of the checkout.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
from conftest import Finished, rank_environment, run_process, summary_of

MAIN = [sys.executable, "-m", "horovod_train.main"]
SPECIES = ("adelie", "chinstrap", "gentoo")


def make_images(folder: Path) -> None:
    """Three classes of pictures: which channel has the bright square."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for channel, name in enumerate(("circle", "cross", "square")):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(0, 60, (50, 60, 3)).astype(np.uint8)
            pixels[10:40, 10:40, channel] = 220
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.jpg")


def make_numbers(folder: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [(f"{area:.1f}", rng.choice(["north", "south"])) for area in rng.uniform(20, 150, 120)]
    lines = [f"{area},{district},{float(area) / 50 + (district == 'north'):.3f}" for area, district in rows]
    (folder / "flats.csv").write_text("area,district,price\n" + "\n".join(lines) + "\n")


def make_species(folder: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{rng.normal(3 * (row % 3)):.3f},{rng.normal():.3f},{SPECIES[row % 3]}" for row in range(150)]
    (folder / "penguins.csv").write_text("length,width,species\n" + "\n".join(lines) + "\n")


def make_texts(folder: Path) -> None:
    rng = np.random.default_rng(0)
    moods = rng.integers(0, 2, 120)
    words = [["bad", "poor", "film", "the"], ["good", "great", "film", "the"]]
    lines = [f'"{" ".join(rng.choice(words[mood], 9))}.",{["neg", "pos"][mood]}' for mood in moods]
    (folder / "reviews.csv").write_text("review,mood\n" + "\n".join(lines) + "\n")


def nothing(folder: Path) -> None:
    return None


KINDS: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "images": (make_images, ["images", "photos"], "72 images in 3 classes: circle, cross, square; 57 to train"),
    "numbers": (make_numbers, ["table", "flats.csv"], "area (numbers), district (text) → price, a number"),
    "classes": (make_species, ["table", "penguins.csv"], "→ species, 3 classes; 120 to train, 30 to evaluate"),
    "texts": (make_texts, ["text", "reviews.csv"], "in 2 classes of mood: neg, pos; 96 to train"),
    "records": (nothing, ["tfrecords", "samples"], "inputs sample"),
    "mine": (nothing, ["mine"], "they run as they are"),
}


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has the wheel, and what else is installed here."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    # As a path, so that Python does not read the .pth files there, of which one leads to the checkout.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    script = "import horovod_train; print(horovod_train.__file__)"
    found = run_process([f"{venv}/bin/python", "-c", script], cwd=venv, environment=environment_of_a_user())
    assert found.stdout.strip() == f"{packages}/horovod_train/__init__.py", found.text
    return f"{venv}/bin/python"


def environment_of_a_user() -> dict[str, str]:
    return {name: value for name, value in rank_environment().items() if name != "PYTHONPATH"}


@pytest.fixture
def call(python: str, tmp_path: Path) -> Callable[..., Finished]:
    """Runs a command of the wheel in the test's folder."""

    def run(*words: str, ranks: int = 1) -> Finished:
        launcher = ["horovodrun", "--gloo", "-np", str(ranks)] if ranks > 1 else []
        command = [*launcher, python, "-m", "horovod_train.main", *words]
        finished = run_process(command, cwd=tmp_path, environment=environment_of_a_user())
        assert finished.returncode == 0, finished.text
        return finished

    return run


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind == "texts" else pytest.mark.exhaustive) for kind in KINDS],
)
def test_from_data_to_a_model_in_use(kind: str, call: Callable[..., Finished], tmp_path: Path) -> None:
    make, words, found = KINDS[kind]
    make(tmp_path)
    if kind == "records":
        call("prepare", "mlp-samples", "--records", "400", "--eval-records", "80", "--out", "samples")
    said = call("init", *words).stdout
    assert found in said
    assert "horovodrun -np 2 python -m horovod_train.main --config config.yaml" in said
    call("plan", "--config", "config.yaml")
    call("--config", "config.yaml", "train.epochs=4", ranks=2)
    run = tmp_path / "runs" / "config"
    assert summary_of(run)["epochs"] == 4
    call("evaluate", str(run), "--out", "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    if "accuracy" in figures:
        assert figures["accuracy"] > 0.4  # of three classes; four short epochs
    call("predict", str(run), "--out", "new.csv", ranks=2)
    with (tmp_path / "new.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == figures["records"]
    names = {"images": ["circle", "cross", "square"], "classes": [*SPECIES], "texts": ["neg", "pos"]}.get(kind)
    assert all(row["class"] in names for row in rows) if names else "class" not in rows[0]
    assert all(1 / len(names) <= float(row["probability"]) <= 1 for row in rows) if names else True
    assert summary_of(run).get("class_names") == names
    if kind == "images":
        assert all(Path(tmp_path / row["file"]).is_file() for row in rows)
        call("predict", str(run), "--data", "photos/cross/*.jpg", "--out", "cross.csv", ranks=2)
        with (tmp_path / "cross.csv").open(newline="") as file:
            assert len({row["file"] for row in csv.DictReader(file)}) == 24
    call("predict", str(run), "--out", "new.csv")  # a table of ours may be replaced
    call("export", str(run), "--out", "model.keras")
    call("export", str(run), "--out", "served")
    assert _outputs_alone(tmp_path) == "equal"
    if names:
        assert json.loads(zipfile.ZipFile(tmp_path / "model.keras").read("class_names.json")) == names
        assert json.loads((tmp_path / "served" / "assets.extra" / "class_names.json").read_text()) == names


def _outputs_alone(folder: Path) -> str:
    """Load both exports with TensorFlow alone, and compare their outputs for a made-up record."""
    script = """
import sys
sys.modules["horovod"] = sys.modules["horovod_train"] = None
import keras, numpy as np, tensorflow as tf
model, served = keras.saving.load_model("model.keras", compile=False), tf.saved_model.load("served")
def value(spec):
    shape = [3, *spec.shape[1:]]
    return tf.fill(shape, "the good film") if spec.dtype == "string" else tf.cast(np.full(shape, 2.0), spec.dtype)
record = keras.tree.map_structure(value, model.input)
print("equal" if np.allclose(model(record), served.serve(record), atol=1e-5) else "they differ")
"""
    finished = run_process([sys.executable, "-c", script], cwd=folder, environment=environment_of_a_user())
    assert finished.returncode == 0, finished.text
    return finished.stdout.strip()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["images", "nowhere"], "nowhere"),
        (["images", "flat"], "flat"),
        (["table", "flats.csv", "--target", "prize"], "--target prize: flats.csv has no such column"),
        (["table", "nan.csv"], "nan.csv:3: area holds numbers, and here 'nan'; write a number or leave the line out."),
        (["text", "flats.csv"], "expected classes in column price"),
        (["tfrecords", "flat"], "expected *.tfrecord* files in it"),
        (["mine", "--out", "configs/a.yaml"], "in this folder"),
    ],
)
def test_what_it_cannot_use_is_one_line_and_leaves_nothing(words: list[str], line: str, tmp_path: Path) -> None:
    make_numbers(tmp_path)
    (tmp_path / "flat").mkdir()
    (tmp_path / "nan.csv").write_text("area,price\n1.5,2\nnan,3\n" + "2.5,4\n" * 10)
    finished = run_process([*MAIN, "init", *words], cwd=tmp_path)
    assert finished.returncode == 2
    assert line in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flat", "flats.csv", "nan.csv"]


@pytest.mark.long
def test_words_are_found_as_the_layer_finds_them(tmp_path: Path) -> None:
    """Capitals of other alphabets stay, and a no-break space parts no words: as the layer has it, which reads them."""
    texts = ["Über uns!", "Привет, мир", "ÉCOLE\u00a0Été café", "Plain ENGLISH\tWords"]
    lines = "".join(f'"{texts[n % 4]}",{"ab"[n % 2]}\n' for n in range(20))
    (tmp_path / "a.csv").write_text(f"text,kind\n{lines}", encoding="utf-8")
    finished = run_process([*MAIN, "init", "text", "a.csv", "--target", "kind"], cwd=tmp_path)
    assert finished.returncode == 0, finished.text
    layer = keras.layers.TextVectorization()
    layer.adapt(texts)
    assert set((tmp_path / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]) == {
        *layer.get_vocabulary(include_special_tokens=False)
    }


def test_no_file_of_the_user_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("mine = 1\n")
    finished = run_process([*MAIN, "init", "mine"], cwd=tmp_path)
    assert finished.returncode == 2
    assert "model.py exists already" in finished.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]
    assert (tmp_path / "model.py").read_text() == "mine = 1\n"


@pytest.mark.long
def test_a_text_that_is_no_class_is_named(call: Callable[..., Finished], tmp_path: Path) -> None:
    make_species(tmp_path)
    call("init", "table", "penguins.csv")
    table = tmp_path / "penguins.csv"
    table.write_text(table.read_text().replace("gentoo", "emu", 1))
    finished = run_process([*MAIN, "check-data", "--config", "config.yaml"], cwd=tmp_path)
    assert "'emu'" in finished.stdout + finished.stderr
    assert "one of adelie, chinstrap, gentoo" in finished.stdout + finished.stderr
