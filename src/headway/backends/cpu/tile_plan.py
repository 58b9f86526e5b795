"""The work items of a call on the CPU, sized for the caches.

A piece is some key/value heads (with the query heads that read them) times a block of queries; its
segments are the key ranges that it visits. Tiles of the block mask are joined into blocks of about
256 x 256 pairs, since each torch op has a fixed cost.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...blocks import TILE, Runs, Tiles, cached_build
from ...types import Spec
from ..base import Call, graphs, split

if TYPE_CHECKING:
    import numpy as np

_ROWS = 256  # least queries of a block, if the call has as many
_PAIRS = 1 << 20  # pairs of a block: 4 MB of float32, the caches of two cores


class Segment(NamedTuple):
    """Keys `start:stop`. In a full one every pair is kept, and the mask is not evaluated."""

    start: int
    stop: int
    full: bool


@dataclass(frozen=True)
class Piece:
    """Key/value heads `n` (numbered b * hk + hk_index), query heads `g` of each, queries `i`."""

    n: slice
    g: slice
    i: slice
    segments: tuple[Segment, ...]


def pieces(spec: Spec, call: Call, *, whole_rows: bool = False) -> Iterator[Piece]:
    """The pieces of a call. Every query is in exactly one.

    - `whole_rows`: for a kernel that does its own blocking: all heads that share their tiles at
      once, and segments of any length.
    """
    b, hq, q_len, _ = call.q.shape
    hk, kv_len = call.k.shape[1:3]
    if not b * hq * q_len:
        return
    g = hq // hk
    tiles, mask_b, mask_h, tile = _tiles(spec, call)
    rows = _ROWS if tile is None else tile[0] * max(1, _ROWS // tile[0])
    # Heads that share their tiles work together, as many as fit.
    span_n = (b if mask_b == 1 else 1) * hk if mask_h == 1 else 1
    span_g = g if mask_h == 1 else 1
    if whole_rows:
        rows, cols, at_once = (rows if tile else q_len), kv_len, span_n
    else:
        many = span_n * span_g * min(rows, q_len)
        cols = min(4 * _ROWS, max(_ROWS, _PAIRS // many))
        at_once = max(1, _PAIRS // (span_g * min(rows, q_len) * max(1, min(cols, kv_len))))
    for i0 in range(0, q_len, rows):
        i = slice(i0, min(i0 + rows, q_len))
        shared: dict[int, tuple[Segment, ...]] = {}
        for n0 in range(0, b * hk, span_n):
            for g0 in range(0, g, span_g):
                row = (n0 // hk if mask_b > 1 else 0) * mask_h
                row += (n0 % hk) * g + g0 if mask_h > 1 else 0
                if row not in shared:
                    shared[row] = _segments(spec, tiles, tile, row, i, q_len, kv_len, cols)
                for n in range(n0, n0 + span_n, at_once):
                    heads = slice(n, min(n + at_once, n0 + span_n))
                    yield Piece(heads, slice(g0, g0 + span_g), i, shared[row])


def _tiles(spec: Spec, call: Call) -> tuple[Tiles | None, int, int, tuple[int, int] | None]:
    """The block mask's tiles, the b and h for which they were built, and the tile size; None
    without a mask, and where one partial block of all pairs is cheaper than the tiles."""
    if call.tiles is not None and spec.tiles is not None:
        mask_b, mask_h, *tile = spec.tiles
        return call.tiles, mask_b, mask_h, tuple(tile)  # type: ignore[return-value]
    _, mask = graphs(spec)
    if mask is None:
        return None, 1, 1, None
    (b, hq, q_len, _), kv_len = call.q.shape, call.k.shape[2]
    if q_len <= _ROWS and kv_len <= _ROWS:
        return None, 1, 1, None
    _, captured = split(spec, call.captured)
    shape = (b, hq, q_len, kv_len)
    return *cached_build(mask, captured, shape, TILE, call.q.device, call.coords), TILE


def segments_of_row(
    spec: Spec, tiles: Tiles, tile: tuple[int, int], group: int, groups: int, i: slice, kv_len: int
) -> tuple[Segment, ...]:
    """The segments of queries at the positions `i`, in a block mask over the positions of a cache:
    of the `group`-th of its `groups` batch rows and heads, which have a row of tiles each, that is
    everybody's, or one for every `tile[0]` positions."""
    rows = (len(tiles.rows_full.offsets) - 1) // groups
    if rows == 1:
        i = slice(0, 1)
    return _segments(spec, tiles, tile, group, i, rows * tile[0], kv_len, max(kv_len, 1))


def _segments(
    spec: Spec, tiles: Tiles | None, tile: tuple[int, int] | None, row: int, i: slice,
    q_len: int, kv_len: int, cols: int,
) -> tuple[Segment, ...]:  # fmt: skip
    if tiles is None or tile is None:
        # Without tiles the mask, if there is one, is evaluated everywhere.
        return tuple(_cut(0, kv_len, cols, kv_len, full=spec.mask is None))
    tile_rows = -(-q_len // tile[0])
    first, last = i.start // tile[0], -(-i.stop // tile[0])
    width = -(-kv_len // tile[1])
    import numpy as np  # as in `blocks.runs.of_dense`

    full, live = (np.zeros(width + 1, dtype=np.int32) for _ in range(2))
    for r in range(row * tile_rows + first, row * tile_rows + last):
        for runs, totals in ((tiles.rows_full, (full, live)), (tiles.rows_partial, (live,))):
            start, stop = _runs_of(runs, r)
            for total in totals:
                np.add.at(total, start, 1)
                np.add.at(total, stop, -1)
    state = (live.cumsum() > 0).astype(np.int8) + (full.cumsum() == last - first)
    edges = np.flatnonzero(np.diff(state[:width], prepend=-1, append=-1))
    out: list[Segment] = []
    for start, stop in pairwise(edges):
        if state[start]:
            limits = int(start) * tile[1], int(stop) * tile[1]
            out += _cut(*limits, cols, kv_len, full=bool(state[start] == 2))
    return tuple(out)


def _runs_of(runs: Runs, row: int) -> "tuple[np.ndarray, np.ndarray]":
    offsets, start, count = (t.numpy() for t in runs)
    at = slice(offsets[row], offsets[row + 1])
    return start[at], start[at] + count[at]


def _cut(start: int, stop: int, cols: int, kv_len: int, full: bool) -> Iterator[Segment]:
    stop = min(stop, kv_len)
    for at in range(start, stop, cols):
        yield Segment(at, min(at + cols, stop), full)


def index_tensors(
    call: Call, piece: Piece, q_idx: torch.Tensor, kv_idx: torch.Tensor, keys: slice
) -> dict[str, torch.Tensor]:
    """Global b, h, q_idx, kv_idx of a piece's pairs; they broadcast to (n, g, i, j)."""
    hk, g = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
    n = torch.arange(piece.n.start, piece.n.stop, device=q_idx.device)[:, None, None, None]
    heads = torch.arange(piece.g.start, piece.g.stop, device=q_idx.device)[:, None, None]
    row = n // hk
    q = q_idx[:, piece.i] if len(q_idx) == 1 else q_idx[row.flatten(), piece.i]
    kv = kv_idx[:, keys] if len(kv_idx) == 1 else kv_idx[row.flatten(), keys]
    return {
        "b": row + call.coords.b,
        "h": n % hk * g + heads + call.coords.h,
        "q_idx": q[:, None, :, None],
        "kv_idx": kv[:, None, None, :],
    }
