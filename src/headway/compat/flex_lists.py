"""Sizes and orders of the lists of blocks of PyTorch's `BlockMask`."""

from typing import Any

from torch import Tensor

from ..errors import ArgumentError


def block_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the sizes of a block in queries and in keys; a number stands for both."""
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]


def count_columns(indices: Tensor, lengths: tuple[int, int], block: tuple[int, int]) -> int:
    """Return how many blocks of keys there are: a list need not have room for all of them."""
    return max(indices.shape[-1], -(-lengths[1] // block[1]))


def refuse_write_order(*orders: Any) -> None:
    """Refuse what schedules FlashAttention's own kernels."""
    if any(x is not None for x in orders):
        raise ArgumentError(
            "dq_write_order, dq_write_order_full and dq_kv_order schedule FlashAttention's "
            "kernels, which do not run here; leave them out: deterministic gradients are "
            "headway.attention(..., deterministic=True)"
        )
