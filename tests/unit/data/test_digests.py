"""What identifies files and classes that are read by number: copies are equal, and any change is noticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_records import config, pipeline
from made_stores import WRITERS, write_hdf5
from test_random_access import ARRAYS, of_class, read
from user_sources import RECORDS

from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import open_records
from horovod_train.errors import UserError


def digest(data: DataConfig) -> str:
    return open_records(data, "train").digest


@pytest.mark.parametrize("form", WRITERS)
def test_copies_are_equal_and_changed_files_are_not(form: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    path = WRITERS[form](tmp_path / "one", ARRAYS)
    first = digest(config(path, targets=("y",)))
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns("digests.json"))
    copy = tmp_path / "two" / path.name
    for file in [copy, *copy.glob("*")]:
        os.utime(file, (1, 1))
    assert digest(config(copy, targets=("y",))) == first
    WRITERS[form](tmp_path / "two", ARRAYS | {"y": np.roll(ARRAYS["y"], 1)})
    assert digest(config(copy, targets=("y",))) != first


def test_a_file_is_read_whole_only_once(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path, ARRAYS)
    digest(config(path, targets=("y",)))
    kept = json.loads((tmp_path / "digests.json").read_text())
    kept["digests"]["a.h5"]["digest"] = "as it was kept"
    (tmp_path / "digests.json").write_text(json.dumps(kept))
    assert open_records(config(path, targets=("y",)), "train").source.parts[0].digest == "as it was kept"
    os.utime(path, (1, 1))
    assert open_records(config(path, targets=("y",)), "train").source.parts[0].digest != "as it was kept"


def test_digests_go_where_the_config_says_and_replace_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    path = write_hdf5(tmp_path, ARRAYS)
    (tmp_path / "digests.json").write_text("{}")
    one = digest(config(path, targets=("y",)))
    assert (tmp_path / "digests.json").read_text() == "{}"
    assert len(list((tmp_path / "home/.cache/horovod_train/index").iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert digest(config(path, targets=("y",))) == one
    assert len(list((tmp_path / "cache/horovod_train/index").iterdir())) == 1
    assert digest(config(path, targets=("y",), index_dir=str(tmp_path / "kept"))) == one
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_class_is_identified_by_its_fingerprint_or_else_by_some_records() -> None:
    first = open_records(of_class("Named"), "train")
    assert not first.notes
    assert digest(of_class("Named", changed=5)) != first.digest  # other options
    assert digest(of_class("Named", says="second")) != digest(of_class("Named", says="third"))
    (note,) = open_records(of_class("Items"), "train").notes
    assert note.startswith("data.source: user_sources:Items has no fingerprint()")
    assert digest(of_class("Items")) == digest(of_class("Items"))
    assert digest(of_class("Items")) != digest(of_class("Items", records=RECORDS - 1))


@pytest.mark.parametrize("form", WRITERS)
def test_a_file_that_changes_while_in_use_ends_the_run(form: str, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    path = WRITERS[form](tmp_path, ARRAYS)
    made = pipeline(config(path, targets=("y",), on_bad_record="skip"))
    other = WRITERS[form](tmp_path / "new", {name: array[:-1] for name, array in ARRAYS.items()})
    for new in [other] if other.is_file() else other.iterdir():
        new.replace(path if other.is_file() else path / new.name)
    with pytest.raises(UserError, match="was changed while in use"):
        read(made)
