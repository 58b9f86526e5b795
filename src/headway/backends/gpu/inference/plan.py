"""The plan of calls of a kind: code, tile sizes, the launch. A kind has no lengths: these, strides,
and the integers that scores and masks capture are arguments that nothing is compiled for."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

import triton

from ....errors import BackendRefused
from ....types import KV, Spec
from ...base import Call
from ..codegen.emit import Text, functions
from ..codegen.int_ranges import POSITION_LIMIT
from ..counters import FIRST_FLAG, FLAGS
from ..device import maths, tiles
from ..runtime.call_plan import cached
from ..runtime.launcher import CallArguments, KernelLauncher
from ..runtime.parallel_compile import fix_cache_keys
from ..runtime.tile_counter import zeroed_counter
from ..runtime.triton_startup import start_triton
from ..widths import pieces
from . import kernel, merge, work
from .config import KEYS, Config, configs, rows_of_tile
from .kernel import How, Pointers
from .work import Cache, Coords, Sizes, disguised

_SOURCES = maths, tiles, work, merge, kernel
_E4M3 = torch.float8_e4m3fn
INT32 = 1 << 29  # smaller integers are of 32 bits, `disguised` too
_NO_CACHE = KV(None)  # type: ignore[arg-type]


def planned(spec: Spec, call: Call) -> "Plan":
    """The plan for a call whose q, k and v have rows without gaps."""
    start_triton()
    q, k, v, *_ = call
    kv = call.kv or _NO_CACHE
    group = q.shape[1] // k.shape[1]
    most = kv.max_q if kv.cu_q is not None else q.shape[2]
    bits = _bits(q.dtype)
    rows = rows_of_tile(bits, max(q.shape[3], v.shape[3]), min(most, 1 << 20) * group)
    if _unit(k, v) == 1 or k.dtype != q.dtype:
        # Loads that do not run ahead, and keys that are converted: of products of 64 rows with
        # such factors the ptxas of CUDA 12.8 makes wrong code for Hopper.
        rows = min(rows, 32)
    tensors = call.captured.tensors
    key = (
        Plan, spec, q.dtype, k.dtype, q.device, q.shape[1], k.shape[1], q.shape[3], v.shape[3],
        bits, rows, _unit(q), _unit(k, v), k.stride(2), v.stride(2), _shared(k, v),
        0 if kv.page_table is None else k.shape[2], kv.lengths is None,
        kv.cu_q is None, kv.k_scale is None, kv.v_scale is None, _narrow(call),
        max(*q.stride(), *k.stride(), *v.stride()) < INT32,
        tuple([abs(n) < INT32 for n in call.captured.ints]),
        tuple([(t.dtype, t.dim(), _far(t), t.numel() < INT32) for t in tensors]),
    )  # fmt: skip
    return cached(key, lambda: Plan(spec, call, kv, rows, bits))


class Plan:
    """Calls of one kind."""

    def __init__(self, spec: Spec, call: Call, kv: KV, m: int, bits: int) -> None:
        fix_cache_keys(*_SOURCES)
        q, k, v, *_ = call
        self.spec, self.device, self.m = spec, q.device, m
        self.hk, self.d, self.dv = k.shape[1], k.shape[3], v.shape[3]
        narrow = _narrow(call)
        text = Text(
            spec.score, spec.mask, (), narrow,
            consecutive=False,
            wide_offsets=tuple(map(_far, call.captured.tensors)),
            approx_tanh=q.dtype == torch.bfloat16 and _target(self.device) is not None,
            limits=True,
        )  # fmt: skip
        self.generated = functions(text)
        fix_cache_keys(self.generated)
        self.page = 0 if kv.page_table is None else k.shape[2]
        self.shared = _shared(k, v)
        d, dv = pieces(self.d), pieces(self.dv)
        self.how: dict[str, Any] = {
            "score": self.function("score"), "mask": self.function("mask"),
            "limits": self.function("limits"), "index": tl.int32 if narrow else tl.int64,
            "precision": "tf32" if bits == 19 else "ieee", "positive": spec.scale > 0,
            "track_max": spec.max_logit and spec.score is not None, "m": m,
            "group": q.shape[1] // self.hk, "hk": self.hk,
            "d": tiles.Width(*map(tl.constexpr, (self.d, *d))),
            "dv": tiles.Width(*map(tl.constexpr, (self.dv, *dv))), "page": self.page,
            "q_unit": _unit(q), "unit": _unit(k, v), "k_row": k.stride(2), "v_row": v.stride(2),
            "shared": self.shared, "decode": k.dtype == _E4M3 and not _converts(self.device),
            "merge": max(1, min(8, 8192 // (m * sum(dv)))),
        }  # fmt: skip
        self.ints = spec.score_ints, len(call.captured.ints) - spec.score_ints
        self.partial = m * (sum(dv) + 4)  # numbers of a partial result
        # On the CPU there is Triton's interpreter, which needs no speed.
        self.rows = configs(bits, max(self.d, self.dv), m)
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
        self.kernel = KernelLauncher(
            kernel.infer, self.device, options, (self.ctas, 1, 1), self.arrange
        )

    def launch(
        self, call: Call, out: Tensor, lse: Tensor, row_max: Tensor | None, top: Tensor | None
    ) -> None:
        """Write out and lse; and the largest score and logit of every query, if given."""
        q, k, v, sink, *_ = call
        kv = call.kv or _NO_CACHE
        captured = [_readable(t, self.device) for t in call.captured.tensors]
        given = CallArguments.of(
            captured, (*self.integers(call, kv, captured), *call.captured.floats)
        )
        counters = zeroed_counter(self.device)
        while True:
            size = self.ctas * 2 * self.partial
            partials = torch.empty(size, dtype=torch.float32, device=self.device)
            if k.dtype == _E4M3 and self.how["decode"]:
                k, v = k.view(torch.uint8), v.view(torch.uint8)
            own = (
                q, k, v, out, lse, row_max, top, sink, kv.lengths, kv.page_table, kv.cu_q,
                kv.k_scale, kv.v_scale, partials, counters,
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

    def integers(self, call: Call, kv: KV, captured: Sequence[Tensor]) -> list[int]:
        """The integers that launches of one kind differ in: `Sizes`, offsets, sizes and strides of
        captured tensors, captured integers."""
        q, k, v, *_ = call
        q_unit, unit, table = self.how["q_unit"], self.how["unit"], kv.page_table
        found = [
            q.shape[0] if kv.lengths is None else kv.lengths.shape[0], q.shape[2],
            kv.capacity(k), k.shape[0],
            0 if table is None else table.stride(0),
            q.stride(0) // q_unit, q.stride(1) // q_unit, q.stride(2) // q_unit,
            k.stride(0) // unit, k.stride(1) // unit, v.stride(0) // unit, v.stride(1) // unit,
        ]  # fmt: skip
        for scale in (kv.k_scale, kv.v_scale):
            found += (0, 0) if scale is None else scale.stride()
        found += call.coords[:4]
        for t in captured:
            for size, stride in zip(t.shape, t.stride(), strict=True):
                found += size, stride
        return [*map(disguised, found), *map(disguised, call.captured.ints)]

    def arrange(self, own: Sequence[Any], tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple:
        """The arguments of the kernel."""
        *pointers, lengths, page_table, cu_q, k_scale, v_scale, partials, counters = own
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
            Pointers(*pointers), Cache(lengths, page_table, cu_q, k_scale, v_scale),
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


def _bits(dtype: torch.dtype) -> int:
    """The bits of the factors of a product: 16; 19 for tf32; 32 for IEEE, without tensor cores."""
    if dtype != torch.float32:
        return 16
    return 32 if torch.get_float32_matmul_precision() == "highest" else 19


def _unit(*matrices: Tensor) -> int:
    """As many numbers as 16 bytes have (8 of float32), if they divide all strides, and addresses
    are multiples of 16; else 1. Wide loads need that."""
    unit = 16 if matrices[0].element_size() == 1 else 8
    for x in matrices:
        batch, head, row, _ = x.stride()
        if (batch | head | row) % unit or x.data_ptr() % 16:
            return 1
    return unit


def _shared(k: Tensor, v: Tensor) -> bool:
    """Whether v is the columns of k that a kernel holds as one piece."""
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.shape[:3] == v.shape[:3]
    return (
        same
        and pieces(v.shape[3]) == (pieces(k.shape[3])[0], 0)
        and v.shape[3] == pieces(v.shape[3])[0]
    )


def _narrow(call: Call) -> bool:
    """Whether positions and captured integers are known to be small."""
    at, q, k = call.coords, call.q, call.k
    keys = k.shape[2] if call.kv is None else call.kv.capacity(k)
    rows = q.shape[0] if call.kv is None else call.kv.lengths.shape[0]
    ends = at.b + rows, at.h + q.shape[1], at.q + q.shape[2], at.kv + keys
    return max(map(abs, (*at[:4], *ends, *call.captured.ints))) <= POSITION_LIMIT


def _far(t: Tensor) -> bool:
    """Whether an offset into a tensor may need 64 bits."""
    pairs = zip(t.shape, t.stride(), strict=True)
    return sum((size - 1) * abs(step) for size, step in pairs) >= 2**31


def _readable(t: Tensor, device: torch.device) -> Tensor:
    """A captured tensor in memory that a kernel can read."""
    if not t.numel():  # a pair that is not kept may still read it
        return torch.zeros([1] * t.dim(), dtype=t.dtype, device=device)
    return t if t.device == device else t.to(device)


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
