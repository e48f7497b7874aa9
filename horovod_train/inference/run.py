"""Evaluates, predicts with and exports a trained model, from start to end.

In `evaluate` and `predict` every rank runs every line, as in training.run: root reads the weights of a checkpoint into
a model without any training state, and the other ranks get them from it. `write_model` makes a file for use with
TensorFlow alone, and checks it by loading it back; for one process. Changes nothing in the run directory.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from horovod_train.checkpoint.layout import Checkpoint, open_checkpoint, reason
from horovod_train.checkpoint.tensors import array_names, load
from horovod_train.config.settings import AUTO, Config, DataConfig
from horovod_train.data.batch_source import Batch, Batches, Cursor, StepSize, for_each_batch
from horovod_train.data.dataset import Records, class_names, other_kinds
from horovod_train.data.model_inputs import Input, ModelInputs, inputs_in_config, unpack
from horovod_train.data.pipeline import Pipeline
from horovod_train.data.random_access.images import are_images
from horovod_train.data.schema import check_same_classes, parse_feature
from horovod_train.distributed import consistency
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.horovod_info import check_sums
from horovod_train.distributed.layer_contents import contents, finalize, how_built
from horovod_train.distributed.start import start
from horovod_train.distributed.watchdog.watchdog import RunEnd, open_watchdog, stall_environment
from horovod_train.errors import RanksStartApart, RunError, UserError, one_line
from horovod_train.inference.predictions import Predictions, PredictionsFile, RecordNames, Specs
from horovod_train.models import overridden
from horovod_train.output.rank_log import RankLog
from horovod_train.shown_text import listed
from horovod_train.training.build import add_l2, build_evaluation, build_first_model, build_split
from horovod_train.training.compiled import compile_model
from horovod_train.training.fine_tuning import Freezing, enable_lora
from horovod_train.training.initial_state import check_contents, contents_of_preprocess, users_code
from horovod_train.training.losses import build_loss, takes_logits, takes_one_class
from horovod_train.training.open_run import open_on_all_ranks
from horovod_train.training.state import weights_by_name
from horovod_train.training.steps.shares import Shares

Weights = Literal["auto", "trained", "ema", "evaluated"]
"""Weights of the last update, or their moving averages. auto: the averages if there are any, as `fit` ends with those
of an optimizer. evaluated: those of the two that the run's evaluations saw."""

log = logging.getLogger(__name__)

_END = object()
_MOST_BYTES = 16 << 20
"""Bytes of outputs that one rank keeps before sending them to root."""
_OPEN_SIZES = (32, 8, 1)
"""Replace sizes that a model leaves open in the test input; the next one where an input is too long for the model."""


@dataclass(frozen=True)
class Trained:
    """A trained model on the ranks of a group. checkpoint: its folder; step, epoch, records: when it was saved.

    class_names, features: of the training records, by feature; as a checkpoint keeps them.
    """

    group: WorkerGroup
    model: keras.Model
    weights: Weights
    checkpoint: str
    step: int
    epoch: int
    records: int
    class_names: Mapping[str, Sequence[str]]
    features: Mapping[str, Mapping[str, Any]]


def evaluate(config: Config, checkpoint: str, weights: Weights) -> dict[str, float | int | str] | None:
    """Collective: return loss and metrics over data.eval, each record once at any number of ranks; None except on root.

    Raises UserError for what the user must fix.
    """
    with _restored(config, checkpoint, weights) as trained:
        group = trained.group
        records = _open_records(config.data, trained)
        with group.raise_together():
            pipeline = build_split(_with_batch(config, group.size), group, records, training=False)
            _add_penalties(config, trained)
            compiled = compile_model(config, trained.model, None)
            step = build_evaluation(config, group, compiled, pipeline, Shares(group))
        step.begin(0)
        group.heartbeat.set_probe(step.counter)
        _for_all(group, pipeline, config.train.steps_per_call, step.run)
        values = step.metrics.result(group)
        about = {"step": trained.step, "epoch": trained.epoch, "records": pipeline.num_records, "ranks": group.size}
        if skipped := len(group.union(pipeline.skipped)):
            pipeline.check_used(skipped, "data.eval")
            about["skipped_records"] = skipped
        is_root = group.is_root
    return {**values, **about, "weights": trained.weights, "checkpoint": trained.checkpoint} if is_root else None


