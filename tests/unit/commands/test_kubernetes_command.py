"""The manifests: by Kubernetes' own schemas, and mistakes. They are run in tests/cluster/test_launched_hosts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from conftest import run_process

from horovod_train.distributed.launch import hosts
from horovod_train.distributed.launch.started_ranks import new_meeting
from horovod_train.main import main

PROJECT = Path(__file__).parents[3]
CONFIG = PROJECT / "configs" / "digits_convnet.yaml"
WORDS = ("--image", "registry/ht:1", "--volume", "claim:/data", "--output-dir", "/data/runs/Digits_1")
VERSION = "1.31"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["kubernetes", "--config", str(CONFIG), *WORDS, *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--nodes", "4", "--gpus-per-node", "8", "--cpus", "64", "--memory", "256Gi"),
        ("--nodes", "2", "--slots", "2", "--namespace", "team", "--name", "mine", "--save-within", "00:20:00"),
        ("--env-from", "s3-keys", "--env-from", "mlflow"),
    ],
)
def test_a_job_is_as_kubernetes_schemas_want_it(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    manifests = printed(capsys, *words)
    assert [manifest["kind"] for manifest in manifests] == ["Secret", "ConfigMap", "Service", "Job"]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    assert len({manifest["metadata"]["name"] for manifest in manifests}) == 1


def test_secrets_become_variables_of_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    named = ("--env-from", "s3-keys", "--env-from", "mlflow")
    pods = [printed(capsys, *named)[-1]["spec"]["template"]["spec"]]
    replicas = printed(capsys, "--mpijob", *named)[-1]["spec"]["mpiReplicaSpecs"]
    pods += [each["template"]["spec"] for each in replicas.values()]
    expected = [{"secretRef": {"name": "s3-keys"}}, {"secretRef": {"name": "mlflow"}}]
    assert [pod["containers"][0]["envFrom"] for pod in pods] == [expected] * 3
    assert "envFrom" not in printed(capsys)[-1]["spec"]["template"]["spec"]["containers"][0]


def test_a_manifest_printed_anew_changes_nothing_that_a_running_job_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """kubectl apply refuses to: https://kubernetes.io/docs/concepts/configuration/secret/#secret-immutable."""
    first, again = printed(capsys), printed(capsys)
    assert [manifest for manifest, other in zip(first, again, strict=True) if manifest != other] == [first[0]]
    assert [manifest["kind"] for manifest in first if manifest.get("immutable")] == ["Secret", "ConfigMap"]


def test_a_part_of_a_second_is_time_to_save(capsys: pytest.CaptureFixture[str]) -> None:
    job = printed(capsys, "--save-within", "0.5")[-1]
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 1  # 0 would kill the pods at once


def test_the_schemas_refuse_what_is_none_of_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    job = printed(capsys)[-1]
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_pods_of_an_mpijob_are_as_kubernetes_schemas_want_them(capsys: pytest.CaptureFixture[str]) -> None:
    config, job = printed(capsys, "--mpijob", "--nodes", "4", "--gpus-per-node", "8")
    kubernetes_validate.validate(config, VERSION, strict=True)
    assert (job["apiVersion"], job["kind"], job["spec"]["slotsPerWorker"]) == ("kubeflow.org/v2beta1", "MPIJob", 8)
    for replicas in job["spec"]["mpiReplicaSpecs"].values():
        template = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "x"},
            "template": replicas["template"],
        }
        kubernetes_validate.validate(template, VERSION, strict=True)


def test_a_worker_of_an_mpijob_ends_after_its_ranks_have_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before SIGTERM reaches sshd; also where the launcher runs on, as when a node is drained."""
    job = printed(capsys, "--mpijob")[-1]
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    command = worker["lifecycle"]["preStop"]["exec"]["command"]
    rank = "trap 'sleep 0.5; touch saved; exit 75' TERM; touch ready; while :; do sleep 0.05; done"
    order = {"meeting": new_meeting(1, "localhost"), "first": 0, "ranks": 1, "program": ["sh", "-c", rank]}
    given = shlex.quote(json.dumps(order | {"end_together": False, "environment": {}}))
    (tmp_path / "pod.sh").write_text(
        f"{{ echo {given}; sleep 600; }} | {sys.executable} -m {hosts.__name__} &\n"
        f"until [ -e ready ]; do sleep 0.05; done\n{shlex.join(command)} && [ -e saved ]\n"
    )
    # In a namespace of its own, because it ends the ranks of all agents.
    finished = run_process(["unshare", "--pid", "--fork", "--mount-proc", "sh", "pod.sh"], cwd=tmp_path)
    if "unshare" in finished.stderr:
        pytest.skip(f"a namespace of its own needs root: {finished.stderr.strip()}")
    assert finished.returncode == 0, finished.text


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("2024-05-01", "run-2024-05-01"),
        ("9" * 70, "run-" + "9" * 46),
        ("Digits_1", "digits-1"),
        ("__", "horovod-train"),
    ],
)
def test_a_job_is_named_by_its_run_as_services_may_be(
    capsys: pytest.CaptureFixture[str], folder: str, name: str
) -> None:
    """A service's name begins with a letter (RFC 1035), which the schemas do not say."""
    manifests = printed(capsys, "--output-dir", f"/data/runs/{folder}")
    assert {manifest["metadata"]["name"] for manifest in manifests} == {name}


