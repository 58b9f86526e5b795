"""The definition that block masks are held to: every pair, evaluated."""

from unittest.mock import patch

import torch
from torch import Tensor

from headway.blocks import Tiles, quadtree
from headway.blocks.build import build
from headway.mods.evaluation.pointwise import Positions, mask_at
from headway.mods.graph import Graph
from headway.types import Captured, Coords

CPU = torch.device("cpu")


def positions(pos: Tensor | None, start: int, b: int, length: int) -> Tensor:
    """int64 `(b, length)`."""
    if pos is None:
        pos = torch.arange(start, start + length)
    return pos.long().expand(b, length)


def dense_mask(
    graph: Graph, captured: Captured, shape: tuple[int, ...], coords: Coords = Coords()
) -> Tensor:
    """bool `(b, h, q_len, kv_len)`."""
    b, h, q_len, kv_len = shape
    at = Positions(
        torch.arange(b)[:, None, None, None] + coords.b,
        torch.arange(h)[:, None, None] + coords.h,
        positions(coords.q_pos, coords.q, b, q_len)[:, None, :, None],
        positions(coords.kv_pos, coords.kv, b, kv_len)[:, None, None, :],
    )
    return mask_at(graph, captured, at).expand(shape)


def dense_state(kept: Tensor, tile: tuple[int, int]) -> Tensor:
    """uint8 `(b, h, tile_rows, tile_cols)`: 0 empty, 1 partial, 2 full."""
    short = [-n % t for n, t in zip(kept.shape[2:], tile, strict=True)]
    pad = (0, short[1], 0, short[0])
    some, every = (
        torch.nn.functional.pad(kept, pad, value=value)
        .unflatten(3, (-1, tile[1]))
        .unflatten(2, (-1, tile[0]))
        for value in (False, True)
    )
    some, every = some.any(5).any(3), every.all(5).all(3)
    return some.to(torch.uint8) + (some & every)


def tiles_state(tiles: Tiles, b: int, h: int, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The state as the rows tell it, and as the columns do."""
    rows, cols = grid
    by_row = tiles.rows_partial.dense(cols) + 2 * tiles.rows_full.dense(cols)
    by_col = tiles.cols_partial.dense(rows) + 2 * tiles.cols_full.dense(rows)
    return (
        by_row.to(torch.uint8).view(b, h, rows, cols),
        by_col.to(torch.uint8).view(b, h, cols, rows).mT,
    )


def check_build(
    graph: Graph, captured: Captured, shape: tuple[int, ...], tile: tuple[int, int],
    coords: Coords = Coords(),
) -> Tiles:  # fmt: skip
    """Build, all tiles at once and from coarse to fine, and hold rows, columns and their orders to
    the definition."""
    want = dense_state(dense_mask(graph, captured, shape, coords), tile)
    with patch.object(quadtree, "_SMALL_GRID", 0):
        coarse_to_fine, *_ = build(graph, captured, shape, tile, CPU, coords)
    tiles, b, h = build(graph, captured, shape, tile, CPU, coords)
    for one, other in zip(tiles.flatten(), coarse_to_fine.flatten(), strict=True):
        assert torch.equal(one, other)
    for state in tiles_state(tiles, b, h, tuple(want.shape[2:])):
        assert torch.equal(state.expand(want.shape), want)
    for order, full, partial in (
        (tiles.row_order, tiles.rows_full, tiles.rows_partial),
        (tiles.col_order, tiles.cols_full, tiles.cols_partial),
    ):
        assert torch.equal(order.long().sort().values, torch.arange(full.rows))
        assert (torch.diff((full.per_row() + partial.per_row())[order.long()]) <= 0).all()
    assert all(t.dtype == torch.int32 for t in tiles.flatten())
    return tiles
