"""The plan of inference: generated code, tile sizes and the launch, for all calls of one kind.

A kind is all calls that have one plan key, and so one compiled kernel. It has no lengths: lengths,
strides, offsets and the integers that scores and masks capture are arguments whose values Triton
does not specialize for; only whether they fit 32 bits counts. So a growing cache keeps its plan.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

import triton

from ....errors import BackendRefused
from ....types import KV, Spec
from ...base import Call
from ..codegen.emit import load_module
from ..codegen.int_ranges import POSITION_LIMIT
from ..codegen.spec import CodegenSpec
from ..counters import FIRST_FLAG, FLAGS
from ..device import maths, softmax, tiles
from ..products import bits_of
from ..runtime.call_plan import cached, needs_wide_offsets, offsets_of, readable
from ..runtime.launcher import CallArguments, KernelLauncher
from ..runtime.parallel_compile import fix_cache_keys
from ..runtime.tile_counter import zeroed_counter
from ..runtime.triton_startup import start_triton
from ..widths import pieces
from . import kernel, merge, work
from .block_lists import key_block_lists
from .config import MIN_KEYS, LaunchConfig, launch_configs, tile_rows_for
from .kernel import DecodeConfig, Pointers
from .work import CachePointers, DecodeSizes, Offsets

_SOURCES = maths, tiles, softmax, work, merge, kernel
_INT32_LIMIT = 1 << 29  # of n: a kernel gets 4 n + 2 (`call_plan.unspecialized`) in 32 bits
_LISTS_AT = DecodeSizes._fields.index("list_tiles")
_NO_CACHE = KV(None)  # type: ignore[arg-type]  # of a call whose k and v are plain tensors


class TileLayout(NamedTuple):
    """The shape of a kind's tiles, and how wide its loads are."""

    tile_rows: int
    operand_bits: int  # of the operands of a product: 16, 19 (tf32) or 32
    q_unit: int  # elements of a vector load of q: all of q's strides are multiples of it
    kv_unit: int  # the same for k and v
    v_in_k: bool  # v is the first columns of k (MLA), and is not loaded again
    page_keys: int  # 0: there are no pages
    narrow: bool  # positions and captured integers are small enough for 32-bit arithmetic


