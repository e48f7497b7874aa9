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


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_a_column_may_have_a_name_that_no_layer_may(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{n},{'no' if n % 3 else 'so'},{n * 0.5}\n" for n in range(20))
    model = built("table", f"km/h,side,price\n{rows}", outputs=1)
    assert {*model.input} == {"km/h", "side"}
    assert "km/h (numbers), side (text) → price, a number" in capsys.readouterr().out


def test_a_column_whose_name_has_several_lines_leaves_the_config_whole() -> None:
    built("table", '"a\nb",price\n' + "".join(f"{n},{n * 0.5}\n" for n in range(20)), outputs=1)
    assert load(["config.yaml"])[0].data.inputs == ("a\nb",)
