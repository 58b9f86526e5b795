"""Random masks, scores and shapes, from a grammar of what people write."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import headway as hw
import oracle

# -- masks: a library value or a function, and the same as a formula ------------------------------

numbers = st.integers(0, 9)


def _atoms() -> st.SearchStrategy:
    same = lambda make: st.builds(lambda n: (make(n), make(n)), numbers)
    return st.one_of(
        st.builds(lambda n: (hw.causal(n - 4), lambda b, h, i, j: j <= i + n - 4), numbers),
        st.builds(
            lambda n: (hw.sliding_window(n + 1), lambda b, h, i, j: (i - j).abs() <= n), numbers
        ),
        st.builds(lambda n: (hw.prefix(n), lambda b, h, i, j: j < n), numbers),
        st.builds(
            lambda n: (hw.global_tokens(n), lambda b, h, i, j: (i < n) | (j < n)), numbers
        ),
        same(lambda n: lambda b, h, i, j: (i + j) % (n + 1) == 0),
        same(lambda n: lambda b, h, i, j: i // (n + 1) >= j // (n + 1)),
        same(lambda n: lambda b, h, i, j: (h + n) % 2 == (i + b) % 2),
        same(lambda n: lambda b, h, i, j: torch.where(h == n % 3, i > j, j * 2 > i)),
    )  # fmt: skip


def _combined(parts: st.SearchStrategy) -> st.SearchStrategy:
    def both(a, b):
        return _as_mask(a[0]) & b[0], lambda *at: a[1](*at) & b[1](*at)

    def either(a, b):
        return _as_mask(a[0]) | b[0], lambda *at: a[1](*at) | b[1](*at)

    def neither(a):
        return ~_as_mask(a[0]), lambda *at: ~a[1](*at)

    return st.one_of(
        st.builds(both, parts, parts), st.builds(either, parts, parts), st.builds(neither, parts)
    )


def _as_mask(fn) -> hw.Mask:
    return fn if isinstance(fn, hw.Mask) else hw.prefix(0) | fn


masks = st.recursive(_atoms(), _combined, max_leaves=4)

# -- scores: a chain of steps, each with captured tensors of its own ------------------------------

STEPS = {
    "scale": lambda t, n: lambda s, b, h, i, j: s * (0.5 + t[n % 4]),
    "table": lambda t, n: lambda s, b, h, i, j: s + t[(i * n + j) % 4],
    "outer": lambda t, n: lambda s, b, h, i, j: s + t[(h + n) % 4] * t[(i - j) % 4],
    "tanh": lambda t, n: lambda s, b, h, i, j: (n + 1) * torch.tanh(s / (n + 1)),
    "where": lambda t, n: lambda s, b, h, i, j: torch.where((i + n) % 3 == j % 3, s, t[b % 4] - s),
    "slope": lambda t, n: lambda s, b, h, i, j: s - torch.exp(t[h % 4]) * (i - j).abs() / 20,
    "in place": lambda t, n: lambda s, b, h, i, j: s.mul_(t[j % 4]).add_(0.1 * n),
    "square": lambda t, n: lambda s, b, h, i, j: 0.1 * s * s + s,
}
# Only as the last step: what would -inf * 0.5 be the derivative of?
HOLE = {"hole": lambda t, n: lambda s, b, h, i, j: torch.where((i - j) % 7 == n, -math.inf, s)}
steps = st.builds(
    lambda first, last: first + last,
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), numbers), max_size=3),
    st.lists(st.tuples(st.just("hole"), numbers), max_size=1),
)


def _chain(makes: list, tensors: list):
    functions = [(STEPS | HOLE)[name](t, n) for (name, n), t in zip(makes, tensors, strict=True)]

    def score(s, b, h, i, j):
        for function in functions:
            s = function(s, b, h, i, j)
        return s

    return score


# -- shapes ---------------------------------------------------------------------------------------


shapes = st.fixed_dictionaries(
    {
        "b": st.integers(1, 2),
        "hk": st.integers(1, 3),
        "group": st.integers(1, 3),
        "q_len": st.integers(1, 40) | st.sampled_from([64, 65, 257, 300]),
        "kv_len": st.integers(1, 40) | st.sampled_from([63, 128, 256, 290]),
        "d": st.integers(1, 20),
        "dv": st.integers(1, 20),
    }
)


calls = given(
    shape=shapes,
    mask=st.none() | masks,
    chain=steps,
    sink=st.booleans(),
    p=st.sampled_from([0.0, 0.0, 0.4]),
    scale=st.sampled_from([None, 0.0, -0.3, 1.7]),
    entropy=st.booleans(),
)


@settings(max_examples=20)
@calls
def test_any_mask_and_score(**call):
    check(**call)


@pytest.mark.long
@settings(max_examples=200)
@calls
def test_many_masks_and_scores(**call):
    check(**call)


def check(shape, mask, chain, sink, p, scale, entropy):
    b, hk, group, q_len, kv_len, d, dv = shape.values()
    if mask and type(mask[0]) is hw.causal:  # a bare one masks something out
        assume(mask[0].offset <= 0 or mask[0].offset < kv_len - 1)
    hq = hk * group
    leaf = lambda *size: torch.randn(*size, dtype=torch.float64, requires_grad=True)
    q, k, v = leaf(b, hq, q_len, d), leaf(b, hk, kv_len, d), leaf(b, hk, kv_len, dv)
    tensors = [leaf(4) for _ in chain]
    leaves = [q, k, v, *tensors] + ([leaf(hq)] if sink else [])
    at = oracle.grid(b, hq, q_len, kv_len)
    right = oracle.attention(
        q, k, v, _chain(chain, tensors) if chain else None, mask and mask[1], scale=scale,
        sink=leaves[-1] if sink else None, keep=oracle.keep(p, 7, *at) if p else None, dropout=p,
        entropy=entropy,
    )  # fmt: skip
    rows = (torch.randn(b, hq, q_len).double() for _ in range(1 + entropy))
    sent = [torch.randn(b, hq, q_len, dv).double(), *rows]
    differentiable = lambda made: (made.out, made.lse, *[made.entropy] * entropy)
    expected = _grads(differentiable(right), leaves, sent)
    for backend in ("reference", "cpu"):
        made = hw.attention_with_stats(
            q, k, v, _chain(chain, tensors) if chain else None, mask and mask[0], scale=scale,
            sink=leaves[-1] if sink else None, dropout=p, seed=7, backend=backend,
            entropy=entropy,
        )  # fmt: skip
        values = (*differentiable(made), made.max_logit)
        for got, exact in zip(values, (*differentiable(right), right.max_logit), strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)
        for got, exact in zip(_grads(differentiable(made), leaves, sent), expected, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)


def _grads(outputs, leaves, sent) -> list[torch.Tensor]:
    pairs = [(x, grad) for x, grad in zip(outputs, sent, strict=True) if x.requires_grad]
    outputs, sent = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, leaves, sent, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
