"""The cases for a GPU, and for several: what FlexAttention, cuDNN, FlashAttention-4 (where it is
installed) and Headway take, in one run; the expensive ones last.

Shapes and targets are those of the design: bfloat16, and the speed that the peers have. Lengths of
context parallel are of all ranks: on two, four and eight cards 16k, 32k and 64k tokens are 8k a
card, 128k, 256k and 512k are 64k a card.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.mods import (
    Mask,
    Score,
    alibi,
    causal,
    document,
    prefix,
    sliding_window,
    softcap,
)
from headway.mods.base import value
from headway.mods.library.scores import alibi_slopes

from .case import BACKWARD, FORWARD, Case, Target, learned_bias

_TRITON = "headway triton"
_FLASH4 = "flash-attention-4"
_ALL = ("flex", "cudnn", _FLASH4, _TRITON)


def _than(peer: str, forward: float, backward: float, of: str = "headway") -> tuple[Target, ...]:
    return Target(FORWARD, peer, forward, of), Target(BACKWARD, peer, backward, of)


def _flex(
    forward: float = 1.0, backward: float = 1.0, ours: tuple[float, float] = (1.3, 1.4)
) -> tuple[Target, ...]:
    """Return targets next to FlexAttention, for Triton and for the default (`ours`)."""
    return *_than("flex", forward, backward, _TRITON), *_than("flex", *ours)


def _fixed(forward: float = 1.0, backward: float = 1.0) -> tuple[Target, ...]:
    """Return targets next to cuDNN and FlashAttention-4, which are made for one mask."""
    return *_than("cudnn", forward, backward), *_than(_FLASH4, forward, backward)


_MAIN = _flex() + _fixed()
_SOFTCAP = _flex(1.5, 1.5, (2, 2)) + _than(_FLASH4, 1.5, 1.3)


def _case(name: str, shape: tuple[int, ...], **more: Any) -> Case:
    """Return a case of a `shape`: b, hq, hk, length, d and, where it differs, dv."""
    b, hq, hk, length, d, *dv = shape
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "peers": _ALL,
        "targets": _MAIN,
        "devices": ("cuda",),
    } | more
    return Case(name, b, hq, hk, length, d, dv=dv[0] if dv else None, **options)


def _pair(name: str, shape: tuple[int, ...], *tags: str, **more: Any) -> tuple[Case, ...]:
    """Return a shape with a causal mask, and without."""
    return (
        _case(f"{name}-causal", shape, mask=causal, tags=("gpu", *tags), **more),
        _case(f"{name}-full", shape, tags=("gpu", *tags), **more),
    )


def _scored(
    name: str, score: Callable[[], Score] | None, mask: Callable[[], Mask] | None,
    targets: tuple[Target, ...], peers: tuple[str, ...] = ("flex", "headway plain", _TRITON),
) -> Case:  # fmt: skip
    tag = "scores" if score is not None else "masks"
    return _case(
        name, (2, 16, 16, 8192, 128), score=score, mask=mask, peers=peers, targets=targets,
        tags=("gpu", tag),
    )  # fmt: skip


def _decode(*shape: int) -> Case:
    """Return a case of one query per row over a cache of `length` keys."""
    b, hq, hk, length, d = shape[:5]
    name = f"decode-{b}-{hq}-{hk}-{length >> 10}k-{d}"
    return _case(name, shape, measure="decode", peers=(), targets=(), tags=("gpu", "decode"))


def _documents() -> Mask:
    """Return twelve documents of uneven lengths in 8192 positions."""
    lengths = [97 + (911 * k) % 1171 for k in range(1, 13)]
    lengths[-1] = 8192 - sum(lengths[:-1])
    return causal() & document.from_lengths(lengths)


def _packed(count: int, length: int) -> Mask:
    """Return `count` documents of one length, in one row."""
    return causal() & document.from_lengths([length] * count)


def _slopes() -> Tensor:
    return torch.exp2(-torch.arange(1, 17) * 0.5)


@value
class tilted(Score):
    """A score as users write them, of four float operations."""

    def __call__(self, score, b, h, q_idx, kv_idx):
        return 1.1 * score + 0.01 * (kv_idx - q_idx) + 0.5


@value
class heated(Score):
    """A temperature that learns: `t` of shape (1,)."""

    t: Tensor

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.t[0].exp()


def _heated() -> Score:
    return heated(torch.tensor([0.5], requires_grad=True))


# b, hq, hk, keys, d: from one long row to many, with groups of 8, of 4 and of 1.
_CACHES = (
    (1, 32, 8, 8 << 10, 128), (8, 32, 8, 8 << 10, 128), (64, 32, 8, 4 << 10, 128),
    (1, 32, 8, 128 << 10, 128), (16, 64, 8, 16 << 10, 128), (32, 16, 16, 4 << 10, 64),
)  # fmt: skip
_MASKS = ("flex", _FLASH4, _TRITON)
_CAPPED = ("flex", "headway plain", _FLASH4, _TRITON)
_LEARNED = ("headway plain", _TRITON)
_RELATIVE = _than("headway plain", 0.7, 0.7)


def _first_calls() -> tuple[Case, ...]:
    """Return first calls: plain, with a user's score, with a trainable bias; 64 and 128 wide."""
    return tuple(
        _case(f"first-call-{d}{kind}", (2, 2048 // d, 2048 // d, 8192, d), mask=causal,
              measure="first call", peers=(), targets=(), tags=("gpu", "first"))
        for d in (128, 64) for kind in ("", "-score", "-bias")
    )  # fmt: skip


# fmt: off
GPU_CASES: tuple[Case, ...] = (
    *_pair("8k-128", (2, 16, 16, 8192, 128), "main"),
    *_pair("8k-64", (2, 32, 32, 8192, 64), "main"),
    _scored("softcap-causal", lambda: softcap(20.0), causal, _SOFTCAP, _CAPPED),
    _scored("softcap-full", lambda: softcap(20.0), None, _SOFTCAP, _CAPPED),
    _scored("alibi-causal", lambda: alibi(_slopes()), causal,
            _flex() + _than("headway plain", 0.95, 0.95)),
    _scored("user-causal", tilted, causal, _flex() + _than("headway plain", 0.95, 0.95)),
    _scored("user-full", tilted, None, _flex() + _than("headway plain", 0.95, 0.95)),
    _scored("window-1024", None, lambda: causal() & sliding_window(1024), _flex(1.15, 1.15),
            _MASKS),
    _scored("documents-causal", None, _documents, _flex(1.15, 1.15), _MASKS),
    _scored("prefix-2048", None, lambda: causal() | prefix(2048), _flex(), ("flex", _TRITON)),
    _scored("relative-bias-learned-full", lambda: learned_bias(16, 8192), None, _RELATIVE,
            _LEARNED),
    _scored("relative-bias-learned-causal", lambda: learned_bias(16, 8192), causal, _RELATIVE,
            _LEARNED),
    _scored("alibi-learned-causal", lambda: alibi(_slopes().requires_grad_()), causal, (),
            _LEARNED),
    _scored("temperature-learned-full", _heated, None, (), _LEARNED),
    _scored("temperature-learned-causal", _heated, causal, (), _LEARNED),
    *_pair("16k-256", (1, 8, 8, 16384, 256), "main",
           targets=_flex(1.0, 2.0) + _fixed(0.95, 1.2)),
    *_pair("8k-192-128", (2, 16, 16, 8192, 192, 128), "main",
           targets=_flex(1.0, 1.5) + _fixed()),
    _case("gqa-8k-128-causal", (2, 32, 8, 8192, 128), mask=causal, tags=("gpu", "main")),
    *_pair("short-512-128", (64, 16, 16, 512, 128), "short"),
    _case("short-256-64-causal", (128, 16, 16, 256, 64), mask=causal, tags=("gpu", "short")),
    _case("packed-512-128-causal", (1, 16, 16, 64 * 512, 128), mask=lambda: _packed(64, 512),
          peers=_MASKS, targets=_flex() + _than(_FLASH4, 1, 1), tags=("gpu", "short")),
    _case("packed-256-64-causal", (1, 16, 16, 128 * 256, 64), mask=lambda: _packed(128, 256),
          peers=_MASKS, targets=_flex() + _than(_FLASH4, 1, 1), tags=("gpu", "short")),
    *_pair("1k-128", (16, 16, 16, 1024, 128), "short"),
    *_pair("4k-128", (4, 16, 16, 4096, 128), "long"),
    *_pair("16k-128", (1, 16, 16, 16384, 128), "long"),
    _case("float32-2k-64-causal", (2, 16, 16, 2048, 64), dtype="float32", mask=causal,
          peers=("flex",), targets=_than("flex", 2, 2), tags=("gpu", "float32")),
    _case("float32-2k-128-full", (2, 16, 16, 2048, 128), dtype="float32", peers=("flex",),
          targets=_than("flex", 2, 2), tags=("gpu", "float32")),
    _case("stats-8k-128-causal", (2, 16, 16, 8192, 128), mask=causal, stats=True,
          peers=("cudnn",), targets=(), tags=("gpu", "stats")),
    _case("host", (1, 2, 2, 128, 64), mask=causal, measure="host", most=72.0, peers=(), targets=(),
          tags=("gpu", "host")),
    _case("graph", (1, 2, 2, 128, 64), mask=causal, measure="graph", peers=(), targets=(),
          tags=("gpu", "host")),
    *_first_calls(),
    _case("million-window-4096", (1, 8, 8, 1 << 20, 128), measure="long", peers=(), targets=(),
          mask=lambda: causal() & sliding_window(4096), tags=("gpu", "million")),
    *(_decode(*shape) for shape in _CACHES),
    _decode(128, 16, 1, 4096, 576, 512),
    _decode(128, 128, 1, 4096, 576, 512),
    _case("decode-grows", (8, 32, 8, 1400, 128), measure="decode, host", peers=(), targets=(),
          tags=("gpu", "decode")),
    _case("train", (8, 12, 12, 4096, 128), mask=causal, measure="train", peers=(), targets=(),
          tags=("gpu", "train")),
)
# fmt: on


WINDOW = 4096


def uneven_documents(length: int) -> Mask:
    """Return packed documents, an eighth of the sequence on average and a quarter at most."""
    draw = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < length:
        share = 0.005 + 0.245 * float(torch.rand((), generator=draw, device="cpu"))
        lengths.append(max(1, int(share * length)))
    lengths[-1] -= sum(lengths) - length
    return causal() & document.from_lengths(lengths)


def _rank_window() -> Mask:
    return causal() & sliding_window(WINDOW)


def _prefix(length: int) -> Mask:
    return causal() | prefix(length // 8)


def _alibi(heads: int) -> Score:
    """Return ALiBi with slopes on the default device, for the definition too."""
    return alibi(alibi_slopes(heads).to(torch.get_default_device()))


def _rank_case(name: str, hq: int, hk: int, length: int, **more: Any) -> Case:
    masks: dict[str, Callable[[], Mask]] = {
        "documents": partial(uneven_documents, length), "prefix": partial(_prefix, length),
        "window": _rank_window,
    }  # fmt: skip
    options: dict[str, Any] = {
        "dtype": "bfloat16", "tags": ("ranks", name), "devices": ("cuda",),
    }  # fmt: skip
    return Case(
        f"ranks-{name}-{hq}-{hk}-{length >> 10}k", 1, hq, hk, length, 128,
        mask=masks.get(name, causal), measure="ranks", **options | more,
    )  # fmt: skip


def _grid(length: int) -> list[Case]:
    """Return the cases for more than two GPUs, at one length."""
    scores: dict[int, dict[str, Any]] = {
        heads: {"alibi": partial(_alibi, heads), "bias": partial(learned_bias, heads, length)}
        for heads in (32, 64)
    }
    names = "causal", "documents", "window", "prefix", "alibi", "bias"
    return [
        _rank_case(name, heads, 8, length, score=scores[heads].get(name))
        for name in names
        for heads in (64, 32)
    ]


_K = 1 << 10
_RANK_TABLE = (
    _rank_case("causal", 32, 8, 16 * _K),
    _rank_case("causal", 32, 8, 64 * _K),
    _rank_case("documents", 32, 8, 64 * _K),
    _rank_case("causal", 64, 8, 16 * _K),
    _rank_case("causal", 32, 32, 16 * _K),
    _rank_case("causal", 64, 64, 16 * _K),
    _rank_case("causal", 32, 8, 512 * _K),
    *_grid(32 * _K), *_grid(256 * _K), *_grid(16 * _K), *_grid(128 * _K), *_grid(64 * _K),
    *_grid(512 * _K),
    _rank_case("causal", 4, 2, 2 * _K, dtype="float32", devices=("cpu",)),
)  # fmt: skip
RANK_CASES = tuple({case.name: case for case in _RANK_TABLE}.values())
