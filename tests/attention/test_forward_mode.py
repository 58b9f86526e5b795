"""`torch.func.jvp` and its kin through calls and modules, eager and compiled; what is refused."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import headway as hw
from headway.backends import hopper, triton
from headway.compat import flex
from headway.compat.torch_sdpa import scaled_dot_product_attention
from headway.errors import ArgumentError, BackendRefused
from headway.nn import MLA, Attention

N, D, CAP = 20, 8, 3.0
F64 = torch.float64
I = torch.arange(N)


def tensors(count: int, *shape: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(count)
    return tuple(torch.randn(shape, generator=draw, dtype=F64) for _ in range(count))


Q, K, V, DQ, DK, DV = tensors(6, 1, 2, N, D)
TABLE, DTABLE = tensors(2, 2, 2 * N)
LEAF = TABLE.clone().requires_grad_()  # compiled programs want scores that are made outside


def score_of(table: Tensor) -> Callable:
    return lambda s, b, h, i, j: CAP * torch.tanh((s + table[h, i - j + N]) / CAP)


LEARNED = score_of(LEAF)
# Inductor calls PyTorch for every operator, where it can: its C++ takes seconds to compile.
PLAIN = {"fallback_by_default": True} if hasattr(inductor, "fallback_by_default") else {}


def ours(q, k, v, table):
    return hw.attention(q, k, v, LEARNED if table is LEAF else score_of(table), hw.causal())


def dense_lse(q, k, v, table):
    s = q @ k.mT / math.sqrt(D) + table[:, I[:, None] - I + N]
    s = (CAP * torch.tanh(s / CAP)).masked_fill(I[:, None] < I, -math.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def dense(q, k, v, table):
    return dense_lse(q, k, v, table)[0]


def with_lse(call: Callable) -> Callable:
    """The call's out and lse."""
    if call is dense:
        return dense_lse
    return lambda q, k, v, table: hw.attention_with_stats(
        q, k, v, LEARNED if table is LEAF else score_of(table), hw.causal()
    )[:2]


# -- what works: each of the same call, by Headway and by dense formulas ----------------------------
# `run` compiles the function that it is given, or returns it.


def jvp(f, run, table):
    step = run(
        lambda q, k, v, a, b, c: torch.func.jvp(partial(f, table=table), (q, k, v), (a, b, c))
    )
    return step(Q, K, V, DQ, DK, DV)


def jvp_of_one(f, run, table):
    return run(lambda q, a: torch.func.jvp(lambda q: f(q, K, V, table), (q,), (a,)))(Q, DQ)


def statistics(f, run, table):
    made, moved = run(
        lambda q, a: torch.func.jvp(lambda q: with_lse(f)(q, K, V, table), (q,), (a,))
    )(Q, DQ)
    return *made, *moved


def dual_level(f, run, table):
    def step(q, a):
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(q, a), K, V, table)))

    return run(step)(Q, DQ)


def loss(f, q, a, w, table, stop=True):
    """A step of MeanFlow: the gradient is that of the primal, the tangent a constant."""
    u, moved = torch.func.jvp(lambda z: torch.tanh(f(z @ w, z, V, table)) @ w, (q,), (a,))
    return (u - (moved.detach() if stop else moved)).square().sum()


def meanflow(f, run, table, stop=True):
    w, table = torch.eye(D, dtype=F64).requires_grad_(), table if table is LEAF else table.clone()
    run(lambda q, a, w: loss(f, q, a, w, table.requires_grad_(), stop))(Q, DQ, w).backward()
    grads = w.grad, table.grad
    table.grad = None
    return grads


def detached_outside(f, run, table, stop=True):
    """The tangent is a result of the program, which a compiler differentiates."""
    w = torch.eye(D, dtype=F64).requires_grad_()
    step = run(lambda q, a, w: torch.func.jvp(lambda z: f(z @ w, z, V, table), (q,), (a,)))
    u, moved = step(Q, DQ, w)
    (u - (moved.detach() if stop else moved)).square().sum().backward()
    table.grad = None
    return (w.grad,)


def nothing_moves(f, run, table):
    """An attention of the network whose inputs have no tangent is trained all the same."""
    k = K.clone().requires_grad_()
    step = run(lambda k, q, a: torch.func.jvp(lambda z: z * f(Q, k, V, table), (q,), (a,)))
    u, moved = step(k, Q, DQ)
    (u - moved.detach()).square().sum().backward()
    table.grad = None
    return u, moved, k.grad


def without_gradients(f, run, table):
    def step(q, a):
        with torch.no_grad():
            return torch.func.jvp(lambda q: f(q, K, V, table), (q,), (a,))

    return run(step)(Q.clone().requires_grad_(), DQ)


