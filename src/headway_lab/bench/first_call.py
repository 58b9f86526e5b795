"""Seconds of the first forward and backward of a process, as a user meets them.

Each contestant has fresh processes, with PyTorch and Headway imported and Triton not: one with
empty caches, which afterwards makes a first call of another kind; one with the caches that it has
left. Headway's default has one more, in which its parts are timed.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from .case import BOTH, FORWARD, Case
from .results import ChildFailed, Result, ask_process
from .timing import Tick, Timing

COLD, WARM, SECOND = "cold", "warm", "second kind"
PROCESS = Path(__file__).with_name("first_call_process.py")
NAMES = {"auto": "headway", "triton": "headway triton", "flex": "flex"}
# Seconds: with empty caches, with full ones, and of a second kind.
MOST = {"plain": (4.0, 0.5, 3.0), "score": (5.0, 0.6, 3.0)}


def measure(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """Return the rows of a case: `cold` and `warm`, forward and both; `second kind`, both."""
    results: list[Result] = []
    contestants = ("auto", *(name for name in ("triton", "flex") if device == "cuda"))
    for contestant in contestants:
        with tempfile.TemporaryDirectory() as caches:
            for what in (COLD, WARM):
                seconds = ask(case, device, contestant, caches)
                results += rows(case, what, NAMES[contestant], seconds)
                tick()
        tick()
    with tempfile.TemporaryDirectory() as caches:
        return judged(case, results, ask(case, device, "auto", caches, parts=True))


def kind_of(case: Case) -> str:
    """Return plain, score or bias: the last word of the case's name, if it is one of these."""
    suffix = case.name.rpartition("-")[2]
    return suffix if suffix in ("score", "bias") else "plain"


def ask(
    case: Case, device: str, contestant: str, caches: str, parts: bool = False
) -> dict[str, Any]:
    """Return the seconds that one process measured, or its `error`."""
    shape = case.b, case.hq, case.length, case.d
    question = {
        "kind": kind_of(case), "contestant": contestant, "device": device, "shape": shape,
        "parts": parts,
    }  # fmt: skip
    folders = {
        name: str(Path(caches) / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    try:
        return ask_process(["-P", str(PROCESS)], question, **folders)
    except ChildFailed as error:
        return {"error": str(error)}


def rows(case: Case, what: str, name: str, seconds: dict[str, Any]) -> list[Result]:
    """Return the rows of one process."""
    if "error" in seconds:
        return [Result(case.name, f"{what}, {BOTH}", name).not_run(seconds["error"][:200])]
    timed = [(f"{what}, {FORWARD}", "forward"), (f"{what}, {BOTH}", "both")]
    timed += [(f"{SECOND}, {BOTH}", "second")] if what == COLD else []
    return [
        Result(case.name, direction, name).timed(Timing.of([seconds[part]]))
        for direction, part in timed
    ]


def judged(case: Case, results: list[Result], parts: dict[str, Any]) -> list[Result]:
    """Return the rows with the targets of Headway's default, and the share of every part."""
    single = max((sum(kernel[2].values()) for kernel in parts.get("kernels", ())), default=0.0)
    cold, warm, second = MOST["plain" if kind_of(case) == "plain" else "score"]
    cold = max(cold, 1.3 * single)
    limits = {f"{COLD}, {BOTH}": cold, f"{WARM}, {BOTH}": warm, f"{SECOND}, {BOTH}": second}
    judged_results = []
    for result in results:
        limit = limits.get(result.direction)
        if result.contestant == NAMES["auto"] and limit is not None and result.median is not None:
            result = result.asked(f"<= {limit:.2f} s", result.median <= 1e3 * limit)
            if result.direction == f"{COLD}, {BOTH}":
                result = replace(result, note=describe_parts(parts, single))
        judged_results.append(result)
    return judged_results


def describe_parts(parts: dict[str, Any], single: float) -> str:
    """Describe the parts in words. They overlap."""
    if "error" in parts:
        return f"parts: {parts['error'][:200]}"
    words = [f"longest kernel {single:.2f} s"]
    words += [f"{name} {seconds:.2f}" for name, seconds in parts["parts"].items()]
    for name, _, stages in parts["kernels"]:
        each = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
        words.append(f"{name}: {each or 'read'}")
    return "; ".join(words)
