"""The steps of gpu_day.py: each tries or measures one thing on the GPU of this machine, and returns what it found.

Also what configs and hooks of these steps name. Knows nothing of time limits and results; TensorFlow is imported in the
steps alone, because each is run in a fork of one process.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horovod_train.checkpoint.layout import CHECKPOINTS, steps_in
from horovod_train.errors import one_line

HERE = "rank_programs.gpu_steps"
MAIN = ("-m", "horovod_train.main")
HIDE_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
KILL_AT, MEMORY = "GPU_DAY_KILL_AT", "GPU_DAY_MEMORY"
"""Environment variables for the hooks below: a step, and a file."""
TOLERANCE = 1e-4
"""Two devices round differently: after 46 steps of `digits` weights differ by 1e-6, and have moved by 3e-2. At a rate
of 0.05 in place of 0.01 they would differ by 0.1."""
PARTS = 5
"""Equal parts of a training whose first one, which compiles, is not counted."""

Found = dict[str, Any]


class Sizes(NamedTuple):
    """What the resnet steps train, and the states in MB that are saved. tiny: a small network in place of ResNet-50."""

    pixels: int
    batch: int
    steps: int
    jpegs: int
    saved_mb: tuple[int, int]
    tiny: bool
    precision: str = "mixed_bfloat16"


GPU, CPU = Sizes(224, 128, 200, 1024, (100, 2000), False), Sizes(32, 4, 1000, 64, (1, 2), True)


class Day(NamedTuple):
    """What a step gets. folder: its own, removed after it. data: for what several steps read."""

    cpu: bool
    folder: Path
    data: Path
    log: Path

    @property
    def sizes(self) -> Sizes:
        return CPU if self.cpu else GPU


class NotOk(Exception):
    """The status of a step that has not found what it should, or cannot here, with what it found."""

    def __init__(self, status: str, found: Found) -> None:
        super().__init__(status)
        self.found = found


def expect(is_so: object, expected: str, found: Found) -> None:
    if not is_so:
        raise NotOk(f"failed: expected {expected}", found)


def need_gpu(day: Day, found: Found) -> None:
    if day.cpu:
        raise NotOk("skipped: needs a GPU", found)


# --- does it work? ------------------------------------------------------------------------------------------------


def load_nccl(day: Day) -> Found:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_train.distributed.horovod_info import (
        are_sums_of_group,
        compute_capabilities,
        judge_group,
        sums_of_group,
    )

    found: Found = {f"{name}_built": bool(getattr(hvd, f"{name}_built")()) for name in ("nccl", "cuda", "gloo", "mpi")}
    os.environ.setdefault("HOROVOD_GLOO_IFACE", "lo")  # gloo aborts where the host's own name has no address
    hvd.init()
    found["allreduce"] = float(hvd.allreduce(tf.constant(2.0), name="day"))
    expect(found["allreduce"] == 2.0, "2.0 from an allreduce of 2.0 on one rank", found)
    found["compute_capabilities"] = compute_capabilities()
    if problem := judge_group([(are_sums_of_group(sums_of_group(0), 1), found["compute_capabilities"])]):
        raise NotOk(f"failed: {'. '.join(problem)}", found)
    loaded = Path("/proc/self/maps").read_text()
    found["libraries"] = sorted({*re.findall(r"/\S+/lib(?:cuda|cudart|cudnn|cublas|cusparse|nccl)\.so\S*", loaded)})
    need_gpu(day, found)
    expect(found["nccl_built"], "a Horovod with NCCL", found)
    return found


def pin(day: Day) -> Found:
    import tensorflow as tf

    import horovod_train.keras as hvd

    hvd.init()
    gpus = tf.config.get_visible_devices("GPU")
    found: Found = {
        "pinned": [{"name": gpu.name, **tf.config.experimental.get_device_details(gpu)} for gpu in gpus],
        "memory_grows": [tf.config.experimental.get_memory_growth(gpu) for gpu in gpus],
        "computed_on": tf.matmul(tf.ones((64, 64)), tf.ones((64, 64))).device,
    }
    need_gpu(day, found)
    expect(len(gpus) == 1 and "GPU:0" in found["computed_on"], "one pinned GPU that computes", found)
    return found


def ask_doctor(day: Day) -> Found:
    file = day.folder / "doctor.json"
    code, _ = run(day, *MAIN, "doctor", "--json", str(file), codes=(0, 1))
    found = {check["name"]: f"{check['level']}: {check['text']}" for check in json.loads(file.read_text())["checks"]}
    expect(code == 0, "no check that fails", found)
    return found


def compare_digits(day: Day) -> Found:
    """Train the same on the GPU and on the CPU, in float32 without TensorFloat-32; compare weights and slots.

    Without a GPU the first run has another number of threads, and so other sums.
    """
    from horovod_train.checkpoint.layout import open_checkpoint
    from horovod_train.checkpoint.tensors import read_arrays

    runs = {"gpu": ({}, ["device.intra_op_threads=1"] * day.cpu), "cpu": (HIDE_GPU, [])}
    found: Found = {"eval": {}, "devices": {}}
    for name, (environment, words) in runs.items():
        words = [f"model.name={HERE}:convnet", f"train.max_steps={20 if day.cpu else 46}", *words]
        summary, text = train(day, name, *words, environment=environment)
        found["eval"][name] = summary["eval"]
        found["devices"][name] = re.findall(r"^rank 0 .* uses (.+?);", text, re.MULTILINE)[0]
    arrays = [read_arrays(open_checkpoint(str(day.folder / name), "digits")) for name in runs]
    found["largest_difference"] = largest_difference(*arrays)
    expect(day.cpu or found["devices"]["gpu"].startswith("GPU"), "a run on the GPU", found)
    expect(found["largest_difference"] <= TOLERANCE, f"equal within {TOLERANCE}", found)
    return found


def largest_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Return the largest absolute difference of the weights and slots of two checkpoints; NaN counts as infinite."""
    import numpy as np

    names = [name for name in first if name.startswith(("model/", "optimizer/"))]
    differences = [np.abs(np.subtract(first[name], second[name], dtype=np.float64)).max(initial=0.0) for name in names]
    return float(np.nan_to_num(differences, nan=np.inf).max())


