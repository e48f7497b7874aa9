"""Starts a command the way plain `srun` does on one host, where there is no SLURM: `as_srun.py TASKS [RANK …] -- CMD`.

A task learns its place from its step's variables and from nothing else, and these are they. With ranks named, only
those are started. Ends with the highest exit code, as srun does. The real srun is in tests/cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys

at = sys.argv.index("--")
size, *ranks = (int(word) for word in sys.argv[1:at])
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
    tasks.append(subprocess.Popen(sys.argv[at + 1 :], env={**os.environ, **step, **place}))
sys.exit(max(task.wait() for task in tasks))
