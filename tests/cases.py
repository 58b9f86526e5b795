"""One table of named cases for every backend, and the random inputs of each.

A `Case` is data: shapes, the names of its score and mask in `variants`, memory layouts. Its inputs
follow from its name alone, so that any failure comes back by name, on any machine and dtype.
"""

import math
import zlib
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from variants import MASKS, SCORES, Variant


@dataclass(frozen=True)
class Case:
    name: str
    b: int = 2
    hq: int = 4
    hk: int = 2
    q_len: int = 37
    kv_len: int = 41
    d: int = 16
    dv: int = 16
    score: str | None = None  # a name in variants.SCORES
    mask: str | None = None  # a name in variants.MASKS
    scale: float | None = None
    sink: bool = False
    dropout: float = 0.0
    entropy: bool = False  # beside the statistics, and its gradient is sent too
    std: float = 1.0
    layout: str = "contiguous"  # of q, k, v: a name in LAYOUTS
    grad_layout: str = "contiguous"  # of the gradients of out and lse
    captured: str = "accumulate"  # dtype of captured floats and of the sink, or "input"
    tags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


# ----------------------------------------------------------------------------------- layouts
# The same values behind other strides. What lies between them is NaN, so that a read outside shows.


def _inside(shape: tuple[int, ...], x: Tensor, at: tuple) -> Tensor:
    whole = torch.full(shape, math.nan, dtype=x.dtype)
    whole[at] = x
    return whole[at]


def _strided(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    return _inside((b, h, 2 * n, 2 * d), x, (..., slice(None, None, 2), slice(None, None, 2)))


def _guarded(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    at = (slice(None), slice(1, 1 + h), slice(2, 2 + n), slice(3, 3 + d))
    return _inside((b, h + 2, n + 4, d + 7), x, at)


def _fused(x: Tensor) -> Tensor:
    """A slice of a projection (b, length, heads, width), as of q, k and v at once."""
    b, h, n, d = x.shape
    at = (slice(None), slice(None), slice(2, 2 + h))
    return _inside((b, n, h + 5, d), x.transpose(1, 2), at).transpose(1, 2)


LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda x: x.mT.contiguous().mT,
    "strided": _strided,
    "guarded": _guarded,
    "fused": _fused,
    "expanded": lambda x: x[:1, :1].clone().expand_as(x),
    "one_number": lambda x: x[:1, :1, :1, :1].clone().expand_as(x),  # as from out.sum()
}


# ----------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Problem:
    """The inputs of a case: leaves, but for the gradients `dout` and `dlse`."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    captured: dict[str, Tensor]
    dout: Tensor
    dlse: Tensor
    seed: int = 2**40 + 3

    @property
    def dentropy(self) -> Tensor:
        """The gradient of the entropy: that of lse, from the last query to the first."""
        return self.dlse.flip(-1)

    def leaves(self) -> dict[str, Tensor]:
        """Everything that gets a gradient, by name."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        if self.sink is not None:
            named["sink"] = self.sink
        return named | {n: t for n, t in self.captured.items() if t.requires_grad}

    def learned(self) -> dict[str, Tensor]:
        return {n: t for n, t in self.captured.items() if t.requires_grad}

    def score(self, plain: bool = False):
        return self._variant(SCORES, self.case.score, plain)

    def mask(self, plain: bool = False):
        return self._variant(MASKS, self.case.mask, plain)

    def _variant(self, among: dict[str, Variant], name: str | None, plain: bool):
        if name is None:
            return None
        variant = among[name]
        return (variant.plain if plain else variant.make)(
            self.case, SimpleNamespace(**self.captured)
        )

    def copy(self, dtype: torch.dtype | None = None) -> "Problem":
        """Leaves of its own with the same values, contiguous, every float in `dtype` if given."""

        def same(t: Tensor | None) -> Tensor | None:
            if t is None or not t.is_floating_point():
                return t
            return t.detach().to(dtype or t.dtype).clone(memory_format=torch.contiguous_format)

        def leaf(t: Tensor | None) -> Tensor | None:
            return None if t is None else same(t).requires_grad_(t.requires_grad)

        captured = {n: leaf(t) for n, t in self.captured.items()}
        leaves = [leaf(t) for t in (self.q, self.k, self.v, self.sink)]
        return Problem(self.case, *leaves, captured, same(self.dout), same(self.dlse), self.seed)


def problem(case: Case, dtype: torch.dtype) -> Problem:
    """Random inputs of a case, the same whatever the dtype, but for rounding."""
    c = case
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(c.name.encode()))
        q, k, v = (
            c.std * torch.randn(c.b, h, n, d, dtype=torch.float64)
            for h, n, d in ((c.hq, c.q_len, c.d), (c.hk, c.kv_len, c.d), (c.hk, c.kv_len, c.dv))
        )
        # A level of logits for every head, or a neighbour's lse would pass for one's own.
        level = torch.arange(c.b * c.hq).view(c.b, c.hq, 1, 1) - 1.5
        common = c.d**-0.25
        q, k = q + level * common, k + common
        q, k, v = (LAYOUTS[c.layout](x.to(dtype)).requires_grad_() for x in (q, k, v))
        narrow = dtype if c.captured == "input" or dtype == torch.float64 else torch.float32
        sink = torch.randn(c.hq).to(narrow).requires_grad_() if c.sink else None
        captured = {}
        for among, name in ((SCORES, c.score), (MASKS, c.mask)):
            for key, make in among[name].tensors.items() if name else ():
                t = make(c)
                if t.is_floating_point():
                    t = t.to(narrow).requires_grad_(key not in among[name].frozen)
                captured[key] = t
        lay = LAYOUTS[c.grad_layout]
        dout = lay(torch.randn(c.b, c.hq, c.q_len, c.dv, dtype=torch.float64).to(dtype))
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        dlse = lay(torch.randn(c.b, c.hq, c.q_len, 1, dtype=torch.float64).to(acc))[..., 0]
    return Problem(case, q, k, v, sink, captured, dout, dlse)


