"""Rank, size and meeting place from the variables of launchers, with the environments that those really set."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from horovod_train.distributed.launch import rendezvous, rendezvous_server
from horovod_train.distributed.launch.launcher import TOKEN, TOKEN_FILE, WITHOUT_TOKEN, read_launch
from horovod_train.distributed.launch.network import host_names
from horovod_train.distributed.launch.rendezvous import Place, find_places
from horovod_train.distributed.launch.rendezvous_server import own_token
from horovod_train.errors import RunError, UserError

SECRET = {TOKEN: "secret"}


def tf_config(kind: str = "worker", index: object = 0, **cluster: list[str]) -> dict[str, str]:
    cluster = cluster or {"worker": ["a:2222", "b:2222"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


CHIEF = {"chief": ["job-chief-0.ns.svc:2222"], "worker": ["job-worker-0.ns.svc:2222", "job-worker-1.ns.svc:2222"]}


def kubeflow_tfjob(kind: str, index: int) -> dict[str, str]:
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": CHIEF, "task": task, "environment": "cloud"})}


def torchrun(rank: int = 0, size: int = 2, local_size: int = 2, root: str = "localhost") -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "ROLE_RANK": str(rank),
        "MASTER_ADDR": root,
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


ENV_METHOD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"}
INDEXED = {
    "JOB_COMPLETION_INDEX": "3",
    "HOROVOD_TRAIN_SIZE": "4",
    "HOROVOD_TRAIN_ROOT": "job-0.job",
    "HOROVOD_TRAIN_PORT": "29400",
}
LAUNCHED = {
    "HOROVOD_TRAIN_RANK": "1",
    "HOROVOD_TRAIN_LOCAL_RANK": "1",
    "HOROVOD_TRAIN_SIZE": "2",
    "HOROVOD_TRAIN_ROOT": "localhost",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "6",
    "JSM_NAMESPACE_LOCAL_RANK": "2",
    "JSM_NAMESPACE_LOCAL_SIZE": "3",
    "LSB_JOBID": "77",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "77.1",
    "HOROVOD_TRAIN_ROOT": "h41n03",
}
FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2ab",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "HOROVOD_TRAIN_ROOT": "n0",
}
PALS = {
    "PALS_RANKID": "7",
    "PALS_LOCAL_RANKID": "3",
    "PALS_LOCAL_SIZE": "4",
    "PALS_APID": "ab-1",
    "PMI_SIZE": "8",
    "HOROVOD_TRAIN_ROOT": "x1000",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "size", "local_rank", "root", "port"),
    [
        (tf_config(index=1), "tf-config", 1, 2, None, "a", 2222),
        (tf_config(index="1"), "tf-config", 1, 2, None, "a", 2222),
        (tf_config(index=1, worker=["localhost:1", "localhost:2"]), "tf-config", 1, 2, None, "localhost", 1),
        (kubeflow_tfjob("chief", 0), "tf-config", 0, 3, None, "job-chief-0.ns.svc", 2222),
        (kubeflow_tfjob("worker", 1), "tf-config", 2, 3, None, "job-chief-0.ns.svc", 2222),
        (tf_config("master", 0, master=["m:1"], worker=["w:1"]), "tf-config", 0, 2, None, "m", 1),
        (torchrun(1), "torchrun", 1, 2, 1, "localhost", None),
        (torchrun(5, 8, 4, "10.0.0.1"), "torchrun", 5, 8, 1, "10.0.0.1", None),
        (torchrun(5, 8, 4, "n1") | {"JOB_COMPLETION_INDEX": "1"} | SLURM, "torchrun", 5, 8, 1, "n1", None),
        (torchrun() | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "torchrun", 0, 2, 0, "localhost", 29500),
        (ENV_METHOD, "torchrun", 1, 4, None, "algo-1", 7777),
        (ENV_METHOD | {"LOCAL_RANK": "1"}, "torchrun", 1, 4, 1, "algo-1", 7777),
        (LAUNCHED | {"JOB_COMPLETION_INDEX": "5"}, "launch", 1, 2, 1, "localhost", None),
        (INDEXED, "indexed-job", 3, 4, None, "job-0.job", 29400),
        (JSRUN, "jsrun", 5, 6, 2, "h41n03", None),
        (JSRUN | {"OMPI_COMM_WORLD_RANK": "5", "HOROVOD_CONTROLLER": "gloo"}, "jsrun", 5, 6, 2, "h41n03", None),
        (FLUX, "flux", 1, 4, 1, "n0", None),
        (FLUX | SLURM, "flux", 1, 4, 1, "n0", None),  # srun has started Flux
        (PALS, "pals", 7, 8, 3, "x1000", None),
        (PALS | {"PMI_RANK": "7", "HOROVOD_CONTROLLER": "gloo"}, "pals", 7, 8, 3, "x1000", None),
    ],
)
def test_each_convention_says_rank_size_and_where_ranks_meet(
    environment: dict[str, str],
    launcher: str,
    rank: int,
    size: int,
    local_rank: int | None,
    root: str,
    port: int | None,
) -> None:
    found = read_launch(environment | SECRET)
    assert (found.launcher, found.rank, found.size, found.fault) == (launcher, rank, size, "")
    meeting: Any = found.step
    assert (meeting.local_rank, meeting.root, meeting.port) == (local_rank, root, port)
    assert not found.uses_mpi


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (PALS | {"PMI_RANK": "7"}, "mpirun"),
        (JSRUN | {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, "mpirun"),
        (SLURM | ENV_METHOD, "srun"),  # set for others by the user's script
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"} | tf_config(), "horovodrun"),
        ({"JOB_COMPLETION_INDEX": "3"}, "none"),  # an Indexed Job of separate runs
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "1"}, "none"),
        ({"TF_CONFIG": ""}, "none"),
        ({"TF_CONFIG": "{}"}, "none"),
        ({"TF_CONFIG": '{"cluster": {}, "task": {"type": "worker", "index": 0}}'}, "none"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, "none"),
    ],
)
def test_other_launchers_are_nearer_or_there_is_none(environment: dict[str, str], launcher: str) -> None:
    assert read_launch(environment).launcher == launcher


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "1"}, "RANK is set, but not WORLD_SIZE, which torchrun and what is like it set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but not RANK"),
        (ENV_METHOD | {"RANK": "4"}, "RANK must be a rank below WORLD_SIZE; received 4 and 4"),
        (ENV_METHOD | {"RANK": "-1"}, "RANK must be a rank, from 0; received '-1'"),
        (ENV_METHOD | {"WORLD_SIZE": "two"}, "WORLD_SIZE must be the number of ranks, at least 1; received 'two'"),
        (ENV_METHOD | {"MASTER_PORT": "70000"}, "MASTER_PORT must be a port from 1 to 65535; received '70000'"),
        (ENV_METHOD | {"MASTER_ADDR": ""}, "started 4 ranks on several hosts, .* Set MASTER_ADDR to its name"),
        (torchrun() | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE must be more than the local rank, .* received 3"),
        (torchrun(1) | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE must be more than the local rank, 1"),
        (ENV_METHOD | tf_config(index=1), "the variables of torchrun say rank 1 of 4, those of tf-config say rank 1"),
        ({"HOROVOD_TRAIN_RANK": "0"}, "HOROVOD_TRAIN_RANK is set, but not HOROVOD_TRAIN_SIZE"),
        ({"JOB_COMPLETION_INDEX": "0", "HOROVOD_TRAIN_ROOT": "a"}, "is set, but not HOROVOD_TRAIN_SIZE, which indexed"),
        (INDEXED | {"HOROVOD_TRAIN_SIZE": "3"}, "JOB_COMPLETION_INDEX must be a rank below HOROVOD_TRAIN_SIZE"),
        (INDEXED | {"HOROVOD_TRAIN_ROOT": ""}, "indexed-job started 4 ranks .* Set HOROVOD_TRAIN_ROOT to its name"),
        (JSRUN | {"HOROVOD_TRAIN_ROOT": ""}, "jsrun started 6 ranks on several hosts"),
        (JSRUN | {"JSM_NAMESPACE_SIZE": ""}, "JSM_NAMESPACE_RANK is set, but not JSM_NAMESPACE_SIZE"),
        (FLUX | {"HOROVOD_TRAIN_ROOT": ""}, "flux started 4 ranks on several hosts"),
        (PALS | {"PMI_SIZE": ""}, "PALS_RANKID is set, but not PMI_SIZE or HOROVOD_TRAIN_SIZE"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG must name the hosts .* received '{', which is not JSON"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG must name the hosts .* received '\\[\\]'"),
        (tf_config("ps", 0, ps=["a:1"], worker=["b:1"]), "TF_CONFIG names a task of type ps; horovod_train has none"),
        (tf_config("worker", 0, ps=["a:1"], worker=["b:1"]), "a task of type ps"),
        (tf_config("evaluator", 0), "a task of type evaluator"),
        (tf_config("worker", 2), "is none of the cluster's 2"),
        (tf_config("chief", 0), "is none of the cluster's 2"),
        (tf_config(worker=["a:1", "a:1"]), "two tasks have the same HOST:PORT"),
        (tf_config(worker=["a", "b"]), "each host must be HOST:PORT"),
        (tf_config(worker=["localhost:1", "b:1"]), "a host of several is localhost"),
        (tf_config("chief", 0, chief=["a:1", "b:1"], worker=["c:1"]), "cluster must have one chief"),
        (tf_config(chief=["a:1"], master=["b:1"], worker=["c:1"]), "a chief and a master"),
        ({"TF_CONFIG": '{"cluster": {"worker": "a:1"}, "task": {}}'}, "cluster must have worker: "),
        ({"TF_CONFIG": '{"cluster": ["a:1"], "task": {}}'}, "cluster and task must be mappings"),
    ],
)
def test_missing_and_contradicting_variables_are_one_line(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        read_launch(environment | SECRET).check()
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("environment", [ENV_METHOD, INDEXED, JSRUN, FLUX, PALS, tf_config()])
def test_ranks_on_several_hosts_do_not_meet_without_a_secret(environment: dict[str, str]) -> None:
    found = read_launch(environment)
    assert found.step is None
    with pytest.raises(UserError, match=f"ranks the same {TOKEN} .* or {TOKEN_FILE}. {WITHOUT_TOKEN}=1 lets anyone"):
        found.check()
    for allowed in (SECRET, {TOKEN_FILE: "/run/secrets/token"}, {WITHOUT_TOKEN: "1"}):
        read_launch(environment | allowed).check()
    assert read_launch(environment | {WITHOUT_TOKEN: "0"}).fault


ONE_HOST = [
    torchrun(),
    ENV_METHOD | {"MASTER_ADDR": "127.0.0.1"},
    INDEXED | {"HOROVOD_TRAIN_ROOT": "localhost"},
    JSRUN | {"JSM_NAMESPACE_LOCAL_SIZE": "6"},
    FLUX | {"FLUX_JOB_NNODES": "1", "HOROVOD_TRAIN_ROOT": ""},
    PALS | {"PALS_LOCAL_SIZE": "8"},
    tf_config(worker=["a:1", "a:2"]),
]


@pytest.mark.parametrize("environment", ONE_HOST)
def test_ranks_on_one_host_need_no_secret_from_the_user(environment: dict[str, str]) -> None:
    found = read_launch(environment)
    assert found.fault == ""
    meeting: Any = found.step
    assert meeting.is_one_host
    assert rendezvous._address_of_root(meeting) == "127.0.0.1"


def test_one_job_has_one_name_and_others_have_others() -> None:
    def name(environment: dict[str, str]) -> str:
        meeting: Any = read_launch(environment | SECRET).step
        return str(meeting.name)

    assert name(torchrun(0, 8, 4, "a")) == name(torchrun(5, 8, 4, "a"))
    assert name(tf_config(index=0)) == name(tf_config(index=1))
    assert name(FLUX) != name(FLUX | {"FLUX_JOB_ID": "other"})
    assert name(JSRUN) != name(JSRUN | {"PMIX_NAMESPACE": "77.2"})
    assert name(ENV_METHOD) != name(ENV_METHOD | {"MASTER_PORT": "1"})


def test_places_follow_from_the_hosts_of_the_ranks() -> None:
    two_and_one = [("a", "x", None), ("a", "x", None), ("b", "y", None)]
    assert find_places(two_and_one) == [Place("a", 0, 2, 0, 2), Place("a", 1, 2, 0, 1), Place("b", 0, 1, 1, 2)]
    in_turn = [("a", "x", 0), ("b", "y", 0), ("a", "x", 1), ("b", "y", 1)]
    assert [(place.host, place.local_rank) for place in find_places(in_turn)] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]
    given = [("a", "x", 1), ("a", "x", 0)]
    assert [place.local_rank for place in find_places(given)] == [1, 0]
    one_name = [("localhost", "x", None), ("localhost", "y", None)]
    assert [place.local_size for place in find_places(one_name)] == [1, 1]


def test_hosts_of_one_name_have_places_of_different_names() -> None:
    """As cloned machines have: the addresses of a host's ranks are kept under its name, by local rank."""
    cloned = [("a", "x", 0), ("a", "x", 1), ("a", "y", 0), ("a", "y", 1), ("a-1", "z", 0), ("b", "z", 0)]
    places = find_places(cloned)
    assert [place.host for place in places] == ["a-2", "a-2", "a-3", "a-3", "a-1", "b"]
    assert len({(place.host, place.local_rank) for place in places}) == len(cloned)
    assert host_names([(name, boot) for name, boot, _ in cloned]) == [place.host for place in places]


