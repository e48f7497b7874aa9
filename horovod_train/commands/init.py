"""The command `init`: looks at data and writes a config for it, with a model where one is due. No TensorFlow.

python -m horovod_train.main init images photos
python -m horovod_train.main init table flats.csv --target price

What it writes is to be read and changed. Replaces no file. The models, which are the user's from then on, are texts at
the end of this file.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from horovod_train.data.files import fits, has_records
from horovod_train.data.prepare.images import class_names, list_images
from horovod_train.data.random_access import FILES
from horovod_train.data.random_access.numpy_files import refuse_one_array
from horovod_train.data.random_access.source import OpenStore
from horovod_train.data.random_access.store import Request, read_block
from horovod_train.data.schema import DATASET_NAME, Schema, load_schema
from horovod_train.data.subsets import parts_of_records
from horovod_train.errors import UserError, one_line
from horovod_train.output.console import to_stdout
from horovod_train.shown_text import listed, printable

FOLDS = 5
"""One record in so many is held out to evaluate on."""
MOST_CLASSES = 20
"""Whole numbers of more values than this are numbers to predict, not classes."""
MOST_TEXTS = 1000
"""The most different texts that a column may have to be looked up in a vocabulary."""
MOST_WORDS = 10_000
MOST_SIZE = 1e19
"""The variance of larger numbers may be beyond float32."""
MOST_ROUNDING = 0.01
"""The coarsest step between numbers in float32, as a part of their standard deviation, that leaves them different."""
SMALLEST_INPUT = 1e-6
"""keras.layers.Normalization divides by 1e-7 at least."""
SMALLEST_TARGET = 0.01
"""Gradients of a squared error are as its square, and Adam adds 1e-7 to theirs: at 0.001 little is learned."""
NEARLY_ALL = 0.9
_WRITTEN_NUMBER = re.compile(
    r"(?P<sign>[^\w\s.,+-]?)\s*[+-]?(\d{1,3}(?P<between>[\s.,'’])\d{3}((?P=between)\d{3})*([.,]\d+)?|\d+([.,]\d+)?)"
    r"(?P<unit>\s*\D{0,8})"
)
"""A number as people write it: $1,234.50 or 1.234,50 EUR."""
_LAYER_NAME = re.compile(r"(output|(cast|concatenate|dense|flatten|normalization|rescaling|string_lookup)(_\d+)?)")
"""The names of the layers that a model gets here, which no input may have."""
_PUNCTUATION = re.compile(r"""[!"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~']""")
"""What keras.layers.TextVectorization removes by default."""


class Draft(NamedTuple):
    """What `init` writes: the config as (comment, section) pairs, and other files by name."""

    found: str
    """What the data holds, in a sentence."""
    sections: Sequence[tuple[str, Mapping[str, Any]]]
    files: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (_, path, text) in KINDS.items():
        kind = kinds.add_parser(name, help=text, description=text)
        if path:
            kind.add_argument("path", metavar=path)
        if name in ("table", "text"):
            kind.add_argument("--target", metavar="COLUMN", help="what to predict; default: the last column")
        if name == "text":
            kind.add_argument("--text", metavar="COLUMN", help="default: the column with the longest texts")
        if name == "images":
            kind.add_argument("--size", type=int, default=96, help="height and width; default %(default)s")
        kind.add_argument("--out", default="config.yaml", metavar="FILE", help="default %(default)s, in this folder")


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    if out.parent != Path() or out.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--out {out}: expected a name that ends in .yaml, in this folder, where the config's modules are found."
        )
    describe, _, _ = KINDS[arguments.kind]
    draft = describe(arguments)
    texts = {out.name: _config_text(draft, out.name), **draft.files}
    contents = {name: text.encode() for name, text in texts.items()}  # before there is a file
    for name in contents:
        if Path(name).exists():
            raise UserError(f"init: {name} exists already, and stays as it is. Work in another folder, or rename it.")
    for name, content in contents.items():
        try:
            with open(name, "xb") as file:
                file.write(content)
        except OSError as error:
            raise UserError(f"init: {name}: cannot be written: {error.strerror}.") from error
    to_stdout(draft.found)
    to_stdout(f"wrote {', '.join(texts)}")
    to_stdout(f"next: python -m horovod_train.main plan --config {out.name}")
    to_stdout(f"then: horovodrun -np 2 python -m horovod_train.main --config {out.name}")
    return 0