def vmap_of_jvp(f, run, table):
    step = lambda a: torch.func.jvp(lambda q: f(q, K, V, table), (Q,), (a,))
    return run(torch.vmap(step))(torch.stack([DQ, DK]))


def jvp_of_vmap(f, run, table):
    batch = torch.vmap(lambda q: with_lse(f)(q, K, V, table))
    made, moved = run(lambda q, a: torch.func.jvp(batch, (q,), (a,)))(
        torch.stack([Q, K]), torch.stack([DQ, DK])
    )
    return *made, *moved


def linearize(f, run, table):
    out, linear = torch.func.linearize(lambda q: f(q, K, V, table), Q)
    return out, linear(DQ)


def jacfwd(f, run, table):
    call = lambda t: f(Q, K, V, t.repeat(1, N)).sum((0, 2))
    return (torch.func.jacfwd(call)(table[:, :2].detach()),)


def grad_of_loss(f, run, table):
    w = torch.eye(D, dtype=F64)
    return (torch.func.grad(lambda w: loss(f, Q, DQ, w, table))(w),)


def vmap_of_grad_of_loss(f, run, table):
    w = torch.stack([torch.eye(D, dtype=F64), 2 * torch.eye(D, dtype=F64)])
    return (torch.vmap(torch.func.grad(lambda w: loss(f, Q, DQ, w, table)))(w),)


def in_a_checkpoint(f, run, table):
    w = torch.eye(D, dtype=F64).requires_grad_()
    block = lambda z, a: torch.func.jvp(lambda z: f(z @ w, z, V, table), (z,), (a,))
    u, moved = checkpoint(block, Q, DQ, use_reentrant=False)
    (u - moved.detach()).square().sum().backward()
    return u, moved, w.grad


def backward_after_dual_level(f, run, table):
    q = Q.clone().requires_grad_()
    with forward_ad.dual_level():
        u, moved = forward_ad.unpack_dual(f(forward_ad.make_dual(q, DQ), K, V, table))
    (u - moved.detach()).square().sum().backward()
    return u, moved, q.grad


COMPILED = [
    jvp, jvp_of_one, statistics, dual_level, meanflow, detached_outside, nothing_moves,
    without_gradients, vmap_of_jvp,
]  # fmt: skip
EAGER = [
    *COMPILED, jvp_of_vmap, linearize, jacfwd, grad_of_loss, vmap_of_grad_of_loss, in_a_checkpoint,
    backward_after_dual_level,
]  # fmt: skip
as_it_is = lambda function: function


