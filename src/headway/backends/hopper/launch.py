"""From a call to kernel launches: descriptors, the order of work, and what is allocated for it."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...blocks import cached_build
from ...mods.derivative import differentiable_gathers, joint
from ...mods.graph import parse
from ...types import Forward, Grads, Spec
from ..base import Call, graphs, split
from ..kernels.emit import Text, functions
from ..kernels.rows import deltas
from ..kernels.varies import variation
from ..kernels.widths import SMALL
from . import tile
from .config import BACKWARD, FORWARD, ROWS, TILE, How, fitting, turns
from .gluon_api import TensorDescriptor, gl
from .kernel_backward import backward as backward_kernel
from .kernel_backward import finish, prepare
from .kernel_forward import forward as forward_kernel

# Of a warp-specialised kernel: warps of the first partition, and the registers that every thread
# starts with, from which the loader's share goes to the consumers.
_SPECIALISED = {"num_warps": 4, "maxnreg": 168}


def forward(spec: Spec, call: Call) -> Forward:
    """One kernel; and where the largest logit is wanted, the maximum over its tiles."""
    q, k, v = (aligned(x) for x in call[:3])
    (b, hq, q_len, d), (hk, kv_len), dv = q.shape, k.shape[1:3], v.shape[3]
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=q.device)
    out = new(b, hq, q_len, dv, dtype=torch.float32 if spec.partial else q.dtype)
    lse = new(b, hq, q_len)
    row_max = new(b, hq, q_len) if spec.row_max else None
    top = None
    if lse.numel() and kv_len:
        common = Common(spec, call, q, k, v)
        how = fitting(FORWARD, d, dv)
        block = min(how.block, 64) if common.heavy() else how.block
        walk, ranks, sub = common.walk(queries=True, rows=ROWS)
        top = new(b, hq, 2 * walk.lines * sub) if spec.max_logit else None
        given = functions(common.text())
        # Copies need rows of whole 16 bytes.
        padded = out if spec.partial or dv % 8 == 0 else new(b, hq, q_len, -(-dv // 8) * 8,
                                                             dtype=q.dtype)  # fmt: skip
        forward_kernel[(min(ranks, processors(q.device)),)](
            *described(q, ROWS // 2, how.d), *described(k, block, how.d),
            *described(v, block, how.dv),
            *((None, None) if spec.partial else described(padded[..., :dv], ROWS // 2, how.dv)),
            out if spec.partial else None, lse, row_max, top,
            None if call.sink is None else call.sink.contiguous(),
            torch.zeros(1, dtype=torch.int32, device=q.device), ranks,
            hq, hq // hk, q_len, kv_len, dv, spec.scale, common.coords, walk, *common.captured(),
            SCORE=getattr(given, "score", None), MASK=getattr(given, "mask", None),
            HOW=How(
                block, how.stages, sub, common.index(), positive=spec.scale > 0,
                own=how.own and not spec.partial,
                largest=spec.max_logit and spec.score is not None,
            ),
            **_SPECIALISED,
        )  # fmt: skip
        if padded is not out:
            out.copy_(padded[..., :dv])
    else:
        out.zero_()
        lse.copy_(lse.new_full((), -math.inf) if call.sink is None else call.sink.float()[:, None])
        if row_max is not None:
            row_max.fill_(-math.inf)
    max_logit = new(0)
    if spec.max_logit:
        max_logit = new(b, hq).fill_(-math.inf) if top is None else top.amax(-1)
    return Forward(out, lse, max_logit, new(0) if row_max is None else row_max)


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...],
) -> Grads:  # fmt: skip
    """One kernel for all gradients, between two small ones that put rows in its order and back."""
    q, k, v, dout = (aligned(x) for x in (*call[:3], dout))
    (b, hq, q_len, d), (hk, kv_len), dv = q.shape, k.shape[1:3], v.shape[3]
    dtype = torch.float32 if spec.partial else q.dtype
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=q.device)
    common = Common(spec, call, q, k, v)
    wanted = _wanted(spec.score, needs)
    captured = [
        torch.zeros(t.shape, dtype=torch.float32, device=q.device) if need else None
        for t, need in zip(common.of_score.tensors, needs, strict=True)
    ]
    how = fitting(BACKWARD, d, dv)
    q_rows = -(-q_len // how.block) * how.block
    delta = deltas(out, dout, dlse, q_rows)
    dsink = None if call.sink is None else _sink_grad(call.sink, lse, delta[..., :q_len])
    if not lse.numel() or not kv_len:
        zero = lambda x: torch.zeros(x.shape, dtype=dtype, device=x.device)
        return Grads(zero(call.q), zero(call.k), zero(call.v), dsink, captured)

    strips = how.d[0] // 64
    lse2 = new(b * hq * q_rows)
    prepare[(-(-q_rows // 256), b * hq)](lse.contiguous(), lse2, q_len, q_rows, 256)
    parts = torch.zeros(b * hq * q_rows * strips // 4, 256, device=q.device)
    # The query heads of a key head stay in one CTA, where a mask is alike for them.
    share = hq // hk if common.mask_h == 1 else 1
    walk, ranks, sub = common.walk(queries=False, rows=128, share=share)
    wide = spec.partial or share < hq // hk
    heads, size = hq // share, lambda n: -(-n // 8) * 8
    dk = new(b, heads, kv_len, d if wide else size(d), dtype=torch.float32 if wide else dtype)
    dv_ = new(b, heads, kv_len, dv if wide else size(dv), dtype=torch.float32 if wide else dtype)
    text = common.text(wanted)
    given = functions(text)
    backward_kernel[(ranks,)](
        described(q, how.block, how.d)[0], described(k, 64, how.d)[0],
        described(v, 64, how.dv)[0], described(dout, how.block, how.dv)[0],
        _rows_described(lse2, how.block), _rows_described(delta.view(-1), how.block), _parts(parts),
        None if wide else described(dk[..., :d], 64, how.d)[0],
        None if wide else described(dv_[..., :dv], 64, how.dv)[0],
        dk if wide else None, dv_ if wide else None, _grads_of(text, captured),
        hq, hq // hk, share, q_len, q_rows, kv_len, d, dv, spec.scale, common.coords, walk,
        *common.captured(),
        DERIVATIVE=getattr(given, "derivative", None), SCATTER=getattr(given, "scatter", None),
        MASK=getattr(given, "mask", None),
        HOW=How(
            how.block, how.stages, sub, common.index(), even=kv_len % 128 == 0,
            late=common.heavy(),
            unbounded=spec.score is not None and joint(spec.score, wanted).unbounded,
        ),
        **_SPECIALISED,
    )  # fmt: skip
    dq = new(*q.shape, dtype=dtype)
    finish[(b * hq * q_rows * strips // 64,)](parts, dq, spec.scale, q_len, q_rows, d, strips)
    if wide and heads > hk:
        dk, dv_ = (x.unflatten(1, (hk, heads // hk)).sum(2) for x in (dk, dv_))
    dk, dv_ = (x[..., :n].to(dtype).contiguous() for x, n in ((dk, d), (dv_, dv)))
    return Grads(dq, dk, dv_, dsink, captured)


class Common:
    """What the kernels of one call share."""

    def __init__(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.spec, self.call, self.q, self.k, self.v = spec, call, q, k, v
        self.of_score, self.of_mask = split(spec, call.captured)
        at = call.coords
        q_pos, kv_pos = (None if p is None else p.long().contiguous() for p in at[4:])
        self.coords = tile.Coords(
            at.b, at.h, at.q, at.kv, q_pos, _batch_stride(q_pos), kv_pos, _batch_stride(kv_pos)
        )
        self.tiles, self.mask_b, self.mask_h, self.tile = self._tiles()

    def _tiles(self) -> tuple:
        spec, call = self.spec, self.call
        if call.tiles is not None and spec.tiles is not None:
            return call.tiles, *spec.tiles[:2], spec.tiles[2:]
        _, mask = graphs(spec)
        if mask is None:
            return None, 1, 1, None
        shape = (*self.q.shape[:3], self.k.shape[2])
        built = cached_build(mask, self.of_mask, shape, TILE, self.q.device, call.coords)
        return *built, TILE

    def index(self) -> Any:
        """The type of positions."""
        return gl.int32 if self.narrow() else gl.int64

    def narrow(self) -> bool:
        """Whether positions, and the ints that are captured, are known to be small."""
        at, (b, hq, q_len, _) = self.call.coords, self.q.shape
        if at.q_pos is not None or at.kv_pos is not None:
            return False
        ends = at.b + b, at.h + hq, at.q + q_len, at.kv + self.k.shape[2]
        return max(map(abs, (*at[:4], *ends, *self.call.captured.ints))) <= SMALL

    def heavy(self) -> bool:
        """Whether every pair reads a number of its own: registers for as many addresses."""
        return any(
            variation(graph, node.args[1:]) in ("pairs", "diagonals")
            for graph in graphs(self.spec)
            if graph is not None
            for _, node in graph.gathers
        )

    def text(self, wanted: tuple[int, ...] = ()) -> Text:
        """What the functions of score and mask are made from. Diagonals of a tile are not summed
        here: that takes a tensor turned row by row."""
        far = tuple(
            sum((size - 1) * abs(step) for size, step in zip(t.shape, t.stride(), strict=True))
            >= 2**31
            for t in (*self.of_score.tensors, *self.of_mask.tensors)
        )
        rough = self.q.dtype == torch.bfloat16
        return Text(self.spec.score, self.spec.mask, wanted, self.narrow(), False, far, rough)

    def captured(self) -> tuple:
        """Tensors of score and mask, then their numbers."""
        tensors = (_tensors(c.tensors, self.q.device) for c in (self.of_score, self.of_mask))
        numbers = ((*c.ints, *c.floats) for c in (self.of_score, self.of_mask))
        return *tensors, *numbers

    def walk(self, *, queries: bool, rows: int, share: int = 1) -> tuple[tile.Walk, int, int]:
        """The lines of tiles, the number of ranks, and ranks per line."""
        (b, heads, q_len, _), kv_len = self.q.shape, self.k.shape[2]
        length, heads = q_len if queries else kv_len, heads // share
        near = 1
        if self.mask_h == 1:
            group = heads // self.k.shape[1]
            near = turns(heads, group, -(-length // rows), processors(self.q.device))
        if self.tiles is None:
            lines = -(-length // rows)
            walk = tile.Walk(None, None, None, 1, 1, lines, rows, rows, near)
            return walk, lines * heads * b, 1
        t, (size, step) = self.tiles, self.tile if queries else self.tile[::-1]
        lines, sub = -(-length // size), -(-size // rows)
        full, partial, order = (
            (t.rows_full, t.rows_partial, t.row_order)
            if queries
            else (t.cols_full, t.cols_partial, t.col_order)
        )
        walk = tile.Walk(
            tuple(full), tuple(partial), order, self.mask_b, self.mask_h, lines, size, step, near
        )
        free = (1 if self.mask_b > 1 else b) * (1 if self.mask_h > 1 else heads)
        return walk, lines * self.mask_b * self.mask_h * sub * free, sub


# -- descriptors ----------------------------------------------------------------------------------


def aligned(x: Tensor) -> Tensor:
    """As the copy engine needs it: rows of adjacent numbers, 16-byte steps, nothing expanded."""
    b, h, n, d = x.shape
    fits = x.stride(3) == 1 and x.data_ptr() % 16 == 0
    for size, step in zip(x.shape[:3], x.stride()[:3], strict=True):
        fits = fits and (size == 1 or (step > 0 and step * x.element_size() % 16 == 0))
    if fits:
        return x
    whole = 16 // x.element_size()
    copy = torch.empty((b, h, n, -(-d // whole) * whole), dtype=x.dtype, device=x.device)[..., :d]
    return copy.copy_(x)


def described(x: Tensor, rows: int, widths: tuple[int, ...]) -> list[TensorDescriptor | None]:
    """Two descriptors of (batch, head, row, column) for copies of `rows` rows of one head, in one
    piece (the other is None) or two.

    The engine clips at every size: rows past the end of a head are read as zeros and not written.
    """
    whole = 16 // x.element_size()
    strides = [s if n > 1 else whole for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    found: list[TensorDescriptor | None] = [
        TensorDescriptor(
            x.detach(), list(x.shape), [*strides, 1], [1, 1, rows, w], _layout(rows, w, x.dtype)
        )
        for w in widths
    ]
    return found + [None] * (2 - len(found))


@lru_cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], getattr(gl, str(dtype)[6:]))


@lru_cache
def processors(device: torch.device) -> int:
    """CTAs that run at once: each takes the shared memory of a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


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


def _rows_described(x: Tensor, rows: int) -> TensorDescriptor:
    """A number per row."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(x, [x.numel()], [1], [rows], layout)


def _parts(x: Tensor) -> TensorDescriptor:
    """Parts of dq: 4096 floats are a chunk."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), [256, 1], [16, 256], layout)


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


def _sink_grad(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink = −Σ_i exp(sink − lse) delta."""
    seen = lse.masked_fill(lse == -math.inf, math.inf)
    return -((sink.float()[:, None] - seen).exp() * delta).sum((0, 2))


def _batch_stride(pos: Tensor | None) -> int:
    return pos.shape[-1] if pos is not None and pos.dim() == 2 and len(pos) > 1 else 0
