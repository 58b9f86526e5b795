"""Cases: shapes, mask, score, peers and targets; their inputs, and how much a mask keeps."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.api import attention, attention_with_stats, block_mask
from headway.mods import Score, relative_bias
from headway.mods.base import MaskFn, ScoreFn, value

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
JVP = "jvp"  # out and its tangent
SEED = 7  # of dropout
BUILD = "build"  # of a block mask


class Unavailable(Exception):
    """The reason why a peer is not timed on a case; it goes into the table and the CSV."""

    @staticmethod
    def because(error: Exception) -> "Unavailable":
        """Return the reason: what a peer raised if it is one, else its first line."""
        if isinstance(error, Unavailable):
            return error
        first_line = next(filter(str.strip, str(error).splitlines()), "")
        return Unavailable(f"could not run: {type(error).__name__}: {first_line[:200]}")


@dataclass(frozen=True)
class Target:
    """A target: at least `times` the speed of a peer in one direction, for Headway or another."""

    direction: str
    peer: str
    times: float
    of: str = "headway"


@dataclass(frozen=True)
class Case:
    """A row of the table. `mask` and `score` make their values when the case is run.

    - `dv`: width of v, if it is not d.
    - `std`: of q and k; at 5 most of a row's terms underflow, which some code pays for.
    - `stats`: measure `attention_with_stats`.
    - `peers`: names in `peers.PEERS`.
    - `isa`: run as on a CPU with no more than this (see `child.py`); "" for the CPU as it is.
    - `measure`: what is measured, a name in `run.MEASURES`: "time" against the peers; "forward
      mode", with tangents of q, k and v; "entropy" beside out, "expect" alone; what "recording" and
      clipping add to a training step, in percent; "training", the steps of a model of
      `training.MODELS`; "memory" in MB; "overhead" and "overhead, compiled" in µs beside the kernel
      of a call; "block mask" and "block mask, memory", the ms and MB of building one.
    - `most`: the largest value allowed, for what is not a ratio.
    - `by_rows`: tensors lie in memory as a model makes them, (b, length, heads, d), for everyone.
    """

    name: str
    b: int = 1
    hq: int = 8
    hk: int = 8
    length: int = 4096
    d: int = 64
    dtype: str = "float32"
    std: float = 1.0
    stats: bool = False
    mask: Callable[[], MaskFn] | None = None
    score: Callable[[], ScoreFn] | None = None
    peers: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    tags: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    isa: str = ""
    measure: str = "time"
    most: float | None = None
    dv: int | None = None
    by_rows: bool = False
    dropout: float = 0.0

    @property
    def widths(self) -> tuple[int, int]:
        """The head dimensions of q and k, and of v."""
        return self.d, self.d if self.dv is None else self.dv

    def __str__(self) -> str:
        return self.name

    def target(self, direction: str, peer: str) -> float | None:
        """Return how many times the peer's speed Headway must reach, or None."""
        target_key = (direction, peer, "headway")
        factors = (t.times for t in self.targets if (t.direction, t.peer, t.of) == target_key)
        return next(factors, None)


class CaseInputs(NamedTuple):
    """The tensors and functions that every contestant of a case computes on."""

    q: Tensor  # (b, hq, length, d), requires grad, as do k and v
    k: Tensor  # (b, hk, length, d)
    v: Tensor  # (b, hk, length, dv)
    dout: Tensor  # (b, hq, length, dv)
    mask: MaskFn | None
    score: ScoreFn | None
    stats: bool = False
    dropout: float = 0.0

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tensors of the score that require a gradient."""
        parts = () if self.score is None else vars(self.score).values()
        return tuple(x for x in parts if isinstance(x, Tensor) and x.requires_grad)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that the backward differentiates."""
        return self.q, self.k, self.v, *self.learned

    def by_rows(self) -> "CaseInputs":
        """Return the same numbers in FlashAttention's memory order, (b, length, heads, width)."""
        by_rows = lambda x: x.detach().transpose(1, 2).contiguous().transpose(1, 2)
        tensors = self.q, self.k, self.v, self.dout
        q, k, v, dout = (by_rows(x).requires_grad_(x.requires_grad) for x in tensors)
        return self._replace(q=q, k=k, v=v, dout=dout)

    def grads(self, out: Tensor, again: bool = False) -> tuple[Tensor, ...]:
        """Return the gradients of the leaves; with `again` they can be taken another time."""
        return torch.autograd.grad(
            out, self.leaves, self.dout, retain_graph=again, allow_unused=again
        )

    def headway(self, **changes: Any) -> Tensor:
        """Compute attention with Headway: the call that is measured, or with changes."""
        call: dict[str, Any] = {"score": self.score, "mask": self.mask, "dropout": self.dropout}
        call |= {"seed": SEED} | changes
        if self.stats:
            return attention_with_stats(self.q, self.k, self.v, **call).out
        return attention(self.q, self.k, self.v, **call)


