"""The first call of a process, timed in it: run by `first_call.py`, as a file, with what it imports
and nothing else.

Standard input: {kind, contestant, device, shape: (b, h, length, d), parts}. Standard output:
seconds, from the call until the device has done its work: {forward, both, second}, `second` of the
first call of another kind afterwards; with `parts`, what of it was spent where, by name, and the
seconds of every kernel by stage of the compiler.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

import headway as hw


def score_of(kind: str, heads: int, length: int, device: str) -> tuple[Any, tuple]:
    """Return the score of a kind, and the tensors that it trains."""
    if kind == "plain":
        return None, ()
    if kind == "score":
        return lambda s, b, h, i, j: 1.1 * s + 0.01 * (j - i) * s.abs(), ()
    table = torch.zeros(heads, 2 * length - 1, device=device, requires_grad=True)
    return lambda s, b, h, i, j: s + table[h, j - i + (length - 1)], (table,)


def call_of(contestant: str, score: Any, length: int, device: str) -> Callable[..., torch.Tensor]:
    """Return a causal call of a contestant."""
    if contestant != "flex":
        return lambda q, k, v: hw.attention(q, k, v, score, hw.causal(), backend=contestant)
    from torch.nn.attention import flex_attention as flex

    def run(q: Any, k: Any, v: Any) -> Any:
        blocks = flex.create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=device
        )
        compiled: Any = torch.compile(flex.flex_attention, dynamic=False)
        return compiled(q, k, v, score_mod=score, block_mask=blocks)

    return run


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Time the first call, and one of another kind after it."""
    device, (b, h, n, d) = question["device"], question["shape"]
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    dtype = torch.bfloat16
    q, k, v = (
        torch.randn(b, h, n, d, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    warm_up = q @ q.mT[..., :8]
    torch.autograd.grad(warm_up, q, warm_up.detach())  # imports what autograd takes, sympy too
    score, learned_tensors = score_of(question["kind"], h, n, device)
    call = call_of(question["contestant"], score, n, device)
    capped = lambda s, b, h, i, j: 20.0 * (s / 20.0).tanh()
    second_call = call_of(question["contestant"], capped, n, device)
    seconds: dict[str, Any] = {}

    def step(call: Callable[..., torch.Tensor], leaves: tuple) -> tuple[float, float]:
        wait()
        start = time.perf_counter()
        out = call(q, k, v)
        wait()
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, out.detach())
        wait()
        return middle - start, time.perf_counter() - start

    with parts_in(seconds) if question["parts"] else nullcontext():
        seconds["forward"], seconds["both"] = step(call, (q, k, v, *learned_tensors))
    seconds["second"] = step(second_call, (q, k, v))[1]
    return seconds


@contextmanager
def parts_in(seconds: dict[str, Any]) -> Iterator[None]:
    """Time parts of Headway's first call, which overlap; Triton is imported before it."""
    from headway import resolve
    from headway.backends import first_use
    from headway.backends.gpu.runtime import cuda_launch, kernel_cache, parallel_compile

    build = import_module("headway.blocks.build")  # the package has a function of that name
    parts = seconds["parts"] = {}
    undo = []
    for module, name, part in (
        (resolve, "lower", "tracing"),
        (build, "build", "block masks"),
        (parallel_compile, "wait_for_triton", "Triton's start"),
        (parallel_compile, "_compile_and_load", "compiling"),
        (cuda_launch, "_load", "loading"),
        (first_use, "_verdict", "the check at first use"),
    ):
        original = getattr(module, name)

        def timed(*given: Any, original: Any = original, part: str = part, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*given, **named)
            finally:
                parts[part] = parts.get(part, 0.0) + time.perf_counter() - start

        setattr(module, name, timed)
        undo.append((module, name, original))
    yield
    for module, name, original in undo:
        setattr(module, name, original)
    seconds["kernels"] = [[x.name, x.seconds, x.stages] for x in kernel_cache.log]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(json.load(sys.stdin))))
