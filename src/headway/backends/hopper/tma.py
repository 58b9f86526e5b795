"""TMA descriptors, and their cache: where a tensor lies, and the tiles that it is copied by."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .device.gluon_compat import TensorDescriptor, gl


class TmaOperand:
    """The descriptors of one operand, for calls of one kind. Triton checks them once; after that
    only the tensor changes.

    - `make`: returns a tensor's descriptors, or None in their place.
    """

    def __init__(self, make: Callable[[Tensor], Sequence[TensorDescriptor | None]]) -> None:
        self.make = make
        self.classes: list[type | None] = []

    def __call__(self, x: Tensor) -> list[TensorDescriptor | None]:
        """Return the descriptors of `x`, which has the shape and strides of the first one."""
        if not self.classes:
            self.classes = [None if d is None else _class_of(d) for d in self.make(x)]
        return [make and make(x) for make in self.classes]


def _class_of(d: TensorDescriptor) -> type:
    """Return a class of descriptors that differ from `d` in their tensor alone. What they share
    belongs to the class, so that making one is a single assignment."""

    def set_tensor(self: Any, base: Tensor) -> None:
        self.base = base

    fields = {name: value for name, value in vars(d).items() if name != "base"}
    return type("TensorDescriptor", (TensorDescriptor,), fields | {"__init__": set_tensor})


def matrix_tiles(rows: int, widths: tuple[int, ...]) -> TmaOperand:
    """Describe tiles of `rows` rows of one head, of a tensor (batch, head, row, column), in one
    piece (the second descriptor is None) or two.

    TMA clips at every size: rows past the end of a head are read as zeros and not written.
    """

    def make(x: Tensor) -> list[TensorDescriptor | None]:
        aligned_stride = 16 // x.element_size()
        strides = [
            s if n > 1 else aligned_stride for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)
        ]
        descriptors: list[TensorDescriptor | None] = []
        for w in widths:
            dtype = getattr(gl, str(x.dtype).removeprefix("torch."))
            layout: Any = gl.NVMMASharedLayout.get_default_for([1, 1, rows, w], dtype)
            block = [1, 1, rows, w]
            descriptors.append(TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout))
        return descriptors + [None] * (2 - len(descriptors))

    return TmaOperand(make)


def row_vectors(rows: int) -> TmaOperand:
    """Describe tiles of `rows` values, of a float32 value per row."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TmaOperand(lambda x: [TensorDescriptor(x, [x.numel()], [1], [rows], layout)])


def dq_tiles(rows: int, second_rows: int = 0) -> TmaOperand:
    """Describe tiles of dQ's accumulator, which has rows of 256 values: of `rows` rows, and of
    `second_rows` (with 0, the second descriptor is None)."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)

    def make(x: Tensor) -> list[TensorDescriptor | None]:
        shape = [x.numel() // 256, 256]
        return [
            TensorDescriptor(x, shape, [256, 1], [n, 256], layout) if n else None
            for n in (rows, second_rows)
        ]

    return TmaOperand(make)


def aligned(*matrices: Tensor) -> Sequence[Tensor]:
    """Return the matrices at addresses where TMA can begin."""
    addresses = 0
    for x in matrices:
        addresses |= x.data_ptr()
    if addresses % 16 == 0:
        return matrices
    return [x if x.data_ptr() % 16 == 0 else _copied(x) for x in matrices]


def strides_fit(x: Tensor) -> bool:
    """Return whether TMA can follow the strides: rows of adjacent elements, steps of 16 bytes,
    nothing expanded."""
    pairs = zip(x.shape[:3], x.stride()[:3], strict=True)
    steps = [s * x.element_size() for n, s in pairs if n > 1]
    return x.stride(3) == 1 and all(s > 0 and s % 16 == 0 for s in steps)


def with_tma_strides(x: Tensor) -> Tensor:
    """Return the tensor, or a copy, with strides that TMA can follow."""
    return x if strides_fit(x) else _copied(x)


def _copied(x: Tensor) -> Tensor:
    (*lead, d), unit = x.shape, 16 // x.element_size()
    copy = torch.empty((*lead, -(-d // unit) * unit), dtype=x.dtype, device=x.device)[..., :d]
    return copy.copy_(x)
