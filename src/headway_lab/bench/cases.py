"""The shared table of named bench cases: those for the CPU, the choice among all of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headway.errors import ArgumentError
from headway.mods import (
    Mask,
    alibi,
    causal,
    document,
    prefix,
    sliding_window,
    softcap,
    strided,
)
from headway.mods.base import ScoreFn

from .case import BACKWARD, BUILD, FORWARD, Case, Target, learned_bias
from .gpu_cases import GPU_CASES, RANK_CASES


def every() -> tuple[Case, ...]:
    """Return all cases: for the CPU, for a GPU, for several GPUs."""
    return (*CASES, *GPU_CASES, *RANK_CASES)


def select(words: tuple[str, ...], device: str, ranks: bool = False) -> list[Case]:
    """Return the cases for a device with one of these words as name, part of the name, or tag.

    - `ranks`: those of one sequence over many cards, and no others.
    """
    cases = [
        case for case in every()
        if torch.device(device).type in case.devices and (case.measure == "ranks") == ranks
    ]  # fmt: skip
    if not words:
        return cases
    for word in words:
        if not any(word in case.name or word in case.tags for case in cases):
            tags = sorted({tag for case in cases for tag in case.tags})
            raise ArgumentError(
                f"--cases: no case for {device} is named or tagged {word!r}; there are the tags "
                f"{', '.join(tags)} and the names {', '.join(case.name for case in cases)}"
            )
    return [c for c in cases if any(word in c.name or word in c.tags for word in words)]


def _packed(n: int) -> Mask:
    """Return documents of about n tokens, no multiples of a tile, in 4096 positions."""
    lengths = [n + (37 * k) % (n // 2) - n // 4 for k in range(1, 2 * 4096 // n)]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return causal() & document(ids[:4096])


def documents(length: int) -> Mask:
    """Return packed documents of 1 to 4,000 tokens, 2,000 on average."""
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


def _halved() -> ScoreFn:
    by = 0.5
    return lambda score, b, h, q_idx, kv_idx: by * score


class _Near(torch.nn.Module):
    """A mask among the methods of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 8

    def keeps(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.window)


def _overhead(what: str = "", measure: str = "overhead", most: float = 40.0, **mods: Any) -> Case:
    """Return a call so small that Python takes all of its time."""
    name = "overhead-16-32" + (f"-{what}" if what else "")
    return Case(
        name,
        hq=4,
        hk=4,
        length=16,
        d=32,
        measure=measure,
        most=most,
        tags=("overhead",),
        **mods,
    )


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
         score=lambda: learned_bias(8, 4096)),
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
    _overhead(mask=causal),
    _overhead("compiled", "overhead, compiled", 15.0, mask=causal),
    _overhead("window", most=20.0, mask=lambda: causal() & sliding_window(8)),
    _overhead("document", most=20.0, mask=lambda: causal() & document(torch.arange(16) // 5)),
    _overhead("closure-score", most=20.0, score=_halved),
    _overhead("method-mask", most=20.0, mask=lambda: _Near().keeps),
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
