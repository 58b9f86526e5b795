"""Seconds of the first forward and backward of a process, as a user meets them.

Each contestant has fresh processes: one with empty caches of kernels, which afterwards makes a
first call of another kind; one with the caches that it has left. Python's byte code of all that
they import is there, as after `pip install`; or it is not, as in an image that was made without.
Headway's default has one more, in which its parts are timed.
"""

import atexit
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from .case import BOTH, FORWARD, Case
from .results import ChildFailed, Result, ask_process
from .timing import Tick, Timing

COLD, WARM, SECOND, STEP = "cold", "warm", "second kind", "training step"
PROCESS = Path(__file__).with_name("first_call_process.py")
NAMES = {"auto": "headway", "triton": "headway triton", "flex": "flex", "sdpa": "sdpa"}
# Seconds up to the end of `loss.backward()`, by what the caches hold, and of a model's first step.
MOST = {
    ("plain", WARM): 0.7, ("score", WARM): 1.0, ("bias", WARM): 1.0, ("llama", WARM): 3.0,
    ("plain", SECOND): 3.0, ("score", SECOND): 3.0, ("bias", SECOND): 3.0,
}  # fmt: skip


def measure(
    case: Case, device: str, repeats: int, tick: Tick, byte_code: bool = True
) -> list[Result]:
    """Return the rows of a case: `cold` and `warm`, forward and both; `second kind`, both. Of a
    Llama: its first training step, cold and warm."""
    others = ("sdpa",) if kind_of(case) == "llama" else ("triton", "flex") * (device == "cuda")
    results: list[Result] = []
    for contestant in ("auto", *others):
        folder = byte_code_of(case, device, contestant) if byte_code else ""
        with tempfile.TemporaryDirectory() as caches:
            for what in (COLD, WARM):
                seconds = ask(case, device, contestant, caches, folder)
                results += rows(case, what, NAMES[contestant], seconds)
                tick()
    if kind_of(case) == "llama":
        return judged(case, results, {})
    with tempfile.TemporaryDirectory() as caches:
        parts = ask(case, device, "auto", caches, folder, parts=True)
    return judged(case, results, parts)


def kind_of(case: Case) -> str:
    """Return plain, score, bias or llama: the last word of the case's name, if it is one."""
    suffix = case.name.rpartition("-")[2]
    return suffix if suffix in ("score", "bias", "llama") else "plain"


def byte_code_of(case: Case, device: str, contestant: str) -> str:
    """Return a folder with the byte code of all that such a process imports, made by one."""
    folder = _byte_code()
    with tempfile.TemporaryDirectory() as caches:
        ask(case, device, contestant, caches, folder)
    return folder


@cache
def _byte_code() -> str:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def ask(
    case: Case, device: str, contestant: str, caches: str, byte_code: str, parts: bool = False
) -> dict[str, Any]:
    """Return the seconds that one process measured, or its `error`. It reads and writes byte code
    in a folder; with "" it finds none and writes none."""
    shape = case.b, case.hq, case.length, case.d
    question = {
        "kind": kind_of(case), "contestant": contestant, "device": device, "shape": shape,
        "parts": parts,
    }  # fmt: skip
    folders = {
        name: str(Path(caches) / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    folders["PYTHONPYCACHEPREFIX"] = byte_code or str(Path(caches) / "no byte code")
    folders["PYTHONDONTWRITEBYTECODE"] = "" if byte_code else "1"
    try:
        return ask_process(["-P", str(PROCESS)], question, **folders)
    except ChildFailed as error:
        return {"error": str(error)}


def rows(case: Case, what: str, name: str, seconds: dict[str, Any]) -> list[Result]:
    """Return the rows of one process."""
    timed = {"forward": f"{what}, {FORWARD}", "both": f"{what}, {BOTH}"}
    timed |= {"step": f"{what}, {STEP}"} | ({"second": f"{SECOND}, {BOTH}"} if what == COLD else {})
    if "error" in seconds:
        direction = timed["step" if kind_of(case) == "llama" else "both"]
        return [Result(case.name, direction, name).not_run(seconds["error"][:200])]
    return [
        Result(case.name, direction, name).timed(Timing.of([seconds[part]]))
        for part, direction in timed.items()
        if part in seconds
    ]


def judged(case: Case, results: list[Result], parts: dict[str, Any]) -> list[Result]:
    """Return the rows with the targets of Headway's default, and the share of every part.

    With empty caches it takes at most what FlexAttention takes, in this run, with its imports.
    """
    flex = {r.direction: r.median for r in results if r.contestant == NAMES["flex"] and r.median}
    judged_results = []
    for result in results:
        what, _, part = result.direction.partition(", ")
        if result.contestant == NAMES["auto"] and result.median and part in (BOTH, STEP):
            if (limit := MOST.get((kind_of(case), what))) is not None:
                result = result.asked(f"<= {limit:.2f} s", result.median <= 1e3 * limit)
            elif what == COLD and result.direction in flex:
                result = result.asked("<= flex", result.median <= flex[result.direction])
            if what == COLD and parts:
                result = replace(result, note=describe_parts(parts))
        judged_results.append(result)
    return judged_results


def describe_parts(parts: dict[str, Any]) -> str:
    """Describe the parts in words. They overlap."""
    if "error" in parts:
        return f"parts: {parts['error'][:200]}"
    single = max((sum(kernel[2].values()) for kernel in parts["kernels"]), default=0.0)
    words = [f"longest kernel {single:.2f} s"]
    words += [f"{name} {seconds:.2f}" for name, seconds in parts["parts"].items()]
    for name, _, stages in parts["kernels"]:
        each = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
        words.append(f"{name}: {each or 'read'}")
    return "; ".join(words)
