"""Pseudo-random numbers that depend only on their arguments: not on a library's version, threads or earlier draws.

Each is the splitmix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) of a
counter. Good for orders and augmentation; not for secrets.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key(*numbers: int) -> np.uint64:
    """Return one key from several numbers, such as seed, epoch and purpose. Their order matters."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mix(state + np.array([number % 2**64], np.uint64) * _GOLDEN + _GOLDEN)
    return state[0]


def integers(key: np.uint64, counters: np.ndarray) -> np.ndarray:
    """Return a uint64 for each counter. Different counters never collide under one key."""
    return mix((counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN + np.array([key]))


def uniforms(key: np.uint64, counters: np.ndarray, columns: int) -> np.ndarray:
    """Return float32 [len(counters), columns], each in [0, 1)."""
    wide = counters.astype(np.uint64)[:, None] * np.uint64(columns) + np.arange(columns, dtype=np.uint64)
    return ((integers(key, wide.ravel()) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)).reshape(wide.shape)


def permutation(key: np.uint64, counters: np.ndarray) -> np.ndarray:
    """Return the counters' positions in the order of their draws, int64."""
    return np.argsort(integers(key, counters), kind="stable")


def mix(z: np.ndarray) -> np.ndarray:
    """Mix the bits of each uint64; a bijection."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