@pytest.mark.parametrize("way", EAGER, ids=lambda way: way.__name__)
def test_eager(way):
    for got, right in zip(way(ours, as_it_is, TABLE), way(dense, as_it_is, TABLE), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", COMPILED, ids=lambda way: way.__name__)
def test_compiled(way):
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    for got, right in zip(way(ours, compiled, LEAF), way(dense, as_it_is, LEAF), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-12)


@pytest.mark.long
def test_compiled_by_inductor_at_any_length():
    torch._dynamo.reset()
    net = lambda z, w: torch.tanh(hw.attention(z @ w, z, z, hw.softcap(2.0), hw.causal())) @ w

    def step(z, a, w):
        u, moved = torch.func.jvp(lambda z: net(z, w), (z,), (a,))
        return (u - moved.detach()).square().sum()

    compiled = torch.compile(step, dynamic=True, fullgraph=True, options=PLAIN)
    for length in (12, 17):
        z, a = tensors(2, 1, 2, length, D)
        grads = []
        for call in (compiled, step):
            w = torch.eye(D, dtype=F64).requires_grad_()
            call(z, a, w).backward()
            grads.append(w.grad)
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


def test_pairs():
    """Explicit tangents are those of `jvp`, eager and compiled."""
    made, moved = torch.func.jvp(dense_lse, (Q, K, V, TABLE), (DQ, DK, DV, DTABLE))
    tangents = {"q": DQ, "k": DK, "v": DV, TABLE: DTABLE}
    got = hw.attention_jvp_with_stats(Q, K, V, score_of(TABLE), hw.causal(), tangents=tangents)
    right = hw.AttentionJVP(*made, got.max_logit, *moved)
    for ours_, expected in zip(got, right, strict=True):
        torch.testing.assert_close(ours_, expected)
    torch.testing.assert_close(
        got.max_logit, hw.attention_with_stats(Q, K, V, score_of(TABLE), hw.causal()).max_logit
    )
    score = score_of(TABLE)

    @partial(torch.compile, backend="aot_eager", fullgraph=True)
    def step(q, a):
        return hw.attention_jvp(q, K, V, score, hw.causal(), tangents={"q": a, TABLE: DTABLE})

    q = Q.clone().requires_grad_()
    out, tangent = step(q, DQ)
    right = torch.func.jvp(lambda q, t: dense(q, K, V, t), (Q, TABLE), (DQ, DTABLE))
    torch.testing.assert_close((out, tangent), right)
    (out * tangent.detach()).sum().backward()
    leaf = Q.clone().requires_grad_()
    (dense(leaf, K, V, TABLE) * right[1]).sum().backward()
    torch.testing.assert_close(q.grad, leaf.grad)
    with pytest.raises(BackendRefused, match="has no gradient"):
        hw.attention_jvp(q, K, V, tangents={"q": DQ})[1].sum().backward()


def test_parts_merge():
    """A call over half of the keys, and one over the rest, under one jvp."""
    halves = [lambda b, h, i, j: j < 7, lambda b, h, i, j: j >= 7]

    def merged(q, k):
        parts = [hw.attention_with_stats(q, k, V, LEARNED, hw.causal() & half) for half in halves]
        return hw.merge(*[(part.out, part.lse) for part in parts])

    made = torch.func.jvp(merged, (Q, K), (DQ, DK))
    right = torch.func.jvp(lambda q, k: dense_lse(q, k, V, LEAF), (Q, K), (DQ, DK))
    torch.testing.assert_close(made, right)


def modules() -> dict[str, tuple[Callable, Tensor, Tensor]]:
    x, a = tensors(2, 2, N, 32)
    attention = Attention(32, 4, 2, qk_norm=True, sink=True).double()
    mla = MLA(32, 2, kv_lora_rank=8, nope_width=8, rope_width=4, value_width=8).double()
    bias = lambda s, b, h, i, j: s + TABLE[h, i - j + N]
    return {
        "nn.Attention": (lambda x: attention(x, mask=hw.causal()), x, a),
        "nn.MLA": (lambda x: mla(x, mask=hw.causal()), x, a),
        "torch_sdpa": (lambda q: scaled_dot_product_attention(q, K, V, is_causal=True), Q, DQ),
        "flex": (lambda q: flex.flex_attention(q, K, V, score_mod=bias), Q, DQ),
        "sigmoid": (lambda q: hw.sigmoid_attention(q, K, V, mask=hw.causal(), bias=-2.0), Q, DQ),
    }


@pytest.mark.parametrize("name", modules())
def test_modules(name):
    """By finite differences, in training mode too; gradients of the primal come along."""
    f, x, a = modules()[name]
    out, tangent = torch.func.jvp(f, (x,), (a,))
    near = (f(x + 1e-6 * a) - f(x - 1e-6 * a)) / 2e-6
    torch.testing.assert_close(out, f(x))
    torch.testing.assert_close(tangent, near, rtol=1e-6, atol=1e-7)


def test_autocast():
    q, k, v, a = (x.float() for x in (Q, K, V, DQ))
    f = lambda q: hw.attention(q, k, v, mask=hw.causal())
    with torch.autocast("cpu", torch.bfloat16):
        out, tangent = torch.func.jvp(f, (q,), (a,))
        pair = hw.attention_jvp(q, k, v, mask=hw.causal(), tangents={"q": a})
    assert out.dtype == tangent.dtype == torch.bfloat16
    torch.testing.assert_close(pair, (out, tangent))
    right = torch.func.jvp(f, (q,), (a,))[1]
    torch.testing.assert_close(tangent.float(), right, rtol=0.05, atol=0.05)


def test_a_compiled_module_in_training_mode():
    """It records the largest logits beneath the transform, with no graph break."""
    module, x, a = Attention(8, 2, qk_norm=True), torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    step = lambda x, a: torch.func.jvp(lambda x: module(x, hw.causal()), (x,), (a,))
    right = step(x, a)
    recorded = module.max_logit.value.clone()
    module.max_logit.reset()
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(step, backend="aot_eager", fullgraph=True)(x, a), right
    )
    torch.testing.assert_close(module.max_logit.value, recorded)


def test_dropout_drops_the_same_pairs():
    f = lambda q, seed: hw.attention(q, K, V, dropout=0.4, seed=seed)
    tangent = torch.func.jvp(lambda q: f(q, 3), (Q,), (DQ,))[1]
    near = (f(Q + 1e-6 * DQ, 3) - f(Q - 1e-6 * DQ, 3)) / 2e-6
    torch.testing.assert_close(tangent, near, rtol=1e-6, atol=1e-7)
    torch.manual_seed(0)
    out, tangent = torch.func.jvp(lambda q: f(q, None), (Q,), (DQ,))  # one draw for both
    assert ((out == 0) == (tangent == 0)).all()


