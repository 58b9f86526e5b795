"""PyTorch's own finite differences: through out and lse, in everything that can be learned."""

import pytest
import torch
from torch.autograd import gradcheck

import headway as hw

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def qkv():
    return leaf(2, 4, 3, 2), leaf(2, 2, 5, 2), leaf(2, 2, 5, 3)


@BACKENDS
def test_plain(qkv, backend):
    assert gradcheck(lambda *x: hw.attention(*x, backend=backend), qkv)


@BACKENDS
def test_lse_and_sink(qkv, backend):
    def call(q, k, v, sink):
        made = hw.attention_with_stats(q, k, v, None, hw.causal(), sink=sink, backend=backend)
        return made.out, made.lse

    assert gradcheck(call, (*qkv, leaf(4)))


@BACKENDS
@pytest.mark.parametrize("shape", [(), (5,), (3, 1), (4, 1, 1), (2, 4, 3, 5)], ids=str)
def test_learned_bias(qkv, backend, shape):
    def call(q, k, v, tensor):
        made = hw.attention_with_stats(
            q, k, v, hw.bias(tensor) >> hw.softcap(2.0), hw.causal(1), backend=backend
        )
        return made.out, made.lse

    assert gradcheck(call, (*qkv, leaf(*shape)), fast_mode=shape != (4, 1, 1))


@BACKENDS
def test_score_function_with_dropout(qkv, backend):
    def call(q, k, v, table, scale, slopes):
        score = lambda s, b, h, i, j: (
            torch.sigmoid(scale) * s
            - slopes[h] * (i - j).abs()
            + table[h, (i + 2 * j) % 3] * table[b, i % 2]
        )
        made = hw.attention_with_stats(
            q, k, v, score, hw.sliding_window(4), dropout=0.3, seed=11, scale=0.7, backend=backend
        )  # fmt: skip
        return made.out, made.lse

    assert gradcheck(call, (*qkv, leaf(4, 3), leaf(), leaf(4)))


@BACKENDS
def test_padding_with_rows_that_see_nothing(qkv, backend):
    lengths = torch.tensor([0, 4])

    def call(q, k, v):
        made = hw.attention_with_stats(q, k, v, None, hw.padding(lengths), backend=backend)
        return made.out, made.lse[1]

    assert gradcheck(call, qkv)


@BACKENDS
def test_a_part_of_the_gradients_may_be_asked_for(qkv, backend):
    """Whatever of the inputs requires grad: the rest gets none, and nothing else changes."""
    q, k, v = qkv
    table = leaf(4, 3)
    score = lambda s, b, h, i, j: s + table[h, (i + j) % 3]
    out = hw.attention(q, k, v, score, backend=backend)
    sent = torch.randn_like(out)
    whole = torch.autograd.grad(out, (q, k, v, table), sent)
    for n, x in enumerate((q, k, v, table)):
        for y in (q, k, v, table):
            y.requires_grad_(y is x)
        out = hw.attention(q, k, v, score, backend=backend)
        (alone,) = torch.autograd.grad(out, x, sent)
        assert torch.equal(alone, whole[n])
        x.requires_grad_(True)


@BACKENDS
def test_lse_alone(qkv, backend):
    """A loss of lse only, and one of out only: either gradient may be missing."""
    q, k, v = qkv
    made = hw.attention_with_stats(q, k, v, backend=backend)
    sent = torch.randn_like(made.out), torch.randn_like(made.lse)
    both = torch.autograd.grad(made[:2], qkv, sent, retain_graph=True)
    of_out = torch.autograd.grad(made.out, qkv, sent[0], retain_graph=True)
    of_lse = torch.autograd.grad(made.lse, qkv, sent[1], retain_graph=True, allow_unused=True)
    assert (of_lse[2] == 0).all()
    for one, other, sum_ in zip(of_out, of_lse, both, strict=True):
        torch.testing.assert_close(one + other, sum_, rtol=1e-12, atol=1e-12)


def test_statistics_carry_no_gradient(qkv):
    made = hw.attention_with_stats(*qkv)
    assert not made.max_logit.requires_grad
    assert made.lse.requires_grad


def test_a_second_derivative_is_refused_not_left_out(qkv):
    q, k, v = qkv
    loss = hw.attention(q, k, v).sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative"):
        (loss + dq.square().sum()).backward()
