"""Scores at the edges of what a float holds: rows of large minima, and -inf however it is reached.

Expected values are dense float64 autograd over the kept pairs alone: a pair whose score is -inf is
dropped, whatever the derivative there is. Where a score rounds (s - 1e9 has no s left), it is taken
as its own dtype rounds it; queries and keys are such that S itself is exact.
"""

import math
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.mods import lower_mod
from headway.mods.evaluation.derivative import differentiable_gathers, joint

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
NARROW = torch.bfloat16, torch.float16
LEAST = torch.finfo(torch.float32).min


def inputs(b: int, hq: int, hk: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v: S, with a scale of 1/4, is a multiple of 1/16 below 2^4, and exact."""
    q, k = (torch.randint(-3, 4, (b, h, length, 4)) / 2 for h in (hq, hk))
    return [x.to(dtype).requires_grad_() for x in (q, k, torch.randn(b, hk, length, 4))]


def dense(
    score: Callable, tables: dict[str, Tensor], mask: Callable | None, rounded: torch.dtype,
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse in the inputs' dtype; T has the numbers that it has in `rounded`."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT / 4
    at = [torch.arange(n).view([-1] + [1] * m) for n, m in zip(s.shape, (3, 2, 1, 0), strict=True)]
    kept = torch.ones(s.shape, dtype=torch.bool)
    kept = kept if mask is None else kept & mask(*at)
    with torch.no_grad():
        held = score({n: t.to(rounded) for n, t in tables.items()})
        t = torch.as_tensor(held(s.to(rounded), *at)).expand(s.shape)
    where = (kept & (t > -math.inf)).nonzero(as_tuple=True)
    exact = score(tables)(s[where], *where)
    held = exact + (t[where].to(exact.dtype) - exact).detach()
    t = torch.full_like(s, -math.inf).index_put(where, held.to(s.dtype))
    every = t if sink is None else torch.cat([t, sink.view(-1, 1, 1).expand(*s.shape[:3], 1)], -1)
    nothing = (every == -math.inf).all(-1, keepdim=True)
    every = every.masked_fill(nothing, 0.0)
    # The largest comes off first: near 1e30 a logsumexp knows nothing of the sum, nor its gradient.
    m = every.detach().amax(-1, keepdim=True)
    lse = (every - m).logsumexp(-1) + m[..., 0]
    p = (every - m).softmax(-1)[..., : s.shape[3]].masked_fill(nothing, 0.0)
    return p @ v, lse.masked_fill(nothing[..., 0], -math.inf)


def compare(
    score: Callable[[dict[str, Tensor]], Callable], tables: dict[str, Tensor], mask, dtype, backend,
    shape=(2, 4, 2, 40), sink: Tensor | None = None,
) -> None:  # fmt: skip
    """Every result and gradient, beside float64; off by twice what plain PyTorch in the dtype is
    off by, and a few roundings of the largest number (of the largest sum: that of all pairs)."""
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    given = dict(zip("qkv", inputs(*shape, dtype), strict=True))
    given |= {n: t.to(acc).requires_grad_() for n, t in tables.items()}
    if sink is not None:
        given["sink"] = sink.to(acc).requires_grad_()
    dout, dlse = torch.randn(given["q"].shape), torch.randn(given["q"].shape[:3])

    def results(of: dict[str, Tensor], run: Callable) -> dict[str, Tensor]:
        made = run({n: of[n] for n in tables}, of["q"], of["k"], of["v"], of.get("sink"))
        sent = [made[0], made[1].masked_fill(made[1] == -math.inf, 0.0)]
        sizes = [dout.to(made[0].dtype), dlse.to(made[1].dtype)]
        grads = torch.autograd.grad(sent, list(of.values()), sizes, allow_unused=True)
        named = zip(of, grads, strict=True)
        return dict(zip(("out", "lse"), made, strict=True)) | {
            n: torch.zeros_like(of[n]) if g is None else g for n, g in named
        }

    held = torch.float64 if backend == "reference" else acc
    plain = lambda of, *args: dense(score, of, mask, held, *args)
    ours = lambda of, q, k, v, by: hw.attention_with_stats(
        q, k, v, score(of), mask, scale=0.25, sink=by, backend=backend
    )[:2]
    copies = lambda to: {n: t.detach().to(to(t)).requires_grad_() for n, t in given.items()}
    right = results(copies(lambda t: torch.float64), plain)
    rough = None if dtype in NARROW else results(copies(lambda t: t.dtype), plain)
    made = results(given, ours)
    for name, exact in right.items():
        seen = exact.isfinite()
        assert torch.equal(made[name].isfinite(), seen), name
        size = exact[seen].abs().max().item() if seen.any() else 0.0
        eps = torch.finfo(dtype if name not in ("lse", "sink", *tables) else acc).eps
        size = size if name in ("out", "lse") else max(size, 1.0)
        allowed = (160 if name in tables else 16) * eps * size
        if rough is not None:
            allowed += 2 * (rough[name].double() - exact)[seen].abs().max().item()
        else:  # the backward is given a rounded out
            allowed = 4 * torch.finfo(dtype).eps * max(size, 1.0)
        off = (made[name].double() - exact)[seen].abs()
        assert not off.numel() or off.max().item() <= allowed, (name, off.max().item(), allowed)


# -- rows whose every score is a large finite minimum ---------------------------------------------

KEEP = torch.arange(300) % 4 != 1
ROWS = {
    "padded queries": lambda big: (
        lambda t: lambda s, b, h, i, j: torch.where(KEEP[i] & (i >= j), s, big)
    ),
    "an offset": lambda big: lambda t: lambda s, b, h, i, j: s + torch.where(KEEP[i], 0.0, big),
    "a bias": lambda big: (
        lambda t: (
            lambda s, b, h, i, j: (
                s + torch.where(KEEP[i] | ((i + j) % 3 == 0), t["bias"][i, j], big)
            )
        )
    ),
    "a factor": lambda big: (
        lambda t: lambda s, b, h, i, j: s * t["heat"][h].exp() + torch.where(KEEP[i], 0.0, big)
    ),
}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", torch.float32), ("cpu", torch.float32), ("cpu", torch.float64),
     ("cpu", torch.bfloat16), ("cpu", torch.float16)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("big", [-1e4, -1e9, LEAST, 1e9])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_large_minima(name, big, dtype, backend):
    tables = {"bias": {"bias": torch.randn(40, 40)}, "factor": {"heat": torch.randn(4) / 4}}
    tables = tables.get(name.split()[1], {})
    compare(ROWS[name](big), tables, hw.causal(), dtype, backend)


@BACKENDS
@pytest.mark.parametrize("sink", [0.0, -1e9, -math.inf])
@pytest.mark.parametrize("mask", [None, hw.causal() & hw.sliding_window(90)], ids=["", "window"])
def test_beside_a_sink_in_several_pieces(mask, sink, backend):
    sinks = torch.full((2,), sink)
    compare(ROWS["an offset"](-1e9), {}, mask, torch.float32, backend, (1, 2, 1, 300), sinks)


@BACKENDS
@pytest.mark.parametrize("least", [LEAST, torch.finfo(torch.float64).min, -1e300])
def test_the_least_float64(backend, least):
    compare(ROWS["padded queries"](least), {}, None, torch.float64, backend)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_with_rows_of_the_least_number(dtype, backend):
    """As Hugging Face pads: the least number of the model's dtype, over whole rows."""
    q, k, v = (x.detach() for x in inputs(1, 2, 2, 64, dtype))
    k.requires_grad_(), v.requires_grad_()
    pad = torch.zeros(64, 64, dtype=dtype)
    pad[[3, 30, 63]] = torch.finfo(dtype).min
    dout = torch.zeros(1, 2, 64, 4, dtype=dtype)
    dout[:, :, [3, 30, 63]] = torch.randn(1, 2, 3, 4).to(dtype)
    out = hw.attention(q, k, v, hw.bias(pad), scale=0.25, backend=backend)
    _, dv = torch.autograd.grad(out, (k, v), dout)
    even = dout.double().sum(2, keepdim=True) / 64  # every key has the same share of such a row
    assert torch.allclose(dv.double(), even.expand_as(dv), atol=2 * torch.finfo(dtype).eps, rtol=0)


@BACKENDS
def test_dropout_of_such_rows(backend):
    """Of constants the size does not matter."""
    q, k, v = inputs(1, 2, 2, 64, torch.float64)
    dout = torch.randn(1, 2, 64, 4).double()
    grads = []
    for big in (-1e30, 0.0):
        score = lambda s, b, h, i, j, big=big: torch.where(i % 2 == 0, s, big)
        out = hw.attention(q, k, v, score, dropout=0.4, seed=3, scale=0.25, backend=backend)
        grads.append(torch.autograd.grad(out, (q, k, v), dout))
    for got, right in zip(*grads, strict=True):
        assert torch.allclose(got, right, rtol=1e-12, atol=1e-14)


def test_other_rows_keep_their_bits():
    """What is done for such rows changes no other one."""
    q, k, v = inputs(1, 2, 1, 300, torch.float32)
    dout = torch.randn(1, 2, 300, 4)
    dout[:, :, ~KEEP] = 0
    grads = []
    for big in (-1e9, -100.0):
        out = hw.attention(q, k, v, ROWS["an offset"](big)({}), hw.causal(), backend="cpu")
        grads.append(torch.autograd.grad(out, q, dout)[0][:, :, KEEP])
    assert torch.equal(*grads)


def by_torch_func(run: Callable, leaves: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.func.grad(lambda qkv: (run(*qkv) * dout).sum())([x.detach() for x in leaves])


def by_autograd(run: Callable, leaves: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(*leaves), leaves, dout)


@pytest.mark.parametrize("compiled", ["eager", "compiled", "compiled with its gradient"])
@pytest.mark.parametrize("mask", [None, hw.causal()], ids=["none", "causal"])
def test_large_logits_of_a_plain_call(mask, compiled):
    """Whatever number all logits share, gradients are those of the definition: S is exact here, and
    dense float32 is off by 1e-6."""
    run = lambda *qkv: hw.attention(*qkv, mask=mask, scale=0.25)
    compile = partial(torch.compile, backend="aot_eager", fullgraph=True)
    run = compile(run) if compiled == "compiled" else run
    differentiate = compile(by_torch_func) if compiled.endswith("gradient") else by_autograd
    kept = None if mask is None else lambda b, h, i, j: j <= i
    for shared in (0.0, 2.0**6, -(2.0 ** random.randint(7, 9)), 2.0**10):
        leaves = inputs(2, 4, 2, 33, torch.float32)
        with torch.no_grad():
            leaves[0][..., 0] = leaves[1][..., 0] = abs(shared)
            leaves[1][..., 0] *= math.copysign(1, shared)
        dout = torch.randn(2, 4, 33, 4)
        grads = differentiate(run, leaves, dout)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        out, _ = dense(lambda tables: lambda s, *at: s, {}, kept, torch.float64, *exact, None)
        rights = torch.autograd.grad(out, exact, dout.double())
        for got, right, x in zip(grads, rights, leaves, strict=True):
            atol = 1e-5 * float(x.detach().abs().max()) if x is not leaves[2] else 1e-5
            torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=atol)


# -- pairs that are dropped by -inf ---------------------------------------------------------------

WALL = torch.tensor([0.5, -math.inf, 0.25, 0.0, -math.inf, -1.0, 2.0])
NEVER = torch.tensor(-math.inf)
TABLES = {"heat": lambda: torch.rand(4) + 0.5, "warm": lambda: torch.rand(5) + 0.5,
          "bias": lambda: torch.randn(40, 40)}  # fmt: skip
DROPPED = {
    "a constant": lambda t: lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf) * t["heat"][h],
    "a tensor": lambda t: lambda s, b, h, i, j: torch.where(i >= j, s, NEVER) * t["heat"][h],
    "a table": lambda t: lambda s, b, h, i, j: (s + WALL[(i - j) % 7]) * t["heat"][h],
    "a learned table": lambda t: lambda s, b, h, i, j: (
        (s * t["warm"][i % 5] + WALL[j % 7]) * t["heat"][h] * t["warm"][j % 5]
    ),
    "divided": lambda t: lambda s, b, h, i, j: (s + WALL[(i - j) % 7]) / t["heat"][h],
    "a logarithm": lambda t: lambda s, b, h, i, j: (
        s + (1.0 * (i >= j)).log() * t["heat"][h] + t["bias"][i, j]
    ),
    "an overflow": lambda t: lambda s, b, h, i, j: (
        s - torch.expm1(1e4 * t["heat"][h] * (i < j)) + t["bias"][i, j]
    ),
    "a square": lambda t: lambda s, b, h, i, j: (
        -((s + WALL[(i + j) % 7]) ** 2) * t["heat"][h]
    ),
    "a cap": lambda t: lambda s, b, h, i, j: (
        torch.where(i % 3 == j % 3, -math.inf, torch.tanh(s * t["heat"][h])) * t["heat"][0]
    ),
    "a cap of NaN": lambda t: lambda s, b, h, i, j: (
        torch.tanh(s + torch.where(i < j, math.nan, t["bias"][i, j])) * t["heat"][h]
    ),
}  # fmt: skip


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DROPPED)
def test_dropped_pairs_have_no_derivative(name, dtype, backend):
    used = [n for n in TABLES if n in _names(DROPPED[name])]
    mask = hw.causal() if "NaN" in name else None
    compare(DROPPED[name], {n: TABLES[n]() for n in used}, mask, dtype, backend)


