"""The cases of context parallel, those that are worth most first. Lengths are of all ranks: on two,
four and eight cards 16k, 32k and 64k tokens are 8k a card, 128k, 256k and 512k are 64k a card.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headway.mods import Mask, Score, alibi, causal, document, prefix, sliding_window
from headway.mods.library.scores import alibi_slopes

from .case import Case, learned_bias

WINDOW = 4096


def documents(length: int) -> Mask:
    """Packed documents, an eighth of the sequence in the mean and a quarter at most."""
    draw = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < length:
        share = 0.005 + 0.245 * float(torch.rand((), generator=draw, device="cpu"))
        lengths.append(max(1, int(share * length)))
    lengths[-1] -= sum(lengths) - length
    return causal() & document.from_lengths(lengths)


def _window() -> Mask:
    return causal() & sliding_window(WINDOW)


def _prefix(length: int) -> Mask:
    return causal() | prefix(length // 8)


def _alibi(heads: int) -> Score:
    """With slopes on the default device, for the definition too."""
    return alibi(alibi_slopes(heads).to(torch.get_default_device()))


def _case(name: str, hq: int, hk: int, length: int, **more: Any) -> Case:
    masks: dict[str, Callable[[], Mask]] = {
        "documents": partial(documents, length), "prefix": partial(_prefix, length),
        "window": _window,
    }  # fmt: skip
    given: dict[str, Any] = {
        "dtype": "bfloat16", "tags": ("ranks", name), "devices": ("cuda",),
    }  # fmt: skip
    return Case(
        f"ranks-{name}-{hq}-{hk}-{length >> 10}k", 1, hq, hk, length, 128,
        mask=masks.get(name, causal), measure="ranks", **given | more,
    )  # fmt: skip


def _grid(length: int) -> list[Case]:
    """What is asked for more cards than two, at a length."""
    scores: dict[int, dict[str, Any]] = {
        heads: {"alibi": partial(_alibi, heads), "bias": partial(learned_bias, heads, length)}
        for heads in (32, 64)
    }
    names = "causal", "documents", "window", "prefix", "alibi", "bias"
    return [
        _case(name, heads, 8, length, score=scores[heads].get(name))
        for name in names
        for heads in (64, 32)
    ]


_K = 1 << 10
_ALL = (
    _case("causal", 32, 8, 16 * _K),
    _case("causal", 32, 8, 64 * _K),
    _case("documents", 32, 8, 64 * _K),
    _case("causal", 64, 8, 16 * _K),
    _case("causal", 32, 32, 16 * _K),
    _case("causal", 64, 64, 16 * _K),
    _case("causal", 32, 8, 512 * _K),
    *_grid(32 * _K), *_grid(256 * _K), *_grid(16 * _K), *_grid(128 * _K), *_grid(64 * _K),
    *_grid(512 * _K),
    _case("causal", 4, 2, 2 * _K, dtype="float32", devices=("cpu",)),
)  # fmt: skip
RANK_CASES = tuple({case.name: case for case in _ALL}.values())
