"""Generated sentences of tokens, of any length up to --max-length, labelled with their most frequent kind of token.

--seed draws the kind of each token, and so the rule for labels. Token 0 is padding.
"""

from __future__ import annotations

import argparse

import numpy as np

from horovod_train.data import counter_rng
from horovod_train.data.prepare import samples
from horovod_train.data.schema import Feature, Schema

KINDS = 4
_RULE, _SHAPE, _TOKENS = 1, 2, 3
_BIAS = 0.3
"""The fraction of a sentence that is drawn from one kind alone; the rest is drawn from all kinds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    samples.add_arguments(parser, records=8_000, eval_records=1_000)
    parser.add_argument("--vocabulary", type=int, default=1000, help="tokens, padding included; default %(default)s")
    parser.add_argument("--max-length", type=int, default=64, help="longest sentence; default %(default)s")


def run(arguments: argparse.Namespace) -> None:
    records = samples.count(arguments, vocabulary=KINDS + 1, max_length=1)
    tokens, lengths, labels = make_samples(records, arguments.vocabulary, arguments.max_length, arguments.seed)
    sentence = Feature("int64", max_length=arguments.max_length, classes=arguments.vocabulary)
    schema = Schema({"tokens": sentence, "label": Feature("int64", classes=KINDS)}, ("tokens",), ("label",))
    samples.write(
        arguments, schema, lambda record: {"tokens": tokens[record, : lengths[record]], "label": labels[record]}
    )


def make_samples(records: int, vocabulary: int, max_length: int, seed: int) -> tuple[np.ndarray, ...]:
    """Make tokens int64 [records, max_length], 0 past the end; lengths int64 [records]; labels int64 [records].

    The label is the most frequent kind of the sentence; of several such kinds, the first.
    """
    order = 1 + counter_rng.permutation(counter_rng.key(seed, _RULE), np.arange(vocabulary - 1))
    kind = np.zeros(vocabulary, np.int64)
    kind[order] = np.arange(vocabulary - 1) % KINDS
    length_draw, kind_draw = counter_rng.uniforms(counter_rng.key(seed, _SHAPE), np.arange(records), 2).T
    lengths = 1 + np.floor(length_draw * max_length).astype(np.int64)
    favoured = np.floor(kind_draw * KINDS).astype(np.int64)
    uniforms = counter_rng.uniforms(counter_rng.key(seed, _TOKENS), np.arange(records), 2 * max_length)
    from_all = 1 + np.floor(uniforms[:, :max_length] * (vocabulary - 1)).astype(np.int64)
    # order[i] is of kind i % KINDS, so the tokens of the favoured kind are KINDS apart.
    tokens_of_a_kind = (vocabulary - 1) // KINDS
    of_kind = order[np.floor(uniforms[:, :max_length] * tokens_of_a_kind).astype(np.int64) * KINDS + favoured[:, None]]
    tokens = np.where(uniforms[:, max_length:] < _BIAS, of_kind, from_all)
    tokens = np.where(np.arange(max_length) < lengths[:, None], tokens, 0)
    counts = np.stack([((kind[tokens] == number) & (tokens > 0)).sum(axis=1) for number in range(KINDS)], axis=1)
    return tokens, lengths, counts.argmax(axis=1)
