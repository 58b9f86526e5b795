"""Friends of torch.compile: export, selective checkpointing, second derivatives."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import headway as hw
from headway import autograd


def qkv(**kwargs):
    return [torch.randn(2, 4, 33, 8, **kwargs) for _ in range(3)]


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """How often the operators of the pair run."""

    def __init__(self):
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forward += func is torch.ops.headway.forward.default
        self.backward += func is torch.ops.headway.backward.default
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_runs_attention_once():
    q, k, v = qkv(requires_grad=True)
    block = lambda q: hw.attention(q.sin(), k, v, mask=hw.causal()).cos()
    block(q).sum().backward()
    expected, q.grad = q.grad, None
    context = functools.partial(create_selective_checkpoint_contexts, hw.save_ops())
    for options, forwards in (({"context_fn": context}, 1), ({}, 2)):
        with Counter() as counter:
            checkpoint(block, q, use_reentrant=False, **options).sum().backward()
        assert (counter.forward, counter.backward) == (forwards, 1)
        torch.testing.assert_close(q.grad, expected)
        q.grad = None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(4, 65))

    def forward(self, q, k, v):
        return hw.attention(q, k, v, hw.relative_bias(self.table), hw.causal())


def test_export_with_a_dynamic_length_runs_and_trains():
    model = Model()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, tuple(qkv()), dynamic_shapes=({2: length},) * 3)
    exported = program.module()
    x = torch.randn(2, 4, 50, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x, x, x).square().sum(), [x, model.table])
    out = exported(x, x, x)
    torch.testing.assert_close(out, model(x, x, x))
    grads = torch.autograd.grad(out.square().sum(), [x, *exported.parameters()])
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("heads", [4, 2], ids=["as many keys", "shared keys"])
def test_a_second_derivative_of_a_plain_call_is_refused(heads):
    """There PyTorch's operator does the work, which would refuse with fewer words."""
    q, k, v = qkv(requires_grad=True)
    k, v = k[:, :heads], v[:, :heads]
    grads = torch.autograd.grad(hw.attention(q, k, v).sum(), (q, k, v), create_graph=True)
    for grad in grads:
        with pytest.raises(NotImplementedError, match=r"second derivative.*scaled_dot_product"):
            torch.autograd.grad(grad.square().sum(), q, retain_graph=True)


def test_a_second_derivative_is_refused_not_dropped():
    q, k, v = qkv(requires_grad=True)
    table = torch.randn(4, 65, requires_grad=True)
    out = hw.attention(q, k, v, hw.relative_bias(table))
    grads = torch.autograd.grad(out.sum(), (q, k, v, table), create_graph=True)
    plain = torch.autograd.grad(
        hw.attention(q, k, v, hw.relative_bias(table)).sum(), (q, k, v, table)
    )
    for a, b in zip(grads, plain, strict=True):
        torch.testing.assert_close(a, b)
        with pytest.raises(NotImplementedError, match=r"second derivative.*scaled_dot_product"):
            torch.autograd.grad(a.square().sum(), q, retain_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):  # a gradient penalty
        (out.sum() + grads[0].square().sum()).backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_second_derivative_in_a_compiled_program_is_refused(backend):
    """Where Dynamo traces `torch.autograd.grad`, which it does not by default."""
    q, k, v = qkv(requires_grad=True)

    def penalty(create_graph, method=False):
        out = hw.attention(q, k, v, hw.softcap(5.0), hw.causal())
        if method:
            out.sum().backward(create_graph=create_graph)
            return out.sum() + q.grad.square().sum()
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=create_graph)
        return grad.square().sum() + (out.sum() if create_graph else 0)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(penalty, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(False), penalty(False))
        for method in (False, True):
            with pytest.raises(NotImplementedError, match=r"second derivative.*create_graph=True"):
                compiled(True, method)
            torch.compiler.reset()


def test_a_mask_may_be_seen_first_below_a_transform():
    """Tracing it is no part of what is transformed."""
    q, k, v = qkv()
    mask = hw.causal() & hw.sliding_window(7) & hw.prefix(5)
    found = torch.func.grad(lambda q: hw.attention(q, k, v, mask=mask).square().sum())(q)
    leaf = q.clone().requires_grad_()
    expected = torch.autograd.grad(hw.attention(leaf, k, v, mask=mask).square().sum(), leaf)[0]
    torch.testing.assert_close(found, expected)


TABLE = torch.randn(4, 65)


def statistics(q, k, v, table, sink):
    results = hw.attention_with_stats(q, k, v, hw.softcap(3.0), hw.causal(), entropy=True)
    return results.out.square().sum() + (results.lse + results.entropy).sin().sum()


