"""The inputs of a plan, and the base class of plans."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...backends.base import Call, graphs, split
from ...backends.gpu.codegen.dependence import diagonal_gathers
from ...errors import ArgumentError
from ...types import Forward, Grads, Spec
from .comm_plan import SequenceShards, Transport
from .global_mask import GlobalBlockMask, global_mask, ranges_of_tiles

Needs = tuple[bool, ...]
# Largest keys and values of one head chunk: room for 256k tokens of two heads of width 128, and for
# the edge of a window.
MAX_CHUNK_BYTES = 288 << 20


class CallSizes(NamedTuple):
    """Batch, query and key/value heads, head widths, and bytes of an element."""

    b: int
    hq: int
    hk: int
    d: int
    dv: int
    itemsize: int


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan: everything about a call except the numbers in q, k and v.

    - `q`, `kv`: which rank holds which queries and which keys.
    - `rank`, `group`: of this process.
    - `mask`: the block mask of all ranks' queries; None without a mask.
    - `offsets`: global indices of the first batch row and query head on this rank.
    - `score_reads_positions`: the score reads `q_idx` or `kv_idx`; `score_reads_distance`: it reads
      a table at their difference.
    """

    sizes: CallSizes
    q: SequenceShards
    kv: SequenceShards
    rank: int
    group: Any
    device: torch.device
    mask: GlobalBlockMask | None
    offsets: tuple[int, int]
    score_reads_positions: bool
    score_reads_distance: bool

    def kv_requirements(self, q_heads: range) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Return the ranges of keys that every rank's queries read, for some query heads; and which
        key tiles this rank reads (None without a mask)."""
        if self.mask is None:
            all_keys = np.array([[0, self.kv.length]])
            return [all_keys[: int(count > 0)] for count in self.q.sizes], None
        if self.mask.h == 1 or len(q_heads) == self.sizes.hq:
            needed_tiles, ranges = self._needed_tiles, self._needed_ranges
        else:
            needed_tiles = self.mask.tile_visits(q_heads, self.q.ranks) > 0
            ranges = ranges_of_tiles(needed_tiles, self.mask.tile[1], self.kv.length)
        return ranges, needed_tiles[self.rank]

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of a token's key and value in one key/value head."""
        sizes = self.sizes
        return sizes.b * (sizes.d + sizes.dv) * sizes.itemsize

    @property
    def all_kv_fits(self) -> bool:
        """Return whether any rank's keys, of all heads, fit into memory at once."""
        most_tokens = max(self.kv_tokens_read, default=0)
        return self.sizes.hk * most_tokens * self.kv_bytes_per_token <= MAX_CHUNK_BYTES

    @cached_property
    def kv_tokens_read(self) -> list[int]:
        """Return for every rank how many keys its queries read, over all heads."""
        requirements, _ = self.kv_requirements(range(self.sizes.hq))
        return [int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in requirements]

    @cached_property
    def rank_pairs(self) -> np.ndarray:
        """Return for every rank the query-key pairs of its live tiles, per head."""
        mask, ranks = self.mask, self.q.ranks
        if mask is None:
            return self.q.sizes * float(self.kv.length)
        owner = np.tile(mask.owner, mask.b * mask.h)
        live_tiles = np.bincount(owner, self._tiles_per_row, ranks)
        return live_tiles * (mask.tile[0] * mask.tile[1] / (mask.b * mask.h))

    @cached_property
    def longest_work_tile(self) -> tuple[float, float]:
        """Return the pairs of any rank's longest work tile, in the forward and in the backward: a
        tile of queries with its keys, and a tile of keys with the queries of all heads that share
        it. Where heads or batch rows have masks of their own, the mean over these."""
        mask, group_size = self.mask, self.sizes.hq // self.sizes.hk
        if mask is None:
            return 128.0 * self.kv.length, 128.0 * float(self.q.sizes.max()) * group_size
        longest_row = float(self._tiles_per_row.max(initial=0))
        longest_column = float(self._tile_visits.max(initial=0)) / (mask.b * mask.h)
        pairs = mask.tile[0] * mask.tile[1]
        return longest_row * pairs, longest_column * pairs * (group_size if mask.h == 1 else 1)

    @cached_property
    def _tiles_per_row(self) -> np.ndarray:
        """Count the live tiles of every tile row."""
        assert self.mask is not None
        tiles = self.mask.tiles
        total = tiles.rows_full.per_row() + tiles.rows_partial.per_row()
        return total.to(device="cpu", dtype=torch.int64).numpy()

    @cached_property
    def _needed_tiles(self) -> np.ndarray:
        """Return which tiles of keys every rank reads, bool `(ranks, kv_tiles)`."""
        return self._tile_visits > 0

    @cached_property
    def _needed_ranges(self) -> list[np.ndarray]:
        """Return the ranges of keys that every rank reads."""
        assert self.mask is not None
        return ranges_of_tiles(self._needed_tiles, self.mask.tile[1], self.kv.length)

    @cached_property
    def _tile_visits(self) -> np.ndarray:
        """Return `GlobalBlockMask.tile_visits` of all heads."""
        assert self.mask is not None
        return self.mask.tile_visits(range(self.sizes.hq), self.q.ranks)


