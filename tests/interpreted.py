"""Scripts of `tools/` in Triton's interpreter, which is chosen when Triton is first imported: each runs
in a fork of one process that has imported it."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent / "tools"


@cache
def _server() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, TOOLS / "interpreter_server.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip


def interpreted(script: str, *arguments: object) -> dict[str, Any]:
    """Return what a script prints last."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print(
            json.dumps([str(TOOLS / script), *map(str, arguments)]), file=server.stdin, flush=True
        )
        status, printed, errors = json.loads(server.stdout.readline())
    except BaseException:  # its time is up: whoever asks next must not get this one's answer
        server.kill()
        _server.cache_clear()
        raise
    assert status == 0, errors
    return json.loads(printed.splitlines()[-1])
