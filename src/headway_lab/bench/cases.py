"""The shared table of named bench cases: for the CPU, for a GPU, for several; and the choice.

On GPUs it times what FlexAttention, cuDNN, FlashAttention-4 (where it is installed) and Headway
take, in bfloat16; the expensive ones last. Lengths of context parallel are of all ranks: on two,
four and eight cards 16k, 32k and 64k tokens are 8k a card, 128k, 256k and 512k are 64k a card.
"""

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.errors import ArgumentError
from headway.mods import (
    Mask,
    Score,
    alibi,
    causal,
    document,
    prefix,
    sliding_window,
    softcap,
    strided,
)
from headway.mods.base import ScoreFn, value
from headway.mods.library.scores import alibi_slopes

from .case import BACKWARD, BUILD, FORWARD, Case, Target, learned_bias, tilted


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
            raise ArgumentError(_unknown(word, cases, device))
    return [c for c in cases if any(word in c.name or word in c.tags for word in words)]


def _unknown(word: str, cases: list[Case], device: str) -> str:
    """Return what to say of a word that no case has: names that are near, and all tags."""
    tags = sorted({tag for case in cases for tag in case.tags})
    near = difflib.get_close_matches(word, [case.name for case in cases], n=5, cutoff=0.5)
    names = f"near are the names {', '.join(near)}; " if near else ""
    return (
        f"--cases: no case for {device} is named or tagged {word!r}; {names}there are the tags "
        f"{', '.join(tags)}; `headway bench --list` has all names"
    )


def _than(peer: str, forward: float, backward: float, of: str = "headway") -> tuple[Target, ...]:
    return Target(FORWARD, peer, forward, of), Target(BACKWARD, peer, backward, of)


# -- for the CPU ----------------------------------------------------------------------------------


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


def _overhead(what: str = "", measure: str = "overhead", most: float = 20.0, **mods: Any) -> Case:
    """Return a call so small that Python takes all of its time."""
    return Case(
        f"overhead-16-32{what}", hq=4, hk=4, length=16, d=32, measure=measure, most=most,
        tags=("overhead",), **mods,
    )  # fmt: skip


def _half(dtype: str, isa: str = "") -> Case:
    name = f"causal-4k-64-{dtype}" + (f"-{isa.lower().replace('_', '-')}" if isa else "")
    return Case(
        name, dtype=dtype, mask=causal, isa=isa, peers=("sdpa",),
        targets=(Target(BACKWARD, "sdpa", 2.0),), tags=("half", "main"),
    )  # fmt: skip


