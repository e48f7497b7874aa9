"""`init` on data whose names and texts are not plain: what it writes is read and built as it stands."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow.feather
import pyarrow.parquet
import pytest
import tensorflow as tf
from conftest import WARNINGS_FAIL

from horovod_train.commands import init
from horovod_train.config.loader import load
from horovod_train.data.prepare.tables import load_table
from horovod_train.main import main


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def built(kind: str, table: str, **options: Any) -> keras.Model:
    """The model that `init` writes for a table."""
    Path("a.csv").write_text(table, encoding="utf-8")
    assert main(["init", kind, "a.csv"]) == 0
    return runpy.run_path("model.py")["build"](**options)


def test_words_with_what_ends_a_line_elsewhere_stay_whole() -> None:
    lines = "".join(f'"one\u2028two three\x85four w{n % 3}",{"ab"[n % 2]}\n' for n in range(20))
    model = built("text", f"text,kind\n{lines}", classes=2)
    (layer,) = [layer for layer in model.layers if isinstance(layer, keras.layers.TextVectorization)]
    assert {"one\u2028two", "three\x85four"} <= {*layer.get_vocabulary()}


@pytest.mark.parametrize("column", ["when", "price"])
@pytest.mark.parametrize(
    ("start", "step", "said"),
    [
        (1_700_000_000, 37, "has numbers from 1700000000 to 1700003663, which float32 rounds to steps of 128, coarse"),
        (2**60, 1, "has numbers from 1152921504606846976 to 1152921504606847075, which float32 rounds to steps of"),
        (0, 1e-9, "has a standard deviation of 2.89e-08, too small"),
        (1_700_000_000, 3600 * 24, ""),
        (2_024_010, 1, ""),
        (5, 0, ""),
    ],
)
def test_numbers_that_float32_makes_alike_are_said(
    column: str, start: int, step: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = np.array([start + n * step for n in range(100)])
    others = {"when": "price", "price": "when"}
    arrays: dict[str, Any] = {column: numbers, others[column]: np.arange(100.0)}
    np.savez("a.npz", **arrays)
    assert main(["init", "table", "a.npz", "--target", "price"]) == 0
    out = capsys.readouterr().out
    assert ("note" in out) == bool(said)
    assert f"{column} {said}" in out if said else True
    assert not said or said in Path("config.yaml").read_text()


def test_a_small_deviation_of_the_target_alone_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("a.npz", rate=np.arange(100) * 1e-5, share=np.arange(100) * 1e-5)
    assert main(["init", "table", "a.npz"]) == 0
    assert "; note: share has a standard deviation of 0.000289, too small" in capsys.readouterr().out


def test_large_numbers_are_scaled_by_all_their_digits() -> None:
    """A mean in six digits is several deviations off; so is what a number is predicted from."""
    rows = "".join(f"{1_700_123_456 + 3600 * n},{1_700_123_456 + 1800 * n}\n" for n in range(400))
    model = built("table", f"when,until\n{rows}", outputs=1)
    scaled = next(layer for layer in model.layers if isinstance(layer, keras.layers.Normalization))
    times = np.float32(1_700_123_456) + 3600 * np.arange(400, dtype=np.float32)[:, None]
    assert abs(np.mean(scaled(times))) < 0.1
    assert abs(model.get_layer("output").offset - (1_700_123_456 + 1800 * 199.5)) < 1800 * 20


@WARNINGS_FAIL
@pytest.mark.parametrize("other", ["side", "km_h", "0_km_h"])
def test_columns_may_have_names_that_no_layer_may(capsys: pytest.CaptureFixture[str], other: str) -> None:
    """Nor need those be different that layers get in their place, and Keras need not tell the user."""
    rows = "".join(f"{n},{'no' if n % 3 else 'so'},{n * 0.5}\n" for n in range(20))
    model = built("table", f"km/h,{other},price\n{rows}", outputs=1)
    assert {*model.input} == {"km/h", other}
    assert f"km/h (numbers), {other} (text) → price, a number" in capsys.readouterr().out
    keras.models.clone_model(model)


LAYER_NAMES = ["output", "dense", "dense_1", "concatenate", "normalization", "string_lookup", "rescaling", "flatten"]


@WARNINGS_FAIL
@pytest.mark.parametrize("target", ["0.5", "1"])
def test_columns_may_have_the_names_of_layers(target: str) -> None:
    """Keras also counts the layers of models that were built before."""
    names = [*LAYER_NAMES, "text", "0_output"]
    rows = "".join(f"{f'{n},' * len(LAYER_NAMES)}{'ab'[n % 2]},{n},{n % 2 and target}\n" for n in range(20))
    model = built("table", f"{','.join(names)},k\n{rows}", outputs=1)
    assert {*model.input} == {*names}
    keras.models.clone_model(model)
    others = {layer.name for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)}
    assert all(init._LAYER_NAME.fullmatch(layer) for layer in others)


@WARNINGS_FAIL
@pytest.mark.parametrize("name", ["x", "dense", "a/b"])
def test_a_model_of_a_single_column_takes_it_alone(name: str) -> None:
    """As a run hands it over; in a dict Keras would warn in every run."""
    model = built("table", f"{name},k\n" + "".join(f"{n},{n % 2}\n" for n in range(20)), outputs=2)
    assert model(np.ones((3, 1), np.float32)).shape == (3, 2)
    assert (model.input.name == name) == (name == "x")


@WARNINGS_FAIL
@pytest.mark.parametrize("names", ["km/h,km_h", "dense,cast", "output,flatten"])
def test_inputs_of_records_may_have_names_that_no_layer_may(names: str) -> None:
    rows = "".join(f"{n},{n % 3},{n * 0.5}\n" for n in range(20))
    Path("a.csv").write_text(f"{names},price\n{rows}")
    words = ["--separate", "--targets", "price", "--shards", "1", "--eval-fraction", "0.2"]
    assert main(["prepare", "csv", "--file", "a.csv", "--out", "records", *words]) == 0
    assert main(["init", "tfrecords", "records"]) == 0
    model = runpy.run_path("model.py")["build"](outputs=1)
    assert {*model.input} == {*names.split(",")}
    others = {layer.name for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)}
    assert all(init._LAYER_NAME.fullmatch(layer) for layer in others)


def records_of(capsys: pytest.CaptureFixture[str], targets: list[str], inputs: str = "x", **features: Any) -> str:
    """What `init tfrecords` says of such records: its first line, or its error."""
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    np.savez("a.npz", x=x, k=np.arange(20) % 2, t=np.array(["a", "b"] * 10), v=x * 2, m=np.ones((20, 2, 2)))
    words = ["--inputs", inputs, *(["--targets", *targets] if targets else []), "--shards", "1"]
    assert main(["prepare", "npz", "--file", "a.npz", "--out", "records", "--eval-fraction", "0.2", *words]) == 0
    for path in Path("records").rglob("dataset.json"):
        described = json.loads(path.read_text())
        for name, settings in features.items():
            described["features"][name] |= settings
        path.write_text(json.dumps(described))
    capsys.readouterr()
    code = main(["init", "tfrecords", "records"])
    out, err = capsys.readouterr()
    return out.splitlines()[0] if code == 0 else err


def test_labels_of_records_are_numbers_unless_they_say_classes(capsys: pytest.CaptureFixture[str]) -> None:
    said = records_of(capsys, ["k"])
    assert "; x → k, a number; note: if k is a class, give it `classes: N` in records/" in said
    assert load(["config.yaml"])[0].model.options == {"outputs": 1}


def test_labels_of_records_that_say_classes_are_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert records_of(capsys, ["k"], k={"classes": 2}).endswith("; x → k, 2 classes")
    assert load(["config.yaml"])[0].model.options == {"outputs": 2}


def test_a_target_of_several_numbers_has_an_output_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    """One output would be compared with all three, without a word."""
    assert records_of(capsys, ["v"]).endswith("; x → v, numbers")
    assert load(["config.yaml"])[0].model.options == {"outputs": 3}


@pytest.mark.parametrize(
    ("targets", "inputs", "said"),
    [
        ([], "x", "expected one target; it has none."),
        (["k", "v"], "x", "expected one target; it has k, v."),
        (["t"], "x", "t is text; init tfrecords takes numbers."),
        (["k"], "t", "t is text; init tfrecords takes numbers."),
        (["m"], "x", "m: expected a class, a number or a list of numbers; each record has numbers of shape [2, 2]."),
    ],
)
def test_records_that_the_model_cannot_learn_from_are_refused(
    targets: list[str], inputs: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"dataset.json: {said}" in records_of(capsys, targets, inputs)
    assert not Path("config.yaml").exists()


def test_a_class_for_each_place_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "each record has classes of shape [3]" in records_of(capsys, ["v"], v={"type": "int64", "classes": 2})


def test_a_column_whose_name_has_several_lines_leaves_the_config_whole() -> None:
    built("table", '"a\nb",price\n' + "".join(f"{n},{n * 0.5}\n" for n in range(20)), outputs=1)
    assert load(["config.yaml"])[0].data.inputs == ("a\nb",)


def prices(rows: int = 344, form: str = "{:.2f}") -> str:
    """A table of flats whose prices are of an ordinary size."""
    rng = np.random.default_rng(0)
    areas, districts = rng.uniform(20, 150, rows), rng.choice(["north", "south"], rows)
    figures = 50_000 + 3_000 * areas + 60_000 * (districts == "north")
    lines = [f'{a:.1f},{d},"{form.format(p)}"' for a, d, p in zip(areas, districts, figures, strict=True)]
    return "area,district,price\n" + "\n".join(lines) + "\n"


def test_a_number_of_any_size_is_learned() -> None:
    model = built("table", prices(), outputs=1)
    columns = load_table("a.csv")
    targets = columns.pop("price")
    texts = {name: column for name, column in columns.items() if column.dtype == object}
    inputs = {name: tf.constant(column.tolist() if name in texts else column) for name, column in columns.items()}
    model.compile(keras.optimizers.Adam(0.001), "mean_squared_error", metrics=["mean_absolute_error"])
    model.fit(inputs, targets, batch_size=32, epochs=10, verbose=0)
    assert model.evaluate(inputs, targets, verbose=0)[1] < 0.2 * np.std(targets)


def refused(capsys: pytest.CaptureFixture[str], table: str | bytes, kind: str = "table") -> str:
    """The one line of `init` on a table that it does not take."""
    Path("a.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
    assert main(["init", kind, "a.csv"]) == 2
    assert [path.name for path in Path().iterdir()] == ["a.csv"]
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("form", ["{:,.0f}", "{:.2f} EUR", "€{:,.2f}", "{:.0f},00", "{:.0f}\u00a0m²"])
def test_numbers_as_people_write_them_are_no_classes(capsys: pytest.CaptureFixture[str], form: str) -> None:
    wrong = f"expected plain numbers, like 1234.5; received {form.format(358415.06)!r}"
    assert f"a.csv: record 0: price: {wrong}" in refused(capsys, prices(form=form))
    for_inputs = prices(form=form).replace("price", "rent", 1).replace("\n", ",sold\n", 1)
    rows = for_inputs.splitlines()[1:]
    table = "\n".join([for_inputs.splitlines()[0], *(f"{row},{number % 3}" for number, row in enumerate(rows))])
    assert f"a.csv: record 0: rent: {wrong}" in refused(capsys, table)


@pytest.mark.parametrize(
    "names", [("1st", "2nd", "3rd"), ("Q1", "Q2"), ("class 1", "class 2"), ("5 stars", "4 stars"), ("13a", "13b", "14")]
)
def test_names_of_classes_may_have_digits(names: tuple[str, ...]) -> None:
    built("table", "size,kind\n" + "".join(f"{n},{names[n % len(names)]}\n" for n in range(60)), outputs=len(names))
    assert len(load(["config.yaml"])[0].data.features["kind"]["class_names"]) == len(names)


def test_texts_that_occur_once_are_no_classes(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "size,name\n" + "".join(f"{n},flat {n:c}{n:c}\n" for n in range(65, 90)))
    assert "a.csv: name has 25 texts in 25 records, of which 25 occur once; they are no classes" in said


def test_an_input_of_texts_that_occur_once_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    built("table", "name,size\n" + "".join(f"flat {n:c}{n:c},{n / 2}\n" for n in range(65, 90)), outputs=1)
    assert "note: name has 25 texts in 25 records" in capsys.readouterr().out


@pytest.mark.parametrize("split", ["val", "valid", "test", None])
def test_folders_of_classes_may_be_in_folders_to_train_and_to_evaluate_on(
    split: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ["train", *([split] if split else [])]:
        for name in ("cat", "dog"):
            Path("pets", folder, name).mkdir(parents=True)
            for number in range(12):
                keras.utils.save_img(f"pets/{folder}/{name}/{number}.png", np.zeros((8, 8, 3)))
    assert main(["init", "images", "pets"]) == 0
    data = load(["config.yaml"])[0].data
    held_out = f"pets/{split}" if split else "pets/train"
    assert (data.paths("train"), data.paths("eval")) == (("pets/train",), (held_out,))
    assert data.fold == (None if split else "1/5")
    assert data.features["label"]["class_names"] == ["cat", "dog"]
    out = capsys.readouterr().out
    assert "24 images in 2 classes: cat, dog" in out
    assert not split or f"24 in pets/{split}, to evaluate" in out


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_a_table_may_be_a_file_of_columns(kind: str) -> None:
    Path("a.csv").write_text(prices(40), encoding="utf-8")
    table = {**load_table("a.csv"), "balcony": np.arange(40) % 2 == 0, "rooms": np.arange(40, dtype=np.uint8)}
    columns = pyarrow.table({**table, "district": pyarrow.array(table["district"]).dictionary_encode()})
    write = pyarrow.parquet.write_table if kind == "parquet" else pyarrow.feather.write_feather
    write(columns, f"a.{kind}")
    assert main(["init", "table", f"a.{kind}", "--target", "price"]) == 0
    model = runpy.run_path("model.py")["build"](outputs=1)
    assert {name: value.dtype for name, value in model.input.items()} == {
        "area": "float32",
        "balcony": "float32",
        "rooms": "float32",
        "district": "string",
    }
    assert main(["check-data", "--config", "config.yaml"]) == 0
    Path("config.yaml").rename("former.yaml")
    Path("model.py").unlink()
    assert main(["init", "table", f"a.{kind}", "--target", "district"]) == 0
    assert load(["config.yaml"])[0].data.features["district"] == {"class_names": ["north", "south"]}


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (
            [1.5, None] * 6,
            "a.parquet: cells are missing or not finite in b (6) of 12 records; fill them or leave those",
        ),
        ([1.5, float("inf"), float("nan")] * 4, "a.parquet: cells are missing or not finite in b (8) of 12 records"),
        ([1.5, -1e300] * 6, "a.parquet: b has numbers beyond 1e+19, by which a model in float32 cannot scale"),
        ([[1, 2]] * 12, "a.parquet: b holds lists; init takes numbers and texts. Leave it out of the file."),
        ([b"\xe9"] * 12, "a.parquet: b holds bytes that are no UTF-8 text; init takes numbers and texts."),
    ],
)
def test_a_file_of_columns_holds_numbers_and_texts(
    column: list[object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": range(12), "b": column, "c": range(12)}), "a.parquet")
    assert main(["init", "table", "a.parquet"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("column", ["c", "b"])
@pytest.mark.parametrize("width", [np.float16, np.float32, np.float64])
def test_arrays_that_are_not_finite_are_refused(
    column: str, width: type[np.floating[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {name: np.arange(40).astype(width) for name in ("b", "c")}
    columns[column][7] = -np.inf
    np.savez("a.npz", allow_pickle=False, **columns)
    assert main(["init", "table", "a.npz"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"a.npz: cells are missing or not finite in {column} (1) of 40 records" in line
    assert not Path("model.py").exists()


@WARNINGS_FAIL
def test_half_precision_is_taken_without_a_warning() -> None:
    np.savez("a.npz", b=np.linspace(0, 6e4, 40).astype(np.float16), c=np.arange(40).astype(np.float16))
    assert main(["init", "table", "a.npz"]) == 0
    assert main(["prepare", "npz", "--file", "a.npz", "--inputs", "b", "--targets", "c", "--out", "records"]) == 0


def test_numbers_as_large_as_a_variance_allows_are_taken() -> None:
    rows = "".join(f"{'-' if n % 2 else ''}9.9e18,{n * 0.5}\n" for n in range(40))
    model = built("table", f"a,b\n{rows}", outputs=1)
    scaled = next(layer for layer in model.layers if isinstance(layer, keras.layers.Normalization))
    assert np.allclose(scaled(np.array([[9.9e18]], np.float32)), 1, atol=0.2)


def test_csv_numbers_beyond_float32_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("1e300", "1e30", "inf"):
        refused(capsys, "a,b\n" + f"{number},1\n" * 20)


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("kind", ["U", "S"])
def test_texts_may_be_arrays(kind: str, is_compressed: bool) -> None:
    words = np.array([f"one {'äb'[n % 2]} w{n % 3}" for n in range(40)])
    words, labels = (
        column if kind == "U" else np.char.encode(column, "utf-8") for column in (words, np.array(["no", "sö"] * 20))
    )
    (np.savez_compressed if is_compressed else np.savez)("A.NPZ.npz", text=words, size=np.arange(40.0), label=labels)
    Path("A.NPZ.npz").rename("A.NPZ")
    for command in (["table", "A.NPZ"], ["table", "A.NPZ", "--target", "size"], ["text", "A.NPZ"]):
        assert main(["init", *command]) == 0
        assert main(["check-data", "--config", "config.yaml"]) == 0
        runpy.run_path("model.py")["build"](2)
        if "--target" not in command:
            assert load(["config.yaml"])[0].data.features["label"] == {"class_names": ["no", "sö"]}
        for written in ("config.yaml", "model.py"):
            Path(written).unlink()
    assert "ä" in Path("vocabulary.txt").read_text(encoding="utf-8").split("\n")


def test_arrays_of_bytes_that_are_no_text_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("a.npz", a=np.array([b"\xe9", b"e"] * 10), b=np.arange(20))
    assert main(["init", "table", "a.npz"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a.npz: a holds bytes that are no UTF-8 text" in line


@pytest.mark.parametrize("name", ["a.tsv", "a.txt", "a", "a.csv.gz", "csv"])
def test_names_that_training_does_not_read_as_tables_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).write_text(prices(40).replace(",", "\t"))
    for kind in ("table", "text"):
        assert main(["init", kind, name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"error: {name}: training reads tables from files that end in .npz, .h5, .hdf5, .parquet"
        )
        assert "rename it to end in .csv" in line
    assert [path.name for path in Path().iterdir()] == [name]


@pytest.mark.parametrize("name", ["A.CSV", "a.b.Csv", ".csv"])
def test_names_that_training_reads_as_csv_are_taken(name: str) -> None:
    Path(name).write_text(prices(40).replace(",", "\t"))
    assert main(["init", "table", name]) == 0
    assert main(["check-data", "--config", "config.yaml"]) == 0


def test_text_in_another_encoding_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "straße,preis\n1,2\n".encode("latin-1"))
    assert said == (
        "error: a.csv: is not UTF-8 text. If it is Latin-1, as spreadsheets often write: "
        "iconv -f latin1 -t utf-8 a.csv > utf8.csv"
    )


def test_missing_cells_are_counted_by_column_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{n};{'' if n % 4 == 3 else n};{'?' if n % 5 == 2 else n};{'' if n % 10 == 6 else 'a'}" for n in range(20)]
    said = refused(capsys, "id;age;rooms;kind\n" + "\n".join(rows) + "\n")
    assert said.startswith("error: a.csv:5: age is empty; fill it or leave the line out. ")
    assert "Cells are missing in age (5), rooms (4), kind (2) of 20 records." in said
    pandas = pytest.importorskip("pandas")
    exec(said[said.index("pandas.read_csv") :], {"pandas": pandas})
    complete = load_table("complete.csv")
    assert [column.dtype.kind for column in complete.values()] == ["i", "i", "i", "O"]
    assert complete["id"].tolist() == [n for n in range(20) if n % 4 != 3 and n % 5 != 2 and n % 10 != 6]


def test_names_of_folders_need_not_be_utf8() -> None:
    names = [os.fsdecode(b"caf\xe9"), "tea"]
    for name in names:
        Path("drinks", name).mkdir(parents=True)
        for number in range(12):
            keras.utils.save_img(f"drinks/{name}/{number}.png", np.zeros((8, 8, 3)))
    assert main(["init", "images", "drinks"]) == 0
    assert load(["config.yaml"])[0].data.features["label"]["class_names"] == names