def _images(arguments: argparse.Namespace) -> Draft:
    path, size = arguments.path.rstrip("/"), arguments.size
    if size < 32:
        raise UserError(f"init: --size must be at least 32; received {size}.")
    path, held_out = _splits_of_images(path)
    classes, files, note = list_images(path)
    counts = Counter(file.parent.name for file in files)
    few = [name for name in classes if not counts[name]]
    if len(classes) < 2 or few:
        problem = f"{few[0]} has no image" if few else f"it has one, {classes[0]}"
        raise UserError(f"{path}: expected a folder with images for each of at least two classes; {problem}.")
    features = {
        "image": {"decode": "image", "shape": [size, size, 3], "resize": "crop", "cast": "float32"},
        "label": {"class_names": classes},
    }
    split = _split(len(files))
    if held_out:
        others = list_images(held_out)
        if differing := sorted({*classes} ^ {*others.classes}):
            raise UserError(f"{held_out}: expected the classes of {path}; {differing[0]} is only in one of the two.")
        split = f"in {path}, to train; {len(others.files)} in {held_out}, to evaluate"
    sections = [
        _data(path, features, ["label"], held_out, augment=[{"name": "flip"}]),
        _model({"classes": len(classes), "image_size": size}),
        *_classification(epochs=20),
    ]
    found = f"{len(files)} images in {len(classes)} classes: {listed(classes)}; {split}"
    return Draft(f"{found}{f'; note: {note}' if note else ''}", sections, {"model.py": IMAGE_MODEL})


def _splits_of_images(path: str) -> tuple[str, str]:
    """Return the folders to train and to evaluate on, if folders of classes are in such; else this one and ""."""

    def with_classes(names: Sequence[str]) -> str:
        folders = [str(Path(path, name)) for name in names]
        return next((folder for folder in folders if Path(folder).is_dir() and class_names(folder)), "")

    train = with_classes(["train", "training"])
    return (train, with_classes(["val", "valid", "validation", "eval", "test"])) if train else (path, "")


def _table(arguments: argparse.Namespace) -> Draft:
    table, target = _read_table(arguments)
    inputs = {name: column for name, column in table.items() if name != target}
    if not inputs:
        raise UserError(f"{arguments.path}: nothing is left to predict {target} from; expected two columns or more.")
    layers, notes = list[str](), list[str]()
    records = len(table[target])
    is_trained_on = parts_of_records(records, FOLDS) != 0
    for name, column in inputs.items():
        if column.dtype == object:
            _refuse_written_numbers(arguments.path, name, column)
            texts = sorted(set(column.tolist()))
            if len(texts) > NEARLY_ALL * records:
                notes.append(f"{name} has {len(texts)} texts in {records} records, and says little of others")
            if len(texts) > MOST_TEXTS:
                raise UserError(
                    f"{arguments.path}: column {name} has {len(texts)} different texts, more than can be looked up "
                    f"({MOST_TEXTS}). Leave it out of the file, or see: init text."
                )
            layers.append(f"    {name!r}: {texts!r},")
        else:
            numbers = column[is_trained_on].astype(np.float64)
            layers.append(f"    {name!r}: ({float(numbers.mean())!r}, {float(numbers.var() or 1.0)!r}),")
            notes += _notes_on_size(name, column, SMALLEST_INPUT)
    names = _classes_of(table[target])
    ends = _classification(epochs=30) if names else _regression()
    output = CLASS_OUTPUT
    if not names:
        numbers = table[target][is_trained_on].astype(np.float64)
        scale = f"{float(numbers.std() or 1.0)!r}, offset={float(numbers.mean())!r}"
        output = NUMBER_OUTPUT.replace("DEVIATION, offset=MEAN", scale)
        notes += _notes_on_size(target, table[target], SMALLEST_TARGET)
    model = _name_inputs(TABLE_MODEL, inputs).replace("COLUMNS\n", "\n".join(layers) + "\n") + output
    sections = [
        _data(arguments.path, _features(table, inputs, target), [target], inputs=list(inputs)),
        _model({"outputs": len(names) or 1}),
        *ends,
    ]
    kinds = [f"{name} ({'text' if column.dtype == object else 'numbers'})" for name, column in inputs.items()]
    what = f"{len(names)} classes" if names else "a number"
    found = f"{records} records; {', '.join(kinds)} → {target}, {what}; {_split(records)}"
    return Draft("; note: ".join([found, *notes]), sections, {"model.py": model})


