"""Images without labels, to predict: in a folder, in its folders, of a glob, or one file; each named by its path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import Records, open_records
from horovod_train.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for name in ("b.jpg", "a.png", "notes.txt", "deep/er/c.jpeg", ".hidden/d.jpg", "e.webp", "f.bmp", "g.gif"):
        path = tmp_path / "new" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".txt":
            path.write_text("no image")
        else:
            image.new("RGB", (8, 8)).save(path)
    return tmp_path / "new"


def opened(paths: Sequence[object], feature: str = "image", *, needs_labels: bool = False, **more: object) -> Records:
    features = {feature: {"decode": "image", "shape": [8, 8, 3]}}
    data = DataConfig(eval=tuple(map(str, paths)), inputs=(feature,), targets=("label",), features=features)
    return open_records(data, "eval", needs_labels=needs_labels)


def test_a_folder_a_glob_and_files_name_their_images(folder: Path) -> None:
    of_folder = opened([folder])
    assert of_folder.files() == [
        str(folder / name) for name in ("a.png", "b.jpg", "deep/er/c.jpeg", "e.webp", "f.bmp", "g.gif")
    ]
    assert "notes.txt" in of_folder.notes[0]
    assert opened([folder / "*.jpg"]).files() == [str(folder / "b.jpg")]
    assert opened([folder / "b.jpg", folder / "a.png"]).files() == [str(folder / "b.jpg"), str(folder / "a.png")]
    assert sorted(path.name for path in folder.iterdir()) == [
        ".hidden",
        "a.png",
        "b.jpg",
        "deep",
        "e.webp",
        "f.bmp",
        "g.gif",
        "notes.txt",
    ]


def test_the_feature_is_the_one_that_the_config_decodes(folder: Path) -> None:
    assert opened([folder], "image/encoded").schema.inputs == ("image/encoded",)


def test_the_digest_follows_the_files(folder: Path) -> None:
    before = opened([folder]).digest
    assert opened([folder]).digest == before
    (folder / "b.jpg").write_bytes((folder / "a.png").read_bytes())
    assert opened([folder]).digest != before


def test_what_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        opened([folder / "nowhere"])


def test_training_still_needs_a_folder_for_each_class(folder: Path) -> None:
    with pytest.raises(UserError):
        opened([folder], needs_labels=True)


def test_folders_of_classes_need_not_be_those_of_training(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("p/cat", "p/dog", "q/unknown"):
        (folder / name).mkdir(parents=True)
        image.new("RGB", (8, 8)).save(folder / name / "0.jpg")
    features = {"image": {"decode": "image", "shape": [8, 8, 3]}, "label": {"class_names": ["cat", "dog"]}}
    data = DataConfig(
        train=(str(folder / "p"),),
        eval=(str(folder / "q"),),
        inputs=("image",),
        targets=("label",),
        features=features,
    )
    records = open_records(data, "eval", needs_labels=False)
    assert records.files() == [str(folder / "q/unknown/0.jpg")]
    with pytest.raises(UserError, match="has the class"):
        open_records(data, "eval")


def test_images_beside_and_below_the_folders_of_classes_are_predicted_too(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    root = folder.parent / "photos"
    in_classes = ["2024-1/x.jpg", "2024-1/y.jpg", "2024/z.jpg"]
    for name in [*in_classes, "@eaDir/thumb.jpg", ".hidden/x.jpg"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8)).save(root / name)
    trained_on = opened([root], needs_labels=True).files()
    assert opened([root]).files() == trained_on  # as evaluation counts them
    for name in ("top.jpg", "2024-1/deep/w.jpg"):
        (root / name).parent.mkdir(exist_ok=True)
        image.new("RGB", (8, 8)).save(root / name)
    assert {*opened([root]).files()} == {*trained_on, str(root / "top.jpg"), str(root / "2024-1/deep/w.jpg")}
    assert opened([root], needs_labels=True).files() == trained_on


def test_files_of_a_fold_are_those_of_its_records(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(10):
        path = folder / "p" / ("cat" if number % 2 else "dog") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8)).save(path)
    data = DataConfig(
        train=(str(folder / "p"),),
        eval=(str(folder / "p"),),
        fold="1/5",
        targets=("label",),
        features={"image": {"shape": [8, 8, 3]}},
    )
    train, held_out = open_records(data, "train"), open_records(data, "eval")
    assert len(train.files()) == 8
    assert len(held_out.files()) == 2
    assert not {*train.files()} & {*held_out.files()}
    load = held_out.source.open()
    named = [load(block).name(0, "broken") for block in range(len(held_out.source.blocks.records))]
    assert named == [f"{file}: broken." for file in held_out.files()]
