"""A backend's pair for a rank's queries: one kernel for all, or one for each straight piece."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...backends import get
from ...backends.base import Call
from ...blocks import Tiles
from ...types import Coords, Forward, Grads, Spec
from .needs import coords_of, in_order, in_tiles
from .routes import Transport
from .setting import Plan, Setting, added

_LONG = 1024  # rows of a piece that has a kernel of its own


@dataclass(frozen=True)
class Rows:
    """Some of a rank's queries, and where they and their keys are; `tiles` and `known` are as in a
    block mask."""

    rows: slice
    coords: Coords
    tiles: Tiles | None = None
    known: tuple[int, int, int, int] | None = None


def rows_of_queries(
    s: Setting, heads: range, stretches: np.ndarray, needed: np.ndarray | None
) -> list[Rows]:
    """The kernels of a rank's queries, of some heads, over the keys in `stretches`, of which the
    mask needs the tiles `needed` (None: all are there). Their coordinates lack the head."""
    pieces, known = s.q.of(s.rank), None
    if s.whole is not None:
        known = (s.whole.b, len(heads) if s.whole.h > 1 else 1, *s.whole.tile)
    parts, stop = [], 0
    for piece in np.split(pieces, len(pieces)) if in_pieces(s, stretches) else [pieces]:
        rows = slice(stop, stop := stop + int((piece[:, 1] - piece[:, 0]).sum()))
        tiles = None if s.whole is None else s.whole.of(heads, s.rank, needed, piece)
        coords = coords_of((s.offsets[0], 0), piece, stretches, s.device)
        parts.append(Rows(rows, coords, tiles, known))
    return parts


def forward_of_rows(spec: Spec, call: Call, parts: list[Rows]) -> Forward:
    """A backend's forward, kernel by kernel."""
    found = [get(spec.backend).forward(*_part(spec, call, part)) for part in parts]
    return _of_all_rows(found)


class Given(NamedTuple):
    """What a backward is given besides its call."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    needs: tuple[bool, ...]

    def of(self, part: Rows) -> "Given":
        """For the rows of a part."""
        dlse = None if self.dlse is None else _here(self.dlse, part)
        out, lse, dout = (_here(x, part) for x in (self.out, self.lse, self.dout))
        return Given(out, lse, dout, dlse, self.needs)


def prepare_rows(spec: Spec, call: Call, parts: list[Rows], given: Given) -> list[Any]:
    """A backend's `prepare`, kernel by kernel."""
    prepare = get(spec.backend).prepare
    return [prepare(*_part(spec, call, part), *given.of(part)) for part in parts]


def backward_of_rows(
    spec: Spec, call: Call, parts: list[Rows], given: Given, prepared: list[Any] | None = None
) -> Grads:
    """A backend's backward, kernel by kernel.

    - `prepared`: from `prepare_rows`.
    """
    found = []
    for part, known in zip(parts, prepared or [None] * len(parts), strict=True):
        spec_, call_ = _part(spec, call, part)
        call_ = call_._replace(prepared=known)
        found.append(get(spec.backend).backward(spec_, call_, *given.of(part)))
    return _added_grads(found)


def _part(spec: Spec, call: Call, part: Rows) -> tuple[Spec, Call]:
    q = _here(call.q, part)
    into = call.into if q is call.q else ()  # memory of all rows
    call = call.replace(q=q, coords=part.coords, tiles=part.tiles, into=into)
    return spec.replace(tiles=part.known), call


def _here(x: Tensor, part: Rows) -> Tensor:
    """Of x (b, h, tokens, ...) the rows of a part; a view takes the host as long as ten lines."""
    rows = part.rows
    return x if rows.stop - rows.start == x.shape[2] else x[:, :, rows]


def in_pieces(s: Setting, stretches: np.ndarray) -> bool:
    """Whether each piece of a rank's queries has a kernel of its own, in which positions follow one
    another, as those of the keys in `stretches` do. Kernels then read biases by distance; and where
    pieces are cut inside of tiles, they add straight lines by tensor cores, and compute positions
    in 32 bits."""
    pieces = s.q.of(s.rank)
    return (
        (s.by_distance if in_tiles(pieces) else s.placed)
        and s.device.type == "cuda"
        and in_order(stretches)
        and (s.whole is None or s.whole.in_order)
        and 1 < len(pieces) <= 4
        and int((pieces[:, 1] - pieces[:, 0]).min()) >= _LONG
    )


def _of_all_rows(found: list[Forward]) -> Forward:
    """The results of all queries, of those of some after the other."""
    if len(found) == 1:
        return found[0]
    out, lse, top, row_max = zip(*found, strict=True)
    return Forward(
        torch.cat(out, 2), torch.cat(lse, 2),
        torch.stack(top).amax(0) if top[0].numel() else top[0],
        torch.cat(row_max, 2) if row_max[0].numel() else row_max[0],
    )  # fmt: skip


def _added_grads(found: list[Grads]) -> Grads:
    """The gradients for all queries, of those for some after the other."""
    first, *rest = found
    if not rest:
        return first
    for other in rest:
        first.k.add_(other.k)
        first.v.add_(other.v)
    sinks = [g.sink for g in found if g.sink is not None]
    return Grads(
        torch.cat([g.q for g in found], 2), first.k, first.v,
        torch.stack(sinks).sum(0) if sinks else None, added([g.captured for g in found]),
    )  # fmt: skip


class Here(Plan):
    """All keys are here: nothing travels.

    - `name`: of the plan; `parts`: its kernels.
    """

    received = 0

    def __init__(self, name: str, setting: Setting, parts: list[Rows]) -> None:
        self.name, self.group, self.parts = name, setting.group, parts

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        return forward_of_rows(spec, call, self.parts)

    def backward(self, spec, call, transport, out, lse, dout, dlse, needs):
        return backward_of_rows(spec, call, self.parts, Given(out, lse, dout, dlse, needs))


def local(s: Setting) -> Here:
    """The plan of a rank's queries and keys that every rank has."""
    everything = np.array([[0, s.kv.length]])
    parts = rows_of_queries(s, range(s.sizes.hq), everything, None)
    return Here("local", s, [replace(p, coords=p.coords._replace(h=s.offsets[1])) for p in parts])


def all_tokens(s: Setting) -> Here:
    """The plan of queries and keys of all tokens, in the order of the sequence."""
    tiles = known = None
    if s.whole is not None and s.whole.in_order:
        tiles, known = s.whole.tiles, (s.whole.b, s.whole.h, *s.whole.tile)
    return Here("here", s, [Rows(slice(0, s.q.length), Coords(*s.offsets), tiles, known)])