def _names(score: Callable) -> set[str]:
    read = set()

    class Reads(dict):
        def __getitem__(self, name):
            read.add(name)
            return TABLES[name]()

    i = torch.arange(4)
    score(Reads())(i.float(), i * 0, i, i, i)
    return read


@pytest.mark.parametrize("draws", range(5))
def test_random_scores(draws):
    """Expressions with -inf and large minima, in numbers and tables: those that PyTorch can
    differentiate at the pairs that are kept."""
    draw = random.Random(draws)
    found = 0
    while found < 5:
        tables = {n: draw_table() for n, draw_table in TABLES.items()}
        score = _expression(draw, draw.randint(2, 4))
        if not _regular(score, tables):
            continue
        found += 1
        for dtype in (torch.float64, torch.float32):
            used = {n: t for n, t in tables.items() if n in _names(score)}
            compare(score, used, hw.causal() if draw.random() < 0.5 else None, dtype, "cpu",
                    (1, 4, 2, 40))  # fmt: skip


def _expression(draw: random.Random, depth: int) -> Callable:
    """A score as a function of its tables."""
    if depth == 0:
        return draw.choice([
            lambda t: lambda s, b, h, i, j: s,
            lambda t: lambda s, b, h, i, j: t["bias"][i, j],
            lambda t: lambda s, b, h, i, j: WALL[(i + j) % 7] + 0 * j,
            lambda t: lambda s, b, h, i, j: 0.125 * (j - i),
        ])  # fmt: skip
    a, c = _expression(draw, depth - 1), _expression(draw, draw.randint(0, depth - 1))
    low = draw.choice([-math.inf, -math.inf, -1e9, LEAST])
    n = draw.randint(2, 5)
    return draw.choice([
        lambda t: lambda *at: a(t)(*at) + c(t)(*at),
        lambda t: lambda *at: a(t)(*at) * t["heat"][at[2]],
        lambda t: lambda *at: a(t)(*at) * t["warm"][at[3] % 5],
        lambda t: lambda *at: a(t)(*at) / t["warm"][at[4] % 5],
        lambda t: lambda *at: torch.where((at[3] + at[4]) % n == 0, low, 1.0 * a(t)(*at)),
        lambda t: lambda *at: torch.where(at[3] >= at[4], 1.0 * a(t)(*at), 1.0 * c(t)(*at)),
        lambda t: lambda *at: torch.where(at[3] % n == 0, low, 1.0 * a(t)(*at)) + c(t)(*at),
        lambda t: lambda *at: torch.tanh(a(t)(*at)) * 3,
        lambda t: lambda *at: torch.maximum(1.0 * a(t)(*at), 1.0 * c(t)(*at)),
    ])  # fmt: skip


