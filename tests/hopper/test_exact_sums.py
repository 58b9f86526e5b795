"""Deterministic gradients of captured tensors: exact sums, and kernels that add to them in any order."""

import itertools
import math
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import headway as hw
from headway.backends.gpu import exact_sums
from headway.backends.gpu.exact_sums import LIMIT, ExactSums, exact_width, most_additions
from headway.backends.gpu.runtime import call_plan
from headway.errors import BackendRefused
from long import long
from tools import simulator

from .test_simulated import choose, simulated  # noqa: F401  (a fixture)

CPU = torch.device("cpu")
WIDTHS = (1, 2, 4, 8, 16)
NAN, INF = math.nan, math.inf
LEAST, MOST = 2.0**-149, torch.finfo(torch.float32).max


def added(values: torch.Tensor, width: int, order: torch.Tensor) -> float:
    """The exact sum of values, added in an order."""
    sums = ExactSums(width, {0: 1}, CPU)
    (memory,) = sums.begin([torch.zeros(1)])
    pointer = simulator.Pointer(memory)
    for x in values[order].split(7):
        places = torch.zeros(len(x), dtype=torch.int32)
        simulator.LOADED.exact_sums.add(pointer, places, x, width)
    result = torch.zeros(1)
    sums.write([memory], [result])
    return result.item()


def bits(x: float) -> bytes:
    return torch.tensor(x).numpy().tobytes()


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_any_numbers(width):
    """Of every exponent; of those that cancel but for the least; each rounded once, in any order."""
    draw = torch.Generator().manual_seed(width)
    random = lambda n: torch.randint(-(2**31), 2**31, (n,), generator=draw).to(torch.int32)
    for n in (1, 40, 130):
        values = random(n).view(torch.float32)
        values = values[values.isfinite()]
        mild = torch.randn(n, generator=draw) * 2.0 ** torch.randint(-8, 8, (n,), generator=draw)
        small = values * 2.0**-30
        for x in (values, mild, torch.cat([small, -small, torch.tensor([LEAST])])):
            exact = torch.tensor(math.fsum(x.tolist()), dtype=torch.float64).float().item()
            made = {bits(added(x, width, torch.randperm(len(x), generator=draw))) for _ in range(3)}
            (result,) = made
            result = torch.frombuffer(bytearray(result), dtype=torch.float32).item()
            largest = x.double().abs().sum().item()
            assert result == exact or abs(result - exact) <= 2.0**-50 * largest + 1e-7 * abs(exact)


@pytest.mark.parametrize("width", WIDTHS)
def test_infinities_and_nans_show(width):
    for values, right in (
        ([INF, -1.0], INF), ([MOST, -INF], -INF), ([INF, -INF], NAN), ([NAN, 1.0], NAN),
        ([-NAN, INF], NAN), ([MOST, MOST], INF), ([MOST, MOST, -MOST], MOST), ([LEAST], LEAST),
    ):  # fmt: skip
        x = torch.tensor(values)
        for order in itertools.permutations(range(len(x))):
            made = added(x, width, torch.tensor(order))
            assert made == right or (math.isnan(made) and math.isnan(right))


def test_no_row_overflows():
    """As many numbers as may be added, each the largest of its row, all of one sign."""
    for additions in (1, 1 << 24, (1 << 24) + 1, 1 << 32, 1 << 36, 1 << 39):
        width = exact_width(additions)
        largest = ((1 << 24) - 1) << (width - 1)
        assert additions * largest < 1 << 63
    with pytest.raises(BackendRefused, match="549,755,813,889 numbers"):
        exact_width((1 << 39) + 1)


# name: a score of a tensor that learns, and the tensor.
H, Q, KV = 2, 40, 140
SCORES = {
    "by distance": (hw.relative_bias, torch.randn(H, 2 * KV + 1)),
    "slopes": (hw.alibi, torch.rand(H)),
    "buckets": (lambda t: hw.t5_bias(t, max_distance=60), torch.randn(32, H)),
    "by head": (lambda t: lambda s, b, h, i, j: s + t[h] * (i - j) / 64, torch.randn(H)),
    "scalar": (lambda t: lambda s, b, h, i, j: s * t.exp(), torch.randn(())),
    "by key": (lambda t: lambda s, b, h, i, j: s + t[h, j], torch.randn(H, KV)),
    "by pair": (lambda t: lambda s, b, h, i, j: s + t[(i * j) % 9], torch.randn(9)),
    "one twice": (lambda t: lambda s, b, h, i, j: s * t[0] + t[(i - j) % 5], torch.randn(5)),
}  # fmt: skip


