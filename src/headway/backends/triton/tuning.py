"""The search for tile sizes on a card: every candidate is timed on real calls, the fastest wins."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime.errors import PTXASError

from ...errors import BackendRefused
from ...types import Grads, Spec
from ..base import Call
from ..gpu.products import bits_of
from . import launch
from .config import Config, key, kind_of, passes, pieces
from .plan import Plan, planned

NO_ROOM = (BackendRefused, PTXASError)  # of shared memory, or of registers
Timer = Callable[[Callable[[], object]], float]  # seconds of a call

# (queries, keys, warps) by kernel; each is tried with several numbers of pipeline stages. Sizes
# that lost at every width on an H200 are left out.
_HALF = {
    "forward": ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (128, 32, 8), (64, 32, 4)),
    "backward_q": ((64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 32, 8), (64, 32, 4)),
    "backward_kv": ((64, 64, 4), (64, 128, 8), (32, 128, 8), (64, 64, 8), (32, 64, 8), (32, 64, 4)),
    "backward_k": ((32, 128, 8), (64, 128, 8), (64, 64, 4), (32, 64, 4)),
    "backward_v": ((64, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 4)),
    "backward": ((64, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 8), (32, 64, 4)),
}  # fmt: skip
_SINGLE = ((32, 32, 4), (64, 32, 4), (32, 64, 4), (64, 32, 8), (64, 64, 8), (64, 64, 4),
           (32, 32, 2), (32, 32, 8), (16, 16, 4), (32, 16, 4))  # fmt: skip


def candidates(kernel: str, bits: int, d: int, dv: int) -> list[Config]:
    """The sizes worth trying: those whose accumulators, logits and gradients of logits fit 255
    registers per thread, and whose warps have 16 rows each, unless a width leaves no others."""
    found = []
    width, both = sum(pieces(dv)), sum(pieces(d)) + sum(pieces(dv))
    for m, n, warps in _HALF[kernel] if bits == 16 else _SINGLE:
        held = {
            "forward": m * width,
            "backward_q": m * (both - width),
            "backward_k": n * (both - width),
            "backward_v": n * width,
        }.get(kernel, n * both)
        few = kernel in ("forward", "backward_v")
        logits = (1.5 if few else 2.5) * m * n if bits == 16 else m * n
        if (held + logits) / (32 * warps) >= 224:
            continue
        rows = m if kernel in ("forward", "backward_q") else n
        if bits == 16 and rows < 16 * warps and both <= 320:
            continue
        edges = (0, 32) if kernel == "backward_kv" and bits == 16 and m > 32 else (0,)
        stages = (2, 3) if bits == 16 else (1, 2)
        found += [Config(m, n, warps, s, edge) for s in stages for edge in edges]
    return found


@dataclass(frozen=True)
class Problem:
    """A call to tune on."""

    spec: Spec
    call: Call
    dout: Tensor

    def prepared(self) -> "Prepared":
        """The problem with the results of its forward, which a backward needs."""
        out, lse, *_ = launch.forward(self.spec, self.call)
        return Prepared(self, out, lse)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels to tune, in order."""
        q, v = self.call.q, self.call.v
        return "forward", *passes(bits_of(q.dtype), q.shape[3], v.shape[3]), "backward"

    def key(self, kernel: str) -> str:
        """The key of a kernel's tile sizes."""
        q, v = self.call.q, self.call.v
        kind = kind_of(self.spec, self.call)
        return key(kernel, bits_of(q.dtype), q.shape[3], v.shape[3], kind)


class Prepared(NamedTuple):
    """A problem with the results of its forward."""

    problem: Problem
    out: Tensor
    lse: Tensor

    def run(self, kernel: str) -> Callable[[], Any]:
        """A call that launches a kernel, and as little else as possible."""
        problem = self.problem
        if kernel == "forward":
            return lambda: launch.forward(problem.spec, problem.call)
        plan = self.plan(kernel)

        def backward() -> Grads:
            plan.one_pass = kernel == "backward"
            return launch.backward(
                problem.spec, problem.call, self.out, self.lse, problem.dout, None,
                (False,) * problem.spec.score_tensors,
            )  # fmt: skip

        return backward

    def plan(self, kernel: str) -> Plan:
        """The plan that those calls use."""
        problem = self.problem
        matrices = (*problem.call[:3], problem.dout) if kernel != "forward" else problem.call[:3]
        return planned(problem.spec, problem.call, (), *matrices)

    def take(self, kernel: str, how: Config) -> None:
        """Launch a kernel with these sizes from now on."""
        launch.LAUNCHERS[kernel](self.plan(kernel)).take(how)


class Trial(NamedTuple):
    """One candidate; `seconds` None if it does not fit the card."""

    kernel: str
    how: Config
    seconds: float | None


def trials(
    problem: Problem, timer: Timer, kernels: tuple[str, ...] | None = None
) -> Iterator[Trial]:
    """Time every candidate of every kernel; each kernel keeps its best while the next is timed."""
    ready = problem.prepared()
    q, v = problem.call.q, problem.call.v
    for kernel in problem.kernels if kernels is None else kernels:
        best: tuple[float, Config] | None = None
        for how in candidates(kernel, bits_of(q.dtype), q.shape[3], v.shape[3]):
            taken = None
            try:
                ready.take(kernel, how)
                run = ready.run(kernel)
                run()
                taken = timer(run)
            except NO_ROOM:
                pass
            if taken is not None and (best is None or taken < best[0]):
                best = taken, how
            yield Trial(kernel, how, taken)
        if best is not None:
            ready.take(kernel, best[1])


def winners(problem: Problem, tried: list[Trial]) -> dict[str, Config | bool]:
    """The fastest sizes of every kernel, and whether one backward kernel beats several, in the form
    that `saved.store` keeps."""
    found: dict[str, Config | bool] = {}
    times: dict[str, float] = {}
    for kernel in problem.kernels:
        timed = [(t.seconds, t.how) for t in tried if t.kernel == kernel and t.seconds is not None]
        if timed:
            times[kernel], found[problem.key(kernel)] = min(timed, key=lambda pair: pair[0])
    # The last of several kernels was timed together with the others at their best sizes.
    *_, last, one = problem.kernels
    if one in times and last in times:
        found[problem.key("one pass")] = times[one] < times[last]
    return found
