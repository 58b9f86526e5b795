"""The plan of calls of a kind: code, tile sizes, the launch. A kind has no lengths: these, strides,
and the integers that scores and masks capture are arguments that nothing is compiled for."""

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
from ..runtime.call_plan import cached, needs_wide_offsets, readable, unspecialized
from ..runtime.launcher import CallArguments, KernelLauncher
from ..runtime.parallel_compile import fix_cache_keys
from ..runtime.tile_counter import zeroed_counter
from ..runtime.triton_startup import start_triton
from ..widths import pieces
from . import kernel, merge, work
from .config import KEYS, Config, configs, rows_of_tile
from .kernel import How, Pointers
from .listed import listed
from .work import Cache, Coords, Sizes

_SOURCES = maths, tiles, softmax, work, merge, kernel
_E4M3 = torch.float8_e4m3fn
INT32 = 1 << 29  # smaller integers are of 32 bits, `unspecialized` too
_LIST_SIZES = Sizes._fields.index("list_tiles")
_NO_CACHE = KV(None)  # type: ignore[arg-type]


def planned(spec: Spec, call: Call) -> "tuple[Plan, list[int]]":
    """The plan for a call whose q, k and v have rows without gaps, and the integers in which calls
    of one kind differ, `unspecialized`: `Sizes`, `Coords`, sizes and strides of captured tensors,
    captured integers. It is called at every launch, so it asks tensors little."""
    q, k, v, _, _, (tensors, ints, _), _, at, _, kv, *_ = call
    kv = kv or _NO_CACHE
    (b, hq, q_len, d), (q_b, q_h, q_row, _) = q.shape, q.stride()
    (pages, hk, keys, _), (k_b, k_h, k_row, _) = k.shape, k.stride()
    dv, (v_b, v_h, v_row, _), dtype, kv_dtype = v.shape[3], v.stride(), q.dtype, k.dtype
    lengths, table, cu_q, most, k_scale, v_scale = kv
    page = table_row = 0
    if lengths is not None:
        b = lengths.shape[0]
    if table is not None:
        page, table_row, keys = keys, table.stride(0), table.shape[1] * keys
    most = most if cu_q is not None else q_len
    bits = bits_of(dtype)
    q_unit = 8 if not (q_b | q_h | q_row) & 7 and not q.data_ptr() & 15 else 1
    # As many numbers as 16 bytes have (8 of float32), if they divide all strides: wide loads need
    # that.
    unit, k_at, v_at = 16 if kv_dtype.itemsize == 1 else 8, k.data_ptr(), v.data_ptr()
    if (k_b | k_h | k_row | v_b | v_h | v_row) & (unit - 1) or (k_at | v_at) & 15:
        unit = 1
    rows = rows_of_tile(bits, max(d, dv), most * (hq // hk))
    if unit == 1 or kv_dtype != dtype:
        # Loads that do not run ahead, and keys that are converted: of products of 64 rows with
        # such factors the ptxas of CUDA 12.8 makes wrong code for Hopper.
        rows = min(rows, 32)
    # Whether v is the columns of k that a kernel holds as one piece.
    shared = k_at == v_at and (k_b, k_h, k_row) == (v_b, v_h, v_row)
    shared = shared and dv == pieces(dv)[0] == pieces(d)[0]
    ends = at.b + b, at.h + hq, at.q + q_len, at.kv + keys
    narrow = max(map(abs, (*at[:4], *ends, *ints))) <= POSITION_LIMIT
    found = [
        b, q_len, keys, pages, table_row, q_b // q_unit, q_h // q_unit, q_row // q_unit,
        k_b // unit, k_h // unit, v_b // unit, v_h // unit,
        *((0, 0) if k_scale is None else k_scale.stride()),
        *((0, 0) if v_scale is None else v_scale.stride()),
        0, 0,  # of lists, which `Plan.launch` knows
        *at[:4],
    ]  # fmt: skip
    for t in tensors:
        for size, stride in zip(t.shape, t.stride(), strict=True):
            # A tensor without numbers is replaced by one of sizes of 1.
            found += (size, stride) if t.numel() else (1, 1)
    found += ints
    small = max(map(abs, found)) < INT32
    key = (
        Plan, spec, dtype, kv_dtype, q.device, hq, hk, d, dv, bits, rows, q_unit, unit, k_row,
        v_row, shared, page, lengths is None, cu_q is None, k_scale is None, v_scale is None,
        narrow, small or tuple([abs(n) < INT32 for n in found]),
        *[(t.dtype, t.dim(), needs_wide_offsets(t)) for t in tensors],
    )  # fmt: skip
    made = Made(rows, bits, q_unit, unit, shared, page, narrow)
    plan = cached(key, lambda: Plan(spec, call, made))
    return plan, list(map(unspecialized, found))


class Made(NamedTuple):
    """What `planned` has found of a kind, for the plan."""

    m: int  # rows of a tile
    bits: int  # of the factors of a product
    q_unit: int
    unit: int
    shared: bool
    page: int
    narrow: bool  # positions and captured integers are small


class Plan:
    """Calls of one kind."""

    def __init__(self, spec: Spec, call: Call, made: Made) -> None:
        start_triton()
        fix_cache_keys(*_SOURCES)
        q, k, v, *_ = call
        m, narrow, self.page = made.m, made.narrow, made.page
        self.spec, self.device = spec, q.device
        self.hk, self.d, self.dv = k.shape[1], k.shape[3], v.shape[3]
        text = CodegenSpec(
            spec.score, spec.mask, (), narrow,
            consecutive=False,
            wide_offsets=tuple(map(needs_wide_offsets, call.captured.tensors)),
            approx_tanh=q.dtype == torch.bfloat16 and _target(self.device) is not None,
            limits=spec.tiles is None,
        )  # fmt: skip
        self.generated = load_module(text)
        fix_cache_keys(self.generated)
        d, dv = pieces(self.d), pieces(self.dv)
        self.how: dict[str, Any] = {
            "score": self.function("score"), "mask": self.function("mask"),
            "limits": self.function("limits"), "index": tl.int32 if narrow else tl.int64,
            "precision": "tf32" if made.bits == 19 else "ieee", "positive": spec.scale > 0,
            "track_max": spec.max_logit and spec.score is not None, "m": m,
            "group": q.shape[1] // self.hk, "hk": self.hk,
            "d": tiles.Width(*map(tl.constexpr, (self.d, *d))),
            "dv": tiles.Width(*map(tl.constexpr, (self.dv, *dv))), "page": self.page,
            "q_unit": made.q_unit, "unit": made.unit, "k_row": k.stride(2), "v_row": v.stride(2),
            "shared": made.shared, "decode": k.dtype == _E4M3 and not _converts(self.device),
            "merge": max(1, min(8, 8192 // (m * sum(dv)))),
        }  # fmt: skip
        self.ints = spec.score_ints, len(call.captured.ints) - spec.score_ints
        self.partial = m * (sum(dv) + 4)  # numbers of a partial result
        # On the CPU there is Triton's interpreter, which needs no speed.
        self.rows = configs(made.bits, max(self.d, self.dv), m)
        if triton.knobs.runtime.interpret:
            self.rows = (Config(32, 4, 1, 1),)
        self.choose(0)

    def function(self, name: str) -> Any:
        """A generated function; None if the call has no such function."""
        return getattr(self.generated, name, None)

    def choose(self, n: int) -> None:
        """Take the n-th row of the table."""
        self.row, how = n, self.rows[n]
        stages = how.stages
        if self.page % how.n:  # numbers of pages take as many stages as the keys on them
            stages = 2 * stages - 1
        self.ctas = min(processors(self.device) * how.ctas, FLAGS)
        options = {
            "HOW": How(**self.how, n=how.n, least=-(-KEYS // how.n)), "FIRST_COUNTER": FIRST_FLAG,
            "num_warps": how.warps, "num_stages": stages,
        }  # fmt: skip
        self.kernel = KernelLauncher(kernel.infer, self.device, options, self.ctas, self.arrange)

    def launch(
        self, call: Call, integers: list[int], out: Tensor, lse: Tensor, row_max: Tensor | None,
        top: Tensor | None,
    ) -> None:  # fmt: skip
        """Write out and lse; and the largest score and logit of every query, if given."""
        q, k, v, sink, _, (tensors, _, floats), *_ = call
        kv = call.kv or _NO_CACHE
        captured = [readable(t, self.device) for t in tensors]
        counters = zeroed_counter(self.device)
        while True:
            lists = (None,) * 3
            if self.spec.tiles is not None:
                lists = listed(self.spec, call, self.how["m"], self.rows[self.row].n)
                sizes = map(unspecialized, lists.blocks.shape[2:])
                integers[_LIST_SIZES : _LIST_SIZES + 2] = sizes
            given = CallArguments.of(captured, (*integers, *floats))
            size = self.ctas * 2 * self.partial
            partials = torch.empty(size, dtype=torch.float32, device=self.device)
            if k.dtype == _E4M3 and self.how["decode"]:
                k, v = k.view(torch.uint8), v.view(torch.uint8)
            own = (
                q, k, v, out, lse, row_max, top, sink, kv.lengths, kv.page_table, kv.cu_q,
                kv.k_scale, kv.v_scale, *lists, partials, counters,
            )  # fmt: skip
            try:
                self.kernel(own, given)
                return
            except OutOfResources as error:
                if self.row + 1 == len(self.rows):
                    raise BackendRefused(
                        "inference has no tile small enough for this GPU at widths "
                        f"d = {self.d}, dv = {self.dv}: {error}; use backend='reference'"
                    ) from error
                self.choose(self.row + 1)

    def arrange(self, own: Sequence[Any], tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple:
        """The arguments of the kernel."""
        *pointers, partials, counters = own
        of_cache = len(Pointers._fields)
        given = iter(numbers)
        take = lambda count: tuple([next(given) for _ in range(count)])
        integers = take(len(Sizes._fields) + len(Coords._fields))
        of_score: list[Any] = []
        of_mask: list[Any] = []
        for n, t in enumerate(tensors):
            (of_score if n < self.spec.score_tensors else of_mask).extend((t, *take(2 * t.dim())))
        ints = [take(count) for count in self.ints]
        x, floats = self.spec.score_floats, tuple(given)
        return (
            Pointers(*pointers[:of_cache]), Cache(*pointers[of_cache:]),
            partials, counters, self.spec.scale, integers, tuple(of_score), tuple(of_mask), *ints,
            floats[:x], floats[x:],
        )  # fmt: skip


# -- what a kind depends on -----------------------------------------------------------------------


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU. On the CPU, where there are an interpreter and an emulator for
    tests, a few."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def _target(device: torch.device) -> Any:
    """The GPU that kernels are compiled for, if it is NVIDIA's."""
    if triton.knobs.runtime.interpret:
        return None
    target = triton.runtime.driver.active.get_current_target()
    return target if target is not None and target.backend == "cuda" else None


def _converts(device: torch.device) -> bool:
    """Whether Triton converts e4m3 numbers there: on compute capability 8.9, and in the
    interpreter."""
    if triton.knobs.runtime.interpret:
        return True
    target = _target(device)
    return target is None or target.arch >= 89
