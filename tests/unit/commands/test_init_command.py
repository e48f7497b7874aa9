"""`init` on data whose names and texts are not plain: what it writes is read and built as it stands."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import keras
import pytest

from horovod_train.config.loader import load
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("other", ["side", "km_h", "km_h_1"])
def test_columns_may_have_names_that_no_layer_may(capsys: pytest.CaptureFixture[str], other: str) -> None:
    """Nor need those be different that layers get in their place, and Keras need not tell the user."""
    rows = "".join(f"{n},{'no' if n % 3 else 'so'},{n * 0.5}\n" for n in range(20))
    model = built("table", f"km/h,{other},price\n{rows}", outputs=1)
    assert {*model.input} == {"km/h", other}
    assert f"km/h (numbers), {other} (text) → price, a number" in capsys.readouterr().out
    keras.models.clone_model(model)


@pytest.mark.filterwarnings("error")
def test_inputs_of_records_may_have_names_that_no_layer_may() -> None:
    rows = "".join(f"{n},{n % 3},{n * 0.5}\n" for n in range(20))
    Path("a.csv").write_text(f"km/h,km_h,price\n{rows}")
    words = ["--separate", "--targets", "price", "--shards", "1", "--eval-fraction", "0.2"]
    assert main(["prepare", "csv", "--file", "a.csv", "--out", "records", *words]) == 0
    assert main(["init", "tfrecords", "records"]) == 0
    model = runpy.run_path("model.py")["build"](outputs=1)
    assert {*model.input} == {"km/h", "km_h"}


def test_a_column_whose_name_has_several_lines_leaves_the_config_whole() -> None:
    built("table", '"a\nb",price\n' + "".join(f"{n},{n * 0.5}\n" for n in range(20)), outputs=1)
    assert load(["config.yaml"])[0].data.inputs == ("a\nb",)
