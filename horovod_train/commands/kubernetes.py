"""The command `kubernetes`: prints a manifest that trains a config on a cluster, ready for kubectl. No TensorFlow.

python -m horovod_train.main kubernetes --config A.yaml --output-dir /data/runs/a --nodes 4 --gpus-per-node 8 \
    --image registry/horovod_train --volume my-claim:/data > job.yaml
kubectl apply -f job.yaml

An Indexed Job has one pod on each host. Each pod runs `launch`, which starts the host's ranks, and again when a rank or
another pod is lost; the ranks of all pods meet at pod 0, which a headless service names. --mpijob prints an MPIJob of
the MPI operator in its place: its launcher runs `launch` over the hosts that the operator has.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from horovod_train.commands.cli import (
    Parser,
    add_config_arguments,
    config_parts,
    count,
    duration,
    like,
    load_config,
    require_output_dir,
    require_resume,
)
from horovod_train.config.rules import resolve
from horovod_train.distributed.launch import hosts
from horovod_train.distributed.launch.conventions import JOB, PORT, ROOT, SIZE
from horovod_train.distributed.launch.launcher import TOKEN
from horovod_train.errors import START_AGAIN, STOPPED, RanksDisagree, UserError, reading
from horovod_train.output.console import to_stderr

RENDEZVOUS_PORT = 29_400
CONFIG_FOLDER = "/mnt/horovod_train"
MEET_WITHIN_S = 1800
"""How long ranks wait for a pod that Kubernetes starts elsewhere: its host may have to fetch an image of some GB."""
SSHD_HOME, SSHD_USER = "/home/mpi", 1000
"""Of the Dockerfile's sshd, which runs without root."""
_AGENTS = f"$(grep -ls '[{hosts.__name__[0]}]{hosts.__name__[1:]}' /proc/[0-9]*/cmdline)"
"""The files of the agents of a worker's ranks; the pattern does not find itself."""
_ASK = f"kill -{hosts.END_RANKS.name.removeprefix('SIG')} ${{agent%/cmdline}}"
PRE_STOP = (
    f'while agents={_AGENTS}; [ "$agents" ]; do '
    f"for agent in $agents; do agent=${{agent#/proc/}}; {_ASK}; done; sleep 1; done"
)
"""For the shell of a worker that must end: has each agent ask its ranks to save and to end, and waits for them."""
MAX_CONFIG_BYTES = 1 << 20
"""The limit of a ConfigMap."""
_name = like(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", "lowercase letters, digits and -, at most 52")
"""A name of Kubernetes, shorter than its 63 characters, because names of pods and a service are made from it."""
_DNS_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_claim = like(rf"(?=.{{1,253}}$){_DNS_LABEL}(\.{_DNS_LABEL})*", "lowercase letters, digits, - and ., at most 253")
"""The name of a PersistentVolumeClaim or a Secret: https://www.rfc-editor.org/rfc/rfc1123, as Kubernetes checks it."""
_path = like(r"(?a)(/(?!\.\.(/|$))[\w.-]+)+", "a path such as /data")

_KEPT = {"immutable": True}
"""Else a manifest that is printed anew and applied would give a pod that is replaced another token than the others."""

Manifest = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines, such as a config's, as it is."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


class Volume(NamedTuple):
    claim: str
    path: str


def add_arguments(parser: Parser) -> None:
    add_config_arguments(parser)
    parser.add_argument(
        "--image",
        required=True,
        type=like(r"(?a)[\w.:/@-]+", "the name of an image"),
        metavar="IMAGE",
        help="it has horovod-train on its PATH",
    )
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="pods, one on each host; default 1")
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="GPUs of a pod, all used; default: on CPUs")
    parser.add_argument(
        "--slots", type=count, metavar="N", help="ranks of a pod; default: one for each device.per_rank GPUs"
    )
    parser.add_argument(
        "--volume",
        type=_volume,
        action="append",
        default=[],
        metavar="CLAIM:/PATH",
        help="a PersistentVolumeClaim and where it is mounted; ReadWriteMany; can be repeated",
    )
    parser.add_argument(
        "--env-from",
        type=_claim,
        action="append",
        default=[],
        metavar="SECRET",
        help="a Secret whose keys are variables of the ranks, as of S3 or MLflow; can be repeated",
    )
    parser.add_argument("--workdir", type=_path, metavar="/PATH", help="where it runs; default: the first --volume")
    parser.add_argument("--name", type=_job_name, metavar="NAME", help="of the job; default: that of output_dir")
    parser.add_argument("--namespace", type=_name, metavar="NAME", help="default: that of kubectl")
    parser.add_argument("--cpus", type=count, metavar="N", help="CPUs of a pod; default: not limited")
    parser.add_argument(
        "--memory",
        type=like(r"[1-9]\d*(Mi|Gi|Ti|M|G|T)", "a size such as 64Gi"),
        metavar="SIZE",
        help="of a pod, such as 64Gi; default: not limited",
    )
    parser.add_argument(
        "--save-within",
        type=duration,
        default=600,
        metavar="SECONDS",
        help="for the last checkpoint of a pod that must end; default %(default)s",
    )
    parser.add_argument("--max-restarts", type=count, default=100, metavar="N", help="default %(default)s")
    parser.add_argument("--mpijob", action="store_true", help="an MPIJob (kubeflow.org/v2beta1) in place of a Job")


