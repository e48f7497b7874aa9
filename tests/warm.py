"""Runs `python -m horovod_train.main` for each line on standard input, in a fork of this process.

This process has loaded TensorFlow and Keras and has started no thread of theirs, so that a command costs what it does
and not the seconds of CPU time that they take to load. A line is JSON: words, and the files for what is printed. The
answer is the exit code.
"""

from __future__ import annotations

import json
import os
import sys

from horovod_train.main import main
from horovod_train.output import tensorflow_noise
from horovod_train.output.console import let_go


def run(words: list[str], stdout: str, stderr: str) -> int:
    for number, path in enumerate((os.devnull, stdout, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["horovod_train/main.py", *words]
    exit_code = main(words)
    let_go()
    return exit_code


if __name__ == "__main__":
    tensorflow_noise.load_tensorflow()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            sys.exit(run(**json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
