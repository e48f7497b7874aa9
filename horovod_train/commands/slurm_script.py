"""The text of a SLURM batch script that starts a run, is asked in time to save, and puts itself in the queue again.

Does not choose the numbers in it; see slurm.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

LAUNCHES = ("srun", "srun-pmix", "mpirun", "horovodrun")


@dataclass(frozen=True)
class Job:
    """What is requested from SLURM, and how the ranks are started."""

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    time: str
    notice_s: int
    """Seconds before the end of the job at which it is asked to save."""

    launch: str = "srun"
    run: str = "python"
    """The interpreter, or a container's command line that ends with it."""

    partition: str | None = None
    account: str | None = None


def render(job: Job, *, head: Sequence[str], words: Sequence[str] | None, folder: str | None, venv: str) -> str:
    """Return the script. head: its first comment.

    words: what follows `python -m horovod_train.main`; None: what follows the script's name in the call of sbatch.
    folder: where to run; None: where sbatch was called. venv: the virtual environment; its folder.
    """
    asked = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus_per_task,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "output": "slurm-%x-%j.out",
        "open-mode": "append",
        "export": "NONE",
        "signal": f"B:USR1@{job.notice_s}",
    }
    lines = ["#!/bin/bash", *(f"# {line}".rstrip() for line in head)]
    lines += [f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None]
    lines += ["#SBATCH --requeue", ""]
    given = "" if words is None else f"set -- {shlex.join(words)}\n"
    where = '"$SLURM_SUBMIT_DIR"' if folder is None else shlex.quote(folder)
    filled = {
        "@LAUNCH@": job.launch,
        "@RUN@": shlex.quote(job.run),
        "@WORDS@\n": given,
        "@FOLDER@": where,
        "@VENV@": shlex.quote(venv),
    }
    # In one pass, because a path may contain text that looks like another placeholder.
    return "\n".join(lines) + re.sub("|".join(filled), lambda found: filled[found.group()], _BODY)


_BODY = r"""
# How the ranks are started:
#   srun        ranks find each other over TCP; needs neither ssh nor MPI
#   srun-pmix   over MPI, where SLURM and the MPI that Horovod was built with both have PMIx
#   mpirun      over MPI; Open MPI's, inside the job, without ssh
#   horovodrun  over ssh between the job's hosts. It passes no signal on: such a run saves at the end of its time only
LAUNCH=@LAUNCH@
# What runs on each rank. In a container: RUN='apptainer exec --nv horovod_train.sif python'
RUN=@RUN@
MAX_RESTARTS=100
@WORDS@
set -u
cd @FOLDER@ || exit
venv=@VENV@
venv=${VENV:-$venv}
if [[ -e $venv/bin/activate ]]; then
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
elif [[ $RUN == python ]]; then
    echo "no virtual environment at $venv: make install, or sbatch --export=VENV=/path …" >&2
    exit 2
fi
# --export=NONE kept the submitting shell out of this one; the ranks get this one's environment.
export SLURM_EXPORT_ENV=ALL
# srun does not take it from sbatch any more (SLURM 22.05).
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# For job arrays: seed=%a --output-dir runs/sweep-%a. Outside of one, %a is left as it is.
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"; fi

hosts() { srun --mpi=none hostname | sort | uniq -c | awk '{ printf "%s%s:%s", sep, $2, $1; sep = "," }'; }
case $LAUNCH in
    # The ranks end each other when one fails, with the exit code that says why; --wait is for what cannot be expected.
    srun)
        # What the ranks know each other by. srun hands it to them; other users cannot read it.
        HOROVOD_TRAIN_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
        export HOROVOD_TRAIN_TOKEN
        start=(srun --mpi=none --kill-on-bad-exit=0 --wait=60)
        ;;
    srun-pmix) start=(srun --mpi=pmix --kill-on-bad-exit=0 --wait=60) ;;
    mpirun) start=(mpirun --bind-to none -np "$SLURM_NTASKS") ;;
    horovodrun) start=(horovodrun --gloo -np "$SLURM_NTASKS" -H "$(hosts)") ;;
    *) echo "LAUNCH must be srun, srun-pmix, mpirun or horovodrun; received $LAUNCH" >&2; exit 2 ;;
esac

# SLURM sends this shell USR1 before the end of the job's time, and TERM before a preemption: the ranks are to save and
# to end with 75.
asked=0 began=$(date +%s) ranks=
# shellcheck disable=SC2317  # a trap calls it
pass_on() {
    asked=1
    if [[ $LAUNCH != horovodrun && -n $ranks ]]; then kill -USR1 "$ranks" 2> /dev/null; fi
}
trap pass_on USR1 TERM
read -ra run <<< "$RUN"
"${start[@]}" "${run[@]}" -m horovod_train.main "$@" &
ranks=$!
until # a signal ends a wait early
    wait "$ranks"
    code=$?
    ((code <= 128)) || ! kill -0 "$ranks" 2> /dev/null
do :; done
wait "$ranks"
code=$?

# horovodrun ends with 1 whatever its ranks ended with; rank 0 has left its code in the run directory.
own_code() {
    local dir
    dir=$("${run[@]}" -m horovod_train.main "$@" --print-config | sed -n 's/^output_dir: \(.*[^ ]\)  *#.*/\1/p')
    (($(stat -c %Y "$dir/logs/rank-0.end.json") >= began)) || return # of an earlier start
    sed -n 's/.*"exit_code": \([0-9]*\),.*/\1/p' "$dir/logs/rank-0.end.json"
}
if [[ $LAUNCH == horovodrun ]] && ((code)); then
    own=$(own_code "$@" 2> /dev/null)
    code=${own:-$code}
fi

# A task of an array goes by the array's number and its own: one task has a SLURM_JOB_ID that means the whole array.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
again() {
    if ((${SLURM_RESTART_COUNT:-0} >= MAX_RESTARTS)); then
        echo "not put in the queue again: it has been $MAX_RESTARTS times"
    elif scontrol -o show job "$job" | grep -q 'JobState=RUNNING'; then # neither cancelled nor preempted
        echo "put in the queue again: $1"
        scontrol requeue "$job"
    fi
}
# A preemption with grace time is told to the ranks alone.
preempted() { scontrol -o show job "$job" | grep -q 'PreemptTime=[0-9]'; }
answers() { timeout 60 srun --mpi=none --overlap --nodes="$SLURM_NNODES" --ntasks-per-node=1 true; }
case $code in
    0 | 2 | 86) ;; # done; or it would only come to the same again
    # 75: stopped on request, and saved. In the first minute, and not by us: a STOP file, which would do it again.
    75) if ((asked || SECONDS > 60)) || preempted; then again "exit code 75"; fi ;;
    *) if ((asked)) || ! answers; then again "exit code $code, asked to stop or a host does not answer"; fi ;;
esac
exit "$code"
"""
