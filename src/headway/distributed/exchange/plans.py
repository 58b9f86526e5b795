"""How keys and values travel: plans of one kind of call, on one rank.

- "heads": some key/value heads after the other, only the tiles that the rank's mask needs, the next
  on their way while these are computed. Rows are complete, nothing is merged, and what is gathered
  is a few heads' at a time.
- "gather": all heads at once, of all tokens, by an all-gather.
- "ring": one rank's keys after the other's, the rank's own first; partial results in the
  accumulation dtype, which merge. (Liu et al. 2023, Ring Attention, arXiv 2310.01889)
- "ulysses": queries, keys and values of all tokens and some heads, by all-to-all; key/value heads
  are sent to several ranks where there are fewer than ranks. (Jacobs et al. 2023, DeepSpeed
  Ulysses, arXiv 2309.14509)

The backward fetches again: nothing that was gathered is kept. dK and dV go home in the accumulation
dtype and are added in the order of ranks. All ranks make the same exchanges in the same order, also
those that have nothing to send.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backends import get
from ...backends.base import Call, delta_of, graphs, split
from ...blocks import Tiles
from ...errors import ArgumentError
from ...types import Coords, Forward, Grads, Spec, acc_dtype, in_dtype
from ..merge import merge
from . import routes
from .cost import Sizes, cheapest
from .needs import Whole, positions_of, stretches_of, whole_of
from .routes import Gathering, Pieces, Returning, Routes, places

Needs = tuple[bool, ...]


@dataclass(frozen=True)
class Setting:
    """What a plan is made for: everything about a call but what is in its q, k and v.

    - `q`, `kv`: the pieces of queries and of keys; `rank`, `group`: of this process.
    - `whole`: the block mask of all ranks; None without a mask.
    - `offsets`: global indices of the first batch row and query head here.
    """

    sizes: Sizes
    q: Pieces
    kv: Pieces
    rank: int
    group: Any
    device: torch.device
    whole: Whole | None
    offsets: tuple[int, int]

    def wanted(self, heads: range) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Stretches of keys that every rank's queries read, and this rank's needed tiles."""
        if self.whole is None:
            everything = np.array([[0, self.kv.length]])
            return [everything[: int(n > 0)] for n in self.q.sizes], None
        needed = self.whole.needed(heads, self.q.ranks)
        tile, length = self.whole.tile[1], self.kv.length
        return [stretches_of(of, tile, length) for of in needed], needed[self.rank]

    def work(self) -> np.ndarray:
        """Pairs of live tiles of every rank, one head's where the mask has one for all."""
        whole, ranks = self.whole, self.q.ranks
        if whole is None:
            return self.q.sizes * float(self.kv.length)
        total = np.zeros(ranks)
        for runs in (whole.tiles.rows_full, whole.tiles.rows_partial):
            per_row = runs.per_row().to(device="cpu", dtype=torch.int64).numpy()
            total += np.bincount(np.tile(whole.owner, whole.b * whole.h), per_row, ranks)
        return total * (whole.tile[0] * whole.tile[1] / (whole.b * whole.h))


