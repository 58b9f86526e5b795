"""The plans of complete rows, heads after heads, and of rings, source after source."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backends import get
from ...backends.base import Call
from ...blocks import Tiles
from ...types import Coords, Forward, Grads, Spec, acc_dtype, in_dtype
from ..merge import merge
from .cost import LINK, away
from .needs import positions_of
from .routes import Arriving, Parts, Returning, Routes, Transport
from .setting import Plan, Setting, added, exactly

_STEP = 250e-6  # seconds; measured on two H100s, at 16k and 64k tokens
_MOST = 256 << 20  # bytes of the keys and values of a step

# -- heads and gather -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Key/value heads `heads` and their keys; `tiles` and `known` are as in a block mask.

    - `stretches`: positions (start, stop) of the keys, ascending.
    """

    heads: range
    routes: Routes
    coords: Coords
    stretches: np.ndarray
    tiles: Tiles | None = None
    known: tuple[int, int, int, int] | None = None


class ByHeads(Plan):
    """Complete rows: step by step, the next step's keys on their way."""

    def __init__(self, name: str, setting: Setting, per_step: int) -> None:
        self.name, self.group = name, setting.group
        self.group_size = setting.sizes.hq // setting.sizes.hk
        self.steps = list(self._steps(setting, per_step))
        s = setting.sizes
        self.received = sum(
            step.routes.received * len(step.heads) * s.b * (s.d + s.dv) for step in self.steps
        )

    def _steps(self, s: Setting, per_step: int) -> Iterator[Step]:
        q, q_pos = positions_of(s.q.of(s.rank), s.device)
        shared: Any = None
        for first in range(0, s.sizes.hk, per_step):
            heads = range(first, min(first + per_step, s.sizes.hk))
            of_q = range(heads.start * self.group_size, heads.stop * self.group_size)
            if shared is None or (s.whole is not None and s.whole.h > 1):
                shared = self._keys(s, of_q)
            routes, stretches, tiles = shared
            kv, kv_pos = positions_of(stretches, s.device)
            coords = Coords(s.offsets[0], s.offsets[1] + of_q.start, q, kv, q_pos, kv_pos)
            known = None
            if s.whole is not None:
                h = len(of_q) if s.whole.h > 1 else 1
                known = (s.whole.b, h, *s.whole.tile)
            yield Step(heads, routes, coords, stretches, tiles, known)

    def _keys(self, s: Setting, of_q: range) -> tuple[Routes, np.ndarray, Tiles | None]:
        wanted, needed = s.wanted(of_q)
        if self.name == "gather":
            wanted, needed = [np.array([[0, s.kv.length]])] * s.q.ranks, None
        tiles = None if s.whole is None else s.whole.of(of_q, s.rank, needed)
        return Routes(s.kv, wanted, s.group), wanted[s.rank], tiles

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        whole: list[Tensor] = []
        for step, kv in self._arriving(call, transport):
            spec_ = replace(spec, tiles=step.known)
            part = get(spec.backend).forward(spec_, self._call(step, call, *kv))
            _put(whole, part, self._of_q(step), call.q.shape[1])
            del kv, part  # before those of the next step but one are fetched
        return Forward(*whole)

    def backward(self, spec, call, transport, out, lse, dout, dlse, needs):
        acc = acc_dtype(call.q.dtype)
        dtype = acc if spec.partial else call.q.dtype  # of dq, whose rows are complete
        spec, exact = exactly(spec, call)
        sinks: list[Tensor] = []
        captured: list[list[Tensor | None]] = []
        dq: list[Tensor] = []  # one
        dk, dv = zeros_like(call, acc)
        going: tuple[Returning, Parts] | None = None
        for step, kv in self._arriving(call, transport):
            h, of_kv = self._of_q(step), _heads(step)
            part = exact(self._call(step, call, *kv))
            grads = get(spec.backend).backward(
                replace(spec, tiles=step.known), part, out[:, h], lse[:, h], dout[:, h],
                None if dlse is None else dlse[:, h], needs,
            )  # fmt: skip
            before = going
            going = (
                transport.home(step.routes, (grads.k.to(acc), grads.v.to(acc))),
                (dk[:, of_kv], dv[:, of_kv]),
            )
            _come_home(before)  # beside this step's, which is on its way
            _put(dq, [in_dtype(grads.q, dtype)], h, call.q.shape[1])
            if grads.sink is not None:
                sinks.append(grads.sink)
            captured.append(grads.captured)
            del kv, part, grads
        _come_home(going)
        return Grads(dq[0], dk, dv, torch.cat(sinks) if sinks else None, added(captured))

    def _arriving(self, call: Call, transport: Transport) -> Iterator[tuple[Step, Parts]]:
        """Every step with its keys and values."""

        def fetch(step: Step) -> Arriving:
            h = _heads(step)
            return transport.fetch(step.routes, (call.k[:, h], call.v[:, h]))

        return _ahead(self.steps, fetch)

    def _of_q(self, step: Step) -> slice:
        return slice(step.heads.start * self.group_size, step.heads.stop * self.group_size)

    def _call(self, step: Step, call: Call, k: Tensor, v: Tensor) -> Call:
        h = self._of_q(step)
        sink = None if call.sink is None else call.sink[h]
        return call.replace(
            q=call.q[:, h], k=k, v=v, sink=sink, coords=step.coords, tiles=step.tiles
        )