def test_the_config_travels_in_the_manifest_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = tmp_path / "my more.yaml"
    more.write_text("train: {epochs: 3}\n")
    _, config, _, job = printed(capsys, "--config", str(more), "loss.name=mse")
    assert config["data"] == {"0-digits_convnet.yaml": CONFIG.read_text(), "1-my_more.yaml": "train: {epochs: 3}\n"}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = ["--config", *(f"/mnt/horovod_train/{name}" for name in config["data"]), "loss.name=mse"]
    assert container["command"][-len(words) - 2 : -2] == words


def test_ends_that_no_new_pod_would_change_end_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """2: bad input; 76: a STOP file; 86: the ranks disagree. 75, asked and saved, and evictions count as no failure."""
    fail, *ignore = printed(capsys)[-1]["spec"]["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [2, 76, 86])
    assert [rule["action"] for rule in ignore] == ["Ignore", "Ignore"]
    assert ignore[0]["onExitCodes"]["values"] == [75]


def test_all_pods_may_fail_as_often_as_their_ranks_are_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes counts the pods of all indexes together, and a cause that they share ends all of them at once."""
    assert printed(capsys, "--nodes", "64", "--max-restarts", "5")[-1]["spec"]["backoffLimit"] == 320


@pytest.mark.parametrize("claim", ["my.claim", "a" * 253, "data-0.team-1.b"])
def test_a_volume_takes_every_name_that_a_claim_may_have(capsys: pytest.CaptureFixture[str], claim: str) -> None:
    """Claims may have dots and 253 characters, unlike what pods and services are named after."""
    volumes = printed(capsys, "--volume", f"{claim}:/data2")[-1]["spec"]["template"]["spec"]["volumes"]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]
    assert claims == ["claim", claim]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output-dir", "runs/a", "--volume", "c:/data", "--workdir", "/work"], "output_dir: must lie on a volume"),
        (["--output-dir", "/data/a"], "output_dir: must lie on a volume, or it is lost with its pod; received /data/a"),
        (["--volume", "c:data"], "argument --volume: expected CLAIM:/PATH; received 'c:data'"),
        (["--volume", "C:/data"], "expected lowercase letters, digits, - and ., at most 253; received 'C'"),
        (["--volume", "a..b:/data"], "expected lowercase letters, digits, - and ., at most 253; received 'a..b'"),
        (["--volume", "a.-b:/data"], "expected lowercase letters, digits, - and ., at most 253; received 'a.-b'"),
        (["--volume", f"{'a' * 254}:/data"], "expected lowercase letters, digits, - and ., at most 253; received"),
        (["--name", "a_b"], "argument --name: expected lowercase letters"),
        (["--name", "2024-05-01"], "argument --name: expected a letter first; received '2024-05-01'"),
        (["--memory", "64"], "argument --memory: expected a size such as 64Gi"),
        (["--nodes", "0"], "argument --nodes: expected a whole number"),
        (["--save-within", "0"], "argument --save-within: must be above 0; received 0"),
        (["--save-within", "soon"], "argument --save-within: expected seconds or [D-]HH:MM:SS; received 'soon'"),
        (["--gpus-per-node", "3", "device.per_rank=2"], "--gpus-per-node: must be a multiple of device.per_rank, 2"),
        (["--gpus-per-node", "4", "--slots", "2"], "--slots must be --gpus-per-node / device.per_rank, 4"),
        (["checkpoint.resume=never"], "checkpoint.resume: never would refuse each later start of the job"),
        (["--nodes", "65", "--output-dir", "/d/a", "--volume", "c:/d"], "global_batch_size"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["kubernetes", "--config", str(CONFIG), "--image", "i", *words]) == 2
    said = capsys.readouterr()
    assert (said.out, message in said.err, said.err.count("\n")) == ("", True, 1), said.err