def fit_with_drop_in(day: Day) -> Found:
    """Train by model.fit with XLA asked for and not, with the broadcast callback and without it."""
    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    import horovod_train.keras as hvd

    hvd.init()
    pixels, labels = load_digits(return_X_y=True)
    inputs = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    found: Found = {}
    for jit_compile, word in [(False, "with"), (True, "with"), (False, "without"), (True, "without")]:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.002))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=jit_compile)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if word == "with" else []
        name = f"jit_compile={jit_compile}, {word} the broadcast callback"
        try:
            losses = model.fit(inputs, labels, epochs=3, verbose=0, callbacks=callbacks).history["loss"]
            found[name] = {"losses": losses, "by_xla": bool(model.jit_compile)}
        except Exception as error:  # what a user would be told is the finding
            found[name] = {"refused": f"{type(error).__name__}: {one_line(error)}"}
    losses = [each.get("losses", [0.0]) for name, each in found.items() if ", with the" in name]
    expect(all(each[-1] < each[0] for each in losses), "a falling loss with the callback", found)
    return found


def train_mixed(day: Day, precision: str) -> Found:
    words = ["train.max_steps=3"] if day.cpu else []
    summary, _ = train(day, "run", *words, f"precision={precision}", config="digits_convnet")
    found = {name: summary[name] for name in ("eval", "steps", "examples_per_s")}
    found["skipped_updates"] = summary.get("skipped_updates", 0)
    least = 0.0 if day.cpu else 0.95
    expect(summary["eval"]["accuracy"] >= least, f"an accuracy of {least} at least", found)
    return found


def start_two_ranks(day: Day) -> Found:
    """Start two ranks over gloo, which on a machine with one GPU would share it; say what comes of that."""
    words = ["launch", "--over", "gloo", "-np", "2", "--max-restarts", "0", "--", *trainer_words(day, "run")]
    code, text = run(day, *MAIN, *words, "train.max_steps=3", codes=(0, 2))
    said = re.findall(r"^.*error: .*|^rank \d+ .* uses .*", text, re.MULTILINE)
    return {"outcome": "refused" if code else "working", "said": said}


def kill_and_resume(day: Day) -> Found:
    """Kill a run with `deterministic` and start it again; compare its weights with those of an undisturbed one."""
    words = ["deterministic=true", "train.max_steps=20", "train.steps_per_call=5", "log.every_steps=5"]
    words += ["checkpoint.every_steps=5", f"hooks=[{HERE}:kill]"]
    undisturbed, _ = train(day, "undisturbed", *words)
    train(day, "killed", *words, environment={KILL_AT: "15"}, codes=[-signal.SIGKILL])
    found: Found = {"killed_at": 15, "saved": steps_in(day.folder / "killed" / CHECKPOINTS)}
    resumed, _ = train(day, "killed", *words)
    found["weights_sha256"] = [undisturbed["weights_sha256"], resumed["weights_sha256"]]
    expect(found["saved"], "a checkpoint before the kill", found)
    expect(len(set(found["weights_sha256"])) == 1, "the same weights, bit for bit", found)
    return found


# --- how fast is it? ----------------------------------------------------------------------------------------------