def _notes_on_size(name: str, column: np.ndarray, smallest: float) -> Iterator[str]:
    """Yield what a column needs if the model could not tell its numbers apart. smallest: deviation that is enough."""
    numbers = column.astype(np.float64)
    least, most, deviation = column.min(), column.max(), numbers.std()
    if least == most:
        return
    step = float(np.spacing(np.float32(np.abs(numbers).max())))
    if step > MOST_ROUNDING * deviation:
        yield (
            f"{name} has numbers from {least} to {most}, which float32 rounds to steps of {step:.3g}, coarse for their "
            f"standard deviation of {deviation:.3g}: subtract their least in the file, and run init again"
        )
    elif deviation < smallest:
        yield (
            f"{name} has a standard deviation of {deviation:.3g}, too small for the model to learn from (less than "
            f"{smallest:g}): write it in a smaller unit, and run init again"
        )


def _name_inputs(model: str, names: Collection[str]) -> str:
    """Return a model with names for the layers of its inputs: theirs, or others if Keras does not take one of those."""
    if not any("/" in name or _LAYER_NAME.fullmatch(name) for name in names):
        return model.replace("LAYER_NAME", "name")
    imports = "import keras\nfrom keras import layers\n"
    quiet = 'warnings.filterwarnings("ignore", "When providing `inputs` as a dict")  # see the names of inputs below\n'
    model = model.replace(imports, f"import warnings\n\n{imports}\n{quiet}", 1)
    named = """\
        # Keras takes no / in the name of a layer, and no name twice, such as that of a layer below.
        layer_name = f"{len(inputs)}_{name.replace('/', '_')}"
        inputs[name]"""
    return model.replace("        inputs[name]", named, 1).replace("LAYER_NAME", "layer_name")


def _text(arguments: argparse.Namespace) -> Draft:
    table, target = _read_table(arguments)
    lengths = {name: sum(map(len, cells)) for name, cells in table.items() if cells.dtype == object and name != target}
    text = arguments.text or max(lengths, key=lambda name: lengths[name], default=None)
    if text not in lengths:
        raise UserError(f"{arguments.path}: expected a column of text; it has {', '.join(lengths) or 'none'}.")
    names = _classes_of(table[target])
    if not names:
        raise UserError(
            f"{arguments.path}: expected classes in column {target}: texts, or at most {MOST_CLASSES} numbers from 0. "
            f"Give another with --target, of {', '.join(table)}."
        )
    # As bytes: TextVectorization knows no other capitals and blanks than those of ASCII.
    sentences = [_PUNCTUATION.sub("", sentence).encode().lower().split() for sentence in table[text].tolist()]
    words = Counter(word.decode() for sentence in sentences for word in sentence)
    vocabulary = "".join(f"{word}\n" for word, _ in words.most_common(MOST_WORDS))
    records = len(table[target])
    found = (
        f"{records} texts in {text}, {len(words)} different words, in {len(names)} classes of {target}: "
        f"{listed(names)}; {_split(records)}"
    )
    sections = [
        _data(arguments.path, _features(table, [text], target), [target], inputs=[text]),
        _model({"classes": len(names)}),
        *_classification(epochs=10),
    ]
    return Draft(found, sections, {"model.py": TEXT_MODEL, "vocabulary.txt": vocabulary})


