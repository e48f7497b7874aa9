"""How TensorFlow and Keras are loaded."""

from __future__ import annotations

import sys

from conftest import run_process


def test_keras_is_loaded_without_libraries_that_can_be_imported_afterwards() -> None:
    script = """
import sys
from horovod_train.output import logs
logs.load_tensorflow()
assert "keras" in sys.modules
print({"sklearn", "matplotlib"} & set(sys.modules))
from sklearn.datasets import load_digits
print(load_digits().data.shape)
"""
    finished = run_process([sys.executable, "-c", script])
    assert finished.stdout.split("\n")[:2] == ["set()", "(1797, 64)"], finished.text
    plain = run_process([sys.executable, "-c", "import keras, sys; print('sklearn' in sys.modules)"])
    assert plain.stdout.strip() == "True", plain.text
