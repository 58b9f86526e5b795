"""Block masks from lists of blocks: attention whose sparsity is chosen, not a formula."""

from dataclasses import replace
from typing import Never

import torch
from torch import Tensor

from ..api import block_mask
from ..arguments import check_function, count_of, shown
from ..blocks import BlockMask, Provenance, from_dense
from ..blocks.mask import tile_of
from ..errors import ArgumentError
from ..keywords import unknown_keywords
from ..mods import block_table
from ..mods.base import MaskFn


def top_k_blocks(
    indices: Tensor,  # (b, h, rows, k)
    block: int | tuple[int, int],
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    mask: MaskFn | None = None,
    heads: int | None = None,
    **unknown: Never,
) -> BlockMask:
    """Return a block mask from lists: query i attends to the blocks of keys that
    `indices[b, h, i // block_q]` names.

    Use it for a router that selects blocks for every batch, head and block of queries (NSA, MoBA).
    The selection has no gradient.

    ```python
    import torch
    import headway as hw

    q, k, v = torch.randn(3, 1, 4, 512, 64)
    mean = lambda x: x.unflatten(2, (-1, 64)).mean(3)  # (1, 4, 8, 64): of blocks of 64
    best = (mean(q) @ mean(k).mT).topk(3, -1).indices  # (1, 4, 8, 3)
    out = hw.attention(q, k, v, mask=hw.top_k_blocks(best, 64))
    ```

    **Arguments:**

    - `indices`: int `(b, h, rows, k)`: numbers of blocks of keys, in any order. -1 names no block,
      for rows with fewer than k. A block that is named twice counts once. b and h may be 1, which
      broadcasts.
    - `block`: queries and keys in a block. One number stands for both.
    - `q_len`, `kv_len`: lengths. Default: `rows * block_q`, and q_len. The last block may be short.
    - `mask`: a mask inside the blocks, such as `causal()`: a function or a value of the library.
    - `heads`: query heads, where a group of them shares a choice, as in NSA: h lists then serve
      `heads // h` query heads each. h if None.

    **Returns:** a `BlockMask` with tiles of `block`, for `attention(..., mask=)`. Besides its tiles
    it holds a byte for every block of the square. The Hopper kernels take tiles of (128, 128) and
    multiples: choose such blocks, or pass `.retile(128)`, which looks into tiles again.

    **Raises:** `ArgumentError` where a number is not that of a block, and not -1.

        mean = lambda x: x.unflatten(2, (-1, 64)).mean(3)          # (b, h, blocks, d), as MoBA does
        gate = mean(q) @ mean(k).mT
        gate = gate.masked_fill(torch.ones_like(gate).triu(1).bool(), -math.inf)
        score, chosen = gate.topk(4)
        chosen = torch.where(score > -math.inf, chosen, -1)
        mask = headway.top_k_blocks(chosen, 64, mask=headway.causal())

    (Yuan et al. 2025, Native Sparse Attention, arXiv 2502.11089, section 3.3; Lu et al. 2025, MoBA,
    arXiv 2502.13189)
    """
    if unknown:
        raise unknown_keywords(top_k_blocks, unknown)
    block = tile_of(block, "block")
    if (
        not isinstance(indices, Tensor)
        or indices.dim() != 4
        or indices.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8)
    ):
        got = shown(indices) if isinstance(indices, Tensor) else type(indices).__name__
        raise ArgumentError(f"indices must be an int tensor (b, h, rows, k), got {got}")
    if heads is not None:
        h, heads = indices.shape[1], count_of("heads", heads)
        if h == 0 or heads % h:
            raise ArgumentError(
                f"heads={heads} must be a multiple of the heads of indices, {h}: lists of key "
                "heads serve the query heads of their groups"
            )
        indices = indices.repeat_interleave(heads // h, 1)
    b, h, rows, _ = indices.shape
    q_len = count_of("q_len", rows * block[0] if q_len is None else q_len)
    kv_len = count_of("kv_len", q_len if kv_len is None else kv_len)
    if -(-q_len // block[0]) != rows:
        raise ArgumentError(
            f"indices have {rows} rows, but q_len={q_len} in blocks of {block[0]} has "
            f"{-(-q_len // block[0])}"
        )
    if mask is not None:
        check_function("mask", mask, (b, h, q_len, kv_len))
    columns = -(-kv_len // block[1])
    table = _table(indices, columns, kv_len, block[1])
    chosen_mask, state = block_table(table, block), table.to(torch.uint8) * 2
    if mask is not None:
        inside = block_mask(mask, b, h, q_len, kv_len, device=indices.device, tile=block)
        chosen_mask, state = chosen_mask & mask, torch.where(table, inside.to_dense(), 0)
    return replace(
        from_dense(state, chosen_mask, (q_len, kv_len), block), decided=Provenance.of(chosen_mask)
    )


def _table(indices: Tensor, columns: int, kv_len: int, block: int) -> Tensor:
    """Return which blocks the indices name, bool `(b, h, rows, columns)`."""
    with torch.inference_mode(False), torch.no_grad():
        block_indices = indices.to(torch.int64)
        if block_indices.numel():
            smallest, largest = (int(n) for n in block_indices.aminmax())
            if smallest < -1 or largest >= columns:
                raise ArgumentError(
                    f"indices: {smallest if smallest < -1 else largest} is not a valid block "
                    f"index: kv_len={kv_len} in blocks of {block} has {columns}, numbered from 0; "
                    "-1 names none"
                )
        # One column more, where -1 goes; a copy without it.
        table = torch.zeros(
            *block_indices.shape[:3], columns + 1, dtype=torch.bool, device=block_indices.device
        )
        table.scatter_(3, torch.where(block_indices < 0, columns, block_indices), True)
        return table[..., :columns].contiguous()
