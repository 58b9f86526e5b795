"""The block mask of all ranks' queries: which key tiles each rank needs, and a rank's own tiles.

Both follow from the runs of the global block mask, in time proportional to the number of runs: no
dense square is built. Where a layout cuts inside of tiles, the global mask is built with the
queries in the order of ranks, every rank's padded to whole tiles.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...blocks import TILE, Runs, Tiles, cached_build
from ...blocks.runs import cover
from ...mods.graph import Graph
from ...types import Captured, Coords
from .comm_plan import SequenceShards


class GlobalBlockMask(NamedTuple):
    """The block mask of all ranks' queries and all keys.

    - `tiles`, `b`, `h`, `tile`: as in a block mask.
    - `q_tiles`, `kv_tiles`: how many tiles of queries and of keys there are.
    - `owner`: the rank of every tile of queries, `(q_tiles,)`.
    - `kv_length`: the number of keys.
    - `in_sequence_order`: queries are in the order of the sequence, not in that of ranks.
    """

    tiles: Tiles
    b: int
    h: int
    tile: tuple[int, int]
    q_tiles: int
    kv_tiles: int
    owner: np.ndarray
    kv_length: int
    in_sequence_order: bool

    def tile_visits(self, q_heads: range, ranks: int) -> np.ndarray:
        """Count how many query tiles of every rank read each key tile, over all batch rows and
        these heads: int32 `(ranks, kv_tiles)`."""
        visits = np.zeros((ranks, self.kv_tiles), np.int32)
        for runs in (self.tiles.rows_full, self.tiles.rows_partial):
            tile_row = runs.row().cpu().numpy()
            start, count = runs.start.cpu().numpy(), runs.count.cpu().numpy()
            if self.h > 1:
                head = tile_row // max(1, self.q_tiles) % self.h
                selected = (head >= q_heads.start) & (head < q_heads.stop)
                tile_row, start, count = tile_row[selected], start[selected], count[selected]
            rank = self.owner[tile_row % max(1, self.q_tiles)]
            visits += cover(rank, start, start + count, ranks, self.kv_tiles)
        return visits

    def select(
        self, q_heads: range, rank: int | None, needed_tiles: np.ndarray | None,
        q_ranges: np.ndarray | None = None,
    ) -> Tiles:  # fmt: skip
        """Return the tiles of these heads (all heads where one mask serves all), of one rank's
        queries and the key tiles that it needs.

        - `rank`: None for the queries of all ranks.
        - `needed_tiles`: bool `(kv_tiles,)`; None for all.
        - `q_ranges`: (start, stop) of those of the rank's queries to select, where queries are in
          the order of the sequence; None for all.
        """
        device = self.tiles.row_order.device
        groups = torch.arange(self.b, device=device)[:, None] * self.h
        groups = groups + torch.arange(self.h, device=device)[_head_slice(q_heads, self.h)]
        row_ranges = _true_ranges(self.owner == rank) if rank is not None else [(0, self.q_tiles)]
        if q_ranges is not None and self.in_sequence_order:
            tile_q = self.tile[0]
            row_ranges = [(int(a) // tile_q, -(-int(b) // tile_q)) for a, b in q_ranges]
        columns = np.ones(self.kv_tiles, bool) if needed_tiles is None else needed_tiles
        rows = np.concatenate([np.zeros(0, np.int64), *[np.arange(a, b) for a, b in row_ranges]])
        new_column = torch.from_numpy(columns.cumsum() - 1).to(device)
        row_numbers = _in_groups(groups, rows, self.q_tiles, device)
        column_numbers = _in_groups(groups, columns.nonzero()[0], self.kv_tiles, device)
        tiles, width = self.tiles, int(columns.sum())
        by_row = [
            _renumber_columns(runs.take(row_numbers), new_column, width)
            for runs in (tiles.rows_full, tiles.rows_partial)
        ]
        by_column = [
            _cut_and_join(runs.take(column_numbers), row_ranges, len(rows))
            for runs in (tiles.cols_full, tiles.cols_partial)
        ]
        return Tiles.of_runs(*by_row, *by_column)


def global_mask(
    graph: Graph, captured: Captured, tiles: Tiles | None,
    tile_info: tuple[int, int, int, int] | None, sizes: tuple[int, int], offsets: tuple[int, int],
    q: SequenceShards, kv: SequenceShards, device: torch.device,
) -> GlobalBlockMask | None:  # fmt: skip
    """Build the block mask of all ranks' queries. None where a given block mask cannot be used,
    since shards cut through its tiles.

    - `tiles`, `tile_info`: of a given block mask, as `Call.tiles` and `Spec.tiles` hold it.
    - `sizes`: batch and query heads; `offsets`: global indices of the first ones.
    """
    shape = (*sizes, q.length, kv.length)
    tile = TILE if tile_info is None else tile_info[2:]
    tile_q, _ = tile
    q_tiles, kv_tiles = -(-q.length // tile[0]), -(-kv.length // tile[1])
    cuts_tiles = ((q.start % tile_q != 0) & (q.stop > q.start)).any()
    if not cuts_tiles:
        owner = np.repeat(q.rank, -(-q.stop // tile_q) - q.start // tile_q)
        if tiles is None:
            tiles, b, h = cached_build(graph, captured, shape, tile, device, Coords(*offsets))
        else:
            b, h = tile_info[:2]  # type: ignore[index]
        return GlobalBlockMask(tiles, b, h, tile, q_tiles, kv_tiles, owner, kv.length, True)
    if tiles is not None:
        return None
    positions, owner = _positions_by_rank(q, tile_q)
    coords = Coords(*offsets, q_pos=torch.from_numpy(positions).to(device))
    shape = (*sizes, len(positions), kv.length)
    tiles, b, h = cached_build(graph, captured, shape, tile, device, coords)
    return GlobalBlockMask(tiles, b, h, tile, len(owner), kv_tiles, owner, kv.length, False)


def ranges_of_tiles(needed_tiles: np.ndarray, tile: int, length: int) -> np.ndarray:
    """Return the needed tiles as ranges of positions (start, stop)."""
    ranges = np.array(_true_ranges(needed_tiles), np.int64).reshape(-1, 2) * tile
    return np.minimum(ranges, length)


def coords_of(
    offsets: tuple[int, int], q_ranges: np.ndarray, kv_ranges: np.ndarray, device: torch.device
) -> Coords:
    """Return the coordinates of queries and keys in ranges of positions (start, stop), from the
    batch row and query head `offsets` on."""
    (i, q_pos), (j, kv_pos) = _positions(q_ranges, device), _positions(kv_ranges, device)
    straight_below = 0
    reads_positions = q_pos is not None or kv_pos is not None
    if reads_positions and contiguous_in_tiles(q_ranges) and contiguous_in_tiles(kv_ranges):
        straight_below = int(max(ranges[:, 1].max(initial=0) for ranges in (q_ranges, kv_ranges)))
    return Coords(*offsets, i, j, q_pos, kv_pos, straight_below)


def are_contiguous(ranges: np.ndarray) -> bool:
    """Return whether the positions in these ranges follow one another."""
    return len(_breaks(ranges)) == 0


def contiguous_in_tiles(ranges: np.ndarray) -> bool:
    """Return whether the positions in these ranges follow one another within every tile of rows."""
    return not (_breaks(ranges) % TILE[0]).any()


def _breaks(ranges: np.ndarray) -> np.ndarray:
    """Return the rows whose position does not follow that of the row before."""
    first_rows = (ranges[:, 1] - ranges[:, 0]).cumsum()[:-1]
    return first_rows[ranges[1:, 0] != ranges[:-1, 1]]


def _positions(ranges: np.ndarray, device: torch.device) -> tuple[int, Tensor | None]:
    """Return the first position and None where positions are contiguous; else 0 and a tensor of
    all positions."""
    if are_contiguous(ranges):
        return int(ranges[:1, 0].sum()), None
    positions = np.concatenate([np.arange(a, b) for a, b in ranges.tolist()])
    return 0, torch.from_numpy(positions).to(device)


def _positions_by_rank(q: SequenceShards, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of all queries, rank after rank, and the rank of every tile. Each rank's
    positions are padded to whole tiles with its last one."""
    per_rank, owner = [], []
    for rank in range(q.ranks):
        ranges = [np.arange(a, b) for a, b in q.ranges_of(rank).tolist()]
        if not ranges:
            continue
        positions = np.concatenate(ranges)
        tiles = -(-len(positions) // tile)
        padding = np.full(tiles * tile - len(positions), positions[-1])
        per_rank += [positions, padding]
        owner += [rank] * tiles
    return np.concatenate(per_rank), np.array(owner, np.int64)


def _true_ranges(flags: np.ndarray) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) in which flags are True."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _head_slice(q_heads: range, mask_heads: int) -> slice:
    return slice(q_heads.start, q_heads.stop) if mask_heads > 1 else slice(None)


