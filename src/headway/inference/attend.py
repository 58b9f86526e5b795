"""Attention over a cache: the calls of inference."""

from typing import Any, Never

import torch
from torch import Tensor

from ..arguments import check_dense, check_scale, count_of, shown
from ..blocks import BlockMask
from ..errors import ArgumentError
from ..keywords import unknown_keywords
from ..mods.base import MaskFn, ScoreFn
from ..run import run, run_out
from ..surroundings import requires_grad
from ..types import KV, AttentionOutput, Request
from .slots import check_mapped, is_expanded


def attention(
    q: Tensor,  # (b, hq, q_len, d) or, with cu_q, (1, hq, tokens, d)
    k: Tensor,  # (b, hk, capacity, d) or, with page_table, (pages, hk, page, d)
    v: Tensor,  # (b, hk, capacity, dv) or, with page_table, (pages, hk, page, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    lengths: Tensor,  # (b,) int32
    page_table: Tensor | None = None,  # (b, max_pages) int32
    cu_q: Tensor | None = None,  # (b + 1,) int32
    max_q: int | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    k_scale: Tensor | None = None,  # (), (hk,) or (b, hk)
    v_scale: Tensor | None = None,  # (), (hk,) or (b, hk)
    backend: str = "auto",
    out: Tensor | None = None,  # as the result
    **unknown: Never,
) -> Tensor:
    """softmax(score(scale · q kᵀ) where mask) v over a cache: `headway.attention` for decoding.

    Each row of the batch has `lengths[b]` keys, including the keys of its queries: append them to
    the cache first. Positions are global. kv_idx is the position of a key in its row, wherever it
    lies in memory, and q_idx is `lengths[b] - q_len + i`. The score and mask of training therefore
    work unchanged. There is no default mask: write `mask=causal()` for a causal model.

    Plans, kernels and masks do not depend on lengths, and the host never reads `lengths`. Only keys
    before `lengths[b]` are read. The result has no gradient.

    **Arguments:**

    - `q`: `(b, hq, q_len, d)`, the last `q_len` positions of every row. Or packed,
      `(1, hq, tokens, d)` with `cu_q`, if rows have different numbers of queries: decoding and
      chunks of prompts in one call. Tokens from `cu_q[-1]` on belong to no row and get 0.
    - `k`, `v`: a cache with room for `capacity` keys per row, `(b, hk, capacity, ·)`, or pages,
      `(pages, hk, page, ·)`. Any strides work: a layout with heads last is a view. The dtype is q's
      or float8 (e4m3fn or e5m2). `v` may be a view of k's first columns, which are then read once
      (MLA).
    - `lengths`: the number of keys per row, 0 to capacity. On the CPU a number outside of that
      range is an error. Elsewhere it is clamped.
    - `page_table`: the pages of every row, in order. Key j is on page `page_table[b, j // page]`.
      Entries after a row's last page may hold anything, and so may entries of keys that no query of
      the row attends to, such as -1 before a window. If a query attends to a key of an entry that
      names no page, that is an error on the CPU. Elsewhere the key is masked out.
    - `cu_q`, `max_q`: row r has the queries `cu_q[r]:cu_q[r + 1]`, at most `max_q` of them.
    - `score`, `mask`, `scale`, `sink`, `backend`: as in `headway.attention`. `causal(n)` with n > 0
      is refused, since positions are global. A block mask covers capacity × capacity positions. If
      its mask ignores q_idx, it may have one row of tiles: `top_k_blocks` with blocks of a page
      selects pages.
    - `k_scale`, `v_scale`: float tensors that multiply k and v: one for all, one per key head, or
      one per row and key head.
    - `out`: the result is copied to this tensor, of its shape, dtype and device and any strides,
      and the tensor is returned.

    **Returns:** `(b, hq, q_len, dv)`, or `(1, hq, tokens, dv)`, in the dtype of q. A query that
    attends to no key, for example in a row of length 0, gets 0.

    **Raises:** as `headway.attention`; `ArgumentError` for arguments that do not fit together, and
    for tensors that require grad while gradients are recorded.

    (Kwon et al. 2023, PagedAttention, arXiv 2309.06180; Dao et al. 2023, Flash-Decoding)
    """
    if unknown:
        raise unknown_keywords(attention, unknown)
    cache = cache_of(q, k, v, lengths, page_table, cu_q, max_q, k_scale, v_scale)
    request = Request(q, k, v, score, mask, scale, sink, backend=backend, keys=cache)
    if out is None:
        return run_out(request)
    _check_out(out, q, v)
    result = run_out(request)
    check_mapped("out", (out,), (result,))
    return out.copy_(result)


