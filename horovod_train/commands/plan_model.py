"""For `plan`: builds the parts of a run on the CPU, with the functions that training uses, as its rank 0 would.

Horovod runs for this process alone, since a user's code may ask it for the rank. Reads no records, writes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from horovod_train.commands.plan import Outlook, Sizes
from horovod_train.config.registry import load_function, raised_at
from horovod_train.config.rules import PER_OUTPUT
from horovod_train.config.settings import Config, HorovodConfig, LrScheduleConfig, Spec
from horovod_train.data.augment import build_augmentations
from horovod_train.data.batch_source import BatchSource
from horovod_train.data.pipeline import Pipeline
from horovod_train.distributed.device import Device, pin_to_cpu
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.start import horovod_alone
from horovod_train.errors import RunError, UserError, kind_of, one_line
from horovod_train.models import build_model
from horovod_train.optim.optimizers import build_optimizer, build_schedule
from horovod_train.optim.schedules import Horizon
from horovod_train.output.metrics import load_writers
from horovod_train.output.trackers import build_trackers
from horovod_train.shown_text import listed
from horovod_train.training.build import Components, build_components
from horovod_train.training.callbacks import load_callbacks
from horovod_train.training.compiled import build_metrics
from horovod_train.training.fine_tuning import Match, is_lora, match
from horovod_train.training.hooks import load_hooks
from horovod_train.training.initial_state import check_held_out, check_position, contents_of_preprocess
from horovod_train.training.losses import build_loss

ANY_HORIZON = Horizon(global_batch_size=1, steps_per_epoch=1, total_steps=1)


def build(config: Config, outlook: Outlook | None) -> tuple[Sizes | None, list[str]]:
    """Build what the run trains with; return its sizes, or a sentence for each part that cannot be built.

    outlook: None if the records cannot be read; then each part is built alone.
    """
    device = pin_to_cpu(config.device.per_rank)
    with horovod_alone():
        return _build(config, outlook, device)


def _build(config: Config, outlook: Outlook | None, device: Device) -> tuple[Sizes | None, list[str]]:
    build_faults: list[str] = []
    if outlook is not None:
        components = _attempt(lambda: _build_as_rank_0(outlook, device), build_faults, "")
        sizes = components and _attempt(lambda: _measure(components, outlook), build_faults, "")
        if sizes is not None:
            _attempt(lambda: _check_resume(components.train, outlook), build_faults, "")
            return sizes, build_faults
    faults: list[str] = []
    for where, make in _parts(config, outlook.horizon if outlook else ANY_HORIZON):
        _attempt(make, faults, f"{where}: ")
    # build_components fails with the first fault of a part, or because the parts do not fit together.
    return None, [*(fault for fault in build_faults if not any(part.endswith(fault) for part in faults)), *faults]


def _check_resume(train: BatchSource, outlook: Outlook) -> None:
    """Raise UserError if the run would refuse the checkpoint that it resumes from because of its data."""
    if outlook.start:
        check_held_out(outlook.config, train, outlook.start)
        check_position(outlook.config, train, outlook.start)


def _build_as_rank_0(outlook: Outlook, device: Device) -> Components:
    config, size = outlook.config, outlook.ranks
    group = WorkerGroup(
        rank=0,
        size=size,
        local_rank=0,
        local_size=1,
        launcher="none",
        exchange="none",
        controller="none",
        hosts=("",) * size,
        devices=(device,) * size,
    )
    if config.horovod.op == "adasum" and size & (size - 1):
        raise UserError(f"horovod.op: adasum needs a power of two of ranks; received {size}.")
    load_writers(config.log.writers)
    build_trackers(config.log.trackers)
    # What depends on the nodes of the run, not on its config: how much memory and disk they have, and their MPI.
    data = dataclasses.replace(config.data, stage_dir=None, cache="none")
    exchange = HorovodConfig() if config.horovod.op == "adasum" else config.horovod
    here = dataclasses.replace(config, data=data, horovod=exchange)
    return build_components(here, group, outlook.records, outlook.eval_records)


def _parts(config: Config, horizon: Horizon) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield keys of the config, each with a function that builds what it names without the others and the records."""
    yield "log.writers", partial(load_writers, config.log.writers)
    yield from (("log.trackers", partial(build_trackers, [tracker])) for tracker in config.log.trackers)
    yield "model", partial(build_model, config.model)
    if config.loss.name == PER_OUTPUT and config.loss.options:
        for output, term in config.loss.options.items():
            yield f"loss.options.{output}", partial(build_loss, Spec(PER_OUTPUT, {output: term}))
    else:
        yield "loss", partial(build_loss, config.loss)
    yield from (("metrics", partial(build_metrics, [metric])) for metric in config.metrics)
    yield from (("weighted_metrics", partial(build_metrics, [metric])) for metric in config.weighted_metrics)
    yield "lr_schedule", partial(build_schedule, config.lr_schedule, horizon)
    yield (
        "optimizer",
        partial(build_optimizer, dataclasses.replace(config, lr_schedule=LrScheduleConfig()), horizon),
    )
    yield "data.augment", partial(build_augmentations, config.data.augment, (32, 32, 3), "bilinear")
    if config.data.parse:
        yield "data.parse", partial(load_function, config.data.parse, "data.parse")
    yield "callbacks", partial(load_callbacks, config.callbacks)
    yield "hooks", partial(load_hooks, config.hooks, config.log.every_steps)