def run(arguments: argparse.Namespace) -> int:
    """Print the manifest on standard output and what it comes to on standard error."""
    files, overrides = config_parts(arguments)
    config, _ = load_config(arguments)
    output_dir = require_output_dir(config)
    require_resume(config)
    per_rank = config.device.per_rank
    gpus = arguments.gpus_per_node or 0
    if gpus % per_rank:
        raise UserError(
            f"--gpus-per-node: must be a multiple of device.per_rank, {per_rank}, which a rank takes; received {gpus}."
        )
    slots = arguments.slots or gpus // per_rank or 1
    if gpus and slots * per_rank != gpus:
        raise UserError(
            f"--slots must be --gpus-per-node / device.per_rank, {gpus // per_rank}; received {slots}. Leave it out."
        )
    ranks = slots * arguments.nodes
    batch = resolve(config, ranks).data.global_batch(ranks)
    texts = {f"{number}-{_key(file)}": _read(file) for number, file in enumerate(files) if os.path.exists(file)}
    if sum(map(len, texts.values())) > MAX_CONFIG_BYTES:
        raise UserError(f"--config: a ConfigMap takes at most {MAX_CONFIG_BYTES} bytes; these files have more.")
    keys = iter(texts)
    words = [f"{CONFIG_FOLDER}/{next(keys)}" if os.path.exists(file) else file for file in files]
    volumes: list[Volume] = arguments.volume
    job = Job(
        name=arguments.name or _name_of(output_dir),
        namespace=arguments.namespace,
        image=arguments.image,
        nodes=arguments.nodes,
        slots=slots,
        gpus=gpus,
        cpus=arguments.cpus,
        memory=arguments.memory,
        volumes=volumes,
        secrets=arguments.env_from,
        workdir=arguments.workdir or (volumes[0].path if volumes else None),
        save_within_s=math.ceil(arguments.save_within),
        max_restarts=arguments.max_restarts,
        config_texts=texts,
        arguments=["--config", *words, *overrides, "--output-dir", output_dir],
    )
    _check_output_dir(output_dir, job)
    kind, manifests = ("MPIJob", mpi_job(job)) if arguments.mpijob else ("Job", indexed_job(job))
    print(f"# {ranks} ranks of horovod_train on {job.nodes} pod(s); kubectl apply -f THIS_FILE")
    print(f"# To stop it, after a checkpoint: kubectl delete {kind.lower()} {job.name}. Applied again, it resumes.")
    print("# Before you apply a manifest that was printed anew: kubectl delete -f THIS_FILE.")
    print(yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120), end="")
    device = f"{per_rank} GPU(s)" if gpus else "CPUs"
    to_stderr(f"ranks: {job.nodes} pod(s) × {slots} = {ranks}, each with {device}")
    to_stderr(f"batch: {batch} records over all ranks, {batch / ranks:g} on each")
    to_stderr(f"stop: a pod has {job.save_within_s} s to save when it must end")
    if not arguments.mpijob:
        to_stderr("secret: in the manifest, by which the ranks know each other; do not publish it")
    return 0


def _check_output_dir(output_dir: str, job: Job) -> None:
    """Raise UserError if what a pod writes would be lost with it."""
    path = PurePosixPath(job.workdir or "/", output_dir)
    if "://" in output_dir or any(path.is_relative_to(volume.path) for volume in job.volumes):
        return
    raise UserError(
        f"output_dir: must lie on a volume, or it is lost with its pod; received {output_dir}. Give "
        "--volume CLAIM:/PATH and --output-dir /PATH/…"
    )


@dataclass(frozen=True)
class Job:
    """What is asked of the cluster."""

    name: str
    namespace: str | None
    image: str
    nodes: int
    slots: int
    """The ranks of a pod."""
    gpus: int
    """Of a pod; 0: on CPUs."""
    cpus: int | None
    memory: str | None
    volumes: Sequence[Volume]
    secrets: Sequence[str]
    """Names of those whose keys are variables of the ranks."""
    workdir: str | None
    save_within_s: int
    max_restarts: int
    config_texts: dict[str, str]
    arguments: Sequence[str]
    """Those of the training."""


