"""The entropy and the sink's mass of every query, against the dense definition."""

import math

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.distributed import Layout
from headway.errors import ArgumentError
from headway.row_statistics import measure
from headway.types import Request

from .test_expect import HK, HQ, MASKS, SCORES, B, D, M, dense_scores, learned

ASKED = {"entropy": True, "sink_mass": True}
V = torch.randn(B, HK, M, 5, dtype=torch.float64)


def dense(q, k, score, mask, sink) -> dict[str, Tensor]:
    """Return both by their definitions, with PyTorch's autograd."""
    t, kept, _ = dense_scores(q, k, score, mask)
    t = t.masked_fill(~kept, -math.inf)
    if sink is not None:
        t = torch.cat([t, sink[None, :, None, None].expand(*t.shape[:3], 1)], -1)
    seen = (t != -math.inf).any(-1, keepdim=True)
    t = torch.where(seen, t, 0.0)
    p = torch.where(seen & (t != -math.inf), t.softmax(-1), 0.0)
    log_p = torch.where(p == 0, 0.0, t.log_softmax(-1))
    return {"entropy": -(p * log_p).sum(-1), "sink_mass": p[..., 0 if sink is None else -1]}


def assert_same(made, right: dict[str, Tensor], of: dict[str, Tensor], **tolerance):
    for name, expected in right.items():
        ours = getattr(made, name)
        torch.testing.assert_close(ours, expected.to(ours.dtype), **tolerance)
        sent = torch.randn_like(expected)
        for key, x in of.items():
            grads = [
                torch.autograd.grad((y * sent).sum(), x, allow_unused=True, retain_graph=True)[0]
                for y in (ours, expected)
            ]
            ours_x, theirs_x = (torch.zeros_like(x) if g is None else g for g in grads)
            message = lambda text, name=name, key=key: f"{name} by {key}: {text}"
            torch.testing.assert_close(ours_x, theirs_x, msg=message, **tolerance)


@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_definition(score, mask, with_sink):
    for backend in ("cpu", "reference"):
        of = learned()
        s, sink = SCORES[score](of), of["sink"] if with_sink else None
        made = hw.attention_with_stats(
            of["q"], of["k"], V, s, MASKS[mask], sink=sink, backend=backend, **ASKED
        )
        right = dense(of["q"], of["k"], s, MASKS[mask], sink)
        assert_same(made, right, of, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
def test_gradcheck(with_sink):
    of = learned()

    def both(q, k, sink):
        result = hw.attention_with_stats(
            q, k, V[:1, :1, :4], hw.softcap(2.0), lambda b, h, i, j: (i != 1) & (j <= i),
            sink=sink if with_sink else None, dropout=0.3, seed=1, **ASKED,
        )  # fmt: skip
        return result.out, result.entropy, result.sink_mass

    q, k = of["q"][:1, :2, :4], of["k"][:1, :1, :4]
    assert torch.autograd.gradcheck(both, (q, k, of["sink"][:2]))


def test_explain_says_what_is_a_pass_of_its_own():
    of = learned()
    explained = lambda **options: hw.explain(of["q"], of["k"], V, **options).passes
    assert explained() == []
    assert explained(sink=of["sink"], **ASKED) == [
        "entropy: in the forward", "sink_mass: of the sink and lse, no pass",
    ]  # fmt: skip
    composed = measure.passes(Request(of["q"], of["k"], V), ASKED, trained=True)
    assert composed == [
        "entropy: in the forward",
        "sink_mass: a pass of its own, one forward with values of one column; its gradient a "
        "backward",
    ]
    with pytest.raises(ArgumentError, match="entropy='yes' must be True or False"):
        explained(entropy="yes")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sink_mass_is_not_rounded_to_16_bits(dtype):
    q, k = torch.randn(2, 4, 40, 32).to(dtype), torch.randn(2, 2, 50, 32).to(dtype)
    made = hw.attention_with_stats(q, k, k, mask=hw.causal(), sink_mass=True).sink_mass
    assert made.dtype == torch.float32
    right = hw.attention_weights(q.double(), k.double(), mask=hw.causal())[..., 0]
    torch.testing.assert_close(made.double(), right, rtol=1e-5, atol=1e-7)


def test_result_unpacks_into_three_and_has_none_of_what_nobody_asked_for():
    of = learned()
    result = hw.attention_with_stats(of["q"], of["k"], V, entropy=True)
    out, lse, max_logit = result
    assert type(result) is hw.AttentionOutput
    assert out is result.out
    assert lse is result.lse
    assert max_logit is result.max_logit
    assert result.entropy.shape == lse.shape
    assert result.sink_mass is None
    assert hw.attention_with_stats(of["q"], of["k"], V).entropy is None


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e9])
def test_scores_that_are_all_large(offset):
    q, k = torch.randn(1, 2, 6, D), torch.randn(1, 2, 9, D)
    score = lambda s, b, h, i, j: s + offset
    t = (q @ k.mT / D**0.5 + offset).double()
    entropy = -(t.softmax(-1) * t.log_softmax(-1)).sum(-1)
    made = hw.attention_with_stats(q, k, k, score, **ASKED)
    torch.testing.assert_close(made.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.sink_mass.double(), t.softmax(-1)[..., 0], rtol=1e-5, atol=1e-5)


