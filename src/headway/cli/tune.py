"""`headway tune`."""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Literal

import torch
import tyro
from rich.console import Console

from ..errors import ArgumentError
from ..mods import causal, softcap
from ..resolve import prepare
from .options import check_positive

if TYPE_CHECKING:
    from ..backends.triton.tuning import Problem, Trial


@dataclass(frozen=True)
class Arguments:
    """Search for the fastest tiles of the Triton kernels on this GPU, and save them.

    They are saved in your cache folder for this model of GPU, and later calls use them. Several
    processes compile all candidates first. Then each one is timed alone, beside the tiles that are
    used now. The file names the GPU, the versions and the times: send it to the project, and
    others with this GPU get your tiles.
    """

    widths: tuple[str, ...] = ("128", "64", "192/128", "256")
    """Head dimensions; 192/128 means d = 192 and dv = 128."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of q, k and v. The two 16-bit dtypes share their tiles."""
    score: Literal["none", "softcap", "both"] = "both"
    """Tune calls without a score function (causal, and without a mask), with one, or both."""
    length: int = 8192
    """Number of queries and keys. The number of heads is 4,096 / width."""
    seconds: float = 600.0
    """Stop timing candidates after this many seconds, and save the best so far."""
    jobs: int = 8
    """Number of processes that compile."""


def main(arguments: list[str]) -> int:
    """Run `headway tune`; return exit status 0."""
    options = tyro.cli(Arguments, args=arguments, prog="headway tune")
    check_positive(options, "length", "jobs")
    if not torch.cuda.is_available():
        raise ArgumentError("PyTorch sees no GPU, whose tiles these are; see `headway doctor`")
    from ..backends.triton import saved
    from ..backends.triton.tuning import trials, winners

    console, start = Console(), time.monotonic()
    device = torch.device("cuda")
    name, about = saved.card(device), saved.about(device)
    console.print(f"tile sizes used now: {saved.measured_on(device)}", highlight=False)
    problems, width = _problems(options), None
    path = saved.store(name, {}, about)  # what cannot be written is said before the search
    for problem in problems:
        if problem[0] != width:  # all kinds of calls of a width together
            width = problem[0]
            with console.status(f"compiling for widths {width[3]}/{width[4]}"):
                _compile([other for other in problems if other[0] == width], options.jobs)
        call, timed_trials = _problem(*problem), []
        for trial in trials(call, _timer):
            timed_trials.append(trial)
            console.print(_line(problem, trial), highlight=False, soft_wrap=True)
            if time.monotonic() - start > options.seconds:
                break
        best = winners(call, timed_trials)
        path = saved.store(name, best, about)
        for key, winner in best.items():
            times = f"{winner.ms:.3f} ms, {winner.earlier_ms:.3f} before"
            console.print(f"best: {key}: {winner.tiling}, {times}", style="bold", highlight=False)
        if time.monotonic() - start > options.seconds:
            console.print(f"stopped after --seconds {options.seconds:g}", highlight=False)
            break
    console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return 0


def _problems(options: Arguments) -> list[tuple]:
    problems = []
    for width in options.widths:
        try:
            d, dv = map(int, width.split("/")) if "/" in width else (int(width), int(width))
        except ValueError:
            raise ArgumentError(
                f"--widths {width!r}: a number, or two as 192/128 for d and dv"
            ) from None
        heads = max(1, 32 * 128 // max(d, dv))
        shape = (1, heads, options.length, d, dv)
        if options.score != "softcap":
            problems += [(shape, options.dtype, mods) for mods in ("plain", "causal")]
        if options.score != "none":
            problems.append((shape, options.dtype, "softcap"))
    return problems


def _problem(shape: tuple[int, ...], dtype: str, mods: str) -> "Problem":
    from ..backends.triton.tuning import Problem

    b, heads, length, d, dv = shape
    q, k, v, dout = (
        torch.randn(b, heads, length, width, device="cuda").to(getattr(torch, dtype))
        for width in (d, d, dv, dv)
    )
    score = softcap(30.0) if mods == "softcap" else None
    mask = None if mods == "plain" else causal()
    return Problem(*prepare(q, k, v, score, mask, backend="triton"), dout)


def _compile(problems: list[tuple], jobs: int) -> None:
    """Fill Triton's cache on disk with every candidate, in several processes."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_part, [(problems, part, jobs) for part in range(jobs)]))


def _compile_part(share: tuple[list[tuple], int, int]) -> None:
    from ..backends.gpu.products import bits_of
    from ..backends.triton.tuning import NO_ROOM, candidates

    problems, part, parts = share
    for what in problems:
        problem = _problem(*what)
        ready = problem.run_forward()
        q, v = problem.call.q, problem.call.v
        every = [
            (kernel, how)
            for kernel in problem.kernels
            for how in candidates(kernel, bits_of(q.dtype), q.shape[3], v.shape[3])
        ]
        for kernel, how in every[part::parts]:
            try:
                ready.use_tiling(kernel, how)
                ready.run(kernel)()
            except NO_ROOM:
                continue
    torch.cuda.synchronize()


def _timer(call) -> float:
    """Return the best of a few samples: what disturbs a GPU only makes it slower."""
    call()
    calls = max(1, round(5e-3 / _seconds(call, 1)))
    return min(_seconds(call, calls) for _ in range(5))


def _seconds(call, calls: int) -> float:
    """Return the GPU's seconds per call, over several."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def _line(what: tuple, trial: "Trial") -> str:
    (_, _, _, d, dv), dtype, mods = what
    how = trial.tiling
    edge = f", {how.edge} at edges" if how.edge else ""
    duration = "no room" if trial.seconds is None else f"{trial.seconds * 1e3:9.3f} ms"
    return (
        f"{d}/{dv} {dtype} {mods}  {trial.kernel:12} "
        f"{how.m:4} x {how.n:<4} {how.warps} warps {how.stages} stages{edge}  {duration}"
    )
