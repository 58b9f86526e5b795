"""Lists of the key blocks that a block mask chooses, computed on the device.

A unit is the queries of a group in a tile (`work.py`). Its heads and queries may have different
tiles, so it visits the union, and the mask is evaluated for every pair. Tiles that none of its
queries has are neither read nor counted. The host never waits: sizes follow from shapes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ....types import Spec
from ...base import Call


class KeyBlockLists(NamedTuple):
    """Lists of key blocks.

    - `blocks`: int32 `(b, hk, tiles, width)`, the numbers of live blocks first, ascending.
    - `counts`: int32 `(b, hk, tiles)`, the number of live blocks.
    - `max_counts`: int32 `(b,)`, the largest count of a batch row.
    """

    blocks: Tensor
    counts: Tensor
    max_counts: Tensor


def key_block_lists(spec: Spec, call: Call, tile_rows: int, block_keys: int) -> KeyBlockLists:
    """Return the lists of a call with a block mask, for the kernel's tiles and blocks."""
    assert spec.tiles is not None
    assert call.tiles is not None
    assert call.kv is not None
    mask_b, mask_h, tile_q, tile_kv = spec.tiles
    lengths, capacity, device = call.kv.lengths, call.kv.capacity(call.k), call.q.device
    hq, hk, b = call.q.shape[1], call.k.shape[1], lengths.shape[0]
    group, width = hq // hk, -(-capacity // tile_kv)
    live = call.tiles.rows_full.dense(width) | call.tiles.rows_partial.dense(width)
    mask_rows = live.shape[0] // (mask_b * mask_h)
    live_before = _counts_before(live.view(mask_b, mask_h, mask_rows, width), 2)

    # A unit has the mask's tile rows from that of its first query to that of its last.
    tiles = max(1, -(-call.kv.max_q * group // tile_rows))
    first_row = torch.arange(tiles, device=device) * tile_rows
    if call.kv.cu_q is None:
        q_lengths = torch.full_like(lengths, call.q.shape[2])
    else:
        q_lengths = call.kv.cu_q.diff().clamp(min=0)
    first_query = first_row // group
    last_query = ((first_row + (tile_rows - 1)) // group).minimum(q_lengths[:, None] - 1)
    first_position = (lengths - q_lengths)[:, None]
    first_mask_row, last_mask_row = [
        ((first_position + query).clamp(min=0) // tile_q).clamp(max=mask_rows - 1)
        for query in (first_query, last_query)
    ]
    batch = torch.arange(b, device=device)[:, None] * (mask_b > 1)
    # (b, tiles, mask_h, width), then (b, hk, tiles, width)
    unit_tiles = live_before[batch, :, last_mask_row + 1] > live_before[batch, :, first_mask_row]
    if mask_h > 1:
        unit_tiles = unit_tiles.unflatten(2, (hk, group)).any(3)
    unit_tiles = unit_tiles.expand(b, tiles, hk, width).transpose(1, 2)

    # From tiles of the mask to blocks of the kernel, of the keys that exist.
    first_key = torch.arange(-(-capacity // block_keys), device=device) * block_keys
    live_before = _counts_before(unit_tiles, 3)
    last_column = ((first_key + (block_keys - 1)) // tile_kv).clamp(max=width - 1)
    live_blocks = live_before[..., last_column + 1] > live_before[..., first_key // tile_kv]
    live_blocks = live_blocks & (first_key < lengths[:, None, None, None])
    counts = live_blocks.sum(-1, dtype=torch.int32)
    order = live_blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return KeyBlockLists(order.to(torch.int32), counts, counts.amax((1, 2)))


def _counts_before(live: Tensor, dim: int) -> Tensor:
    """Return the number of live entries before each place along a dimension, and of all."""
    counts = live.cumsum(dim, dtype=torch.int32)
    return torch.cat([torch.zeros_like(counts.narrow(dim, 0, 1)), counts], dim)