def test_sinks_that_take_nothing_and_scores_whose_squares_overflow():
    q, k = torch.randn(1, 2, 6, D, requires_grad=True), torch.randn(1, 2, 9, D)
    sink = torch.full((2,), -math.inf, requires_grad=True)
    made = hw.attention_with_stats(q, k, k, sink=sink, **ASKED)
    plain = hw.attention_with_stats(q, k, k, **ASKED)
    torch.testing.assert_close(made.entropy, plain.entropy)
    assert not made.sink_mass.any()
    ours, of_sink = torch.autograd.grad(made.entropy.sum(), (q, sink))
    torch.testing.assert_close(ours, torch.autograd.grad(plain.entropy.sum(), q)[0])
    assert not of_sink.any()
    large = hw.attention_with_stats(q, k, k, lambda s, b, h, i, j: s * 1e30, **ASKED)
    assert not large.entropy.any()
    assert not torch.autograd.grad(large.entropy.sum(), q)[0].any()


@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("spread", [30.0, 1e4])
def test_logits_far_apart(spread, with_sink):
    q, k = (torch.randint(-8, 9, (1, 2, n, 16)) / 8 for n in (70, 300))  # exact logits
    sink = torch.tensor([0.5, 1.0]) * spread if with_sink else None
    made = hw.attention_with_stats(
        q, k, k, mask=hw.causal(100), scale=spread / 4, sink=sink, entropy=True
    )
    right = dense(
        q.double() * spread, k.double(), None, lambda b, h, i, j: j <= i + 100,
        None if sink is None else sink.double(),
    )["entropy"]  # fmt: skip
    torch.testing.assert_close(made.entropy.double(), right, rtol=0, atol=1e-5)


def test_forward_mode_and_its_gradient():
    of = learned()
    names = ["q", "k", "sink"]
    x = [of[name].detach() for name in names]
    along = [torch.randn_like(t) for t in x]
    causal = lambda b, h, i, j: j <= i

    def ours(q, k, sink, backend="cpu"):
        return hw.attention_with_stats(
            q, k, V, hw.softcap(2.0), causal, sink=sink, backend=backend, entropy=True
        ).entropy

    softcap = lambda s, b, h, i, j: 2 * torch.tanh(s / 2)
    right = lambda q, k, sink: dense(q, k, softcap, causal, sink)["entropy"]
    made = torch.func.jvp(right, tuple(x), tuple(along))
    for backend in ("cpu", "reference"):
        by = lambda *x, backend=backend: ours(*x, backend=backend)
        torch.testing.assert_close(torch.func.jvp(by, tuple(x), tuple(along)), made)
        some = lambda q, by=by: by(q, *x[1:])
        both = torch.stack([along[0], -2 * along[0]])
        ours_of = lambda t, some=some: torch.func.jvp(some, (x[0],), (t,))[1]
        right_of = lambda t: torch.func.jvp(lambda q: right(q, *x[1:]), (x[0],), (t,))[1]
        torch.testing.assert_close(torch.vmap(ours_of)(both), torch.vmap(right_of)(both))
    primal = lambda q: torch.func.jvp(lambda q: ours(q, *x[1:]), (q,), (along[0],))[0].sum()
    plain = lambda q: right(q, *x[1:]).sum()
    torch.testing.assert_close(torch.func.grad(primal)(x[0]), torch.func.grad(plain)(x[0]))


