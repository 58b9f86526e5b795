"""PyTorch around the call: compilers, autocast, checkpointing, counters, transforms, copies."""

import copy
import functools
import io
import itertools
import operator
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import headway as hw
from headway.compat import flex
from headway.errors import ArgumentError
from headway.mods import lowering
from headway.operators import as_promised, flat
from headway.resolve import prepare
from headway.types import Forward
from long import long_unless

B, HQ, HK, LENGTH, D = 2, 4, 2, 40, 8


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    return [_leaf(B, h, LENGTH, D) for h in (HQ, HK, HK)]


@pytest.fixture
def compiler():
    """`torch.compile` of whole graphs, and how many it made."""
    torch._dynamo.reset()
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    def compile_(fn, **kwargs):
        return torch.compile(fn, backend=backend, fullgraph=True, **kwargs)

    compile_.graphs = graphs
    yield compile_
    torch._dynamo.reset()


def _same(call, compiled, *args, leaves=()) -> None:
    """Values and gradients, compiled and not."""
    results = []
    for fn in (call, compiled):
        made = fn(*args)
        made = tuple(made) if isinstance(made, tuple) else (made,)
        torch.manual_seed(0)
        sent = [torch.randn_like(x) for x in made if x.requires_grad]
        grads = torch.autograd.grad([x for x in made if x.requires_grad], leaves, sent)
        results.append((*made, *grads))
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-5)


# -- torch.compile --------------------------------------------------------------------------------


def _plain(q, k, v):
    return hw.attention(q, k, v)


def _built_inside(q, k, v):
    return hw.attention(q, k, v, hw.softcap(3.0), hw.causal() & hw.sliding_window(9) | hw.prefix(2))


def _statistics(q, k, v):
    return hw.attention_with_stats(q, k, v, None, hw.causal())


def _scaled(q, k, v):
    return hw.attention(q, k, v, None, hw.causal(), scale=0.3)


@pytest.mark.parametrize("fn", [_plain, _built_inside, _statistics, _scaled])
def test_compile(fn, qkv, compiler):
    _same(fn, compiler(fn), *qkv, leaves=qkv)
    assert len(compiler.graphs) == 1


DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
PLAIN_CALLS = [*itertools.product(DTYPES, ("full", "causal"), (HQ, HK))]
HALF_OF_THEM = [row for n, row in enumerate(PLAIN_CALLS) if n.bit_count() % 2 == 0]  # has each pair


@pytest.mark.parametrize(
    ("dtype", "mask", "heads"), long_unless(HALF_OF_THEM, PLAIN_CALLS), ids=str
)
def test_compile_sees_through_a_plain_call(dtype, mask, heads, compiler):
    """Trained, the same bits as without a compiler; else also one kernel of PyTorch's."""
    mask = hw.causal() if mask == "causal" else None
    qkv = [_leaf(B, h, LENGTH, D, dtype=dtype) for h in (HQ, heads, heads)]
    fn = lambda q, k, v: hw.attention(q, k, v, None, mask)
    with torch.no_grad():
        assert torch.equal(*(f(*qkv) for f in (fn, compiler(fn))))
    called = {node.name for node in compiler.graphs[0].graph.nodes if node.op == "call_function"}
    assert any("flash_attention" in name for name in called)
    assert not any(name.startswith("forward") for name in called)
    made = [f(*qkv) for f in (fn, compiler(fn))]
    assert torch.equal(*made)
    sent = torch.randn_like(made[0])
    for one, other in zip(*[torch.autograd.grad(x, qkv, sent) for x in made], strict=True):
        assert torch.equal(one, other)


def _call(q, k, v, score, mask=None):
    made = hw.attention_with_stats(q, k, v, score, mask)
    return made.out, made.lse


