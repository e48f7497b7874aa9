"""Evaluates and predicts with a trained model, from start to end. Every rank runs every line, as in training.run.

Reads checkpoints and does not change the run directory. Exporting needs no ranks; see commands/export.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import keras

from horovod_train.checkpoint.folder import open_checkpoint
from horovod_train.config.settings import Config
from horovod_train.data.pipeline.batch_source import StepSize
from horovod_train.data.pipeline.chunks import Batches
from horovod_train.data.pipeline.pipeline import Pipeline
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.start import start
from horovod_train.distributed.watchdog.run_end import RunEnd
from horovod_train.distributed.watchdog.watchdog import open_watchdog, stall_environment
from horovod_train.inference.predictions import Outputs, open_predictions
from horovod_train.inference.restore import Weights, build_bare_model, load_weights
from horovod_train.output.rank_log import NullRankLog
from horovod_train.training.build import build_split
from horovod_train.training.parts.compiled import compile_model
from horovod_train.training.shared_records import open_on_all_ranks
from horovod_train.training.steps.build import build_evaluation


@dataclass(frozen=True)
class Trained:
    """A trained model on the ranks of a group. checkpoint: its folder; step, epoch: when it was saved."""

    group: WorkerGroup
    model: keras.Model
    weights: Weights
    checkpoint: str
    step: int
    epoch: int


def evaluate(config: Config, checkpoint: str, weights: Weights) -> dict[str, float | int | str] | None:
    """Collective: return loss and metrics over data.eval, each record once at any number of ranks; None except on root.

    Raises UserError for what the user must fix.
    """
    with _restored(config, checkpoint, weights) as trained:
        group = trained.group
        records = open_on_all_ranks(config.data, ["eval"], group)["eval"]
        with group.raise_together():
            pipeline = build_split(_with_batch(config, group.size), group, records, training=False)
            compiled = compile_model(config, trained.model, None)
            step = build_evaluation(config, group, compiled, pipeline).step
        group.heartbeat.set_probe(step.counter)
        _for_all(group, pipeline, config.train.steps_per_call, step.run)
        values = step.metrics.result(group)
        about = {"step": trained.step, "epoch": trained.epoch, "records": pipeline.num_records, "ranks": group.size}
        if skipped := int(group.sum([pipeline.skipped])[0]):
            about["skipped_records"] = skipped
        is_root = group.is_root
    return {**values, **about, "weights": trained.weights, "checkpoint": trained.checkpoint} if is_root else None


def predict(config: Config, checkpoint: str, weights: Weights, paths: Sequence[str], out: str) -> int:
    """Collective: write the model's outputs for each record once, in the order of the records, to a file.

    paths: the records, in the forms of data.eval; they need no targets and no weights. Returns the number of records
    written, on every rank. Raises UserError for what the user must fix.
    """
    with _restored(config, checkpoint, weights) as trained:
        group, model = trained.group, trained.model
        data = dataclasses.replace(config.data, eval=tuple(paths))
        records = open_on_all_ranks(data, ["eval"], group, needs_labels=False)["eval"]
        unlabelled = dataclasses.replace(config, data=dataclasses.replace(data, targets=(), weight=None))
        with group.raise_together():
            pipeline = build_split(_with_batch(unlabelled, group.size), group, records, training=False)
            outputs = Outputs(model, pipeline, "data.eval")
            file = open_predictions(out, outputs.specs, pipeline.num_records, is_root=group.is_root)

        def collect(batches: Batches, steps: int, _: StepSize) -> None:
            ids, rows = outputs.compute(batches, steps)
            file.put(group.to_root(ids), {name: group.to_root(values) for name, values in rows.items()})

        with closing(file):
            _for_all(group, pipeline, outputs.steps_per_call, collect)
            with group.raise_together():
                written = file.finish()
        return group.broadcast_object(written)


@contextmanager
def _restored(config: Config, checkpoint: str, weights: Weights) -> Iterator[Trained]:
    """Start the ranks and give each the model and the weights read by root. Shows errors as a training run does."""
    environment = stall_environment(config.watch)
    group = start(config.horovod, config.device, deterministic=config.deterministic, environment=environment)
    no_log = NullRankLog()
    with RunEnd(group, no_log, open_watchdog(group, no_log, config.watch)) as run_end:
        model = group.call_in_turns(lambda: build_bare_model(config), f"building {config.model.name}")
        with group.raise_together():
            about: tuple[Weights, str, int, int] = (weights, "", 0, 0)
            if group.is_root:
                saved = open_checkpoint(checkpoint, "--checkpoint")
                about = (load_weights(model, saved, weights), str(saved.folder), saved.facts.step, saved.facts.epoch)
        group.broadcast(model.weights)
        yield Trained(group, model, *group.broadcast_object(about))
        group.close()
        run_end.close()


def _with_batch(config: Config, size: int) -> Config:
    """Return the config with a global batch size, which an evaluation uses only for its default."""
    data = dataclasses.replace(config.data, global_batch_size=config.data.global_batch(size))
    return dataclasses.replace(config, data=data)


def _for_all(group: WorkerGroup, pipeline: Pipeline, most: int, act: Callable[[Batches, int, StepSize], None]) -> None:
    """Call act(batches, steps, size), with at most `most` steps each time, until every record has been used once."""
    with pipeline.explaining():
        for batches, steps, size in pipeline.one_epoch(most):
            group.heartbeat.phase("evaluate")  # tells the stall detector that there is progress
            act(batches, steps, size)
