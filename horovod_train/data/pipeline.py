"""One rank's batches of stored records: reads and parses them in the order of the plan, and transforms them.

Knows `rank` and `size` as numbers and never talks to other ranks. Python is called once for thousands of records;
compiled training cuts them into steps, see batch_source. A record that cannot be used ends the run, or is skipped and
counted, as `data.on_bad_record` says. `data.cache` keeps parsed records in memory, so that later epochs read nothing.

Does not decide where an epoch starts; see training.run. Does not know how records are stored.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from horovod_train.config.settings import DataConfig
from horovod_train.data import counter_rng, source
from horovod_train.data.batch_source import (
    HOST,
    Batch,
    BatchSource,
    StepRange,
    StepSize,
    Tensors,
    pick,
    prefetch_to,
    tensors_by_name,
)
from horovod_train.data.dataset import Records, build_plan, check_room_to_shuffle
from horovod_train.data.model_inputs import describe_inputs
from horovod_train.data.parsing import build_parser, zero_rows
from horovod_train.data.reader import CHUNK_RECORDS, Reader, bytes_parsed, lengths_of, parse_usable, records_at_a_time
from horovod_train.data.sampler import EpochSequence, Plan, Rows
from horovod_train.data.schema import Feature
from horovod_train.data.source import Arrays, Data, Parser, RecordSource, mark_skipped
from horovod_train.data.transforms import Transforms, apply_preprocess, image_problem, load_preprocess
from horovod_train.errors import UserError
from horovod_train.host import usable_memory

log = logging.getLogger(__name__)

_AUGMENT = 3  # so that augmentation is independent of the order; see sampler
_NOT_AN_IMAGE = "records that are no images: "
_CHUNK_SINGLE_RECORDS = 256  # single records may take long to read, and the first step waits for a whole chunk


class Ranks(NamedTuple):
    """One rank of a run: its numbers, and where it computes."""

    rank: int
    size: int
    """How many ranks there are."""
    on_host: int = 1
    """How many of them share this host's memory."""
    device: str = HOST
    """TensorFlow's name of the device on which its steps start."""


