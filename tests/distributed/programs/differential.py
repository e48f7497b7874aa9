"""Trains the cases of differential_cases by the trainer on all ranks, then each by `fit` on one of them, and compares.

differential.py FOLDER [--equal-shares | --resumed] [CASE ...]: writes FOLDER/rank-N.json; without cases all but the
random ones, "random 1" and so on. FOLDER "-": prints a table. --resumed compares with the same training in two parts
instead: all is built anew after SAVED_AT steps, and gets the variables that a checkpoint holds. By hand:

    mpirun -np 3 python tests/distributed/programs/differential.py - plain GAN
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
from facts import leave
from stepping import ignore_shares

from horovod_train.config.loader import build
from horovod_train.config.rules import resolve
from horovod_train.config.settings import Config
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.layer_contents import finalize
from horovod_train.distributed.start import start
from horovod_train.training.build import Components, build_components
from horovod_train.training.open_run import open_on_all_ranks

group = start(Config().horovod, Config().device)
from differential_cases import BATCH, ROWS, Case  # noqa: E402  making tensors fixes the number of threads
from differential_more import CASES, DATA  # noqa: E402
from differential_random import case_of  # noqa: E402

SAVED_AT = 3


def main(words: list[str]) -> None:
    names = [word for word in words[1:] if not word.startswith("--")] or list(CASES)
    folder = Path(group.broadcast_object(tempfile.mkdtemp() if group.is_root else ""))
    if "--resumed" in words:
        facts = {name: _resumed_facts(name, group, folder) for name in names}
    else:
        trained = {name: _trained(name, group, folder) for name in names}
        here = names[group.rank :: group.size]  # no rank waits for another before its last one
        by_rank = group.gather({name: _compared(name, *trained[name]) for name in here})
        facts = {name: found for each in by_rank for name, found in each.items()}
    if words[0] == "-" and group.is_root:
        for name in names:
            print(_line(name, facts[name]), flush=True)
    elif words[0] != "-":
        leave(group.rank, {"cases": facts})
    group.close()


def _line(name: str, facts: dict[str, Any]) -> str:
    if "error" in facts:
        return f"{name:40s} {facts['error'][:500]}"
    if "resumed" in facts:
        return f"{name:40s} {facts['resumed']}"
    figures = ", ".join(f"{key} {ours:.6g} for {theirs}" for key, (ours, theirs) in facts["figures"].items())
    return f"{name:40s} {facts['weights']:8.1e}  apart {facts['apart']:8.1e}  {figures}"


def _resumed_facts(name: str, group: WorkerGroup, folder: Path) -> dict[str, Any]:
    """Name the variables that end otherwise than without a resume, all that a checkpoint would hold."""
    case, ends, failure = case_of(name), [], ""
    try:
        for is_resumed in (False, True):
            parts = _begin(config_of(name, case, folder, group), group)
            train(parts, 0, SAVED_AT)
            parts.state.settle(group)
            if is_resumed:
                saved = _values(parts)
                parts = _begin(config_of(name, case, folder, group), group)
                variables = parts.state.variables()
                for path in saved.keys() | variables.keys():
                    variables[path].assign(saved[path])
                finalize(parts.state.model)
            train(parts, SAVED_AT, parts.train.steps_per_epoch)
            parts.state.settle(group)
            ends.append(_values(parts))
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if failures := [each for each in group.gather(failure) if each]:
        return {"error": failures[0]}
    without, after = ends
    return {"resumed": [path for path in without if without[path].tobytes() != after[path].tobytes()]}


def _values(parts: Components) -> dict[str, np.ndarray]:
    return {path: variable.numpy() for path, variable in parts.state.variables().items()}


def _begin(config: Config, group: WorkerGroup) -> Components:
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    opened = open_on_all_ranks(config.data, ["train", "eval"], group)
    parts = build_components(config, group, opened["train"], opened["eval"])
    if "--equal-shares" in sys.argv:
        ignore_shares(parts.train_step.shares)
    group.broadcast(list(parts.state.variables().values()))
    return parts


def _trained(name: str, group: WorkerGroup, folder: Path) -> tuple[Config, dict[str, Any]]:
    """Train a case on all ranks; return its config and the facts of it that need no `fit`."""
    case = case_of(name)
    config, failure, weights, ours = Config(), "", [], {}
    try:
        config = config_of(name, case, folder, group)
        parts = _begin(config, group)
        train(parts, 0, parts.train.steps_per_epoch)
        parts.state.settle(group)
        trained = parts.train_step.figures.result(group)
        if parts.state.averages.are_of_optimizer:  # as `fit` ends
            parts.state.averages.put_in()
        ours = {**evaluate(parts, group), "training loss": trained.get("loss", 0.0)}
        weights = [np.asarray(weight).tolist() for weight in parts.state.model.get_weights()]
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        if "--trace" in sys.argv:
            traceback.print_exc()
    failures = [each for each in group.gather(failure) if each]
    if failures:
        return config, {"error": failures[0]}
    apart = max(_difference(other, weights) for other in group.gather(weights))
    return config, {"weights": weights, "apart": apart, "figures": ours}


def _compared(name: str, config: Config, trained: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a case beside what `fit` finds in this process."""
    if "error" in trained:
        return trained
    expected, theirs = by_fit(case_of(name), config)
    return {
        "weights": _difference(trained["weights"], expected),
        "apart": trained["apart"],
        "figures": {key: (value, theirs.get(key)) for key, value in trained["figures"].items()},
        "missing": sorted(set(theirs) - set(trained["figures"])),
    }


