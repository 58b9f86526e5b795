"""The shared table of named bench cases: shapes, mask, score, peers, and what must be reached."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention, attention_with_stats, block_mask
from ..errors import ArgumentError
from ..mods import (
    Mask,
    Score,
    alibi,
    causal,
    document,
    prefix,
    relative_bias,
    sliding_window,
    softcap,
    strided,
)

FORWARD, BACKWARD, BUILD = "forward", "backward", "build"  # of a block mask


class Unavailable(Exception):
    """Why a peer is not timed on a case: it goes into the table and the CSV."""

    @staticmethod
    def because(error: Exception) -> "Unavailable":
        """With the first line of what a peer raised."""
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return Unavailable(f"could not run: {type(error).__name__}: {first[:200]}")


@dataclass(frozen=True)
class Target:
    """At least `times` the speed of a peer (a name in `peers.PEERS`), in one direction, asked of
    Headway or of another contestant."""

    direction: str
    peer: str
    times: float
    of: str = "headway"


@dataclass(frozen=True)
class Case:
    """One row of the table. `mask` and `score` make their values when the case is run.

    - `dv`: width of v, if it is not d.
    - `std`: of q and k; at 5 most of a row's terms underflow, which some code pays for.
    - `stats`: measure `attention_with_stats`.
    - `peers`: names in `peers.PEERS`.
    - `isa`: run as on a CPU with no more than this (see `child.py`); "" for the CPU as it is.
    - `measure`: what is measured, a name in `run.MEASURES`: "time" against the peers, what
      "recording" and clipping add to a training step, in percent (`stability.py`), "training", the
      steps of a model of `models.MODELS`, "memory" in MB, "overhead" and "overhead, compiled" in µs
      of a forward call, or "block mask" and "block mask, memory": ms and MB of building one.
    - `most`: the most allowed, where that is no ratio.
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
    mask: Callable[[], Mask] | None = None
    score: Callable[[], Score] | None = None
    peers: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    tags: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    isa: str = ""
    measure: str = "time"
    most: float | None = None
    dv: int | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Of q and k, and of v."""
        return self.d, self.d if self.dv is None else self.dv

    def __str__(self) -> str:
        return self.name

    def target(self, direction: str, peer: str) -> float | None:
        """How many times the peer's speed is asked of Headway."""
        asked = (direction, peer, "headway")
        found = (t.times for t in self.targets if (t.direction, t.peer, t.of) == asked)
        return next(found, None)


class Inputs(NamedTuple):
    """What every contestant of a case is given."""

    q: Tensor  # (b, hq, length, d), requires grad, as do k and v
    k: Tensor  # (b, hk, length, d)
    v: Tensor  # (b, hk, length, dv)
    dout: Tensor  # (b, hq, length, dv)
    mask: Mask | None
    score: Score | None
    stats: bool = False

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """Tensors of the score that want a gradient."""
        parts = () if self.score is None else vars(self.score).values()
        return tuple(x for x in parts if isinstance(x, Tensor) and x.requires_grad)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What a backward is taken to."""
        return self.q, self.k, self.v, *self.learned

    def by_rows(self) -> "Inputs":
        """The same numbers under the same shapes, but as FlashAttention's users hold them in
        memory: (b, length, heads, width)."""

        def turned(x: Tensor) -> Tensor:
            rows = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
            return rows.requires_grad_(x.requires_grad)

        return self._replace(
            q=turned(self.q), k=turned(self.k), v=turned(self.v), dout=turned(self.dout)
        )

    def headway(self, **changes: Mask | None) -> Tensor:
        """The call that is measured."""
        call = {"score": self.score, "mask": self.mask, **changes}
        if self.stats:
            return attention_with_stats(self.q, self.k, self.v, **call).out  # type: ignore[arg-type]
        return attention(self.q, self.k, self.v, **call)  # type: ignore[arg-type]


def inputs(case: Case, device: str = "cpu") -> Inputs:
    """Normal numbers that follow from the case's name."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))
    dtype, (d, dv) = getattr(torch, case.dtype), case.widths
    shapes = [
        (case.b, h, case.length, width)
        for h, width in ((case.hq, d), (case.hk, d), (case.hk, dv), (case.hq, dv))
    ]
    q, k, v, dout = (
        torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes
    )  # fmt: skip
    q, k = case.std * q, case.std * k
    with torch.device(device):
        mask = None if case.mask is None else case.mask()
        score = None if case.score is None else case.score()
    return Inputs(
        q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, mask, score, case.stats
    )  # fmt: skip


class Size(NamedTuple):
    """How much of the square a mask keeps, over all batches and heads."""

    pairs: int
    tiles: int  # live tiles of 128 x 128

    def flops(self, direction: str, d: int, dv: int | None = None) -> int:
        """Products only, two per forward pair and five per backward pair; masked pairs are free."""
        dv = d if dv is None else dv
        return self.pairs * 2 * (d + dv if direction == FORWARD else 3 * d + 2 * dv)