def gradients(name: str, width: int, backend: str, dtype: torch.dtype, deterministic: bool) -> list:
    """Of q, k, v, a sink and the tensor; two query heads share one of keys."""
    score, table = SCORES[name]
    draw = torch.Generator().manual_seed(0)
    shapes = (H, Q), (1, KV), (1, KV), (H, Q)
    q, k, v, dout = (torch.randn(1, *s, width, generator=draw).bfloat16().to(dtype) for s in shapes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [q, k, v, torch.zeros(H, dtype=wide), table.to(wide)]
    leaves = [x.clone().requires_grad_() for x in leaves]
    mask = None if name == "by pair" else hw.causal(KV - Q)
    out = hw.attention(
        *leaves[:3], score(leaves[4]), mask, sink=leaves[3], backend=backend,
        deterministic=deterministic,
    )  # fmt: skip
    return list(torch.autograd.grad(out, leaves, dout))


def of_orders(name: str, width: int, dtype: torch.dtype = torch.int64) -> list[list]:
    """The gradients by two orders of additions to sums of a dtype."""
    made = []
    for seed in range(2):
        with simulator.shuffled(seed, dtype) as additions:
            made.append(gradients(name, width, "hopper", torch.bfloat16, True))
        assert additions
    return made


def same(made: list[list]) -> bool:
    return all(torch.equal(x, y) for other in made[1:] for x, y in zip(made[0], other, strict=True))


@pytest.mark.parametrize(
    ("name", "width", "way"),
    [*((name, 64, "at once") for name in SCORES), ("by distance", 128, "segments"),
     ("buckets", 256, "at once"), long("by distance", 192, "at once"),
     long("scalar", 256, "at once")],
)  # fmt: skip
def test_the_same_bits_in_any_order(name, width, way, monkeypatch):
    choose(monkeypatch, way)
    made = of_orders(name, width)
    assert same(made)
    exact = gradients(name, width, "reference", torch.float64, False)
    usual = gradients(name, width, "hopper", torch.bfloat16, False)
    for x, y, z in zip(made[0], exact, usual, strict=True):
        off, of_usual = ((a.double() - y).norm() for a in (x, z))
        assert off <= 1.01 * of_usual + 1e-6 * y.norm()


@pytest.mark.parametrize("name", ["by distance", "buckets"])
def test_float32_sums_are_caught(name, monkeypatch):
    """A kernel that adds float32 numbers, as without `deterministic`: the order shows."""
    choose(monkeypatch, "at once")
    usual = call_plan.ExactSums(0, {}, torch.device("cpu"))
    monkeypatch.setattr(call_plan.BasePlan, "_new_exact_sums", lambda *call: usual)
    assert not same(of_orders(name, 64, torch.float32))


@pytest.mark.parametrize("name", ["by distance", "buckets", "by key", "by pair", "one twice"])
def test_no_more_is_added_than_reckoned_with(name, monkeypatch):
    choose(monkeypatch, "at once")
    most: list[int] = []
    count = lambda *of: most.append(most_additions(*of)) or most[-1]
    monkeypatch.setattr(call_plan, "most_additions", count)
    with simulator.shuffled(0) as additions:
        gradients(name, 64, "hopper", torch.bfloat16, True)
    exact = [(flat.data_ptr(), *x) for flat, *x in additions if flat.dtype == torch.int64]
    assert exact
    for pointer in {x[0] for x in exact}:
        at = torch.cat([x[1] for x in exact if x[0] == pointer])
        assert at.bincount().max() <= most[0]


def test_memory_is_limited(monkeypatch):
    """By the least that does not fit. The sums of all distances count, next to the tensor's."""
    q = torch.randn(1, H, 16, 64).bfloat16().requires_grad_()

    def attempt(size: int, score=lambda t: lambda s, b, h, i, j: s + t[i]) -> None:
        call_plan.clear()
        t = torch.zeros(size, requires_grad=True)
        out = hw.attention(q, q, q, score(t), backend="hopper", deterministic=True)
        assert torch.autograd.grad(out.sum(), t)[0].isfinite().all()

    sums = LIMIT // (8 * 17) // 8 * 8
    need = (sums + 8) * 8 * 17
    with pytest.raises(BackendRefused, match=f"{need:,} bytes or more, and may take {LIMIT:,}"):
        attempt(sums + 1)
    monkeypatch.setattr(exact_sums, "LIMIT", 64 * 8 * 17)
    attempt(64)
    with pytest.raises(BackendRefused, match="bytes or more"):
        attempt(65)
    by_distance = lambda t: lambda s, b, h, i, j: s + t[i - j + 16]
    with pytest.raises(BackendRefused, match=f"{(40 + 256) * 8 * 17:,} bytes or more"):
        attempt(33, by_distance)


def test_empty_and_unread_tensors():
    q = torch.randn(1, H, 16, 64).bfloat16().requires_grad_()
    none, unread, read = (torch.zeros(n, requires_grad=True) for n in (0, 3, 3))
    score = lambda s, b, h, i, j: s + read[j % 3] + 0 * unread.sum()
    for length in (16, 0):
        x = q[:, :, :length]
        out = hw.attention(x, q, q, score, backend="hopper", deterministic=True)
        grads = torch.autograd.grad(out.sum(), (read, unread))
        assert all(g.isfinite().all() for g in grads)
    never = hw.causal(-100)  # no pair reads the empty one
    out = hw.attention(
        q, q, q, lambda s, b, h, i, j: s + none[j], never, backend="hopper", deterministic=True
    )
    assert torch.autograd.grad(out.sum(), none)[0].shape == (0,)
