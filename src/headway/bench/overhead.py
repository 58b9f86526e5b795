"""Microseconds per call, beyond the kernel's own, where tensors are too small to cost anything.

The kernel is what PyTorch itself would run, called without anything around it.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import attention
from .cases import FORWARD, Case, Inputs, inputs
from .results import Result
from .timing import compare

BOTH = "forward + backward"
NOTHING = "an operator that does nothing"
Call = Callable[[], object]


def overhead(case: Case, device: str, repeats: int, tick: Call, compiled: bool) -> list[Result]:
    """Headway's and F.scaled_dot_product_attention's, forward, and forward with backward; compiled,
    also what an operator costs that does nothing: all of its time, since it has no kernel."""
    x = inputs(case, device)

    def headway(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, x.score, x.mask)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=x.mask is not None)

    functions = {"headway": headway, "sdpa": sdpa}
    if compiled:
        torch.compiler.reset()
        functions[NOTHING] = _nothing  # below this nobody gets
        functions = {name: torch.compile(f, fullgraph=True) for name, f in functions.items()}
    results: list[Result] = []
    for direction in (FORWARD, BOTH):
        training = direction == BOTH
        if training:
            functions.pop(NOTHING, None)  # and has no gradient
        calls: dict[str, Call] = {"kernel": kernel(x, training)}
        for name, function in functions.items():
            calls[name] = _call(function, x, training)
        with torch.set_grad_enabled(training):
            for call in calls.values():  # what compiles does so now
                call()
            # One sample is about 2 ms of calls: many samples are cheap, and the noise wants them.
            times = compare(calls, 20 * repeats, device, tick)
        base = times.pop("kernel").median
        for name, timing in times.items():
            less, note = (0.0, "") if name == NOTHING else (base, f"kernel {base * 1e6:.1f} µs")
            above = timing._replace(
                median=timing.median - less, low=timing.low - less, high=timing.high - less
            )
            result = Result(case.name, direction, name, note=note).timed(above, "µs")
            if name == "headway" and not training and case.most is not None:
                result = result.asked(f"<= {case.most:g} µs", above.median * 1e6 <= case.most)
            results.append(result)
    return results


_library = torch.library.Library("headway_bench", "DEF")
_library.define("nothing(Tensor q, Tensor k, Tensor v) -> Tensor")
_library.impl("nothing", lambda q, k, v: torch.empty_like(q), "CompositeExplicitAutograd")


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.headway_bench.nothing(q, k, v)


def _call(function: Callable[..., Tensor], x: Inputs, training: bool) -> Call:
    tensors: Sequence[Tensor] = (x.q, x.k, x.v)
    if not training:
        return lambda: function(*tensors)
    return lambda: torch.autograd.grad(function(*tensors), tensors, x.dout)


def kernel(x: Inputs, training: bool) -> Call:
    """PyTorch's flash kernels on these inputs, called directly."""
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    causal = x.mask is not None
    if q.device.type == "cuda":
        forward = torch.ops.aten._scaled_dot_product_flash_attention
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

        def on_gpu() -> object:
            out, lse, *rest = forward(q, k, v, 0.0, causal)
            if not training:
                return out
            cu_q, cu_k, max_q, max_k, seed, unused, _ = rest
            return backward(
                x.dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, seed, unused
            )

        return on_gpu
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def on_cpu() -> object:
        out, lse = forward(q, k, v, 0.0, causal)
        return backward(x.dout, q, k, v, out, lse, 0.0, causal) if training else out

    return on_cpu