def _tfrecords(arguments: argparse.Namespace) -> Draft:
    path = Path(arguments.path)
    if not path.is_dir():
        raise UserError(f"{path}: expected a folder of TFRecord files, or of train and eval; there is none.")
    splits = {split: str(path / split) for split in ("train", "eval") if (path / split).is_dir()}
    splits = splits or {"train": str(path)}
    if "train" not in splits or not has_records(splits["train"], ["*.tfrecord*"]):
        raise UserError(f"{path}: expected *.tfrecord* files in it, or in its folder train.")
    places = (Path(splits["train"]), path)
    described = next((file for place in places if (file := place / DATASET_NAME).is_file()), None)
    if described is None:
        raise UserError(
            f"{path}: has no {DATASET_NAME}, so nothing says what a record holds. Write data.features yourself: "
            "docs/data.md has each type; `check-data` then tries them on every record."
        )
    schema = load_schema(str(described))
    target = _target_of_records(schema, described)
    feature = schema.features[target]
    data: dict[str, Any] = {**splits, "global_batch_size": 64}
    if "eval" not in splits:
        data |= {"eval": splits["train"], "fold": f"1/{FOLDS}"}
    sections = [
        ("", {"data": data}),
        _model({"outputs": feature.classes or math.prod(feature.tensor_shape)}),
        *(_classification(epochs=10) if feature.classes else _regression()),
    ]
    shapes = ", ".join(f"{name} {f.tensor_dtype}{list(f.tensor_shape)}" for name, f in schema.features.items())
    layers = "".join(
        f"    {name!r}: {(schema.features[name].tensor_shape, schema.features[name].tensor_dtype)!r},\n"
        for name in schema.inputs
    )
    model = _name_inputs(RECORD_MODEL, schema.inputs).replace("INPUTS\n", layers)
    what = f"{feature.classes} classes" if feature.classes else "numbers" if feature.tensor_shape else "a number"
    found = f"records of {shapes}; {', '.join(schema.inputs)} → {target}, {what}"
    if not feature.classes and feature.stored_dtype != "float32":
        found += f"; note: if {target} is a class, give it `classes: N` in {described}, and init again"
    return Draft(found, sections, {"model.py": model})


def _target_of_records(schema: Schema, path: Path) -> str:
    """Return the name of the target. Raises UserError for records that RECORD_MODEL cannot learn from."""
    if len(schema.targets) != 1:
        raise UserError(f"{path}: expected one target; it has {listed(schema.targets) or 'none'}.")
    (target,) = schema.targets
    for name in (*schema.inputs, target):
        if schema.features[name].tensor_dtype == "string":
            raise UserError(
                f"{path}: {name} is text; init tfrecords takes numbers. Store the numbers of its classes or words, or "
                "read the text from a table: init table, init text."
            )
    shape = schema.features[target].tensor_shape
    if len(shape) > 1 or (schema.features[target].classes and shape not in ((), (1,))):
        raise UserError(
            f"{path}: {target}: expected a class, a number or a list of numbers; each record has "
            f"{'classes' if schema.features[target].classes else 'numbers'} of shape {list(shape)}. Write a model of "
            "your own for it."
        )
    return target


def _mine(arguments: argparse.Namespace) -> Draft:
    data = {"source": "records:Records", "train": "train", "eval": "eval", "targets": "label", "global_batch_size": 32}
    sections = [("records.py gives the records, by number", {"data": data}), _model({}), *_classification(epochs=10)]
    files = {"records.py": OWN_SOURCE, "model.py": OWN_MODEL}
    return Draft("a source, a model and a config to fill in; they run as they are", sections, files)


KINDS: dict[str, tuple[Callable[[argparse.Namespace], Draft], str, str]] = {
    "images": (_images, "FOLDER", "image files in a folder for each class"),
    "table": (
        _table,
        "FILE",
        "a csv file with a header, Parquet, Arrow, Feather, or npz or HDF5 of plain columns: numbers and texts → a "
        "class or a number",
    ),
    "text": (
        _text,
        "FILE",
        "a csv, Parquet, Arrow, Feather, npz or HDF5 file with a column of texts and one of classes",
    ),
    "tfrecords": (_tfrecords, "FOLDER", "TFRecord files with a dataset.json"),
    "mine": (_mine, "", "a source of records and a model of your own, to fill in"),
}
"""name → (what writes a Draft of its data, what it takes, one line of help)."""


def _read_table(arguments: argparse.Namespace) -> tuple[dict[str, np.ndarray], str]:
    table = _load_columns(_opener_of(arguments.path), arguments.path)
    target = arguments.target or list(table)[-1]
    if target not in table:
        raise UserError(f"--target {target}: {arguments.path} has no such column; it has {', '.join(table)}.")
    if len(table[target]) < 2 * FOLDS:
        raise UserError(f"{arguments.path}: expected at least {2 * FOLDS} records; it has {len(table[target])}.")
    if table[target].dtype == object:
        _refuse_written_numbers(arguments.path, target, table[target])
        counts = Counter(table[target].tolist())
        once = sum(count == 1 for count in counts.values())
        if once > len(table[target]) / 2:
            raise UserError(
                f"{arguments.path}: {target} has {len(counts)} texts in {len(table[target])} records, of which {once} "
                f"occur once; they are no classes. Give another column with --target, of {', '.join(table)}."
            )
    return table, target


