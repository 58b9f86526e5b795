"""Compute the largest logits of calls that run in PyTorch's flash kernels, which return none.

This takes one product and one reduction per block of pairs, a third of the forward's time. Given
lse, it skips the rows that cannot hold their head's maximum.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...types import Spec, acc_dtype, in_dtype
from ..base import Call
from .flash import is_causal
from .tile_plan import WorkItem, work_items
from .tiled import PairBlock, by_kv_head

_CAUSAL_QUERIES, _CAUSAL_KEYS = 256, 1024  # of a block of a causal mask
_BLOCK_PAIRS = 1 << 18  # of all heads: 1 MB of float32

# Keys, and upper bounds of their logits: inf where a pair is kept, -inf elsewhere; None: all are
# kept. They broadcast to (heads, keys, g, rows).
KeyBlocks = Iterator[tuple[slice, Tensor | None]]


class LogitRows(NamedTuple):
    """Some queries of some heads, numbered as in `WorkItem`, and the blocks of keys they see."""

    kv_heads: slice
    group_heads: slice
    queries: slice
    blocks: Callable[[], KeyBlocks]


def row_maxima(spec: Spec, call: Call, lse: Tensor | None = None) -> Tensor:
    """Return the largest S of every query's kept pairs, (b, hq, q_len), for a call without a score
    function.

    lse is an upper bound. With it, only the maxima of heads are exact: a row whose lse is not above
    its head's best cannot hold the maximum, and blocks of such rows stay at -inf.
    """
    (b, hq, q_len, d), hk = call.q.shape, call.k.shape[1]
    acc = acc_dtype(call.q.dtype)
    kv_len = call.k.shape[2]
    # All batch rows at once, where that saves many small products, or where long rows should be
    # contiguous; else the copy of transposed heads costs more than it saves.
    batch_rows = 1 if q_len > _CAUSAL_KEYS or hq * q_len * kv_len < _BLOCK_PAIRS else b
    heads_per_row = b * hk // max(1, batch_rows)
    q = in_dtype(call.q, acc).reshape(batch_rows, heads_per_row, hq // hk, q_len, d)
    k = in_dtype(call.k, acc).reshape(batch_rows, heads_per_row, kv_len, d)
    row_max = torch.full((b * hk, hq // hk, q_len), -math.inf, dtype=acc, device=q.device)
    if is_causal(spec, call):
        logit_rows = list(_causal_rows(b * hk, hq // hk, q_len, acc))
    else:
        logit_rows = list(_masked_rows(spec, call))
    upper_lse = None if lse is None else by_kv_head(lse, hk, acc)
    if upper_lse is not None:  # the largest bounds first
        upper_limit = lambda rows: upper_lse[rows.kv_heads, rows.group_heads, rows.queries].amax()
        logit_rows.sort(key=lambda rows: float(upper_limit(rows)), reverse=True)
    buffer = torch.empty(0, dtype=acc, device=q.device)
    for kv_heads, group_heads, queries, key_blocks in logit_rows:
        if upper_lse is not None:
            head_max = row_max[kv_heads, group_heads].amax(-1)
            if bool((upper_lse[kv_heads, group_heads, queries].amax(-1) <= head_max).all()):
                continue
        for keys, upper_bounds in key_blocks():
            # Keys by queries, reduced along columns: product and reduction are faster so.
            q_shape = group_heads.stop - group_heads.start, queries.stop - queries.start
            block_shape = keys.stop - keys.start, *q_shape
            pairs_per_head = math.prod(block_shape)
            heads_at_once = max(1, _BLOCK_PAIRS // pairs_per_head)
            if buffer.numel() < heads_at_once * pairs_per_head:
                buffer = torch.empty(heads_at_once * pairs_per_head, dtype=acc, device=q.device)
            for batch_row, row_heads in _split_by_batch_row(kv_heads, heads_per_row, heads_at_once):
                size = (row_heads.stop - row_heads.start) * pairs_per_head
                s = buffer[:size].view(-1, *block_shape)
                product = s.flatten(2)
                block_q = q[batch_row, row_heads, group_heads, queries].flatten(1, 2)
                torch.baddbmm(
                    product, k[batch_row, row_heads, keys], block_q.mT,
                    beta=0, alpha=spec.scale, out=product,
                )  # fmt: skip
                first_head = batch_row * heads_per_row
                flat_heads = slice(first_head + row_heads.start, first_head + row_heads.stop)
                block_max = row_max[flat_heads, group_heads, queries]
                bound_heads = slice(
                    flat_heads.start - kv_heads.start, flat_heads.stop - kv_heads.start
                )
                torch.maximum(block_max, _largest(s, upper_bounds, bound_heads), out=block_max)
    return row_max.view(b, hq, q_len)


def _split_by_batch_row(
    kv_heads: slice, heads_per_row: int, heads_at_once: int
) -> Iterator[tuple[int, slice]]:
    """Yield a batch row and some of its heads, at most `heads_at_once`, until all `kv_heads` are
    done."""
    head = kv_heads.start
    while head < kv_heads.stop:
        batch_row, first_in_row = divmod(head, heads_per_row)
        end_in_row = min(
            first_in_row + heads_at_once, heads_per_row, first_in_row + kv_heads.stop - head
        )
        yield batch_row, slice(first_in_row, end_in_row)
        head = batch_row * heads_per_row + end_in_row


def _largest(s: Tensor, upper_bounds: Tensor | None, heads: slice) -> Tensor:
    """Return the largest S of every query, (heads, g, rows). S is overwritten."""
    if upper_bounds is None:
        return s.amax(1)
    upper_bounds = upper_bounds[heads] if len(upper_bounds) > 1 else upper_bounds
    largest = torch.minimum(s, upper_bounds, out=s).amax(1)  # a masked fill takes six times as long
    if bool(largest.isnan().any()):  # it lets NaN of masked pairs through
        largest = s.masked_fill_(upper_bounds == -math.inf, -math.inf).amax(1)
    return largest


def _masked_rows(spec: Spec, call: Call) -> Iterator[LogitRows]:
    """Yield the rows of the work items of a call."""
    block = PairBlock(spec, call)
    for item in work_items(spec, call):
        yield LogitRows(
            item.kv_heads, item.group_heads, item.queries, partial(_masked_blocks, block, item)
        )


def _masked_blocks(block: PairBlock, item: WorkItem) -> KeyBlocks:
    """Yield the blocks of a work item."""
    for segment in item.segments:
        block.enter(item, segment)
        keep_mask = block.keep_mask()
        if keep_mask is not None:
            keep_mask = keep_mask[(None,) * (4 - keep_mask.dim())]  # it may be one bool for all
            keep_mask = (
                torch.where(keep_mask, math.inf, -math.inf).to(block.acc).permute(0, 3, 1, 2)
            )
        yield block.keys, keep_mask


def _causal_rows(
    kv_heads: int, group_heads: int, length: int, dtype: torch.dtype
) -> Iterator[LogitRows]:
    """Yield the rows of a causal mask, without tiles: in short calls tiles cost as much as
    products."""
    # In short calls most blocks are diagonal ones.
    block_queries = _CAUSAL_QUERIES if length > _CAUSAL_KEYS else _CAUSAL_QUERIES // 2
    for first_query in range(0, length, block_queries):
        queries = slice(first_query, min(first_query + block_queries, length))
        yield LogitRows(
            slice(0, kv_heads),
            slice(0, group_heads),
            queries,
            partial(_causal_blocks, queries, dtype),
        )


def _causal_blocks(queries: slice, dtype: torch.dtype) -> KeyBlocks:
    """Yield the blocks of some queries of a causal mask."""
    for first_key in range(0, queries.start, _CAUSAL_KEYS):
        yield slice(first_key, min(first_key + _CAUSAL_KEYS, queries.start)), None
    yield queries, _triangle(queries.stop - queries.start, dtype)


@lru_cache(maxsize=4)
def _triangle(size: int, dtype: torch.dtype) -> Tensor:
    """Return the upper bounds of a diagonal block, (1, keys, 1, queries)."""
    masked = torch.ones(size, size, dtype=torch.bool, device="cpu").tril(-1)[:, None]
    upper_bounds = torch.full((1, size, 1, size), math.inf, dtype=dtype, device="cpu")
    return upper_bounds.masked_fill(masked, -math.inf)