class Plan:
    """The pair of pure functions for this rank's queries and the keys of all ranks.

    - `received`: numbers of elements that other ranks send here in the forward.
    """

    name: str
    received: int

    def forward(self, spec: Spec, call: Call) -> Forward:
        """out, lse, max_logit and row_max of this rank's queries; the last two of them alone."""
        raise NotImplementedError

    def backward(
        self, spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        needs: Needs,
    ) -> Grads:  # fmt: skip
        """The gradients of this rank's tensors, in the accumulation dtype; those of the sink and of
        what is captured are this rank's share."""
        raise NotImplementedError


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
        self.name, self.group_size = name, setting.sizes.hq // setting.sizes.hk
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
        if self.name == "gather":
            tiles = None if s.whole is None else s.whole.of(of_q, s.rank, None)
            return Gathering(s.kv, s.group, s.device), np.array([[0, s.kv.length]]), tiles
        wanted, needed = s.wanted(of_q)
        tiles = None if s.whole is None else s.whole.of(of_q, s.rank, needed)
        routes = Routes(s.kv, wanted, s.group, s.device)
        return routes, wanted[s.rank], tiles

    def forward(self, spec: Spec, call: Call) -> Forward:
        """See `Plan`."""
        found = [
            get(spec.backend).forward(replace(spec, tiles=step.known), self._call(step, call, kv))
            for step, kv in self._arriving(call)
        ]
        return Forward(*[torch.cat(of, int(of[0].dim() > 1)) for of in zip(*found, strict=True)])

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        spec, exact = exactly(spec, call)
        found: list[Grads] = []
        total = rows_of(call.k, call.v, acc_dtype(call.q.dtype)).zero_()
        going: tuple[Returning, Step] | None = None
        for step, kv in self._arriving(call):
            h = self._of_q(step)
            part = exact(self._call(step, call, kv))
            grads = get(spec.backend).backward(
                replace(spec, tiles=step.known), part, out[:, h], lse[:, h], dout[:, h],
                None if dlse is None else dlse[:, h], needs,
            )  # fmt: skip
            before, going = going, (step.routes.home(rows_of(grads.k, grads.v, total.dtype)), step)
            _come_home(before, total)  # beside this step's, which is on its way
            found.append(grads)
        _come_home(going, total)
        sinks = [g.sink for g in found if g.sink is not None]
        return Grads(
            torch.cat([g.q for g in found], 1), *keys_of(total, call.k.shape[3]),
            torch.cat(sinks) if sinks else None, _sum([g.captured for g in found]),
        )  # fmt: skip

    def _arriving(self, call: Call) -> Iterator[tuple[Step, Tensor]]:
        """Every step with its keys and values, rows of tokens."""
        rows = rows_of(call.k, call.v, call.k.dtype)
        return _ahead(self.steps, lambda s: rows[:, :, s.heads.start : s.heads.stop])

    def _of_q(self, step: Step) -> slice:
        return slice(step.heads.start * self.group_size, step.heads.stop * self.group_size)

    def _call(self, step: Step, call: Call, rows: Tensor) -> Call:
        h = self._of_q(step)
        k, v = keys_of(rows, call.k.shape[3])
        sink = None if call.sink is None else call.sink[h]
        return call.replace(
            q=call.q[:, h], k=k, v=v, sink=sink, coords=step.coords, tiles=step.tiles
        )


# -- ring -----------------------------------------------------------------------------------------


