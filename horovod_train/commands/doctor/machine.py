"""Checks of `doctor` on hosts and what lies between: versions, Horovod's build, networks, a shared folder, clocks."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil

from horovod_train.commands.doctor import CheckResult, fail, ok, warning
from horovod_train.config.loader import dump
from horovod_train.config.settings import Config
from horovod_train.distributed import consistency
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.horovod_info import clock_offsets_s, horovod_build
from horovod_train.distributed.launch.network import exchange_interfaces, interfaces
from horovod_train.errors import RanksDisagree
from horovod_train.output.removal import Artifact, remove

MOST_SKEW_S = 1.0
"""Beyond this, times in logs mislead and other tools misjudge which file is newer."""
VISIBLE_WITHIN_S = 10.0
MIN_FREE_BYTES = 1 << 30
_PLACE = Artifact("a folder of doctor's", r"\.doctor-[0-9a-f]{12}", "folder", ("root", r"rank-\d+"))


def check_versions(group: WorkerGroup, config: Config | None) -> list[CheckResult]:
    """Collective: the versions, and whether all ranks have the same versions, code and config."""
    versions = consistency.versions() | {name: _version(name) for name in ("numpy", "mpi4py")}
    listed = ", ".join(f"{name} {value}" for name, value in versions.items())
    facts = {f"version of {name}": value for name, value in versions.items()}
    facts["code of horovod_train"] = consistency.code_digest()
    what = "versions and code"
    if config is not None:
        facts["config"] = consistency.digest(dump(config).encode())
        what = "versions, code and config"
    findings = [ok("versions", listed, versions)]
    try:
        consistency.check(group, facts, "now")
    except RanksDisagree as error:
        fix = "Give all hosts the same checkout and .venv, best on a shared file system."
        return [*findings, fail("same everywhere", str(error), fix)]
    ranks = "the only rank" if group.size == 1 else f"all {group.size} ranks"
    return [*findings, ok("same everywhere", f"{what} are the same on {ranks}")]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def check_build(group: WorkerGroup) -> CheckResult:
    """Show what Horovod was built with, and what the ranks use of it."""
    build = horovod_build(group)
    text = f"Horovod built with {', '.join(build.built)}; ranks meet over {build.controller}"
    text += f" and exchange gradients over {build.exchange}"
    facts = {"built": list(build.built), "controller": build.controller, "exchange": build.exchange}
    computes_on_gpu = any(device.gpu_keys for device in group.devices)
    if computes_on_gpu and build.exchange != "NCCL":
        fix = "`horovod-train build-horovod --gpu-operations NCCL` builds it to exchange between GPUs."
        return warning("horovod", f"{text}, although ranks compute on GPUs", fix, facts)
    return ok("horovod", text, facts)


class Interface(NamedTuple):
    address: str
    mbit_per_s: int
    """0 if the driver does not say."""


def check_network(group: WorkerGroup) -> CheckResult:
    """Collective: the interfaces of each host, and those that the ranks were told to use."""
    local = {name: (interface.address, interface.mbit_per_s) for name, interface in list_interfaces().items()}
    by_rank = group.gather((local, exchange_interfaces()))
    rows = [({name: Interface(*fields) for name, fields in table.items()}, used) for table, used in by_rank]
    return judge_network([(host, *row) for host, row in zip(group.hosts, rows, strict=True)])


def judge_network(rows: Sequence[tuple[str, Mapping[str, Interface], Sequence[str]]]) -> CheckResult:
    """rows: for each rank its host, the interfaces that are up there, and those that it was told to use.

    There are none without a setting. horovodrun tells all ranks the same; under plain srun each rank finds its own,
    because hosts may use different names.
    """
    hosts = {host: interfaces for host, interfaces, _ in rows}
    listed = "; ".join(
        f"{host}: " + ", ".join(f"{name} {interface.address}{_speed(interface)}" for name, interface in table.items())
        for host, table in list(hosts.items())[:4]
    )
    chosen = sorted({(name, host) for host, _, names in rows for name in names})
    used = sorted({name for name, _ in chosen})
    text = f"{listed}{'; …' if len(hosts) > 4 else ''}; used: {', '.join(used) or 'left to Horovod and MPI'}"
    facts: dict[str, object] = {
        "interfaces": {
            host: {name: list(each) for name, each in interfaces.items()} for host, interfaces in hosts.items()
        },
        "used": used,
    }
    for name in used:
        lacking = [host for chosen_name, host in chosen if chosen_name == name and name not in hosts[host]]
        if lacking:
            fix = "Name one that all hosts have up: horovodrun --network-interfaces, or HOROVOD_GLOO_IFACE."
            return fail("network", f"interface {name} is not up on {', '.join(lacking[:4])}", fix, facts)
        stays = any(hosts[host][name].address.startswith("127.") for chosen_name, host in chosen if chosen_name == name)
        if len(hosts) > 1 and stays:
            fix = "Name the interface of the network: horovodrun --network-interfaces, or HOROVOD_GLOO_IFACE."
            return fail("network", f"{len(hosts)} hosts cannot meet over {name}, which stays on its host", fix, facts)
    if len(hosts) > 1 and all(len(interfaces) < 2 for interfaces in hosts.values()):
        return fail("network", text, "The hosts have no network interface that is up.", facts)
    return ok("network", text, facts)


def list_interfaces() -> dict[str, Interface]:
    """Return the interfaces of this host that are up and have an IPv4 address."""
    states = psutil.net_if_stats()
    # Drivers of virtual devices report 65535 or nothing.
    speeds = {name: states[name].speed for name in states}
    return {
        name: Interface(address, speeds[name] if 0 < speeds.get(name, 0) < 65535 else 0)
        for name, address in interfaces().items()
    }


def _speed(interface: Interface) -> str:
    return f" {interface.mbit_per_s / 1000:g} Gbit/s" if interface.mbit_per_s else ""


def check_file_system(group: WorkerGroup, folder: Path) -> CheckResult:
    """Collective: whether all ranks see what root writes and syncs, and root what each rank writes. Leaves no files."""
    token = group.broadcast_object(f".doctor-{secrets.token_hex(6)}")
    place = folder / token
    began, problem = time.perf_counter(), ""
    if group.is_root:
        problem = _try(place.mkdir) or _try(lambda: _write(place / "root", token))
        if problem:
            _remove(place)
    written_s = time.perf_counter() - began
    problem = group.broadcast_object(problem)
    if problem:
        fix = "Choose a folder that can be written to with --dir."
        return fail("file system", f"root cannot write to {folder}: {problem}", fix)
    began = time.perf_counter()
    is_visible = _can_read(place / "root", token)
    seen_s = time.perf_counter() - began
    problem = _try(lambda: _write(place / f"rank-{group.rank}", token)) if is_visible else "does not see root's file"
    rows = group.gather((problem, seen_s))
    missing: list[int] = []
    if group.is_root:
        wrote = [rank for rank, (problem, _) in enumerate(rows) if not problem]
        missing = [rank for rank in wrote if not _can_read(place / f"rank-{rank}", token)]
        _remove(place)
    missing = group.broadcast_object(missing)
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    problems = [f"{group.name(rank)} {problem}" for rank, (problem, _) in enumerate(rows) if problem]
    problems += [f"root does not see what {group.name(rank)} wrote" for rank in missing]
    seen_s = max(seen_s for _, seen_s in rows)
    return judge_file_system(folder, problems, written_s, seen_s, group.broadcast_object(free))


def judge_file_system(folder: Path, problems: Sequence[str], written_s: float, seen_s: float, free: int) -> CheckResult:
    """problems: sentences; free: bytes left."""
    facts = {"folder": str(folder), "written_s": written_s, "seen_s": seen_s, "free_bytes": free}
    if problems:
        text = f"{folder} is not one folder for all ranks: {problems[0]}"
        suffix = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        return fail("file system", f"{text}{suffix}", "Take a folder on a shared file system; see --dir.", facts)
    text = f"{folder}: written and synced in {written_s * 1e3:.0f} ms, seen by all after {seen_s * 1e3:.0f} ms"
    text += f"; {free / 1e9:.0f} GB free"
    if free < MIN_FREE_BYTES:
        return warning("file system", text, "Make room: a save that fails is lost.", facts)
    if max(written_s, seen_s) > 2:
        return warning("file system", text, "Saves and starts will take long; look at its server's load.", facts)
    return ok("file system", text, facts)


def _remove(place: Path) -> None:
    with contextlib.suppress(OSError):
        remove(place, _PLACE)


def _write(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _try(action: Callable[[], object]) -> str:
    """Return the file system's error; empty if the action succeeds."""
    try:
        action()
    except OSError as error:
        return f"cannot write there: {error.strerror or error}"
    return ""


def _can_read(path: Path, text: str) -> bool:
    """Return whether the file holds the text; retry for a while, because network file systems show new files late."""
    until = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


def check_clocks(group: WorkerGroup) -> CheckResult:
    """Collective: how far the hosts' clocks are apart."""
    return judge_clocks(clock_offsets_s(group), group.hosts)


def judge_clocks(offsets_s: Sequence[float], hosts: Sequence[str]) -> CheckResult:
    """offsets_s: each rank's clock minus root's. Root's own may be the wrong one, so the median counts as right."""
    apart_s = [offset - statistics.median_low(offsets_s) for offset in offsets_s]
    worst = max(range(len(apart_s)), key=lambda rank: abs(apart_s[rank]))
    facts = {"offsets_s": [round(offset, 6) for offset in offsets_s]}
    skew = abs(apart_s[worst])
    if skew > MOST_SKEW_S:
        text = f"rank {worst} ({hosts[worst]}) is {apart_s[worst]:+.1f} s from the median of the ranks' clocks"
        return warning("clocks", text, "Start chrony or ntpd there: times in logs mislead.", facts)
    return ok("clocks", f"within {max(skew * 1e3, 0.1):.1f} ms of one another", facts)