def _opener_of(path: str) -> OpenStore:
    """Return what opens a table when training reads it. Raises UserError for a name that training does not know."""
    openers = {pattern: opener for pattern, opener in FILES.items() if opener is not refuse_one_array}
    for pattern, opener in openers.items():
        if fits(Path(path).name, pattern):
            return opener
    suffixes = ", ".join(pattern.removeprefix("*") for pattern in openers)
    raise UserError(
        f"{path}: training reads tables from files that end in {suffixes}. If this is a csv file, with tabs too, "
        "rename it to end in .csv; unpack one that is compressed."
    )


def _load_columns(opener: OpenStore, path: str) -> dict[str, np.ndarray]:
    """Return the columns of a table, of numbers and of texts. Raises UserError for one that has others, or gaps."""
    store = opener(path, Request(setting="init"))
    ends = store.blocks.first_record.tolist()
    blocks = [read_block(store, first, last) for first, last in itertools.pairwise(ends)]
    if problem := next((fault for block in blocks for fault in block.faults.values()), None):
        raise UserError(problem)
    parts = [block.data for block in blocks if isinstance(block.data, dict)]
    if not parts:
        raise UserError(f"{path}: expected at least {2 * FOLDS} records; it has none.")
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name, column in table.items():
        is_text = column.dtype.kind in "OSU"
        cells = column.tolist() if is_text else []
        if column.ndim > 1 or any(isinstance(cell, list | tuple | np.ndarray) for cell in cells):
            raise UserError(f"{path}: {name} holds lists; init takes numbers and texts. Leave it out of the file.")
        if is_text:
            try:
                table[name] = np.array([cell.decode() if isinstance(cell, bytes) else cell for cell in cells], object)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: {name} holds bytes that are no UTF-8 text; init takes numbers and texts. Leave it out."
                ) from error
        elif column.dtype.kind in "bu":
            table[name] = column.astype(np.int64)
    gaps = {name: _count_gaps(column) for name, column in table.items()}
    if counts := ", ".join(f"{name} ({count})" for name, count in gaps.items() if count):
        raise UserError(
            f"{path}: cells are missing or not finite in {counts} of {ends[-1]} records; fill them or leave those "
            "records out."
        )
    for name, column in table.items():
        if column.dtype.kind == "f" and np.abs(column.astype(np.float64)).max(initial=0) > MOST_SIZE:
            raise UserError(
                f"{path}: {name} has numbers beyond {MOST_SIZE:g}, by which a model in float32 cannot scale; write "
                "them in a larger unit, or their logarithms."
            )
    return table


def _count_gaps(column: np.ndarray) -> int:
    """Return how many cells are missing or not finite."""
    if column.dtype != object:
        return int(np.count_nonzero(~np.isfinite(column)))
    return sum(cell is None or (isinstance(cell, float) and not math.isfinite(cell)) for cell in column.tolist())


def _refuse_written_numbers(path: str, name: str, column: np.ndarray) -> None:
    """Raise UserError for a column of texts that are numbers with thousands, decimal commas or a unit."""
    numbers = [_WRITTEN_NUMBER.fullmatch(text.strip()) for text in column.tolist()]
    found = [number for number in numbers if number]
    units = {unit for number in found if (unit := (number["sign"] or number["unit"]).strip())}
    may_be_names = bool(units) and len({*column.tolist()}) <= MOST_CLASSES
    if len(found) < NEARLY_ALL * len(column) or len(units) > 1 or may_be_names:
        return
    first = next((record for record, number in enumerate(numbers) if number and not number[0].isdecimal()), None)
    if first is not None:
        raise UserError(
            f"{path}: record {first}: {name}: expected plain numbers, like 1234.5; received {column[first]!r}. Write "
            "them with a decimal point, and without thousands and units; pandas.read_csv has thousands= and decimal=."
        )


def _classes_of(column: np.ndarray) -> list[str]:
    """Return the names of the classes in a column of labels; none if its values are numbers to predict."""
    values = np.unique(column)
    if column.dtype == object:
        return values.tolist() if 2 <= len(values) <= MOST_TEXTS else []
    is_counted = column.dtype.kind == "i" and 2 <= len(values) <= MOST_CLASSES and values[0] >= 0
    return [str(number) for number in range(int(values[-1]) + 1)] if is_counted and values[-1] < MOST_CLASSES else []


