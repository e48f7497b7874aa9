"""The settings of a run: types and defaults. rules has the rules between them.

One YAML file is one run; loader reads and writes it. Does not look at the data, the model or the machine: the package
that uses a setting checks it. Imports the standard library only, so that a bad config fails quickly.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NewType

Seconds = NewType("Seconds", float)
"""A duration: in YAML a number of seconds, or a scheduler's string [D-]HH:MM:SS."""

AUTO = "auto"
"""Name of a loss or an optimizer that the config leaves to the model, if that is compiled, or else to our defaults."""


def setting(default: Any, doc: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """Return a dataclass field with its documentation line and, for numbers, the smallest and largest allowed value."""
    metadata = {"doc": doc, "minimum": minimum, "maximum": maximum}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default value of a setting that has one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclass(frozen=True)
class Spec:
    """Something chosen by name, with its keyword arguments. In YAML a bare string is a name without options."""

    name: str
    options: dict[str, Any] = setting({}, "keyword arguments of the thing named")


@dataclass(frozen=True)
class MetricSpec(Spec):
    """A metric; for a model with several outputs, also the output and the target that it uses."""

    output: str | None = setting(None, "of several outputs, the one it looks at, by its name")
    target: str | None = setting(None, "of several targets, the one it compares with; default: as output")


@dataclass(frozen=True)
class ModelSpec(Spec):
    """A model, the weights that it begins with, and which of them are trained."""

    init_from: str | None = setting(
        None, "weights to begin with: FILE.keras, FILE.weights.h5, a run's directory or package.module:function"
    )
    init_exclude: tuple[str, ...] = setting((), "patterns (re.search) of weights' paths that init_from leaves alone")
    lora: dict[str, Any] = setting({}, "layers that get Keras' LoRA: pattern of their paths → rank, like {dense: 4}")
    freeze: tuple[str, ...] = setting((), "patterns of weights' paths that are not trained, or all but LAYER, …")
    unfreeze: dict[str, Any] = setting({}, "frozen weights to train after all: complete epochs → patterns")

    def unfrozen_by_epoch(self) -> list[tuple[int, tuple[str, ...]]]:
        """Return `unfreeze` in the order of its epochs: (complete epochs, patterns)."""
        entries = ((int(epoch), entry) for epoch, entry in self.unfreeze.items())
        return sorted(
            (epoch, tuple(entry) if isinstance(entry, list | tuple) else (entry,)) for epoch, entry in entries
        )


@dataclass(frozen=True)
class OptimizerSpec(Spec):
    """An optimizer, and how its learning rate differs between weights."""

    lr_multipliers: dict[str, Any] = setting(
        {}, "factors of the learning rate: pattern of weights' paths → factor; the first that matches"
    )


@dataclass(frozen=True)
class LossSpec(Spec):
    """A loss, and how much the records of each class count in it."""

    class_weight: dict[str, Any] = setting({}, "weights of records by the class of their target, like {3: 2.5}; else 1")


@dataclass(frozen=True)
class LossTerm(LossSpec):
    """The loss of one of a model's outputs."""

    target: str | None = setting(None, "of several targets, the one it compares with; default: as the output")
    weight: float = setting(1.0, "its factor in the sum")


@dataclass(frozen=True)
class Mixed:
    """One of several sets of training records. In YAML a bare string is a path."""

    path: str
    repeats: int = setting(1, "how often each of its records comes in an epoch", minimum=1)


@dataclass(frozen=True)
class DataConfig:
    train: tuple[str | Mixed, ...] = setting((), "training records: folder, file, glob or a list; see docs/data.md")
    eval: tuple[str, ...] = setting((), "evaluation records: folder, file, glob or a list; none: no evaluation")
    dataset: Spec | None = setting(None, "package.module:function that gives a stream, in place of train and eval")
    steps_per_epoch: int | None = setting(None, "steps of a stream's epoch; default: what its epoch 0 has", minimum=1)
    source: Spec | None = setting(None, "package.module:Class, called with each entry of train and eval to read it")
    fold: str | None = setting(None, "k/K: train on all but part k of K of the records, evaluate on that part")
    eval_fraction: float | None = setting(
        None, "above 0, below 1: train on all but this part of data.train, evaluate on it", minimum=0, maximum=1
    )
    features: dict[str, Any] = setting({}, "what a record holds, where neither dataset.json nor the records say it")
    inputs: tuple[str, ...] = setting((), "features that the model gets; default: dataset.json's, or all but targets")
    targets: tuple[str, ...] = setting((), "features that the loss gets; default: as dataset.json says")
    weight: str | None = setting(None, "feature with the weight of its record in the loss: one number, 0 or more")
    parse: str | None = setting(None, "package.module:function, records → tensors, in place of features")
    preprocess: str | None = setting(None, "package.module:function of a batch's inputs, or a keras_hub preset")
    index_dir: str | None = setting(None, "folder for indexes; default: next to the records, or else ~/.cache")
    stage_dir: str | None = setting(None, "node-local folder that keeps what this node's ranks have read")
    cache: Literal["none", "memory"] = setting("none", "memory: each rank keeps what it has parsed")
    global_batch_size: int | None = setting(None, "records per update over all ranks", minimum=1)
    batch_size_per_rank: int | None = setting(None, "records per update on one rank", minimum=1)
    shuffle: bool = setting(True, "another order every epoch, drawn from (seed, epoch); false: file order")
    shuffle_window: int = setting(10_000, "records over all ranks among which records are mixed", minimum=1)
    shuffle_mb: int = setting(1024, "most memory for the shuffle window on one rank; lowers shuffle_window", minimum=1)
    bucket_by_length: str | None = setting(
        None, "feature, a list: batches of records of similar length, padded to the longest"
    )
    bucket_steps: int = setting(
        256, "steps among which records are sorted by length; 1: they are not sorted", minimum=1
    )
    drop_remainder: bool = setting(False, "leave out the last partial batch of an epoch")
    augment: tuple[Spec, ...] = setting((), "changes to training images, in order; see docs/data.md")
    read_threads: int = setting(32, "blocks of records that a rank reads at the same time", minimum=1)
    read_ahead_chunks: int = setting(2, "chunks of 4096 records or 16 MiB to read ahead of need", minimum=1)
    parallel_parse_calls: int = setting(2, "parallel calls that parse thousands of records each", minimum=1)
    prefetch_batches: int | None = setting(None, "batches prepared ahead; default: see docs/data.md", minimum=1)
    audit: bool = setting(False, "write the ids of the records that each rank consumes to output_dir/audit")
    retry_s: float = setting(
        120.0, "seconds from the first failure for which a read from s3:// or the like is repeated", minimum=0
    )
    on_bad_record: Literal["error", "skip"] = setting("error", "error: name it and stop; skip: leave it out, count it")

    def paths(self, split: Literal["train", "eval"]) -> tuple[str, ...]:
        """Return the folders, files and globs of a split."""
        entries: tuple[str | Mixed, ...] = getattr(self, split)
        return tuple(entry.path if isinstance(entry, Mixed) else entry for entry in entries)

    def repeats(self, split: Literal["train", "eval"]) -> tuple[int, ...]:
        """Return how often the records of each of these paths come in an epoch."""
        entries: tuple[str | Mixed, ...] = getattr(self, split)
        return tuple(entry.repeats if isinstance(entry, Mixed) else 1 for entry in entries)

    def global_batch(self, size: int) -> int:
        """Return the records of an update over `size` ranks; 0 if neither batch size is given."""
        return self.global_batch_size or (self.batch_size_per_rank or 0) * size


@dataclass(frozen=True)
class LrScheduleConfig:
    base_lr: float | None = setting(
        None, "learning rate at base_batch_size, after warm-up, before decay; default: 0.001, or as compiled", minimum=0
    )
    scaling: Literal["none", "linear", "sqrt"] = setting("none", "how the rate grows with the global batch")
    base_batch_size: int | None = setting(None, "global batch that base_lr was chosen for", minimum=1)
    warmup_epochs: float = setting(0.0, "epochs over which the rate rises linearly, step by step", minimum=0)
    decay: Spec = setting(
        Spec("constant"), "constant, piecewise, exponential, cosine, polynomial or package.module:function"
    )


@dataclass(frozen=True)
class TrainConfig:
    epochs: int | None = setting(None, "passes over the training records", minimum=1)
    max_steps: int | None = setting(None, "updates; with epochs too, whichever comes first", minimum=1)
    steps_per_call: int = setting(10, "updates inside one compiled call", minimum=1)
    accumulate_steps: int = setting(1, "parts in which a rank's batch is computed, for one update", minimum=1)
    synchronization: Literal["every_step", "local", "stale"] = setting("every_step", "when ranks exchange; see docs")
    average_every_steps: int | None = setting(None, "with synchronization: local, steps between averages", minimum=1)
    clip_norm: float | None = setting(None, "largest global norm of the averaged gradient, above 0", minimum=0)
    l2: float = setting(0.0, "adds l2 · ½ Σ‖W‖² over weight matrices to the loss", minimum=0)
    ema_decay: float | None = setting(
        None, "keeps moving averages of weights, used for evaluation; less than 1", minimum=0
    )
    non_finite: Literal["stop", "skip"] = setting("stop", "at a NaN or infinite loss or gradient: end, or skip it")
    max_skips_in_a_row: int = setting(10, "updates to skip in a row; with float16 50 or more", minimum=1)
    max_time: Seconds | None = setting(
        None, "save and end before this much time has passed: seconds, or [D-]HH:MM:SS", minimum=0
    )
    weight_decay_1d: bool = setting(False, "apply weight decay to variables with one axis too: biases, norm scales")
    weight_decay_exclude: tuple[str, ...] = setting((), "patterns (re.search) of variables' paths without decay")
    sync_batch_norm: bool = setting(False, "BatchNormalization over the batches of all ranks together")
    check_agreement_every_steps: int | None = setting(1000, "steps between checks of equal weights on ranks", minimum=1)


@dataclass(frozen=True)
class EvalConfig:
    every_epochs: int | None = setting(1, "epochs between evaluations", minimum=1)
    every_steps: int | None = setting(None, "steps between evaluations, besides every_epochs", minimum=1)
    batch_size_per_rank: int | None = setting(None, "default: the batch of training, spread over ranks", minimum=1)


@dataclass(frozen=True)
class Watched:
    """A metric whose best value is tracked."""

    metric: str = setting("loss", "loss, or the name of one of metrics, over the evaluation records")
    mode: Literal["min", "max"] = setting("min", "whether less is better, or more")


@dataclass(frozen=True)
class EarlyStoppingConfig(Watched):
    patience: int | None = setting(None, "evaluations without a better value after which to end", minimum=1)
    min_delta: float = setting(0.0, "how much better a value must be to count as better", minimum=0)
    target: float | None = setting(None, "a value at which to end")


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int | None = setting(None, "steps between checkpoints, besides every_epochs", minimum=1)
    every_epochs: int | None = setting(1, "epochs between checkpoints", minimum=1)
    every_minutes: float | None = setting(None, "minutes between checkpoints", minimum=0)
    keep: int = setting(3, "newest checkpoints kept", minimum=1)
    best: Watched | None = setting(None, "also keep the checkpoint with the best value of an eval metric")
    max_failed_saves: int | None = setting(
        3, "failed saves in a row after which the run ends; null: it trains on", minimum=1
    )
    resume: str = setting("auto", "auto: the newest in output_dir if there is one; never; or a checkpoint's path")


@dataclass(frozen=True)
class LogConfig:
    every_steps: int = setting(
        100, "steps between lines of training; at most an epoch, if each is evaluated", minimum=1
    )
    tensorboard: bool = setting(True, "write TensorBoard scalars")
    writers: tuple[str, ...] = setting((), "package.module:class, each writes the metrics in one more form")
    trackers: tuple[Spec, ...] = setting((), "csv, mlflow, wandb or package.module:class that get the metrics too")
    progress: Literal["auto", "bar", "plain"] = setting("auto", "auto: a bar on a terminal, plain lines elsewhere")
    histograms_every_steps: int | None = setting(None, "steps between histograms of weights and gradients", minimum=1)
    activations: dict[str, Any] = setting({}, "outputs that get histograms too: {name to show: layer}")
    graph: bool = setting(False, "write the graph of one step, folded by namespace")
    graph_names: dict[str, Any] = setting({}, "other names for its parts: {input_data: input}; null unfolds one")
    profile_at_steps: tuple[int, ...] = setting(
        (), "steps, 2 or later, of which the time and memory of every op are written"
    )


@dataclass(frozen=True)
class HorovodConfig:
    op: Literal["average", "sum", "adasum"] = setting("average", "how the ranks' gradients are combined")
    compression: Literal["none", "fp16", "bf16"] = setting("none", "number format in which gradients are exchanged")
    predivide: float = setting(1.0, "divide gradients by this before the sum, and by the rest after it", minimum=1e-9)
    sparse_as_dense: bool = setting(False, "exchange the gradients of embeddings as whole tables, not as their rows")
    cycle_time_ms: float | None = setting(None, "pause between exchanges; default: see docs/tools.md", minimum=0)
    fusion_threshold_mb: float | None = setting(None, "most in an exchange; default: Horovod's", minimum=0, maximum=1e6)
    timeline: bool = setting(False, "write when each tensor was ready, sent and received; see docs/seeing.md")


@dataclass(frozen=True)
class WatchConfig:
    enabled: bool = setting(True, "name ranks that are waited for or have ended, and end the others")
    warn_after_s: float = setting(60.0, "seconds without progress after which a line names the slow ranks; above 0")
    stop_after_s: float = setting(
        600.0, "seconds without progress after which all ranks write their stacks and end; above warn_after_s"
    )
    first_step_after_s: float = setting(
        1800.0, "in place of stop_after_s until the first step is over, and while another is compiled; at least that"
    )


@dataclass(frozen=True)
class DeviceConfig:
    memory_growth: bool = setting(True, "allocate GPU memory as needed, not all of it at the start")
    intra_op_threads: int | None = setting(None, "threads inside an op; default: cores / ranks on this host", minimum=1)
    inter_op_threads: int | None = setting(None, "ops run in parallel; default: cores / ranks on this host", minimum=1)
    soft_placement: bool = setting(True, "run an op elsewhere where its device is missing or has no kernel")
    log_placement: bool = setting(False, "log the device of every op")
    per_rank: int = setting(1, "devices of one rank: GPUs, or logical devices of its CPU", minimum=1)
    cut_before: tuple[str, ...] = setting((), "first layer of the model's second, third, … stage")


@dataclass(frozen=True)
class Config:
    output_dir: str | None = setting(None, "the run directory")
    seed: int = setting(1, "of initial weights, dropout and data order", minimum=0, maximum=2**32 - 1)
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = setting("float32", "Keras dtype policy")
    jit_compile: bool = setting(False, "compile forward and backward pass by XLA; the exchange stays outside")
    deterministic: bool = setting(False, "bit-equal runs: deterministic ops, and one order of adding ranks' numbers")
    data: DataConfig = DataConfig()
    model: ModelSpec = setting(ModelSpec("convnet"), "ours, package.module:function, FILE.keras or a preset")
    loss: LossSpec = setting(
        LossSpec(AUTO),
        "Keras' or ours, package.module:function, per_output; "
        "auto: a compiled model's, or sparse_categorical_crossentropy of probabilities; our models return logits",
    )
    metrics: tuple[MetricSpec, ...] = setting((), "Keras metrics, or package.module:function")
    weighted_metrics: tuple[MetricSpec, ...] = setting((), "metrics that weight records as the loss does")
    optimizer: OptimizerSpec = setting(
        OptimizerSpec(AUTO), "a Keras optimizer, lars or package.module:function; auto: a compiled model's, or sgd"
    )
    callbacks: tuple[Spec, ...] = setting((), "Keras callbacks, or package.module:Class, called as fit does; see docs")
    hooks: tuple[str, ...] = setting((), "package.module:function, each called as (run, step) between steps")
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    log: LogConfig = LogConfig()
    horovod: HorovodConfig = HorovodConfig()
    device: DeviceConfig = DeviceConfig()
    watch: WatchConfig = WatchConfig()