_PARITY = _than("sdpa", 0.9, 0.9)
_FLEX = (Target(FORWARD, "flex", 1.0),)
_BOTH = ("sdpa", "flex")
_ALONE = ("headway out alone",)
_PER_TILE = _than("causal, per tile", 0.5, 0.5)
_NO_AMX = "AVX512_CORE_VNNI"
_MODELS: dict[str, Any] = {
    "measure": "training", "tags": ("models",), "devices": ("cpu", "cuda"),
}  # fmt: skip

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
    Case("dropout-1k-64", length=1024, mask=causal, dropout=0.1,
         peers=("headway without dropout", "sdpa dropout"), tags=("dropout",)),
    Case("jvp-1k-64", length=1024, mask=causal, measure="forward mode",
         peers=("headway without tangents", "sdpa math"), tags=("jvp",)),
    *(Case(f"{what}-1k-64", length=1024, mask=causal, measure=what, peers=_ALONE,
           tags=("statistics",)) for what in ("entropy", "expect")),
    Case("gqa-4k-64", hk=2, mask=causal, peers=_BOTH, targets=_FLEX, tags=("shapes",)),
    Case("one-head-4k-64", hq=1, hk=1, mask=causal, peers=("sdpa",), tags=("shapes",)),
    Case("batch-8x256-64", b=8, length=256, mask=causal, peers=("sdpa",), tags=("shapes",)),
    Case("prime-1021-80", length=1021, d=80, mask=causal, peers=("sdpa",), tags=("shapes",)),
    Case("softcap-4k-64", mask=causal, score=lambda: softcap(30.0), peers=("sdpa causal", "flex"),
         targets=_than("sdpa causal", 0.5, 0.5) + _FLEX, tags=("scores",)),
    Case("softcap-peaked-4k-64", std=5.0, mask=causal, score=lambda: softcap(30.0),
         peers=("sdpa causal", "flex"), tags=("scores",)),
    Case("alibi-4k-64", mask=causal, score=lambda: alibi(8), peers=("sdpa causal", *_BOTH),
         targets=_FLEX, tags=("scores",)),
    Case("relative-bias-4k-64", mask=causal, peers=("sdpa causal",), tags=("scores",),
         score=lambda: learned_bias(8, 4096)),
    Case("prefix-4k-64", mask=lambda: causal() | prefix(1024), peers=_BOTH, targets=_FLEX,
         tags=("masks",)),
    *(Case(f"packed-{n}-4k-64", mask=partial(_packed, n), peers=("causal, per tile", *_BOTH),
           targets=_PER_TILE + _FLEX, tags=("masks",)) for n in (256, 1024)),
    Case("window-512-4k-64", mask=lambda: causal() & sliding_window(512), peers=_BOTH,
         targets=_FLEX, tags=("masks",)),
    Case("window-512-32k-64", length=32768, mask=lambda: causal() & sliding_window(512),
         peers=("sdpa causal", "flex"), tags=("masks", "long"),
         targets=_than("sdpa causal", 10.0, 10.0) + _FLEX),
    Case("recording-8-layers-512-64", b=1, hq=12, hk=12, length=512, mask=causal,
         measure="recording", most=3.0, tags=("recording",)),
    Case("recording-8-layers-512-128", b=64, length=512, d=128, dtype="bfloat16", mask=causal,
         measure="recording", most=1.0, tags=("recording",), devices=("cuda",)),
    Case("memory-window-1024-64k-64", hq=1, hk=1, length=65536, measure="memory", most=1000.0,
         mask=lambda: causal() & sliding_window(1024), tags=("memory", "long")),
    _overhead(most=40.0, mask=causal),
    _overhead("-compiled", "overhead, compiled", 15.0, mask=causal),
    _overhead("-window", mask=lambda: causal() & sliding_window(8)),
    _overhead("-document", mask=lambda: causal() & document(torch.arange(16) // 5)),
    _overhead("-closure-score", score=_halved),
    _overhead("-method-mask", mask=lambda: _Near().keeps),
    *(_block_mask(name, 1 << 14, peers=("create_block_mask",),
                  targets=(Target(BUILD, "create_block_mask", 500.0),)) for name in _BLOCK_MASKS),
    *(_block_mask(name, 1 << 17, most=50.0) for name in _BLOCK_MASKS),
    *(_block_mask(name, 1 << 20, most=1000.0) for name in _BLOCK_MASKS),
    *(_block_mask(name, 1 << 20, "block mask, memory", most=1000.0) for name in _BLOCK_MASKS),
    *(_block_mask(name, 1 << 17, "block mask, memory", most=1000.0) for name in _UNKNOWN),
    Case("hf-llama-100m", hq=12, hk=12, length=512, **_MODELS),
    Case("hf-gemma2-2k", hq=8, hk=4, length=2048, d=96, **_MODELS),
)
# fmt: on

# -- for a GPU ------------------------------------------------------------------------------------

_TRITON = "headway triton"
_FLASH4 = "flash-attention-4"
_MASKS = ("flex", _FLASH4, _TRITON)
_CAPPED = ("flex", "headway plain", _FLASH4, _TRITON)
_DETERMINISTIC = "headway deterministic"
_LEARNED = ("headway plain", _DETERMINISTIC, _TRITON, "headway triton deterministic")


def _flex(
    forward: float = 1.0, backward: float = 1.0, ours: tuple[float, float] = (1.3, 1.4)
) -> tuple[Target, ...]:
    """Return targets next to FlexAttention, for Triton and for the default (`ours`)."""
    return *_than("flex", forward, backward, _TRITON), *_than("flex", *ours)


def _fixed(forward: float = 1.0, backward: float = 1.0) -> tuple[Target, ...]:
    """Return targets next to cuDNN and FlashAttention-4, which are made for one mask."""
    return *_than("cudnn", forward, backward), *_than(_FLASH4, forward, backward)


_RELATIVE = (
    *_than("headway plain", 0.7, 0.7),
    Target(BACKWARD, "headway", 1 / 1.35, _DETERMINISTIC),
)
_PLAIN = _flex() + _than("headway plain", 0.95, 0.95)
_SOFTCAP = _flex(1.5, 1.5, (2, 2)) + _than(_FLASH4, 1.5, 1.3)


def _gpu(name: str, shape: tuple[int, ...], *tags: str, **more: Any) -> Case:
    """Return a case of a `shape`: b, hq, hk, length, d and, where it differs, dv."""
    b, hq, hk, length, d, *dv = shape
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "devices": ("cuda",),
        "tags": ("gpu", *tags),
    } | more
    return Case(name, b, hq, hk, length, d, dv=dv[0] if dv else None, **options)


