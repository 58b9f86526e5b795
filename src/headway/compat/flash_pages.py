"""Keys of sequences wherever they lie: packed, in padded rows, or in pages."""

from typing import Any

import torch
from torch import Tensor

from ..packed import Side
from ..surroundings import requires_grad
from .errors import CallError, as_call_error
from .flash_attend import Results, attend_sequences, side_of, unpaged
from .flash_cache import attend_cache
from .flash_parts import FlashOptions, shown


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, q_side: Side, of_keys: tuple[Any, Any, Any], pages: Any,
    options: FlashOptions,
) -> Results:  # fmt: skip
    """Attend inside of sequences; with `pages`, k and v are `(pages, page, heads, width)`.

    - `of_keys`: the offsets of the keys, how many are used, and how many there are at most.
    """
    cu_k, used_k, longest = of_keys
    names = q_side.names
    if pages is None:
        return attend_sequences(q, k, v, q_side, side_of("k", k, *of_keys, names), options)
    used_k = _lengths(pages, k.shape[1], cu_k, used_k, q_side)
    if not _needs_copies(q, k, v, q_side, options):
        packed = q_side.rows is None
        out, lse, max_logit = attend_cache(
            q, k, v, options, used_k.to(torch.int32), pages.to(torch.int32),
            q_side.starts.to(torch.int32) if packed else None,
            (q_side.longest or q_side.tokens) if packed else None,
        )  # fmt: skip
        return Results(out, lse, None if max_logit is None else max_logit.amax(0))
    k, v = unpaged(k, pages, used_k), unpaged(v, pages, used_k)
    k_side = side_of("k", k, None, used_k, longest, names)
    return attend_sequences(q, k, v, q_side, k_side, options)


def _lengths(pages: Any, page: int, cu: Any, used: Any, q_side: Side) -> Tensor:
    """Return how many keys every sequence has in its pages: all, where nothing says so."""
    if not isinstance(pages, Tensor) or pages.dim() != 2 or pages.is_floating_point():
        raise CallError(f"the table of pages must be int32 (sequences, pages), got {shown(pages)}")
    if pages.device != q_side.device:
        raise CallError(f"the table of pages is on {pages.device}, q on {q_side.device}")
    rows = pages.shape[0]
    k_rows = rows if cu is None else None
    k_side = Side("k", rows * page, pages.device, cu, used, rows=k_rows, names=q_side.names)
    as_call_error(k_side.checked)
    if not rows == q_side.sequences == k_side.sequences:
        raise CallError(
            f"the table of pages has {rows} rows, but q has {q_side.sequences} sequences, and "
            f"{q_side.names.starts.format('k')} is {shown(cu)}"
        )
    if used is None:
        return pages.new_full((rows,), pages.shape[1] * page) if cu is None else cu.diff()
    return used


def _needs_copies(q: Tensor, k: Tensor, v: Tensor, q_side: Side, options: FlashOptions) -> bool:
    """Return whether pages have to be copied: a kernel over a cache has no gradient, no dropout,
    and positions that count from the first key."""
    inputs = q, k, v, options.sink, options.slopes
    trained = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and requires_grad(x) for x in inputs
    )
    functions = options.score is not None or options.mask is not None
    return trained or functions or options.dropout > 0 or q_side.lengths is not None