def test_no_more_is_saved_than_by_a_plain_call():
    def saved(call: Callable) -> list[tuple]:
        sizes = []
        q = Q.clone().requires_grad_()
        pack = lambda t: sizes.append((t.shape, t.dtype)) or t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call(q)
        return sorted(sizes, key=str)

    f = lambda q: hw.attention_with_stats(q, K, V, LEARNED, hw.causal()).out
    with forward_ad.dual_level():
        moving = saved(lambda q: f(forward_ad.make_dual(q, DQ)))
    assert moving == saved(f)
    assert saved(lambda q: hw.attention_jvp(q, K, V, LEARNED, tangents={"q": DQ})) == saved(f)


def test_products_of_what_does_not_move_are_not_counted():
    from torch.utils.flop_counter import FlopCounterMode

    pairs = 2 * 2 * N * N * D
    for names, products in (("q k v", 6), ("q k", 5), ("q", 4), ("v", 4)):
        tangents = dict.fromkeys(names.split(), DQ)
        with FlopCounterMode(display=False) as counter:
            hw.attention_jvp(Q, K, V, tangents=tangents)
        assert counter.get_total_flops() == products * pairs


def test_a_score_that_detaches_and_a_mask_do_not_move():
    detached = lambda s, b, h, i, j: s + TABLE.detach()[h, i - j + N]
    number, moved = torch.tensor(4.0, dtype=F64), torch.tensor(1.0, dtype=F64)
    masked = lambda b, h, i, j: j < number
    for call in (
        lambda t: hw.attention(Q, K, V, lambda s, b, h, i, j: s + t.detach()),
        lambda t: hw.attention(Q, K, V, mask=lambda b, h, i, j: j < t),
    ):
        assert (torch.func.jvp(call, (number,), (moved,))[1] == 0).all()
    _, tangent = hw.attention_jvp(Q, K, V, None, masked, tangents={number: moved})
    assert (tangent == 0).all()
    _, tangent = hw.attention_jvp(Q, K, V, detached, tangents={})
    assert (tangent == 0).all()


# -- what is refused, by name -----------------------------------------------------------------------


def jvp_of_jvp(run):
    inner = lambda q, a: torch.func.jvp(lambda q: ours(q, K, V, LEAF), (q,), (a,))[1]
    run(lambda q, a: torch.func.jvp(lambda q: inner(q, a), (q,), (a,)))(Q, DQ)


def jvp_of_grad(run):
    grad = torch.func.grad(lambda q: ours(q, K, V, LEAF).sum())
    run(lambda q, a: torch.func.jvp(grad, (q,), (a,)))(Q, DQ)


def hessian(run):
    run(torch.func.hessian(lambda x: ours(x * Q, K, V, LEAF).square().sum()))(
        torch.ones(1).double()
    )


def hessian_of_sum(run):
    """No gradient of a result has a tangent."""
    run(torch.func.hessian(lambda q: ours(q, K, V, LEAF).sum()))(Q)


def hessian_of_batch(run):
    each = torch.func.hessian(lambda q: hw.attention_with_stats(q, K, V).lse.sum())
    run(torch.vmap(each))(torch.stack([Q, 2 * Q]))


def pairs_of_duals(run):
    call = lambda q, a: hw.attention_jvp(q, K, V, tangents={"q": a})
    run(lambda q, a: torch.func.jvp(lambda q: call(q, a), (q,), (a,)))(Q, DQ)


def loss_of_tangent(run):
    meanflow(ours, run, LEAF, stop=False)


def loss_outside(run):
    detached_outside(ours, run, LEAF, stop=False)


def grad_of_jvp(run):
    tangent = lambda q, a: torch.func.jvp(lambda q: ours(q, K, V, LEAF), (q,), (a,))[1].sum()
    with torch.no_grad():  # a compiler differentiates the gradient by LEAF as well
        run(torch.func.grad(tangent))(Q, DQ)


