"""A preset of keras_hub in a local folder: its tokenizer and its weights, trained on texts at several ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import metrics_of, rank_environment, summary_of, train

FOUND = importlib.util.find_spec("keras_hub")
if FOUND is None or FOUND.origin is None:
    pytest.skip("needs keras_hub", allow_module_level=True)

pytestmark = pytest.mark.exhaustive

MAKE = """
import sys
import keras_hub
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "the", "was"]
tokenizer = keras_hub.models.BertTokenizer(vocabulary=words, lowercase=True)
backbone = keras_hub.models.BertBackbone(
    vocabulary_size=len(words), num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=32, max_sequence_length=8,
    dropout=0.0,
)
preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
task = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0)
task.save_to_preset(sys.argv[1])
"""

CONFIG = """
data: {train: texts.csv, eval: texts.csv, inputs: text, targets: liked, global_batch_size: 16, preprocess: tiny_bert}
model: tiny_bert
loss: {name: sparse_categorical_crossentropy, options: {from_logits: true}}
metrics: [{name: sparse_categorical_accuracy, options: {name: accuracy}}]
optimizer: {name: adam}
lr_schedule: {base_lr: 0.01}
train: {epochs: 4}
log: {tensorboard: false}
"""


def environment() -> dict[str, str]:
    """A rank's, in which keras_hub is found wherever it is installed."""
    assert FOUND is not None
    assert FOUND.origin is not None
    own = rank_environment()
    return own | {"PYTHONPATH": f"{own['PYTHONPATH']}:{Path(FOUND.origin).parent.parent}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("presets")
    subprocess.run([sys.executable, "-c", MAKE, made / "tiny_bert"], check=True, env=environment(), timeout=300)
    liked = np.random.default_rng(1).integers(0, 2, 150).tolist()
    lines = [f"{('The film was bad', 'A good film')[one]},{one}" for one in liked]
    (made / "texts.csv").write_text("text,liked\n" + "\n".join(lines) + "\n")
    (made / "c.yaml").write_text(CONFIG)
    return made


def test_a_preset_learns_from_texts_at_any_number_of_ranks(folder: Path) -> None:
    for np_ in (1, 2):
        words = ["--config", "c.yaml", "--output-dir", f"at-{np_}"]
        finished = train(
            words, launcher="none" if np_ == 1 else "mpirun", np=np_, cwd=folder, environment=environment()
        )
        assert finished.returncode == 0, finished.text
        assert metrics_of(folder / f"at-{np_}", "eval")[-1]["accuracy"] > 0.95
    one, two = (summary_of(folder / f"at-{np_}")["eval"]["loss"] for np_ in (1, 2))
    assert two == pytest.approx(one, rel=1e-3)
    predicted = train(["predict", "at-2", "--out", "all.npz"], cwd=folder, environment=environment())
    assert predicted.returncode == 0, predicted.text
    liked = np.array([int(line[-1]) for line in (folder / "texts.csv").read_text().splitlines()[1:]])
    assert (np.load(folder / "all.npz")["output"].argmax(axis=1) == liked).mean() > 0.95


def test_a_preset_of_another_keras_hub_is_one_line(folder: Path) -> None:
    (folder / "broken").mkdir()
    task = json.loads((folder / "tiny_bert" / "task.json").read_text())
    (folder / "broken" / "task.json").write_text(json.dumps({**task, "registered_name": "keras_hub>Nobody"}))
    refused = train(
        ["--config", "c.yaml", "--output-dir", "refused", "model=broken"], cwd=folder, environment=environment()
    )
    assert refused.returncode == 2, refused.text
    assert "model.name: broken: cannot be loaded: this keras_hub has no keras_hub>Nobody" in refused.stderr
    assert "Traceback" not in refused.text
