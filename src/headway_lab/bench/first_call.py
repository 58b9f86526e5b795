"""Seconds of the first forward and backward of a process, as a user meets them.

Each contestant has fresh processes, with PyTorch and Headway imported and Triton not: one with
empty caches, which afterwards makes a first call of another kind; one with the caches that it has
left. Headway's default has one more, in which its parts are timed.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from .case import FORWARD, Case
from .machine import environment
from .results import NOT_RUN, Result
from .timing import Tick, Timing

BOTH = "forward + backward"
COLD, WARM, SECOND = "cold", "warm", "second kind"
PROCESS = Path(__file__).with_name("first_call_process.py")
NAMES = {"auto": "headway", "triton": "headway triton", "flex": "flex"}
# Seconds: with empty caches, with full ones, and of a second kind.
MOST = {"plain": (4.0, 0.5, 3.0), "score": (5.0, 0.6, 3.0)}


def measure(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """The rows of a case: `cold` and `warm`, forward and both; `second kind`, both."""
    results: list[Result] = []
    contestants = ("auto", *(name for name in ("triton", "flex") if device == "cuda"))
    for contestant in contestants:
        with tempfile.TemporaryDirectory() as caches:
            for what in (COLD, WARM):
                found = ask(case, device, contestant, caches)
                results += rows(case, what, NAMES[contestant], found)
                tick()
        tick()
    with tempfile.TemporaryDirectory() as caches:
        return judged(case, results, ask(case, device, "auto", caches, parts=True))


def kind_of(case: Case) -> str:
    """plain, score or bias: the last word of the case's name, where it is one of these."""
    last = case.name.rpartition("-")[2]
    return last if last in ("score", "bias") else "plain"


def ask(
    case: Case, device: str, contestant: str, caches: str, parts: bool = False
) -> dict[str, Any]:
    """What one process says; `error`, where it fails."""
    shape = case.b, case.hq, case.length, case.d
    asked = {
        "kind": kind_of(case), "contestant": contestant, "device": device, "shape": shape,
        "parts": parts,
    }  # fmt: skip
    folders = {
        name: str(Path(caches) / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    done = subprocess.run(
        [sys.executable, "-P", PROCESS], input=json.dumps(asked), capture_output=True, text=True,
        env=environment(**folders),
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing on standard error"]
        return {"error": last[0]}
    return json.loads(done.stdout.splitlines()[-1])


def rows(case: Case, what: str, name: str, found: dict[str, Any]) -> list[Result]:
    """The rows of one process."""
    if "error" in found:
        note = found["error"][:200]
        return [Result(case.name, f"{what}, {BOTH}", name, verdict=NOT_RUN, note=note)]
    timed = [(f"{what}, {FORWARD}", "forward"), (f"{what}, {BOTH}", "both")]
    timed += [(f"{SECOND}, {BOTH}", "second")] if what == COLD else []
    return [
        Result(case.name, direction, name).timed(Timing.of([found[part]]))
        for direction, part in timed
    ]


def judged(case: Case, results: list[Result], parts: dict[str, Any]) -> list[Result]:
    """The same rows, with what is asked of Headway's default, and with the share of every part."""
    single = max((sum(kernel[2].values()) for kernel in parts.get("kernels", ())), default=0.0)
    cold, warm, second = MOST["plain" if kind_of(case) == "plain" else "score"]
    cold = max(cold, 1.3 * single)
    most = {f"{COLD}, {BOTH}": cold, f"{WARM}, {BOTH}": warm, f"{SECOND}, {BOTH}": second}
    found = []
    for result in results:
        limit = most.get(result.direction)
        if result.contestant == NAMES["auto"] and limit is not None and result.median is not None:
            result = result.asked(f"<= {limit:.2f} s", result.median <= 1e3 * limit)
            if result.direction == f"{COLD}, {BOTH}":
                result = replace(result, note=told(parts, single))
        found.append(result)
    return found


def told(parts: dict[str, Any], single: float) -> str:
    """The parts, in words. They overlap."""
    if "error" in parts:
        return f"parts: {parts['error'][:200]}"
    words = [f"longest kernel {single:.2f} s"]
    words += [f"{name} {seconds:.2f}" for name, seconds in parts["parts"].items()]
    for name, _, stages in parts["kernels"]:
        each = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
        words.append(f"{name}: {each or 'read'}")
    return "; ".join(words)
