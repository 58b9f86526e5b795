"""Run scripts in Triton's interpreter, each in a fork of this process: imports take longer than many.

Every line of standard input is [script, argument, ...]; the answer is a line, [status, what it printed,
its standard error]. `../interpreted.py` asks.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import torch._inductor.compile_fx

sys.path.insert(0, str(Path(__file__).parents[1]))

import checks  # noqa: F401
import triton  # noqa: F401  (on the CPU the backend is there for whom loads Triton)
from headway.backends import triton as backend  # noqa: F401


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if not child:
                os.dup2(printed.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os._exit(run(*json.loads(line)))
            _, status = os.waitpid(child, 0)
            texts = [file.seek(0) or file.read() for file in (printed, errors)]
        print(json.dumps([status, *texts]), file=answers, flush=True)


def run(script: str, *arguments: str) -> int:
    """Run a script as if it were started, and return its exit status."""
    sys.argv = [script, *arguments]
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:  # noqa: BLE001  (whoever asked is told)
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
