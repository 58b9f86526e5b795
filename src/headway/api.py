"""The public calls: check the arguments once, say what to compute, run the pair."""

from typing import Any, Never

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .arguments import check_captured, check_function, check_sizes, count_of, usable_device
from .blocks import (
    BlockMask,
    Provenance,
    Unbuilt,
    cached_build,
    depends_on_rows,
    lower_mask,
    unbuilt_mask,
    versions_of,
)
from .blocks.mask import tile_of
from .distributed.context import Layouts, tell_refusal
from .distributed.layout import Layout
from .errors import ArgumentError, CapturedIndexError, HeadwayError
from .keywords import unknown_keywords
from .mods import causal, lower_mod
from .mods.base import MaskFn, ScoreFn
from .packed import any_jagged, nested_attention, nested_attention_with_stats
from .row_statistics import asking_for, with_statistics
from .run import run, run_along, run_backward, run_cpu_native, run_out, with_place
from .surroundings import under_fake_tensors
from .types import (
    AttentionGradients,
    AttentionJVP,
    AttentionOutput,
    Captured,
    Request,
    inlined_or_eager,
    raise_under_compile,
)


def attention(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    v: Tensor,  # (b, hk, kv_len, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    layout: Layout | tuple[Layout, Layout | None] | None = None,
    **unknown: Never,
) -> Tensor:
    """softmax(score(scale · q kᵀ) where mask) v: exact attention for any score and mask.

    It has gradients for q, k, v, `sink`, and every tensor that `score` captures and that requires
    grad. Query head h reads key head `h // (hq // hk)`. A query that attends to no key gets 0.
    DTensors may be sharded along batch and heads (see `headway.sharded`). Nested tensors
    (`layout=torch.jagged`, heads before the ragged length) are not padded: b is the sequence, q_idx
    and kv_idx count from its start, and q may be ragged otherwise than k and v.

    **Arguments:**

    - `q`, `k`, `v`: `(b, hq, q_len, d)`, `(b, hk, kv_len, d)` and `(b, hk, kv_len, dv)`, float64,
      float32, bfloat16 or float16, of one dtype and device; any lengths and widths, `dv` may differ
      from `d`, and `hq` must be a multiple of `hk`. Computed in float32 (float64 for float64).
    - `score`: a function `(score, b, h, q_idx, kv_idx) -> score` in plain PyTorch, which gets the
      scaled logit, or a value of the library such as `alibi(8) >> softcap(30.0)`.
    - `mask`: a function `(b, h, q_idx, kv_idx) -> bool`, False to mask the pair out; a value of the
      library such as `causal() & sliding_window(1024)`; or a `BlockMask` from `block_mask`.
    - `scale`: multiplies `q kᵀ`, once. Default: `1/sqrt(d)`. 0.0 is honoured.
    - `sink`: `(hq,)`, a logit per query head that joins the softmax but has no value (GPT-OSS).
    - `dropout`: the probability p to drop a pair after the softmax. The rest is scaled by 1/(1-p).
      p is rounded to a multiple of 2^-15, but only 0 to 0 and only 1 to 1.
    - `seed`: the seed of the dropout, a number or a 0-d int64 tensor. Default: PyTorch's generator
      draws it.
    - `deterministic`: if True, gradients are bit-equal from run to run. So they are under
      `torch.use_deterministic_algorithms(True)`, with `warn_only` too.
    - `backend`: "auto", or a name from `headway.backends.NAMES`, which then never falls back.
    - `layout`: a `headway.distributed.Layout` if the sequence is split over ranks: it says which
      tokens q, k and v hold. Pass two layouts if queries and keys are split differently, and
      `(layout, None)` if every rank has all keys and values. Score, mask and captured tensors are
      those of the whole sequence, equal on all ranks. The first rank draws the seed if you pass
      none. Gradients of sinks and captured tensors, and of keys and values that every rank has, are
      partial sums: all-reduce them, as you do for weights.

    **Returns:** `(b, hq, q_len, dv)`, the dtype of q.

    **Raises:** `ArgumentError`, `ModError` (naming the line of the function), `CapturedIndexError`,
    `BackendRefused`.

    (Vaswani et al. 2017, arXiv 1706.03762; computed as in Dao et al. 2022, arXiv 2205.14135)
    """
    if unknown:
        raise tell_refusal(layout, unknown_keywords(attention, unknown))
    if type(q) is not Tensor and any_jagged(q, k, v):
        return nested_attention(Request(
            q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend, keys=layout,
        ))  # fmt: skip
    if type(mask) is causal and layout is None:
        mask = _or_none(mask, q, k)
    plainest = layout is None and score is None and sink is None and type(deterministic) is bool
    if plainest and (mask is None or type(mask) is causal):
        out = run_cpu_native(q, k, v, mask, scale, dropout, backend)
        if out is not None:
            return out
    request = Request(q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend)
    return run_out(request if layout is None else request._replace(keys=_layouts(layout)))


