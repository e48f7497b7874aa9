"""Starts a command as plain `srun` does on one host, without SLURM: `as_srun.py TASKS [RANK …] [bound] -- CMD`.

A task learns its place from its step's variables and from nothing else, and these are they. With ranks named, only
those are started. `bound` gives each task a core of its own, as SLURM's task/affinity does. Ends with the highest exit
code, as srun does. The real srun is in tests/cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys

at = sys.argv.index("--")
size, *ranks = (int(word) for word in sys.argv[1:at] if word != "bound")
cores = sorted(os.sched_getaffinity(0))
step = {
    "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", str(os.getpid())),
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": str(size),
    "SLURM_STEP_TASKS_PER_NODE": str(size),
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NODEID": "0",
}
tasks = []
for rank in ranks or range(size):
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    # A child keeps the cores that its parent had when it started it.
    os.sched_setaffinity(0, [cores[rank % len(cores)]] if "bound" in sys.argv[1:at] else cores)
    tasks.append(subprocess.Popen(sys.argv[at + 1 :], env={**os.environ, **step, **place}))
sys.exit(max(task.wait() for task in tasks))