def train_resnet(day: Day, xla: bool = False, jpeg: bool = False) -> Found:
    """Measure the trainer by `bench scaling`, on made images in memory or on made JPEGs."""
    sizes = day.sizes
    stream = {"name": f"{HERE}:images", "options": {"pixels": sizes.pixels}}
    data = jpegs(day) if jpeg else {"dataset": stream, "steps_per_epoch": sizes.steps}
    options = {"pixels": sizes.pixels, "tiny": sizes.tiny, "scaled": jpeg}
    config = {
        "data": {**data, "batch_size_per_rank": sizes.batch},
        "model": {"name": f"{HERE}:network", "options": options},
        "loss": {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}},
        "optimizer": {"name": "sgd", "options": {"momentum": 0.9}},
        "lr_schedule": {"base_lr": 0.01},
        "train": {"max_steps": sizes.steps},
        "precision": sizes.precision,
        "jit_compile": xla,
        "hooks": [f"{HERE}:note_memory"],
    }
    file, figures, memory = (day.folder / name for name in ("config.yaml", "figures.json", "memory.json"))
    file.write_text(json.dumps(config))  # YAML includes JSON
    words = ["--np", "1", "--rounds", "1", "--way", "horovodrun", "--steps", str(sizes.steps), "--json", str(figures)]
    run(day, *MAIN, "bench", "scaling", "--config", str(file), *words, environment={MEMORY: str(memory)})
    (measured,) = json.loads(figures.read_text())["ranks"]["1"]["together"]
    return on_gpu(day, {"images_per_s": measured.pop("examples_per_s"), **measured, **json.loads(memory.read_text())})


def fit_resnet(day: Day, xla: bool = False) -> Found:
    """Measure model.fit, with neither Horovod nor this project."""
    import keras

    keras.config.set_dtype_policy(day.sizes.precision)
    model, ends = network(day.sizes.pixels, day.sizes.tiny), list[float]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=xla)
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()))
    steps = day.sizes.steps // PARTS
    model.fit(batches(day), steps_per_epoch=steps, epochs=PARTS, verbose=0, callbacks=[clock])
    return on_gpu(day, {"images_per_s": (PARTS - 1) * steps * day.sizes.batch / (ends[-1] - ends[0]), **peaks()})


def loop_resnet(day: Day, xla: bool = False) -> Found:
    """Measure a compiled loop by hand."""
    import keras
    import tensorflow as tf

    keras.config.set_dtype_policy(day.sizes.precision)
    model, optimizer = network(day.sizes.pixels, day.sizes.tiny), keras.optimizers.SGD(0.01, momentum=0.9)
    loss_of, weights = keras.losses.SparseCategoricalCrossentropy(from_logits=True), model.trainable_variables
    optimizer.build(weights)

    @tf.function(jit_compile=xla)
    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(inputs, training=True))
        optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)
        return loss

    @tf.function
    def train_part(data: Any) -> tf.Tensor:
        loss = tf.constant(0.0)
        for _ in tf.range(steps):
            loss = step(*next(data))
        return loss

    data, steps = iter(batches(day)), day.sizes.steps // PARTS
    float(train_part(data))
    began = time.perf_counter()
    losses = [train_part(data) for _ in range(PARTS - 1)]
    last = float(losses[-1])  # waits for the GPU
    rate = (PARTS - 1) * steps * day.sizes.batch / (time.perf_counter() - began)
    return on_gpu(day, {"images_per_s": rate, "last_loss": last, **peaks()})


def save(day: Day, which: int) -> Found:
    words = ["--np", "1", "--mb", str(day.sizes.saved_mb[which]), "--every", "6", "--saves", "1", "--json"]
    _, text = run(day, str(Path(__file__).parents[1] / "saves.py"), *words)
    runs = [json.loads(line) for line in text.splitlines() if line.startswith('{"state_mb"')]
    expect(runs, "figures", {})
    return {"runs": runs}


def profile(day: Day) -> Found:
    from horovod_train.output.tensorboard import find_profiles, read_profiles

    train(day, "run", "log.profile_at_steps=[10]", "train.max_steps=12")
    (costs,) = read_profiles(find_profiles(day.folder / "run"))
    found = {"place": costs.place, "ms": costs.ms, "ops": [op._asdict() for op in costs.ops], "problem": costs.problem}
    expect(costs.place == ("Host" if day.cpu else "Device"), "the ops of the device that computes", found)
    return found


# --- what steps share ---------------------------------------------------------------------------------------------


