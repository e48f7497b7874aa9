"""The first day with a GPU: what works there and how fast, in order of value, each step with its own time limit.

python benchmarks/gpu_day.py --out OUT                 on a machine with an NVIDIA GPU
python benchmarks/gpu_day.py --cpu --out OUT           the same steps, tiny and on CPUs, to find faults of this script

Writes OUT/results.json after each step, and what its programs print to OUT/STEP.log. A step that fails or takes too
long is recorded, every process that it has started is killed, and the next one follows; after --minutes the rest is
left out. Started again with the same OUT it runs what is not "ok" yet. Where Horovod, as packed, may not run on the
GPU, what does without it comes first. gpu_day.sh brings the project to a machine without a network. The steps are in
rank_programs/gpu_steps.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, NoReturn

from rank_programs import gpu_steps
from rank_programs.gpu_steps import Day, Found, NotOk

from horovod_train.commands.cli import above_0
from horovod_train.errors import one_line
from horovod_train.host import sees_gpu
from horovod_train.output.files import Artifact, write_atomically

RESULTS = Artifact("the results of a day", r"results\.json")
MARK = "GPU_DAY_MARK"
"""Environment variable: which step a process belongs to."""
LEAST_S = 5.0
"""With less time left no step begins."""
LOG_LINES = 12
BUILT_FOR = Path(__file__).parents[1] / "wheels" / "built_for.json"
PACKAGES = re.compile(r"horovod_train|tensorflow|keras|horovod|numpy|nvidia[-_].*")


class Step(NamedTuple):
    name: str
    limit_s: float
    function: Callable[[Day], Found]
    needs_horovod: bool = True


STEPS = (
    Step("nccl", 120, gpu_steps.load_nccl),  # the first one reads CUDA's libraries from a cold disk
    Step("pin", 120, gpu_steps.pin),
    Step("doctor", 90, gpu_steps.ask_doctor),
    Step("digits", 120, gpu_steps.compare_digits),
    Step("fit", 120, gpu_steps.fit_with_drop_in),
    Step("mixed_float16", 90, partial(gpu_steps.train_mixed, precision="mixed_float16")),
    Step("mixed_bfloat16", 90, partial(gpu_steps.train_mixed, precision="mixed_bfloat16")),
    Step("two_ranks", 90, gpu_steps.start_two_ranks),
    Step("resume", 150, gpu_steps.kill_and_resume),
    Step("resnet_trainer", 120, gpu_steps.train_resnet),
    Step("resnet_fit", 120, gpu_steps.fit_resnet, needs_horovod=False),
    Step("resnet_loop", 120, gpu_steps.loop_resnet, needs_horovod=False),
    Step("resnet_jpeg", 180, partial(gpu_steps.train_resnet, jpeg=True)),
    Step("resnet_trainer_xla", 180, partial(gpu_steps.train_resnet, xla=True)),
    Step("resnet_fit_xla", 180, partial(gpu_steps.fit_resnet, xla=True), needs_horovod=False),
    Step("resnet_loop_xla", 180, partial(gpu_steps.loop_resnet, xla=True), needs_horovod=False),
    Step("save_100mb", 120, partial(gpu_steps.save, which=0)),
    Step("save_2gb", 240, partial(gpu_steps.save, which=1)),
    Step("profile", 90, gpu_steps.profile),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="folder for the results")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on CPUs: tries this script, measures nothing")
    parser.add_argument(
        "--only", action="append", choices=[step.name for step in STEPS], metavar="STEP", help="this step (again)"
    )
    parser.add_argument("--minutes", type=above_0, default=25.0, help="for all steps together; default %(default)g")
    parser.add_argument(
        "--patience", type=above_0, default=1.0, metavar="FACTOR", help="multiply each step's limit, on a busy machine"
    )
    arguments = parser.parse_args()
    if not (arguments.cpu or sees_gpu()):
        end("this machine has no NVIDIA GPU (/dev/nvidia0 is missing); --cpu tries the steps without one.")
    built_for = read_built_for()
    problem = "" if arguments.cpu or not built_for else misfit(built_for, ask_driver())
    chosen = [step for step in STEPS if step.name in (arguments.only or names_left(arguments.out, arguments.cpu))]
    if problem:
        print(f"warning: gpu_day: {problem} Steps without Horovod come first; others may fail.", file=sys.stderr)
        chosen.sort(key=lambda step: step.needs_horovod)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    steps = [step._replace(limit_s=step.limit_s * arguments.patience) for step in chosen]
    results = run_day(steps, arguments.out, cpu=arguments.cpu, minutes=arguments.minutes, misfit=problem)
    statuses = [results["steps"][step.name]["status"] for step in steps]
    sys.exit(int(any(status != "ok" and not status.startswith("skipped") for status in statuses)))


def end(text: str) -> NoReturn:
    print(f"error: gpu_day: {text}", file=sys.stderr)
    sys.exit(2)


def read_built_for() -> Found:
    """Return what pack has compiled for and with; {} in a checkout."""
    found: Found = json.loads(BUILT_FOR.read_text()) if BUILT_FOR.exists() else {}
    return found


def ask_driver() -> str:
    """Return a line "driver, compute capability" for each GPU; "" if the driver does not say."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def misfit(built_for: Found, said: str) -> str:
    """Return why Horovod as packed does not run on the GPUs of this machine; "" if it does. said: see ask_driver.

    The CUDA of TensorFlow's own wheel is an older one.

    Code for 8.6 runs on 8.6 and later 8.x; for the highest capability later GPUs compile it themselves.
    """
    numbers = sorted(built_for["compute_capabilities"])
    for driver, major, minor in re.findall(r"^(\d+)[\d.]*, (\d+)\.(\d+)$", said, re.MULTILINE):
        gpu = int(major + minor)
        if int(driver) < built_for["driver"]:
            return f"the driver is of branch {driver}; Horovod as packed needs {built_for['driver']} or later."
        if not any(each <= gpu and (each // 10 == gpu // 10 or each == numbers[-1]) for each in numbers):
            packed = ",".join(map(str, numbers))
            return f"the GPU is of compute capability {major}.{minor}, and Horovod was compiled for {packed}. " + (
                f"Pack again with HOROVOD_BUILD_CUDA_CC_LIST={gpu}."
                if gpu >= 75
                else "It takes a CUDA 12 toolkit: CUDA 13, of which pack is, compiles for 7.5 or later."
            )
    return ""


def names_left(out: Path, cpu: bool) -> list[str]:
    """Return the steps that are not "ok" yet in this folder."""
    found = read_results(out, cpu)["steps"]
    return [step.name for step in STEPS if found.get(step.name, {}).get("status") != "ok"]


def read_results(out: Path, cpu: bool) -> Found:
    """Return the results in the folder, or those of a day that begins."""
    file = out / "results.json"
    if file.exists():
        results: Found = json.loads(file.read_text())
        if results["cpu"] != cpu:
            end(f"{file} is of a day {'with' if results['cpu'] else 'without'} --cpu; give another --out.")
        return results
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout if shutil.which(query[0]) else ""
    return {
        "cpu": cpu,
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpus": gpus.splitlines(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            each.name: each.version for each in metadata.distributions() if PACKAGES.fullmatch(str(each.name))
        },
        "built_for": read_built_for(),
        "sizes": (gpu_steps.CPU if cpu else gpu_steps.GPU)._asdict(),
        "steps": {},
    }


def run_day(steps: Sequence[Step], out: Path, *, cpu: bool, minutes: float, misfit: str = "") -> Found:
    """Run the steps, each in processes of its own; return what OUT/results.json holds."""
    out.mkdir(parents=True, exist_ok=True)
    results, ends_at = read_results(out, cpu) | {"misfit": misfit}, time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True) as data:
        for step in steps:
            left_s = ends_at - time.monotonic()
            result = results["steps"].get(step.name, {"status": "not run: no time is left"})  # of an earlier start
            if left_s >= LEAST_S:
                with tempfile.TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True) as folder:
                    day = Day(cpu, Path(folder), Path(data), out / f"{step.name}.log")
                    result = run_step(step, day, min(step.limit_s, left_s))
            results["steps"][step.name] = result
            write_atomically(out / "results.json", json.dumps(results, indent=1) + "\n", RESULTS)
            print(f"{step.name:<20}{result.get('seconds', 0):>5.0f} s  {result['status']}", flush=True)
    return results


