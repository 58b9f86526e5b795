"""Checks of what the library's masks are made with."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...surroundings import host_can_read
from ...types import as_int
from ..base import Mask


def grid_sizes(mask: str, **sizes: int | Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return two checked sizes of 1 to 3 dimensions, equally many; a number is one dimension."""
    (shape_name, shape), (name, size) = sizes.items()
    numbers: Any = shape, size
    shape, size = (
        tuple(size_or_sizes) if hasattr(size_or_sizes, "__iter__") else (size_or_sizes,)
        for size_or_sizes in numbers
    )
    if not 1 <= len(shape) <= 3 or len(size) != len(shape):
        raise ArgumentError(
            f"{mask}: {shape_name}={shape} and {name}={size} must have one number for each "
            "dimension, 1 to 3 of them"
        )
    return (
        tuple([checked_int(mask, shape_name, number, minimum=1) for number in shape]),
        tuple([checked_int(mask, name, number, minimum=1) for number in size]),
    )


def check_on_grid(mask: str, shape: tuple[int, ...], q_len: int | None, kv_len: int | None) -> None:
    """Refuse positions past the end of a grid, where they would have no neighbours."""
    points = math.prod(shape)
    if (q_len or 0) > points or (kv_len or 0) > points:
        raise ArgumentError(
            f"{mask}: shape={shape} has {points} points, but this call has q_len={q_len} and "
            f"kv_len={kv_len}; give the shape that the positions are laid out in"
        )


def checked_int(mask: str, name: str, number: object, minimum: int | None) -> int:
    """Return a number as an int, checked to be at least `minimum`."""
    argument, number = number, as_int(number)
    if number is None or (minimum is not None and number < minimum):
        expected = "an integer" if minimum is None else f"an integer >= {minimum}"
        raise ArgumentError(f"{mask}({name}={argument!r}): {name} must be {expected}")
    return number


def set_int(mask: Mask, name: str, minimum: int | None) -> None:
    """Check a field, and replace other kinds of integers by Python's int."""
    field = getattr(mask, name)
    number = checked_int(type(mask).__name__, name, field, minimum)
    if number is not field:
        mask._set(**{name: number})


def check_parents(parents: Tensor, node: Tensor) -> None:
    """Refuse a parent that does not come before its children, on the CPU."""
    if (
        not parents.is_cpu
        or not host_can_read(parents)
        or not (out_of_order := parents >= node).any()
    ):
        return
    index = tuple(out_of_order.nonzero()[0].tolist())
    raise ArgumentError(
        f"tree: parents[{', '.join(map(str, index))}] is {parents[index].item()}, but a parent "
        f"comes before its children, with a number below {index[-1]}; number the nodes from the "
        "root on, and write -1 where there is no parent"
    )


def check_ids_tensor(
    mask: str, name: str, tensor: object, shape: str, dims: tuple[int, ...]
) -> None:
    """Refuse anything but a tensor of integers with so many dimensions."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"{mask}({name}={type(tensor).__name__}): convert {name} with torch.tensor(...); it "
            f"must be an int tensor {shape}"
        )
    if tensor.dim() not in dims or tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        raise ArgumentError(
            f"{mask}: {name} must be an int tensor {shape}, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
