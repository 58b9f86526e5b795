"""Explain what a call runs, and why: start here when a call is slow or refused."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Never

import torch
from torch import Tensor

from .arguments import leaves_of, shown
from .backends import NAMES, get, order, reasons_against, slower
from .backends.base import CapabilityKey, capability_key, split
from .blocks import BlockMask, cached_build, formula_of
from .distributed.context import Layouts
from .distributed.layout import Layout
from .keywords import unknown_keywords
from .mods import causal, many_reads, retraced
from .mods.base import show
from .mods.bounds.interval import why_elements
from .mods.graph import parse
from .mods.library.packed import PackedMask
from .packed import any_jagged, packed_request
from .resolve import prepare
from .row_statistics import asking_for, passes
from .types import Request, Spec, acc_dtype


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; print it.

    - `backend`: the one that would run; None if none can.
    - `reasons`: for every backend, why it does not run (empty: it could, at a lower priority).
    - `tiles`: numbers of full, partial and empty tiles of 128 x 128 pairs, over the batches and
      heads that the mask distinguishes; None without a mask.
    - `retraced`: why score or mask is traced at every call (1 to 3 ms), with the line whose reads
      cannot be proved unchanged; usually empty.
    - `compared`: how many values that score or mask read are compared at every call, and how long
      that takes, where they are more than 300; usually empty.
    - `elements`: the mask's ops, with their lines, that have no rule for a whole tile. Their tiles
      are evaluated pair by pair, which is right and slower; usually empty.
    - `kernels`: of a GPU backend, forward and (where something requires grad) backward, each with
      whether it is compiled, by this process or on disk (`headway.warm`).
    - `limits`: where that backend's results are not those of every other.
    - `passes`: of `entropy` and `sink_mass`, whether the forward computes them, or which passes
      beside the call do; empty if you ask for neither.
    - `over_ranks`: of a layout: how even it is, what it sends, and the plans; none without one.
    - `code`: what runs for the score and the mask.
    - `alignment`: where queries are fewer than keys: which positions they have, and what `causal()`
      means there; empty elsewhere.
    """

    backend: str | None
    reasons: dict[str, list[str]]
    call: str
    tiles: tuple[int, int, int] | None
    retraced: list[str]
    elements: list[str]
    limits: list[str]
    code: str
    kernels: list[str] = field(default_factory=list)
    over_ranks: list[str] = field(default_factory=list)
    alignment: str = ""
    compared: list[str] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            self.call,
            *[self.alignment] * bool(self.alignment),
            "",
            f"backend: {self.backend or 'none can run this call'}",
        ]
        for name, reasons in self.reasons.items():
            if name == self.backend:
                continue
            lines += [
                f"  not {name}: {reason}" for reason in reasons or ["it has a lower priority"]
            ]
        lines += [f"traced at every call: {why}" for why in self.retraced]
        lines += [
            f"compared at every call: {what}; let it capture the numbers and tensors that it reads "
            "(`w = model.window`), not an object that holds much more"
            for what in self.compared
        ]
        if self.tiles is not None:
            full, partial, empty = self.tiles
            share = empty / max(full + partial + empty, 1)
            lines.append(
                f"tiles: {full:,} full, {partial:,} partial, {empty:,} empty ({share:.1%} skipped)"
            )
        lines += [
            f"  evaluated pair by pair: {op} has no rule for a whole tile" for op in self.elements
        ]
        lines += [f"  kernel {kernel}" for kernel in self.kernels]
        lines += [f"  a limit: {limit}" for limit in self.limits]
        lines += [f"  {statistic}" for statistic in self.passes]
        lines += self.over_ranks
        if self.code:
            lines += ["", self.code]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    layout: Layout | tuple[Layout, Layout | None] | None = None,
    entropy: bool = False,
    sink_mass: bool = False,
    **unknown: Never,
) -> Explanation:
    """Return the backend that `attention` would run, the reasons against the others, the mask's
    live tiles, and the code of score and mask.

    Pass the same arguments as to `attention` or `attention_with_stats`: wrong ones raise the same
    errors. A call that no backend can run is explained, not raised. Nested tensors are explained
    as one packed row. A layout is explained without communication, so it needs no mesh.
    """
    if unknown:
        raise unknown_keywords(explain, unknown)
    if any_jagged(q, k, v):
        q, k, v, score, mask = packed_request(Request(q, k, v, score, mask, keys=layout))[:5]
    arguments = q, k, v, score, mask, scale, sink, dropout, seed, deterministic
    layouts = None if layout is None else Layouts.of(layout)
    wanted = {"entropy": entropy, "sink_mass": sink_mass}
    request = asking_for(Request(*arguments, backend=backend, keys=layouts), wanted)
    options = {"keys": layouts, "entropy": request.entropy}
    spec, call = prepare(*arguments, backend="reference", **options)
    key = CapabilityKey(*capability_key(call, spec.score_tensors))
    reasons = {name: reasons_against(name, spec, key) for name in NAMES}
    allowed = order(backend, spec, key)
    chosen_backend = next((name for name in allowed if not reasons[name]), None)
    for name in allowed:
        if name != chosen_backend and not reasons[name] and (why := slower(name, spec, key)):
            reasons[name] = [why]
    for name in set(NAMES) - set(allowed):
        reasons[name] = reasons[name] or [f"backend={backend!r} excludes it"]
    code, limits, kernels = "", [], []
    if chosen_backend is not None:
        limits = get(chosen_backend).limits(spec)
        spec, call = prepare(*arguments, backend=chosen_backend, **options)
        code = get(chosen_backend).code(spec, call)
        kernels = _kernels(spec, call)
    shapes = ", ".join(f"{n} {shown(x)}" for n, x in zip("qkv", (q, k, v), strict=True))
    mods_text = "".join(
        f", {n} = {show(m)}" for n, m in (("score", score), ("mask", mask)) if m is not None
    )
    elements = [] if spec.mask is None else why_elements(parse(spec.mask))
    lengths, over_ranks = (q.shape[2], k.shape[2]), []
    if layouts is not None:
        from .distributed.report import report

        lengths = layouts.lengths(k)
        custom_tiles = isinstance(mask, BlockMask) and mask.decided is None
        over_ranks = report(spec, call, *layouts, custom_tiles)
    dtype = acc_dtype(q.dtype)
    reasons_to_retrace = _of_functions(score, mask, lambda kind, mod: retraced(kind, mod, dtype))
    compared = _of_functions(score, mask, lambda kind, mod: many_reads(mod))
    tiles = _tiles(spec, call, lengths)
    return Explanation(
        chosen_backend, reasons, shapes + mods_text, tiles, reasons_to_retrace, elements, limits,
        code, kernels, over_ranks, _alignment(mask, *lengths), compared,
        passes(request, wanted, key.trained),
    )  # fmt: skip


