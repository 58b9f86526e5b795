"""A random call of a seed: what is computed, its data, and what is wrong with the results.

The exact results and the tolerances are those of `checks.yardstick`. With a number of `structures` the
functions, widths and dtypes are those of one of so many, and all that a compiled kernel takes at run
time is free: kernels compile for seconds, so that many calls must share them.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import checks
import headway as hw
import oracle
from cases import LAYOUTS, Case, Problem
from headway import autograd
from headway.resolve import prepare
from headway.types import Coords
from variants import MASKS, SCORES, Variant

from .functions import MILD, Function, Table, mask, score

WIDTHS = {
    "cpu": [1, 3, 8, 16, 17, 32, 40, 64],
    "triton": [8, 16, 32, 40, 64, 72, 96, 128],
    "hopper": [16, 32, 40, 64, 72, 96, 128, 192, 256],
}
LENGTHS = {"cpu": (1, 150, 330), "triton": (1, 300, 900), "hopper": (1, 400, 1100)}
PAIRS = {"cpu": 300_000, "triton": 1_000_000, "hopper": 1_500_000}
TILES = {
    "cpu": [(5, 7), (16, 64), (128, 128), (33, 20), (1, 9)],
    "triton": [(128, 128), (64, 32), (16, 48), (33, 20)],
    "hopper": [(128, 128), (256, 128)],
}
# Finite minima that whole rows may have. (GPU kernels give such rows no gradients, or lose log n in
# them: `explain` says so, and tests/tools/interpret_far_rows.py has what they do.)
LOWS = {"cpu": [-1e4, -1e9, -3.4028234663852886e38, -1e30], "triton": [], "hopper": []}
DTYPES = {
    "cpu": ["float32", "float32", "float64", "bfloat16", "float16"],
    "triton": ["bfloat16", "float16", "float32"],
    "hopper": ["bfloat16", "bfloat16", "float16"],
}


@dataclass(frozen=True)
class Fuzz:
    """A call: the shapes are `case`'s, with the names of `score` and `mask` in it."""

    seed: int
    case: Case
    dtype: torch.dtype
    score: Function | None
    mask: Function | None
    stats: bool
    tile: tuple[int, int] | None
    coords: tuple[int, int, int, int] | None
    places: bool  # positions one by one, not from the coordinates on
    layouts: tuple[str, str, str]
    deterministic: bool

    def __str__(self) -> str:
        c = self.case
        lines = [
            f"seed {self.seed}: {str(self.dtype)[6:]}, b {c.b}, heads {c.hq}/{c.hk}, "
            f"{c.q_len} of {c.kv_len}, widths {c.d}, {c.dv}, scale {c.scale}, std {c.std}, "
            f"sink {c.sink}, dropout {c.dropout}, stats {self.stats}, tile {self.tile}, "
            f"coords {self.coords}{' one by one' * self.places}, layouts {self.layouts}, "
            f"of gradients {c.grad_layout}, deterministic {self.deterministic}"
        ]
        for name, fn in (("mask", self.mask), ("score", self.score)):
            if fn is not None:
                text = fn.text.replace("LOW", repr(fn.low)).replace("\n", "\n           s = ")
                lines.append(f"    {name}: {fn.library or text}")
                lines += [f"        {t}" for t in fn.tables]
        return "\n".join(lines)


