"""What a transform of `torch.func` wraps in an input or in a captured tensor counts, however the
same function was called before."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import headway as hw
from headway import autograd, call_cache
from headway.compat import flex
from headway.errors import ArgumentError, BackendRefused
from headway.mods import lowering

N, D = 7, 8
Q, K, V = (torch.randn(1, 2, N, D, generator=torch.Generator().manual_seed(7)) for _ in range(3))
Q, K, V = Q.double(), K.double() + 0.5, V.double() * 0.5

SCORES = {
    "number": lambda t: lambda s, b, h, i, j: s * t,
    "many": lambda t: (
        lambda s, b, h, i, j: (
            torch.where(s > t, s * t.detach() * t, t.exp()) + torch.broadcast_tensors(s, t)[1] * i
        )
    ),
    "table": lambda t: lambda s, b, h, i, j: s * t[h] + t[i - i],
    "views of a table": lambda t: (
        lambda s, b, h, i, j: s * t.detach()[h] * t.view(1, 2)[0, h] + (t * t).sum() * t.exp()[h]
    ),
}


def table_of(name: str) -> Tensor:
    return torch.tensor([0.3, 0.8] if name.endswith("table") else 0.3, dtype=torch.float64)


def loss(t: Tensor, name: str, q: Tensor = Q) -> Tensor:
    return hw.attention(q, K, V, SCORES[name](t), hw.causal()).sin().sum()


def dense(t: Tensor, name: str, q: Tensor = Q) -> Tensor:
    """By definition: the function on tensors of positions, then a softmax."""
    h, i, j = torch.arange(2)[:, None, None], torch.arange(N)[:, None], torch.arange(N)
    score = SCORES[name](t)(q @ K.mT / math.sqrt(D), torch.zeros(()).long(), h, i, j)
    return (score.masked_fill(j > i, -math.inf).softmax(-1) @ V).sin().sum()


BEFORE = {
    "nothing": lambda t, name: None,
    "a plain call": loss,
    "training": lambda t, name: loss(t.clone().requires_grad_(), name),
}
REVERSE = {
    "grad": lambda f, t: torch.func.grad(f)(t),
    "vmap of grad": lambda f, t: torch.vmap(torch.func.grad(f))(torch.stack([t, 2 * t])),
    "grad of vmap": lambda f, t: torch.func.grad(
        lambda t: torch.vmap(f)(torch.stack([t, 2 * t])).sum()
    )(t),
    "grad of a leaf": lambda f, t: torch.func.grad(f)(t.clone().requires_grad_()).detach(),
}


def by_hand(f, t):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(t, torch.ones_like(t)))))


FORWARD = {
    "jvp": lambda f, t: torch.func.jvp(f, (t,), (torch.ones_like(t),)),
    "jvp of grad": lambda f, t: torch.func.jvp(torch.func.grad(f), (t,), (torch.ones_like(t),)),
    "jvp of vmap": lambda f, t: torch.func.jvp(
        lambda t: torch.vmap(f)(torch.stack([t, t])), (t,), (torch.ones_like(t),)
    ),
    "make_dual": by_hand,
}


def forget() -> None:
    lowering._lowered.clear()
    call_cache._signatures.clear()


# What was called before matters for what is looked up; one score shows it.
STATES = [
    (name, before) for name in SCORES for before in BEFORE if before < "o" or name == "number"
]


@pytest.mark.parametrize(("name", "before"), STATES)
def test_gradients_of_captured_tensors(name, before):
    for way in REVERSE.values():
        t = table_of(name)
        forget()
        BEFORE[before](t, name)
        ours = way(lambda t: loss(t, name), t)
        torch.testing.assert_close(ours, way(lambda t: dense(t, name), t))


@pytest.mark.parametrize(("name", "before"), STATES)
def test_tangents_of_captured_tensors(name, before):
    for way, call in FORWARD.items():
        t = table_of(name)
        forget()
        BEFORE[before](t, name)
        if way == "jvp of grad":
            with pytest.raises(BackendRefused, match="second derivative"):
                call(lambda t: loss(t, name), t)
            continue
        ours = call(lambda t: loss(t, name), t)
        torch.testing.assert_close(ours, call(lambda t: dense(t, name), t))


def test_grad_of_vmap_of_an_input():
    """Inside `vmap`, a tensor that learns says that it requires no grad."""
    q, t = torch.stack([Q, Q * 2]), table_of("number")
    each = lambda f: lambda q, t: torch.vmap(lambda q: f(t, "number", q))(q).sum()
    ours = torch.func.grad(each(loss), (0, 1))(q, t)
    for one, right in zip(ours, torch.func.grad(each(dense), (0, 1))(q, t), strict=True):
        torch.testing.assert_close(one, right)


def test_the_value_of_a_wrapped_number():
    """It is read as PyTorch reads it, and what is beside it still learns."""
    t = table_of("number")

    def ours(t, read):
        score = lambda s, *_: s * read(t) * t if t.dim() == 0 and t.dtype == Q.dtype else s
        return hw.attention(Q, K, V, score).sin().sum()

    def right(t, read):
        score = Q @ K.mT / math.sqrt(D) * read(t) * t
        return (score.softmax(-1) @ V).sin().sum()

    for read in (float, Tensor.tolist):
        torch.testing.assert_close(torch.func.grad(ours)(t, read), torch.func.grad(right)(t, read))


def test_masks_with_wrapped_numbers():
    q, k, v = Q.float(), K.float(), V.float()
    near = lambda w: hw.attention(q, k, v, mask=lambda b, h, i, j: (i - j).abs() < w)
    widths = torch.tensor([1, 3, 9])
    torch.testing.assert_close(torch.vmap(near)(widths), torch.stack([near(w) for w in widths]))


@pytest.mark.parametrize("name", ["number", "table", "q"])
def test_inference_refuses_gradients_and_tangents(name):
    lengths = torch.tensor([N], dtype=torch.int32)

    def f(t):
        if name == "q":
            return hw.inference.attention(t, K, V, mask=hw.causal(), lengths=lengths).sum()
        return hw.inference.attention(Q, K, V, SCORES[name](t), lengths=lengths).sum()

    t = Q[:, :, -2:] if name == "q" else table_of(name)
    for refused, ways in (((BackendRefused, ArgumentError), FORWARD), (ArgumentError, REVERSE)):
        for way in ways.values():
            forget()
            for _ in range(2):
                with pytest.raises(refused, match=r"no derivative in forward|has no gradient"):
                    way(f, t)
                f(t)


@pytest.mark.parametrize("make", [hw.block_mask, flex.create_block_mask])
def test_block_masks_that_are_built_inside(make):
    """What a transform wraps has no memory to read, also where it does not depend on an input."""

    def inside(q, number):
        ids = torch.arange(N) // 3 + 0 * number.detach().long()

        def mask(b, h, i, j):
            return ids[i] == ids[j]

        built = make(mask, 1, 1, N, N, device="cpu")
        if make is hw.block_mask:
            assert "cpu" in str(hw.explain(q, K, V, None, mask))
            return hw.attention(q, K, V, None, built)
        return flex.flex_attention(q, K, V, block_mask=built)

    number = torch.zeros(())
    right = hw.attention(Q, K, V, None, hw.document(torch.arange(N) // 3))
    for out in (
        inside(Q, number), torch.func.jvp(inside, (Q, number), (Q, number))[0],
        torch.func.vjp(inside, Q, number)[0], torch.vmap(inside, (0, None))(Q[None], number)[0],
    ):  # fmt: skip
        torch.testing.assert_close(out, right)
    with pytest.raises(ArgumentError, match="vmap maps over"):
        torch.vmap(inside, (None, 0))(Q, number[None])


# Functions of x that return the value of `f(x)`, computed inside of a transform.
VALUES = {
    "grad": lambda f: lambda x: torch.func.grad_and_value(f)(x)[1],
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[0],
    "vmap": lambda f: lambda x: torch.vmap(f)(torch.stack([x, 2 * x])).sum(),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[0],
    "functionalize": torch.func.functionalize,
}


@pytest.mark.parametrize("inner", VALUES)
@pytest.mark.parametrize("outer", VALUES)
def test_parameters_at_an_outer_level(outer, inner):
    """Every level of transforms has its own graph of gradients: none may drop that of another."""
    weight = torch.eye(D, dtype=torch.float64).requires_grad_()
    table = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)

    def gradients(f):
        nested = VALUES[outer](VALUES[inner](lambda x: f(table, "table", x @ weight)))
        return torch.autograd.grad(nested(Q), [weight, table])

    try:
        right = gradients(dense)
    except RuntimeError:  # PyTorch's own limit
        assert (outer, inner) == ("functionalize", "functionalize")
        return
    twice = outer == "jvp" and inner in ("jvp", "grad")
    if twice or {outer, inner} == {"functionalize", "jvp"}:
        refused = "second derivative" if twice else "Functionalize rule"
        with pytest.raises(RuntimeError, match=refused):
            gradients(loss)
        return
    for a, b in zip(gradients(loss), right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("outer", ["grad", "vmap of grad", "grad of vmap", "backward"])
def test_no_second_derivative_at_any_level(outer):
    table = table_of("table").requires_grad_(outer == "backward")
    inner = lambda t: torch.func.grad(lambda q: loss(t, "table", q))(Q).sum()
    with pytest.raises(BackendRefused, match="no second derivative"):
        torch.autograd.grad(inner(table), table) if outer == "backward" else REVERSE[outer](
            inner, table
        )


def test_a_traced_step_runs_on_parameters():
    """`make_fx` writes the backward's operator down; it then meets tensors that require grad."""

    def step(q, t):
        return torch.autograd.grad(loss(t, "table", q), [q, t])

    inputs = Q.clone().requires_grad_(), table_of("table").requires_grad_()
    traced = make_fx(step)(*inputs)
    others = (2 * Q).requires_grad_(), (2 * table_of("table")).requires_grad_()
    for a, b in zip(traced(*others), step(*others), strict=True):
        torch.testing.assert_close(a, b)
        with pytest.raises(BackendRefused, match="no second derivative"):
            a.sum().backward()
    with pytest.raises(ArgumentError, match="is symbolic outside of"):
        make_fx(loss_of_many, tracing_mode="symbolic")(Q, table_of("table"))