def _put(whole: list[Tensor], part: Iterable[Tensor], h: slice, heads: int) -> None:
    """Write results `(b, h, ...)` of some heads into those of all, which the first ones make, and
    are where they are of all; what was not asked for has one dimension, and stays empty."""
    first = not whole
    for n, x in enumerate(part):
        complete = x.dim() == 1 or x.shape[1] == heads
        if first:
            whole.append(x if complete else x.new_empty((x.shape[0], heads, *x.shape[2:])))
        if not complete:
            whole[n][:, h] = x


def _heads(step: Step) -> slice:
    return slice(step.heads.start, step.heads.stop)


# -- ring -----------------------------------------------------------------------------------------


class Ring(Plan):
    """One source of keys after the other; results merge."""

    name = "ring"

    def __init__(self, setting: Setting) -> None:
        s, self.group = setting, setting.group
        wanted, _ = s.wanted(range(s.sizes.hq))
        q, q_pos = positions_of(s.q.of(s.rank), s.device)
        self.steps = []
        for n in range(s.q.ranks):
            source = s.kv.of((s.rank - n) % s.q.ranks)
            stretches = _common(wanted[s.rank], source)
            kv, kv_pos = positions_of(stretches, s.device)
            coords = Coords(*s.offsets, q, kv, q_pos, kv_pos)
            routes = Routes(s.kv, wanted, s.group, step=n)
            self.steps.append(Step(range(s.sizes.hk), routes, coords, stretches))
        each = s.sizes.b * s.sizes.hk * (s.sizes.d + s.sizes.dv)
        self.received = sum(step.routes.received for step in self.steps) * each

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        spec = replace(spec, partial=True, tiles=None)
        merged, found = None, []
        for step, kv in self._arriving(call, transport):
            part = get(spec.backend).forward(*self._part(spec, call, step, *kv))
            pair = part.out, part.lse
            merged = pair if merged is None else merge(merged, pair)
            found.append(part[2:])
        assert merged is not None
        stats = [
            torch.stack(of).amax(0) if of[0].numel() else of[0] for of in zip(*found, strict=True)
        ]
        return Forward(*merged, *stats)

    def backward(self, spec, call, transport, out, lse, dout, dlse, needs):
        spec = replace(spec, partial=True, tiles=None)
        acc = acc_dtype(call.q.dtype)
        dq, found, going = None, [], None
        dk, dv = zeros_like(call, acc)
        for step, kv in self._arriving(call, transport):
            spec_, part = self._part(spec, call, step, *kv)
            grads = get(spec.backend).backward(spec_, part, out, lse, dout, dlse, needs)
            dq = grads.q if dq is None else dq + grads.q
            parts = grads.k.to(acc), grads.v.to(acc)
            before, going = going, (transport.home(step.routes, parts), (dk, dv))
            _come_home(before)
            found.append(grads)
        _come_home(going)
        assert dq is not None
        sink = next((g.sink for g in found if g.sink is not None), None)
        return Grads(dq, dk, dv, sink, added([g.captured for g in found]))

    def _arriving(self, call: Call, transport: Transport) -> Iterator[tuple[Step, Parts]]:
        return _ahead(self.steps, lambda step: transport.fetch(step.routes, (call.k, call.v)))

    def _part(self, spec: Spec, call: Call, step: Step, k: Tensor, v: Tensor) -> tuple[Spec, Call]:
        """The sink joins the first softmax alone."""
        first = step is self.steps[0]
        call = call.replace(
            k=k, v=v, sink=call.sink if first else None, coords=step.coords, tiles=None
        )
        return (spec if first else replace(spec, sink=False)), call


# -- what both do ----------------------------------------------------------------------------------


def _ahead(
    steps: list[Step], fetch: Callable[[Step], Arriving]
) -> Iterator[tuple[Step, Parts]]:  # fmt: skip
    """Every step with the keys and values that it waited for, the next one's on their way."""
    coming = fetch(steps[0])
    for n, step in enumerate(steps):
        kv = coming.wait()
        if n + 1 < len(steps):
            coming = fetch(steps[n + 1])
        yield step, kv


def _come_home(going: tuple[Returning, Parts] | None) -> None:
    """Add what a step sent home to the gradients of its heads."""
    if going is not None:
        home, total = going
        home.add_to(total)


def zeros_like(call: Call, dtype: torch.dtype) -> Parts:
    """For the gradients of k and v."""
    return tuple([torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (call.k, call.v)])


def _common(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What two ascending lists of stretches have in common."""
    found = [
        (max(a, c), min(b, d))
        for a, b in one.tolist()
        for c, d in other.tolist()
        if max(a, c) < min(b, d)
    ]
    return np.array(found, np.int64).reshape(-1, 2)


def heads_a_step(setting: Setting) -> int:
    """Key/value heads of a step; on the CPU one.

    On a GPU at least as many as fill it, with four waves of work tiles of 128 rows, and so many
    that what each step costs by itself (launches, the ends of kernels, putting results together)
    and what waits for the first step's keys are together as little as may be: with steps of c
    seconds and w seconds on the wire in all, w / steps + c steps is least at sqrt(w / c) steps. But
    no more than `_MOST` bytes.
    """
    s = setting.sizes
    if setting.device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(setting.device).multi_processor_count
    tiles = s.b * (s.hq // s.hk) * -(-int(setting.q.sizes.max()) // 128)
    full = -(-4 * processors // max(1, tiles))
    needed = setting.needed()
    of_head = s.b * (s.d + s.dv) * s.itemsize
    on_wire = away(needed, setting.kv.sizes) * s.hk * of_head / LINK["cuda"]  # seconds
    steps = max(1, round((on_wire / _STEP) ** 0.5))
    fitting = _MOST // max(1, max(needed) * of_head)
    return min(s.hk, max(full, min(-(-s.hk // steps), fitting), 1))