def fuzz(seed: int, backend: str, structures: int = 0) -> Fuzz:
    """The call of a seed."""
    kind = random.Random(f"structure {seed % structures}" if structures else f"structure of {seed}")
    kind_of = backend if backend in WIDTHS else "cpu"
    dtype = kind.choice(DTYPES[kind_of])
    name = f"fuzz_{seed}"
    of_mask = mask(kind, dtype) if kind.random() < 0.8 else None
    of_score = score(kind, dtype, LOWS[kind_of]) if kind.random() < 0.7 else None
    d = kind.choice(WIDTHS[kind_of])
    dv = d if kind.random() < 0.7 else kind.choice(WIDTHS[kind_of])
    sink, deterministic = kind.random() < 0.3, kind.random() < 0.1
    dropout = kind.choice([0.1, 0.35]) if kind.random() < 0.15 else 0.0
    stats = kind.random() < 0.6
    tile = kind.choice(TILES[kind_of]) if of_mask and kind.random() < 0.3 else None
    layouts = tuple(kind.choice(list(LAYOUTS)[:-1]) for _ in range(3))
    grad_layout = kind.choice(list(LAYOUTS))
    sharded = kind.random() < 0.15 and not dropout and tile is None
    places = kind.random() < 0.5
    group, scale = kind.choice([1, 1, 2, 3, 4]), kind.choice([None, 1, 1, -1])

    draw = random.Random(seed)  # from here on, what kernels take at run time
    low, usual, most = LENGTHS[kind_of]
    q_len, kv_len = (_length(draw, low, usual, most) for _ in range(2))
    if draw.random() < 0.4:
        kv_len = q_len
    b, hk = draw.choice([1, 2, 2, 3]), draw.choice([1, 1, 2, 3])
    while b * hk * group * q_len * kv_len > PAIRS[kind_of]:  # the oracle makes the whole square
        if b * hk > 1:
            b, hk = max(b - 1, 1), max(hk - 1, 1)
        else:
            q_len, kv_len = q_len * 3 // 4, kv_len * 3 // 4
    case = Case(
        name, b=b, hq=hk * group, hk=hk,
        q_len=q_len, kv_len=kv_len, d=d, dv=dv, score=of_score and name, mask=of_mask and name,
        scale=scale and scale * draw.uniform(0.05, 0.6), sink=sink, dropout=dropout,
        std=draw.uniform(0.4, 2.0), grad_layout=grad_layout,
    )  # fmt: skip
    coords = None
    if sharded:
        coords = (draw.randint(0, 2), draw.randint(0, 3), draw.randint(0, 40), draw.randint(0, 40))
    return Fuzz(
        seed, case, getattr(torch, dtype), of_score, of_mask, stats, tile, coords, places and sharded,
        layouts, deterministic,
    )  # fmt: skip


def _length(draw: random.Random, low: int, usual: int, most: int) -> int:
    """One in ten is 1: compilers take that for a constant, and make other code of it."""
    if draw.random() < 0.1:
        return 1
    return draw.randint(low, usual if draw.random() < 0.85 else most)


# -- the data -------------------------------------------------------------------------------------


def _sizes(f: Fuzz) -> dict[str, int]:
    """How long tables are: shards see positions, heads and rows from their coordinates on."""
    c, (b, h, q, kv) = f.case, f.coords or (0, 0, 0, 0)
    q, kv = c.q_len * (1 + f.places) + q, c.kv_len * (1 + f.places) + kv
    return {"b": c.b + b, "h": c.hq + h, "p": max(q, kv), "q": q, "k": kv, "r": 13}


def _positions(f: Fuzz, device: str) -> tuple[Tensor, Tensor]:
    c, (_, _, q, kv) = f.case, f.coords or (0, 0, 0, 0)
    if not f.places:
        return torch.arange(q, q + c.q_len, device=device), torch.arange(kv, kv + c.kv_len, device=device)  # fmt: skip
    g = torch.Generator().manual_seed(f.seed)
    made = (
        torch.randperm(2 * n, generator=g)[:n].sort().values + start
        for n, start in ((c.q_len, q), (c.kv_len, kv))
    )
    return tuple(x.to(device) for x in made)


