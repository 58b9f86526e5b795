"""The search for tile sizes on a GPU: every candidate is timed on real calls, after the sizes that
are used now. The fastest wins; what it gains has to be more than a clock's noise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime.errors import PTXASError

from ...errors import BackendRefused
from ...types import Spec
from ..base import Call
from ..gpu.products import bits_of
from . import launch
from .config import Tiling, call_kind, passes, pieces, saved_key
from .plan import Plan, planned
from .saved import Winner

NO_ROOM = (BackendRefused, PTXASError)  # not enough shared memory, or registers
NOISE = 0.01  # of a time: what gains less does not win over the sizes that are used now
Timer = Callable[[Callable[[], object]], float]  # seconds of a call

# (queries, keys, warps) by kernel; each is tried with several numbers of pipeline stages. Sizes
# that lost at every width on an H200 are left out.
_HALF_PRECISION = {
    "forward": ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (128, 32, 8), (64, 32, 4)),
    "backward_q": ((64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 32, 8), (64, 32, 4)),
    "backward_kv": ((64, 64, 4), (64, 128, 8), (32, 128, 8), (64, 64, 8), (32, 64, 8), (32, 64, 4)),
    "backward_k": ((32, 128, 8), (64, 128, 8), (64, 64, 4), (32, 64, 4)),
    "backward_v": ((64, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 4)),
}  # fmt: skip
_FLOAT32 = ((32, 32, 4), (64, 32, 4), (32, 64, 4), (64, 32, 8), (64, 64, 8), (64, 64, 4),
           (32, 32, 2), (32, 32, 8), (16, 16, 4), (32, 16, 4))  # fmt: skip


def candidates(kernel: str, bits: int, d: int, dv: int) -> list[Tiling]:
    """Return the sizes worth trying.

    Their accumulators, logits and gradients of logits fit 255 registers per thread, and their warps
    have 16 rows each, unless a width leaves no others.
    """
    tilings = []
    d_columns, dv_columns = sum(pieces(d)), sum(pieces(dv))
    both = d_columns + dv_columns
    for m, n, warps in _HALF_PRECISION[kernel] if bits == 16 else _FLOAT32:
        accumulators = {
            "forward": m * dv_columns,
            "backward_q": m * d_columns,
            "backward_k": n * d_columns,
            "backward_v": n * dv_columns,
        }.get(kernel, n * both)
        copies = 1.5 if kernel in ("forward", "backward_v") else 2.5  # of P, and of dP
        logits = copies * m * n if bits == 16 else m * n
        if (accumulators + logits) / (32 * warps) >= 224:
            continue
        rows = m if kernel in ("forward", "backward_q") else n
        if bits == 16 and rows < 16 * warps and both <= 320:
            continue
        edges = (0, 32) if kernel == "backward_kv" and bits == 16 and m > 32 else (0,)
        stages = (2, 3) if bits == 16 else (1, 2)
        tilings += [Tiling(m, n, warps, s, edge) for s in stages for edge in edges]
    return tilings


@dataclass(frozen=True)
class Problem:
    """A call to tune on."""

    spec: Spec
    call: Call
    dout: Tensor

    def run_forward(self) -> "ProblemWithForward":
        """Return the problem with the results of its forward, which a backward needs."""
        out, lse, *_ = launch.forward(self.spec, self.call)
        return ProblemWithForward(self, out, lse)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the kernels to tune, in order."""
        q, v = self.call.q, self.call.v
        return "forward", *passes(bits_of(q.dtype), q.shape[3], v.shape[3])

    def key(self, kernel: str) -> str:
        """Return the key of a kernel's tile sizes."""
        q, v = self.call.q, self.call.v
        kind = call_kind(self.spec, self.call)
        return saved_key(kernel, bits_of(q.dtype), q.shape[3], v.shape[3], kind)


class ProblemWithForward(NamedTuple):
    """A problem with the results of its forward."""

    problem: Problem
    out: Tensor
    lse: Tensor

    def run(self, kernel: str) -> Callable[[], Any]:
        """Return a function that launches a kernel, and as little else as possible."""
        problem = self.problem
        if kernel == "forward":
            return lambda: launch.forward(problem.spec, problem.call)
        needs = (False,) * problem.spec.score_tensors
        return lambda: launch.backward(
            problem.spec, problem.call, self.out, self.lse, problem.dout, None, needs
        )

    def plan(self, kernel: str) -> Plan:
        """Return the plan that those calls use."""
        problem, call = self.problem, self.problem.call
        dout = () if kernel == "forward" else (problem.dout,)
        return planned(problem.spec, call, (), call.q, call.k, call.v, *dout)

    def tiling_in_use(self, kernel: str) -> Tiling:
        """Return the sizes that a call uses now: of the first row that fits the GPU."""
        self.run(kernel)()
        launcher = launch.LAUNCHERS[kernel](self.plan(kernel))
        return launcher.candidates[launcher.tiled.choice]

    def use_tiling(self, kernel: str, tiling: Tiling) -> None:
        """Launch a kernel with these sizes from now on."""
        launch.LAUNCHERS[kernel](self.plan(kernel)).use_tiling(tiling)


class Trial(NamedTuple):
    """One candidate and its time; None if it does not fit the GPU."""

    kernel: str
    tiling: Tiling
    seconds: float | None


def trials(
    problem: Problem, timer: Timer, kernels: tuple[str, ...] | None = None
) -> Iterator[Trial]:
    """Time every candidate of every kernel, after the sizes in use; each kernel keeps its best
    while the next is timed."""
    prepared = problem.run_forward()
    q, v = problem.call.q, problem.call.v
    for kernel in problem.kernels if kernels is None else kernels:
        in_use = prepared.tiling_in_use(kernel)
        others = candidates(kernel, bits_of(q.dtype), q.shape[3], v.shape[3])
        tried: list[Trial] = []
        for tiling in (in_use, *(other for other in others if other != in_use)):
            seconds = None
            try:
                prepared.use_tiling(kernel, tiling)
                run = prepared.run(kernel)
                run()
                seconds = timer(run)
            except NO_ROOM:
                pass
            tried.append(Trial(kernel, tiling, seconds))
            yield tried[-1]
        for winner in winners(problem, tried).values():
            prepared.use_tiling(kernel, winner.tiling)


def winners(problem: Problem, tried: list[Trial]) -> dict[str, Winner]:
    """Return the fastest sizes of every kernel, for `saved.store`."""
    best: dict[str, Winner] = {}
    for kernel, tiling, seconds in tried:
        if seconds is None:
            continue
        key, ms = problem.key(kernel), seconds * 1e3
        winner = best.setdefault(key, Winner(tiling, ms, ms))  # the first: the sizes in use
        if ms < min(winner.ms, winner.earlier_ms * (1 - NOISE)):
            best[key] = winner._replace(tiling=tiling, ms=ms)
    return best