def size(case: Case, mask: Mask | None) -> Size:
    """Counted exactly: full tiles by area, pairs of partial tiles one by one."""
    n, tile, heads = case.length, 128, case.b * case.hq
    if mask is None:
        return Size(heads * n * n, heads * (-(-n // tile)) ** 2)
    blocks = block_mask(mask, case.b, case.hq, n, n, tile=(tile, tile))
    state = blocks.to_dense().cpu()
    inside = torch.arange(state.shape[2]).mul(-tile).add(n).clamp(max=tile)
    pairs = int(((state == 2) * inside[:, None] * inside).sum())
    at = torch.arange(tile)
    for chunk in (state == 1).nonzero().split(256):
        b, h, row, col = (x[:, None, None].to(blocks.device) for x in chunk.T)
        i, j = row * tile + at[:, None].to(row.device), col * tile + at.to(row.device)
        kept = mask(b, h, i.clamp(max=n - 1), j.clamp(max=n - 1))  # ids end where the lengths end
        pairs += int((kept & (i < n) & (j < n)).sum())
    shared = heads // (state.shape[0] * state.shape[1])
    return Size(shared * pairs, shared * int((state > 0).sum()))


def every() -> tuple["Case", ...]:
    """The cases for the CPU, then those for a GPU."""
    from .gpu_cases import GPU_CASES

    return (*CASES, *GPU_CASES)


def select(wanted: tuple[str, ...], device: str) -> list[Case]:
    """The cases for a device with one of these words as name, part of the name, or tag."""
    here = [case for case in every() if torch.device(device).type in case.devices]
    if not wanted:
        return here
    for word in wanted:
        if not any(word in case.name or word in case.tags for case in here):
            tags = sorted({tag for case in here for tag in case.tags})
            raise ArgumentError(
                f"--cases: no case for {device} is named or tagged {word!r}; there are the tags "
                f"{', '.join(tags)} and the names {', '.join(case.name for case in here)}"
            )
    return [c for c in here if any(word in c.name or word in c.tags for word in wanted)]


def _packed(n: int) -> Mask:
    """Documents of about n tokens, none of them a multiple of a tile, in 4096 positions."""
    lengths = [n + (37 * k) % (n // 2) - n // 4 for k in range(1, 2 * 4096 // n)]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return causal() & document(ids[:4096])


def documents(length: int) -> Mask:
    """Packed documents of 1 to 4,000 tokens, 2,000 in the mean."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 4000, (length // 1000 + 8,), generator=generator, device="cpu")
    ids = torch.repeat_interleave(lengths)[:length]
    return document(ids.to(torch.get_default_device()))


_BLOCK_MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda n: causal(),
    "window": lambda n: causal() & sliding_window(4096),
    "prefix": lambda n: causal() | prefix(1000),
    "documents": documents,
    "causal-documents": lambda n: causal() & documents(n),
    "window-documents-prefix": lambda n: (
        causal() & sliding_window(4096) & documents(n) | prefix(1000)
    ),
}
_UNKNOWN = {"strided": lambda n: strided(7)}  # in every tile: may take time, but no more memory


def _block_mask(name: str, length: int, measure: str = "block mask", **extra: Any) -> Case:
    tail = "-peak" if measure.endswith("memory") else ""
    return Case(
        f"block-mask-{name}-{length >> 10}k{tail}", hq=1, hk=1, length=length, d=0,
        mask=partial((_BLOCK_MASKS | _UNKNOWN)[name], length), measure=measure,
        tags=("block masks",), **extra,
    )  # fmt: skip


def _table(heads: int, length: int) -> Tensor:
    n = 2 * length - 1
    return torch.arange(heads * n, dtype=torch.float32).view(heads, n).sin_().requires_grad_()


def _half(dtype: str, isa: str = "") -> Case:
    name = f"causal-4k-64-{dtype}" + (f"-{isa.lower().replace('_', '-')}" if isa else "")
    return Case(
        name, dtype=dtype, mask=causal, isa=isa, peers=("sdpa",),
        targets=(Target(BACKWARD, "sdpa", 2.0),), tags=("half", "main"),
    )  # fmt: skip


_PARITY = (Target(FORWARD, "sdpa", 0.9), Target(BACKWARD, "sdpa", 0.9))
_FLEX = (Target(FORWARD, "flex", 1.0),)
_BOTH = ("sdpa", "flex")
_HALF_OF_CAUSAL = (Target(FORWARD, "sdpa causal", 0.5), Target(BACKWARD, "sdpa causal", 0.5))
_PER_TILE = tuple(Target(x, "causal, per tile", 0.5) for x in (FORWARD, BACKWARD))
_NO_AMX = "AVX512_CORE_VNNI"

# fmt: off
CASES: tuple[Case, ...] = (
    Case("causal-4k-64", mask=causal, peers=_BOTH, targets=_PARITY + _FLEX, tags=("main",)),
    Case("causal-4k-128", d=128, mask=causal, peers=_BOTH, targets=_PARITY + _FLEX,
         tags=("main",)),
    Case("full-4k-64", peers=_BOTH, targets=_FLEX, tags=("main",)),
    _half("bfloat16"),
    _half("float16"),
    _half("bfloat16", _NO_AMX),
    _half("float16", _NO_AMX),
    Case("stats-4k-64", stats=True, mask=causal, peers=("sdpa",), tags=("stats", "main")),
    Case("stats-peaked-4k-64", stats=True, std=5.0, mask=causal, peers=("sdpa",), tags=("stats",)),
    Case("gqa-4k-64", hk=2, mask=causal, peers=_BOTH, targets=_FLEX, tags=("shapes",)),
    Case("one-head-4k-64", hq=1, hk=1, mask=causal, peers=("sdpa",), tags=("shapes",)),
    Case("batch-8x256-64", b=8, length=256, mask=causal, peers=("sdpa",), tags=("shapes",)),
    Case("prime-1021-80", length=1021, d=80, mask=causal, peers=("sdpa",), tags=("shapes",)),
    Case("softcap-4k-64", mask=causal, score=lambda: softcap(30.0), peers=("sdpa causal", "flex"),
         targets=_HALF_OF_CAUSAL + _FLEX, tags=("scores",)),
    Case("softcap-peaked-4k-64", std=5.0, mask=causal, score=lambda: softcap(30.0),
         peers=("sdpa causal", "flex"), tags=("scores",)),
    Case("alibi-4k-64", mask=causal, score=lambda: alibi(8), peers=("sdpa causal", *_BOTH),
         targets=_FLEX, tags=("scores",)),
    Case("relative-bias-4k-64", mask=causal, peers=("sdpa causal",), tags=("scores",),
         score=lambda: relative_bias(_table(8, 4096))),
    Case("prefix-4k-64", mask=lambda: causal() | prefix(1024), peers=_BOTH, targets=_FLEX,
         tags=("masks",)),
    Case("packed-256-4k-64", mask=lambda: _packed(256), peers=("causal, per tile", *_BOTH),
         targets=_PER_TILE + _FLEX, tags=("masks",)),
    Case("packed-1024-4k-64", mask=lambda: _packed(1024), peers=("causal, per tile", *_BOTH),
         targets=_PER_TILE + _FLEX, tags=("masks",)),
    Case("window-512-4k-64", mask=lambda: causal() & sliding_window(512), peers=_BOTH,
         targets=_FLEX, tags=("masks",)),
    Case("window-512-32k-64", length=32768, mask=lambda: causal() & sliding_window(512),
         peers=("sdpa causal", "flex"), tags=("masks", "long"),
         targets=(Target(FORWARD, "sdpa causal", 10.0), Target(BACKWARD, "sdpa causal", 10.0),
                  *_FLEX)),
    Case("recording-8-layers-512-64", b=1, hq=12, hk=12, length=512, mask=causal,
         measure="recording", most=3.0, tags=("recording",)),
    Case("recording-8-layers-512-128", b=64, length=512, d=128, dtype="bfloat16", mask=causal,
         measure="recording", most=1.0, tags=("recording",), devices=("cuda",)),
    Case("memory-window-1024-64k-64", hq=1, hk=1, length=65536, measure="memory", most=1000.0,
         mask=lambda: causal() & sliding_window(1024), tags=("memory", "long")),
    Case("overhead-16-32", hq=4, hk=4, length=16, d=32, mask=causal, measure="overhead",
         most=40.0, tags=("overhead",)),
    Case("overhead-16-32-compiled", hq=4, hk=4, length=16, d=32, mask=causal,
         measure="overhead, compiled", most=15.0, tags=("overhead",)),
    *(_block_mask(name, 1 << 14, peers=("create_block_mask",),
                  targets=(Target(BUILD, "create_block_mask", 500.0),)) for name in _BLOCK_MASKS),
    *(_block_mask(name, 1 << 17, most=50.0) for name in _BLOCK_MASKS),
    *(_block_mask(name, 1 << 20, most=1000.0) for name in _BLOCK_MASKS),
    *(_block_mask(name, 1 << 20, "block mask, memory", most=1000.0) for name in _BLOCK_MASKS),
    *(_block_mask(name, 1 << 17, "block mask, memory", most=1000.0) for name in _UNKNOWN),
    Case("hf-llama-100m", hq=12, hk=12, length=512, measure="training", tags=("models",),
         devices=("cpu", "cuda")),
    Case("hf-gemma2-2k", hq=8, hk=4, length=2048, d=96, measure="training", tags=("models",),
         devices=("cpu", "cuda")),
)
# fmt: on
