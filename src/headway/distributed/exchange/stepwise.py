"""The plans of complete rows, heads after heads, and of rings, source after source."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backends import get
from ...backends.base import Call
from ...operators import results_like
from ...types import Forward, Grads, Spec, acc_dtype, in_dtype
from ..merge import merge
from .lanes import Lanes
from .needs import coords_of
from .routes import Arriving, Parts, Returning, Routes, Transport
from .rows import Given, Rows, backward_of_rows, forward_of_rows, prepare_rows, rows_of_queries
from .setting import Plan, Setting, added
from .symmetric import REGIONS

# -- heads and gather -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Key/value heads `heads`, and a kernel for each of `parts`, which are all queries together.

    - `number`: among the steps of its plan.
    """

    number: int
    heads: range
    routes: Routes
    parts: list[Rows]


class ByHeads(Plan):
    """Complete rows: step by step, the next step's keys on their way."""

    def __init__(self, name: str, setting: Setting, forward: list[int], backward: list[int]):
        self.name, self.group = name, setting.group
        self.group_size = setting.sizes.hq // setting.sizes.hk
        self.steps = list(self._steps(setting, forward))
        same = forward == backward
        self.steps_back = self.steps if same else list(self._steps(setting, backward))
        s = setting.sizes
        self.received = sum(
            step.routes.received * len(step.heads) * s.b * (s.d + s.dv) for step in self.steps
        )
        self.together = setting.together

    def _steps(self, s: Setting, sizes: list[int]) -> Iterator[Step]:
        shared: Any = None
        stop = 0
        for number, size in enumerate(sizes):
            heads = range(stop, stop := stop + size)
            of_q = range(heads.start * self.group_size, heads.stop * self.group_size)
            if shared is None or (s.whole is not None and s.whole.h > 1):
                shared = self._keys(s, of_q)
            routes, parts = shared
            h = s.offsets[1] + of_q.start
            here = [replace(part, coords=part.coords._replace(h=h)) for part in parts]
            yield Step(number, heads, routes, here)

    def _keys(self, s: Setting, of_q: range) -> tuple[Routes, list[Rows]]:
        """The way of the keys that query heads read, and the kernels of these heads."""
        wanted, needed = s.wanted(of_q)
        if self.name == "gather":
            wanted, needed = [np.array([[0, s.kv.length]])] * s.q.ranks, None
        return Routes(s.kv, wanted, s.group), rows_of_queries(s, of_q, wanted[s.rank], needed)

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        whole = list(results_like(spec.text, call.q, call.v, call.q.shape[0]))
        with self._lanes(self.steps, call, transport) as lanes:
            for step, coming in self._arriving(self.steps, call, transport, lanes):
                h = self._of_q(step)
                with lanes.of(step.number):
                    kv = coming.wait()
                    into = tuple([_of_heads(x, h) for x in whole[:2]])
                    found = forward_of_rows(spec, self._call(step, call, kv, into), step.parts)
                    _put(whole, found, h)
                lanes.keep(kv)
                del coming, kv, found  # before those of the next step but one are fetched
        return Forward(*whole)

    def backward(self, spec, call, transport, out, lse, dout, dlse, needs):
        acc = acc_dtype(call.q.dtype)
        of_q, of_kv = spec.grad_dtypes(call.q.dtype)
        spec = spec.replace(exact_kv=True)
        sinks: list[Tensor] = []
        captured: list[list[Tensor | None]] = []
        dq = [call.q.new_empty(call.q.shape, dtype=of_q)]
        dk, dv = (x.new_empty(x.shape, dtype=of_kv) for x in (call.k, call.v))
        going: list[tuple[Returning, Parts]] = []

        def begun(step: Step, coming: Arriving) -> tuple[Given, list[Any]]:
            h = self._of_q(step)
            given = Given(
                _of_heads(out, h), _of_heads(lse, h), _of_heads(dout, h),
                None if dlse is None else _of_heads(dlse, h), needs,
            )  # fmt: skip
            with lanes.of(step.number):
                part = self._call(step, call, coming.out, ())
                return given, prepare_rows(spec, part, step.parts, given)

        with self._lanes(self.steps_back, call, transport) as lanes:
            arriving, early = self._arriving(self.steps_back, call, transport, lanes), []
            if lanes.streams:  # before the first kernel, which lets nothing in
                arriving = list(arriving)
                early = [begun(*of) for of in arriving]
            for step, coming in arriving:
                given, prepared = early[step.number] if early else begun(step, coming)
                h, kv_heads = self._of_q(step), _heads(step)
                to = _of_heads(dk, kv_heads), _of_heads(dv, kv_heads)
                with lanes.of(step.number):
                    kv = coming.wait()
                    like = tuple(
                        [x.new_empty((*x.shape[:2], 0, x.shape[3]), dtype=acc) for x in kv]
                    )
                    leaving = transport.leaving(step.routes, like)
                    into = (_of_heads(dq[0], h), *(leaving.room or ()))
                    part = self._call(step, call, kv, into)
                    grads = backward_of_rows(spec, part, step.parts, given, prepared)
                    going.append((leaving.send((grads.k.to(acc), grads.v.to(acc))), to))
                    _put(dq, [in_dtype(grads.q, of_q)], h)
                lanes.keep(kv, prepared)
                if not lanes.streams and len(going) > 1:
                    _write(going.pop(0))  # beside this step's, which is on its way
                if grads.sink is not None:
                    sinks.append(grads.sink)
                captured.append(grads.captured)
                del coming, kv, part, prepared, grads, leaving, into
        for last in going:
            _write(last)
        return Grads(dq[0], dk, dv, torch.cat(sinks) if sinks else None, added(captured))

    def _lanes(self, steps: list[Step], call: Call, transport: Transport) -> Lanes:
        """Of steps whose keys all fit, and whose gradients have a region each."""
        several = self.together and 1 < len(steps) <= REGIONS
        return Lanes(call.q.device, several and transport.beside_kernels and call.q.is_cuda)

    def _arriving(
        self, steps: list[Step], call: Call, transport: Transport, lanes: Lanes
    ) -> Iterator[tuple[Step, Arriving]]:
        """Every step with its keys and values, on their way: of the next step too, or, for lanes,
        of all steps."""

        def fetch(step: Step) -> Arriving:
            h = _heads(step)
            return transport.fetch(step.routes, (_of_heads(call.k, h), _of_heads(call.v, h)))

        return _ahead(steps, fetch, len(steps) if lanes.streams else 1)

    def _of_q(self, step: Step) -> slice:
        return slice(step.heads.start * self.group_size, step.heads.stop * self.group_size)

    def _call(self, step: Step, call: Call, kv: Parts, into: tuple[Tensor, ...]) -> Call:
        h = self._of_q(step)
        sink = None if call.sink is None else call.sink[h]
        return call.replace(q=_of_heads(call.q, h), k=kv[0], v=kv[1], sink=sink, into=into)


