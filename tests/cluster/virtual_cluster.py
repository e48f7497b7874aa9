"""A real SLURM cluster on one machine: each host is a set of namespaces on a bridge, with its own sshd and slurmd.

Needs root and the Debian packages that install_packages.sh names. All hosts see the files of this machine, as over a
shared file system. Everything that runs on a host ends with the cluster.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

HEAD = "head"
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "sshd", "ssh-keygen", "ip", "unshare", "nsenter")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# As few services as SLURM allows: no accounting, no cgroups. KillWait and cred_expire are short, because tests wait for
# them; TmpFS must differ between slurmds of one machine, since PMIx keeps its sockets there.
SLURM_CONF = """\
ClusterName=virtual
SlurmctldHost={head}(10.77.0.100)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
PlugStackConfig={folder}/etc/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
KillWait=5
SlurmdTimeout={slurmd_timeout_s}
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-{hosts}] NodeAddr=10.77.0.[1-{hosts}] CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=10 PreemptMode=OFF
"""

SSH_CONFIG = """\
Host *
  IdentityFile {folder}/ssh/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/ssh/known_hosts
  StrictHostKeyChecking no
  LogLevel ERROR
  ServerAliveInterval 2
  ServerAliveCountMax 2
"""

SSHD_CONFIG = """\
HostKey {folder}/ssh/hostkey
AuthorizedKeysFile {folder}/ssh/id.pub
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
PrintMotd no
MaxStartups 100
"""


def why_not() -> str | None:
    """What this machine lacks for a cluster, as a sentence; None where one can be started."""
    if os.geteuid() != 0:
        return "a virtual cluster needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; tests/cluster/install_packages.sh installs them on Debian"
    probe = subprocess.run(["unshare", "-m", "-n", "-u", "true"], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else None


class VirtualCluster:
    """Hosts n1, n2, … with `cpus` CPUs each as SLURM counts them, and a head. State lies in `folder`."""

    def __init__(self, folder: Path, hosts: int, cpus: int, slurmd_timeout_s: int = 300) -> None:
        self.folder, self.cpus, self._slurmd_timeout_s = folder, cpus, slurmd_timeout_s
        self.hosts = [f"n{number + 1}" for number in range(hosts)]
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._services: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self._write_files()
        for host in [HEAD, *self.hosts]:
            # Holds the namespaces of the host open. The others join it there.
            words = ["unshare", "-m", "-n", "-u", "--propagation", "private", "sleep", "infinity"]
            self._holders[host] = subprocess.Popen(words, start_new_session=True)
        for host, holder in self._holders.items():
            _wait(functools.partial(_sleeps, holder.pid), f"namespaces of {host}")
            mounts = "mount --bind {0}/etc/hosts /etc/hosts; mount --bind {0}/etc/ssh_config /etc/ssh/ssh_config"
            self._shell(host, f"hostname {host}; ip link set lo up; {mounts.format(self.folder)}")
        self._shell(HEAD, "ip link add eth0 type bridge && ip link set eth0 up && ip addr add 10.77.0.100/24 dev eth0")
        for number, host in enumerate(self.hosts, 1):
            pair = f"ip link add to-{host} type veth peer name eth0 netns {self._holders[host].pid}"
            self._shell(HEAD, f"{pair} && ip link set to-{host} master eth0 up")
            self._shell(host, f"ip addr add 10.77.0.{number}/24 dev eth0 && ip link set eth0 up")
        for host in self.hosts:
            self._serve(f"sshd-{host}", host, "/usr/sbin/sshd", "-D", "-e", "-f", f"{self.folder}/etc/sshd_config")
        munge = f"{self.folder}/munge"
        options = [f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={self.folder}/run/munged.pid"]
        self._serve("munged", None, "munged", "-F", *options, f"--log-file={munge}/log", f"--seed-file={munge}/seed")
        _wait(lambda: Path(munge, "socket").exists(), "munged")
        conf = f"{self.folder}/etc/slurm.conf"
        self._serve("slurmctld", HEAD, "slurmctld", "-D", "-c", "-f", conf)
        _wait(lambda: "is UP" in self.run(HEAD, ["scontrol", "ping"]).stdout, "slurmctld")
        for host in self.hosts:
            self.start_slurmd(host)
        _wait(self.is_idle, "all hosts idle")

    def stop(self) -> None:
        """Cancels jobs, ends services, then whatever is left on the hosts."""
        if "slurmctld" in self._services:
            with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
                self.run(HEAD, ["scancel", "--signal=KILL", "--user=root"])
                self.run(HEAD, ["scancel", "--user=root"])
                _wait(lambda: not self.run(HEAD, ["squeue", "-h"]).stdout.strip(), "no jobs", 15)
        for name in sorted(self._services, key=lambda name: ("slurmd-", "sshd-", "slurm", "mung").index(_kind(name))):
            self._end(self._services.pop(name))
        for host in self._holders:
            for process in self.processes(host):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for holder in self._holders.values():
            self._end(holder)
        self._holders.clear()

    def command(self, host: str, words: Sequence[str], cwd: Path | str = "/") -> list[str]:
        """`words` as they are to be started here so that they run on a host."""
        inside = ["nsenter", "-t", str(self._holders[host].pid), "-n", "-u", "-m", f"--wd={cwd}"]
        return [*inside, "env", f"SLURM_CONF={self.folder}/etc/slurm.conf", *words]

    def run(
        self,
        host: str,
        words: Sequence[str],
        *,
        cwd: Path | str = "/",
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 30,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(host, words, cwd),
            env=None if environment is None else dict(environment),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )

    def processes(self, host: str) -> list[psutil.Process]:
        """What runs on a host, but for what keeps it up."""
        holder = self._holders[host].pid
        there, own = _network_of(holder), {holder} | {service.pid for service in self._services.values()}
        return [
            process for process in psutil.process_iter() if process.pid not in own and _network_of(process.pid) == there
        ]

    def ranks(self, host: str) -> list[psutil.Process]:
        """The processes on a host that train."""
        return [process for process in self.processes(host) if _is_rank(process)]

    def is_idle(self) -> bool:
        """No job, and every host ready for one."""
        states = self.run(HEAD, ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"]).stdout.split()
        return states == ["idle"] * len(self.hosts) and not self.run(HEAD, ["squeue", "-h"]).stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts, …"""
        said = self.run(HEAD, ["scontrol", "-o", "show", "job", number]).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def start_slurmd(self, host: str) -> None:
        for folder in ("tmp", "spool"):
            (self.folder / folder / host).mkdir(parents=True, exist_ok=True)
        self._serve(f"slurmd-{host}", host, "slurmd", "-D", "-f", f"{self.folder}/etc/slurm.conf")

    def lose(self, host: str) -> None:
        """The host is switched off: its link goes down, its processes are killed."""
        self.cut(host)
        self._services.pop(f"slurmd-{host}").kill()
        for process in self.processes(host):
            if process.name() not in ("sshd", "sleep"):
                process.kill()

    def cut(self, host: str) -> None:
        """Nothing passes between this host and the others any more."""
        self._shell(HEAD, f"ip link set to-{host} down")

    def mend(self, host: str) -> None:
        self._shell(HEAD, f"ip link set to-{host} up")

    @contextlib.contextmanager
    def slow(self, host: str, rate: str) -> Iterator[None]:
        """What is sent to this host passes at a rate, such as 2mbit, in the block."""
        self._shell(HEAD, f"tc qdisc add dev to-{host} root tbf rate {rate} burst 32kbit latency 400ms")
        try:
            yield
        finally:
            self._shell(HEAD, f"tc qdisc del dev to-{host} root")

    def _serve(self, name: str, host: str | None, *words: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            command = self.command(host, words) if host else list(words)
            self._services[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _shell(self, host: str, script: str) -> None:
        finished = self.run(host, ["sh", "-ec", script])
        if finished.returncode:
            raise RuntimeError(f"on {host}: {script}: {finished.stderr.strip()}")

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _write_files(self) -> None:
        for name in ("munge", "state", "spool", "log", "run", "ssh", "tmp", "etc"):
            (self.folder / name).mkdir(parents=True, mode=0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        for name in ("id", "hostkey"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "ssh" / name)]
            subprocess.run(words, check=True)
        addresses = {"localhost": "127.0.0.1", HEAD: "10.77.0.100"}
        addresses |= {host: f"10.77.0.{number}" for number, host in enumerate(self.hosts, 1)}
        slurm_conf = SLURM_CONF.format(
            head=HEAD,
            folder=self.folder,
            hosts=len(self.hosts),
            cpus=self.cpus,
            slurmd_timeout_s=self._slurmd_timeout_s,
        )
        for name, text in {
            "hosts": "".join(f"{address} {host}\n" for host, address in addresses.items()),
            "ssh_config": SSH_CONFIG.format(folder=self.folder),
            "sshd_config": SSHD_CONFIG.format(folder=self.folder),
            "plugstack.conf": "",
            "slurm.conf": slurm_conf,
        }.items():
            (self.folder / "etc" / name).write_text(text)


@contextlib.contextmanager
def running(hosts: int, cpus: int, slurmd_timeout_s: int = 300) -> Iterator[VirtualCluster]:
    """A cluster for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="cluster-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # munged wants a way to its socket for everybody
        cluster = VirtualCluster(Path(folder), hosts, cpus, slurmd_timeout_s)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _kind(name: str) -> str:
    return name.partition("-")[0] + "-" if "-" in name else name[:5] if name == "slurmctld" else name[:4]


def _network_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return len(words) > 2 and Path(words[0]).name.startswith("python") and "horovod_train.main" in words[:5]


def _sleeps(pid: int) -> bool:
    return psutil.Process(pid).name() == "sleep"


def _wait(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"{what}: not there after {timeout_s} s")
        time.sleep(0.02)