def _difference(got: list[Any], expected: list[Any]) -> float:
    """The largest difference relative to the largest entry of each weight."""
    pairs = ((np.asarray(a), np.asarray(b)) for a, b in zip(got, expected, strict=True))
    return max((float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in pairs if a.size), default=0.0)


def config_of(name: str, case: Case, folder: Path, group: WorkerGroup) -> Config:
    features, inputs, targets = DATA[case.data]
    path = folder / f"{case.data}.npz"
    if group.is_root and not path.exists():
        np.savez(path, **features)  # type: ignore[arg-type]
    group.barrier()
    data = {
        "train": str(path),
        "eval": str(path),
        "inputs": list(inputs),
        "targets": list(targets),
        "shuffle": False,
        "global_batch_size": BATCH,
        **({"weight": "w"} if case.weighted else {}),
    }
    sections: dict[str, Any] = {
        "data": data,
        "model": {"name": "differential_random:build", "options": {"case": name}},
        "eval": {"batch_size_per_rank": -(-ROWS // group.size)},
        "output_dir": str(folder),
    }
    for section, values in case.config.items():
        sections[section] = {**sections.get(section, {}), **values} if isinstance(values, dict) else values
    sections["train"] = {"epochs": 1, **sections.get("train", {})}
    return resolve(build(Config, sections, ""), group.size)


def train(parts: Components, begin: int, end: int) -> None:
    """Train from a step of the first epoch to another."""
    source, step = parts.train, begin
    batches = source.batches(0, begin, 1)
    while step < end:
        last = min(end, source.same_size_until(step, step, source.steps_per_epoch))
        parts.train_step.run(batches, last - step, source.size_of(step))
        step = last


def evaluate(parts: Components, group: WorkerGroup) -> dict[str, float]:
    assert parts.eval is not None
    assert parts.eval_step is not None
    for batches, steps, size in parts.eval.one_epoch(ROWS):
        parts.eval_step.run(batches, steps, size)
    return parts.eval_step.metrics.result(group)


def by_fit(case: Case, config: Config) -> tuple[list[Any], dict[str, float]]:
    """Train the case by `fit`; return the weights, and the figures of `evaluate` on all records in one batch."""
    keras.utils.clear_session()  # or metrics without a name would be auc_1, as the second of this process
    keras.utils.set_random_seed(config.seed)
    keras.mixed_precision.set_dtype_policy(config.precision)
    model = case.build()
    model.jit_compile = False  # by default `fit` compiles by XLA what it can, which rounds otherwise
    if model.built and getattr(model, "optimizer", None) is not None:
        # Inside the compiled step, slots that are copies of weights (ScheduleFreeAdamW) would begin as 0.
        model.optimizer.build(model.trainable_variables)
    features, inputs, targets = DATA[case.data]
    x = features[inputs[0]] if len(inputs) == 1 else {name: features[name] for name in inputs}
    y = features[targets[0]] if len(targets) == 1 else {name: features[name] for name in targets} or None
    weights = _weights(case, features)
    history = model.fit(x, y, BATCH, 1, 0, shuffle=False, sample_weight=weights, **case.fit)
    by_name = model.evaluate(x, y, ROWS, 0, sample_weight=weights, return_dict=True)
    figures = {key: np.asarray(value).mean().item() for key, value in by_name.items()}
    figures["training loss"] = float(history.history.get("loss", [0.0])[0])
    return [weight.tolist() for weight in model.get_weights()], figures


def _weights(case: Case, features: Any) -> Any:
    if not case.weighted:
        return None
    return features["w"][:, None] if case.data in ("tags", "holes", "two") else features["w"]


if __name__ == "__main__":
    main(sys.argv[1:])