def attention_with_stats(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    v: Tensor,  # (b, hk, kv_len, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    layout: Layout | tuple[Layout, Layout | None] | None = None,
    entropy: bool = False,
    sink_mass: bool = False,
    **unknown: Never,
) -> AttentionOutput:
    """`attention`, and what training needs besides: the differentiable log-sum-exp of every query
    and the largest logit of every head (see `AttentionOutput`); with a `layout`, of the queries of
    all ranks. Of nested tensors out and lse are jagged as q is, and max_logit is `(sequences, hq)`.

    **Arguments:** as `attention`, and

    - `entropy`, `sink_mass`: whether to measure these of every query, of the weights before
      dropout. The forward computes the entropy. `sink_mass` is a forward with values of one
      column, or with a sink no pass. `explain` says which. They do not go with `layout` or
      DTensors.

    **Raises:** as `attention`.
    """
    if unknown:
        raise tell_refusal(layout, unknown_keywords(attention_with_stats, unknown))
    wanted = {"entropy": entropy, "sink_mass": sink_mass}
    if type(q) is not Tensor and any_jagged(q, k, v):
        return nested_attention_with_stats(Request(
            q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend, keys=layout,
        ), wanted)  # fmt: skip
    if type(mask) is causal and layout is None:
        mask = _or_none(mask, q, k)
    request = Request(
        q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend, True
    )
    request = request if layout is None else request._replace(keys=_layouts(layout))
    if entropy is sink_mass is False:
        return AttentionOutput(*run(request)[:3])
    request = asking_for(request, wanted)
    results = run(request)
    return with_statistics(request, AttentionOutput(*results[:3]), results, wanted)


def _layouts(layout: Any) -> Layouts:
    """Return the layouts of a call; the other ranks are told if this one refuses them."""
    try:
        return Layouts.of(layout)
    except BaseException as error:  # noqa: BLE001 raised below
        raise tell_refusal(layout, error)  # noqa: B904 the same error


def attention_backward(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    v: Tensor,  # (b, hk, kv_len, dv)
    out: Tensor,  # (b, hq, q_len, dv)
    lse: Tensor,  # (b, hq, q_len)
    dout: Tensor,  # (b, hq, q_len, dv)
    dlse: Tensor | None = None,  # (b, hq, q_len)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    entropy: Tensor | None = None,  # (b, hq, q_len)
    dentropy: Tensor | None = None,  # (b, hq, q_len)
    **unknown: Never,
) -> AttentionGradients:
    """Return the gradients of `attention_with_stats`, for a backward of your own.

    k and v may be a part of the keys. If `out` and `lse` are those of all keys (`merge`), the
    gradients of the parts add up to the exact gradients: rings train that way. Score and mask see
    each part from 0 on; write where it begins into them, as in `causal(first_query - first_key)`.

    **Arguments:** as `attention`, and

    - `out`, `lse`: results of the forward over all keys (and the sink).
    - `dout`, `dlse`: the gradients of both; None if nothing depends on lse.
    - `sink`: pass it with one part, since its gradient does not depend on the keys.
    - `dropout`, `seed`: of the forward over these keys. The seed is needed.
    - `entropy`, `dentropy`: the entropy over all keys (and the sink), and its gradient, if
      something depends on it. From those of parts it is the sum of w (entropy − log w), where w is
      exp(lse of the part − lse).

    **Returns:** an `AttentionGradients`, which is not differentiable.

    **Raises:** as `attention`.

    (Liu et al. 2023, Ring Attention, arXiv 2310.01889)
    """
    if unknown:
        raise unknown_keywords(attention_backward, unknown)
    request = Request(
        q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend, partial=True,
        trains=True,
    )  # fmt: skip
    return run_backward(request, out, lse, dout, dlse, entropy, dentropy)