def _in_groups(groups: Tensor, rows: np.ndarray, group_rows: int, device: torch.device) -> Tensor:
    """Return the numbers of some rows in all groups, of which each has `group_rows` rows."""
    offsets = torch.from_numpy(np.ascontiguousarray(rows, np.int64)).to(device)
    return (groups.reshape(-1, 1) * group_rows + offsets).flatten()


def _renumber_columns(runs: Runs, new_column: Tensor, width: int) -> Runs:
    """Return runs of columns under their new numbers, `new_column[column]`."""
    start = new_column[runs.start.long()]
    key = runs.row() * (width + 1) + start
    return Runs.of_keys(key, runs.count.long(), runs.rows, width)


def _cut_and_join(runs: Runs, row_ranges: list[tuple[int, int]], width: int) -> Runs:
    """Return the parts of runs within ranges of rows, with the ranges joined end to end."""
    no_rows = torch.zeros(0, dtype=torch.int64, device=runs.start.device)
    keys, counts, rows_before = [no_rows], [no_rows], 0
    for low, high in row_ranges:
        part = runs.cut(low, high)
        keys.append(part.row() * (width + 1) + part.start + rows_before)
        counts.append(part.count.long())
        rows_before += high - low
    return Runs.of_keys(torch.cat(keys), torch.cat(counts), runs.rows, width)
