"""The key blocks that a unit visits where a block mask chooses them: lists, made on the device.

A unit is the queries of a group in a tile (`work.py`); its heads and queries may have tiles of
their own, so it visits the union, and the mask decides pair by pair. Tiles that no query of it has
are neither read nor counted. Nothing waits for the device: sizes follow from shapes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ....types import Spec
from ...base import Call


class Listed(NamedTuple):
    """Lists of key blocks.

    - `blocks`: int32 `(b, hk, tiles, width)`, the numbers of live blocks first, ascending.
    - `counts`: int32 `(b, hk, tiles)`, how many are live; `most`: int32 `(b,)`, the largest of a
      row.
    """

    blocks: Tensor
    counts: Tensor
    most: Tensor


def listed(spec: Spec, call: Call, m: int, n: int) -> Listed:
    """The lists of a call with tiles, for tiles of `m` rows and blocks of `n` keys."""
    assert spec.tiles is not None
    assert call.tiles is not None
    assert call.kv is not None
    mask_b, mask_h, tile_q, tile_kv = spec.tiles
    lengths, capacity, device = call.kv.lengths, call.kv.capacity(call.k), call.q.device
    hq, hk, b = call.q.shape[1], call.k.shape[1], lengths.shape[0]
    group, width = hq // hk, -(-capacity // tile_kv)
    live = call.tiles.rows_full.dense(width) | call.tiles.rows_partial.dense(width)
    rows = live.shape[0] // (mask_b * mask_h)
    before = _sums(live.view(mask_b, mask_h, rows, width), 2)

    # The rows of tiles of a unit: those of its first and last query, and between.
    tiles = max(1, -(-call.kv.max_q * group // m))
    of_tile = torch.arange(tiles, device=device) * m
    if call.kv.cu_q is None:
        count = torch.full_like(lengths, call.q.shape[2])
    else:
        count = call.kv.cu_q.diff().clamp(min=0)
    last = ((of_tile + (m - 1)) // group).minimum(count[:, None] - 1)
    past = (lengths - count)[:, None]
    low, high = [
        ((past + i).clamp(min=0) // tile_q).clamp(max=rows - 1) for i in (of_tile // group, last)
    ]
    of_b = torch.arange(b, device=device)[:, None] * (mask_b > 1)
    of_unit = before[of_b, :, high + 1] > before[of_b, :, low]  # (b, tiles, mask_h, width)
    if mask_h > 1:
        of_unit = of_unit.unflatten(2, (hk, group)).any(3)
    of_unit = of_unit.expand(b, tiles, hk, width).transpose(1, 2)

    # From tiles of keys to the kernel's blocks, of the keys that are there.
    block = torch.arange(-(-capacity // n), device=device)
    before = _sums(of_unit, 3)
    last_column = ((block * n + (n - 1)) // tile_kv).clamp(max=width - 1)
    found = before[..., last_column + 1] > before[..., block * n // tile_kv]
    found = found & (block * n < lengths[:, None, None, None])
    counts = found.sum(-1, dtype=torch.int32)
    order = found.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return Listed(order.to(torch.int32), counts, counts.amax((1, 2)))


def _sums(live: Tensor, dim: int) -> Tensor:
    """How many are live before each place along a dimension, and in all."""
    sums = live.cumsum(dim, dtype=torch.int32)
    return torch.cat([torch.zeros_like(sums.narrow(dim, 0, 1)), sums], dim)