def attention_with_stats(
    q: Tensor,  # (b, hq, q_len, d) or, with cu_q, (1, hq, tokens, d)
    k: Tensor,  # (b, hk, capacity, d) or, with page_table, (pages, hk, page, d)
    v: Tensor,  # (b, hk, capacity, dv) or, with page_table, (pages, hk, page, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    lengths: Tensor,  # (b,) int32
    page_table: Tensor | None = None,  # (b, max_pages) int32
    cu_q: Tensor | None = None,  # (b + 1,) int32
    max_q: int | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    k_scale: Tensor | None = None,  # (), (hk,) or (b, hk)
    v_scale: Tensor | None = None,  # (), (hk,) or (b, hk)
    backend: str = "auto",
    **unknown: Never,
) -> AttentionOutput:
    """Return `attention`, the log-sum-exp of every query, `(b, hq, q_len)` or `(1, hq, tokens)`,
    and the largest logit of every row and head, `(b, hq)`: see `headway.AttentionOutput`.

    It takes the arguments of `attention` and raises its errors.
    """
    if unknown:
        raise unknown_keywords(attention_with_stats, unknown)
    cache = cache_of(q, k, v, lengths, page_table, cu_q, max_q, k_scale, v_scale)
    out, lse, max_logit, *_ = run(
        Request(q, k, v, score, mask, scale, sink, backend=backend, max_logit=True, keys=cache)
    )
    return AttentionOutput(out, lse, max_logit)


def cache_of(
    q: Any, k: Any, v: Any, lengths: Any, page_table: Any, cu_q: Any, max_q: Any, k_scale: Any,
    v_scale: Any,
) -> KV:  # fmt: skip
    """Return where the keys of every row lie. `check_cache` looks at it with q, k and v."""
    check_dense(q=q)
    if cu_q is None:
        if max_q is not None:
            raise ArgumentError(f"max_q={max_q!r} goes with cu_q; without it, q tells")
        max_q = q.shape[2] if isinstance(q, Tensor) and q.dim() == 4 else 1
    elif max_q is None:
        raise ArgumentError(
            "cu_q needs max_q, the most queries that a row has: the host does not read cu_q"
        )
    else:
        max_q = count_of("max_q", max_q)
    if k_scale is not None or v_scale is not None:
        k_scale = _scale("k_scale", k_scale, k, lengths)
        v_scale = _scale("v_scale", v_scale, k, lengths)
    return KV(lengths, page_table, cu_q, max_q, k_scale, v_scale)


def _scale(name: str, scale: Any, k: Any, lengths: Any) -> Tensor | None:
    """A scale as a view `(b, hk)`."""
    if scale is None or not isinstance(k, Tensor) or k.dim() != 4:
        return None
    if not isinstance(lengths, Tensor) or lengths.dim() != 1:
        return None
    shape = lengths.shape[0], k.shape[1]
    check_scale(name, scale, f"(), (hk,) or (b, hk), here {shape}", shape[1:], shape)
    if scale.device != k.device:
        raise ArgumentError(f"{name} is on {scale.device}, k on {k.device}; move it with .to()")
    return scale.float().expand(shape)


def _check_out(out: Any, q: Any, v: Any) -> None:
    """Check that a result of q and v can be written to a tensor."""
    if not (isinstance(q, Tensor) and isinstance(v, Tensor) and q.dim() == v.dim() == 4):
        return  # `check_cache` says so
    shape = (*q.shape[:3], v.shape[3])
    if not isinstance(out, Tensor) or tuple(out.shape) != shape or out.dtype != q.dtype:
        got = shown(out) if isinstance(out, Tensor) else type(out).__name__
        raise ArgumentError(f"out must be {shape} of q's dtype, {q.dtype}, got {got}")
    if out.device != q.device:
        raise ArgumentError(f"out is on {out.device}, q on {q.device}")
    if torch.is_grad_enabled() and requires_grad(out):
        raise ArgumentError(
            "out requires grad, but inference has no gradient; pass out.detach(), or call under "
            "torch.no_grad()"
        )
    if is_expanded(out):
        raise ArgumentError(
            f"out has strides {out.stride()}: several of its elements are one number; pass one "
            "that is not expanded"
        )