class Pipeline(BatchSource):
    """What one rank reads of one split. Made by build_pipeline."""

    def __init__(self, records: Records, plan: Plan, config: DataConfig, ranks: Ranks, *, training: bool) -> None:
        self._plan, self._records, self._config, self._ranks = plan, records, config, ranks
        self._sizes: dict[bool, StepSize] = {}
        self.has_weights = config.weight is not None
        used = {*records.schema.inputs, *records.schema.targets}
        self.features = {n: f for n, f in records.schema.features.items() if n in used or n == config.weight}
        self._parser = build_parser(records.source, self.features, config)
        if missing := sorted(used.difference(self._parser.dtypes)):
            names = ", ".join(self._parser.dtypes)
            raise UserError(f"data.parse: {config.parse} gives {names}; inputs and targets want {missing[0]}.")
        self._transforms = Transforms(self.features, records.schema, config.augment if training else ())
        lists = plan.buckets.names if plan.buckets else ()
        self._lists = tuple(name for name in lists if name in used)
        self._widths = [lists.index(name) for name in self._lists]
        self._loader = Loader(plan, records.source, self._parser, ranks, config, records.schema.features)
        self._preprocess = load_preprocess(config.preprocess)
        # Traced once, not for every pass.
        self._transform = tf.function(self._make_batch, autograph=False)
        self._trim = tf.function(self._trim_lists, autograph=False)
        with tf.device("cpu:0"):
            self._not_images = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=0)
        self.fingerprint, self.content, self.data_sets = plan.fingerprint, records.digest, records.data_sets
        self.class_names = {name: names for name, names in records.schema.class_names.items() if name in used}
        self.files = source.pack(source.names_of(records.source.parts))
        self.order_settings = (
            "the training files as they were then, seed {seed}, data.global_batch_size {batch} and the same "
            "data.shuffle… settings"
        )
        self.num_records = plan.num_records
        self.global_batch_size = plan.global_batch_size
        self.steps_per_epoch, self.steps_per_chunk = plan.steps_per_epoch, self._loader.steps_per_chunk
        self.batch_size_per_rank = plan.rows_per_rank(ranks.size)
        traced = tf.function(self.scaled, autograph=False).get_concrete_function(self.element_spec)
        self.scaled_spec: Batch = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), traced.structured_outputs
        )
        inputs = self.scaled_spec.inputs
        self.model_inputs = describe_inputs(inputs, records.schema.inputs, self.features, config.preprocess)

    def count(self, step: int) -> int:
        return self._plan.count(step)

    def size_of(self, step: int) -> StepSize:
        if self._config.on_bad_record == "skip":
            return StepSize(None, False)
        is_last = step == self.steps_per_epoch - 1
        if is_last not in self._sizes:  # all others are alike
            rows = int(self._plan.positions(self._ranks.rank, self._ranks.size, step, step + 1)[1].sum())
            records = self._plan.count(step)
            is_full = records == self.batch_size_per_rank * self._ranks.size
            self._sizes[is_last] = StepSize(rows, is_full, records)
        return self._sizes[is_last]

    @property
    def bytes_to_cache(self) -> int:
        """Return the memory that this rank uses in the end with `cache: memory`: of strings the stored bytes."""
        blocks = self._records.source.blocks
        stored = blocks.total_bytes if "string" in self._parser.dtypes.values() else 0
        return blocks.num_records * bytes_parsed(self._parser) + stored

    @property
    def skipped(self) -> set[int]:
        """The records that this rank has skipped so far; runs a few batches ahead of what was consumed.

        In other epochs other ranks skip them. In a step all ranks together have skipped `count` minus the sum of their
        `Batch.real`.
        """
        return self._loader.skipped.union(self._not_images.export()[0].numpy().tolist())

    def scaled(self, batch: Batch) -> Batch:
        schema = self._records.schema
        targets = self._transforms.scale(tensors_by_name(batch.targets, schema.targets))
        batch = batch._replace(targets=pick(targets, schema.targets))
        if self._preprocess is not None:
            return batch
        inputs = self._transforms.scale(tensors_by_name(batch.inputs, schema.inputs))
        return batch._replace(inputs=pick(inputs, schema.inputs))

    def close(self) -> None:
        """Give up what is being read ahead; no more batches are taken."""
        self._loader.close()

    def explain(self, error: BaseException) -> Exception | None:
        text = str(error.message) if isinstance(error, tf.errors.OpError) else ""
        match = re.search(re.escape(_NOT_AN_IMAGE) + r".*?(\d+)", text, re.DOTALL)
        if match is None:
            return super().explain(error)
        record, problem = int(match[1]), "an image could not be decoded, and now it can"
        stored = self._loader.stored(record)
        for name, feature in self.features.items():
            if feature.decode == "image" and (found := image_problem(feature, np.asarray(stored[name])[0])):
                problem = f"feature {name}: {found}"
                break
        return self._loader.error(self.name_record(record, problem))

    # A chunk on its way from Python into tf.data: the stored values by name, draws, weights and ids, each [steps, rows,
    # …]; count [steps]; if lists are cut, widths [steps, lists].

    @property
    def _specs(self) -> list[tf.TensorSpec]:
        rows = (None, self.batch_size_per_rank)
        return [
            *(tf.TensorSpec((*rows, *self._parser.shapes[name]), kind) for name, kind in self._parser.dtypes.items()),
            tf.TensorSpec((*rows, self._transforms.draws), tf.float32),
            tf.TensorSpec(rows, tf.float32),
            tf.TensorSpec(rows, tf.int64),
            tf.TensorSpec([None], tf.int64),
            *[tf.TensorSpec([None, len(self._lists)], tf.int64)] * bool(self._lists),
        ]

    def _load(self, ranges: Iterator[StepRange]) -> Iterator[list[np.ndarray | tf.Tensor]]:
        for (steps, rows, _, widths), arrays, ids in self._chunks(ranges):
            key = counter_rng.key(self._plan.seed, steps.epoch, _AUGMENT)
            draws = counter_rng.uniforms(key, rows.records.ravel(), self._transforms.draws)
            by_row = [*(arrays[name] for name in self._parser.dtypes), draws, (ids >= 0).astype(np.float32), ids]
            reshaped = [_reshape(values, (*rows.records.shape, *values.shape[1:])) for values in by_row]
            count = np.array([self.count(step) for step in range(steps.first, steps.last)], np.int64)
            yield [*reshaped, count, *([widths[:, self._widths]] if self._lists else [])]

    def _chunks(self, ranges: Iterator[StepRange]) -> Iterator[Chunk]:
        """Yield the chunks in order: they are read one after the other, and several are parsed at the same time."""
        max_parses, ahead = self._config.parallel_parse_calls, self._config.read_ahead_chunks
        pending: deque[Future[Chunk]] = deque()
        upcoming = deque(itertools.islice(ranges, 1 + ahead))
        with (
            ThreadPoolExecutor(1, thread_name_prefix="read-chunks") as reading,
            ThreadPoolExecutor(max_parses, thread_name_prefix="parse-chunks") as parsing,
        ):
            while upcoming or pending:
                while upcoming and len(pending) < max_parses:
                    steps = upcoming.popleft()
                    read = reading.submit(self._loader.read, steps, tuple(upcoming))
                    pending.append(parsing.submit(self._parse, read))
                    upcoming.extend(itertools.islice(ranges, 1))
                yield pending.popleft().result()

    def _parse(self, read: Future[Unparsed]) -> Chunk:
        return self._loader.parse(*read.result())

    def _dataset(self, data: tf.data.Dataset) -> tf.data.Dataset:
        if self._transforms.by_step or self._preprocess is not None or self._lists:
            one_step = tf.autograph.experimental.do_not_convert(self._transform_step)
            data = data.prefetch(1).unbatch().map(one_step, num_parallel_calls=tf.data.AUTOTUNE)
            ahead = self._config.prefetch_batches or tf.data.AUTOTUNE
        else:
            data = data.map(self._transform)
            ahead = -(-(self._config.prefetch_batches or 1) // self.steps_per_chunk)
        return prefetch_to(data.prefetch(ahead), self._ranks.device)

    def _transform_step(self, *values: tf.Tensor) -> Batch:
        """Return a chunk of one step."""
        if self._lists:
            batch = self._trim(self._transform(*values[:-1]), values[-1])
        else:
            batch = self._transform(*values)
        return tf.nest.map_structure(lambda values: values[tf.newaxis], batch)

    def _trim_lists(self, batch: Batch, widths: tf.Tensor) -> Batch:
        """Leave out the padding that no rank needs in this step."""
        schema, width = self._records.schema, dict(zip(self._lists, tf.unstack(widths, len(self._lists)), strict=True))

        def cut(tensors: Tensors, names: tuple[str, ...]) -> Tensors:
            named = tensors_by_name(tensors, names)
            return pick({name: t[:, : width[name]] if name in width else t for name, t in named.items()}, names)

        return batch._replace(inputs=cut(batch.inputs, schema.inputs), targets=cut(batch.targets, schema.targets))

    def _make_batch(self, *values: tf.Tensor) -> Batch:
        *stored, draws, weights, ids, count = values
        tensors, decoded = self._transforms.apply(dict(zip(self._parser.dtypes, stored, strict=True)), draws)
        for is_decoded in decoded.values():
            weights, ids = self._mask_undecoded(is_decoded, weights, ids)
        schema = self._records.schema
        if name := self._config.weight:
            # Padding repeats another record, whose weight it must not have.
            weights *= tf.cast(self._transforms.scale({name: tensors[name]})[name], tf.float32)
        return Batch(self._inputs(tensors), pick(tensors, schema.targets), weights, ids, count)

    def _inputs(self, tensors: dict[str, tf.Tensor]) -> Tensors:
        names = self._records.schema.inputs
        if self._preprocess is None:
            return pick(tensors, names)
        scaled = pick(self._transforms.scale({name: tensors[name] for name in names}), names)
        return apply_preprocess(self._preprocess, str(self._config.preprocess), scaled, self.batch_size_per_rank)

    def _mask_undecoded(self, decoded: tf.Tensor, weights: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        bad = tf.boolean_mask(ids, ~decoded & (ids >= 0))
        if self._config.on_bad_record == "skip":
            with tf.control_dependencies([self._not_images.insert(bad, bad)]):
                return tf.where(decoded, weights, 0.0), tf.where(decoded | (ids < 0), ids, mark_skipped(ids))
        with tf.control_dependencies([tf.debugging.Assert(tf.size(bad) == 0, [_NOT_AN_IMAGE, bad])]):
            return tf.identity(weights), ids

    def name_record(self, record: int, problem: str) -> str:
        return self._loader.name_record(record, problem)


def build_pipeline(
    records: Records, config: DataConfig, ranks: Ranks, *, seed: int, training: bool, global_batch_size: int
) -> Pipeline:
    """Build the pipeline of one rank.

    Shuffles and augments only if `training`. Raises UserError if no record is left to read, if the config asks for what
    the records do not have, or if memory is too small for what the pipeline keeps.
    """
    plan = build_plan(records, config, seed=seed, training=training, global_batch_size=global_batch_size)
    check_room_to_shuffle(plan, records, config, ranks.size)
    pipeline = Pipeline(records, plan, config, ranks, training=training)
    if config.cache == "memory":
        check_room_to_cache(pipeline.bytes_to_cache, ranks.on_host)
    return pipeline


def _reshape(values: np.ndarray | tf.Tensor, shape: tuple[int, ...]) -> np.ndarray | tf.Tensor:
    return values.reshape(shape) if isinstance(values, np.ndarray) else tf.reshape(values, shape)


class ChunkReads(NamedTuple):
    """What a chunk, some steps of one rank, needs of the records."""

    steps: StepRange
    rows: Rows
    blocks: np.ndarray
    """Blocks to keep while the chunk is loaded."""
    widths: np.ndarray
    """int64 [steps, lists]: how long the lists of each step are over all ranks, with data.bucket_by_length."""


Unparsed = tuple[ChunkReads, Data | None, dict[int, str]]
"""A chunk that is read, but not parsed: no data if the cache has all of it; and faults, as Reader.read returns them."""


class Chunk(NamedTuple):
    """A chunk that is parsed. The first axis of arrays and ids is steps × rows."""

    reads: ChunkReads
    arrays: Arrays
    ids: np.ndarray
    """int64: the record in each row, -1 for padding; of a skipped record as source.mark_skipped returns it."""


class Loader:
    """Loads one rank's chunks. One thread reads them in order; any number of threads parse."""

    def __init__(
        self,
        plan: Plan,
        source: RecordSource,
        parser: Parser,
        ranks: Ranks,
        config: DataConfig,
        features: Mapping[str, Feature],
    ) -> None:
        """features: of the records, for the lengths of their lists."""
        self._plan, self._blocks, self._parser, self._ranks = plan, source.blocks, parser, ranks
        self._lists = [(name, features[name]) for name in (plan.buckets.names if plan.buckets else ())]
        self._has_said = False
        self._skip_bad = config.on_bad_record == "skip"
        self._reader = Reader(source, config.read_threads)
        uses_cache = config.cache == "memory"
        self._cache = ParsedCache(plan.num_records, parser.shapes, parser.dtypes) if uses_cache else None
        self._sequences: dict[tuple[int, str], EpochSequence] = {}
        self._chunk_reads: dict[StepRange, ChunkReads] = {}
        self._lock = threading.Lock()
        self.skipped: set[int] = set()
        """Records skipped so far on this rank."""
        most = _CHUNK_SINGLE_RECORDS if source.blocks.are_single else CHUNK_RECORDS
        records = records_at_a_time(source.blocks, parser, most)
        self.steps_per_chunk = max(1, records // plan.rows_per_rank(ranks.size))
        """How many steps are loaded together."""

    def read(self, steps: StepRange, following: Sequence[StepRange]) -> Unparsed:
        """Read a chunk, and start reading the following ones. Call it in the order of steps. Raises UserError."""
        with self._lock:
            reads = self._start_reading(steps)
            blocks = [reads.blocks, *(self._start_reading(later).blocks for later in following)]
            records = reads.rows.records.ravel()
            data, faults = (None, {}) if self._is_cached(records) else self._reader.read(records)
            self._reader.keep_only(np.concatenate(blocks).tolist())
            self._chunk_reads = {s: r for s, r in self._chunk_reads.items() if s in following}
            self._sequences = {key: order for key, order in self._sequences.items() if key[0] >= steps.epoch}
        return reads, data, faults

    def parse(self, reads: ChunkReads, data: Data | None, faults: dict[int, str]) -> Chunk:
        """Parse what was read; several threads may do so, in any order. Raises UserError that names a bad record."""
        records, real = (values.ravel() for values in reads.rows)
        arrays, bad = self._parse(records, data, faults)
        self.skipped.update(records[real & bad].tolist())
        self._check_lengths(arrays, reads, records, real & ~bad)
        return Chunk(reads, arrays, np.where(real, np.where(bad, mark_skipped(records), records), -1))

    def _check_lengths(self, arrays: Arrays, reads: ChunkReads, records: np.ndarray, used: np.ndarray) -> None:
        """Raise UserError for a list that is longer than when the lengths were measured: it would be cut off."""
        for column, (name, feature) in enumerate(self._lists):
            if name not in arrays:
                continue
            widths = np.repeat(reads.widths[:, column], len(records) // len(reads.widths))
            longer = np.flatnonzero(used & (lengths_of(feature, np.asarray(arrays[name])) > widths))
            if len(longer):
                problem = f"its {name} is longer than when the lengths of lists were measured"
                raise UserError(
                    f"{self.name_record(int(records[longer[0]]), problem)} Remove lengths-*.npy from data.index_dir, "
                    "or from ~/.cache/horovod_train/index."
                )

    def stored(self, record: int) -> Arrays:
        """Return the stored values of one record, each with one row."""
        records = np.array([record])
        with self._lock:
            data, faults = self._reader.read(records)
        return self._parse(records, data, faults)[0]

    def name_record(self, record: int, problem: str) -> str:
        """Return a sentence with the place of a record and its problem. Reads its block if necessary."""
        with self._lock:
            return self._reader.name_record(record, problem)

    def close(self) -> None:
        """Read nothing any more. Not under the lock, which a read that waits for a server holds."""
        self._reader.close()

    def error(self, sentence: str) -> UserError:
        """Return the error about a bad record: the sentence that names it, and the rank that read it."""
        rank = f"rank {self._ranks.rank} of {self._ranks.size}"
        return UserError(f"{sentence} Read by {rank}; data.on_bad_record=skip leaves out such records.")

    def _parse(self, records: np.ndarray, data: Data | None, faults: dict[int, str]) -> tuple[Arrays, np.ndarray]:
        """Return the stored values of records, and which rows are unusable: those hold another record, or zeros."""
        if data is None:
            assert self._cache is not None, "nothing was read, and there is no cache"
            return self._cache.load(records), np.zeros(len(records), bool)
        arrays, unusable = parse_usable(self._parser, records, data, faults, self.name_record)
        if unusable and not self._skip_bad:
            raise self.error(next(iter(unusable.values())))
        if unusable and not self._has_said:
            self._has_said = True
            log.warning(f"data.on_bad_record: left out, as all such records will be: {next(iter(unusable.values()))}")
        bad = np.isin(records, list(unusable)) if unusable else np.zeros(len(records), bool)
        if self._cache:
            self._cache.save(records[~bad], arrays)
        if not unusable:
            return arrays, bad
        if bad.all():
            return zero_rows(self._parser, len(bad)), bad
        rows = np.where(bad, 0, np.cumsum(~bad) - 1)
        return {name: np.asarray(array)[rows] for name, array in arrays.items()}, bad

    def _start_reading(self, steps: StepRange) -> ChunkReads:
        """Start reading the blocks of a chunk, unless that was done before. Return what the chunk needs."""
        if steps not in self._chunk_reads:
            sequence, (epoch, first, last) = self._sequence(steps.epoch, "rank"), steps
            arguments = (sequence, self._ranks.rank, self._ranks.size, first, last)
            rows = self._plan.rows(*arguments)
            cached = self._is_cached(rows.records.ravel())
            blocks = np.zeros(0, np.int64) if cached else self._plan.blocks_near(*arguments)
            # A separate sequence for all ranks' records, because a sequence caches only the windows last used.
            of_all = self._sequence(epoch, "all") if self._plan.buckets else sequence
            widths = self._plan.widths(of_all, first, last)
            self._chunk_reads[steps] = ChunkReads(steps, rows, blocks, widths)
            if not cached:
                self._reader.read_ahead(np.unique(self._blocks.containing(rows.records.ravel())).tolist())
        return self._chunk_reads[steps]

    def _is_cached(self, records: np.ndarray) -> bool:
        return self._cache is not None and self._cache.holds(records)

    def _sequence(self, epoch: int, ranks: str) -> EpochSequence:
        if (epoch, ranks) not in self._sequences:
            self._sequences[epoch, ranks] = self._plan.sequence(epoch)
        return self._sequences[epoch, ranks]


class ParsedCache:
    """Space for every record of a data set, filled as they arrive. Pages that were never filled use no memory."""

    def __init__(self, num_records: int, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
        self._is_filled = np.zeros(num_records, bool)
        self._arrays: Arrays = {
            name: np.empty((num_records, *shapes[name]), object if dtype == "string" else dtype)
            for name, dtype in dtypes.items()
        }

    def holds(self, records: np.ndarray) -> bool:
        return bool(self._is_filled[records].all())

    def load(self, records: np.ndarray) -> Arrays:
        return {name: array[records] for name, array in self._arrays.items()}

    def save(self, records: np.ndarray, arrays: Arrays) -> None:
        for name, array in arrays.items():
            self._arrays[name][records] = array
        self._is_filled[records] = True


def check_room_to_cache(bytes_each: int, ranks_on_host: int) -> None:
    """Raise UserError if this host, or its container, lacks the memory for the full caches of all its ranks."""
    needed, memory = ranks_on_host * bytes_each, usable_memory()
    if needed > memory:
        raise UserError(
            f"data.cache: memory needs {needed / 1e9:.1f} GB for {ranks_on_host} rank(s) of this host, which has "
            f"{memory / 1e9:.1f} GB. Use none: the operating system keeps what fits."
        )
