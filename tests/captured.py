"""Calls that are captured in a graph, and replayed when what their masks read has been written to.

Shared by the GPU backends: on the CPU a stand-in captures (graphs.py), on a GPU CUDA does.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import headway as hw
from headway import backends
from headway.packed import Side, pack
from headway.resolve import prepare
from headway.types import Coords

B, HQ, HK = 2, 2, 1


class Captured(NamedTuple):
    """A mask, or a function of no arguments that a call makes it by, and what it reads: `write` puts
    other numbers there."""

    mask: Any
    reads: list[Tensor]
    write: Callable[[], None]
    coords: Coords | None = None
    made_by_call: bool = False


def _of(mask: Any, *made: tuple[Tensor, Callable[[], Tensor]], coords: Any = None) -> Captured:
    def write() -> None:
        for t, new in made:
            t.copy_(new())

    return Captured(mask, [t for t, _ in made], write, coords)


def padding(q: int, kv: int, device: str) -> Captured:
    new = lambda: torch.randint(1, kv + 1, (B,), device=device)
    lengths = new()
    return _of(hw.padding(lengths), (lengths, new))


def causal_padding(q: int, kv: int, device: str) -> Captured:
    new = lambda: torch.randint(1, kv + 1, (B,), device=device)
    lengths = new()
    return _of(hw.causal() & hw.padding(lengths), (lengths, new))


def documents(q: int, kv: int, device: str) -> Captured:
    """From short ones to a single one, of which every tile is full."""
    n = max(q, kv)
    new = lambda: torch.arange(n, device=device) // random.choice([7, 50, 128, n])
    ids = new()
    return _of(hw.causal() & hw.document(ids[:q], ids[:kv]), (ids, new))


def window(q: int, kv: int, device: str) -> Captured:
    """Of another width in every head."""
    new = lambda: torch.randint(1, kv, (HQ,), device=device)
    widths = new()
    mask = lambda b, h, i, j: (i - j).abs() < widths[h]
    return _of(mask, (widths, new))


def number(q: int, kv: int, device: str) -> Captured:
    """A single one, and a bool that says which of two masks it is."""
    new = lambda: torch.randint(1, kv, (), device=device)
    coin = lambda: torch.rand((), device=device) < 0.5
    width, flag = new(), coin()
    mask = lambda b, h, i, j: torch.where(flag, (i >= j) & (i - j < width), ~(i < j))
    return _of(mask, (width, new), (flag, coin))


def either(q: int, kv: int, device: str) -> Captured:
    """Queries that see what is no part of the window, too."""
    new = lambda: torch.rand(q, kv, device=device) < random.choice([0.0, 0.01, 1.0])
    table = new()
    return _of((hw.causal() & hw.sliding_window(20)) | hw.dense(table), (table, new))


def positions(q: int, kv: int, device: str) -> Captured:
    """Given one by one: as they are, or in any order."""
    spread = lambda n: torch.randperm(n, device=device)
    new_q = lambda: random.choice([spread(q), torch.arange(q, device=device)])
    new_kv = lambda: random.choice([spread(kv), torch.arange(kv, device=device)])
    q_pos, kv_pos = new_q(), new_kv()
    coords = Coords(q_pos=q_pos, kv_pos=kv_pos)
    return _of(hw.causal(), (q_pos, new_q), (kv_pos, new_kv), coords=coords)


def packed(q: int, kv: int, device: str) -> Captured:
    """Sequences of `flash_attn_varlen_func`: what a call makes of offsets is made in the graph."""

    def cuts(length: int) -> Tensor:
        inner = sorted(random.choices(range(length + 1), k=4))
        return torch.tensor([0, *inner, length], dtype=torch.int32, device=device)

    cu_q, cu_k = cuts(q), cuts(kv)
    of = _of(None, (cu_q, lambda: cuts(q)), (cu_k, lambda: cuts(kv)))

    def mask() -> Any:
        with mock.patch.object(Side, "check_numbers"):  # on a GPU nobody reads them
            sides = (
                Side(*of) for of in (("q", q, cu_q.device, cu_q), ("k", kv, cu_k.device, cu_k))
            )
            return pack(*sides).aligned().mask(hw.causal() & ~hw.causal(-31))

    return of._replace(mask=mask, made_by_call=True)


MASKS = (padding, causal_padding, documents, window, number, either, positions, packed)


class Step:
    """A forward and a backward of a backend, of the same memory each time."""

    def __init__(
        self, backend: str, of: Captured, q: int, kv: int, device: str, dtype: torch.dtype,
        score: Any = None, width: int = 16, **options: Any,
    ) -> None:  # fmt: skip
        make = lambda h, n: torch.randn(B, h, n, width, device=device, dtype=dtype)
        self.q, self.k, self.v = make(HQ, q), make(HK, kv), make(HK, kv)
        self.dout, self.dlse = make(HQ, q), torch.randn(B, HQ, q, device=device)
        self.backend, self.of, self.score, self.options = backend, of, score, options

    def __call__(self, backend: str | None = None) -> list[Tensor]:
        name = backend or self.backend
        spec, call = prepare(
            self.q,
            self.k,
            self.v,
            self.score,
            self.of.mask() if self.of.made_by_call else self.of.mask,
            keys=self.of.coords,
            backend=name,
            **self.options,
        )
        run = backends.get(name)
        needs = (True,) * spec.score_tensors
        out, lse, *_ = run.forward(spec, call)
        grads = run.backward(spec, call, out, lse, self.dout, self.dlse, needs)
        return [out, lse, *grads[:3], *grads.captured]

    def rewrite(self) -> None:
        """Other numbers everywhere."""
        self.of.write()
        for x in (self.q, self.k, self.v, self.dout, self.dlse):
            x.copy_(torch.randn_like(x))

    def wrong(self, made: list[Tensor]) -> list[float]:
        """By how much results differ from what they should be, in terms of what they may."""
        exact = self("reference")
        tolerance = 0.03 if self.q.dtype != torch.float32 else 1e-4
        return [_apart(x, y) / tolerance for x, y in zip(made, exact, strict=True)]


def _apart(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    gap = torch.where(x == y, 0.0, (x - y).abs()).max()
    return (gap / y[y.isfinite()].abs().max().clamp_min(1)).item()
