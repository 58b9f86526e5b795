"""Decoding over a cache, on a GPU: one query per row, against the memory that has to be read, and
writes of new keys and values to a cache.

Every contestant is captured in a CUDA graph, as serving engines run it, so that kernels are timed
and Python is not. What is read is the keys and values of every row, once; how fast memory can be
read is measured beside them, by a copy.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from headway.api import attention
from headway.inference import attention as over_cache
from headway.inference import write
from headway.mods import alibi, causal, padding, sliding_window, softcap

from .case import FORWARD, Case, Unavailable
from .results import Error, Result
from .timing import Tick, Timing, captured, compare

Call = Callable[[], Tensor]
OURS, COPY = "headway", "copy"
PAGES = 16, 64
WINDOW = 4096
COPIED = 1 << 30  # bytes
WRITES = 20  # in a graph
LIMIT = 0.02  # of out, next to the definition in float64, where values are normal numbers


def decode(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """Time Headway plain, with scores, masks and pages; F.sdpa and FlexAttention; and a copy."""
    q, k, v = _tensors(case, device)
    n = torch.full((case.b,), case.length, dtype=torch.int32, device=device)
    calls: dict[str, Call] = {OURS: lambda: over_cache(q, k, v, lengths=n)}
    plain = [OURS]
    if case.dv is None:
        peers, paged = _peers(q, k, v), _paged(q, k, v, n)
        calls |= _mods(case, q, k, v, n) | paged | peers
        plain += [*peers, *paged]
    source = torch.empty(COPIED // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls[COPY] = lambda: target.copy_(source)
    right = _definition(q, k, v)
    results, graphs = [], {}
    for name, call in calls.items():
        result = Result(case.name, FORWARD, name)
        try:
            with torch.inference_mode():
                graph, out = captured(call)
        except Exception as error:  # noqa: BLE001  (the table says it)
            results.append(result.not_run(Unavailable.because(error)))
            continue
        if name in plain:
            graph.replay()
            error = (out[0].double() - right).abs().max().item()
            result = result.checked([Error("out", error, LIMIT)])
            if result.verdict:
                results.append(result)
                continue
        graphs[name] = graph
    times = compare({name: graph.replay for name, graph in graphs.items()}, repeats, device, tick)
    copied = COPIED / times[COPY].median
    return results + [_judged(case, name, times, copied) for name in times]


def grows(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """Time Python per step, in microseconds, of a call that has one more key at every step."""
    q, k, v = _tensors(case, device)
    lengths = range(case.length - 300, case.length)
    calls = {
        "headway, one length": lambda n: attention(q, k, v, mask=causal(case.length - 1)),
        "headway": lambda n: attention(q, k[:, :, :n], v[:, :, :n], mask=causal(n - 1)),
        "sdpa": lambda n: F.scaled_dot_product_attention(
            q, k[:, :, :n], v[:, :, :n], enable_gqa=case.hq != case.hk
        ),
    }
    results = []
    with torch.inference_mode():
        for name, call in calls.items():
            call(lengths[0])
            torch.cuda.synchronize()
            samples = []
            for n in lengths:
                start = time.perf_counter()
                call(n)
                samples.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            results.append(Result(case.name, FORWARD, name).timed(Timing.of(samples), "µs"))
    fixed, ours, other = results
    limit = 1.2 * (fixed.median or 0.0)
    return [fixed, ours.asked("<= 1.2 of one length", (ours.median or 0.0) <= limit), other]


def writes(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """Time a write of `length` tokens to random slots of pages, where keys lie beside values, next
    to a copy of as many bytes."""
    dtype = getattr(torch, case.dtype)
    cache = torch.empty(case.length // 4 + 64, 2, 16, case.hk, case.d, dtype=dtype, device=device)
    k_cache, v_cache = cache.transpose(2, 3).unbind(1)
    k, v = torch.randn(2, case.length, case.hk, case.d, device=device).to(dtype)
    slots = torch.randperm(16 * len(cache), device=device)[: case.length]
    source = torch.cat([k, v])
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {
        OURS: lambda: write(k, v, k_cache, v_cache, slots), COPY: lambda: target.copy_(source)
    }  # fmt: skip
    with torch.inference_mode():
        graphs = {
            name: captured(lambda call=call: [call() for _ in range(WRITES)])[0]
            for name, call in calls.items()
        }
    times = compare({name: graph.replay for name, graph in graphs.items()}, repeats, device, tick)
    of_one = {
        name: Timing(t.median / WRITES, t.low / WRITES, t.high / WRITES, t.runs)
        for name, t in times.items()
    }
    place = slots // 16, slots % 16
    is_right = all(
        torch.equal(stored.transpose(1, 2)[place], new)
        for stored, new in ((k_cache, k), (v_cache, v))
    )
    results = []
    for name, timing in of_one.items():
        speed = 2 * source.nbytes / timing.median / 1e12
        result = Result(case.name, FORWARD, name).timed(timing, "µs")
        results.append(replace(result, note=f"{speed:.2f} TB/s read and written"))
    reached = of_one[OURS].median <= 5e-6 or of_one[COPY].takes(0.8, of_one[OURS])
    ours = results[0].checked([Error("cache", 0.0 if is_right else 1.0, 0.5)])
    return [ours if ours.verdict else ours.asked("5 µs, or 0.8x a copy", reached), *results[1:]]


def _tensors(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q of one position per row, and a full cache; in MLA v is the first columns of k."""
    generator = torch.Generator(device).manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator, device=device).to(
        getattr(torch, case.dtype)
    )
    q, k = random(case.b, case.hq, 1, case.d), random(case.b, case.hk, case.length, case.d)
    return q, k, random(*k.shape) if case.dv is None else k[..., : case.dv]