def plan_and_integers(spec: Spec, call: Call) -> "tuple[Plan, list[int]]":
    """Return the plan of a call whose q, k and v have contiguous rows, and the integers in which
    calls of one kind differ: `DecodeSizes`, `Offsets`, size and stride of every dimension of every
    captured tensor, and captured integers.

    Every launch calls it, so it reads each shape and stride once.
    """
    q, k, v, kv = call.q, call.k, call.v, call.kv or _NO_CACHE
    tensors, captured_ints, _ = call.captured
    (b, hq, q_len, d), (q_b, q_h, q_row, _) = q.shape, q.stride()
    (pages, hk, capacity, _), (k_b, k_h, k_row, _) = k.shape, k.stride()
    dv, (v_b, v_h, v_row, _) = v.shape[3], v.stride()
    page_keys = table_stride = 0
    if kv.lengths is not None:
        b = kv.lengths.shape[0]
    if kv.page_table is not None:
        page_keys, table_stride = capacity, kv.page_table.stride(0)
        capacity *= kv.page_table.shape[1]
    max_q = kv.max_q if kv.cu_q is not None else q_len

    # A load reads a unit at once: 8 elements, or 16 of one byte, if that divides all strides and
    # addresses are multiples of 16 bytes. Otherwise it reads element by element.
    q_unit = 8 if not (q_b | q_h | q_row) & 7 and not q.data_ptr() & 15 else 1
    kv_unit, k_address, v_address = 16 if k.dtype.itemsize == 1 else 8, k.data_ptr(), v.data_ptr()
    if (k_b | k_h | k_row | v_b | v_h | v_row) & (kv_unit - 1) or (k_address | v_address) & 15:
        kv_unit = 1
    operand_bits = bits_of(q.dtype)
    tile_rows = tile_rows_for(operand_bits, max(d, dv), max_q * (hq // hk))
    if kv_unit == 1 or k.dtype != q.dtype:
        # From 64 rows on, Hopper's products (WGMMA) read keys from shared memory. If asynchronous
        # copies do not put them there, ptxas 12.8 generates wrong code (docs/lab/compilers.md).
        tile_rows = min(tile_rows, 32)
    v_in_k = k_address == v_address and (k_b, k_h, k_row) == (v_b, v_h, v_row)
    v_in_k = v_in_k and dv == pieces(dv)[0] == pieces(d)[0]  # v is the first piece of k's columns

    offsets = Offsets(*offsets_of(call.coords))
    ends = offsets.b + b, offsets.h + hq, offsets.q + q_len, offsets.kv + capacity
    narrow = max(map(abs, (*offsets, *ends, *captured_ints))) <= POSITION_LIMIT
    k_scale_b, k_scale_h = (0, 0) if kv.k_scale is None else kv.k_scale.stride()
    v_scale_b, v_scale_h = (0, 0) if kv.v_scale is None else kv.v_scale.stride()
    sizes = DecodeSizes(
        b=b, q_len=q_len, kv_len=capacity, pages=pages, table_stride=table_stride,
        q_b=q_b // q_unit, q_h=q_h // q_unit, q_row=q_row // q_unit,
        k_b=k_b // kv_unit, k_h=k_h // kv_unit, v_b=v_b // kv_unit, v_h=v_h // kv_unit,
        k_scale_b=k_scale_b, k_scale_h=k_scale_h, v_scale_b=v_scale_b, v_scale_h=v_scale_h,
        list_tiles=0, list_width=0,  # `launch` sets them: they depend on the config's blocks
    )  # fmt: skip
    captured_sizes: list[int] = []
    for tensor in tensors:
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            # `readable` replaces an empty tensor by one of sizes of 1.
            captured_sizes += (size, stride) if tensor.numel() else (1, 1)
    integers = [*sizes, *offsets, *captured_sizes, *captured_ints]
    all_int32 = max(integers) < _INT32_LIMIT and min(integers) > -_INT32_LIMIT
    layout = TileLayout(tile_rows, operand_bits, q_unit, kv_unit, v_in_k, page_keys, narrow)
    key = (
        Plan, spec, layout, q.dtype, k.dtype, q.device, hq, hk, d, dv, k_row, v_row,
        kv.lengths is None, kv.cu_q is None, kv.k_scale is None, kv.v_scale is None,
        all_int32 or tuple([abs(n) < _INT32_LIMIT for n in integers]),
        *[(tensor.dtype, tensor.dim(), needs_wide_offsets(tensor)) for tensor in tensors],
    )  # fmt: skip
    return cached(key, lambda: Plan(spec, call, layout)), integers


class ConfiguredKernel(NamedTuple):
    """The kernel with one of a plan's configs, and what a launch takes from that config."""

    number: int
    block_keys: int
    ctas: int
    launcher: KernelLauncher


class Plan:
    """The kernel of calls of one kind, and the sizes it is compiled for."""

    def __init__(self, spec: Spec, call: Call, layout: TileLayout) -> None:
        start_triton()
        fix_cache_keys(*_SOURCES)
        q, k, v = call.q, call.k, call.v
        self.spec, self.device, self.page_keys = spec, q.device, layout.page_keys
        self.d, self.dv = k.shape[3], v.shape[3]
        self.generated = load_module(
            CodegenSpec(
                spec.score, spec.mask, (), layout.narrow,
                consecutive=False,
                wide_offsets=tuple(map(needs_wide_offsets, call.captured.tensors)),
                approx_tanh=q.dtype == torch.bfloat16 and cuda_target() is not None,
                limits=spec.tiles is None,  # else `key_block_lists` say which keys to visit
            )
        )  # fmt: skip
        fix_cache_keys(self.generated)
        self.tile_rows, dv_pieces = layout.tile_rows, pieces(self.dv)
        self.constants: dict[str, Any] = {
            "score": self.function("score"), "mask": self.function("mask"),
            "limits": self.function("limits"), "index": tl.int32 if layout.narrow else tl.int64,
            "precision": "tf32" if layout.operand_bits == 19 else "ieee",
            "positive_scale": spec.scale > 0,
            "track_max": spec.max_logit and spec.score is not None, "tile_rows": self.tile_rows,
            "group": q.shape[1] // k.shape[1], "kv_heads": k.shape[1],
            "d": _width(self.d), "dv": _width(self.dv), "page_keys": layout.page_keys,
            "q_unit": layout.q_unit, "kv_unit": layout.kv_unit,
            "k_row_stride": k.stride(2), "v_row_stride": v.stride(2), "v_in_k": layout.v_in_k,
            "byte_format": _byte_format(k.dtype),
            "merged_at_once": max(1, min(8, 8192 // (self.tile_rows * sum(dv_pieces)))),
        }  # fmt: skip
        self.mask_ints = len(call.captured.ints) - spec.score_ints
        self.partial_size = self.tile_rows * (sum(dv_pieces) + 4)  # as `merge.partial_size`
        self.configs = launch_configs(layout.operand_bits, max(self.d, self.dv), self.tile_rows)
        if triton.knobs.runtime.interpret:  # on the CPU, for tests
            self.configs = (LaunchConfig(32, 4, 1, 1),)
        self.configured = self.configure(0)

    def function(self, name: str) -> Any:
        """Return a generated function; None if the call has no such function."""
        return getattr(self.generated, name, None)

    def configure(self, number: int) -> "ConfiguredKernel":
        """Return the kernel with a config of the list."""
        config = self.configs[number]
        block_keys, stages = config.block_keys, config.stages
        if self.page_keys % block_keys:
            # A key's page number is loaded before the key. Triton shares the stages between both.
            stages = 2 * stages - 1
        ctas = min(processors(self.device) * config.ctas_per_processor, FLAGS)
        min_blocks = -(-MIN_KEYS // block_keys)
        options = {
            "CONFIG": DecodeConfig(**self.constants, block_keys=block_keys, min_blocks=min_blocks),
            "FIRST_COUNTER": FIRST_FLAG,
            "num_warps": config.warps, "num_stages": stages,
        }  # fmt: skip
        launcher = KernelLauncher(kernel.infer, self.device, options, ctas, self.arrange)
        return ConfiguredKernel(number, block_keys, ctas, launcher)

    def launch(
        self, call: Call, integers: list[int], out: Tensor, lse: Tensor,
        row_max: Tensor | None, max_logit: Tensor | None,
    ) -> None:  # fmt: skip
        """Launch the kernel, which writes out and lse, and the largest score and logit of every
        query if they are asked for.

        A GPU with too little shared memory for a config gets the next one.
        """
        k, v, kv = call.k, call.v, call.kv or _NO_CACHE
        if self.constants["byte_format"]:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        captured = [readable(tensor, self.device) for tensor in call.captured.tensors]
        counters = zeroed_counter(self.device)
        while True:
            configured = self.configured  # read once: another thread may go on to the next config
            lists: tuple[Tensor | None, ...] = (None,) * 3
            if self.spec.tiles is not None:
                lists = key_block_lists(self.spec, call, self.tile_rows, configured.block_keys)
                integers[_LISTS_AT : _LISTS_AT + 2] = lists.blocks.shape[2:]
            # `unspecialized` of each integer, inlined because every launch comes here.
            numbers = *[4 * n + 2 for n in integers], *call.captured.floats
            arguments = CallArguments.of(captured, numbers)
            # A CTA shares at most two units (`merge.py`).
            size = 2 * configured.ctas * self.partial_size
            partials = torch.empty(size, dtype=torch.float32, device=self.device)
            tensors = (
                *Pointers(call.q, k, v, out, lse, row_max, max_logit, call.sink),
                *CachePointers(
                    kv.lengths, kv.page_table, kv.cu_q, kv.k_scale, kv.v_scale, *lists
                ),
                partials, counters,
            )  # fmt: skip
            try:
                configured.launcher(tensors, arguments)
                return
            except OutOfResources as error:
                if configured.number + 1 == len(self.configs):
                    raise BackendRefused(
                        "inference has no tile small enough for this GPU at widths "
                        f"d = {self.d}, dv = {self.dv}: {error}; use backend='reference'"
                    ) from error
                self.configured = self.configure(configured.number + 1)

    def arrange(
        self, tensors: Sequence[Any], captured: Sequence[Any], numbers: Sequence[Any]
    ) -> tuple:
        """Return the arguments of the kernel, from those of `KernelLauncher`."""
        *pointers, partials, counters = tensors
        cache_start = len(Pointers._fields)
        remaining = iter(numbers)
        take = lambda count: tuple([next(remaining) for _ in range(count)])
        sizes = DecodeSizes(*take(len(DecodeSizes._fields)))
        offsets = Offsets(*take(len(Offsets._fields)))
        score_tensors: list[Any] = []
        mask_tensors: list[Any] = []
        for n, tensor in enumerate(captured):
            arguments = score_tensors if n < self.spec.score_tensors else mask_tensors
            arguments.extend((tensor, *take(2 * tensor.dim())))  # sizes and strides
        score_ints, mask_ints = take(self.spec.score_ints), take(self.mask_ints)
        score_floats, mask_floats = take(self.spec.score_floats), tuple(remaining)
        return (
            Pointers(*pointers[:cache_start]), CachePointers(*pointers[cache_start:]),
            partials, counters, self.spec.scale, sizes, offsets,
            tuple(score_tensors), tuple(mask_tensors), score_ints, mask_ints,
            score_floats, mask_floats,
        )  # fmt: skip


# -- properties of the GPU ------------------------------------------------------------------------


@lru_cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU. The CPU, where tests interpret and emulate kernels, has
    three."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def cuda_target() -> Any:
    """Return the GPU that kernels are compiled for, if it is NVIDIA's."""
    if triton.knobs.runtime.interpret:
        return None
    target = triton.runtime.driver.active.get_current_target()
    return target if target is not None and target.backend == "cuda" else None


def _byte_format(dtype: torch.dtype) -> str | None:
    """Return the format of numbers that the kernel gets as bytes: e5m2, and e4m3 below compute
    capability 8.9, where Triton does not convert it."""
    if dtype == torch.float8_e5m2:
        return "e5m2"
    target = None if triton.knobs.runtime.interpret else cuda_target()
    is_old = target is not None and target.arch < 89
    return "e4m3" if dtype == torch.float8_e4m3fn and is_old else None


def _width(columns: int) -> tiles.Width:
    return tiles.Width(*map(tl.constexpr, (columns, *pieces(columns))))