def _open_records(data: DataConfig, trained: Trained, *, needs_labels: bool = True) -> Records:
    """Collective: open data.eval, in which labels must stand for the same classes as in the training records."""
    records = open_on_all_ranks(data, ["eval"], trained.group, needs_labels=needs_labels)["eval"]
    with trained.group.raise_together():
        check_same_classes(trained.class_names, "the training records", records.schema.class_names, records.setting)
    features = {name: parse_feature(settings, name) for name, settings in trained.features.items()}
    for line in other_kinds(records, features, "the training records"):
        log.warning(line)
    return records


def _add_penalties(config: Config, trained: Trained) -> None:
    """Make the model's loss that of the run: Keras adds up the penalties of those weights that are trained."""
    add_l2(trained.model, config.train.l2)
    # The run evaluates at the end of an epoch before it trains the weights that are due then.
    epoch = trained.epoch if trained.records else trained.epoch - 1
    Freezing(trained.model, config.model).apply(epoch)


def predict(config: Config, checkpoint: str, weights: Weights, paths: Sequence[str], out: str) -> int:
    """Collective: write the model's outputs for each record once, in the order of the records, to a file.

    paths: the records, in the forms of data.eval; they need no targets and no weights. Returns the number of records
    written, on every rank. Raises UserError for what the user must fix.
    """
    with _restored(config, checkpoint, weights) as trained:
        group, model = trained.group, trained.model
        data = dataclasses.replace(config.data, eval=tuple(paths))
        with group.raise_together():
            if are_images(paths):  # a dataset.json beside the training records may have said how images are decoded
                images = {name: one for name, one in trained.features.items() if one.get("decode") == "image"}
                data = dataclasses.replace(data, features={**images, **data.features})
        records = _open_records(data, trained, needs_labels=False)
        unlabelled = dataclasses.replace(config, data=dataclasses.replace(data, targets=(), weight=None))
        with group.raise_together():
            pipeline = build_split(_with_batch(unlabelled, group.size), group, records, training=False)
            outputs = Outputs(model, pipeline)
            loss = _loss(config, model)
            names = class_names(config.data, trained.class_names or records.schema.class_names)
            if _has_number_per_class(config, trained, names) and not takes_one_class(loss):
                names = ()  # a record may have several of the classes
            about = RecordNames(records.files(), names, takes_logits(loss), records.numbers())
            file = Predictions()
            if group.is_root:
                file = PredictionsFile(Path(out), outputs.specs, pipeline.num_records, about)

        def collect(batches: Batches, steps: int, _: StepSize) -> None:
            ids, rows = outputs.compute(batches, steps)
            file.put(group.to_root(ids), {name: group.to_root(values) for name, values in rows.items()})

        with closing(file):
            _for_all(group, pipeline, outputs.steps_per_call, collect)
            skipped = len(group.union(pipeline.skipped))
            pipeline.check_used(skipped, records.setting)
            if skipped:
                log.warning(f"{records.setting}: data.on_bad_record: skip leaves {skipped} of its records out of {out}")
            _write(group, file)
            return group.broadcast_object(file.written)


def _write(group: WorkerGroup, file: Predictions) -> None:
    """Collective: write the file. Ranks meet after each piece: one that waited for the whole would count as stalled."""
    pieces, is_whole = file.write(), False
    while not is_whole:
        with group.heartbeat.phase("write"), group.raise_together():
            is_whole = next(pieces, _END) is _END
        is_whole = group.broadcast_object(is_whole)