def _plain(name: str, shape: tuple[int, ...], *tags: str, **more: Any) -> Case:
    """Return a case next to all peers, with a causal mask unless it is named full."""
    options: dict[str, Any] = {
        "mask": None if name.endswith("full") else causal,
        "peers": ("flex", "cudnn", _FLASH4, _TRITON), "targets": _flex() + _fixed(),
    }  # fmt: skip
    return _gpu(name, shape, *tags, **options | more)


def _pair(name: str, shape: tuple[int, ...], *tags: str, **more: Any) -> tuple[Case, ...]:
    """Return a shape with a causal mask, and without."""
    return tuple(_plain(f"{name}-{mask}", shape, *tags, **more) for mask in ("causal", "full"))


def _scored(
    name: str, score: Callable[[], Score] | None, mask: Callable[[], Mask] | None,
    targets: tuple[Target, ...], peers: tuple[str, ...] = ("flex", "headway plain", _TRITON),
) -> Case:  # fmt: skip
    tag = "scores" if score is not None else "masks"
    shape = (2, 16, 16, 8192, 128)
    return _gpu(name, shape, tag, score=score, mask=mask, peers=peers, targets=targets)


def _short_documents(name: str, count: int, length: int, d: int) -> Case:
    """Return a case of documents of one length, in one row."""
    return _gpu(
        name, (1, 16, 16, count * length, d), "short", peers=_MASKS,
        mask=lambda: causal() & document.from_lengths([length] * count),
        targets=_flex() + _than(_FLASH4, 1, 1),
    )  # fmt: skip


def _decode(*shape: int) -> Case:
    """Return a case of one query per row over a cache of `length` keys."""
    b, hq, hk, length, d = shape[:5]
    name = f"decode-{b}-{hq}-{hk}-{length >> 10}k-{d}"
    return _gpu(name, shape, "decode", measure="decode")


def _documents() -> Mask:
    """Return twelve documents of uneven lengths in 8192 positions."""
    lengths = [97 + (911 * k) % 1171 for k in range(1, 13)]
    lengths[-1] = 8192 - sum(lengths[:-1])
    return causal() & document.from_lengths(lengths)


def _slopes() -> Tensor:
    return torch.exp2(-torch.arange(1, 17) * 0.5)


@value
class heated(Score):
    """A temperature that learns: `t` of shape (1,)."""

    t: Tensor

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.t[0].exp()


def _heated() -> Score:
    return heated(torch.tensor([0.5], requires_grad=True))


# Whom an expert asks for, on the tensors of a model: (b, length, heads, d) in memory.
_EVERY = ("flex", "flex flash", "cudnn", "cudnn flex", "varlen", _FLASH4, f"{_FLASH4} scored")
_BLOCKS = f"{_FLASH4} blocks"

_DROPOUT = ("headway without dropout", _TRITON, "cudnn dropout", "sdpa dropout")
_JVP = ("headway without tangents", _TRITON, "sdpa math")

# b, hq, hk, keys, d: from one long row to many, with groups of 8, of 4 and of 1; and MLA's.
_CACHES = (
    (1, 32, 8, 8 << 10, 128), (8, 32, 8, 8 << 10, 128), (64, 32, 8, 4 << 10, 128),
    (1, 32, 8, 128 << 10, 128), (16, 64, 8, 16 << 10, 128), (32, 16, 16, 4 << 10, 64),
    (128, 16, 1, 4096, 576, 512), (128, 128, 1, 4096, 576, 512),
)  # fmt: skip

