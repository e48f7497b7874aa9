"""Checks of `doctor` on what is installed: versions, how Horovod was built, and equality on all ranks."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from horovod_train.commands.doctor.check_result import CheckResult, fail, ok, warning
from horovod_train.config.loader import dump
from horovod_train.config.settings import Config
from horovod_train.distributed import consistency
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.horovod_info import horovod_build
from horovod_train.errors import RanksDisagree


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
    return [*findings, ok("same everywhere", f"{what} are the same on {_ranks(group.size)}")]


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


def _ranks(size: int) -> str:
    return "the only rank" if size == 1 else f"all {size} ranks"