class Ring(Plan):
    """One source of keys after the other; results merge."""

    name = "ring"

    def __init__(self, setting: Setting) -> None:
        s = setting
        wanted, _ = s.wanted(range(s.sizes.hq))
        q, q_pos = positions_of(s.q.of(s.rank), s.device)
        self.steps = []
        for n in range(s.q.ranks):
            source = s.kv.of((s.rank - n) % s.q.ranks)
            stretches = _common(wanted[s.rank], source)
            kv, kv_pos = positions_of(stretches, s.device)
            coords = Coords(*s.offsets, q, kv, q_pos, kv_pos)
            routes = Routes(s.kv, wanted, s.group, s.device, step=n)
            self.steps.append(Step(range(s.sizes.hk), routes, coords, stretches))
        each = s.sizes.b * s.sizes.hk * (s.sizes.d + s.sizes.dv)
        self.received = sum(step.routes.received for step in self.steps) * each

    def forward(self, spec: Spec, call: Call) -> Forward:
        """See `Plan`."""
        spec = replace(spec, partial=True, tiles=None)
        merged, found = None, []
        for step, rows in self._arriving(call):
            part = get(spec.backend).forward(*self._part(spec, call, step, rows))
            pair = part.out, part.lse
            merged = pair if merged is None else merge(merged, pair)
            found.append(part[2:])
        assert merged is not None
        stats = [
            torch.stack(of).amax(0) if of[0].numel() else of[0] for of in zip(*found, strict=True)
        ]
        return Forward(*merged, *stats)

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        spec = replace(spec, partial=True, tiles=None)
        acc = acc_dtype(call.q.dtype)
        dq, found = None, []
        total, going = rows_of(call.k, call.v, acc).zero_(), None
        for step, rows in self._arriving(call):
            spec_, part = self._part(spec, call, step, rows)
            grads = get(spec.backend).backward(spec_, part, out, lse, dout, dlse, needs)
            dq = grads.q if dq is None else dq + grads.q
            before, going = going, (step.routes.home(rows_of(grads.k, grads.v, acc)), step)
            _come_home(before, total)
            found.append(grads)
        _come_home(going, total)
        assert dq is not None
        sink = next((g.sink for g in found if g.sink is not None), None)
        return Grads(dq, *keys_of(total, call.k.shape[3]), sink, _sum([g.captured for g in found]))

    def _arriving(self, call: Call) -> Iterator[tuple[Step, Tensor]]:
        rows = rows_of(call.k, call.v, call.k.dtype)
        return _ahead(self.steps, lambda s: rows)

    def _part(self, spec: Spec, call: Call, step: Step, rows: Tensor) -> tuple[Spec, Call]:
        """The sink joins the first softmax alone."""
        k, v = keys_of(rows, call.k.shape[3])
        first = step is self.steps[0]
        call = call.replace(
            k=k, v=v, sink=call.sink if first else None, coords=step.coords, tiles=None
        )
        return (spec if first else replace(spec, sink=False)), call


# -- Ulysses --------------------------------------------------------------------------------------


