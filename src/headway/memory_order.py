"""The memory order of out: its dimensions lie in memory in the order of q's, as in PyTorch's own
attention. A model that splits its heads by a view can then join them by one."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .types import surely


def new_in_order_of(
    q: Tensor, shape: Sequence[int], dtype: torch.dtype, device: Any = None
) -> Tensor:
    """Return an uninitialised out, on q's device if None."""
    order = _order_of(q)
    in_memory = q.new_empty([shape[n] for n in order], dtype=dtype, device=device)
    return in_memory.permute(_inverse(order))


def in_order_of(q: Tensor, out: Tensor) -> Tensor:
    """Return out, or a copy, in the memory order of q."""
    if _lies_in_order(q, out):
        return out
    order = _order_of(q)
    return out.permute(order).contiguous().permute(_inverse(order))


def _lies_in_order(q: Tensor, out: Tensor) -> bool:
    if is_compiling():  # it may not know lengths
        return all([surely(a == b) for a, b in zip(out.stride(), q.stride(), strict=True)])  # noqa: C419
    return out.stride() == q.stride() or out.permute(_order_of(q)).is_contiguous()


def exactly_in_order_of(q: Tensor, out: Tensor) -> Tensor:
    """Return `in_order_of` with the strides of `new_in_order_of`, those of dimensions of one entry
    included."""
    if out.stride() == _exact_strides(q.stride(), out.shape):
        return out
    order = _order_of(q)
    in_memory = out.permute(order)
    return in_memory.flatten().view(in_memory.shape).permute(_inverse(order))


@lru_cache(maxsize=4096)
def _exact_strides(of_q: tuple[int, ...], shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of `new_in_order_of`."""
    strides, step = [0] * 4, 1
    for n in reversed(_order(*of_q)):
        strides[n] = step
        step *= max(shape[n], 1)
    return tuple(strides)


def _order_of(q: Tensor) -> tuple[int, ...]:
    """Return the dimensions, the outermost first. An expanded one has no place in memory: it stays
    where it is."""
    steps = q.stride()
    if is_compiling() or any([type(step) is not int for step in steps]):  # noqa: C419
        return _order(*steps)
    return _cached_order(*steps)


def _order(*steps: int) -> tuple[int, ...]:
    order: list[int] = []
    for n in range(4):
        place = n
        if not surely(steps[n] == 0):
            for k in reversed(range(n)):
                other = steps[order[k]]
                if surely(steps[n] > other) and not surely(other == 0):
                    place = k
                elif not surely(other == 0):
                    break
        order.insert(place, n)
    return tuple(order)


_cached_order = lru_cache(maxsize=4096)(_order)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(n) for n in range(4)]