def _attempt(make: Callable[[], Any], faults: list[str], where: str) -> Any:
    """Return what `make` returns; if it fails, add a sentence to `faults` and return None.

    where: begins the sentence if the error does not name a key of the config.
    """
    try:
        return make()
    except RunError as error:
        faults.append(str(error))
    except Exception as error:
        # A user's function may raise anything; a run would end with its traceback.
        text = one_line(error)
        faults.append(f"{where}{kind_of(error)}: {text}{raised_at(error)}")
    return None


def _measure(components: Components, outlook: Outlook) -> Sizes:
    state, model, train = components.state, components.state.model, components.train
    variables = state.variables()
    weights = _bytes(variable for name, variable in variables.items() if name.startswith("model/"))
    optimizer = _bytes(variable for name, variable in variables.items() if name.startswith("optimizer/"))
    total = _bytes(variables.values())
    spec = outlook.config.model
    matched = None
    if spec.init_from and not outlook.start:
        matched = match(model, spec, train.class_names, contents_of_preprocess(outlook.config.data.preprocess))
    is_cached = outlook.config.data.cache == "memory"
    memory = {
        "weights": weights,
        "gradients": _bytes(model.trainable_variables),
        "optimizer": optimizer,
        "averages and progress": total - weights - optimizer,
        "cached records": train.bytes_to_cache if isinstance(train, Pipeline) and is_cached else 0,
    }
    return Sizes(
        source="of the model as built",
        checkpoint_bytes=components.checkpoint_bytes(outlook.ranks),
        parameters=model.count_params(),
        trainable_parameters=sum(variable.shape.num_elements() for variable in model.trainable_variables),
        memory=memory,
        rate_of=components.rate_of,
        fine_tuning=dict(_fine_tuning(components, outlook, matched)),
        warnings=(*components.warnings, *(matched.warnings if matched else ())),
    )


def _fine_tuning(components: Components, outlook: Outlook, matched: Match | None) -> Iterator[tuple[str, str]]:
    """Yield what the model begins with and what of it is trained, in words."""
    spec, model = outlook.config.model, components.state.model
    if components.origins:
        yield "compiled", "; ".join(components.origins)
    if components.averages:
        yield "averages", components.averages
    if matched:
        yield "initial weights", f"{spec.init_from}: {matched.line()}"
    elif spec.init_from:
        yield "initial weights", f"not those of {spec.init_from}: the run resumes"
    if frozen := components.freezing.apply(0):
        later = [
            f"; after epoch {epoch} trained: {listed(components.freezing.unfrozen_at(epoch))}"
            for epoch in components.freezing.epochs
        ]
        yield "frozen", f"{len(frozen)} weights: {listed(frozen)}{''.join(later)}"
    if adapted := [weight.path for weight in model.weights if is_lora(weight.path)]:
        yield "LoRA", listed(adapted)
    if multipliers := outlook.config.optimizer.lr_multipliers:
        yield "rates", ", ".join(f"{pattern} × {factor:g}" for pattern, factor in multipliers.items())


def _bytes(variables: Iterable[Any]) -> int:
    return sum(variable.numpy().nbytes for variable in variables)
