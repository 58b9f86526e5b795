"""Writes of keys and values to the slots of a cache, both in one kernel."""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

import triton

from ..runtime.call_plan import cached
from ..runtime.launcher import CallArguments, KernelLauncher
from .plan import cuda_target, processors

_TILE = 2048  # elements of k, and of v, that a program has at a time
_PROGRAMS_PER_PROCESSOR = 16
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class NewStrides(NamedTuple):
    """The strides of new keys or values."""

    token: Any
    head: Any
    column: Any


class CacheStrides(NamedTuple):
    """The strides of a cache."""

    page: Any
    head: Any
    place: Any
    column: Any


def write_slots(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:  # fmt: skip
    """Launch the kernel; `backends.slots.write_slots`."""
    tensors = k, v, k_cache, v_cache, slots, k_scale, v_scale
    (tokens, heads, d), dv, (pages, _, page, _) = k.shape, v.shape[2], k_cache.shape
    block = _next_power_of_2(max(d, dv))
    rows = max(1, _TILE // block)
    # Every number of programs has a launcher of its own, so there are few numbers.
    programs = _next_power_of_2(-(-tokens * heads // rows))
    programs = min(programs, _PROGRAMS_PER_PROCESSOR * processors(k.device))
    key = (
        write_slots, k.device, programs, heads, page, d, dv, max(tokens, pages * page) < 2**31,
        *[None if x is None else (x.dtype, x.stride()) for x in tensors],
    )  # fmt: skip
    launcher = cached(key, lambda: _launcher(programs, rows, block, *tensors))
    launcher(tensors, CallArguments([], (tokens, pages * page), []))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()  # `triton.next_power_of_2` takes microseconds


def _launcher(
    programs: int, rows: int, block: int, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, *scales: Tensor | None,
) -> KernelLauncher:  # fmt: skip
    formats = [
        None if new.dtype == cache.dtype else _FORMATS.get(cache.dtype)
        for new, cache in ((k, k_cache), (v, v_cache))
    ]
    target = cuda_target()
    encodes = target is None or target.arch < 89  # else the GPU converts float8
    strides = (
        slots.stride(0), *[x.stride(0) if x is not None and x.dim() else 0 for x in scales],
        NewStrides(*k.stride()), NewStrides(*v.stride()), CacheStrides(*k_cache.stride()),
        CacheStrides(*v_cache.stride()),
    )  # fmt: skip

    def arrange(tensors: Any, _: Any, numbers: Any) -> tuple:
        """Pass float8 that the kernel copies or encodes as bytes."""
        matrices = [
            x.view(torch.uint8) if x.dtype.itemsize == 1 and (encodes or form is None) else x
            for x, form in zip(tensors[:4], 2 * formats, strict=True)
        ]
        return *matrices, *tensors[4:], *numbers, *strides

    options = {
        "HEADS": k.shape[1], "PAGE": k_cache.shape[2], "D": k.shape[2], "DV": v.shape[2],
        "K_FORMAT": formats[0], "V_FORMAT": formats[1], "ROWS": rows, "BLOCK": block,
    }  # fmt: skip
    return KernelLauncher(write_kernel, k.device, options, programs, arrange)


@triton.jit(do_not_specialize=["tokens", "slot_count"])
def write_kernel(
    k, v, k_cache, v_cache, slots, k_scale, v_scale, tokens, slot_count,
    slots_stride, k_scale_stride, v_scale_stride, k_strides, v_strides, k_cache_strides,
    v_cache_strides,
    HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write tiles of ROWS rows to their slots. A row is a head of a token."""
    row_count = tl.cast(tokens, tl.int64) * HEADS
    for tile in range(tl.program_id(0), tl.cdiv(row_count, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        token, head, live = row // HEADS, row % HEADS, row < row_count
        new_k = _read(k, k_scale, token, head, live, k_scale_stride, k_strides, D, BLOCK)
        new_v = _read(v, v_scale, token, head, live, v_scale_stride, v_strides, DV, BLOCK)
        slot = tl.load(slots + token * slots_stride, mask=live, other=-1).to(tl.int64)
        live = (slot >= 0) & (slot < slot_count)
        page, place = slot // PAGE, slot % PAGE
        _write(k_cache, new_k, page, head, place, live, k_cache_strides, K_FORMAT, D, BLOCK)
        _write(v_cache, new_v, page, head, place, live, v_cache_strides, V_FORMAT, DV, BLOCK)


@triton.jit
def _read(
    new, scale, token, head, live, scale_stride, strides, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Return rows of new keys or values, divided by their scale."""
    column = tl.arange(0, BLOCK).to(tl.int64)
    at = new + (token * strides.token + head * strides.head)[:, None]
    x = tl.load(
        at + (column * strides.column)[None, :], mask=live[:, None] & (column < WIDTH)[None, :],
        other=0,
    )  # fmt: skip
    if scale is not None:
        divisor = tl.load(scale + head * scale_stride, mask=live, other=1)[:, None]
        if x.dtype == tl.float64:
            x = x / divisor.to(tl.float64)
        else:
            x = tl.div_rn(x.to(tl.float32), divisor.to(tl.float32))
    return x


@triton.jit
def _write(
    cache, x, page, head, place, live, strides, FORMAT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write rows to their slots."""
    if FORMAT is not None:
        LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
        x = tl.minimum(x.to(tl.float32), LARGEST, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if cache.dtype.element_ty == tl.uint8:
            x = _float8_bits(x, FORMAT)
    column = tl.arange(0, BLOCK).to(tl.int64)
    at = cache + (page * strides.page + head * strides.head + place * strides.place)[:, None]
    at += (column * strides.column)[None, :]
    tl.store(at, x.to(cache.dtype.element_ty), mask=live[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _float8_bits(x, FORMAT: tl.constexpr):
    """Return float32 numbers within the range of a float8 format as its bits, rounded to the
    nearest, ties to even."""
    FRACTION: tl.constexpr = 3 if FORMAT == "e4m3" else 2  # bits
    BIAS: tl.constexpr = 7 if FORMAT == "e4m3" else 15  # of exponents
    DROPPED: tl.constexpr = 23 - FRACTION  # bits
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + ((1 << DROPPED - 1) - 1) + (magnitude >> DROPPED & 1)) >> DROPPED
    normal = rounded - (127 - BIAS << FRACTION)
    # Below the normal numbers the sum with this one rounds to a multiple of the smallest number.
    ALIGNER: tl.constexpr = 2.0 ** (24 - BIAS - FRACTION)
    aligned = (tl.abs(x) + ALIGNER).to(tl.uint32, bitcast=True)
    subnormal = aligned & 0x7FFFFF
    result = tl.where(tl.abs(x) < 2.0 ** (1 - BIAS), subnormal, normal)
    return tl.where(x == x, result, 0x7F) | (bits >> 24 & 0x80)
