"""Dropout drops the pairs that the counters say: everywhere, in both directions, for good."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch._functorch.config as functorch_config

import headway as hw
import oracle
from headway import dropout
from headway.backends import reference
from headway.errors import ArgumentError
from headway.resolve import prepare
from headway.types import Coords

SEED = 0x0123456789ABCDEF

# Known answers of Random123's own test file: counter, key, the four words.
KNOWN = {
    7: [
        ("00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ("ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ],
    10: [
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
}  # fmt: skip


def _words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize("rounds", [7, 10])
def test_philox_known_answers(rounds, monkeypatch):
    monkeypatch.setattr(dropout, "ROUNDS", rounds)
    for counter, key, answer in KNOWN[rounds]:
        words = dropout.philox(_words(counter), _words(key))
        assert words == _words(answer)
        numbers = [[int(x) for x in _words(text)] for text in (counter, key)]
        again = oracle.philox4x32(*numbers, rounds)
        assert [int(x) for x in again] == [int(x) for x in words]


def _keep(p: float, seed: int, b=(0, 1), h=(0, 1), i=(0, 1), j=(0, 1)) -> torch.Tensor:
    """Which pairs stay, in ranges of b, h, i, j."""
    at = [torch.arange(*r).view([-1 if n == d else 1 for d in range(4)])
          for n, r in enumerate((b, h, i, j))]  # fmt: skip
    return dropout.keep(p, torch.tensor(seed), *at)


GOLDEN = [  # of batch 1, heads 2 and 3, queries 5 to 8, keys 0 to 15: "#" stays
    "##..####.##.#..#",
    "##.#..#####..##.",
    "..#.##.###...#.#",
    "......##.##..##.",
    "#..####...##..#.",
    "#.........######",
    "#.#..###..###.##",
    "..##.##.#...##..",
]


def test_layout_is_pinned():
    """These bits may never change: checkpoints, shards and other backends rely on them."""
    bits = _keep(0.5, SEED, b=(1, 2), h=(2, 4), i=(5, 9), j=(0, 16))
    rows = ["".join(".#"[int(x)] for x in row) for row in bits.flatten(0, 2)]
    assert rows == GOLDEN


@pytest.mark.parametrize("seed", [0, 1, SEED, 2**32, 2**62 + 12345, 2**63 - 1])
@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.999, 1.0])
def test_keep_is_the_papers(p, seed):
    ranges = {"b": (3, 5), "h": (7, 9), "i": (250, 261), "j": (1021, 1050)}
    at = [torch.arange(*r).view([-1 if n == d else 1 for d in range(4)])
          for n, r in enumerate(ranges.values())]  # fmt: skip
    assert torch.equal(_keep(p, seed, **ranges), oracle.keep(p, seed, *at))


def test_keep_with_positions_per_batch():
    at = oracle.grid(2, 3, 5, 9)
    j = torch.stack([torch.randperm(500)[:9] for _ in range(2)])[:, None, None]
    assert torch.equal(
        dropout.keep(0.3, torch.tensor(SEED), *at[:3], j), oracle.keep(0.3, SEED, *at[:3], j)
    )


@pytest.mark.parametrize("p", [2.0**-15, 0.01, 0.1, 0.5, 0.9, 1 - 2.0**-15])
def test_frequency(p):
    kept = _keep(p, SEED, b=(0, 2), h=(0, 4), i=(0, 256), j=(0, 256)).double()
    n = kept.numel()
    p = dropout.threshold(p) / 2**15
    spread = math.sqrt(p * (1 - p) / n)
    assert abs(kept.mean().item() - (1 - p)) < 5 * spread
    # No two heads, batches, rows, columns or seeds drop alike: nor pairs of one Philox call.
    others = [kept.roll(1, dim) for dim in range(4)]
    others += [kept.roll(by, (-2, -1)) for by in ((8, 0), (0, 8), (8, 8), (8, 1), (1, 8), (0, 16))]
    others.append(_keep(p, SEED + 1, b=(0, 2), h=(0, 4), i=(0, 256), j=(0, 256)).double())
    others.append(_keep(p, SEED + 2**32, b=(0, 2), h=(0, 4), i=(0, 256), j=(0, 256)).double())
    for other in others:
        correlation = ((kept - (1 - p)) * (other - (1 - p))).mean().item() / (p * (1 - p))
        assert abs(correlation) < 5 / math.sqrt(n)


def test_the_eight_pairs_of_a_call_are_independent():
    """Each of 256 patterns is as frequent as any other, and so are the numbers dropped of rows and
    of columns what their binomial distributions say."""
    kept = _keep(0.5, SEED, h=(0, 8), i=(0, 256), j=(0, 256))[0].long()
    eight = kept.view(8, 16, 2, 8, 16, 2, 4, 2).permute(0, 1, 3, 4, 6, 2, 5, 7).reshape(-1, 8)
    counts = (eight << torch.arange(8)).sum(1).bincount(minlength=256).double()
    mean = len(eight) / 256
    assert (((counts - mean) ** 2).sum() / mean - 255) < 5 * math.sqrt(2 * 255)
    kept = _keep(0.1, SEED, h=(0, 8), i=(0, 512), j=(0, 512))[0].double()
    for dim in (1, 2):
        dropped = 512 - kept.sum(dim)
        p = dropout.threshold(0.1) / 2**15
        assert abs(dropped.var().item() / (512 * p * (1 - p)) - 1) < 5 * math.sqrt(2 / 4096)


@pytest.mark.parametrize(
    ("p", "units"),
    [(0.0, 0), (1e-300, 1), (1e-9, 1), (2.0**-15, 1), (0.1, 3277), (0.5, 2**14),
     (1 - 1e-9, 2**15 - 1), (1.0, 2**15)],
)  # fmt: skip
def test_rates_are_multiples_of_2_to_the_minus_15(p, units):
    """Only 0 drops nothing, and only 1 everything; what is kept is scaled by the rate in force."""
    assert dropout.threshold(p) == units
    assert dropout.kept_factor(p) == (2**15 / (2**15 - units) if p < 1 else 0.0)
    v = torch.ones(1, 1, 64, 8, dtype=torch.float64)
    out = hw.attention(torch.zeros_like(v), torch.zeros_like(v), v, dropout=p, seed=SEED)
    kept = _keep(p, SEED, i=(0, 64), j=(0, 64))
    right = kept.double().mean(-1)[..., None] * dropout.kept_factor(p)
    torch.testing.assert_close(out, right.expand_as(out), rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("length", [16, 65, 300])
def test_both_directions_drop_the_same_pairs(backend, length):
    """With equal logits, out is the dropout of 1/length seen through v, and dv through dout."""
    p, b, h = 0.4, 2, 3
    q, k = (torch.zeros(b, h, length, 8, dtype=torch.float64) for _ in range(2))
    one = torch.eye(length, dtype=torch.float64).expand(b, h, length, length)
    v = one.clone().requires_grad_()
    out = hw.attention(q, k, v, dropout=p, seed=SEED, backend=backend)
    (dv,) = torch.autograd.grad(out, v, one)
    kept = oracle.keep(p, SEED, *oracle.grid(b, h, length, length))
    torch.testing.assert_close(
        out, oracle.factor(kept, p, torch.float64) / length, rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        dv.mT, oracle.factor(kept, p, torch.float64) / length, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_backends_and_lengths_agree(backend):
    """A pair is dropped or not whatever else is computed: here, 200 more queries and keys."""
    q, k, v = (torch.randn(1, 2, 300, 8, dtype=torch.float64) for _ in range(3))
    corner = lambda b, h, i, j: (j < 100) & (i == i)
    whole = hw.attention(q, k, v, None, corner, dropout=0.3, seed=3, backend=backend)
    part = hw.attention(q[:, :, :100], k[:, :, :100], v[:, :, :100], dropout=0.3, seed=3)
    torch.testing.assert_close(whole[:, :, :100], part, rtol=1e-12, atol=1e-12)


@pytest.fixture
def tensors():
    return [torch.randn(2, 4, 33, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_seed_may_be_a_tensor(tensors):
    one = hw.attention(*tensors, dropout=0.5, seed=SEED)
    other = hw.attention(*tensors, dropout=0.5, seed=torch.tensor(SEED))
    assert torch.equal(one, other)
    assert not torch.equal(one, hw.attention(*tensors, dropout=0.5, seed=SEED + 1))


@pytest.mark.parametrize(
    "rate",
    [
        math.nan, math.inf, -1e-9, 1 + 1e-9, True, False, np.True_, "0.1", None, 0.1j, [0.1],
        torch.tensor(0.1), torch.tensor([0.1, 0.2]), torch.tensor(0.1, device="meta"),
        np.array([0.1, 0.2]), torch.nn.Dropout(0.1),
    ],
)  # fmt: skip
def test_what_is_no_rate_is_refused(tensors, rate):
    with pytest.raises(ArgumentError, match=r"dropout=.* must be a probability, from 0 to 1"):
        hw.attention(*tensors, dropout=rate, seed=SEED)


@pytest.mark.parametrize("kind", [int, np.float32, np.float64, Fraction])
def test_a_rate_may_be_any_real_number(tensors, kind):
    for rate in (0, 1, *(() if kind is int else (0.25,))):
        one = hw.attention(*tensors, dropout=kind(rate), seed=SEED)
        assert one.equal(hw.attention(*tensors, dropout=float(rate), seed=np.int64(SEED)))


@pytest.mark.parametrize(
    "seed",
    [
        2**63, -(2**63) - 1, 3.0, True, "3", torch.Generator(), [3], torch.tensor([3]),
        *(torch.tensor(3, dtype=t) for t in (torch.int32, torch.uint64, torch.float64, torch.bool)),
    ],
)  # fmt: skip
def test_what_is_no_seed_is_refused(tensors, seed):
    with pytest.raises(ArgumentError, match=r"seed.* must be an? .*integer or a 0-d int64 tensor"):
        hw.attention(*tensors, dropout=0.5, seed=seed)


def test_without_a_seed_pytorchs_generator_draws_one(tensors):
    torch.manual_seed(5)
    first, second = (hw.attention(*tensors, dropout=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(first, hw.attention(*tensors, dropout=0.5))


def _compiled(budget, fullgraph=True):
    """out and dv of a compiled call without a seed under a budget of memory for activations."""
    q, k, v = torch.randn(2, 3, 40, 16).sin(), torch.randn(2, 3, 40, 16), torch.randn(2, 3, 40, 16)
    torch._dynamo.reset()
    with functorch_config.patch(activation_memory_budget=budget):
        call = torch.compile(
            lambda v: hw.attention(q, k, v.sin(), dropout=0.3),
            backend="aot_eager_decomp_partition", fullgraph=fullgraph,
        )  # fmt: skip
        out = call(v.requires_grad_())
        dout = torch.randn_like(out)
        out.backward(dout)
    return out, dout, v


@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_a_drawn_seed_is_not_drawn_again_in_the_backward(budget):
    """out is linear in v.sin(), so <dout, out> = <d(v.sin()), v.sin()>, whatever was dropped."""
    out, dout, v = _compiled(budget, fullgraph=budget > 0)
    torch.testing.assert_close(
        (v.grad / v.cos() * v.sin()).sum(), (dout * out).sum(), rtol=1e-3, atol=1e-3
    )


def test_a_budget_of_nothing_is_refused_where_it_would_draw_again():
    with pytest.raises(Exception, match=r"activation_memory_budget is 0, with which.* pass seed="):
        _compiled(0.0)
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if region is None:  # before PyTorch 2.13
        return
    x = torch.randn(1, 1, 20, 8, requires_grad=True)

    def call(x):
        with region(0.0):
            return hw.attention(x, x, x.sin(), dropout=0.3)

    with pytest.raises(Exception, match=r"region_activation_memory_budget is 0, .* pass seed="):
        torch.compile(call, backend="aot_eager_decomp_partition", fullgraph=True)(x)


def test_without_dropout_nothing_is_drawn(tensors):
    before = torch.get_rng_state()
    plain = hw.attention(*tensors)
    assert torch.equal(plain, hw.attention(*tensors, dropout=0.0, seed=3))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_everything_dropped(tensors, backend):
    """out is 0, and so is every gradient through it; lse still is what it was."""
    out, lse, _ = hw.attention_with_stats(*tensors, dropout=1.0, seed=1, backend=backend)
    assert (out == 0).all()
    for grad in torch.autograd.grad(out.sum(), tensors, retain_graph=True):
        assert (grad == 0).all()
    plain = hw.attention_with_stats(*tensors, backend=backend).lse
    torch.testing.assert_close(lse, plain, rtol=1e-13, atol=1e-13)
    for got, right in zip(
        torch.autograd.grad(lse.sum(), tensors[:2]),
        torch.autograd.grad(plain.sum(), tensors[:2]),
        strict=True,
    ):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-13)


def test_on_average_nothing_is_lost(tensors):
    """Over many seeds the mean is attention without dropout: the rest is scaled by 1 / (1 - p)."""
    q, k, v = (x.detach() for x in tensors)
    outs = torch.stack([hw.attention(q, k, v, dropout=0.3, seed=n) for n in range(200)])
    plain = hw.attention(q, k, v)
    error = (outs.mean(0) - plain) / (outs.std(0) / math.sqrt(len(outs)))
    assert error.abs().max() < 6
    assert error.pow(2).mean().sqrt() < 1.2


def test_large_positions():
    """Counters are 32 bits of the position, whatever the offset of the shard."""
    q, k, v = (torch.randn(1, 1, 4, 4, dtype=torch.float64) for _ in range(3))
    far = Coords(b=2**20, h=2**10, q=2**31 - 2, kv=2**31 + 5)
    spec, call = prepare(q, k, v, dropout=0.5, seed=SEED, backend="reference", keys=far)
    out = reference.forward(spec, call).out
    at = [torch.arange(4) + start for start in (far.q, far.kv)]
    kept = oracle.keep(
        0.5, SEED, torch.tensor(far.b), torch.tensor(far.h), at[0][:, None], at[1][None]
    )
    right = oracle.attention(q, k, v, keep=kept, dropout=0.5).out
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)
