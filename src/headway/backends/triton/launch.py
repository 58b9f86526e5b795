"""From a call to kernel launches: what each kernel is given, and what is allocated for it."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ...blocks import cached_build
from ...dropout import threshold
from ...errors import BackendRefused
from ...mods.derivative import differentiable_gathers, joint
from ...mods.graph import parse
from ...types import Forward, Grads, Spec
from ..base import Call, graphs, split
from ..kernels.emit import SMALL, Text, functions
from . import tile
from .config import Config, configs, pieces
from .kernel_backward import backward_kv, backward_q
from .kernel_forward import forward as forward_kernel

_TILE = (128, 128)  # of the block masks built here


def forward(spec: Spec, call: Call) -> Forward:
    """One kernel; and where the largest logit is wanted, the maximum over its programs."""
    q, k, v = (_rows(x) for x in call[:3])
    (b, hq, q_len, d), (hk, kv_len), dv = q.shape, k.shape[1:3], v.shape[3]
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=q.device)
    out = new(b, hq, q_len, dv, dtype=torch.float32 if spec.partial else q.dtype)
    lse = new(b, hq, q_len)
    row_max = new(b, hq, q_len) if spec.row_max else None
    top = new(b, hq, 0)
    if lse.numel():
        common = _Common(spec, call, q, k, v)
        text = common.text()
        given = functions(text)

        def run(how: Config) -> Tensor:
            walk, programs, sub = common.walk(queries=True, rows=how.m, heads=hq)
            top = new(b, hq, walk.lines * sub) if spec.max_logit else None
            forward_kernel[(programs,)](
                q, k, v, out, lse, row_max, top, _contiguous(call.sink),
                q.stride()[:3], k.stride()[:3], v.stride()[:3],
                hq, hq // hk, q_len, kv_len, d, dv,
                spec.scale, common.coords, common.dropout, walk, *common.captured(),
                SCORE=getattr(given, "score", None), MASK=getattr(given, "mask", None),
                **common.constants(how), EVEN=common.even(kv_len, how.n), SUB=sub,
            )  # fmt: skip
            return top

        top = common.first_that_fits("forward", text, run)
    max_logit = new(0)
    if spec.max_logit:
        max_logit = top.amax(-1) if top.numel() else new(b, hq).fill_(-math.inf)
    return Forward(out, lse, max_logit, new(0) if row_max is None else row_max)


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, delta: Tensor,
    needs: tuple[bool, ...],
) -> Grads:  # fmt: skip
    """dq and what the score captures from one kernel, dk and dv from the other."""
    q, k, v, dout = (_rows(x) for x in (*call[:3], dout))
    lse, delta = lse.contiguous(), delta.float().contiguous()
    (b, hq, q_len, d), (hk, kv_len), dv = q.shape, k.shape[1:3], v.shape[3]
    dtype = torch.float32 if spec.partial else q.dtype
    common = _Common(spec, call, q, k, v)
    wanted = _wanted(spec.score, needs)
    captured = [
        torch.zeros(t.shape, dtype=torch.float32, device=q.device) if need else None
        for t, need in zip(common.of_score.tensors, needs, strict=True)
    ]
    dsink = None
    if call.sink is not None:
        dsink = _sink_grad(call.sink, lse, delta)
    if not lse.numel() or not kv_len:
        zero = lambda x: torch.zeros(x.shape, dtype=dtype, device=x.device)
        return Grads(zero(call.q), zero(call.k), zero(call.v), dsink, captured)

    text = common.text(wanted)
    given = functions(text)
    tensors = (q, k, v, dout, lse, delta)
    shared = (
        *(x.stride()[:3] for x in tensors[:4]), hq, hq // hk, q_len, kv_len, d, dv,
        spec.scale, common.coords, common.dropout,
    )  # fmt: skip
    both: dict[str, Any] = {
        "DERIVATIVE": getattr(given, "derivative", None),
        "MASK": getattr(given, "mask", None),
        "UNBOUNDED": spec.score is not None and joint(spec.score, wanted).unbounded,
    }

    def run_q(how: Config) -> Tensor:
        dq = torch.empty(q.shape, dtype=dtype, device=q.device)
        walk, programs, sub = common.walk(queries=True, rows=how.m, heads=hq)
        backward_q[(programs,)](
            *tensors, dq, *shared, walk, *common.captured(), _grads_of(text, captured),
            SCATTER=getattr(given, "scatter", None),
            **both, **common.constants(how), EVEN=common.even(kv_len, how.n), SUB=sub,
        )  # fmt: skip
        return dq

    def run_kv(how: Config) -> tuple[Tensor, Tensor]:
        # Query heads that share a key head work in parallel, and their results are summed here.
        acc = dtype if hq == hk else torch.float32
        dk = torch.empty((b, hq, kv_len, d), dtype=acc, device=q.device)
        dv_ = torch.empty((b, hq, kv_len, dv), dtype=acc, device=q.device)
        walk, programs, sub = common.walk(queries=False, rows=how.n, heads=hq)
        backward_kv[(programs,)](
            *tensors, dk, dv_, *shared, walk, *common.captured(),
            **both, **common.constants(how), EVEN=common.even(q_len, how.m), SUB=sub,
        )  # fmt: skip
        if hq == hk:
            return dk, dv_
        return tuple(x.unflatten(1, (hk, hq // hk)).sum(2).to(dtype) for x in (dk, dv_))

    dq = common.first_that_fits("backward_q", text, run_q)
    dk, dv_ = common.first_that_fits("backward_kv", text, run_kv)
    return Grads(dq, dk, dv_, dsink, captured)


_fits: dict[tuple, int] = {}  # the first row of `configs` that a device has room for


class _Common:
    """What the kernels of one call share."""

    def __init__(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.spec, self.call, self.q, self.k, self.v = spec, call, q, k, v
        self.of_score, self.of_mask = split(spec, call.captured)
        self.device = q.device
        self.tensors = [_tensors(c.tensors, q.device) for c in (self.of_score, self.of_mask)]
        at = call.coords
        q_pos, kv_pos = (_positions(p) for p in (at.q_pos, at.kv_pos))
        self.coords = tile.Coords(
            at.b, at.h, at.q, at.kv, q_pos, _batch_stride(q_pos), kv_pos, _batch_stride(kv_pos)
        )
        self.dropout = None
        if spec.dropout > 0:
            assert call.seed is not None
            limit = threshold(spec.dropout)
            factor = 1 / (1 - spec.dropout) if limit < 2**32 else 0.0
            seed = call.seed.to(q.device)
            self.dropout = tile.Dropout(seed, min(limit, 2**32 - 1), factor)
        self.tiles, self.mask_b, self.mask_h, self.tile = self._tiles()

    def _tiles(self) -> tuple:
        spec, call = self.spec, self.call
        if call.tiles is not None and spec.tiles is not None:
            return call.tiles, *spec.tiles[:2], spec.tiles[2:]
        _, mask = graphs(spec)
        (b, hq, q_len, _), kv_len = call.q.shape, call.k.shape[2]
        if mask is None or not min(b, hq, q_len, kv_len):
            return None, 1, 1, None
        shape = (b, hq, q_len, kv_len)
        return *cached_build(mask, self.of_mask, shape, _TILE, self.device, call.coords), _TILE

    def first_that_fits(self, kernel: str, text: Text, run: Callable[[Config], Any]) -> Any:
        """Launch with the best tile that the device has room for. Whether it has, the compiler
        says, before anything runs: a score may need shared memory of its own."""
        d, dv = (sum(pieces(x.shape[3])) for x in (self.q, self.v))
        rows = configs(kernel, self.q.element_size(), d, dv, self.spec.score is not None)
        if self.device.type == "cpu":
            rows = (Config(32, 32, 4, 1),)  # the interpreter
        key = kernel, text, self.q.dtype, d, dv, self.device
        for n in range(_fits.get(key, 0), len(rows)):
            try:
                result = run(rows[n])
            except OutOfResources as error:
                if n + 1 == len(rows):
                    raise BackendRefused(
                        f"backend='triton' has no tile small enough for this GPU: {error}; "
                        "use a smaller width, or backend='reference'"
                    ) from error
                continue
            _fits[key] = n
            return result
        raise AssertionError

    def constants(self, how: Config) -> dict[str, Any]:
        """Arguments that are part of a kernel's text."""
        d, dv = pieces(self.q.shape[3]), pieces(self.v.shape[3])
        return {
            "INDEX": tl.int32 if self.narrow() else tl.int64,
            "PRECISION": _precision(self.q.dtype),
            "POSITIVE": self.spec.scale > 0,
            "BLOCK_M": how.m, "BLOCK_N": how.n, "num_warps": how.warps, "num_stages": how.stages,
            "D": d[0], "D_REST": d[1], "DV": dv[0], "DV_REST": dv[1],
        }  # fmt: skip

    def narrow(self) -> bool:
        """Whether positions, and the ints that are captured, are known to be small."""
        at, (b, hq, q_len, _) = self.call.coords, self.q.shape
        if at.q_pos is not None or at.kv_pos is not None:
            return False
        ends = at.b + b, at.h + hq, at.q + q_len, at.kv + self.k.shape[2]
        return max(map(abs, (*at[:4], *ends, *self.call.captured.ints))) <= SMALL

    def text(self, wanted: tuple[int, ...] = ()) -> Text:
        far = tuple(
            sum((size - 1) * abs(step) for size, step in zip(t.shape, t.stride(), strict=True))
            >= 2**31
            for t in (*self.of_score.tensors, *self.of_mask.tensors)
        )
        at = self.call.coords
        straight = at.q_pos is None and at.kv_pos is None
        return Text(self.spec.score, self.spec.mask, wanted, self.narrow(), straight, far)

    def captured(self) -> tuple:
        """Tensors of score and mask, then their numbers."""
        numbers = ((*c.ints, *c.floats) for c in (self.of_score, self.of_mask))
        return *self.tensors, *numbers

    def even(self, length: int, block: int) -> bool:
        """Whether every run along the other side is whole blocks."""
        step = block if self.tile is None else min(self.tile)
        return length % block == 0 and step % block == 0

    def walk(self, *, queries: bool, rows: int, heads: int) -> tuple[tile.Walk, int, int]:
        """The lines of tiles, the number of programs, and programs per line."""
        length = (self.q if queries else self.k).shape[2]
        b = self.q.shape[0]
        if self.tiles is None:
            lines = -(-length // rows)
            return tile.Walk(None, None, None, 1, 1, lines, rows, rows), lines * heads * b, 1
        t, (size, step) = self.tiles, self.tile if queries else self.tile[::-1]
        lines = -(-length // size)
        sub = -(-size // rows)
        full, partial, order = (
            (t.rows_full, t.rows_partial, t.row_order)
            if queries
            else (t.cols_full, t.cols_partial, t.col_order)
        )
        walk = tile.Walk(
            tuple(full), tuple(partial), order, self.mask_b, self.mask_h, lines, size, step
        )
        free = (1 if self.mask_b > 1 else b) * (1 if self.mask_h > 1 else heads)
        return walk, lines * self.mask_b * self.mask_h * sub * free, sub


def _rows(x: Tensor) -> Tensor:
    """With rows of adjacent numbers."""
    return x if x.stride(3) == 1 else x.contiguous()


def _tensors(tensors: Sequence[Tensor], device: torch.device) -> tuple:
    """Pointer, then size and stride of every dimension, of every tensor."""
    found: list[Any] = []
    for t in tensors:
        if not t.numel():  # nothing to read, but a pair that is not kept may ask
            t = torch.zeros([1] * t.dim(), dtype=t.dtype, device=device)
        t = t.to(device)
        found.append(t.detach())
        for size, stride in zip(t.shape, t.stride(), strict=True):
            found += [size, stride]
    return tuple(found)


def _positions(pos: Tensor | None) -> Tensor | None:
    return None if pos is None else pos.to(torch.int64).contiguous()


def _batch_stride(pos: Tensor | None) -> int:
    return pos.shape[-1] if pos is not None and pos.dim() == 2 and len(pos) > 1 else 0


def _precision(dtype: torch.dtype) -> str:
    """float32 products as `torch.matmul` makes them: `torch.set_float32_matmul_precision`."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"


@lru_cache(maxsize=1024)
def _wanted(score: str | None, needs: tuple[bool, ...]) -> tuple[int, ...]:
    """The gathers of the score that want a gradient."""
    if score is None or not any(needs):
        return ()
    return differentiable_gathers(parse(score), [n for n, need in enumerate(needs) if need])


def _grads_of(text: Text, captured: list[Tensor | None]) -> tuple:
    """For every gather that wants a gradient, the gradient of its tensor."""
    if not text.wanted:
        return ()
    graph = parse(text.score)  # type: ignore[arg-type]
    return tuple(captured[int(graph.nodes[n].args[0][1:])] for n in text.wanted)  # type: ignore[index]


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _sink_grad(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink = −Σ_i exp(sink − lse) delta."""
    seen = lse.masked_fill(lse == -math.inf, math.inf)
    return -((sink.float()[:, None] - seen).exp() * delta).sum((0, 2))