def test_local_ranks_that_do_not_fit_the_hosts_are_refused() -> None:
    with pytest.raises(UserError, match="gave the local ranks 0, 0 to ranks 0, 1 on a; expected 0 to 1, each once"):
        find_places([("a", "x", 0), ("a", "x", 0)])


def test_the_secret_of_one_host_is_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    secret = own_token(folder)
    assert len(secret) == 32
    assert own_token(folder) == secret
    assert (folder.stat().st_mode & 0o777, (folder / "token").stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_folder_that_others_could_read_or_have_made_is_refused(tmp_path: Path) -> None:
    open_folder, link = tmp_path / "open", tmp_path / "link"
    open_folder.mkdir(mode=0o755)
    with pytest.raises(UserError, match="must be a folder that only you can read"):
        own_token(open_folder)
    own_token(tmp_path / "own")
    link.symlink_to(tmp_path / "own")
    with pytest.raises(UserError, match="must be a folder that only you can read"):
        own_token(link)
    (tmp_path / "own" / "token").rename(tmp_path / "elsewhere")
    (tmp_path / "own" / "token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"Set {TOKEN} for all ranks instead"):
        own_token(tmp_path / "own")


def test_a_file_of_the_secret_is_read_and_must_hold_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting: Any = read_launch(INDEXED | SECRET).step
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(rendezvous_server, "_private_token", "")
    file = tmp_path / "token"
    monkeypatch.setenv(TOKEN_FILE, str(file))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        rendezvous_server.prepare_token(meeting)
    file.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        rendezvous_server.prepare_token(meeting)
    file.write_text("a secret\n")
    rendezvous_server.prepare_token(meeting)
    by_file = rendezvous_server.key_of(meeting.name, 1)
    monkeypatch.setenv(TOKEN, "another")
    with pytest.raises(UserError, match="hold different secrets"):
        rendezvous_server.prepare_token(meeting)
    monkeypatch.setenv(TOKEN, "a secret")
    assert rendezvous_server.key_of(meeting.name, 1) == by_file


def test_a_host_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting: Any = read_launch(INDEXED | {"HOROVOD_TRAIN_ROOT": "nowhere.invalid"} | SECRET).step
    monkeypatch.setattr(rendezvous, "RESOLVE_WITHIN_S", 0.0)
    with pytest.raises(RunError, match=r"nowhere\.invalid, by indexed-job the host of rank 0, has no IPv4 address"):
        rendezvous._address_of_root(meeting)


def test_a_pod_that_waits_for_its_node_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as ranks wait for each other, where the manifest says how long that is."""
    meeting: Any = read_launch(INDEXED | SECRET).step
    monkeypatch.setattr(rendezvous, "RESOLVE_WITHIN_S", 0.0)
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "60")
    answers = iter([socket.gaierror(-2, "Name or service not known")] * 3)

    def look_up(host: str) -> str:
        if error := next(answers, None):
            raise error
        return "10.0.0.7"

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    assert rendezvous._address_of_root(meeting) == "10.0.0.7"