def test_half_precision_and_certainty():
    q, k = (torch.randn(2, 4, n, 32).bfloat16() for n in (70, 90))
    k = k[:, :2]
    made = hw.attention_with_stats(q, k, k, mask=hw.causal(), **ASKED)
    right = dense(q.double(), k.double(), None, lambda b, h, i, j: j <= i, None)
    for name, x in right.items():
        torch.testing.assert_close(getattr(made, name).double(), x, rtol=1e-5, atol=1e-5)
    one = hw.attention_with_stats(100 * q, k, k, mask=lambda b, h, i, j: j == 3, **ASKED)
    assert not one.entropy.any()
    assert not one.sink_mass.any()


def test_packed_and_nested_are_each_sequence_alone():
    lengths, kv_lengths = [3, 0, 5, 4], [4, 0, 1, 6]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (lengths, kv_lengths))
    q = torch.randn(sum(lengths), HQ, D, dtype=torch.float64, requires_grad=True)
    k = torch.randn(sum(kv_lengths), HK, D, dtype=torch.float64, requires_grad=True)
    score = lambda s, b, h, i, j: s * (b + 1) + 0.1 * j
    packed = hw.varlen_attention_with_stats(
        q, k, k, score, hw.causal(), cu_q=cu_q, cu_k=cu_k, max_q=5, max_k=6, **ASKED
    )
    parts: dict[str, list[Tensor]] = {"entropy": [], "sink_mass": []}
    for n, (x, y) in enumerate(zip(q.split(lengths), k.split(kv_lengths), strict=True)):
        alone = dense(
            x.transpose(0, 1)[None], y.transpose(0, 1)[None],
            lambda s, b, h, i, j, n=n: s * (n + 1) + 0.1 * j, lambda b, h, i, j: j <= i, None,
        ) if len(y) else {name: q.new_zeros(1, HQ, len(x)) for name in parts}  # fmt: skip
        for name, value in alone.items():
            parts[name].append(value[0])
    right = {name: torch.cat(values, -1) for name, values in parts.items()}
    assert_same(packed, right, {"q": q, "k": k}, rtol=1e-9, atol=1e-9)
    nested = lambda x, cu: torch.nested.nested_tensor_from_jagged(x, cu.long()).transpose(1, 2)
    nk = nested(k, cu_k)
    jagged = hw.attention_with_stats(nested(q, cu_q), nk, nk, score, hw.causal(), **ASKED)
    for name, x in right.items():
        torch.testing.assert_close(getattr(jagged, name).values(), x, rtol=1e-9, atol=1e-9)


def test_compiled_and_transformed():
    q, k = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 6, 8)
    sink = torch.randn(2)

    def call(x):
        result = hw.attention_with_stats(x, k, k, mask=hw.causal(), sink=sink, **ASKED)
        return result.entropy + result.sink_mass

    right = call(q)
    (right_grad,) = torch.autograd.grad(right.sum(), q)
    made = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    torch.testing.assert_close(made, right)
    torch.testing.assert_close(torch.autograd.grad(made.sum(), q)[0], right_grad)
    whole = torch.compile(hw.attention_with_stats, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(q, k, k, entropy=True).entropy, hw.attention_with_stats(
        q, k, k, entropy=True).entropy)  # fmt: skip
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(q), right_grad)
    batch = torch.vmap(call)(torch.stack([q, 2 * q]))
    torch.testing.assert_close(batch[1], call(2 * q))


@pytest.mark.parametrize("name", ASKED)
def test_refused(name):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ArgumentError, match=f"{name}=True does not go with layout="):
        hw.attention_with_stats(q, q, q, layout=Layout.contiguous(8, (0, 2)), **{name: True})
    with pytest.raises(ArgumentError, match=f"{name}='yes' must be True or False"):
        hw.attention_with_stats(q, q, q, **{name: "yes"})