def _features(table: Mapping[str, np.ndarray], inputs: Collection[str], target: str) -> dict[str, Any]:
    """Return `data.features`. Text is named: in another file all of a column's texts may read as numbers."""
    texts = {name: "bytes" for name in inputs if table[name].dtype == object}
    settings: dict[str, Any] = {"cast": "float32"}
    if names := _classes_of(table[target]):
        settings = {"class_names": names} if table[target].dtype == object else {"classes": len(names)}
    return {**texts, target: settings}


def _split(records: int) -> str:
    """Say how many records the first fold has, which `data.fold: 1/FOLDS` holds out."""
    held_out = int(np.count_nonzero(parts_of_records(records, FOLDS) == 0))
    return f"{records - held_out} to train, {held_out} to evaluate"


def _data(
    path: str, features: Mapping[str, Any], targets: list[str], held_out: str = "", **more: Any
) -> tuple[str, Any]:
    """Return the section of the data. held_out: the records to evaluate on; "": a fold of those of `path`."""
    split = {"train": path, "eval": held_out} if held_out else {"train": path, "eval": path, "fold": f"1/{FOLDS}"}
    comment = f"{held_out} is evaluated on" if held_out else f"one record in {FOLDS} is held out to evaluate on"
    data = {**split, "targets": targets, "features": dict(features)}
    return comment, {"data": {**data, **more, "global_batch_size": 32}}


def _model(options: Mapping[str, Any]) -> tuple[str, Any]:
    named = {"name": "model:build", **({"options": dict(options)} if options else {})}
    return "the function build in model.py", {"model": named}


def _classification(epochs: int) -> list[tuple[str, Any]]:
    accuracy = {"name": "sparse_categorical_accuracy", "options": {"name": "accuracy"}}
    loss = {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}}
    return [("the model gives logits", {"loss": loss, "metrics": [accuracy]}), *_training(epochs, "accuracy", "max")]


def _regression() -> list[tuple[str, Any]]:
    metric = {"name": "mean_absolute_error", "options": {"name": "mae"}}
    return [("", {"loss": {"name": "mean_squared_error"}, "metrics": [metric]}), *_training(30, "mae", "min")]


def _training(epochs: int, metric: str, mode: str) -> list[tuple[str, Any]]:
    return [
        ("the rate for this global batch, at any number of ranks", {"optimizer": {"name": "adam"}}),
        ("", {"lr_schedule": {"base_lr": 0.001}, "train": {"epochs": epochs}, "eval": {"every_epochs": 1}}),
        ("", {"checkpoint": {"every_epochs": 1, "best": {"metric": metric, "mode": mode}}}),
    ]


