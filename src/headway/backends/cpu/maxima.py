"""The largest logits of calls that run in PyTorch's flash kernels, which do not return them.

One product and one reduction per block of pairs, a third of the forward's time. With lse, only rows
are computed that can hold their head's maximum.
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
from .tile_plan import Piece, pieces
from .tiled import Tile, by_kv_head

_ROWS, _KEYS = 256, 1024  # of a block of a causal mask
_PAIRS = 1 << 18  # of a block, all heads together: 1 MB of float32

# Keys, and upper bounds of their logits: inf where a pair is kept, -inf elsewhere; None: all are
# kept. They broadcast to (heads, keys, g, rows).
Blocks = Iterator[tuple[slice, Tensor | None]]


class Rows(NamedTuple):
    """Some queries of some heads, numbered as in `Piece`, and the blocks of keys they see."""

    n: slice
    g: slice
    i: slice
    blocks: Callable[[], Blocks]


def row_maxima(spec: Spec, call: Call, lse: Tensor | None = None) -> Tensor:
    """The largest S of every query's kept pairs, (b, hq, q_len), for a call without a score
    function.

    With lse, an upper bound, only as far as the maxima of heads need it: a row whose lse is not
    above its head's best cannot hold the maximum; blocks of such rows stay at -inf.
    """
    (b, hq, q_len, d), hk = call.q.shape, call.k.shape[1]
    acc = acc_dtype(call.q.dtype)
    kv_len = call.k.shape[2]
    # All batch rows at once, where that saves many small products, or where long rows should be
    # contiguous; else the copy of transposed heads costs more than it saves.
    rows = 1 if q_len > _KEYS or hq * q_len * kv_len < _PAIRS else b
    heads = b * hk // max(1, rows)
    q = in_dtype(call.q, acc).reshape(rows, heads, hq // hk, q_len, d)
    k = in_dtype(call.k, acc).reshape(rows, heads, kv_len, d)
    row_max = torch.full((b * hk, hq // hk, q_len), -math.inf, dtype=acc, device=q.device)
    if is_causal(spec, call):
        work = list(_causal_rows(b * hk, hq // hk, q_len, acc))
    else:
        work = list(_rows(spec, call))
    bound = None if lse is None else by_kv_head(lse, hk, acc)
    if bound is not None:  # the largest bounds first
        work.sort(key=lambda rows: float(bound[rows.n, rows.g, rows.i].amax()), reverse=True)
    buffer = torch.empty(0, dtype=acc, device=q.device)
    for n, g, i, blocks in work:
        if bound is not None:
            best = row_max[n, g].amax(-1)
            if bool((bound[n, g, i].amax(-1) <= best).all()):
                continue
        for keys, cap in blocks():
            # Keys by queries, reduced along columns: product and reduction are faster so.
            size = keys.stop - keys.start, g.stop - g.start, i.stop - i.start
            step = max(1, _PAIRS // math.prod(size))
            if buffer.numel() < step * math.prod(size):
                buffer = torch.empty(step * math.prod(size), dtype=acc, device=q.device)
            for row, some in _by_row(n, heads, step):
                s = buffer[: (some.stop - some.start) * math.prod(size)].view(-1, *size)
                product = s.flatten(2)
                torch.baddbmm(
                    product, k[row, some, keys], q[row, some, g, i].flatten(1, 2).mT,
                    beta=0, alpha=spec.scale, out=product,
                )  # fmt: skip
                at = slice(row * heads + some.start, row * heads + some.stop)
                m = row_max[at, g, i]
                here = slice(at.start - n.start, at.stop - n.start)
                torch.maximum(m, _largest(s, cap, here), out=m)
    return row_max.view(b, hq, q_len)


def _by_row(n: slice, heads: int, step: int) -> Iterator[tuple[int, slice]]:
    """The heads `n` by batch row, `heads` to a row, at most `step` at once."""
    at = n.start
    while at < n.stop:
        row, first = divmod(at, heads)
        stop = min(first + step, heads, first + n.stop - at)
        yield row, slice(first, stop)
        at = row * heads + stop


def _largest(s: Tensor, cap: Tensor | None, heads: slice) -> Tensor:
    """The largest S of every query, (heads, g, rows). S is overwritten."""
    if cap is None:
        return s.amax(1)
    cap = cap[heads] if len(cap) > 1 else cap
    largest = torch.minimum(s, cap, out=s).amax(1)  # six times faster than a masked fill
    if bool(largest.isnan().any()):  # but it also passes NaN of pairs that are not kept
        largest = s.masked_fill_(cap == -math.inf, -math.inf).amax(1)
    return largest


def _rows(spec: Spec, call: Call) -> Iterator[Rows]:
    tile = Tile(spec, call)
    for piece in pieces(spec, call):
        yield Rows(piece.n, piece.g, piece.i, partial(_blocks, tile, piece))


def _blocks(tile: Tile, piece: Piece) -> Blocks:
    for segment in piece.segments:
        tile.enter(piece, segment)
        kept = tile.kept()
        if kept is not None:
            kept = torch.where(kept, math.inf, -math.inf).to(tile.acc).permute(0, 3, 1, 2)
        yield tile.keys, kept


def _causal_rows(n: int, g: int, length: int, dtype: torch.dtype) -> Iterator[Rows]:
    """The rows of a causal mask, without tiles: in short calls tiles cost as much as products."""
    rows = _ROWS if length > _KEYS else _ROWS // 2  # in short calls most blocks are diagonal ones
    for first in range(0, length, rows):
        i = slice(first, min(first + rows, length))
        yield Rows(slice(0, n), slice(0, g), i, partial(_causal_blocks, i, dtype))


def _causal_blocks(i: slice, dtype: torch.dtype) -> Blocks:
    for first in range(0, i.start, _KEYS):
        yield slice(first, min(first + _KEYS, i.start)), None
    yield i, _triangle(i.stop - i.start, dtype)


@lru_cache(maxsize=4)
def _triangle(size: int, dtype: torch.dtype) -> Tensor:
    later = torch.ones(size, size, dtype=torch.bool, device="cpu").tril(-1)[:, None]
    upper = torch.full((1, size, 1, size), math.inf, dtype=dtype, device="cpu")
    return upper.masked_fill(later, -math.inf)