def _regular(score: Callable, tables: dict[str, Tensor]) -> bool:
    """Whether T is no NaN nor inf, -inf in float32 and float64 alike, and PyTorch's derivative
    finite at pairs that are kept: of a branch that is not taken it may be NaN."""
    h, i, j = torch.arange(4)[:, None, None], torch.arange(40)[:, None], torch.arange(40)
    found = []
    for dtype in (torch.float32, torch.float64):
        of = {n: t.to(dtype).requires_grad_() for n, t in tables.items()}
        s = (torch.arange(4 * 40 * 40).view(4, 40, 40) % 97 / 16 - 3).to(dtype).requires_grad_()
        t = score(of)(s, h * 0, h, i, j).expand(4, 40, 40)
        found.append(t == -math.inf)
        where = (~found[-1]).nonzero(as_tuple=True)
        t = score(of)(s[where], where[0] * 0, *where)
        if not t.isfinite().all() or not t.requires_grad or not t.numel():
            return False
        grads = torch.autograd.grad(t.sum(), [s, *of.values()], allow_unused=True)
        if not all(g is None or g.isfinite().all() for g in grads):
            return False
    return torch.equal(*found) and bool(found[0].any() or (t < -1e8).any())


PLAIN = {
    "alibi": hw.alibi(4),
    "learned alibi": hw.alibi(torch.rand(4)),
    "softcap": hw.softcap(30.0),
    "relative bias": hw.relative_bias(torch.randn(4, 9)),
    "bias": hw.bias(torch.randn(4, 40, 40)),
    "t5": hw.t5_bias(torch.randn(32, 4)),
    "tilted": lambda s, b, h, i, j: 1.1 * s + 0.01 * (j - i) + 0.5,
    "dropped": lambda s, b, h, i, j: torch.where(i >= j, 1.1 * s, -math.inf),
    "logarithm": lambda s, b, h, i, j: s - (1.0 + (i - j).abs()).log(),
}
OTHERS = {
    "gain": lambda s, b, h, i, j: s * WALL[h],
    "infinity": lambda s, b, h, i, j: s * math.inf,
    "number": hw.softcap(30.0) >> (lambda s, b, h, i, j: s * WALL[0]),
    "exp": lambda s, b, h, i, j: s.exp(),
    "overflow": lambda s, b, h, i, j: s * 3e38 * (i + 2),
    "square": lambda s, b, h, i, j: -(s * s),
    "half": lambda s, b, h, i, j: s * (1e3 * i).half(),
}


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_kernels_look_for_dropped_pairs_only_where_a_derivative_may_be_infinite(name):
    graph = lower_mod("score", (PLAIN | OTHERS)[name], torch.float32)[0]
    for wanted in ((), differentiable_gathers(graph, range(len(graph.tensors)))):
        assert joint(graph.text, wanted).unbounded == (name in OTHERS)