def loss_of_many(q: Tensor, t: Tensor) -> Tensor:
    return hw.attention(q, q, q, SCORES["table"](t), hw.causal()).sum()


def test_a_batch_of_none():
    for in_dims, q, t in (
        ((0, None), Q[None][:0], table_of("table")),
        ((None, 0), Q, torch.zeros(0, 2)),
    ):
        value = torch.vmap(lambda q, t: loss(t, "table", q), in_dims)(q, t.double())
        grads = torch.vmap(torch.func.grad(lambda q, t: loss(t, "table", q), (0, 1)), in_dims)(
            q, t.double()
        )
        assert [x.shape for x in (value, *grads)] == [(0,), (0, *Q.shape), (0, 2)]


def test_operators_take_none_for_an_empty_list():
    """AOTInductor calls them so."""
    spec = hw.resolve.prepare(Q, K, V)[0]
    none = [None] * 4
    for learns in (False, True):
        q = Q.clone().requires_grad_(learns)
        for run in (autograd._forward_under_autograd, autograd._forward_operator):
            with torch.set_grad_enabled(run is autograd._forward_under_autograd):
                out = run(spec.text, q, K, V, None, None, *none, [0] * 4, None, None)[0]
            torch.testing.assert_close(out, hw.attention(Q, K, V))
            assert out.requires_grad == (learns and run is autograd._forward_under_autograd)


def test_block_masks_under_fake_tensors_are_refused():
    with FakeTensorMode(), pytest.raises(ArgumentError, match="pass the mask itself"):
        hw.block_mask(hw.causal(), None, None, N, N)