REFUSED = {
    jvp_of_jvp: "second derivative", jvp_of_grad: "second derivative", hessian: "second derivative",
    hessian_of_sum: "second derivative", hessian_of_batch: "second derivative",
    pairs_of_duals: "second derivative", loss_of_tangent: "has no gradient",
    loss_outside: "has no gradient", grad_of_jvp: "has no gradient",
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", REFUSED, ids=lambda way: way.__name__)
def test_refused(way, compiled):
    torch._dynamo.reset()
    run = partial(torch.compile, backend="aot_eager", fullgraph=True) if compiled else as_it_is
    with pytest.raises(Exception if compiled else BackendRefused, match=REFUSED[way]):
        way(run)
    LEAF.grad = None


def test_the_forward_mode_of_autograd_functional_is_refused():
    """It makes batches of tangents by a vmap older than `torch.func`'s."""
    functional = torch.autograd.functional
    call = lambda q: ours(q, K, V, LEAF).sum()
    with pytest.raises(BackendRefused, match=r"torch\.func\.jacfwd"):
        functional.jacobian(call, Q, strategy="forward-mode", vectorize=True)
    with pytest.raises(BackendRefused, match="no second derivative"):
        functional.hessian(call, Q, vectorize=True, outer_jacobian_strategy="forward-mode")


def test_a_vmap_that_a_compiled_program_hides_is_refused():
    torch._dynamo.reset()
    with pytest.raises(Exception, match="does not see tangents below"):
        jvp_of_vmap(ours, partial(torch.compile, backend="aot_eager", fullgraph=True), LEAF)


def test_a_dual_level_around_a_compiled_program_is_refused():
    """PyTorch loses the tangents of its results."""
    torch._dynamo.reset()
    call = torch.compile(lambda q: ours(q, K, V, LEAF), backend="aot_eager", fullgraph=True)
    with forward_ad.dual_level(), pytest.raises(Exception, match="a dual_level around"):
        call(forward_ad.make_dual(Q, DQ))


def test_a_backward_in_forward_mode_is_refused():
    q = Q.clone().requires_grad_()
    with forward_ad.dual_level(), pytest.raises(BackendRefused, match="leave the dual_level"):
        ours(forward_ad.make_dual(q, DQ), K, V, TABLE).sum().backward()


def test_inference_is_refused():
    lengths = torch.full((1,), N, dtype=torch.int32)
    call = lambda q: hw.inference.attention(q, K, V, lengths=lengths)
    with pytest.raises(BackendRefused, match="inference has no derivative in forward mode"):
        torch.func.jvp(call, (Q,), (DQ,))


def test_a_backward_of_your_own_is_refused():
    out, lse, _ = hw.attention_with_stats(Q, K, V)
    call = lambda q: hw.attention_backward(q, K, V, out, lse, out).dq
    with pytest.raises(BackendRefused, match="attention_backward has no derivative in forward"):
        torch.func.jvp(call, (Q,), (DQ,))


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 4)] * 2, layout=torch.jagged)
    nested = nested.transpose(1, 2)
    with pytest.raises(ArgumentError, match="nested"):
        hw.attention_jvp(nested, nested, nested, tangents={})


def test_gpu_backends_refuse_before_they_run(monkeypatch):
    for backend in (triton, hopper):
        monkeypatch.setattr(backend, "unavailable", lambda *device: "")
    q = torch.zeros(1, 1, 3, 64, dtype=torch.bfloat16)
    with pytest.raises(BackendRefused, match="for which it has no kernel: use backend='triton'"):
        hw.attention_jvp(q, q, q, tangents={"q": q}, backend="hopper")
    for d, dv in ((200, 64), (64, 200)):
        q, v = q.new_zeros(1, 1, 3, d), q.new_zeros(1, 1, 3, dv)
        with pytest.raises(BackendRefused, match=f"d = {d}, dv = {dv}: .* up to 192; split"):
            hw.attention_jvp(q, q, v, tangents={"q": q}, backend="triton")


def test_tangents_that_fit_no_input():
    ids = torch.zeros(N, dtype=torch.int64)
    score = lambda s, b, h, i, j: s + ids[i]
    call = partial(hw.attention_jvp, Q, K, V, score)
    for tangents, words in (
        ([DQ], "must be a dict"),
        ({"x": DQ}, "'x', which the call does not read"),
        ({"sink": DQ}, "'sink', which the call does not read"),
        ({TABLE: DTABLE}, r"a tensor of shape \(2, 40\), which the call does not read"),
        ({"q": None}, "of type NoneType"),
        ({"q": DQ[:, :1]}, r"the tangent of q is \(1, 1, 20, 8\)"),
        ({"k": DK.float()}, "the tangent of k is .* torch.float32"),
        ({"v": DV.to("meta")}, "the tangent of v is .* on meta"),
        ({ids: ids}, "integers have no tangent"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call(tangents=tangents)
    with pytest.raises(ArgumentError, match="layout"):
        call(tangents={}, layout=None)