def run_step(step: Step, day: Day, limit_s: float) -> Found:
    """Run one step until it ends or its limit; kill whatever is left of it."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    child = multiprocessing.get_context("fork").Process(target=do_step, args=(step, day, mark))
    began = time.monotonic()
    child.start()
    try:
        child.join(limit_s)
        is_late = child.is_alive()
    finally:
        child.kill()
        child.join()
        kill_marked(mark)
    file = day.folder / "result.json"
    result: Found = {"status": f"failed: its process ended with {child.exitcode}"}
    if is_late:
        result = {"status": f"failed: not done after {limit_s:.0f} s"}
    elif file.exists():
        result = json.loads(file.read_text())
    result |= {"seconds": round(time.monotonic() - began, 1), "limit_s": round(limit_s, 1)}
    if result["status"].startswith("failed"):
        result["last_lines"] = day.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return result


def do_step(step: Step, day: Day, mark: str) -> None:
    """Run a step in this process, whose output goes to its log; programs that it starts carry the mark."""
    os.setsid()
    with day.log.open("wb", buffering=0) as log, open(os.devnull) as nothing:
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # or a step that is killed tells nothing
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
    os.environ.update({MARK: mark, "PYTHONPATH": path}, **(gpu_steps.HIDE_GPU if day.cpu else {}))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        result = {"status": "ok", "found": step.function(day)}
    except NotOk as outcome:
        result = {"status": str(outcome), "found": outcome.found}
    except Exception as error:
        traceback.print_exc()
        result = {"status": f"failed: {type(error).__name__}: {one_line(error)[:300]}"}
    (day.folder / "result.json").write_text(json.dumps(result))


def kill_marked(mark: str) -> None:
    """Kill the processes that have this mark in their environment: launchers put ranks into sessions of their own."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    main()
