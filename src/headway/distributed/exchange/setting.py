"""What a plan is made for, and what it does."""

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
from .needs import Whole, stretches_of, whole_of
from .routes import Pieces, Transport

Needs = tuple[bool, ...]
# Bytes of the keys and values of a step: room for some 2^n tokens and the edge of a window.
MOST = 288 << 20


class Sizes(NamedTuple):
    """Batch, query and key/value heads, widths, and bytes of a number."""

    b: int
    hq: int
    hk: int
    d: int
    dv: int
    itemsize: int


@dataclass(frozen=True)
class Setting:
    """What a plan is made for: everything about a call but what is in its q, k and v.

    - `q`, `kv`: the pieces of queries and of keys; `rank`, `group`: of this process.
    - `whole`: the block mask of all ranks; None without a mask.
    - `offsets`: global indices of the first batch row and query head here.
    - `placed`: whether there is a score that depends on positions; `by_distance`: one that reads
      numbers by the distance of a pair.
    """

    sizes: Sizes
    q: Pieces
    kv: Pieces
    rank: int
    group: Any
    device: torch.device
    whole: Whole | None
    offsets: tuple[int, int]
    placed: bool
    by_distance: bool

    def wanted(self, heads: range) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Stretches of keys that every rank's queries read, and this rank's needed tiles."""
        if self.whole is None:
            everything = np.array([[0, self.kv.length]])
            return [everything[: int(n > 0)] for n in self.q.sizes], None
        alike = self.whole.h == 1 or len(heads) == self.sizes.hq
        needed = (self._visits if alike else self.whole.visits(heads, self.q.ranks)) > 0
        tile, length = self.whole.tile[1], self.kv.length
        return [stretches_of(of, tile, length) for of in needed], needed[self.rank]

    @property
    def bytes_of_token(self) -> int:
        """Of its key and value, for one key/value head."""
        s = self.sizes
        return s.b * (s.d + s.dv) * s.itemsize

    @property
    def together(self) -> bool:
        """Whether the keys that any rank needs, of all heads, may be there at once."""
        return self.sizes.hk * max(self.needed, default=0) * self.bytes_of_token <= MOST

    @cached_property
    def needed(self) -> list[int]:
        """Tokens of keys that every rank's queries read, of all heads together."""
        wanted, _ = self.wanted(range(self.sizes.hq))
        return [int((x[:, 1] - x[:, 0]).sum()) for x in wanted]

    @cached_property
    def work(self) -> np.ndarray:
        """Pairs of live tiles of every rank, one head's where the mask has one for all."""
        whole, ranks = self.whole, self.q.ranks
        if whole is None:
            return self.q.sizes * float(self.kv.length)
        owner = np.tile(whole.owner, whole.b * whole.h)
        total = np.bincount(owner, self._per_row, ranks)
        return total * (whole.tile[0] * whole.tile[1] / (whole.b * whole.h))

    @cached_property
    def longest(self) -> tuple[float, float]:
        """Pairs of the longest work tile of any rank: in the forward a tile of queries with its
        keys; in the backward a tile of keys with its queries, of all heads that share them. Where
        heads or batch rows have masks of their own, of the mean of these."""
        whole, group = self.whole, self.sizes.hq // self.sizes.hk
        if whole is None:
            return 128.0 * self.kv.length, 128.0 * float(self.q.sizes.max()) * group
        row = float(self._per_row.max(initial=0))
        column = float(self._visits.max(initial=0)) / (whole.b * whole.h)
        pairs = whole.tile[0] * whole.tile[1]
        return row * pairs, column * pairs * (group if whole.h == 1 else 1)

    @cached_property
    def _per_row(self) -> np.ndarray:
        """Live tiles of every tile of queries."""
        assert self.whole is not None
        tiles = self.whole.tiles
        total = tiles.rows_full.per_row() + tiles.rows_partial.per_row()
        return total.to(device="cpu", dtype=torch.int64).numpy()

    @cached_property
    def _visits(self) -> np.ndarray:
        """`Whole.visits` of all heads."""
        assert self.whole is not None
        return self.whole.visits(range(self.sizes.hq), self.q.ranks)


class Plan:
    """The pair of pure functions for this rank's queries and the keys of all ranks.

    - `group`: of the ranks between which a `Transport` moves rows.
    - `runs_ahead`: whether rows go by the transport alone, which may run ahead of the ranks'
      agreement.
    - `received`: numbers of elements that other ranks send here in the forward.
    """

    name: str
    group: Any
    received: int
    runs_ahead = True

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """out, lse, max_logit and row_max of this rank's queries; the last two of them alone."""
        raise NotImplementedError

    def backward(
        self, spec: Spec, call: Call, transport: Transport, out: Tensor, lse: Tensor,
        dout: Tensor, dlse: Tensor | None, needs: Needs,
    ) -> Grads:  # fmt: skip
        """The gradients of this rank's tensors; those of the sink and of what is captured are this
        rank's share."""
        raise NotImplementedError


def setting_of(
    spec: Spec, call: Call, q: Pieces, kv: Pieces, group: Any, rank: int, own_tiles: bool
) -> Setting:
    """The setting of a call; its mask is decided for all ranks.

    **Raises:** `ArgumentError` where the pieces cut through tiles that are the caller's own.
    """
    (b, hq, _, d), hk, dv = call.q.shape, call.k.shape[1], call.v.shape[3]
    score, mask = graphs(spec)
    whole, offsets = None, (call.coords.b, call.coords.h)
    if mask is not None or call.tiles is not None:
        _, captured = split(spec, call.captured)
        tiles, known = (call.tiles, spec.tiles) if call.tiles is not None else (None, None)
        at = (b, hq), offsets, q, kv, call.q.device
        whole = whole_of(mask, captured, tiles, known, *at)  # type: ignore[arg-type]
        if whole is None and own_tiles:
            raise ArgumentError(
                "the tiles of this block mask are its own (lists of blocks), and the layout cuts "
                f"inside of them; cut at multiples of {spec.tiles and spec.tiles[2]}: "
                "Layout.balanced(..., tile=)"
            )
        if whole is None:
            whole = whole_of(mask, captured, None, None, *at)  # type: ignore[arg-type]
    sizes = Sizes(b, hq, hk, d, dv, call.q.dtype.itemsize)
    placed = score is not None and (score.uses("q_idx") or score.uses("kv_idx"))
    by_distance = score is not None and bool(diagonal_gathers(score))
    return Setting(sizes, q, kv, rank, group, call.q.device, whole, offsets, placed, by_distance)


# -- gradients ------------------------------------------------------------------------------------


def added(grads: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Gradients of captured tensors of several calls, added in order."""
    return [
        None if of[0] is None else torch.stack(of).sum(0) if len(of) > 1 else of[0]
        for of in zip(*grads, strict=True)
    ]
