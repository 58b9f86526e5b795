"""Cut a call on the CPU into work items that fit the caches.

A work item is some key/value heads (with the query heads that read them) times a block of queries;
its segments are the key ranges that it visits. Tiles of the block mask are joined into blocks of
about 256 x 256 pairs, since each torch op has a fixed cost.
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

_MIN_QUERIES = 256  # of a block, if the call has as many
_BLOCK_PAIRS = 1 << 20  # 4 MB of float32, the caches of two cores


class KeySegment(NamedTuple):
    """Keys `start:stop`; in a full segment every pair is kept, and the mask is not evaluated."""

    start: int
    stop: int
    full: bool


@dataclass(frozen=True)
class WorkItem:
    """Some heads, queries and key ranges that are computed together."""

    kv_heads: slice  # numbered b * hk + hk_index
    group_heads: slice  # query heads of each
    queries: slice
    segments: tuple[KeySegment, ...]


def work_items(spec: Spec, call: Call, *, whole_rows: bool = False) -> Iterator[WorkItem]:
    """Yield the work items of a call. Every query is in exactly one.

    - `whole_rows`: for a kernel that does its own blocking: all heads that share their tiles at
      once, and segments of any length.
    """
    b, hq, q_len, _ = call.q.shape
    hk, kv_len = call.k.shape[1:3]
    if not b * hq * q_len:
        return
    g = hq // hk
    tiles, mask_b, mask_h, tile = _tiles(spec, call)
    item_queries = _MIN_QUERIES if tile is None else tile[0] * max(1, _MIN_QUERIES // tile[0])
    # Heads that share their tiles work together, as many as fit.
    shared_kv_heads = (b if mask_b == 1 else 1) * hk if mask_h == 1 else 1
    shared_group_heads = g if mask_h == 1 else 1
    if whole_rows:
        item_queries = item_queries if tile else q_len
        item_keys, heads_at_once = kv_len, shared_kv_heads
    else:
        head_queries = shared_kv_heads * shared_group_heads * min(item_queries, q_len)
        item_keys = min(4 * _MIN_QUERIES, max(_MIN_QUERIES, _BLOCK_PAIRS // head_queries))
        item_pairs = shared_group_heads * min(item_queries, q_len) * max(1, min(item_keys, kv_len))
        heads_at_once = max(1, _BLOCK_PAIRS // item_pairs)
    for first_query in range(0, q_len, item_queries):
        queries = slice(first_query, min(first_query + item_queries, q_len))
        row_segments: dict[int, tuple[KeySegment, ...]] = {}
        for first_head in range(0, b * hk, shared_kv_heads):
            for first_group_head in range(0, g, shared_group_heads):
                mask_row = (first_head // hk if mask_b > 1 else 0) * mask_h
                mask_row += (first_head % hk) * g + first_group_head if mask_h > 1 else 0
                if mask_row not in row_segments:
                    row_segments[mask_row] = _segments(
                        spec, tiles, tile, mask_row, queries, q_len, kv_len, item_keys
                    )
                group_heads = slice(first_group_head, first_group_head + shared_group_heads)
                end_head = first_head + shared_kv_heads
                for n in range(first_head, end_head, heads_at_once):
                    kv_heads = slice(n, min(n + heads_at_once, end_head))
                    yield WorkItem(kv_heads, group_heads, queries, row_segments[mask_row])


def _tiles(spec: Spec, call: Call) -> tuple[Tiles | None, int, int, tuple[int, int] | None]:
    """Return the block mask's tiles, the b and h for which they were built, and the tile size; None
    without a mask, and where one partial block of all pairs costs less than the tiles."""
    if call.tiles is not None and spec.tiles is not None:
        mask_b, mask_h, *tile = spec.tiles
        return call.tiles, mask_b, mask_h, tuple(tile)  # type: ignore[return-value]
    _, mask = graphs(spec)
    if mask is None:
        return None, 1, 1, None
    (b, hq, q_len, _), kv_len = call.q.shape, call.k.shape[2]
    if q_len <= _MIN_QUERIES and kv_len <= _MIN_QUERIES:
        return None, 1, 1, None
    _, captured = split(spec, call.captured)
    shape = (b, hq, q_len, kv_len)
    return *cached_build(mask, captured, shape, TILE, call.q.device, call.coords), TILE


def segments_of_row(
    spec: Spec,
    tiles: Tiles,
    tile: tuple[int, int],
    group: int,
    groups: int,
    positions: slice,
    kv_len: int,
) -> tuple[KeySegment, ...]:
    """Return the segments of queries at `positions`, in a block mask over the positions of a
    cache. `group` numbers the batch row and head among the mask's `groups`; each has one row of
    tiles for all positions, or one for every `tile[0]` positions."""
    tile_rows = (len(tiles.rows_full.offsets) - 1) // groups
    if tile_rows == 1:
        positions = slice(0, 1)
    return _segments(
        spec, tiles, tile, group, positions, tile_rows * tile[0], kv_len, max(kv_len, 1)
    )


def _segments(
    spec: Spec, tiles: Tiles | None, tile: tuple[int, int] | None, group: int, queries: slice,
    q_len: int, kv_len: int, segment_keys: int,
) -> tuple[KeySegment, ...]:  # fmt: skip
    """Return the segments of some queries of one batch row and head."""
    if tiles is None or tile is None:
        # Without tiles the mask, if there is one, is evaluated everywhere.
        return tuple(_cut_segments(0, kv_len, segment_keys, kv_len, full=spec.mask is None))
    tile_rows = -(-q_len // tile[0])
    first_row, last_row = queries.start // tile[0], -(-queries.stop // tile[0])
    tile_cols = -(-kv_len // tile[1])
    import numpy as np  # as in `blocks.runs.of_dense`

    full_cover, live_cover = (np.zeros(tile_cols + 1, dtype=np.int32) for _ in range(2))
    for tile_row in range(group * tile_rows + first_row, group * tile_rows + last_row):
        covers_of_runs = (
            (tiles.rows_full, (full_cover, live_cover)), (tiles.rows_partial, (live_cover,))
        )  # fmt: skip
        for runs, covers in covers_of_runs:
            start, stop = _runs_of(runs, tile_row)
            for cover in covers:
                np.add.at(cover, start, 1)
                np.add.at(cover, stop, -1)
    is_full = full_cover.cumsum() == last_row - first_row
    state = (live_cover.cumsum() > 0).astype(np.int8) + is_full  # 0 empty, 1 partial, 2 full
    edges = np.flatnonzero(np.diff(state[:tile_cols], prepend=-1, append=-1))
    segments: list[KeySegment] = []
    for start, stop in pairwise(edges):
        if state[start]:
            limits = int(start) * tile[1], int(stop) * tile[1]
            segments += _cut_segments(*limits, segment_keys, kv_len, full=bool(state[start] == 2))
    return tuple(segments)


def _runs_of(runs: Runs, tile_row: int) -> "tuple[np.ndarray, np.ndarray]":
    """Return the starts and stops of the runs of a row of tiles."""
    offsets, start, count = (t.numpy() for t in runs)
    row_runs = slice(offsets[tile_row], offsets[tile_row + 1])
    return start[row_runs], start[row_runs] + count[row_runs]


def _cut_segments(
    start: int, stop: int, segment_keys: int, kv_len: int, full: bool
) -> Iterator[KeySegment]:
    """Yield keys `start:stop` in segments of at most `segment_keys`."""
    stop = min(stop, kv_len)
    for segment_start in range(start, stop, segment_keys):
        yield KeySegment(segment_start, min(segment_start + segment_keys, stop), full)


def index_tensors(
    call: Call, item: WorkItem, q_idx: torch.Tensor, kv_idx: torch.Tensor, keys: slice
) -> dict[str, torch.Tensor]:
    """Return global b, h, q_idx, kv_idx of a work item's pairs; they broadcast to (kv heads, group
    heads, queries, keys)."""
    hk, g = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
    device = q_idx.device
    kv_heads = torch.arange(item.kv_heads.start, item.kv_heads.stop, device=device)
    kv_heads = kv_heads[:, None, None, None]
    group_heads = torch.arange(item.group_heads.start, item.group_heads.stop, device=device)
    group_heads = group_heads[:, None, None]
    batch_row = kv_heads // hk
    q = q_idx[:, item.queries] if len(q_idx) == 1 else q_idx[batch_row.flatten(), item.queries]
    kv = kv_idx[:, keys] if len(kv_idx) == 1 else kv_idx[batch_row.flatten(), keys]
    return {
        "b": batch_row + call.coords.b,
        "h": kv_heads % hk * g + group_heads + call.coords.h,
        "q_idx": q[:, None, :, None],
        "kv_idx": kv[:, None, None, :],
    }
