"""Two kernels that compile in a moment, and what stands for a card and a tensor."""

from typing import NamedTuple

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import triton


@triton.jit
def double(x, n, SIZE: tl.constexpr):
    """x[i] *= 2."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@gluon.jit
def count(x, SHAPE, SIZE: gl.constexpr):
    """x[i] = i; SHAPE is a named tuple."""
    i = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(x + i, i, mask=i < SHAPE.rows)


class Shape(NamedTuple):
    rows: int


class Driver:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "no card"

    def get_current_stream(self, device: str) -> int:
        return 0


class Pointer:
    """What stands for a tensor."""

    dtype = "torch.float32"

    def data_ptr(self) -> int:
        return 0