def _alignment(mask: Any, q_len: int, kv_len: int) -> str:
    """Return how queries align with keys, where they are fewer; "" elsewhere."""
    if not 0 < q_len < kv_len or isinstance(mask, PackedMask):
        return ""
    end = causal(kv_len - q_len)
    if any(type(part) is causal and part == end for part in leaves_of(formula_of(mask))):
        return (
            f"{q_len} queries, {kv_len} keys: {end} aligns them at the bottom right, so query i "
            f"sees keys 0 to i + {kv_len - q_len}"
        )
    return (
        f"{q_len} queries, {kv_len} keys: aligned at the top left, so queries are at positions 0 "
        f"to {q_len - 1} and causal() lets query i see keys 0 to i; {end} aligns the last query "
        "with the last key (bottom right)"
    )


def _kernels(spec: Spec, call: Any) -> list[str]:
    """Return the states of the kernels of a GPU backend."""
    if spec.backend not in ("hopper", "triton"):
        return []
    from .backends.gpu.runtime.parallel_compile import compile_states

    with suppress(Exception):  # the call says what is wrong, or finds room
        return compile_states(spec, call, get(spec.backend).forward, get(spec.backend).backward)
    return []


def _of_functions(score: Any, mask: Any, say: Callable[[str, Callable], str | None]) -> list[str]:
    """Return what there is to say of the score and of the mask."""
    mods = ("score", score), ("mask", formula_of(mask))
    whys = [(kind, say(kind, mod)) for kind, mod in mods if mod is not None]
    return [f"the {kind} {why}" for kind, why in whys if why is not None]


def _tiles(spec: Spec, call: Any, lengths: tuple[int, int]) -> tuple[int, int, int] | None:
    if spec.mask is None:
        return None
    (b, h), (q_len, kv_len) = call.q.shape[:2], lengths
    tiles, tile = call.tiles, (128, 128)
    if tiles is not None and spec.tiles is not None:
        b, h, *tile = spec.tiles  # type: ignore[assignment]
    else:
        _, mask_captured = split(spec, call.captured)
        shape = (b, h, q_len, kv_len)
        tiles, b, h = cached_build(
            parse(spec.mask), mask_captured, shape, tile, call.q.device, call.coords
        )
    full, partial = (
        int(runs.count.sum(dtype=torch.int64)) for runs in (tiles.rows_full, tiles.rows_partial)
    )
    total = b * h * -(-q_len // tile[0]) * -(-kv_len // tile[1])
    return full, partial, total - full - partial