def _has_number_per_class(config: Config, trained: Trained, names: Sequence[str]) -> bool:
    """Return whether the target of the training records is a number for each of the classes of these names."""
    others = [(name, settings) for name, settings in trained.features.items() if name not in config.data.inputs]
    features = [parse_feature(settings, name) for name, settings in others]
    return any((feature.class_names, feature.shape) == (tuple(names), (len(names),)) for feature in features)


def _loss(config: Config, model: keras.Model) -> Any:
    """Return the loss that the model was trained with, as `compile` takes it; that of the output where there is one.

    None: its own step knows it.
    """
    if config.loss.name == AUTO and not model.compiled and overridden(model, ["train_step"]):
        return None
    loss = model.loss if config.loss.name == AUTO and model.compiled else build_loss(config.loss).loss
    losses = list(loss.values()) if isinstance(loss, Mapping) else loss
    return losses[0] if isinstance(losses, list | tuple) and len(losses) == 1 else loss


@contextmanager
def _restored(config: Config, checkpoint: str, weights: Weights) -> Iterator[Trained]:
    """Start the ranks and give each the model and the weights read by root. Shows errors as a training run does."""
    environment = stall_environment(config.watch)
    group = start(config.horovod, config.device, deterministic=config.deterministic, environment=environment)
    no_log = RankLog()
    with RunEnd(group, no_log, open_watchdog(group, no_log, config.watch)) as run_end:
        check_sums(group)
        model = group.call_in_turns(lambda: build_bare_model(config), f"building {config.model.name}")
        with group.raise_together():
            held = contents_of_preprocess(config.data.preprocess)
        with group.raise_together():
            about: tuple[Any, ...] = ()
            if group.is_root:
                saved = open_checkpoint(checkpoint, "--checkpoint")
                facts, folder = saved.facts, str(saved.folder)
                loaded = load_weights(model, saved, weights)
                check_contents(held, saved)
                of_records = (dict(facts.class_names), dict(facts.features))
                about = (loaded, folder, facts.step, facts.epoch, facts.records, *of_records)
        group.broadcast(model.weights)
        finalize(model)
        consistency.check(group, contents(model) | held, "at the start", RanksStartApart)
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


def build_bare_model(config: Config) -> keras.Model:
    """Build the config's model under its precision, with initial weights and no optimizer. Raises UserError."""
    model = build_first_model(config)
    enable_lora(model, config.model.lora)
    Freezing(model, config.model).apply(math.inf)  # frozen weights have no moving averages
    return model


def load_weights(model: keras.Model, checkpoint: Checkpoint, weights: Weights) -> Weights:
    """Load trained weights or their moving averages from a checkpoint into a model; return which.

    Statistics such as BatchNorm's are the mean over ranks, which the checkpoint contains. Raises UserError if the
    checkpoint is of another model, in weights or vocabularies, or has no moving averages.
    """
    saved = array_names(checkpoint)
    has_averages = any(name.startswith("ema/") for name in saved)
    if weights == "ema" and not has_averages:
        raise UserError(
            f"--weights ema: {checkpoint.folder} holds no moving averages. Take --weights trained, or train with "
            "train.ema_decay or optimizer.options.use_ema."
        )
    variables = trained = weights_by_name(model.weights, "model")
    are_evaluated = checkpoint.facts.evaluates_averages
    takes_averages = has_averages and (are_evaluated if weights == "evaluated" else weights != "trained")
    if takes_averages and weights == "auto" and not are_evaluated:
        log.info(
            f"{checkpoint.folder}: takes the averages of the optimizer, as fit ends with them; evaluations of the run "
            "saw the trained weights (--weights evaluated)"
        )
    if takes_averages:
        # An optimizer that keeps averages may train a part of the model.
        named = weights_by_name(model.trainable_weights, "ema")
        averages = {name: variable for name, variable in named.items() if name in saved}
        averaged = {variable.ref() for variable in averages.values()}
        variables = {
            name: variable for name, variable in variables.items() if variable.ref() not in averaged
        } | averages
    # A user's class may build some layers in training only; a model that Keras built lacks none.
    is_users = not type(model).__module__.startswith("keras.")
    unbuilt = [name for name in sorted(saved) if is_users and name.startswith("model/") and name not in trained]
    if unbuilt:
        log.warning(f"{checkpoint.folder}: the model is built without {listed(unbuilt)}, which are left out")
    load(variables, checkpoint, unwanted={*trained, *unbuilt})
    finalize(model)
    check_contents(contents(model) | users_code(checkpoint.facts.config) | how_built(model), checkpoint)
    return "ema" if takes_averages else "trained"


