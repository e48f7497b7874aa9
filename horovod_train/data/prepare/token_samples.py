"""Synthetic sentences of tokens, of any length up to --max-length, labelled with their most frequent kind of token.

--seed draws the kind of each token, and so the rule for labels. Token 0 is padding.
"""

from __future__ import annotations

import argparse

import numpy as np

from horovod_train.data import counter_rng
from horovod_train.data.features import Feature
from horovod_train.data.prepare.writing import split_by_count, write_dataset
from horovod_train.data.schema import Schema
from horovod_train.errors import UserError

KINDS = 4
_RULE, _SHAPE, _TOKENS = 1, 2, 3
_BIAS = 0.3
"""The fraction of a sentence that is drawn from one kind alone; the rest is drawn from all kinds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=8_000, help="to train on; default %(default)s")
    parser.add_argument("--eval-records", type=int, default=1_000, help="to evaluate; default %(default)s")
    parser.add_argument("--vocabulary", type=int, default=1000, help="tokens, padding included; default %(default)s")
    parser.add_argument("--max-length", type=int, default=64, help="longest sentence; default %(default)s")
    parser.add_argument("--shards", type=int, default=4, help="files a split; default %(default)s")


def run(arguments: argparse.Namespace) -> None:
    if arguments.records < 1 or arguments.eval_records < 0 or arguments.max_length < 1:
        raise UserError("--records and --max-length must be at least 1 and --eval-records at least 0.")
    if arguments.vocabulary <= KINDS:
        raise UserError(f"--vocabulary must be more than {KINDS}; received {arguments.vocabulary}.")
    records = arguments.records + arguments.eval_records
    tokens, lengths, labels = make_samples(records, arguments.vocabulary, arguments.max_length, arguments.seed)
    write_dataset(
        arguments.out,
        Schema(
            {
                "tokens": Feature("int64", max_length=arguments.max_length, classes=arguments.vocabulary),
                "label": Feature("int64", classes=KINDS),
            },
            ("tokens",),
            ("label",),
        ),
        split_by_count(records, arguments.eval_records, arguments.seed),
        lambda record: {"tokens": tokens[record, : lengths[record]], "label": labels[record]},
        shards=arguments.shards,
        force=arguments.force,
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
    places = (vocabulary - 1) // KINDS
    own = order[np.floor(uniforms[:, :max_length] * places).astype(np.int64) * KINDS + favoured[:, None]]
    tokens = np.where(uniforms[:, max_length:] < _BIAS, own, from_all)
    tokens = np.where(np.arange(max_length) < lengths[:, None], tokens, 0)
    counts = np.stack([((kind[tokens] == one) & (tokens > 0)).sum(axis=1) for one in range(KINDS)], axis=1)
    return tokens, lengths, counts.argmax(axis=1)
