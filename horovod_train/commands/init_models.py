"""The models that `init` writes into a user's folder, as texts. They are the user's from then on."""

IMAGES = '''"""A small convnet for images, to begin with.

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

TABLE = '''"""A model for a table. It takes the columns as they are in the file, so that it is exported as one piece."""

import keras
from keras import layers

COLUMNS = {
COLUMNS
}
"""Numbers: their mean and variance, by which they are scaled. Texts: the values that are known."""


def build(outputs: int, hidden: int = 64) -> keras.Model:
    """{column: [batch, 1]} → [batch, outputs]: logits of classes, or a number."""
    inputs, parts = {}, []
    for name, known in COLUMNS.items():
        is_text = isinstance(known, list)
        # Keras takes no / in the name of a layer.
        inputs[name] = keras.Input((1,), name=name.replace("/", "_"), dtype="string" if is_text else "float32")
        if is_text:
            parts.append(layers.StringLookup(vocabulary=known, output_mode="one_hot")(inputs[name]))
        else:
            parts.append(layers.Normalization(mean=known[0], variance=known[1])(inputs[name]))
    x = layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    for _ in range(2):
        x = layers.Dense(hidden, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(outputs, dtype="float32", name="output")(x))
'''

TEXT = '''"""A bag of words, to begin with: it takes text as it is, so that it is exported as one piece."""

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

RECORDS = '''"""A model for these records, to begin with: every input flattened, and two layers."""

import keras
from keras import layers

INPUTS = {
INPUTS
}
"""name → (shape of a record's value, dtype), as dataset.json says."""


def build(outputs: int, hidden: int = 128) -> keras.Model:
    """{input: [batch, ...]} → [batch, outputs]: logits of classes, or a number."""
    inputs = {
        name: keras.Input(shape, name=name.replace("/", "_"), dtype=dtype)  # Keras takes no / in the name of a layer
        for name, (shape, dtype) in INPUTS.items()
    }
    parts = [layers.Flatten()(keras.ops.cast(value, "float32")) for value in inputs.values()]
    x = layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    for _ in range(2):
        x = layers.Dense(hidden, activation="relu")(x)
    output = layers.Dense(outputs, dtype="float32", name="output")(x)
    return keras.Model(inputs if len(inputs) > 1 else next(iter(inputs.values())), output)
'''

SOURCE = '''"""Records by number. Replace what is made up here by reading your own; a rank reads what it needs."""

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

MINE = '''"""The model: any keras.Model. Compiled here, it needs no loss, metrics and optimizer in the config."""

import keras
from keras import layers


def build() -> keras.Model:
    """float32 [batch, 2] → logits [batch, 2]."""
    point = keras.Input((2,), name="point")
    x = layers.Dense(32, activation="relu")(point)
    return keras.Model(point, layers.Dense(2, dtype="float32", name="logits")(x))
'''