def indexed_job(job: Job) -> list[Manifest]:
    """Return secret, config, service and job.

    https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication and /docs/concepts/workloads/controllers/job.
    """
    command = ["horovod-train", "launch", "--slots", str(job.slots), "--max-restarts", str(job.max_restarts), "--"]
    environment: list[Manifest] = [
        {"name": SIZE, "value": str(job.nodes)},
        {"name": ROOT, "value": f"{job.name}-0.{job.name}"},
        {"name": PORT, "value": str(RENDEZVOUS_PORT)},
        {"name": JOB, "value": job.name},
        {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": job.name, "key": "token"}}},
        {"name": "HOROVOD_START_TIMEOUT", "value": str(MEET_WITHIN_S)},
    ]
    pod = _pod(job, [*command, *job.arguments], environment) | {"subdomain": job.name}
    # A pod that fails is started again as another pod; `launch` inside starts its ranks again without that.
    rules = [
        {"action": "FailJob", "onExitCodes": _codes(UserError.exit_code, STOPPED, RanksDisagree.exit_code)},
        {"action": "Ignore", "onExitCodes": _codes(START_AGAIN)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": job.max_restarts * job.nodes,  # it counts pods, and all may fail at once
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {"app": job.name}}, "spec": pod},
    }
    token = {"token": secrets.token_hex(16)}
    # Names are published before pods are ready, because ranks look for pod 0 while it starts.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": job.name}}
    return [
        _manifest(job, "v1", "Secret", type="Opaque", **_KEPT, stringData=token),
        _config_map(job),
        _manifest(job, "v1", "Service", spec=service),
        _manifest(job, "batch/v1", "Job", spec=spec),
    ]


def mpi_job(job: Job) -> list[Manifest]:
    """Return config and MPIJob: https://github.com/kubeflow/mpi-operator, v2beta1. Its image must have sshd.

    The operator gives the launcher a script that prints the workers that are ready, and all of them a key for ssh.
    """
    ranks = job.nodes * job.slots
    command = ["horovod-train", "launch", "-np", str(ranks), "--host-discovery", "/etc/mpi/discover_hosts.sh"]
    command += ["--slots", str(job.slots), "--max-restarts", str(job.max_restarts), "--"]
    # The launcher trains nothing: it waits for the workers.
    launcher = _pod(job, [*command, *job.arguments], [], is_worker=False)
    worker = _pod(job, ["/usr/sbin/sshd", "-De", "-f", f"{SSHD_HOME}/.sshd_config"], [])
    # At SIGTERM sshd would end, and its ranks be killed with it. The launcher may run on, as when a node is drained.
    worker["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", PRE_STOP]}}}
    for pod in (launcher, worker):
        pod["securityContext"] = {"runAsUser": SSHD_USER, "fsGroup": SSHD_USER}
    spec = {
        "slotsPerWorker": job.slots,
        "sshAuthMountPath": f"{SSHD_HOME}/.ssh",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "template": {"spec": launcher}},
            "Worker": {"replicas": job.nodes, "template": {"spec": worker}},
        },
    }
    return [_config_map(job), _manifest(job, "kubeflow.org/v2beta1", "MPIJob", spec=spec)]


def _manifest(job: Job, version: str, kind: str, **content: Any) -> Manifest:
    metadata = {"name": job.name} | ({"namespace": job.namespace} if job.namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _config_map(job: Job) -> Manifest:
    return _manifest(job, "v1", "ConfigMap", **_KEPT, data=job.config_texts)


def _codes(*codes: int) -> Manifest:
    return {"containerName": "train", "operator": "In", "values": sorted(codes)}


def _pod(job: Job, command: Sequence[str], environment: Sequence[Manifest], *, is_worker: bool = True) -> Manifest:
    asked = {"nvidia.com/gpu": job.gpus, "cpu": job.cpus, "memory": job.memory}
    limits = {name: value for name, value in asked.items() if value and is_worker}
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": job.name}},
        # NCCL and gloo exchange in it; a container has 64 MiB otherwise.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    for number, volume in enumerate(job.volumes):
        mounts.append({"name": f"volume-{number}", "mountPath": volume.path})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim}})
    container: Manifest = {
        "name": "train",
        "image": job.image,
        "command": list(command),
        "workingDir": job.workdir,
        "env": list(environment),
        "envFrom": [{"secretRef": {"name": name}} for name in job.secrets],
        "resources": {"limits": limits} if limits else None,
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.save_within_s,
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }


def _read(file: str) -> str:
    with reading(file, text=True):
        return Path(file).read_text(encoding="utf-8")


def _key(file: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", Path(file).name)


def _name_of(output_dir: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", Path(output_dir).name.lower()).strip("-")
    name = f"run-{name}" if name[:1].isdecimal() else name
    return name[:50].strip("-") or "horovod-train"


def _job_name(word: str) -> str:
    """Return the name if a service, which has it too, may have it: https://www.rfc-editor.org/rfc/rfc1035."""
    if _name(word)[0].isdecimal():
        raise argparse.ArgumentTypeError(f"expected a letter first; received {word!r}")
    return word


def _volume(word: str) -> Volume:
    claim, _, path = word.partition(":")
    try:
        return Volume(_claim(claim), _path(path))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"expected CLAIM:/PATH; received {word!r}: {error}") from error