def make_inputs(case: Case, device: str = "cpu") -> CaseInputs:
    """Draw the inputs of a case: normal numbers, seeded by its name."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))
    dtype, (d, dv) = getattr(torch, case.dtype), case.widths
    q, k, v, dout = (
        torch.randn(case.b, h, case.length, width, generator=generator, device=device).to(dtype)
        for h, width in ((case.hq, d), (case.hk, d), (case.hk, dv), (case.hq, dv))
    )
    q, k = case.std * q, case.std * k
    with torch.device(device):
        mask = None if case.mask is None else case.mask()
        score = None if case.score is None else case.score()
    inputs = CaseInputs(
        q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, mask, score, case.stats,
        case.dropout,
    )  # fmt: skip
    return inputs.by_rows() if case.by_rows else inputs


@value
class tilted(Score):
    """A score as users write them, of four float operations."""

    def __call__(self, score, b, h, q_idx, kv_idx):
        return 1.1 * score + 0.01 * (kv_idx - q_idx) + 0.5


def learned_bias(heads: int, length: int) -> Score:
    """Return a trainable relative bias, `(heads, 2 length - 1)`."""
    n = 2 * length - 1
    index = torch.arange(heads * n, dtype=torch.float32)
    return relative_bias(index.view(heads, n).sin_().requires_grad_())


class Size(NamedTuple):
    """The pairs and tiles that a mask leaves, over all batches and heads."""

    pairs: int
    tiles: int  # live tiles of 128 x 128

    def flops(self, direction: str, d: int, dv: int | None = None) -> int:
        """Count the matrix products: two per forward pair, five per backward pair, and six with
        tangents."""
        dv = d if dv is None else dv
        columns = {FORWARD: d + dv, BACKWARD: 3 * d + 2 * dv, JVP: 3 * d + 3 * dv}
        return self.pairs * 2 * columns[direction]


def size(case: Case, mask: MaskFn | None) -> Size:
    """Count pairs and tiles exactly: full tiles by area, pairs of partial tiles one by one."""
    n, tile, heads = case.length, 128, case.b * case.hq
    if mask is None:
        return Size(heads * n * n, heads * (-(-n // tile)) ** 2)
    blocks = block_mask(mask, case.b, case.hq, n, n, tile=(tile, tile))
    state = blocks.to_dense().cpu()
    inside = torch.arange(state.shape[2]).mul(-tile).add(n).clamp(max=tile)
    pairs = int(((state == 2) * inside[:, None] * inside).sum())
    offsets = torch.arange(tile)
    for chunk in (state == 1).nonzero().split(256):
        b, h, row, col = (x[:, None, None].to(blocks.device) for x in chunk.T)
        i, j = row * tile + offsets[:, None].to(row.device), col * tile + offsets.to(row.device)
        # Ids end where the lengths end.
        attended = mask(b, h, i.clamp(max=n - 1), j.clamp(max=n - 1))
        pairs += int((attended & (i < n) & (j < n)).sum())
    shared = heads // (state.shape[0] * state.shape[1])
    return Size(shared * pairs, shared * int((state > 0).sum()))