class Outputs:
    """Computes a model's outputs by name: keys of a dict, layer names for a list, or "output" for a single one.

    Outputs in outputs are called `state[0]` or `state.left`.

    bfloat16, which numpy lacks, becomes float32.
    """

    def __init__(self, model: keras.Model, pipeline: Pipeline) -> None:
        """Raises UserError if the model rejects the pipeline's batches or does not return one row a record."""
        self._model, self._scaled, batch = model, pipeline.scaled, pipeline.scaled_spec
        self._run = tf.function(self._run_steps, autograph=False)
        rows = batch.ids.shape[0]
        _check_texts(model, batch.inputs)
        try:
            outputs = tf.function(self._forward, autograph=False).get_concrete_function(batch).structured_outputs
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            shapes = tf.nest.map_structure(lambda spec: f"{spec.dtype.name}{spec.shape}", batch.inputs)
            text = one_line(error)
            raise UserError(f"data.eval: the model does not fit inputs of {shapes}: {text}") from error
        if "record" in outputs:
            raise UserError(
                "predict: an output of the model is called record, as the numbers of records are; rename it."
            )
        for name, output in outputs.items():
            if not output.shape.is_fully_defined() or not output.shape.rank or output.shape[0] != rows:
                raise UserError(f"predict: expected output {name} to be one row a record; it is {output.shape}.")
            if output.dtype == tf.string:
                raise UserError(f"predict: expected numbers; output {name} is of strings.")
        self.specs: Specs = {
            name: (tuple(output.shape[1:]), output.dtype.as_numpy_dtype) for name, output in outputs.items()
        }
        step_bytes = sum(rows * np.dtype(dtype).itemsize * int(np.prod(shape)) for shape, dtype in self.specs.values())
        self.steps_per_call = max(1, min(_MOST_BYTES // max(step_bytes, 1), 100))

    def compute(self, batches: Batches, steps: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Compute the next `steps` batches. Return ids, int64 [rows], -1 for padding, and the outputs [rows, ...]."""
        ids, outputs = batches.call(self._run, tf.constant(steps, tf.int32))
        return ids.numpy(), {name: values.numpy() for name, values in outputs.items()}

    def _run_steps(self, cursor: Cursor, steps: tf.Tensor) -> tuple[Cursor, tuple[tf.Tensor, dict[str, tf.Tensor]]]:
        def write_step(
            batch: Batch, index: tf.Tensor, ids: tf.TensorArray, arrays: dict[str, tf.TensorArray]
        ) -> tuple[Any, ...]:
            outputs = self._forward(self._scaled(batch))
            arrays = {name: array.write(index, outputs[name]) for name, array in arrays.items()}
            return ids.write(index, batch.ids), arrays

        ids = tf.TensorArray(tf.int64, size=steps)
        arrays = {name: tf.TensorArray(tf.as_dtype(dtype), size=steps) for name, (_, dtype) in self.specs.items()}
        cursor, (ids, arrays) = for_each_batch(cursor, steps, write_step, (ids, arrays))
        return cursor, (ids.concat(), {name: array.concat() for name, array in arrays.items()})

    def _forward(self, batch: Batch) -> dict[str, tf.Tensor]:
        outputs = self._model(batch.inputs, training=False)
        rows = batch.ids.shape[0]
        named = _named(self._model, outputs).items()
        return {flat: _for_numpy(each, rows) for name, output in named for flat, each in _flat(name, output)}


def _check_texts(model: keras.Model, given: Any) -> None:
    """Raise UserError for an input that is text where the model takes numbers, or the other way round."""
    specs = given if isinstance(given, Mapping) else {"": given}
    declared = {one.name: one.dtype for one in _taken(_inputs(model))}
    if len(declared) == len(specs) == 1:
        declared = dict(zip(specs, declared.values(), strict=True))
    for name, spec in specs.items():
        if name in declared and (spec.dtype == tf.string) != (declared[name] == "string"):
            kind = "text" if spec.dtype == tf.string else spec.dtype.name
            raise UserError(f"data.eval: input {name or 'of the model'} is {kind}; the model takes {declared[name]}.")


def _named(model: keras.Model, outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, Mapping):
        return {str(name): output for name, output in outputs.items()}
    if not isinstance(outputs, list | tuple):
        return {"output": outputs}
    names = getattr(model, "output_names", None) or ()
    if len(set(names)) != len(outputs):
        names = [f"output_{number}" for number in range(len(outputs))]
    return dict(zip(names, outputs, strict=True))


def _flat(name: str, output: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of an output by name: itself, or what a dict or a list holds. Raises UserError for others."""
    if isinstance(output, Mapping):
        for key, each in output.items():
            yield from _flat(f"{name}.{key}", each)
    elif isinstance(output, list | tuple):
        for number, each in enumerate(output):
            yield from _flat(f"{name}[{number}]", each)
    elif not tf.is_tensor(output):
        raise UserError(f"predict: expected output {name} to be a tensor; it is {type(output).__name__}.")
    else:
        yield name, output


def _for_numpy(output: Any, rows: int) -> tf.Tensor:
    if output.shape.rank and output.shape[0] is None:  # layers that take text know the number of rows when they compute
        output = tf.ensure_shape(output, [rows, *output.shape[1:]])
    return tf.cast(output, tf.float32) if output.dtype == tf.bfloat16 else tf.identity(output)


def known_inputs(model: keras.Model, config: DataConfig, checkpoint: Checkpoint) -> ModelInputs | None:
    """Return what the run gave the model, of the checkpoint, else of data.features; None if neither says it.

    Raises UserError if the exported form could not take it then: of a model that declares no inputs and gets several by
    name.
    """
    known = unpack(checkpoint.facts.inputs) or inputs_in_config(config)
    if known is None and _inputs(model) is None and len(config.inputs) > 1 and config.preprocess is None:
        raise UserError(
            f"export: {model.name} declares no inputs, and {checkpoint.folder} does not say which dtypes and shapes "
            f"{listed(config.inputs)} had. Give data.features, with the type and shape of each."
        )
    return known


def write_model(
    model: keras.Model, path: Path, class_names: Sequence[str] = (), inputs: ModelInputs | None = None
) -> Sequence[Input]:
    """Write to `path`, which must not exist: a Keras file if it ends in .keras, else a SavedModel folder.

    class_names: of the outputs, in their order; the file holds them as class_names.json, a list. inputs: what the run
    gave the model, None if it is not known; a SavedModel of a model that declares no inputs takes these. The file holds
    what it takes as inputs.json. The file has no optimizer: a compiled model is not compiled any more.

    Return what the file takes; nothing for a Keras file of which it is not known. Raises UserError if Keras cannot
    write the model or read it back. Raises RunError if the loaded model computes something else; OSError from the disk.
    """
    if model.compiled:
        model.compiled, model.optimizer = False, None
    is_keras = path.suffix == ".keras"
    structure = _inputs(model)
    if structure is None and inputs is not None:
        known = {one.name: tf.TensorSpec(one.shape, one.dtype, one.name) for one in inputs.inputs}
        structure = known if inputs.is_dict else known[inputs.inputs[0].name]
    specs, taken = _specs(structure), _taken(structure)
    signature = None if specs is None else [specs]
    try:
        if is_keras:
            model.save(path)
            serve = partial(keras.saving.load_model(path, compile=False), training=False)
        else:
            model.export(path, format="tf_saved_model", verbose=False, input_signature=signature)
            loaded = tf.saved_model.load(str(path))  # keep the reference: it owns the variables that `serve` uses
            serve = loaded.serve
    except (AssertionError, NotImplementedError, TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        kind = "Keras file" if is_keras else "SavedModel"
        hint = " A SavedModel, --out DIR, needs no code to load; or see docs/models.md." if is_keras else ""
        text = one_line(error)[:400]
        raise UserError(f"export: {model.name} cannot be made a {kind}: {text}{hint}") from error
    except tf.errors.OpError as error:  # a SavedModel is written by TensorFlow's own C++
        raise OSError(reason(error)) from error
    if specs is None and not is_keras:
        named = loaded.signatures["serving_default"].structured_input_signature[1]
        taken = [_input(name, spec) for name, spec in named.items()]
        log.warning(
            f"export: {model.name} declares no inputs, and the checkpoint does not say what they were. The SavedModel "
            f"takes what Keras assumes, {listed(map(str, taken))}: do not use it if the records were others."
        )
    _add_facts(path, class_names, taken, inputs)
    if specs is not None:
        _check_computes_the_same(model, serve, specs, in_graph=not is_keras)
    return taken


def _check_computes_the_same(model: keras.Model, serve: Callable[[Any], Any], specs: Any, *, in_graph: bool) -> None:
    """Raise RunError if a loaded file computes something else than the model for generated input."""
    # Half precision rounds otherwise in a graph, and that adds up over the layers: compare graph with graph.
    call = partial(model, training=False)
    if in_graph:
        signature = keras.tree.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), specs)
        call = tf.function(call, input_signature=[signature], autograph=False)
    for size in _OPEN_SIZES:
        sample = keras.tree.map_structure(partial(_sample, open_size=size), specs)
        try:
            expected, again = call(sample), call(sample)
        except (ValueError, tf.errors.InvalidArgumentError):
            continue  # if it is never suitable, such as for a table lookup, nothing is compared
        if _first_difference(expected, again) is not None:
            return  # it draws random numbers
        try:
            computed = serve(sample)
        except (AttributeError, TypeError, ValueError, tf.errors.OpError) as error:
            text = one_line(error)[:300]
            raise RunError(f"export: the file fails where the model does not: {text}; none of it was kept.") from error
        different = _first_difference(expected, computed)
        if different is not None:
            raise RunError(f"export: output {different} of the file is not that of the model; nothing was kept of it.")
        return


def _add_facts(path: Path, class_names: Sequence[str], taken: Sequence[Input], inputs: ModelInputs | None) -> None:
    """Add JSON files to a file of Keras, which is a zip archive, or to the extra assets of a SavedModel."""
    facts: dict[str, Any] = {"class_names.json": list(class_names)} if class_names else {}
    if taken:
        made_of = {"features": inputs.features, "preprocess": inputs.preprocess} if inputs else {}
        facts["inputs.json"] = {"inputs": [one._asdict() for one in taken], **made_of}
    # In ASCII, because names of folders, which are classes, need not be UTF-8.
    texts = {name: json.dumps(content) for name, content in facts.items()}
    if path.suffix == ".keras":
        with zipfile.ZipFile(path, "a") as archive:
            for name, text in texts.items():
                archive.writestr(name, text)
    elif texts:
        (path / "assets.extra").mkdir()
        for name, text in texts.items():
            with (path / "assets.extra" / name).open("x", encoding="utf-8") as file:
                file.write(text)


def _inputs(model: keras.Model) -> Any:
    """Return the structure of the model's inputs; None if a subclassed model does not declare them."""
    if not getattr(model, "inputs", None):
        return None
    # A Sequential model has exactly one input and no input structure.
    return model.inputs[0] if isinstance(model, keras.Sequential) else model.input


def _taken(structure: Any) -> Sequence[Input]:
    """Return the inputs in a structure: those in a dict by their keys, others by their own names; none in None."""
    if isinstance(structure, Mapping):
        return [_input(name, tensor) for name, tensor in structure.items()]
    return [_input(tensor.name, tensor) for tensor in keras.tree.flatten(structure) if tensor is not None]


def _input(name: str, tensor: keras.KerasTensor | tf.TensorSpec) -> Input:
    return Input(name, tf.as_dtype(tensor.dtype).name, tuple(tensor.shape))


def _specs(structure: Any) -> Any:
    """Return the structure of a model's inputs, of tf.TensorSpec; None for None.

    Keras would name them as they are, which fails for many names of columns.
    """
    names = iter(_argument_names([one.name for one in _taken(structure)]))

    def spec(tensor: keras.KerasTensor | tf.TensorSpec) -> tf.TensorSpec:
        return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype, next(names))

    if isinstance(structure, Mapping):  # as _taken orders them
        return {name: spec(tensor) for name, tensor in structure.items()}
    return None if structure is None else keras.tree.map_structure(spec, structure)


def _argument_names(names: Sequence[str]) -> list[str]:
    """Return names that a signature can hold, all different. Those that it can hold stay as they are.

    TensorFlow takes Python's names of arguments, and none that are equal in small letters.
    """
    bases = [re.sub(r"\W", "_", name, flags=re.ASCII) or "inputs" for name in names]
    plain = [base[0].isalpha() and not iskeyword(base) and base != "self" for base in bases]
    bases = [base if is_plain else f"input_{base}" for base, is_plain in zip(bases, plain, strict=True)]
    found: dict[int, str] = {}
    for number in sorted(range(len(names)), key=lambda number: bases[number] != names[number]):
        taken, name = {name.lower() for name in found.values()}, bases[number]
        while name.lower() in taken:
            name = f"{name}_{number}"
        found[number] = name
    return [found[number] for number in range(len(names))]


def _sample(tensor: keras.KerasTensor | tf.TensorSpec, open_size: int) -> tf.Tensor:
    """Return made-up values for an input, for two records where the model leaves their number open."""
    records, *sizes = tensor.shape
    shape = [records or 2, *(size or open_size for size in sizes)]
    if tensor.dtype == "string":
        return tf.fill(shape, "text")
    is_float = tf.as_dtype(tensor.dtype).is_floating
    values = np.random.default_rng(0).uniform(-0.5, 0.5, shape) if is_float else np.ones(shape)
    return tf.cast(values, tensor.dtype)


def _first_difference(expected: Any, computed: Any) -> int | None:
    """Return the number of the first output that differs; None if none does."""
    pairs = zip(_numbers_in(expected), _numbers_in(computed), strict=True)
    for number, (model_output, output) in enumerate(pairs):
        # The same operations on the same machine: equal, but for sums that a GPU adds in another order.
        largest = np.abs(model_output[np.isfinite(model_output)]).max(initial=0)
        is_close = model_output.shape == output.shape and np.allclose(
            model_output, output, rtol=1e-3, atol=1e-3 * largest, equal_nan=True
        )
        if not is_close:
            return number
    return None


def _numbers_in(outputs: Any) -> list[np.ndarray]:
    """Return the outputs that are tensors of numbers, as float64."""
    tensors = [leaf for leaf in keras.tree.flatten(outputs) if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string]
    return [np.asarray(tf.cast(tensor, tf.float64)) for tensor in tensors]
