"""Choose the settings of Horovod and MPI by how the ranks exchange, with the origin of and reason for each.

The user's environment wins over a default, the config over both. Does not choose how ranks are started (see local) or
how many threads they get (see device).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from horovod_train.config.settings import HorovodConfig

Origin = Literal["default", "environment", "config"]
Library = Literal["MPI", "gloo", "elastic", "alone"]
"""How ranks on CPUs exchange: over MPI or gloo. elastic: over gloo, by ranks that join and leave. alone: one rank."""


class Setting(NamedTuple):
    """An environment variable as Horovod and MPI find it."""

    name: str
    value: str
    origin: Origin
    why: str = ""


CYCLE_MS: dict[Library, str] = {"MPI": "1", "gloo": "1", "alone": "2"}
"""Pause between two exchanges on CPU, in ms. A rank alone exchanges nothing in a step: 0.5 ms cost it 5 % of a core."""

YIELDS = "OMPI_MCA_mpi_yield_when_idle"
"""Whether a rank that waits in Open MPI leaves its cores to others: 1 or 0."""

SMALL_MODEL_CYCLE_MS = {True: "0", False: "0.1"}
"""The same over MPI where the gradients of a step are small, by whether ranks that wait yield; see start.suit_cycle."""

ELASTIC_TIMEOUT_S = "60"
"""How long elastic ranks wait for a host that has vanished without closing connections, or that loads TensorFlow."""

GLOO_TIMEOUT_S = "630"
"""How long gloo waits for ranks that start, and for a rank that computes. The watchdog's limits replace this."""


def choose(
    config: HorovodConfig,
    environment: Mapping[str, str],
    *,
    library: Library,
    has_gpu: bool,
    deterministic: bool = False,
    extra_defaults: Mapping[str, str] | None = None,
) -> list[Setting]:
    """Return what to set before Horovod starts. extra_defaults: such as the watchdog's stall limits."""
    by_config = dict(_from_config(config, deterministic))
    defaults = dict(_by_library(library, has_gpu=has_gpu))
    why_extra = "the watchdog reports before Horovod does"
    defaults |= {name: (value, why_extra) for name, value in (extra_defaults or {}).items()}
    settings = [Setting(name, value, "config", why) for name, (value, why) in by_config.items()]
    for name, (value, why) in defaults.items():
        if name not in by_config:
            default = Setting(name, value, "default", why)
            settings.append(Setting(name, environment[name], "environment") if name in environment else default)
    return settings


def _from_config(config: HorovodConfig, deterministic: bool) -> Iterator[tuple[str, tuple[str, str]]]:
    if config.cycle_time_ms is not None:
        yield "HOROVOD_CYCLE_TIME", (str(config.cycle_time_ms), "horovod.cycle_time_ms")
    if config.fusion_threshold_mb is not None:
        yield "HOROVOD_FUSION_THRESHOLD", (str(int(config.fusion_threshold_mb * 2**20)), "horovod.fusion_threshold_mb")
    if deterministic and config.op == "adasum":
        # The fusion of tensors, and so the order of additions, depends on timing. Other sums have a fixed order.
        yield "HOROVOD_FUSION_THRESHOLD", ("0", "deterministic: true")


def _by_library(library: Library, *, has_gpu: bool) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield defaults measured by benchmarks/exchange.py; the figures are in docs/tools.md."""
    if library == "MPI":
        yield YIELDS, ("1", "a rank that waits leaves its cores to those that compute")
    elif library == "gloo":
        yield "HOROVOD_GLOO_TIMEOUT_SECONDS", (GLOO_TIMEOUT_S, "Horovod's 30 s are less than a start or a compilation")
    elif library == "elastic":
        yield "HOROVOD_GLOO_TIMEOUT_SECONDS", (ELASTIC_TIMEOUT_S, "for a lost host, and for one that starts")
    if library in CYCLE_MS and not has_gpu:
        why = "a single rank waits for no other" if library == "alone" else f"{library} between CPUs"
        yield "HOROVOD_CYCLE_TIME", (CYCLE_MS[library], f"ms; {why}")