LOSSES = {
    "plain": lambda q, k, v, *_: hw.attention(q, k, v),
    "a captured table": lambda q, k, v, table, _: hw.attention(
        q, k, v, lambda s, b, h, i, j: s * table[h, 64] + table[h, i - j + 32], hw.causal()
    ),
    "a sink and dropout": lambda q, k, v, table, sink: hw.attention(
        q, q, v, sink=sink, dropout=0.3, seed=5
    ),
    "statistics": statistics,
    "a jvp": lambda q, k, v, *_: torch.func.jvp(
        lambda q: hw.attention(q, k, v, hw.softcap(3.0)), (q,), (q,)
    )[0],
}


def gradients_of(name):
    loss = lambda *inputs: LOSSES[name](*inputs).square().sum()
    grads = torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))
    torch._dynamo.reset()
    return grads, torch.compile(grads, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("name", LOSSES)
def test_compiled_gradients_of_torch_func(name):
    """Inside of what is compiled they are those of outside. (Dynamo drops what an autograd function
    says of gradients below transforms.)"""
    grads, compiled = gradients_of(name)
    inputs = *qkv(), TABLE, torch.randn(4)
    torch.testing.assert_close(compiled(*inputs), grads(*inputs))


def test_compiled_gradients_of_torch_func_refuse_to_be_differentiated():
    grads, compiled = gradients_of("a captured table")
    learned = *qkv(requires_grad=True), TABLE, torch.randn(4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*learned), grads(*learned))
    for run in (grads, compiled):
        with pytest.raises(Exception, match="second derivative"):
            torch.autograd.grad(run(*learned)[0].sum(), learned[0])


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_gradients_of_torch_func_in_an_exported_program_are_refused(strict):
    class Model(torch.nn.Module):
        def forward(self, q):
            return torch.func.grad(lambda q: hw.attention(q, q, q).square().sum())(q)

    with pytest.raises(Exception, match="would be lost"):
        torch.export.export(Model(), (qkv()[0],), strict=strict)


def test_compiled_gradients_of_each_entry_of_a_batch():
    q, k, v = (torch.stack([x, 2 * x]) for x in qkv())
    scored = lambda q, k, v: hw.attention(q, k, v, hw.softcap(3.0))
    each = torch.func.vmap(torch.func.grad(lambda *inputs: scored(*inputs).square().sum()))
    for run in (torch.func.vmap(scored), each):
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


def test_operators_called_by_themselves_are_differentiable():
    q, k, v = qkv(requires_grad=True)
    spec, call = hw.resolve.prepare(q, k, v, mask=hw.causal())
    raw = torch.ops.headway.forward(
        spec.text, q, k, v, None, None, [], call.captured.ints, [], [], [0, 0, 0, 0], None, None
    )[0]
    expected = torch.autograd.grad(autograd.attention(spec, call).out.sum(), q)[0]
    torch.testing.assert_close(torch.autograd.grad(raw.sum(), q)[0], expected)


def shift(score, b, h, q_idx, kv_idx, table):
    return score + table[h, q_idx - kv_idx + 32]


def test_functions_created_while_compiling():
    q, k, v = qkv()
    table = torch.randn(4, 65)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def without_closure(q, k, v):
        return hw.attention(q, k, v, mask=lambda b, h, i, j: i >= j)

    torch.testing.assert_close(without_closure(q, k, v), hw.attention(q, k, v, mask=hw.causal()))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def with_partial(q, k, v, table):
        return hw.attention(q, k, v, functools.partial(shift, table=table))

    expected = hw.attention(q, k, v, functools.partial(shift, table=table))
    torch.testing.assert_close(with_partial(q, k, v, table), expected)

    def closure(q, k, v, table):
        score = lambda s, b, h, i, j: s + table[h, i - j + 32]
        return hw.attention(q, k, v, score)

    for fullgraph in (False, True):
        made = torch.compile(closure, fullgraph=fullgraph, backend="aot_eager")(q, k, v, table)
        torch.testing.assert_close(made, expected)


def test_inductor_on_the_heads_of_a_projection():
    """Some backends return the layout of their inputs; the compiler is promised a plain one, and
    asserts the strides that an operator returns. It calls PyTorch for the rest (where it can): a
    C++ compiler would take half a minute."""
    from torch._inductor import config

    def attend(x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in x.chunk(3, -1))
        return hw.attention_with_stats(q, k, v).out.transpose(1, 2).flatten(2).sin()

    x = torch.randn(2, 33, 48, requires_grad=True)
    expected = torch.autograd.grad(attend(x).sum(), x)[0]
    plain = {"fallback_by_default": True} if hasattr(config, "fallback_by_default") else {}
    with config.patch(plain):
        compiled = torch.compile(attend, fullgraph=True)
        found = torch.autograd.grad(compiled(x).sum(), x)[0]
    torch.testing.assert_close(found, expected)