def run(
    day: Day, *words: str, environment: Mapping[str, str] | None = None, codes: Sequence[int] = (0,)
) -> tuple[int, str]:
    """Run this Python; return its exit code, one of `codes`, and what it has written, which the log holds too."""
    with day.log.open("ab") as log:
        begins_at = log.tell()
        given = {**os.environ, **(environment or {})}
        code = subprocess.run([sys.executable, *words], env=given, stdout=log, stderr=log, check=False).returncode
    text = day.log.read_bytes()[begins_at:].decode(errors="replace")
    if code not in codes:
        said = re.findall(r"error: .*", text) or text.splitlines() or ["nothing"]
        raise NotOk(f"failed: exit code {code}: {said[-1].strip()[:300]}", {"command": list(words)})
    return code, text


def train(day: Day, name: str, *words: str, config: str = "digits_convnet_plain", **options: Any) -> tuple[Found, str]:
    """Train the digits in a folder of that name; return the summary, {} if there is none, and what was printed."""
    _, text = run(day, *MAIN, *trainer_words(day, name, config), *words, **options)
    summary = day.folder / name / "summary.json"
    return json.loads(summary.read_text()) if summary.exists() else {}, text


def trainer_words(day: Day, name: str, config: str = "digits_convnet_plain") -> list[str]:
    data = made(day, "digits")
    words = ["--config", config, f"data.train={data}/train", f"data.eval={data}/eval"]
    return [*words, *["data.global_batch_size=16"] * day.cpu, "--output-dir", str(day.folder / name)]


def made(day: Day, kind: str, *words: str) -> Path:
    folder = day.data / kind
    if not (folder / "dataset.json").exists():
        run(day, *MAIN, "prepare", kind, "--out", str(folder), "--force", *words)
    return folder


def jpegs(day: Day) -> Found:
    """Return the settings of data for made JPEGs, of which 224 pixels are as small a part as of ImageNet's."""
    pixels, count = day.sizes.pixels, str(day.sizes.jpegs)
    folder = made(day, "imagenet-samples", "--size", str(pixels * 8 // 5), "--records", count, "--eval-records", "0")
    image = {"type": "bytes", "decode": "image", "shape": [pixels, pixels, 3], "resize": "crop"}
    label = {"type": "int64", "classes": 1000}
    return {
        "train": str(folder / "train"),
        "features": {"image/encoded": {**image, "scale": 1 / 127.5, "offset": -1}, "image/class/label": label},
        "inputs": "image/encoded",
        "targets": "image/class/label",
        "augment": ["random_resized_crop", "flip"],
    }


def batches(day: Day) -> Any:
    return images(0, 1, 0, 1, True, day.sizes.pixels).batch(day.sizes.batch).prefetch(-1)


def peaks() -> Found:
    """Return the most memory of this process so far: on the GPU as TensorFlow counts it, and resident on the host."""
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    gpu = tf.config.experimental.get_memory_info("GPU:0")["peak"] / 1e6 if gpus else None
    return {"gpu_peak_mb": gpu, "host_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}


def on_gpu(day: Day, found: Found) -> Found:
    expect(day.cpu or found["gpu_peak_mb"], "memory in use on the GPU", found)
    return found


# --- what configs above name --------------------------------------------------------------------------------------


def images(rank: int, size: int, epoch: int, seed: int, training: bool, pixels: int) -> Any:
    """For data.dataset: one made image, again and again; none to evaluate."""
    import tensorflow as tf

    if not training:
        return None
    image = tf.random.stateless_uniform((pixels, pixels, 3), (1, 2), 0, 256, tf.int32)
    return tf.data.Dataset.from_tensors((tf.cast(image, tf.uint8), tf.constant(1, tf.int64))).repeat()


def network(pixels: int, tiny: bool = False, scaled: bool = False) -> Any:
    """For model.name: ResNet-50, or a small network. scaled: its inputs are floats already, not bytes."""
    import keras
    from keras import layers

    from horovod_train.models import resnet

    image = keras.Input((pixels, pixels, 3), dtype="float32" if scaled else "uint8")
    x = image if scaled else layers.Rescaling(1 / 127.5, -1)(image)
    if not tiny:
        return keras.Model(image, resnet.build(image_size=pixels)(x))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, strides=2)(x)))
    return keras.Model(image, layers.Dense(1000, dtype="float32")(layers.GlobalAveragePooling2D()(x)))


def convnet() -> Any:
    """For model.name: the convnet, in true float32 on a GPU too."""
    import tensorflow as tf

    from horovod_train.models import convnet

    tf.config.experimental.enable_tensor_float_32_execution(False)
    return convnet.build()


def kill(run: Any, step: int) -> None:
    """For hooks: kill this process after the step that the environment names."""
    if str(step) == os.environ.get(KILL_AT):
        os.kill(os.getpid(), signal.SIGKILL)


def note_memory(run: Any, step: int) -> None:
    """For hooks: write the most memory so far."""
    Path(os.environ[MEMORY]).write_text(json.dumps(peaks()))