# ----------------------------------------------------------------------------------- the table
# Cases tagged "half" also run in bfloat16 and float16.


def _table() -> tuple[Case, ...]:
    cases: list[Case] = []

    def add(name: str, *tags: str, **fields) -> None:
        cases.append(Case(name, tags=tags, **fields))

    small = {"b": 1, "hq": 2, "hk": 1, "d": 8, "dv": 8}
    for n in (1, 2, 3, 31, 63, 64, 65, 127, 129, 131, 255, 257):
        half = ("half",) * (n in (1, 65, 257))
        add(f"length_{n}", *half, **small, q_len=n, kv_len=n)
        add(f"length_{n}_causal", *half, **small, q_len=n, kv_len=n, mask="causal", sink=n % 2 == 0)
        add(f"length_{n}_score", **small, q_len=n, kv_len=n, mask="causal", score="twice")
    pairs = (1, 257), (257, 1), (2, 129), (65, 255), (255, 65), (127, 301), (301, 127), (61, 97)
    for n, m in pairs:
        add(f"lengths_{n}_{m}", **small, q_len=n, kv_len=m)
        add(f"lengths_{n}_{m}_causal", **small, q_len=n, kv_len=m, mask="causal")
        add(f"lengths_{n}_{m}_end", **small, q_len=n, kv_len=m, mask="causal_end", score="softcap")
    widths = [(d, d) for d in (1, 8, 17, 32, 40, 64, 80, 96, 100, 128, 160, 192, 256)]
    for d, dv in (*widths, (64, 32), (192, 128), (16, 40), (3, 5), (8, 256), (255, 1)):
        half = ("half",) * (d in (64, 100, 192))
        shape = {"b": 1, "hq": 3, "hk": 1, "d": d, "dv": dv}
        add(f"width_{d}_{dv}", *half, **shape, mask="causal_end")
        add(f"width_{d}_{dv}_score", **shape, score="alibi_learned")
    for hq, hk in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (8, 8), (8, 1), (8, 2), (6, 2), (6, 3)):
        half = ("half",) * (hq == 8)
        add(f"heads_{hq}_{hk}", *half, hq=hq, hk=hk, mask="causal", sink=True)
        add(f"heads_{hq}_{hk}_score", hq=hq, hk=hk, b=3, score="relative", mask="by_head")
    for name in LAYOUTS:
        if name != "one_number":
            add(f"layout_{name}", "half", "layout", layout=name, mask="causal")
            add(f"layout_{name}_score", "layout", layout=name, score="relative")
        add(f"grad_{name}", "layout", grad_layout=name, q_len=70, mask="causal")
        add(f"grad_{name}_score", "half", "layout", grad_layout=name, score="alibi_softcap")
    for std in (1.0, 5.0):
        for score in (None, "softcap", "relative"):
            shape = {"std": std, "d": 64, "dv": 64, "q_len": 90, "kv_len": 90, "sink": True}
            add(f"std_{std:.0f}_{score}", "half", **shape, score=score, mask="causal")
    # Several blocks of keys, whose maxima differ by far more than what sums are rescaled for.
    shape = {"std": 5.0, "b": 1, "d": 64, "dv": 64, "q_len": 150, "kv_len": 700}
    add("std_5_long", "half", **shape)
    add("std_5_long_sink", "half", **shape, sink=True, mask="causal_end")
    for scale in (0.0, -0.5, 1.0, 3.0):
        add(f"scale_{scale}", scale=scale, mask="causal_end")
        add(f"scale_{scale}_score", scale=scale, score="alibi_softcap", sink=True)
    for mask in MASKS:
        square = "document causal_document checker causal_window mixed neighborhood tiled spans"
        n = 48 if mask == "tiled" else 37
        lengths = {"q_len": n, "kv_len": n if mask in square.split() else 41}
        half = ("half",) * (mask in ("padding", "causal_late", "dense", "no_row", "spans"))
        add(f"mask_{mask}", "mask", *half, mask=mask, **lengths)
        with_sink = {**lengths, "sink": True, "score": "softcap", "b": 3}
        add(f"mask_{mask}_sink", "mask", mask=mask, **with_sink)
    needs = {"outside": "causal_window", "negative": "causal_window", "undefined": "causal"}
    lengths = {"window": 45, "window_token": 41}
    for score in SCORES:
        half = ("half",) * (
            score in ("softcap", "twice", "relative", "bias_all", "log_sigmoid_learned")
        )
        n = lengths.get(score, 37), lengths.get(score, 41)
        size = {"score": score, "q_len": n[0], "kv_len": n[1]}
        add(f"score_{score}", "score", *half, **size, mask=needs.get(score))
        size["q_len"], mask = size["kv_len"], needs.get(score, "by_head")
        add(f"score_{score}_masked", "score", **size, mask=mask, sink=True)
    for score in ("relative", "twice", "bias_rows", "bias_keys"):
        fields = {"captured": "input", "sink": True, "score": score, "q_len": 130, "kv_len": 130}
        add(f"captured_{score}", "half", **fields, mask="causal")
    for p in (0.1, 0.5):
        add(f"dropout_{p}", "half", "dropout", dropout=p, q_len=70)
        add(f"dropout_{p}_all", "dropout", dropout=p, score="relative", mask="causal", sink=True)
    add("dropout_1", "dropout", dropout=1.0)
    add("dropout_long", "dropout", **small, q_len=330, kv_len=301, dropout=0.3, mask="window")
    # Above one block of 256 x 256 pairs: tiles are skipped, rows have several stretches of keys.
    for mask in (name for name in MASKS if name not in ("tiled", "chunked", "block_causal")):
        shape = {"b": 2 if mask in ("padding", "prefix_lm", "by_batch", "causal_document") else 1,
                 "hq": 2, "hk": 1, "d": 16, "dv": 16, "q_len": 389, "kv_len": 389}  # fmt: skip
        add(f"long_{mask}", "long", "mask", **shape, mask=mask)
    # Whole blocks, and several runs of full tiles in a line: nothing but their ends says where.
    shape = {"b": 1, "hq": 2, "hk": 1, "d": 16, "dv": 16, "q_len": 512, "kv_len": 512}
    add("long_checker_even", "long", "mask", "half", **shape, mask="checker")
    tall = {"b": 1, "hq": 2, "hk": 2, "d": 8, "dv": 24}
    for score in ("alibi_softcap", "twice", "bias_square", "undefined", "outside", "holes", "ends"):
        masks = {"outside": "causal_window", "undefined": "causal", "ends": "causal"}
        mask = masks.get(score, "checker")
        n, m = (521, 521) if score == "outside" else (521, 300)
        shape = {**tall, "q_len": n, "kv_len": m, "sink": True}
        add(f"long_score_{score}", "long", **shape, score=score, mask=mask)
    for n, m in ((300, 700), (700, 300), (1, 700), (641, 1), (513, 513)):
        add(f"long_{n}_{m}", "long", **tall, q_len=n, kv_len=m)
        add(f"long_{n}_{m}_end", "long", **tall, q_len=n, kv_len=m, mask="causal_end", sink=True)
        add(f"long_{n}_{m}_late", "long", **tall, q_len=n, kv_len=m, mask="causal_late")
    for n, m, kind in (
        (700, 700, {"mask": "causal_window", "sink": True}),
        (600, 333, {"score": "relative"}),
    ):
        add(f"long_{n}_half", "long", "half", **small, q_len=n, kv_len=m, **kind)
    # Rows in two pieces (64 + 16 and 32 + 16), heads that do not begin every 16 numbers, several
    # tiles of keys and a last one cut short.
    odd = {"b": 1, "hq": 4, "hk": 4, "d": 72, "dv": 40}
    add("long_pieces", "half", **odd, q_len=333, kv_len=333, mask="causal")
    add("long_pieces_no_mask", "half", **odd, q_len=333, kv_len=333)
    cases += _fourteen()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    return tuple(cases)


def _fourteen() -> list[Case]:
    """The shapes on which a published kernel's backward was wrong while its forward was right: it
    stored the row statistics of one head's tail over the first rows of the next head."""
    shapes = [(8, 64, n) for n in (128, 127, 120, 64, 129, 255)]
    shapes += [(4, 64, n) for n in (128, 127, 120, 129)]
    shapes += [(8, 128, n) for n in (128, 127, 120, 64)]
    cases = [
        Case(f"fourteen_{hk}_{d}_{n}", b=1, hq=8, hk=hk, q_len=n, kv_len=n, d=d, dv=d,
             tags=("fourteen", "half"))
        for hk, d, n in shapes
    ]  # fmt: skip
    return cases + [replace(c, name=f"{c.name}_causal", mask="causal") for c in cases]


CASES = _table()
BY_NAME = {case.name: case for case in CASES}
