"""What is measured on a GPU besides kernels: the host's time, graphs, a step."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from headway.api import attention

from .case import FORWARD, Case, Inputs, inputs
from .check import Truth
from .results import FAIL, PASS, WRONG, Result
from .timing import Timing, seconds

BOTH = "forward + backward"
Call = Callable[[], object]


def host(case: Case, device: str, repeats: int, tick: Call) -> list[Result]:
    """Microseconds from Python until the call returns; the GPU has nothing to wait for."""
    x = inputs(case, device)
    results = []
    for name, function in _functions(x).items():
        forward = lambda function=function: function(x.q, x.k, x.v)
        whole = lambda forward=forward: torch.autograd.grad(forward(), (x.q, x.k, x.v), x.dout)
        for direction, call in ((FORWARD, forward), (BOTH, whole)):
            result = Result(case.name, direction, name).timed(_host_time(call, repeats), "µs")
            if name == "headway" and direction == FORWARD and case.most is not None:
                assert result.median is not None
                result = result.asked(f"<= {case.most:g} µs", result.median <= case.most)
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


def _functions(x: Inputs) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Causal attention of three kinds."""
    n, mask = x.q.shape[2], x.mask
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    blocks = flex.create_block_mask(
        lambda b, h, i, j: i >= j, None, None, n, n, device=x.q.device
    )  # fmt: skip
    return {
        "headway": lambda q, k, v: attention(q, k, v, mask=mask),
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "flex": lambda q, k, v: compiled(q, k, v, block_mask=blocks),
    }


def graph(case: Case, device: str, repeats: int, tick: Call) -> list[Result]:
    """A CUDA graph of forward and backward: captured, replayed on new numbers, compared."""
    x = inputs(case, device)
    leaves = (x.q, x.k, x.v)

    def step() -> tuple[Tensor, ...]:
        out = x.headway()
        return out, *torch.autograd.grad(out, leaves, x.dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step()
    with torch.no_grad():
        x.q.copy_(torch.randn_like(x.q))
    captured.replay()
    same = all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))
    samples = [seconds(captured.replay, device, 20) for _ in range(3 * repeats)]
    result = Result(case.name, BOTH, "headway, replayed").timed(Timing.of(samples), "µs")
    return [result.asked("the same bits as without a graph", same)]


def long(case: Case, device: str, repeats: int, tick: Call) -> list[Result]:
    """One call of a million tokens, and of half as many: memory grows as the length does."""
    results, used = [], {}
    for length in (case.length // 2, case.length):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        part = replace(case, length=length)
        x = inputs(part, device)
        step = lambda x=x: torch.autograd.grad(x.headway(), (x.q, x.k, x.v), x.dout)
        step()  # compiles, and builds the block mask
        used[length] = torch.cuda.max_memory_allocated() / 1e6
        timing = Timing.of([seconds(step, device) for _ in range(3)])
        result = Result(case.name, BOTH, f"headway, {length} tokens").timed(timing)
        result = replace(result, note=f"{used[length]:.0f} MB at most")
        worst = max(Truth(part, x).errors(x.headway, True), key=lambda e: e.error / e.limit)
        verdict = PASS if worst.passed else WRONG
        results.append(replace(result, error=worst.error, limit=worst.limit, verdict=verdict))
        del x, step
    ratio = used[case.length] / used[case.length // 2]
    results.append(
        Result(
            case.name, "memory", "headway", "ratio", round(ratio, 3), target="<= 2.1",
            verdict=PASS if ratio <= 2.1 else FAIL,
        )
    )  # fmt: skip
    return results


def train(case: Case, device: str, repeats: int, tick: Call) -> list[Result]:
    """Tokens a second of one and the same compiled transformer with each attention."""
    x = inputs(case, device)
    results, speeds = [], {}
    for name, function in _functions(x).items():
        torch.manual_seed(0)
        model = nn.Sequential(*[_Block(case.hq, case.d, function) for _ in range(8)])
        model = model.to(device, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model = torch.compile(model)
        tokens = torch.randn(case.b, case.length, case.hq * case.d, device=device).bfloat16()

        def step(model=model, optimizer=optimizer, tokens=tokens) -> None:
            model(tokens).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        samples = [seconds(step, device) for _ in range(max(3, repeats))]
        speeds[name] = case.b * case.length / statistics.median(samples)
        result = Result(case.name, "step", name).timed(Timing.of(samples))
        results.append(replace(result, note=f"{speeds[name]:,.0f} tokens/s"))
        del model, optimizer, tokens
    return [replace(r, ratio=round(speeds["headway"] / speeds[r.contestant], 4)) for r in results]


class _Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, heads: int, d: int, function: Callable) -> None:
        super().__init__()
        width = heads * d
        self.heads, self.function = heads, function
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up, self.down = (
            nn.Linear(a * width, b * width, bias=False) for a, b in ((1, 4), (4, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        norm = lambda x: F.rms_norm(x, (x.shape[-1],))
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(norm(x)).chunk(3, -1)
        )
        x = x + self.out(self.function(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(norm(x))))