def _closures():
    table, gain, ids = _leaf(HQ, 5), _leaf(), torch.arange(LENGTH) // 11

    def score(s, b, h, i, j):
        return s * gain.exp() + table[h, (i - j).clamp(-2, 2) + 2] * table[0, 1 + 0 * i]

    return score, lambda b, h, i, j: ids[i] == ids[j], [table, gain]


def _partials():
    table, slope = _leaf(HQ, 5), _leaf(HQ)

    def score(t, s, b, h, i, j, *, slopes):
        return s + t[h, (i - j).clamp(-2, 2) + 2] - slopes[h] * (i - j).abs()

    mask = functools.partial(lambda n, b, h, i, j: (i - j).abs() < n, 7)
    return functools.partial(score, table, slopes=slope), mask, [table, slope]


class _Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(HQ, 5))
        self.cap = 3.0

    def forward(self, s, b, h, i, j):
        return self.cap * torch.tanh((s + self.table[h, (i + j) % 5]) / self.cap)


def _modules():
    module = _Learned()
    return module, None, [module.table]


def _values():
    table, slopes = _leaf(HQ, 7), _leaf(HQ)
    ids = (torch.arange(LENGTH) // 11).expand(B, -1)
    score = hw.relative_bias(table) >> hw.alibi(slopes) >> hw.softcap(3.0)
    return score, hw.causal() & hw.document(ids), [table, slopes]


def _mixed():
    score, mask, learned = _closures()
    return hw.softcap(4.0) >> score, hw.causal() & mask, learned


FORMS = [_closures, _partials, _modules, _values, _mixed]


@pytest.mark.parametrize("form", FORMS)
def test_compile_scores_passed_in(form, qkv, compiler):
    score, mask, learned = form()
    _same(_call, compiler(_call), *qkv, score, mask, leaves=[*qkv, *learned])


@pytest.mark.parametrize("form", FORMS)
def test_compile_scores_from_outside(form, qkv, compiler):
    score, mask, learned = form()
    fn = lambda q, k, v: _call(q, k, v, score, mask)
    _same(fn, compiler(fn), *qkv, leaves=[*qkv, *learned])


@pytest.mark.parametrize("form", FORMS)
def test_compile_two_through_one_function(form, qkv, compiler):
    """Other tensors under the same code: never those of the first."""
    compiled = compiler(_call)
    for _ in range(2):
        score, mask, learned = form()
        _same(_call, compiled, *qkv, score, mask, leaves=[*qkv, *learned])


def test_compile_values_of_tensors_built_inside(qkv, compiler):
    table = _leaf(HQ, 7)
    ids = torch.arange(LENGTH) // 11

    def fn(q, k, v, table, ids):
        return hw.attention(q, k, v, hw.relative_bias(table), hw.causal() & hw.document(ids))

    _same(fn, compiler(fn), *qkv, table, ids, leaves=[*qkv, table])


def test_compile_inside_a_module(qkv, compiler):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = nn.Parameter(torch.rand(HQ))
            self.sink = nn.Parameter(torch.randn(HQ))
            self.mask = hw.causal() & hw.sliding_window(9)

        def forward(self, q, k, v):
            return hw.attention(q, k, v, hw.alibi(self.slopes), self.mask, sink=self.sink)

    layer = Layer()
    _same(layer, compiler(layer), *qkv, leaves=[*qkv, *layer.parameters()])


def test_compile_numbers_do_not_recompile(qkv, compiler):
    def fn(q, k, v, window):
        return hw.attention(q, k, v, None, hw.causal() & hw.sliding_window(window))

    compiled = compiler(fn)
    for window in (3, 5, 9, 17):
        _same(fn, compiled, *qkv, window, leaves=qkv)
    assert len(compiler.graphs) <= 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_lengths_do_not_recompile(compiler, dynamic):
    compiled = compiler(_built_inside, dynamic=dynamic)
    made = []
    for length in (33, 40, 57, 64, 300):
        qkv = [_leaf(1, h, length, D) for h in (HQ, HK, HK)]
        _same(_built_inside, compiled, *qkv, leaves=qkv)
        made.append(len(compiler.graphs))
    # With `dynamic=True` the first length may take two attempts: PyTorch starts over where a number
    # that it took for a symbol turns out to be a constant.
    assert made[-1] == made[0 if dynamic else 1] <= 2


def test_compile_sees_a_captured_number_change(qkv, compiler):
    class Scale:
        n = 2.0

        def __call__(self, s, b, h, i, j):
            return s * self.n

    score = Scale()
    compiled = compiler(_call)
    for n in (2.0, 0.5):
        score.n = n
        _same(_call, compiled, *qkv, score, leaves=qkv)


def test_compile_sees_a_captured_tensor_change(qkv, compiler):
    """A write in place, as an optimizer does."""
    score, mask, learned = _closures()
    compiled = compiler(_call)
    for _ in range(2):
        _same(_call, compiled, *qkv, score, mask, leaves=[*qkv, *learned])
        with torch.no_grad():
            learned[0].add_(1.0)


def test_compile_block_masks(qkv, compiler):
    blocks = hw.block_mask(hw.causal() & hw.sliding_window(9), 1, 1, LENGTH, LENGTH, tile=(8, 16))
    _same(_call, compiler(_call), *qkv, None, blocks, leaves=qkv)


def test_compile_builds_block_masks_inside(compiler):
    """Above one block, the mask's tiles are found inside the operator, with no graph break."""
    qkv = [_leaf(1, h, 600, D) for h in (HQ, HK, HK)]
    ids = torch.arange(600) // 90
    mask = lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])
    _same(_call, compiler(_call), *qkv, None, mask, leaves=qkv)


