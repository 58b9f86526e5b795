"""The block mask of all ranks' queries: which key tiles each rank needs, and a rank's own tiles.

Both follow from the runs of the global block mask, in time proportional to the number of runs: no
dense square is built. A rank's tile of queries that consists of several pieces of the sequence is
several rows of the global mask, one for each piece: the positions of a row follow one another, so
that intervals decide its tiles. The rows of a tile are joined when a rank's tiles are selected.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...blocks import TILE, Runs, Tiles, cached_build
from ...blocks.runs import cover, sweep
from ...mods.graph import Graph
from ...types import Captured, Coords
from .comm_plan import SequenceShards

_FULL = 1 << 40  # the weight of a full tile among partial ones


class GlobalBlockMask(NamedTuple):
    """The block mask of all ranks' queries and all keys.

    - `tiles`, `b`, `h`, `tile`: as in a block mask.
    - `q_tiles`, `kv_tiles`: how many rows of tiles and how many tiles of keys there are.
    - `owner`: the rank of every row, `(q_tiles,)`; rows are in the order of the sequence.
    - `kv_length`: the number of keys.
    - `tile_of_row`: of every row, the tile of its rank's queries that it is a piece of; None where
      every row is a whole tile.
    """

    tiles: Tiles
    b: int
    h: int
    tile: tuple[int, int]
    q_tiles: int
    kv_tiles: int
    owner: np.ndarray
    kv_length: int
    tile_of_row: np.ndarray | None = None

    @property
    def has_whole_tiles(self) -> bool:
        """Return whether every row is a whole tile of the sequence."""
        return self.tile_of_row is None

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
        - `q_ranges`: (start, stop) of those of the rank's queries to select, where rows are whole
          tiles; None for all.
        """
        device = self.tiles.row_order.device
        groups = torch.arange(self.b, device=device)[:, None] * self.h
        heads = slice(q_heads.start, q_heads.stop) if self.h > 1 else slice(None)
        groups = groups + torch.arange(self.h, device=device)[heads]
        row_ranges = [(0, self.q_tiles)]
        if rank is not None:
            owned = (self.owner == rank)[None]
            row_ranges = ranges_of_tiles(owned, 1, owned.size)[0].tolist()
        if q_ranges is not None and self.has_whole_tiles:
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
        if rank is not None and self.tile_of_row is not None and len(rows):
            row_tile = torch.from_numpy(self.tile_of_row[self.owner == rank]).to(device)
            by_row = _join_rows(by_row, row_tile, width)
            by_column = _join_columns(by_column, row_tile)
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
        return GlobalBlockMask(tiles, b, h, tile, q_tiles, kv_tiles, owner, kv.length)
    if tiles is not None:
        return None
    positions, owner, tile_of_row = _rows_of_pieces(q, tile_q)
    coords = Coords(*offsets, q_pos=torch.from_numpy(positions).to(device))
    shape = (*sizes, len(positions), kv.length)
    tiles, b, h = cached_build(graph, captured, shape, tile, device, coords)
    rows = len(owner)
    return GlobalBlockMask(tiles, b, h, tile, rows, kv_tiles, owner, kv.length, tile_of_row)


def ranges_of_tiles(needed_tiles: np.ndarray, tile: int, length: int) -> list[np.ndarray]:
    """Return the tiles that every rank needs, bool `(ranks, tiles)`, as ranges of positions (start,
    stop)."""
    ranks, width = needed_tiles.shape
    flags = np.zeros((ranks, width + 2), np.int8)  # with a gap at both ends
    flags[:, 1:-1] = needed_tiles
    edges = np.flatnonzero(flags.reshape(-1)[1:] != flags.reshape(-1)[:-1])
    rank, column = np.divmod(edges.reshape(-1, 2), width + 2)
    ranges = np.minimum(column * tile, length)
    return np.split(ranges, rank[:, 0].searchsorted(np.arange(1, ranks)))


