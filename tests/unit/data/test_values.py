"""Cells and numbers that no training can use, or that other programs write in their own way."""

from __future__ import annotations

import csv
import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from made_records import batches, config, make_images, pipeline
from made_stores import WRITERS

from horovod_train.commands.check_data import check_records
from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import open_records, other_kinds
from horovod_train.data.prepare.tables import load_table
from horovod_train.data.random_access.arrow import to_arrays
from horovod_train.data.random_access.store import _as_dtype
from horovod_train.errors import UserError

ROWS = 9


def table(folder: Path, *lines: str) -> str:
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "t.csv")


def test_true_and_false_are_1_and_0(tmp_path: Path) -> None:
    columns = load_table(table(tmp_path, "a,b,c", "True,false,true", "FALSE,false,maybe"))
    assert (columns["a"].tolist(), columns["b"].tolist()) == ([1, 0], [0, 0])
    assert columns["a"].dtype == np.int64
    assert columns["c"].tolist() == ["true", "maybe"]


TABLES = {
    "commas": "a,b,c\n1,2.5,x y\n-3,1e3,z\n",
    "semicolons": "a;b;c\n1;2.5;x y\n-3;1e3;z\n",
    "tabs": "a\tb\tc\n1\t2.5\tx y\n-3\t1e3\tz\n",
    "bars": "a|b|c\n1|2.5|x y\n-3|1e3|z\n",
    "decimal commas": "a;b;c\n1;2,5;x y\n-3;1000,0;z\n",
    "blanks": " a, b ,c \n 1 ,2.5, x y\n-3 , 1e3,  z \n",
    "a byte order mark before quotes": '\ufeff"a" ,"b","c"\n"1","2.5","x y"\n-3,1e3,z\n',
    "tabs and no-break spaces after quotes": 'a,"b"\t,"c"\u00a0\n1,"2.5"\t,"x y"\u00a0\n-3,1e3,z\n',
    "quoted after blanks": 'a, "b", c\n1, "2.5", "x y"\n-3, 1e3, z\n',
    "a byte order mark": "\ufeffa,b,c\n1,2.5,x y\n-3,1e3,z\n",
    "Windows": "a;b;c\r\n1;2,5;x y\r\n\r\n-3;1000;z\r\n",
}