def test_compile_dropout(qkv, compiler):
    fn = lambda q, k, v, seed: hw.attention(q, k, v, dropout=0.4, seed=seed)
    _same(fn, compiler(fn), *qkv, torch.tensor(5), leaves=qkv)
    _same(fn, compiler(fn), *qkv, 6, leaves=qkv)


def test_compile_draws_a_seed_at_every_call(qkv, compiler):
    compiled = compiler(lambda q, k, v: hw.attention(q, k, v, dropout=0.4))
    with torch.no_grad():
        assert not torch.equal(compiled(*qkv), compiled(*qkv))


def test_compile_the_same_tensor_thrice(qkv, compiler):
    x = _leaf(B, HQ, LENGTH, D)
    fn = lambda x: hw.attention(x, x, x, None, hw.causal())
    _same(fn, compiler(fn), x, leaves=[x])


def test_compile_bad_input_says_what_is_wrong(qkv, compiler):
    with pytest.raises(Exception, match="query heads must be a multiple"):
        compiler(_plain)(qkv[0][:, :3], *qkv[1:])


def test_export(qkv):
    class Layer(nn.Module):
        def forward(self, q, k, v):
            return hw.attention(q, k, v, hw.softcap(3.0), hw.causal())

    q, k, v = (x.detach() for x in qkv)
    lowering._lower_library.cache_clear()  # a score that is traced while the program is must leave no trace in it
    program = torch.export.export(Layer(), (q, k, v))
    called = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert called[0] is torch.ops.headway.forward.default
    assert set(called[1:]) == {operator.getitem}
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    torch.testing.assert_close(again(q, k, v), Layer()(q, k, v))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_a_closure_over_a_parameter(strict, compiled):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(2, 31))

        def forward(self, q):
            bias = self.bias
            return hw.attention(q, q, q, lambda s, b, h, i, j: s + bias[h, i - j + 15])

    layer, q = Layer(), torch.randn(1, 2, 16, 8)
    program = torch.export.export(layer, (q,), strict=strict).module()
    with torch.no_grad():
        for parameter in (layer.bias, program.bias):
            parameter.copy_(torch.arange(62.0).view(2, 31) / 10)
    run = torch.compile(program, backend="aot_eager", fullgraph=True) if compiled else program
    x, y = ((2 * q).requires_grad_() for _ in range(2))
    out, expected = run(x), layer(y)
    torch.testing.assert_close(out, expected)
    # The sum with x has a gradient without attention's: one that is dropped would not be missed.
    grads = [
        torch.autograd.grad((out + x).square().sum(), (x, bias))
        for out, x, bias in ((out, x, program.bias), (expected, y, layer.bias))
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_a_method_and_a_learned_bias(strict):
    """With strict=False no part of Dynamo is at work."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.window, self.bias = 3, torch.nn.Parameter(torch.randn(2, 31))

        def near(self, b, h, q_idx, kv_idx):
            return q_idx - kv_idx < self.window

        def forward(self, q):
            return hw.attention(q, q, q, hw.relative_bias(self.bias), self.near)

    layer, q = Layer(), torch.randn(1, 2, 16, 8)
    program = torch.export.export(layer, (q,), strict=strict).module()
    torch.testing.assert_close(program(2 * q), layer(2 * q))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["mask", "documents", "flex"])
def test_an_exported_program_takes_block_masks(kind, strict):
    """Of the mask that it was exported with; another one is refused."""
    ids = torch.arange(256)[None] // 50

    def block_mask(offset=0):
        if kind == "flex":
            return flex.create_block_mask(same, 1, 1, 256, 256, device="cpu")
        mask = hw.document(ids) if kind == "documents" else hw.causal(offset)
        hw.clear_block_cache()
        return hw.block_mask(mask, 1, 1, 256, 256)

    def same(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    class Layer(torch.nn.Module):
        def forward(self, q, mask):
            if kind == "flex":
                return flex.flex_attention(q, q, q, block_mask=mask)
            return hw.attention(q, q, q, mask=mask)

    q = torch.randn(1, 2, 256, 16)
    program = torch.export.export(Layer(), (q, block_mask()), strict=strict).module()
    for x in (q, torch.randn(1, 2, 256, 16)):
        torch.testing.assert_close(program(x, block_mask()), Layer()(x, block_mask()))
    if kind == "mask":
        with pytest.raises(ValueError, match="causal"):
            program(q, block_mask(3))
    if kind == "documents":
        old = block_mask()
        ids[:] = torch.arange(256) // 90
        for stale in (old, block_mask()):
            with pytest.raises((ValueError, ArgumentError)):
                program(q, stale)


# -- autocast -------------------------------------------------------------------------------------


def test_autocast(qkv):
    table = _leaf(HQ, 7)
    with torch.autocast("cpu", torch.bfloat16):
        made = hw.attention_with_stats(*qkv, hw.relative_bias(table), hw.causal())
    assert (made.out.dtype, made.lse.dtype) == (torch.bfloat16, torch.float32)
    cast = hw.attention_with_stats(
        *(x.bfloat16() for x in qkv), hw.relative_bias(table), hw.causal()
    )
    for one, other in zip(made, cast, strict=True):
        assert torch.equal(one, other)
    sent = torch.randn_like(made.out)
    leaves = [*qkv, table]
    for one, other in zip(
        torch.autograd.grad(made.out, leaves, sent),
        torch.autograd.grad(cast.out, leaves, sent),
        strict=True,
    ):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_autocast_joins_what_a_model_mixes(qkv):
    """Half of a linear layer, float32 of a norm: one dtype is made of the two, as in F.sdpa."""
    q, k, v = qkv
    with torch.autocast("cpu", torch.bfloat16):
        assert hw.attention(q.bfloat16(), k, v).dtype == torch.bfloat16


def test_autocast_leaves_float64_alone():
    q, k, v = (_leaf(1, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert hw.attention(q, k, v).dtype == torch.float64


def test_autocast_compiled(qkv, compiler):
    def fn(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return hw.attention(q, k, v, None, hw.causal())

    _same(fn, compiler(fn), *qkv, leaves=qkv)


# -- activation checkpointing ---------------------------------------------------------------------


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How often the operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forward += func is torch.ops.headway.forward.default
        self.backward += func is torch.ops.headway.backward.default
        return func(*args, **(kwargs or {}))


def _layer(q, k, v, table, dropout=0.0):
    return hw.attention(q * 2, k, v, hw.relative_bias(table), hw.causal(), dropout=dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpoint(qkv, dropout):
    leaves = [*qkv, _leaf(HQ, 7)]
    grads = []
    for again in (False, True):
        torch.manual_seed(1)
        with _Count() as count:
            if again:
                out = checkpoint(_layer, *leaves, dropout, use_reentrant=False)
            else:
                out = _layer(*leaves, dropout)
            grads.append(torch.autograd.grad(out.square().sum(), leaves))
        assert (count.forward, count.backward) == (1 + again, 1)
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_selective_checkpoint_keeps_the_operator(qkv):
    """With the operator on the list of what to save, attention is not computed again."""
    leaves = [*qkv, _leaf(HQ, 7)]

    def policy(ctx, op, *args, **kwargs):
        save = op is torch.ops.headway.forward.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    right = torch.autograd.grad(_layer(*leaves).square().sum(), leaves)
    with _Count() as count:
        out = checkpoint(_layer, *leaves, use_reentrant=False, context_fn=contexts)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    assert (count.forward, count.backward) == (1, 1)
    for one, other in zip(grads, right, strict=True):
        assert torch.equal(one, other)


# -- counting -------------------------------------------------------------------------------------


def _flops(fn, *args) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        out = fn(*args)
        if out.requires_grad:
            out.sum().backward()
    return counter.get_total_flops()


def test_flops():
    b, h, q_len, kv_len, d, dv = 2, 4, 64, 96, 16, 32
    q, k, v = _leaf(b, h, q_len, d), _leaf(b, h, kv_len, d), _leaf(b, h, kv_len, dv)
    forward = 2 * b * h * q_len * kv_len * (d + dv)
    backward = 2 * b * h * q_len * kv_len * (3 * d + 2 * dv)
    assert _flops(hw.attention, q, k, v) == forward + backward
    assert _flops(hw.attention, *(x.detach() for x in (q, k, v))) == forward


def test_flops_of_the_backward_alone():
    q = _leaf(2, 4, 64, 16)
    out = hw.attention(q, q, q).sum()
    with FlopCounterMode(display=False) as counter:
        out.backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 64 * 64 * 5 * 16


def test_profiles_show_the_operators():
    """They are left out where nothing watches; a profiler does."""
    q = _leaf(2, 4, 64, 16)
    with torch.profiler.profile() as profile:
        hw.attention(q, q, q).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"headway::forward", "headway::backward"} <= names


def test_flops_are_counted_as_pytorch_counts_its_own():
    qkv = [_leaf(2, 4, 64, 16) for _ in range(3)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = _flops(F.scaled_dot_product_attention, *[x.detach() for x in qkv])
    assert _flops(hw.attention, *[x.detach() for x in qkv]) == plain


# -- torch.func, fake tensors, the operators ------------------------------------------------------


def test_func_grad_and_vjp(qkv):
    table = _leaf(HQ, 7)

    def loss(q, k, v, table):
        made = hw.attention_with_stats(q, k, v, hw.relative_bias(table), hw.causal())
        return made.out.square().sum() + made.lse.sum()

    leaves = [*qkv, table]
    right = torch.autograd.grad(loss(*leaves), leaves)
    plain = [x.detach() for x in leaves]
    grads = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*plain)
    value, pull = torch.func.vjp(loss, *plain)
    for one, other, exact in zip(grads, pull(torch.ones_like(value)), right, strict=True):
        torch.testing.assert_close(one, exact)
        torch.testing.assert_close(other, exact)


@pytest.mark.parametrize("batched", ["qkv", "table", "all"])
def test_vmap(batched):
    """Every entry by itself, with its own tensors; gradients per sample, and of what is shared."""
    n = 3
    many = lambda *shape, by: (
        torch.randn(n, *shape) if batched in (by, "all") else torch.randn(shape)
    )
    q, k, v = (many(1, h, 9, D, by="qkv") for h in (HQ, HK, HK))
    table = many(HQ, 17, by="table")
    in_dims = tuple(0 if x.dim() > d else None for x, d in ((q, 4), (k, 4), (v, 4), (table, 2)))

    def fn(q, k, v, table):
        score = lambda s, b, h, i, j: s + table[h, i - j + 8]
        made = hw.attention_with_stats(q, k, v, score, hw.causal())
        return made.out.square().sum() + made.lse.sum()

    def each(call):
        entries = [
            call(
                *(x if d is None else x[e] for x, d in zip((q, k, v, table), in_dims, strict=True))
            )
            for e in range(n)
        ]
        return entries if isinstance(entries[0], tuple) else [(e,) for e in entries]

    per_sample = torch.func.grad(fn, argnums=(0, 1, 2, 3))
    for call in (fn, per_sample):
        made = torch.func.vmap(call, in_dims=in_dims)(q, k, v, table)
        made = made if isinstance(made, tuple) else (made,)
        for one, entries in zip(made, zip(*each(call), strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(entries))


def test_functional_call(qkv):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sink = nn.Parameter(torch.zeros(HQ))

        def forward(self, q, k, v):
            return hw.attention(q, k, v, sink=self.sink)

    layer, sink = Layer(), torch.randn(HQ)
    q, k, v = (x.detach() for x in qkv)
    loss = lambda sink: torch.func.functional_call(layer, {"sink": sink}, (q, k, v)).square().sum()
    leaf = sink.clone().requires_grad_()
    (right,) = torch.autograd.grad(hw.attention(q, k, v, sink=leaf).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(sink), right)


def test_fake_tensors_have_the_shapes():
    with FakeTensorMode():
        q = torch.empty(2, 8, 100_000, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(2, 2, 70_000, d, dtype=torch.bfloat16) for d in (64, 32))
        made = hw.attention_with_stats(q, k, v, hw.softcap(2.0), hw.causal())
        assert made.out.shape == (2, 8, 100_000, 32)
        assert made.lse.shape == (2, 8, 100_000)
        assert made.max_logit.shape == (2, 8)
        made.out.sum().backward()
        assert q.grad.shape == q.shape


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["plain", "everything", "blocks"])
def test_opcheck(qkv, backend, kind):
    table, sink = torch.randn(HQ, 7), torch.randn(HQ)
    options = {"backend": backend, "max_logit": True}
    if kind == "everything":
        options |= {"score": hw.relative_bias(table) >> hw.softcap(3.0), "mask": hw.causal(1)}
        options |= {"sink": sink, "dropout": 0.3, "seed": 3, "row_max": True, "partial": True}
    if kind == "blocks":
        options["mask"] = hw.block_mask(hw.causal(), 1, 1, LENGTH, LENGTH, tile=(8, 8))
    q, k, v = (x.detach() for x in qkv)
    spec, call = prepare(q, k, v, **options)
    inputs = spec.text, *flat(call)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.headway.forward.default, inputs, test_utils=checks)
    out, lse, *_ = torch.ops.headway.forward(*inputs)
    dout = torch.randn_like(out)
    inputs += (out, lse, dout, (dout * out).sum(-1), [True] * spec.score_tensors)
    torch.library.opcheck(torch.ops.headway.backward.default, inputs, test_utils=checks)


@pytest.mark.parametrize("rows", [0, 2])
def test_results_of_an_operator_share_no_memory(rows):
    """PyTorch refuses it where `CI` is set, also of empty results, which GPU backends share."""
    out, lse, shared = torch.randn(rows, HQ, 3, 8), torch.randn(rows, HQ, 3), torch.empty(0)
    results = Forward(*as_promised(out, out, lse, shared, shared, shared))
    assert len({x.untyped_storage()._cdata for x in results}) == 5
    assert [x.shape for x in results] == [out.shape, lse.shape, (0,), (0,), (0,)]


# -- modes, threads, copies -----------------------------------------------------------------------


def test_without_grad_nothing_is_kept(qkv):
    right = hw.attention(*qkv, None, hw.causal())
    with torch.no_grad():
        out = hw.attention(*qkv, None, hw.causal())
    assert out.grad_fn is None
    with torch.inference_mode():
        inside = hw.attention(*qkv, None, hw.causal())
    assert torch.equal(out, right)
    assert torch.equal(inside.clone(), right)


@pytest.mark.parametrize("length", [LENGTH, 300])
def test_tensors_made_in_inference_mode(length):
    with torch.inference_mode():
        q, k, v, ids = (
            *(torch.randn(1, 2, length, D) for _ in range(3)),
            torch.arange(length) // 9,
        )
        inside = hw.attention(q, k, v, None, hw.causal() & hw.document(ids))
    right = hw.attention(
        *(x.clone() for x in (q, k, v)), None, hw.causal() & hw.document(ids.clone())
    )
    torch.testing.assert_close(inside.clone(), right)


def in_inference_mode(make):
    with torch.inference_mode():
        return make()


ids = lambda: torch.arange(300) // 37
kept = lambda: torch.rand(300, 300, generator=torch.Generator().manual_seed(0)) < 0.7
# What a call captures: made by `made`, which is in inference mode or not.
CAPTURES = {
    "ids": lambda made: {"mask": hw.causal() & hw.document(made(ids))},
    "function": lambda made: (
        lambda t: {"mask": lambda b, h, i, j: t[i] == t[j], "score": lambda s, b, h, i, j: s * t[i]}
    )(made(ids)),
    "dense": lambda made: {"mask": hw.dense(made(kept))},
    "bias": lambda made: {"score": hw.bias(made(lambda: kept() * 1.0))},
    "number": lambda made: (lambda t: {"score": lambda s, b, h, i, j: s * t})(
        made(lambda: torch.tensor(0.3))
    ),
    "sink": lambda made: {"sink": made(lambda: torch.ones(HQ))},
    "seed": lambda made: {"dropout": 0.3, "seed": made(lambda: torch.tensor(7))},
    "block mask": lambda made: {
        "mask": made(lambda: hw.block_mask(hw.document(ids()), 1, 1, 300, 300, tile=32))
    },
    "part": lambda made: {
        "mask": made(lambda: hw.block_mask(hw.document(ids()), 1, 1, 300, 300, tile=32)[:, :, 0:])
    },
    "top k": lambda made: {
        "mask": made(lambda: hw.top_k_blocks(torch.arange(5).expand(1, 1, 10, 5), 30))
    },
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", CAPTURES)
def test_what_was_made_in_inference_mode_may_be_captured_in_training(name, watched):
    leaves = [torch.randn(1, h, 300, D, requires_grad=True) for h in (HQ, HK, HK)]
    results = []
    for made in (in_inference_mode, lambda make: make()):
        given = CAPTURES[name](made)
        for _ in range(2):
            with torch.profiler.profile() if watched else nullcontext():
                out = hw.attention(*leaves, **given)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for other in results[:-1]:
        for x, y in zip(other, results[-1], strict=True):
            torch.testing.assert_close(x, y)


def test_a_write_in_inference_mode_before_the_backward_changes_no_gradient():
    """What was captured is copied then: the gradient is that of the forward."""
    t = in_inference_mode(ids)
    q = torch.randn(1, 2, 300, D, requires_grad=True)
    out = hw.attention(q, q, q, lambda s, b, h, i, j: s * t[i], hw.document(t))
    (right,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    in_inference_mode(t.zero_)
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], right)


def test_backward_twice_with_retain_graph(qkv):
    out = hw.attention(*qkv, hw.softcap(2.0))
    sent = torch.randn_like(out)
    first = torch.autograd.grad(out, qkv, sent, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(out, qkv, sent), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_a_write_between_forward_and_backward_is_noticed(qkv, which):
    table = torch.randn(HQ, 7)
    inputs = [*(x.detach().clone() for x in qkv), table]
    leaves = [x.requires_grad_() for x in inputs]
    out = hw.attention(*leaves[:3], hw.relative_bias(leaves[3]))
    with torch.no_grad():
        leaves[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("length", [LENGTH, 300])
def test_deterministic(length):
    qkv = [_leaf(2, h, length, D) for h in (HQ, HK, HK)]
    leaves = [*qkv, _leaf(HQ, 7)]
    grads = []
    for _ in range(3):
        score = hw.relative_bias(leaves[3])
        out = hw.attention(*qkv, score, hw.causal(), deterministic=True)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for other in grads[1:]:
        for one, again in zip(grads[0], other, strict=True):
            assert torch.equal(one, again)


def test_threads():
    """Several at once, each with its own mask, score and tensors."""
    jobs = []
    for n in range(8):
        qkv = [_leaf(1, 2, 300 + n, D) for _ in range(3)]
        score = hw.softcap(1.0 + n)
        mask = lambda b, h, i, j, n=n: (i >= j) & (i - j < 40 * (n + 1))
        jobs.append((qkv, score, mask))

    def work(n: int, into: dict) -> None:
        qkv, score, mask = jobs[n]
        out = hw.attention(*qkv, score, mask)
        into[n] = [out.detach(), *torch.autograd.grad(out.square().sum(), qkv)]

    alone, together = {}, {}
    threads = [threading.Thread(target=work, args=(n, together)) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(len(jobs)):
        work(n, alone)
        for one, other in zip(alone[n], together[n], strict=True):
            torch.testing.assert_close(one, other)


VALUES = [
    hw.causal(3) & hw.sliding_window(9) | ~hw.prefix(2),
    hw.causal() & hw.document(torch.arange(LENGTH) // 7),
    hw.padding(torch.tensor([3, 40])) | hw.global_tokens(2),
    hw.alibi(HQ) >> hw.softcap(2.0),
    hw.relative_bias(torch.randn(HQ, 5)) >> hw.bias(torch.randn(LENGTH)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_masks_and_scores(value, how, qkv):
    if how == "deepcopy":
        again = copy.deepcopy(value)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(value))
    else:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert repr(again) == repr(value)
    kind = "mask" if isinstance(value, hw.Mask) else "score"
    assert torch.equal(hw.attention(*qkv, **{kind: value}), hw.attention(*qkv, **{kind: again}))


def test_copies_of_block_masks(qkv):
    mask = hw.block_mask(hw.causal() & hw.sliding_window(9), 1, 1, LENGTH, LENGTH, tile=(8, 8))
    right = hw.attention(*qkv, None, mask)
    for again in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(again.to_dense(), mask.to_dense())
        assert torch.equal(hw.attention(*qkv, None, again), right)


def test_a_learned_score_lives_in_a_module():
    """state_dict, deepcopy, and to(): the value is made of the module's tensors at every call."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(HQ, 7))

        def forward(self, q, k, v):
            return hw.attention(q, k, v, hw.relative_bias(self.table), hw.causal())

    layer = Layer()
    twin = copy.deepcopy(layer).double()
    qkv = [torch.randn(B, h, LENGTH, D) for h in (HQ, HK, HK)]
    with torch.no_grad():
        layer.table.add_(1.0)
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(twin(*(x.double() for x in qkv)).float(), layer(*qkv))
    layer(*qkv).square().sum().backward()
    assert layer.table.grad.abs().sum() > 0