def _values(f: Fuzz, t: Table, g: torch.Generator) -> Tensor:
    sizes = _sizes(f)
    shape = [sizes[a] for a in t.axes]
    dtype = getattr(torch, t.dtype)
    if t.axes == "b" and t.dtype == "int64":  # lengths
        return torch.randint(0, sizes["k"] + 1, shape, generator=g)
    if t.dtype == "bool":
        return torch.rand(shape, generator=g) < torch.rand((), generator=g) * 0.8 + 0.15
    if not dtype.is_floating_point:
        if torch.rand((), generator=g) < 0.5:  # documents
            steps = torch.rand(shape, generator=g) < 0.06
            return steps.cumsum(-1).clamp(max=120).to(dtype)
        low = 0 if t.dtype == "uint8" else -3
        return torch.randint(low, 5, shape, generator=g).to(dtype)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def problem_of(f: Fuzz, device: str = "cpu") -> Problem:
    """The inputs, the same on every device."""
    c = f.case
    g = torch.Generator().manual_seed(f.seed)
    randn = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    q, k, v = (
        c.std * randn(c.b, c.hq, c.q_len, c.d),
        c.std * randn(c.b, c.hk, c.kv_len, c.d),
        randn(c.b, c.hk, c.kv_len, c.dv),
    )
    level = torch.arange(c.b * c.hq).view(c.b, c.hq, 1, 1) % 5 - 1.5  # tells heads apart
    q, k = q + level * c.d**-0.25, k + c.d**-0.25
    wide = torch.float64 if f.dtype == torch.float64 else torch.float32
    sink = randn(c.hq).to(wide) if c.sink else None
    captured = {}
    for fn in (f.score, f.mask):
        for t in fn.tables if fn is not None else ():
            captured[t.name] = _values(f, t, g)
    dout, dlse = randn(c.b, c.hq, c.q_len, c.dv), randn(c.b, c.hq, c.q_len, 1)
    learned = {t.name for t in (f.score.tables if f.score else ()) if t.learned}
    with torch.device(device):
        q, k, v = (
            LAYOUTS[lay](x.to(device, f.dtype)).requires_grad_()
            for x, lay in zip((q, k, v), f.layouts, strict=True)
        )
        lay = LAYOUTS[c.grad_layout]
        dout, dlse = lay(dout.to(device, f.dtype)), lay(dlse.to(device, wide))[..., 0]
    captured = {n: t.to(device).requires_grad_(n in learned) for n, t in captured.items()}
    if sink is not None:
        sink = sink.to(device).requires_grad_()
    return Problem(c, q, k, v, sink, captured, dout, dlse, seed=2**33 + f.seed)


# -- the functions --------------------------------------------------------------------------------


def _compiled(fn: Function, kind: str) -> Callable[..., Any]:
    """`make(LOW, tables...)` returns the function."""
    args = "b, h, i, j" if kind == "mask" else "s, b, h, i, j"
    *steps, last = fn.text.split("\n")
    body = "".join(f"        s = {step}\n" for step in steps) + f"        return {last}\n"
    names = ", ".join(["LOW", *(t.name for t in fn.tables)])
    space: dict[str, Any] = {"torch": torch, "hw": hw}
    exec(f"def make({names}):\n    def {kind}({args}):\n{body}    return {kind}\n", space)
    return space["make"]


def _variant(f: Fuzz, fn: Function, kind: str) -> Variant:
    """As the library gets it, and as the oracle does: at its own coordinates, with a mild LOW."""
    make = _compiled(fn, kind)
    at = f.coords or (0, 0, 0, 0)
    tables = lambda t: [getattr(t, table.name) for table in fn.tables]

    def given(c: Case, t: SimpleNamespace) -> Any:
        if fn.library:
            return eval(fn.library, {"hw": hw, **vars(t)})
        return make(fn.low, *tables(t))

    def plain(c: Case, t: SimpleNamespace) -> Callable:
        own = make(MILD, *tables(t))
        if f.coords is None:
            own.on_tensors = True
            return own
        q_pos, kv_pos = _positions(f, "cpu")

        def there(*args: Tensor) -> Tensor:
            *s, b, h, i, j = args
            with oracle.IndexNumbers():
                return own(*s, b + at[0], h + at[1], q_pos[i], kv_pos[j])

        there.on_tensors = True
        return there

    return Variant(given, plain)


@contextmanager
def known(f: Fuzz) -> Iterator[None]:
    """The call's functions are in the table of variants, and its inputs are those of its case."""
    tables = ((MASKS, f.mask, "mask"), (SCORES, f.score, "score"))
    for among, fn, kind in tables:
        if fn is not None:
            among[f.case.name] = _variant(f, fn, kind)
    checks.yardstick.cache_clear()  # it knows calls by their case, which does not say all
    try:
        with patch.object(checks, "problem", lambda case, dtype: problem_of(f)):
            yield
    finally:
        for among, _, _ in tables:
            among.pop(f.case.name, None)


# -- the results ----------------------------------------------------------------------------------


