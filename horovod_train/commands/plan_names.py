"""For `plan`: whether the names in a config exist and accept their options. Imports nothing; see plan_sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from horovod_train.commands.plan_sources import Found, bound_names, find_table, look_up, read_source
from horovod_train.config.registry import fold, nearest
from horovod_train.config.settings import Config, Spec
from horovod_train.errors import UserError
from horovod_train.optim.schedules import Horizon, build_formula


def wrong_names(config: Config) -> Iterator[str]:
    """Yield a sentence for each name that does not exist and each option that is refused, as far as source tells."""
    ours = "horovod_train.models"
    yield from _check(config.model, "model", in_table=(ours, "MODELS"))
    for where, loss in _losses(config.loss):
        yield from _check(
            loss, where, in_table=("horovod_train.training.losses", "OWN"), in_keras="keras.losses", given=2
        )
    for number, metric in enumerate(config.metrics):
        yield from _check(metric, f"metrics[{number}]", in_keras="keras.metrics")
    table = ("horovod_train.optim.optimizers", "OPTIMIZERS")
    yield from _check(
        config.optimizer, "optimizer", in_table=table, in_keras="keras.optimizers", named=("learning_rate",)
    )
    if ":" in config.lr_schedule.decay.name:
        yield from _check(config.lr_schedule.decay, "lr_schedule.decay", named=("lr", "horizon"))
    else:
        try:
            build_formula(config.lr_schedule, Horizon(1, 1, 1))
        except UserError as error:
            yield str(error)
    for number, change in enumerate(config.data.augment):
        table = ("horovod_train.data.augment", "AUGMENTATIONS")
        yield from _check(change, f"data.augment[{number}]", in_table=table, given=2 if ":" in change.name else 0)
    if config.data.parse:
        yield from _check(Spec(config.data.parse), "data.parse", given=1)


def _losses(loss: Spec) -> Iterator[tuple[str, Spec]]:
    """Return the loss, or one per output if there are several; a value that is no valid loss is left to training."""
    if loss.name != "per_output":
        yield "loss", loss
        return
    for output, term in loss.options.items():
        content = {"name": term} if isinstance(term, str) else term
        if isinstance(content, dict) and isinstance(content.get("name"), str):
            yield f"loss.options.{output}", Spec(content["name"], content.get("options") or {})


def _check(
    spec: Spec,
    where: str,
    *,
    in_table: tuple[str, str] | None = None,
    in_keras: str | None = None,
    given: int = 0,
    named: Sequence[str] = (),
) -> Iterator[str]:
    """given: arguments that the trainer passes by position; named: those that it passes by name."""
    if ":" in spec.name:
        module, _, attribute = spec.name.partition(":")
        try:
            tree = read_source(module)
        except SyntaxError as error:
            yield f"{where}.name: {error.filename}:{error.lineno}: {error.msg}."
            return
        if tree is None:
            yield f"{where}.name: cannot find the module of {spec.name!r}. Is its folder on PYTHONPATH?"
            return
        found = look_up(module, attribute)
        if found is None:
            near = nearest(attribute, [name for name in bound_names(tree) if not name.startswith("_")])
            yield f"{where}.name: {module} has no {attribute!r}; it has {near}."
            return
    elif in_table and (table := find_table(*in_table)) is not None and (spec.name in table or not in_keras):
        if spec.name not in table:
            near = nearest(spec.name, list(table))
            yield f"{where}.name: unknown name {spec.name!r}; known here: {near}, or package.module:function."
            return
        found = table[spec.name]
    elif in_keras and (tree := read_source(in_keras)) is not None:
        classes = {fold(name): name for name in bound_names(tree) if name[:1].isupper()}
        if fold(spec.name) not in classes:
            near = nearest(spec.name, sorted(classes.values()))
            yield f"{where}.name: Keras has no {spec.name!r}; near it: {near}."
            return
        found = look_up(in_keras, classes[fold(spec.name)])
    else:
        return
    yield from _check_options(found, spec, where, given, named, bool(in_keras) and ":" not in spec.name)


def _check_options(
    found: Found | None, spec: Spec, where: str, given: int, named: Sequence[str], is_keras: bool
) -> Iterator[str]:
    definition = found.definition if found else None
    if isinstance(definition, ast.ClassDef):
        made = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        definition, given = (made[0] if made else None), 1
    if definition is None or definition.decorator_list or definition.args.vararg:
        return
    # Keras' optimizers accept **kwargs, and then refuse every argument in it.
    if definition.args.kwarg and not (is_keras and where == "optimizer"):
        return
    places = [argument.arg for argument in [*definition.args.posonlyargs, *definition.args.args]]
    takes = [*places[given:], *(argument.arg for argument in definition.args.kwonlyargs)]
    offered = [name for name in takes if name not in named]
    for option in spec.options:
        if option not in offered:
            yield f"{where}.options: {spec.name} does not take {option!r}; it takes: {', '.join(offered) or 'none'}."
    optional = places[len(places) - len(definition.args.defaults) :] + [
        argument.arg
        for argument, default in zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True)
        if default is not None
    ]
    for name in offered:
        if name not in optional and name not in spec.options:
            yield f"{where}.options: {spec.name} needs {name!r}."
