"""HDF5 files that refer to other files, contain themselves or declare what they do not hold are refused in one line."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from keras import layers
from made_records import config

from horovod_train.config.settings import ModelSpec
from horovod_train.data.dataset import open_records
from horovod_train.errors import UserError
from horovod_train.training.fine_tuning import match

ROWS = 8
BIAS = "layers/dense/vars/1"


def external_storage(file: h5py.File, name: str, key: str) -> None:
    file.create_dataset(name, (ROWS,), "float32", external=[(key, 0, 4 * ROWS)])


def external_link(file: h5py.File, name: str, key: str) -> None:
    with h5py.File(f"{key}.other.h5", "w") as other:
        other["x"] = np.ones(ROWS, np.float32)
    file[name] = h5py.ExternalLink(f"{key}.other.h5", "x")


def soft_link_out(file: h5py.File, name: str, key: str) -> None:
    external_link(file, "zzz", key)
    file[name] = h5py.SoftLink("/zzz")


def virtual(file: h5py.File, name: str, key: str) -> None:
    external_link(h5py.File(f"{key}.unused.h5", "w"), "x", key)
    layout = h5py.VirtualLayout((ROWS,), "float32")
    layout[:] = h5py.VirtualSource(f"{key}.other.h5", "x", shape=(ROWS,))
    file.create_virtual_dataset(name, layout)


OUTSIDE: dict[str, tuple[Callable[[h5py.File, str, str], None], str]] = {
    "external storage": (external_storage, "is values kept in the file "),
    "external link": (external_link, "is a link to the file "),
    "soft link out": (soft_link_out, "zzz is a link to the file "),
    "virtual": (virtual, "is a view of other datasets"),
}


def small_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(ROWS, name="dense"), layers.Dense(2, name="head")], name="net"
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    small_model().save_weights(tmp_path / "a.weights.h5")
    return tmp_path / "a.weights.h5"


def change(path: Path, write: Callable[[h5py.File], None]) -> Path:
    with h5py.File(path, "a") as file:
        write(file)
    return path


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        read()
    said = str(error.value)
    assert "\n" not in said
    return said


def take(path: Path, **settings: Any) -> dict[str, np.ndarray]:
    return match(small_model(), ModelSpec("x", init_from=str(path), **settings)).taken


def in_keras_file(weights: Path) -> Path:
    small_model().save(path := weights.with_suffix(".keras"))
    with zipfile.ZipFile(path) as archive:
        kept = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (kept | {"model.weights.h5": weights.read_bytes()}).items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("kind", OUTSIDE)
@pytest.mark.parametrize("form", ["records", "weights", "keras"])
def test_a_file_that_refers_to_others_is_refused(kind: str, form: str, weights: Path, tmp_path: Path) -> None:
    (key := tmp_path / "key.txt").write_bytes(b"a key of the user" * 10)
    write, said = OUTSIDE[kind]
    if form == "records":
        path = change(tmp_path / "records.h5", lambda file: write(file, "inner/x", str(key)))
        found = refusal(lambda: open_records(config(path), "train"))
        assert found.startswith(f"{path}: ")
    else:

        def replace(file: h5py.File) -> None:
            del file[BIAS]
            write(file, BIAS, str(key))

        path = change(weights, replace) if form == "weights" else in_keras_file(change(weights, replace))
        found = refusal(lambda: take(path))
        assert found.startswith(f"model.init_from: {path}: ")
    assert said in found


def contain_itself(file: h5py.File) -> None:
    file["layers"]["again"] = file["/"]


def declare_too_much(file: h5py.File) -> None:
    file.create_dataset("layers/zzz/vars/0", (2**45,), "float32", chunks=(1024,))
    file["layers/loop"] = h5py.SoftLink("/layers")


@pytest.mark.parametrize("write", [contain_itself, declare_too_much])
def test_weights_in_a_file_that_contains_itself_or_declares_too_much_are_taken(
    write: Callable[[h5py.File], None], weights: Path
) -> None:
    """What the model does not have is not read."""
    assert len(take(change(weights, write))) == 4


def test_a_shape_that_is_not_the_models_is_refused_before_values_are_read(weights: Path) -> None:
    def replace(file: h5py.File) -> None:
        del file[BIAS]
        file.create_dataset(BIAS, (2**45,), "float32", chunks=(1024,))

    found = refusal(lambda: take(change(weights, replace)))
    assert f"dense/bias has shape [{2**45}] there and [{ROWS}] in the model" in found


def test_a_damaged_layer_that_is_left_out_is_not_read(weights: Path) -> None:
    def replace(file: h5py.File) -> None:
        del file[BIAS]
        file.create_dataset(BIAS, data=np.arange(ROWS, dtype="float32"), chunks=(ROWS,), compression="gzip")

    change(weights, replace)
    with h5py.File(weights) as file:
        place = file[BIAS].id.get_chunk_info(0).byte_offset
    content = bytearray(weights.read_bytes())
    content[place : place + 8] = b"damaged!"
    weights.write_bytes(content)
    assert "cannot be read as a file of Keras 3: " in refusal(lambda: take(weights))
    assert len(take(weights, init_exclude=("dense/",))) == 2


@pytest.mark.parametrize("value", [np.bytes_(b"text"), np.array(["a", "b"], object), h5py.Empty("f")])
def test_what_is_no_array_of_numbers_is_refused(value: object, weights: Path) -> None:
    def replace(file: h5py.File) -> None:
        del file[BIAS]
        file.create_dataset(BIAS, data=value)

    assert "dense/bias" in refusal(lambda: take(change(weights, replace)))


def test_weights_in_bfloat16_are_read(tmp_path: Path) -> None:
    keras.config.set_floatx("bfloat16")
    try:
        (made := small_model()).save_weights(tmp_path / "b.weights.h5")
    finally:
        keras.config.set_floatx("float32")
    taken = take(tmp_path / "b.weights.h5")
    kernel = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(made.weights[0], "float32")))
    assert np.array_equal(taken["net/dense/kernel"].astype("float32"), kernel)


@pytest.mark.parametrize("shape", [(2**45,), (2**45, 0), (3, 2**50)])
def test_records_that_are_declared_and_not_there_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    def write(file: h5py.File) -> None:
        file.create_dataset("x", shape, "uint8", chunks=tuple(min(size, 1024) or 1 for size in shape), maxshape=shape)

    path = change(tmp_path / "a.h5", write) if 0 not in shape else tmp_path / "a.h5"
    if 0 in shape:
        change(path, lambda file: file.create_dataset("x", shape, "uint8"))
    assert "expected values that are there" in refusal(lambda: open_records(config(path), "train"))


def test_records_in_a_file_that_contains_itself_are_read_once(tmp_path: Path) -> None:
    def write(file: h5py.File) -> None:
        file["a/x"] = np.arange(5)
        file["a/loop"] = file["/"]
        file["soft"] = h5py.SoftLink("/a/x")

    assert open_records(config(change(tmp_path / "a.h5", write)), "train") is not None


def test_groups_that_are_too_deep_are_refused(tmp_path: Path) -> None:
    path = change(tmp_path / "a.h5", lambda file: file.create_dataset("/".join("a" * 300), data=np.arange(5)))
    assert "more than 100 deep" in refusal(lambda: open_records(config(path), "train"))
    shutil.copy(path, deep := tmp_path / "deep.weights.h5")
    assert "more than 100 deep" in refusal(lambda: take(deep))