def _put(whole: list[Tensor], part: Iterable[Tensor], h: slice) -> None:
    """Results `(b, h, ...)` of some heads become those of all: written where they belong, where
    they are not there already. What was not asked for has one dimension, and stays empty."""
    for n, x in enumerate(part):
        if x.dim() > 1 and x.shape[1] == whole[n].shape[1]:
            whole[n] = x
        elif x.dim() > 1 and x.data_ptr() != (there := whole[n][:, h]).data_ptr():
            there.copy_(x)


def _heads(step: Step) -> slice:
    return slice(step.heads.start, step.heads.stop)


def _of_heads(x: Tensor, h: slice) -> Tensor:
    """Of x (b, heads, ...) those heads."""
    return x if h.stop - h.start == x.shape[1] else x[:, h]


# -- ring -----------------------------------------------------------------------------------------


class Ring(Plan):
    """One source of keys after the other; results merge."""

    name = "ring"

    def __init__(self, setting: Setting) -> None:
        s, self.group = setting, setting.group
        wanted, _ = s.wanted(range(s.sizes.hq))
        self.steps = []
        for n in range(s.q.ranks):
            source = s.kv.of((s.rank - n) % s.q.ranks)
            stretches = _common(wanted[s.rank], source)
            coords = coords_of(s.offsets, s.q.of(s.rank), stretches, s.device)
            routes = Routes(s.kv, wanted, s.group, step=n)
            self.steps.append(Step(n, range(s.sizes.hk), routes, [Rows(slice(None), coords)]))
        each = s.sizes.b * s.sizes.hk * (s.sizes.d + s.sizes.dv)
        self.received = sum(step.routes.received for step in self.steps) * each

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        spec = spec.replace(partial=True, tiles=None)
        merged, found = None, []
        for step, coming in self._arriving(call, transport):
            kv = coming.wait()
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
        spec = spec.replace(partial=True, tiles=None)
        acc = acc_dtype(call.q.dtype)
        dq, found, going = None, [], None
        dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (call.k, call.v))
        for step, coming in self._arriving(call, transport):
            kv = coming.wait()
            spec_, part = self._part(spec, call, step, *kv)
            grads = get(spec.backend).backward(spec_, part, out, lse, dout, dlse, needs)
            dq = grads.q if dq is None else dq + grads.q
            parts = grads.k.to(acc), grads.v.to(acc)
            before, going = going, transport.home(step.routes, parts)
            if before is not None:
                before.add_to((dk, dv))
            found.append(grads)
        assert dq is not None
        assert going is not None
        going.add_to((dk, dv))
        sink = next((g.sink for g in found if g.sink is not None), None)
        return Grads(dq, dk, dv, sink, added([g.captured for g in found]))

    def _arriving(self, call: Call, transport: Transport) -> Iterator[tuple[Step, Arriving]]:
        return _ahead(self.steps, lambda step: transport.fetch(step.routes, (call.k, call.v)), 1)

    def _part(self, spec: Spec, call: Call, step: Step, k: Tensor, v: Tensor) -> tuple[Spec, Call]:
        """The sink joins the first softmax alone."""
        first = step is self.steps[0]
        call = call.replace(
            k=k, v=v, sink=call.sink if first else None, coords=step.parts[0].coords, tiles=None
        )
        return (spec if first else spec.replace(sink=False)), call


# -- what both do ----------------------------------------------------------------------------------


def _ahead(
    steps: list[Step], fetch: Callable[[Step], Arriving], count: int
) -> Iterator[tuple[Step, Arriving]]:
    """Every step with its keys and values, while those of the next `count` are on their way: these
    are laid out before anything waits."""
    coming: list[Arriving] = []
    for n, step in enumerate(steps):
        coming += map(fetch, steps[n + len(coming) : n + 1 + count])
        yield step, coming.pop(0)  # and no other step's is kept


def _write(going: tuple[Returning, Parts]) -> None:
    """Write the gradients of a step's heads, of what came home and this rank's own."""
    home, to = going
    home.write(to)


def _common(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What two ascending lists of stretches have in common."""
    found = [
        (max(a, c), min(b, d))
        for a, b in one.tolist()
        for c, d in other.tolist()
        if max(a, c) < min(b, d)
    ]
    return np.array(found, np.int64).reshape(-1, 2)