def results(f: Fuzz, given: Problem, backend: str) -> dict[str, Tensor]:
    """The library's, by name."""
    c, of_mask = f.case, given.mask()
    options = {
        "scale": c.scale, "sink": given.sink, "dropout": c.dropout, "backend": backend,
        "seed": given.seed if c.dropout else None, "deterministic": f.deterministic,
    }  # fmt: skip
    if f.coords is not None:
        b, h, q, kv = f.coords
        device = given.q.device.type
        places = _positions(f, device) if f.places else (None, None)
        spec, call = prepare(
            given.q, given.k, given.v, given.score(), of_mask, max_logit=f.stats,
            keys=Coords(b, h, q, kv, *places), **options,
        )  # fmt: skip
        made = autograd.attention(spec, call)
        values = {"out": made.out}
        if f.stats:
            values |= {"lse": made.lse, "max_logit": made.max_logit}
    else:
        if f.tile is not None and of_mask is not None:
            of_mask = hw.block_mask(of_mask, c.b, c.hq, c.q_len, c.kv_len, tile=f.tile,
                                    device=given.q.device)  # fmt: skip
        call = hw.attention_with_stats if f.stats else hw.attention
        made = call(given.q, given.k, given.v, given.score(), of_mask, **options)
        values = made._asdict() if f.stats else {"out": made}
    grads = checks.gradients(given, values["out"], values.get("lse"))
    return {name: x.detach().cpu() for name, x in values.items()} | {
        n: g.cpu() for n, g in grads.items()
    }


def yardstick(f: Fuzz) -> checks.Yardstick:
    """The exact results, and how far from them honest ones may be."""
    made = checks.yardstick(f.case, f.dtype)[f.stats]
    if f.score is None or f.score.low == MILD or "lse" not in made.exact:
        return made
    # Rows of LOW alone: their lse is LOW and the logarithm of how many there are.
    lse = made.exact["lse"]
    alone = lse < MILD / 2
    exact = made.exact | {"lse": torch.where(alone, lse - MILD + f.score.low, lse)}
    return made._replace(exact=exact)


def ratios(f: Fuzz, made: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each result, in tolerances; infinite where it has no number, or other
    infinities, or another shape or dtype."""
    exact, tolerance, _, dtypes = yardstick(f)
    found = {}
    for name, right in exact.items():
        got = made[name]
        if got.shape != right.shape or got.dtype != dtypes[name]:
            found[name] = math.inf
            continue
        # Of pairs beside a sink whose every score is LOW, the oracle has a little more than nothing.
        limit = torch.full_like(right, max(tolerance[name], math.exp(MILD / 2)))
        if name == "lse":  # a rounding of LOW
            size = right.abs().nan_to_num(0, 0, 0)
            limit = torch.maximum(limit, 2 * size * torch.finfo(torch.float32).eps)
        apart = torch.where(got.double() == right, 0.0, (got.double() - right).abs())
        share = torch.where(apart == 0, 0.0, apart / limit).nan_to_num(math.inf, math.inf)
        found[name] = share.max().item() if share.numel() else 0.0
    return found


def check(f: Fuzz, backend: str, device: str = "cpu") -> dict[str, float]:
    """`ratios` of one call, with poisoned outputs and inputs that must not change."""
    with known(f):
        given = problem_of(f, device)
        before = {n: t.detach().clone() for n, t in given.leaves().items()}
        with checks.poisoned():
            made = results(f, given, backend)
        found = ratios(f, made)
        for name, leaf in given.leaves().items():
            if not torch.equal(leaf.detach().nan_to_num(7.0), before[name].nan_to_num(7.0)):
                found[f"input {name}"] = math.inf
    return found


def without(f: Fuzz) -> Iterator[Fuzz]:
    """The call with one thing less: what a failure needs."""
    if f.mask is not None:
        yield replace(f, mask=None, tile=None, case=replace(f.case, mask=None))
    if f.score is not None:
        yield replace(f, score=None, case=replace(f.case, score=None))
    if f.case.sink:
        yield replace(f, case=replace(f.case, sink=False))
    if f.case.dropout:
        yield replace(f, case=replace(f.case, dropout=0.0))
    if f.tile is not None:
        yield replace(f, tile=None)
    if f.coords is not None:
        yield replace(f, coords=None, places=False)
    if set(f.layouts) != {"contiguous"} or f.case.grad_layout != "contiguous":
        yield replace(
            f, layouts=("contiguous",) * 3, case=replace(f.case, grad_layout="contiguous")
        )
    if f.stats:
        yield replace(f, stats=False)
    if f.deterministic:
        yield replace(f, deterministic=False)
    for change in ({"b": 1}, {"hq": 1, "hk": 1}, {"scale": None}, {"std": 1.0}):
        if any(getattr(f.case, n) != x for n, x in change.items()):
            yield replace(f, case=replace(f.case, **change))