class Ulysses(Plan):
    """All tokens and some heads."""

    name = "ulysses"

    def __init__(self, setting: Setting) -> None:
        s, self.group, ranks = setting, setting.group, setting.q.ranks
        hq, hk = s.sizes.hq, s.sizes.hk
        self.size, self.rank, self.offsets = hq // hk, s.rank, s.offsets
        cuts = [hq * n // ranks for n in range(ranks + 1)]
        self.q_heads = [range(*cuts[n : n + 2]) for n in range(ranks)]
        self.kv_heads = [
            range(of.start // self.size, -(-of.stop // self.size)) if len(of) else range(0)
            for of in self.q_heads
        ]
        self.q, self.kv = _Rows(s.q, s.device), _Rows(s.kv, s.device)
        self.calls = []  # heads of q here, of k here, the block mask's tiles
        mine = self.q_heads[s.rank]
        for heads in _same_groups(mine, self.size):
            first = heads.start // self.size - self.kv_heads[s.rank].start
            tiles = known = None
            if s.whole is not None and s.whole.in_order:
                tiles = s.whole.of(heads, None, None)
                known = (s.whole.b, len(heads) if s.whole.h > 1 else 1, *s.whole.tile)
            here = slice(heads.start - mine.start, heads.stop - mine.start)
            of_kv = slice(first, first + -(-len(heads) // self.size))
            self.calls.append((here, of_kv, tiles, known, heads.start))
        away_q = s.q.length - int(s.q.sizes[s.rank])
        away_kv = s.kv.length - int(s.kv.sizes[s.rank])
        d, dv = s.sizes.d, s.sizes.dv
        back = (hq - len(mine)) * int(s.q.sizes[s.rank]) * dv
        self.received = s.sizes.b * (
            away_q * len(mine) * d + away_kv * len(self.kv_heads[s.rank]) * (d + dv) + back
        )

    def forward(self, spec: Spec, call: Call) -> Forward:
        """See `Plan`."""
        q, k, v = self._here(call)
        b, hq, acc = q.shape[0], q.shape[1], acc_dtype(q.dtype)
        length = self.q.length
        out = q.new_empty((b, hq, length, v.shape[3]), dtype=spec.out_dtype(q.dtype))
        lse = q.new_empty((b, hq, length), dtype=acc)
        top = q.new_full((b, call.q.shape[1] if spec.max_logit else 0), -torch.inf, dtype=acc)
        row_max = torch.empty_like(lse) if spec.row_max else None
        mine = self.q_heads[self.rank]
        for here, of_kv, tiles, known, first in self.calls:
            spec_, part = self._part(spec, call, q, k, v, here, of_kv, tiles, known, first)
            found = get(spec.backend).forward(spec_, part)
            out[:, here], lse[:, here] = found.out, found.lse
            if spec.max_logit:
                top[:, mine.start + here.start : mine.start + here.stop] = found.max_logit
            if row_max is not None:
                row_max[:, here] = found.row_max
        return Forward(
            self._home(out),
            self._home(lse[..., None])[..., 0],
            top if spec.max_logit else lse.new_empty(0),
            lse.new_empty(0) if row_max is None else self._home(row_max[..., None])[..., 0],
        )

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        acc = acc_dtype(call.q.dtype)
        spec, exact = exactly(spec, call)
        # The owner of a row knows its delta = rowsum(dout∘out) − dlse: with an out of 0, whose
        # product is 0, the gradient of lse that gives it is −delta. So out is not sent.
        rows = torch.stack([lse, delta_of(out, dout, dlse, acc)], -1)
        q, k, v = self._here(call)
        do = self._over(dout, self.q, self.q_heads)
        rows = self._over(rows, self.q, self.q_heads)
        nothing = do.new_zeros(()).expand(do.shape)
        dq, dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (q, k, v))
        dsink = None if call.sink is None else torch.zeros_like(call.sink, dtype=acc)
        captured: list[list[Tensor | None]] = []
        mine = self.q_heads[self.rank]
        for here, of_kv, tiles, known, first in self.calls:
            spec_, part = self._part(spec, call, q, k, v, here, of_kv, tiles, known, first)
            grads = get(spec.backend).backward(
                spec_, exact(part), nothing[:, here], rows[:, here, :, 0].contiguous(),
                do[:, here], -rows[:, here, :, 1], needs,
            )  # fmt: skip
            dq[:, here] = grads.q.to(acc)
            dk[:, of_kv] += grads.k
            dv[:, of_kv] += grads.v
            if dsink is not None and grads.sink is not None:
                dsink[mine.start + here.start : mine.start + here.stop] = grads.sink
            captured.append(grads.captured)
        learned = [
            torch.zeros(t.shape, dtype=acc, device=t.device) if need else None
            for t, need in zip(call.captured.tensors, needs, strict=False)
        ]
        return Grads(
            self._home(dq), self._home_keys(dk, call.k), self._home_keys(dv, call.v), dsink,
            _sum([learned, *captured]),
        )  # fmt: skip

    def _here(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        kv = torch.cat([call.k, call.v], -1)
        q, kv = self._over(call.q, self.q, self.q_heads), self._over(kv, self.kv, self.kv_heads)
        return q, kv[..., : call.k.shape[3]], kv[..., call.k.shape[3] :]

    def _part(self, spec, call, q, k, v, here, of_kv, tiles, known, first):
        sink = None
        if call.sink is not None:
            sink = call.sink[first : first + here.stop - here.start]
        coords = Coords(self.offsets[0], self.offsets[1] + first)
        part = call.replace(
            q=q[:, here], k=k[:, of_kv], v=v[:, of_kv], sink=sink, coords=coords, tiles=tiles
        )
        return replace(spec, tiles=known), part

    def _over(self, x: Tensor, rows: "_Rows", heads: list[range]) -> Tensor:
        """(b, all heads, local, ...) to (b, heads of this rank, all tokens, ...)."""
        given = [x[:, of.start : of.stop] for of in heads]
        mine, (b, _, _, width) = len(heads[self.rank]), x.shape
        shapes = [(b, mine, int(n), width) for n in rows.sizes]
        found = self._exchange(given, shapes, x)
        return torch.cat(found, 2).index_select(2, rows.order)

    def _home(self, x: Tensor) -> Tensor:
        """(b, heads of this rank, all queries, width) to (b, all heads, local, width)."""
        given = x.index_select(2, self.q.back).split(self.q.sizes, 2)
        local, width = self.q.sizes[self.rank], x.shape[3]
        shapes = [(x.shape[0], len(of), local, width) for of in self.q_heads]
        return torch.cat(self._exchange(given, shapes, x), 1)

    def _home_keys(self, x: Tensor, like: Tensor) -> Tensor:
        """Gradients of keys, of which several ranks may have had a head, added rank after rank."""
        given = x.index_select(2, self.kv.back).split(self.kv.sizes, 2)
        local, width = self.kv.sizes[self.rank], x.shape[3]
        shapes = [(x.shape[0], len(of), local, width) for of in self.kv_heads]
        total = torch.zeros(like.shape, dtype=x.dtype, device=x.device)
        for of, part in zip(self.kv_heads, self._exchange(given, shapes, x), strict=True):
            total[:, of.start : of.stop] += part
        return total

    def _exchange(self, given: Any, shapes: list[tuple], like: Tensor) -> list[Tensor]:
        send = torch.cat([x.flatten() for x in given])
        sizes = [int(np.prod(shape)) for shape in shapes]
        out = like.new_empty(sum(sizes))
        routes.all_to_all(out, send, sizes, [x.numel() for x in given], self.group).wait()
        return [x.view(shape) for x, shape in zip(out.split(sizes), shapes, strict=True)]


class _Rows:
    """Tokens in the order of ranks, and in that of the sequence."""

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        self.sizes, self.length = [int(n) for n in pieces.sizes], pieces.length
        before = pieces.sizes.cumsum() - pieces.sizes
        where = places(before[pieces.rank] + pieces.at, pieces.stop - pieces.start)
        self.order = torch.from_numpy(where).to(device)
        self.back = torch.from_numpy(where.argsort()).to(device)


def _same_groups(heads: range, size: int) -> list[range]:
    """Query heads in parts of which each reads whole groups, or a part of one group."""
    first, last = -(-heads.start // size) * size, heads.stop // size * size
    if first > last or not len(heads):
        return [heads] if len(heads) else []
    parts = range(heads.start, first), range(first, last), range(last, heads.stop)
    return [part for part in parts if len(part)]


# -- which ----------------------------------------------------------------------------------------


def plan_of(name: str, setting: Setting, own_tiles: bool) -> Plan:
    """The plan of that name, or the cheapest.

    **Raises:** `ArgumentError` for "ring" where the tiles of the mask are the caller's own.
    """
    s = setting.sizes
    if name == "auto":
        wanted, _ = setting.wanted(range(s.hq))
        needed = [int((x[:, 1] - x[:, 0]).sum()) for x in wanted]
        given = setting.q.sizes, setting.kv.sizes, needed, setting.work(), setting.device.type
        name = cheapest(s, *given, own_tiles)
    if name == "ring" and own_tiles:
        raise ArgumentError(
            "the tiles of this block mask are its own (lists of blocks), and a ring cuts keys "
            'where ranks do; use layout.using("heads") or "ulysses"'
        )
    if name == "ring":
        return Ring(setting)
    if name == "ulysses":
        return Ulysses(setting)
    return ByHeads(name, setting, s.hk if name == "gather" else heads_a_step(setting))


def heads_a_step(setting: Setting) -> int:
    """Key/value heads of a step: as few as fill the device, four waves of work tiles of 128 rows;
    on the CPU one."""
    s = setting.sizes
    if setting.device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(setting.device).multi_processor_count
    tiles = s.b * (s.hq // s.hk) * -(-int(setting.q.sizes.max()) // 128)
    return min(s.hk, max(1, -(-4 * processors // max(1, tiles))))


def setting_of(
    spec: Spec, call: Call, q: Pieces, kv: Pieces, group: Any, rank: int, own_tiles: bool
) -> Setting:
    """The setting of a call; its mask is decided for all ranks.

    **Raises:** `ArgumentError` where the pieces cut through tiles that are the caller's own.
    """
    (b, hq, _, d), hk, dv = call.q.shape, call.k.shape[1], call.v.shape[3]
    _, mask = graphs(spec)
    whole, offsets = None, (call.coords.b, call.coords.h)
    if mask is not None or call.tiles is not None:
        _, captured = split(spec, call.captured)
        tiles, known = (call.tiles, spec.tiles) if call.tiles is not None else (None, None)
        at = (b, hq), offsets, q, kv, call.q.device
        whole = whole_of(mask, captured, tiles, known, *at)  # type: ignore[arg-type]
        if whole is None and own_tiles:
            raise ArgumentError(
                "the tiles of this block mask are its own (lists of blocks), and the layout cuts "
                f"inside of them; cut at multiples of {spec.tiles and spec.tiles[2]}: "
                "Layout.balanced(..., tile=)"
            )
        if whole is None:
            whole = whole_of(mask, captured, None, None, *at)  # type: ignore[arg-type]
    sizes = Sizes(b, hq, hk, d, dv, call.q.dtype.itemsize)
    return Setting(sizes, q, kv, rank, group, call.q.device, whole, offsets)


# -- parts ----------------------------------------------------------------------------------------


def rows_of(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """(b, h, n, d) and (b, h, n, dv) as rows of tokens, (n, b, h, d + dv)."""
    return torch.cat([in_dtype(k, dtype), in_dtype(v, dtype)], -1).permute(2, 0, 1, 3).contiguous()


def keys_of(rows: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """What `rows_of` put together."""
    x = rows.permute(1, 2, 0, 3)
    return x[..., :d], x[..., d:]


def exactly(spec: Spec, call: Call) -> tuple[Spec, Callable[[Call], Call]]:
    """A spec, and what makes calls of it, whose gradients are in the accumulation dtype. On the CPU
    narrow inputs are widened, as that backend does by itself; elsewhere results are partial."""
    acc = acc_dtype(call.q.dtype)
    if call.q.dtype == acc:
        return spec, lambda part: part
    if call.q.device.type == "cpu":
        return spec, lambda p: p.replace(q=p.q.to(acc), k=p.k.to(acc), v=p.v.to(acc))
    return replace(spec, partial=True), lambda part: part


def _ahead(steps: list[Step], given: Callable[[Step], Tensor]) -> Iterator[tuple[Step, Tensor]]:
    """Every step with the rows that it waited for, the next one's on their way."""
    coming = steps[0].routes.fetch(given(steps[0]))
    for n, step in enumerate(steps):
        rows = coming.wait()
        if n + 1 < len(steps):
            coming = steps[n + 1].routes.fetch(given(steps[n + 1]))
        yield step, rows


def _come_home(going: tuple[Returning, Step] | None, total: Tensor) -> None:
    """Add to `total`, rows of all heads, what a step sent home."""
    if going is not None:
        home, step = going
        home.add_to(total[:, :, step.heads.start : step.heads.stop])


def _sum(grads: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Gradients of captured tensors of several calls, added in order."""
    return [
        None if of[0] is None else torch.stack(of).sum(0) if len(of) > 1 else of[0]
        for of in zip(*grads, strict=True)
    ]


def _common(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What two ascending lists of stretches have in common."""
    found = [
        (max(a, c), min(b, d))
        for a, b in one.tolist()
        for c, d in other.tolist()
        if max(a, c) < min(b, d)
    ]
    return np.array(found, np.int64).reshape(-1, 2)