def _config_text(draft: Draft, name: str) -> str:
    head = [
        f"# {printable(one_line(draft.found))}",  # unlike YAML's texts, comments have no escapes
        "#",
        f"#   horovodrun -np 2 python -m horovod_train.main --config {name}",
        "#",
        "# Every setting with its meaning: python -m horovod_train.main settings",
        "",
        f"output_dir: runs/{Path(name).stem}",
    ]
    for comment, section in draft.sections:
        text = yaml.safe_dump(dict(section), sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
        head += [*([f"# {printable(comment)}"] if comment else []), text.rstrip()]
    return "\n".join(head) + "\n"


# --- models -----------------------------------------------------------------------------------------------------

IMAGE_MODEL = '''"""A small convnet for images, to begin with.

With few images a pretrained backbone is better: keras.applications has them. Put it where the convolutions are, with
`backbone.trainable = False`, and its own scaling of pixels in place of Rescaling.
"""

import keras
from keras import layers


def build(classes: int, image_size: int) -> keras.Model:
    """float32 [batch, size, size, 3], from 0 to 255 → logits [batch, classes]."""
    image = keras.Input((image_size, image_size, 3), name="image")
    x = layers.Rescaling(1 / 127.5, offset=-1)(image)
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.GroupNormalization(8)(x)
        x = layers.MaxPooling2D(2)(layers.Activation("relu")(x))
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.2)(x)
    return keras.Model(image, layers.Dense(classes, dtype="float32", name="logits")(x))
'''

TABLE_MODEL = '''\
"""A model for a table. It takes the columns as they are in the file, so that it is exported as one piece."""

import keras
from keras import layers

COLUMNS = {
COLUMNS
}
"""Numbers: their mean and variance, by which they are scaled. Texts: the values that are known."""


def build(outputs: int, hidden: int = 64) -> keras.Model:
    """{column: [batch, 1]}, or the only column → [batch, outputs]: logits of classes, or a number."""
    inputs, parts = {}, []
    for name, known in COLUMNS.items():
        is_text = isinstance(known, list)
        inputs[name] = keras.Input((1,), name=LAYER_NAME, dtype="string" if is_text else "float32")
        if is_text:
            parts.append(layers.StringLookup(vocabulary=known, output_mode="one_hot")(inputs[name]))
        else:
            parts.append(layers.Normalization(mean=known[0], variance=known[1])(inputs[name]))
    x = layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    for _ in range(2):
        x = layers.Dense(hidden, activation="relu")(x)
'''

CLASS_OUTPUT = """\
    output = layers.Dense(outputs, dtype="float32", name="output")(x)
    return keras.Model(inputs if len(inputs) > 1 else next(iter(inputs.values())), output)
"""
NUMBER_OUTPUT = """\
    x = layers.Dense(outputs, dtype="float32")(x)
    # By the target's standard deviation and mean: a layer learns numbers around 0 best, whatever the target's size.
    output = layers.Rescaling(DEVIATION, offset=MEAN, dtype="float32", name="output")(x)
    return keras.Model(inputs if len(inputs) > 1 else next(iter(inputs.values())), output)
"""
"""How TABLE_MODEL ends, for a target of classes and for one that is a number."""

TEXT_MODEL = '''"""A bag of words, to begin with: it takes text as it is, so that it is exported as one piece."""

from pathlib import Path

import keras
from keras import layers

VOCABULARY = Path(__file__).with_name("vocabulary.txt")
"""One word a line, the most frequent first."""


def build(classes: int, hidden: int = 64) -> keras.Model:
    """Texts [batch, 1] → logits [batch, classes], by which of the words they have."""
    text = keras.Input((1,), dtype="string", name="text")
    words = VOCABULARY.read_text(encoding="utf-8").split("\\n")[:-1]  # a word may hold what else ends a line
    x = layers.TextVectorization(vocabulary=words, output_mode="multi_hot")(text)
    x = layers.Dense(hidden, activation="relu")(x)
    x = layers.Dropout(0.2)(x)
    return keras.Model(text, layers.Dense(classes, dtype="float32", name="logits")(x))
'''

RECORD_MODEL = '''"""A model for these records, to begin with: every input flattened, and two layers."""

import keras
from keras import layers

INPUTS = {
INPUTS
}
"""name → (shape of a record's value, dtype), as dataset.json says."""


def build(outputs: int, hidden: int = 128) -> keras.Model:
    """{input: [batch, ...]}, or the only input → [batch, outputs]: logits of classes, or a number."""
    inputs = {}
    for name, (shape, dtype) in INPUTS.items():
        inputs[name] = keras.Input(shape, name=LAYER_NAME, dtype=dtype)
    parts = [layers.Flatten()(keras.ops.cast(value, "float32")) for value in inputs.values()]
    x = layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    for _ in range(2):
        x = layers.Dense(hidden, activation="relu")(x)
    output = layers.Dense(outputs, dtype="float32", name="output")(x)
    return keras.Model(inputs if len(inputs) > 1 else next(iter(inputs.values())), output)
'''

OWN_SOURCE = '''"""Records by number. Replace what is made up here by reading your own; a rank reads what it needs."""

import numpy as np


class Records:
    """Points of a plane: which half are they in? Called once with data.train, and once with data.eval."""

    def __init__(self, name: str):
        rng = np.random.default_rng(0 if name == "train" else 1)
        self.points = rng.normal(size=(2000 if name == "train" else 400, 2)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, record: int) -> dict:
        point = self.points[record]
        return {"point": point, "label": int(point.sum() > 0)}

    def fingerprint(self) -> str:
        """Two runs read the same records if these are equal; change it with what is read."""
        return f"points {len(self.points)}"
'''

OWN_MODEL = '''"""The model: any keras.Model. Compiled here, it needs no loss, metrics and optimizer in the config."""

import keras
from keras import layers


def build() -> keras.Model:
    """float32 [batch, 2] → logits [batch, 2]."""
    point = keras.Input((2,), name="point")
    x = layers.Dense(32, activation="relu")(point)
    return keras.Model(point, layers.Dense(2, dtype="float32", name="logits")(x))
'''
