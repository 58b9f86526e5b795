"""Microseconds per call, beyond the kernel's own, where tensors are too small to cost anything.

The kernel is what PyTorch itself would run, called without anything around it. Where PyTorch has no
kernel for the call (a score, a mask that is not causal), it is Headway's own pair of forward and
backward, called with a spec and data that are known; and what comes before it is timed by itself:
checks, reading the functions, the call cache. On a GPU, `host` times Python until a call returns,
and `graph` replays a step from a CUDA graph.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from headway.api import attention
from headway.backends import get
from headway.mods import causal
from headway.resolve import resolve
from headway.types import Request

from .case import BOTH, FORWARD, Case, CaseInputs, make_inputs
from .results import Result
from .timing import Timing, captured, compare, repeat

NOTHING = "an operator that does nothing"
RESOLVE = "headway, resolve alone"
Call = Callable[[], object]


def overhead(case: Case, device: str, repeats: int, tick: Call, compiled: bool) -> list[Result]:
    """Time the overhead of Headway, and of F.scaled_dot_product_attention if it has the case.

    Both are timed forward, and forward with backward. Two more have no kernel, so that all their
    time counts: an operator that does nothing, compiled; and `resolve`, for calls that PyTorch has
    no kernel for.
    """
    inputs = make_inputs(case, device)
    score, mask = inputs.score, inputs.mask
    native = _is_native(inputs)
    functions: dict[str, Callable] = {"headway": lambda q, k, v: attention(q, k, v, score, mask)}
    if native:
        functions["sdpa"] = partial(
            F.scaled_dot_product_attention, is_causal=mask is not None
        )  # fmt: skip
    else:
        functions[RESOLVE] = lambda q, k, v: resolve(Request(q, k, v, score, mask))
    if compiled:
        torch.compiler.reset()
        functions[NOTHING] = _nothing  # below this nobody gets
        functions = {name: torch.compile(f, fullgraph=True) for name, f in functions.items()}
    results: list[Result] = []
    what, judged = ("kernel", "headway") if native else ("the pair", RESOLVE)
    for direction in (FORWARD, BOTH):
        training = direction == BOTH
        calls: dict[str, Call] = {"kernel": kernel(inputs, training)}
        for name, function in functions.items():
            if not training or name not in (NOTHING, RESOLVE):  # which have no gradient
                calls[name] = _call(function, inputs, training)
        with torch.set_grad_enabled(training):
            for call in calls.values():  # what compiles does so now
                call()
            # One sample is about 2 ms of calls: many samples are cheap, and the noise wants them.
            times = compare(calls, 20 * repeats, device, tick)
        base = times.pop("kernel")
        for name, timing in times.items():
            alone = name in (NOTHING, RESOLVE)
            less = Timing(0.0, 0.0, 0.0, 0) if alone else base
            note = "" if alone else f"{what} {base.median * 1e6:.1f} µs"
            above = Timing(
                timing.median - less.median, timing.low - less.high, timing.high - less.low,
                timing.runs,
            )  # fmt: skip
            result = Result(case.name, direction, name, note=note).timed(above, "µs")
            if name == judged and not training:
                result = result.at_most(case.most)
            results.append(result)
    return results


_library = torch.library.Library("headway_bench", "DEF")
_library.define("nothing(Tensor q, Tensor k, Tensor v) -> Tensor")
_library.impl("nothing", lambda q, k, v: torch.empty_like(q), "CompositeExplicitAutograd")


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.headway_bench.nothing(q, k, v)


def _call(function: Callable[..., Tensor], inputs: CaseInputs, training: bool) -> Call:
    tensors = inputs.q, inputs.k, inputs.v
    if not training:
        return lambda: function(*tensors)
    return lambda: torch.autograd.grad(function(*tensors), tensors, inputs.dout)


def _is_native(inputs: CaseInputs) -> bool:
    """Return True if PyTorch has a kernel for the call."""
    return inputs.score is None and (inputs.mask is None or inputs.mask == causal())


def kernel(inputs: CaseInputs, training: bool) -> Call:
    """Return a direct call of PyTorch's flash kernels, or of Headway's forward and backward."""
    return _of_pytorch(inputs, training) if _is_native(inputs) else _pair(inputs, training)


def _pair(inputs: CaseInputs, training: bool) -> Call:
    spec, call = resolve(Request(inputs.q, inputs.k, inputs.v, inputs.score, inputs.mask))
    backend = get(spec.backend)

    @torch.no_grad()
    def run() -> object:
        out, lse, *_ = backend.forward(spec, call)
        return backend.backward(spec, call, out, lse, inputs.dout, None, ()) if training else out

    return run


def _of_pytorch(inputs: CaseInputs, training: bool) -> Call:
    q, k, v = (t.detach() for t in (inputs.q, inputs.k, inputs.v))
    is_causal = inputs.mask is not None
    name = "_scaled_dot_product_flash_attention" + ("" if q.is_cuda else "_for_cpu")
    forward, backward = (getattr(torch.ops.aten, name + end) for end in ("", "_backward"))

    def run() -> object:
        out, lse, *rest = forward(q, k, v, 0.0, is_causal)
        if not training:
            return out
        lengths, seeds = rest[:4], rest[4:6]  # a GPU's
        return backward(inputs.dout, q, k, v, out, lse, *lengths, 0.0, is_causal, *seeds)

    return run


def host(case: Case, device: str, repeats: int, tick: Call) -> list[Result]:
    """Time Python until the call returns, in microseconds, with an idle GPU."""
    inputs = make_inputs(case, device)
    results = []
    for name, function in causal_functions(inputs).items():
        for direction in (FORWARD, BOTH):
            call = _call(function, inputs, direction == BOTH)
            result = Result(case.name, direction, name).timed(_host_time(call, repeats), "µs")
            if name == "headway" and direction == FORWARD:
                result = result.at_most(case.most)
            results.append(result)
    return results


def _host_time(call: Call, repeats: int, number: int = 50) -> Timing:
    for _ in range(5):
        call()
    samples = []
    for _ in range(3 * repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(number):
            call()
        samples.append((time.perf_counter() - start) / number)
    torch.cuda.synchronize()
    return Timing.of(samples)


def causal_functions(inputs: CaseInputs) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return causal attention of Headway, F.sdpa and FlexAttention."""
    n, mask = inputs.q.shape[2], inputs.mask
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    blocks = flex.create_block_mask(
        lambda b, h, i, j: i >= j, None, None, n, n, device=inputs.q.device
    )  # fmt: skip
    return {
        "headway": lambda q, k, v: attention(q, k, v, mask=mask),
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "flex": lambda q, k, v: compiled(q, k, v, block_mask=blocks),
    }


def graph(case: Case, device: str, repeats: int, tick: Call) -> list[Result]:
    """Capture forward and backward in a CUDA graph, replay it on new numbers, and compare."""
    inputs = make_inputs(case, device)

    def step() -> tuple[Tensor, ...]:
        out = inputs.headway()
        return out, *inputs.grads(out)

    replayed, results = captured(step)
    with torch.no_grad():
        inputs.q.copy_(torch.randn_like(inputs.q))
    replayed.replay()
    same = all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))
    timing = repeat(replayed.replay, device, 3 * repeats, number=20)
    result = Result(case.name, BOTH, "headway, replayed").timed(timing, "µs")
    return [result.asked("the same bits as without a graph", same)]