def _mods(case: Case, q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> dict[str, Call]:
    """Return calls with a score or a mask: `padding` keeps all keys, the window few."""
    slopes = torch.exp2(-torch.arange(1, case.hq + 1, device=q.device) * 0.25)

    def user(score, b, h, q_idx, kv_idx):
        return 1.1 * score + slopes[h] * (kv_idx - q_idx)

    mods: dict[str, dict[str, Any]] = {
        "softcap": {"score": softcap(20.0)}, "alibi": {"score": alibi(slopes)},
        "user": {"score": user}, "causal": {"mask": causal()}, "padding": {"mask": padding(n)},
        "window": {"mask": causal() & sliding_window(WINDOW)},
    }  # fmt: skip
    call = partial(over_cache, q, k, v, lengths=n)
    return {f"{OURS}, {name}": partial(call, **mod) for name, mod in mods.items()}


def _paged(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> dict[str, Call]:
    """Return calls over the cache in shuffled pages."""
    calls: dict[str, Call] = {}
    b, hk, length, d = k.shape
    for page in PAGES:
        count = length // page
        order = torch.randperm(b * count, device=k.device)
        table = order.argsort().view(b, count).int()
        k_pages, v_pages = (
            x.view(b, hk, count, page, d).transpose(1, 2).reshape(-1, hk, page, d)[order]
            for x in (k, v)
        )
        calls[f"{OURS}, pages of {page}"] = partial(
            over_cache, q, k_pages, v_pages, lengths=n, page_table=table
        )
    return calls


def _peers(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    torch.compiler.reset()
    compiled, gqa = torch.compile(flex.flex_attention, dynamic=False), q.shape[1] != k.shape[1]
    return {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa),
        "flex": lambda: compiled(q, k, v, enable_gqa=gqa),
    }


def _definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return out of the first row, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x[0].double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    return ((q @ k.mT) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def _judged(case: Case, name: str, times: dict[str, Timing], copied: float) -> Result:
    """Return one line, with terabytes of the cache read per second and, for MLA, TFLOP/s."""
    timing, ours = times[name], times[OURS]
    # Bytes of all keys and values; an MLA latent is both.
    widths = case.d if case.dv is not None else 2 * case.d
    size = case.b * case.hk * case.length * widths * getattr(torch, case.dtype).itemsize
    result = Result(case.name, FORWARD, name).timed(timing, "µs")
    if name == COPY:
        return replace(result, note=f"{copied / 1e12:.2f} TB/s read and written")
    flops = 2 * case.b * case.hq * case.length * sum(case.widths) / timing.median
    note = f"{size / timing.median / 1e12:.2f} TB/s, {size / timing.median / copied:.0%} of a copy"
    if case.dv is not None:
        note += f", {flops / 1e12:.0f} TFLOP/s"
    result = replace(result, note=note, ratio=round(timing.median / ours.median, 4))
    peers = [times[peer] for peer in ("sdpa", "flex") if peer in times]
    if name == OURS and peers:
        return result.asked(">= 0.97x the best peer", min(peers).takes(0.97, ours))
    if name == OURS and case.dv is not None:
        reached = flops >= 450e12 if case.hq >= 64 else size / timing.median >= 2.4e12
        return result.asked("450 TFLOP/s" if case.hq >= 64 else "2.4 TB/s", reached)
    if name.startswith(f"{OURS}, pages of"):
        required = 0.97 if name.endswith("64") else 0.9
        return result.asked(f">= {required}x contiguous", ours.takes(required, timing))
    if name.startswith(f"{OURS}, "):
        return result.asked("<= 1.15 of plain", ours.takes(1 / 1.15, timing))
    return result