class Plan:
    """A pair of pure functions: forward and backward of this rank's queries over all ranks' keys.

    - `group`: the ranks between which a `Transport` moves rows.
    - `runs_ahead`: rows move by the transport alone, which may begin before all ranks are known to
      make the same call.
    - `received`: elements that this rank receives in the forward.
    """

    name: str
    group: Any
    received: int
    runs_ahead = True

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """Return the results of this rank's queries; max_logit is over these queries alone."""
        raise NotImplementedError

    def backward(
        self, spec: Spec, call: Call, transport: Transport, out: Tensor, lse: Tensor,
        dout: Tensor, dlse: Tensor | None, needs: Needs,
    ) -> Grads:  # fmt: skip
        """Return the gradients of this rank's tensors. Those of the sink and of captured tensors
        are this rank's share of a sum over ranks."""
        raise NotImplementedError


def plan_inputs(
    spec: Spec, call: Call, q: SequenceShards, kv: SequenceShards, group: Any, rank: int,
    own_tiles: bool,
) -> PlanInputs:  # fmt: skip
    """Return the inputs of a call's plan; builds the block mask of all ranks.

    **Raises:** `ArgumentError` where shards cut through tiles that are the caller's own.
    """
    (b, hq, _, d), hk, dv = call.q.shape, call.k.shape[1], call.v.shape[3]
    score, mask_graph = graphs(spec)
    mask, offsets = None, (call.coords.b, call.coords.h)
    if mask_graph is not None or call.tiles is not None:
        _, captured = split(spec, call.captured)
        place = (b, hq), offsets, q, kv, call.q.device
        block_mask = (call.tiles, spec.tiles) if call.tiles is not None else (None, None)
        mask = global_mask(mask_graph, captured, *block_mask, *place)  # type: ignore[arg-type]
        if mask is None and own_tiles:
            raise ArgumentError(
                "the tiles of this block mask are its own (lists of blocks), and the layout cuts "
                f"inside of them; cut at multiples of {spec.tiles and spec.tiles[2]}: "
                "Layout.balanced(..., tile=)"
            )
        if mask is None:
            mask = global_mask(mask_graph, captured, None, None, *place)  # type: ignore[arg-type]
    sizes = CallSizes(b, hq, hk, d, dv, call.q.dtype.itemsize)
    reads_positions = score is not None and (score.uses("q_idx") or score.uses("kv_idx"))
    reads_distance = score is not None and bool(diagonal_gathers(score))
    return PlanInputs(
        sizes, q, kv, rank, group, call.q.device, mask, offsets, reads_positions, reads_distance
    )


# -- gradients ------------------------------------------------------------------------------------


def sum_captured_grads(per_call: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Return the sums of captured tensors' gradients over several calls, added in order."""
    return [
        None if grads[0] is None else torch.stack(grads).sum(0) if len(grads) > 1 else grads[0]
        for grads in zip(*per_call, strict=True)
    ]