def coords_of(
    offsets: tuple[int, int], q_ranges: np.ndarray, kv_ranges: np.ndarray, device: torch.device
) -> Coords:
    """Return the coordinates of queries and keys in ranges of positions (start, stop), from the
    batch row and query head `offsets` on."""
    (i, q_pos), (j, kv_pos) = _positions(q_ranges, device), _positions(kv_ranges, device)
    straight_below = 0
    sides = (q_pos, q_ranges), (kv_pos, kv_ranges)
    read = [ranges for pos, ranges in sides if pos is not None]
    in_tiles = contiguous_in_tiles(q_ranges) and contiguous_in_tiles(kv_ranges)
    if read and in_tiles and not any((ranges[:, 0] % 16).any() for ranges in read):
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


def _rows_of_pieces(q: SequenceShards, tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut all pieces where their ranks' tiles of queries end. Return the positions of these rows,
    each padded to a whole tile with its last one; and every row's rank, and its tile there."""
    local_stop = q.local_start + q.stop - q.start
    first_tile, count = q.local_start // tile, -(-local_stop // tile) - q.local_start // tile
    piece = np.repeat(np.arange(len(count)), count)
    tile_of_row = join_ranges(first_tile, count)
    local = np.maximum(q.local_start[piece], tile_of_row * tile)
    size = np.minimum(local_stop[piece], (tile_of_row + 1) * tile) - local
    start = q.start[piece] + local - q.local_start[piece]
    positions = start[:, None] + np.minimum(np.arange(tile), size[:, None] - 1)
    return positions.flatten(), q.rank[piece], tile_of_row


def join_ranges(start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the integers of ranges, `start[n]` up to `start[n] + size[n]`, one range after the
    other."""
    integers = np.repeat(start - (size.cumsum() - size), size)
    integers += np.arange(len(integers))
    return integers


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


def _join_rows(by_row: list[Runs], row_tile: Tensor, width: int) -> list[Runs]:
    """Return the runs of tiles from those of their rows, of which `row_tile` has the tile: a tile
    is full where all of its rows are."""
    full, partial = by_row
    tiles, groups = int(row_tile[-1:].sum()) + 1, full.rows // len(row_tile)
    tile_of = (torch.arange(groups, device=row_tile.device)[:, None] * tiles + row_tile).flatten()
    rows_of_tile = row_tile.bincount(minlength=tiles)
    keys = [tile_of[runs.row()] * (width + 1) + runs.start for runs in (full, partial)]
    stops = [key + runs.count for key, runs in zip(keys, (full, partial), strict=True)]
    weights = torch.cat([torch.full_like(keys[0], _FULL), torch.ones_like(keys[1])])
    key, count, cover = sweep(torch.cat(keys), torch.cat(stops), weights)
    is_full = cover == _FULL * rows_of_tile[key // (width + 1) % tiles]
    return _full_and_partial(key, count, cover, is_full, groups * tiles, width)


def _join_columns(by_column: list[Runs], row_tile: Tensor) -> list[Runs]:
    """Return, for every tile of keys, the runs of tiles of queries from the runs of their rows."""
    full, partial = by_column
    height = int(row_tile[-1:].sum()) + 1
    true = row_tile.new_ones(1, dtype=torch.bool)
    changes = row_tile[1:] != row_tile[:-1]
    begins, ends = torch.cat([true, changes]), torch.cat([changes, true])
    keys, stops = [], []
    for runs, whole in ((full, True), (full, False), (partial, False)):
        first, last = runs.start.long(), (runs.start + runs.count - 1).long()
        start, stop = row_tile[first], row_tile[last] + 1
        if whole:
            start, stop = start + ~begins[first], stop - (~ends[last]).long()
        base = runs.row() * (height + 1)
        keys.append(base + start)
        stops.append(base + torch.maximum(stop, start))
    weights = torch.cat([torch.full_like(keys[0], _FULL), *map(torch.ones_like, keys[1:])])
    key, count, cover = sweep(torch.cat(keys), torch.cat(stops), weights)
    return _full_and_partial(key, count, cover, cover >= _FULL, full.rows, height)


def _full_and_partial(
    key: Tensor, count: Tensor, cover: Tensor, is_full: Tensor, rows: int, width: int
) -> list[Runs]:
    """Return the runs of full and of partial tiles, of pieces that are live where `cover` > 0."""
    is_partial = (cover > 0) & ~is_full
    return [Runs.of_keys(key[kept], count[kept], rows, width) for kept in (is_full, is_partial)]