# fmt: off
GPU_CASES: tuple[Case, ...] = (
    *_pair("8k-128", (2, 16, 16, 8192, 128), "main"),
    *_pair("8k-64", (2, 32, 32, 8192, 64), "main"),
    _scored("softcap-causal", lambda: softcap(20.0), causal, _SOFTCAP, _CAPPED),
    _scored("softcap-full", lambda: softcap(20.0), None, _SOFTCAP, _CAPPED),
    _scored("alibi-causal", lambda: alibi(_slopes()), causal, _PLAIN),
    _scored("user-causal", tilted, causal, _PLAIN),
    _scored("user-full", tilted, None, _PLAIN),
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
    *(_gpu(f"dropout-{name}", shape, "dropout", mask=mask, dropout=0.1, peers=_DROPOUT,
           targets=_than("headway without dropout", 0.75, 0.85) + _than(_TRITON, 1.5, 1.5))
      for name, shape, mask in (
          ("8k-128-causal", (2, 16, 16, 8192, 128), causal),
          ("8k-128-full", (2, 16, 16, 8192, 128), None),
          ("8k-64-causal", (2, 32, 32, 8192, 64), causal))),
    *(_gpu(f"jvp-{name}", (2, 16, 16, 8192, 128), "jvp", mask=mask, score=score, peers=_JVP,
           measure="forward mode")
      for name, mask, score in (
          ("8k-128-full", None, None), ("8k-128-causal", causal, None),
          ("softcap-full", None, lambda: softcap(20.0)))),
    *(_gpu(f"{what}-8k-128-{name}", (2, 16, 16, 8192, 128), "statistics", mask=mask, peers=_ALONE,
           measure=what, targets=(Target(FORWARD, *_ALONE, times),))
      for what, times in (("entropy", 1 / 1.08), ("expect", 1 / 0.7))
      for name, mask in (("causal", causal), ("full", None))),
    *_pair("16k-256", (1, 8, 8, 16384, 256), "main",
           targets=_flex(1.0, 2.0) + _fixed(0.95, 1.2)),
    *_pair("8k-192-128", (2, 16, 16, 8192, 192, 128), "main",
           targets=_flex(1.0, 1.5) + _fixed()),
    _plain("gqa-8k-128-causal", (2, 32, 8, 8192, 128), "main"),
    *_pair("short-512-128", (64, 16, 16, 512, 128), "short"),
    _plain("short-256-64-causal", (128, 16, 16, 256, 64), "short"),
    _short_documents("packed-512-128-causal", 64, 512, 128),
    _short_documents("packed-256-64-causal", 128, 256, 64),
    *_pair("1k-128", (16, 16, 16, 1024, 128), "short"),
    *_pair("4k-128", (4, 16, 16, 4096, 128), "long"),
    *_pair("16k-128", (1, 16, 16, 16384, 128), "long"),
    *(_plain(name, (2, 16, 16, 2048, d), "float32", dtype="float32", peers=("flex",),
             targets=_than("flex", 2, 2))
      for name, d in (("float32-2k-64-causal", 64), ("float32-2k-128-full", 128))),
    _plain("stats-8k-128-causal", (2, 16, 16, 8192, 128), "stats", stats=True, peers=("cudnn",),
           targets=()),
    *(_gpu(f"rows-{name}", (2, 16, 16, 8192, 128), "rows", by_rows=True, mask=mask, score=score,
           peers=(*_EVERY, _BLOCKS))
      for name, mask, score in (
          ("8k-128-causal", causal, None), ("8k-128-full", None, None),
          ("softcap-causal", causal, lambda: softcap(20.0)),
          ("alibi-causal", causal, lambda: alibi(_slopes())), ("user-causal", causal, tilted),
          ("window-1024", lambda: causal() & sliding_window(1024), None),
          ("documents-causal", _documents, None))),
    *(_gpu(f"curve-{n}k-128-causal", (max(1, 32 // n), 16, 16, n << 10, 128), "curve",
           by_rows=True, mask=causal, peers=_EVERY)
      for n in (1, 2, 4, 8, 16, 32, 64, 128)),
    _gpu("host", (1, 2, 2, 128, 64), "host", mask=causal, measure="host", most=72.0),
    _gpu("graph", (1, 2, 2, 128, 64), "host", mask=causal, measure="graph"),
    *(_gpu(f"first-call-{d}{kind}", (2, 2048 // d, 2048 // d, 8192, d), "first", mask=causal,
           measure="first call")
      for d in (128, 64) for kind in ("", "-score", "-bias")),
    *(_gpu(f"first-call-no-byte-code{kind}", (2, 16, 16, 8192, 128), "first", mask=causal,
           measure="first call, no byte code")
      for kind in ("", "-score")),
    _gpu("first-step-llama", (2, 16, 16, 2048, 64), "first", mask=causal, measure="first call"),
    _gpu("million-window-4096", (1, 8, 8, 1 << 20, 128), "million", measure="long",
         mask=lambda: causal() & sliding_window(4096)),
    *(_decode(*shape) for shape in _CACHES),
    _gpu("decode-grows", (8, 32, 8, 1400, 128), "decode", measure="decode, host"),
    *(_gpu(f"write-{n}", (1, 8, 8, n, 128), "decode", measure="write")
      for n in (8, 64, 4096, 65536)),
    _gpu("train", (8, 12, 12, 4096, 128), "train", mask=causal, measure="train"),
)
# fmt: on

# -- for several GPUs -----------------------------------------------------------------------------


def uneven_documents(length: int) -> Mask:
    """Return packed documents, an eighth of the sequence on average and a quarter at most."""
    draw = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < length:
        share = 0.005 + 0.245 * float(torch.rand((), generator=draw, device="cpu"))
        lengths.append(max(1, int(share * length)))
    lengths[-1] -= sum(lengths) - length
    return causal() & document.from_lengths(lengths)


def _prefix(length: int) -> Mask:
    return causal() | prefix(length // 8)


def _alibi(heads: int) -> Score:
    """Return ALiBi with slopes on the default device, for the definition too."""
    return alibi(alibi_slopes(heads).to(torch.get_default_device()))


# The cases of one table (`--cases table`), which four GPUs run in ten minutes.
_TABLE_OF_RANKS = (
    "causal-32-32-16k", "causal-64-64-16k", "causal-32-32-32k", "causal-64-64-32k",
    "causal-32-8-32k", "causal-64-8-32k", "documents-64-8-32k", "window-64-8-32k",
    "alibi-64-8-32k", "causal-32-8-256k", "causal-64-8-256k",
)  # fmt: skip


def _rank_case(name: str, hq: int, hk: int, thousands: int, **more: Any) -> Case:
    """Return a case of `thousands` of 1024 tokens; `name` is its mask or, with causal, its score.

    What depends on the length is a `partial` of it, which `ranks.shortened` makes anew."""
    length = thousands << 10
    masks: dict[str, Callable[[], Mask]] = {
        "documents": partial(uneven_documents, length), "prefix": partial(_prefix, length),
        "window": lambda: causal() & sliding_window(4096),
    }  # fmt: skip
    scores = {"alibi": partial(_alibi, hq), "bias": partial(learned_bias, hq, length)}
    kind = f"{name}-{hq}-{hk}-{thousands}k"
    tags = ("ranks", name, "table") if kind in _TABLE_OF_RANKS else ("ranks", name)
    return _gpu(
        f"ranks-{kind}", (1, hq, hk, length, 128), measure="ranks",
        mask=masks.get(name, causal), score=scores.get(name), **{"tags": tags} | more,
    )  # fmt: skip


def _grid(thousands: int) -> list[Case]:
    """Return the cases for more than two GPUs, at one length."""
    names = "causal", "documents", "window", "prefix", "alibi", "bias"
    return [_rank_case(name, heads, 8, thousands) for name in names for heads in (64, 32)]


_RANK_TABLE = (
    _rank_case("causal", 32, 8, 16), _rank_case("causal", 32, 8, 64),
    _rank_case("documents", 32, 8, 64), _rank_case("causal", 64, 8, 16),
    _rank_case("causal", 32, 32, 16), _rank_case("causal", 64, 64, 16),
    _rank_case("causal", 32, 32, 32), _rank_case("causal", 64, 64, 32),
    _rank_case("causal", 32, 8, 512),
    *(case for thousands in (32, 256, 16, 128, 64, 512) for case in _grid(thousands)),
    _rank_case("causal", 4, 2, 2, dtype="float32", devices=("cpu",)),
)  # fmt: skip
RANK_CASES = tuple({case.name: case for case in _RANK_TABLE}.values())