def attention_jvp(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    v: Tensor,  # (b, hk, kv_len, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    tangents: dict[str | Tensor, Tensor],
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """`attention`, and how it moves along the tangents of its inputs, in one pass: what
    `torch.func.jvp` computes, for networks that pass a tangent beside each activation.

    **Arguments:** those of `attention`, and `tangents`: the tangent of every input that moves, of
    its shape, dtype and device. Its key is "q", "k", "v" or "sink", or a tensor that the score
    captures.

    **Returns:** out and its tangent. out is differentiable as that of `attention` is; a loss of the
    tangent is refused, so `detach()` the tangent.

    **Raises:** the errors of `attention`; `ArgumentError` for a tangent that fits no input.

    (Products of P and the tangent of the scores, in one pass: Lu and Song 2024, arXiv 2410.11081)
    """
    if unknown:
        raise unknown_keywords(attention_jvp, unknown)
    request = Request(
        q, k, v, score, _or_none(mask, q, k), scale, sink, dropout, seed, deterministic, backend,
        moves=True,
    )  # fmt: skip
    dual = run_along(request, tangents)
    return dual.out, dual.out_tangent


def attention_jvp_with_stats(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    v: Tensor,  # (b, hk, kv_len, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    tangents: dict[str | Tensor, Tensor],
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    **unknown: Never,
) -> AttentionJVP:
    """`attention_jvp`, and the log-sum-exp of every query with its tangent and the largest logit of
    every head (see `AttentionJVP`).

    The same arguments and errors as `attention_jvp`.
    """
    if unknown:
        raise unknown_keywords(attention_jvp_with_stats, unknown)
    request = Request(
        q, k, v, score, _or_none(mask, q, k), scale, sink, dropout, seed, deterministic, backend,
        True, moves=True,
    )  # fmt: skip
    dual = run_along(request, tangents)
    return AttentionJVP(dual.out, dual.lse, dual.max_logit, dual.out_tangent, dual.lse_tangent)


@inlined_or_eager
def block_mask(
    mask: MaskFn,
    b: int | None,
    h: int | None,
    q_len: int,
    kv_len: int,
    *,
    device: torch.device | str | None = None,
    tile: int | tuple[int, int] = (128, 128),
    **unknown: Never,
) -> BlockMask:
    """Compute once which tiles of a mask are empty, full or partial, to share them across calls.

    **Arguments:**

    - `mask`: a function or a value of the library, as for `attention`.
    - `b`, `h`: batch and query heads; 1, or None, broadcasts, for a mask that ignores them. (A call
      of more rows or heads refuses a block mask whose mask depends on them.)
    - `q_len`, `kv_len`: lengths; no multiple of the tile is needed.
    - `device`: of the result; that of the tensors that the mask captures, or the CPU, if None.
    - `tile`: queries and keys in a tile; a number stands for both.

    **Returns:** a `BlockMask`; its size follows the runs of live tiles, not `q_len * kv_len`. The
    tiles are cached by mask, sizes and device until a captured tensor is written to. See
    `clear_block_cache`, also for writes that go unnoticed.

    Under `torch.compile` calls in the same program take the mask, and find tiles of their own size.
    They refuse it, as eager calls do, if the program writes to a tensor that the mask captures
    between `block_mask` and the call. (Writes by `torch._foreach` functions and to `.data`, which
    the compiler does not count, are seen by the mask.) A block mask that leaves the program has its
    tiles built when they are first read.
    """
    if unknown:
        raise unknown_keywords(block_mask, unknown)
    try:
        return _block_mask(mask, (b, h, q_len, kv_len), device, tile)
    except CapturedIndexError as error:
        raise with_place(error, mask) from None
    except HeadwayError as error:
        raise_under_compile(error)
        raise


def _block_mask(mask: Any, sizes: tuple, device: Any, tile: Any) -> BlockMask:
    b, h, q_len, kv_len = sizes
    sizes = (
        count_of("b", 1 if b is None else b), count_of("h", 1 if h is None else h),
        count_of("q_len", q_len), count_of("kv_len", kv_len),
    )  # fmt: skip
    tile = tile_of(tile)
    check_function("mask", mask, sizes)
    check_sizes(mask, *sizes)
    if is_compiling():
        text, captured = lower_mask(mask)
        device = _device_of_tiles(captured, device)
        unbuilt = Unbuilt(depends_on_rows(text), device, versions_of(captured.tensors))
        rows = zip(sizes[:2], unbuilt.depends, strict=True)
        b, h = (size if depends else 1 for size, depends in rows)
        return unbuilt_mask(mask, (b, h, *sizes[2:]), tile, unbuilt)
    if under_fake_tensors():
        raise ArgumentError(
            "under FakeTensorMode no mask can be read, so a block mask has no tiles; pass the mask "
            "itself to attention, or build the block mask before you enter the mode"
        )
    graph, captured = lower_mod("mask", mask, torch.float32)
    device = _device_of_tiles(captured, device)
    provenance = Provenance(graph, captured.tensors)
    tiles, b, h = cached_build(graph, captured, sizes, tile, device)
    return BlockMask(mask, (b, h, *sizes[2:]), tile, tiles, provenance)


def _device_of_tiles(captured: Captured, device: Any) -> torch.device:
    if device is None:
        device = captured.tensors[0].device if captured.tensors else "cpu"
    device = usable_device(device)
    check_captured("mask", captured, device)
    return device


def _or_none(mask: Any, q: Any, k: Any) -> Any:
    """Return None for the `causal(n)` of a decoding step, whose one query sees every key, and any
    other mask unchanged."""
    if type(mask) is not causal or mask.offset <= 0 or is_compiling():
        return mask
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == 4 == k.dim()):
        return mask
    return None if q.shape[2] <= 1 and mask.offset >= k.shape[2] - 1 else mask