@pytest.mark.parametrize("form", TABLES)
def test_a_table_is_read_as_other_programs_write_it(form: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(TABLES[form].encode())
    columns = load_table(str(tmp_path / "t.csv"))
    assert {name: column.tolist() for name, column in columns.items()} == {
        "a": [1, -3],
        "b": [2.5, 1000],
        "c": ["x y", "z"],
    }
    assert (columns["a"].dtype.name, columns["b"].dtype.name) == ("int64", "float32")


def test_the_separator_is_that_of_the_header_and_commas_in_texts_remain(tmp_path: Path) -> None:
    columns = load_table(table(tmp_path, "review,mood", '"good; very; good",1', "a;b,2"))
    assert columns["review"].tolist() == ["good; very; good", "a;b"]
    columns = load_table(table(tmp_path, "review;mood", "good, very good;1", "3,5;2"))
    assert columns["review"].tolist() == ["good, very good", "3,5"]
    assert load_table(table(tmp_path, "text", "a", "b;c"))["text"].tolist() == ["a", "b;c"]
    with pytest.raises(UserError, match=r"t\.csv:3: b is empty; fill it"):
        load_table(table(tmp_path, "a;b", "1;2", "3; "))


def test_columns_that_are_not_read_may_hold_anything(tmp_path: Path) -> None:
    path = table(tmp_path, "a,b,y,comment,comment,age", "1,2,0,,x,3", "3,4,1,good,,1e300")
    records = open_records(DataConfig(train=(path,), inputs=("a", "b"), targets=("y",)), "train")
    assert records.num_records == 2
    with pytest.raises(UserError, match="the header names a column twice"):
        open_records(DataConfig(train=(path,), inputs=("a", "comment"), targets=("y",)), "train")


def test_labels_may_be_empty_where_none_are_needed(tmp_path: Path) -> None:
    """As in a test set whose classes are to be predicted."""
    data = DataConfig(train=(table(tmp_path, "a,b,y", "1,2,", "3,4,"),), targets=("y",))
    found = open_records(data, "train", needs_labels=False)
    assert (found.num_records, sorted(found.schema.features)) == (2, ["a", "b"])
    with pytest.raises(UserError, match="y is empty; fill it"):
        open_records(data, "train")


def test_a_quote_that_is_not_closed_is_named_and_swallows_no_records(tmp_path: Path) -> None:
    rows = [f"{n},text {n}" for n in range(400)]
    rows[100] = '100,"text 100'
    with pytest.raises(
        UserError, match=r"t\.csv:102: expected a row of a csv file; up to line 401: unexpected end of d"
    ):
        load_table(table(tmp_path, "y,text", *rows))
    rows[200] = '200,the "text" 200'  # a later quote ends the cell
    with pytest.raises(
        UserError, match=r"t\.csv:102: expected a row of a csv file; up to line 202: ',' expected after"
    ):
        load_table(table(tmp_path, "y,text", *rows))


def test_texts_in_quotes_are_read_as_they_are_quoted(tmp_path: Path) -> None:
    texts = ['"a, b"', '"two\nlines"', '"say ""no"" , x"', '"""a"" , b"', '"b" ', ' "c"  ']
    columns = load_table(table(tmp_path, "text,y", *(f"{text},{n}" for n, text in enumerate([*texts, '5" pipe']))))
    assert columns["text"].tolist() == ["a, b", "two\nlines", 'say "no" , x', '"a" , b', "b", "c", '5" pipe']
    assert columns["y"].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_cell_may_be_as_long_as_it_is(tmp_path: Path) -> None:
    text = "word " * 50_000
    assert load_table(table(tmp_path, "y,text", f"0,{text}", "1,short"))["text"].tolist() == [text.strip(), "short"]
    assert csv.field_size_limit() < len(text)  # by which predict, too, tells files that it did not write


@pytest.mark.long
def test_a_table_takes_a_few_times_its_file_while_it_is_read(tmp_path: Path) -> None:
    """Small numbers, of which each took 30 times its room."""
    path = table(tmp_path, "a,b,c,y", *(f"{n % 97},{n % 89},{n % 83},{n % 3}" for n in range(200_000)))
    tracemalloc.start()
    try:
        load_table(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10 * Path(path).stat().st_size


@pytest.mark.parametrize("cell", ["NA", "n/a", "null", "-", " None ", "NaN"])
def test_a_cell_without_a_number_among_numbers_is_named(cell: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"t\.csv:4: b holds numbers, and here '{cell.strip()}'; write a number or leave the"
    ):
        load_table(table(tmp_path, "a,b", "1,2", "3,4.5", f"5,{cell}", "6,7"))
    words = load_table(table(tmp_path, "a,b", "1,north", f"5,{cell}"))
    assert words["b"].tolist() == ["north", cell.strip()]
    assert load_table(table(tmp_path, "a", cell))["a"].tolist() == [cell.strip()]


@pytest.mark.parametrize("cell", ["inf", "-Infinity", "1e39", "9" * 5000])
def test_a_number_that_float32_does_not_hold_is_named(cell: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load_table(table(tmp_path, "a,b", "1,2.5", f"3,{cell}", "5,6"))
    said = f"t.csv:3: b: expected a finite number that float32 holds; received {cell!r:.60}."
    assert str(raised.value) == f"{tmp_path}/{said}"


def test_whole_numbers_that_float32_makes_one_of_are_said(tmp_path: Path, said: list[str]) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{2**24 + n}.0,{rng.random()!r},{rng.normal() * 1e20!r},{rng.integers(2**40)},{n}.5" for n in range(5000)]
    load_table(table(tmp_path, "id,decimal,large,whole,half", *rows))
    (line,) = said
    assert line.startswith(
        f"warning: {tmp_path}/t.csv: id: some of its whole numbers beyond 2^24 become one as float32"
    )
    said.clear()
    load_table(table(tmp_path, "id", "16777216.0", "16777218.5"))
    assert not said


@pytest.mark.parametrize("form", WRITERS)
def test_records_with_numbers_that_are_not_finite_are_named(form: str, tmp_path: Path) -> None:
    x = np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 1, 2)
    x[3, 0, 1], x[5, 0, 0], x[5, 0, 1] = np.nan, np.inf, np.nan
    path = WRITERS[form](tmp_path, {"x": x, "y": np.arange(ROWS)})
    report = check_records(config(path, targets=("y",)))
    assert report.bad == [
        f"{path}: record 3: feature x: expected finite numbers; the record holds nan.",
        f"{path}: record 5: feature x: expected finite numbers; the record holds inf.",
    ]
    summary, finite = report.features["x"], x[np.isfinite(x)]
    assert summary.figures() == [0.0, 17.0, pytest.approx(float(finite.mean()))]


def test_a_label_without_an_output_is_one_line(tmp_path: Path) -> None:
    made = pipeline(config(make_images(tmp_path / "train")))
    assert open_records(config(tmp_path / "train"), "train").num_records == made.num_records

    @tf.function
    def loss() -> tf.Tensor:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant([0, 9]), tf.zeros((2, 5)))

    said = r"data\.targets: a record has the label 9; the model has outputs for labels from 0 to 4\. "
    with tf.device("cpu:0"), pytest.raises(UserError, match=said), made.explaining():
        loss()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Matrix size"), made.explaining():
        tf.linalg.matmul(tf.zeros((2, 3)), tf.zeros((2, 3)))


def test_an_index_of_pandas_is_no_input(tmp_path: Path) -> None:
    """Which would tell a model the order of the rows: a column without a name, and __index_level_0__ of Parquet."""
    rows = [(0.5, "a"), (1.5, "b"), (2.5, "a")]
    (tmp_path / "t.csv").write_text(",x,y\n" + "".join(f"{n},{x},{y}\n" for n, (x, y) in enumerate(rows)))
    assert list(load_table(str(tmp_path / "t.csv"))) == ["x", "y"]
    (tmp_path / "t.csv").write_text(",x,y\n7,0.5,a\n3,1.5,b\n")  # of rows that were chosen
    assert list(load_table(str(tmp_path / "t.csv"))) == ["x", "y"]
    table = pa.table({"x": [0.5, 1.5], "y": [0, 1], "__index_level_0__": [7, 3]})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    data = config(tmp_path / "t.parquet", targets=("y",), shuffle=False)
    assert open_records(data, "train").schema.inputs == ("x",)
    data = config(tmp_path / "t.parquet", inputs=("x", "__index_level_0__"), targets=("y",), shuffle=False)
    assert open_records(data, "train").schema.inputs == ("x", "__index_level_0__")


def test_points_beside_decimal_commas_may_be_thousands(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("price;part\n1.250;0,5\n980;1,5\n")
    with pytest.raises(UserError, match=r"t\.csv:2: price: 1\.250 has a point, and other numbers .* decimal commas"):
        load_table(str(path))
    path.write_text("price;part\n1.250,5;x\n2,25;y\n")
    with pytest.raises(UserError, match=r"t\.csv:2: price: 1\.250,5 has a point"):
        load_table(str(path))
    path.write_text("version;price\n1.2.3,4;0,5\n")
    assert load_table(str(path))["version"].tolist() == ["1.2.3,4"]
    path.write_text("price;part\n1.250;0.5\n980;1.5\n")
    assert load_table(str(path))["price"].tolist() == [1.25, 980.0]
    path.write_text("tag;price\n1,2;0.5\nabc;1.5\n")  # a comma in a text is none of a number
    assert load_table(str(path))["price"].tolist() == [0.5, 1.5]


def test_a_scale_for_integers_in_one_split_and_floats_in_the_other_is_said(tmp_path: Path) -> None:
    """As of images of bytes, and others from 0 to 1. Only said, because floats may have the range of the integers."""
    said = ["data.eval: x is float32, and uint8 in data.train; "]
    for shape, features, expected in (
        ((4, 4), {"x": {"scale": 1 / 255}}, [f"{said[0]}its scale"]),
        ((4, 4), {}, []),
        ((4, 4, 1), {}, [f"{said[0]}neither is scaled"]),
    ):
        images = np.random.default_rng(0).integers(0, 255, (4, *shape)).astype(np.uint8)
        np.savez(tmp_path / "train.npz", x=images, y=np.arange(4))
        np.savez(tmp_path / "eval.npz", x=images.astype(np.float32) / 255, y=np.arange(4))
        data = config(tmp_path / "train.npz", inputs=("x",), targets=("y",), features=features)
        data = dataclasses.replace(data, eval=(str(tmp_path / "eval.npz"),))
        lines = list(other_kinds(open_records(data, "eval"), open_records(data, "train").schema.features, "data.train"))
        assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


@pytest.mark.parametrize("skips", [False, True])
def test_whole_numbers_of_one_file_are_floats_beside_those_of_another(skips: bool, tmp_path: Path) -> None:
    for name, cells in (("a", ["1.5", "2.5"]), ("b", ["1", "2"]), ("c", [])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y", *(f"{cell},0" for cell in cells)]) + "\n")
    data = config(tmp_path, targets=("y",), shuffle=False, on_bad_record="skip" if skips else "error")
    data = dataclasses.replace(data, train=tuple(str(tmp_path / f"{name}.csv") for name in "cab"))
    (batch,) = batches(pipeline(data, batch=4))
    assert np.asarray(batch.inputs).tolist() == [1.5, 2.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "stored", "fits"),
    [
        (np.array([2**24]), "float32", True),
        (np.array([2**24 + 1]), "float32", True),
        (np.array([1e6], np.float32), "float16", False),
        (np.array([np.inf, 0.1]), "float32", True),
        (np.array([1.0]), "int64", False),
        (np.array([1], np.uint8), "int64", True),
    ],
)
def test_numbers_keep_their_values_in_another_dtype_or_do_not_fit(values: np.ndarray, stored: str, fits: bool) -> None:
    array = _as_dtype(values, stored)
    assert (array is not None) == fits
    if array is not None:
        assert array.dtype == stored
        assert np.allclose(array.astype(np.float64), values, rtol=1e-6)


def test_an_empty_chunk_of_lists_holds_no_value() -> None:
    chunked = pa.chunked_array([pa.array([], pa.list_(pa.int64())), pa.array([[1, 2], [3]])])
    (values,) = to_arrays(pa.table({"x": chunked})).values()
    assert [value.tolist() for value in values] == [[1, 2], [3]]
