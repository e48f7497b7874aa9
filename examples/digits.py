"""Handwritten digits for the example scripts: the 1 797 of scikit-learn, 8 × 8 grey pixels, the last 390 held out."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

TRAIN_ROWS = 1407


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (x, y) to train on and (x, y) held out. x: float32 [rows, 8, 8, 1] in 0…1; y: int64 [rows]."""
    pixels, labels = load_digits(return_X_y=True)
    x = (pixels / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    return (x[:TRAIN_ROWS], labels[:TRAIN_ROWS]), (x[TRAIN_ROWS:], labels[TRAIN_ROWS:])
