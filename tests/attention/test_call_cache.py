"""What is remembered of a call must not outlive what it depends on; and autograd around it."""

import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import headway as hw
from headway import call_cache
from headway.errors import ArgumentError, BackendRefused
from headway.resolve import prepare

TABLE, OTHER = torch.randn(2, 4), torch.randn(2, 4)


def tensors(dtype=torch.float32, kv_heads=4, d=16, grad=False):
    torch.manual_seed(0)
    sizes = (4, 24, d), (kv_heads, 20, d), (kv_heads, 20, 8)
    return [torch.randn(2, *size, dtype=dtype).requires_grad_(grad) for size in sizes]


def steep(by, table):
    """A score with a number and a tensor in its closure."""
    return lambda s, b, h, i, j: s * by + table[b, h]


def both(first, second):
    return hw.mods.base.Then(first, second)


def kept(window):
    return lambda b, h, i, j: (i - j).abs() < window


class Near:
    """A mask and a score among the methods of an object."""

    def __init__(self, window, table=TABLE):
        self.window, self.table = window, table

    def mask(self, b, h, i, j):
        return (i - j).abs() < self.window

    def score(self, s, b, h, i, j):
        return s * 1.5 + self.table[b, h]


class Behind(Near):
    def mask(self, b, h, i, j):
        return i - j < self.window


def call(qkv=(), **options):
    q, k, v = qkv or tensors()
    options = {"score": steep(1.5, TABLE), "mask": kept(9), "backend": "cpu"} | options
    return lambda: hw.attention_with_stats(q, k, v, **options)


def spread(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


CHANGES = {
    "dtype": lambda: call(tensors(torch.float64)),
    "strides": lambda: call([spread(x) for x in tensors()]),
    "width": lambda: call(tensors(d=12)),
    "key heads": lambda: call(tensors(kv_heads=2)),
    "requires grad": lambda: call(tensors(grad=True)),
    "scale": lambda: call(scale=0.5),
    "backend": lambda: call(backend="reference"),
    "deterministic": lambda: call(deterministic=True),
    "dropout": lambda: call(dropout=0.5, seed=3),
    "sink": lambda: call(sink=torch.ones(4)),
    "no score": lambda: call(score=None),
    "no mask": lambda: call(mask=None),
    "a number in the score": lambda: call(score=steep(2.5, TABLE)),
    "a number in the mask": lambda: call(mask=kept(3)),
    "another tensor": lambda: call(score=steep(1.5, OTHER)),
    "its strides": lambda: call(score=steep(1.5, OTHER.T.contiguous().T)),
    "its dtype": lambda: call(score=steep(1.5, OTHER.double())),
    "its size": lambda: call(score=steep(1.5, torch.randn(2, 5)[:, :4])),
    "it learns": lambda: call(score=steep(1.5, OTHER.clone().requires_grad_())),
    "a value of the library": lambda: call(mask=hw.causal(3)),
    "another value": lambda: call(mask=hw.causal(4)),
    "two tensors": lambda: call(score=both(steep(1, TABLE), steep(1, OTHER))),
    "the same tensor twice": lambda: call(score=both(steep(1, TABLE), steep(1, TABLE))),
    "a tensor of a value": lambda: call(score=hw.bias(TABLE[..., None, None])),
    "another tensor of a value": lambda: call(score=hw.bias(OTHER[..., None, None])),
    "a method": lambda: call(mask=Near(9).mask),
    "its object's number": lambda: call(mask=Near(5).mask),
    "its class": lambda: call(mask=Behind(5).mask),
    "a method for a score": lambda: call(score=Near(9).score),
    "its object's tensor": lambda: call(score=Near(9, OTHER).score),
    "a block mask": lambda: call(mask=hw.block_mask(kept(9), 1, 1, 24, 20, tile=(8, 8))),
    "its tile": lambda: call(mask=hw.block_mask(kept(9), 1, 1, 24, 20, tile=(16, 8))),
    "its mask": lambda: call(mask=hw.block_mask(kept(2), 1, 1, 24, 20, tile=(16, 8))),
}


def test_whatever_changes_is_noticed():
    """Every call after every other: the same bits as by itself."""
    runs = [change() for change in CHANGES.values()]
    alone = []
    for run in runs:
        call_cache._signatures.clear()
        alone.append(run())
    call_cache._signatures.clear()
    for step in (1, -1):
        for name, run, want in [*zip(CHANGES, runs, alone, strict=True)][::step]:
            got = run()
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name
            assert got.out.requires_grad == want.out.requires_grad


def test_functions_that_shared_a_tensor_and_no_longer_do():
    q, k, v = tensors()
    hw.attention(q, k, v, both(steep(1, TABLE), steep(1, TABLE)))
    got = hw.attention(q, k, v, both(steep(1, TABLE), steep(1, OTHER)))
    torch.testing.assert_close(got, hw.attention(q, k, v, steep(1, TABLE + OTHER)))


def test_what_a_closure_holds_is_read_at_every_call():
    q, k, v = tensors()
    held, by = {"table": TABLE}, 1.0
    score = lambda s, b, h, i, j: s * by + held["table"][b, h]
    for by, held["table"] in ((1.0, TABLE), (2.0, TABLE), (2.0, OTHER), (2.0, OTHER.double())):
        for _ in range(2):
            expected = hw.attention(q, k, v, steep(by, held["table"].clone()))
            assert torch.equal(hw.attention(q, k, v, score), expected)


def test_autocast_is_asked_at_every_call():
    q, k, v = tensors()
    run = call((q, k, v), mask=hw.causal(), score=hw.softcap(5.0))
    for dtype in (None, torch.bfloat16, torch.float16, None):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            for _ in range(2):
                assert run().out.dtype == (dtype or q.dtype)


def test_calls_that_are_refused_are_refused_after_one_that_was_not():
    q, k, v = tensors()
    weights = torch.ones(2, 4)
    run = lambda **o: hw.attention(*(o.pop("qkv", (q, k, v))), **{"score": hw.alibi(4)} | o)
    seen = lambda b, h, i, j: weights[b, h] > 0
    run(), run(mask=seen), run(scale=0.5), run(sink=torch.ones(4))
    for _ in range(2):
        for wrong in (
            {"dropout": False},
            {"scale": torch.tensor(0.5)},
            {"sink": torch.ones(4).int()},
            {"score": hw.alibi(2)},
            {"qkv": (q, k, v[:, :2])},
            {"qkv": (q, k.double(), v)},
            {"qkv": (q[0], k, v)},
            {"mask": hw.block_mask(hw.causal(), 1, 1, 24, 24)},
        ):
            with pytest.raises(ArgumentError):
                run(**wrong)
        with pytest.raises(BackendRefused):
            run(backend="hopper")
    weights.requires_grad_()
    with pytest.raises(ArgumentError, match="a mask has no gradient"):
        run(mask=seen)


def test_a_call_that_was_changed_is_not_known():
    q, k, v = tensors()
    prepare(q, k, v, hw.softcap(5.0))
    spec, call = prepare(q, k, v, hw.softcap(5.0))
    assert call.signature is not None
    assert call.signature.spec is spec
    assert call.replace(q=q[:, :, :3]).signature is None
    assert prepare(q, k, v, hw.softcap(5.0), deterministic=True)[1].signature is not call.signature
    assert prepare(q, k, v, hw.softcap(5.0), keys=hw.types.Coords(q=1))[1].signature is None
    assert replace(spec) is not spec


def test_a_method_is_known_and_its_object_is_read_at_every_call():
    q, k, v = tensors()
    near = Near(9)
    for near.window, near.table in ((9, TABLE), (9, OTHER), (5, OTHER)):
        expected = hw.attention(q, k, v, steep(1.5, near.table.clone()), kept(near.window))
        for _ in range(2):
            assert torch.equal(hw.attention(q, k, v, near.score, near.mask), expected)
        assert prepare(q, k, v, near.score, near.mask)[1].signature is not None
    near.mask = kept(3)  # a function in the place of the method
    expected = hw.attention(q, k, v, mask=kept(3))
    assert torch.equal(hw.attention(q, k, v, mask=near.mask), expected)


def test_a_cache_that_grows_is_one_signature():
    """With a mask whose numbers grow with it; what does not fit is refused all the same."""
    q, k, v = tensors()
    q = q[:, :, :2]
    mask = lambda n: hw.causal(n - 2) & hw.sliding_window(n - 1)
    run = lambda n, mask: hw.attention(q, k[:, :, :n], v[:, :, :n], mask=mask, backend="cpu")
    run(3, mask(3))
    before = len(call_cache._signatures)
    outs = {n: run(n, mask(n)) for n in range(4, 21)}
    assert len(call_cache._signatures) == before
    for n, out in outs.items():
        at = torch.arange(2)[:, None], torch.arange(n)
        pairs = mask(n)(torch.tensor(0), torch.tensor(0), *at)
        torch.testing.assert_close(out, run(n, hw.dense(pairs)))
    hw.attention(q, k, v, mask=hw.causal(18), backend="cpu")
    with pytest.raises(ArgumentError, match="masks nothing out"):
        hw.attention(q, k, v, mask=hw.causal(19), backend="cpu")
    hw.attention(q, k, v, mask=hw.neighborhood((4, 5), (3, 3)))
    with pytest.raises(ArgumentError, match="has 16 points"):
        hw.attention(q, k, v, mask=hw.neighborhood((4, 4), (3, 3)))


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(call_cache._signatures, "capacity", 3)
    call_cache._signatures.clear()
    q, k, v = tensors()
    for length in range(1, 9):
        prepare(q[:, :, :length], k, v)
    assert len(call_cache._signatures) == 3


# -- autograd -------------------------------------------------------------------------------------


def learned(grad=True):
    q, k, v = tensors(grad=grad)
    table, sink = (x.requires_grad_(grad) for x in (torch.randn(2, 4), torch.randn(4)))
    score = steep(1.5, table)
    return [q, k, v, table, sink], lambda: hw.attention(q, k, v, score, kept(9), sink=sink)


def test_hooks_on_saved_tensors_see_all_that_is_kept():
    inputs, run = learned()
    packed = []

    def pack(x):
        packed.append(x.data_ptr())
        return x.clone()

    with saved_tensors_hooks(pack, lambda x: x):
        out = run()
    assert {x.data_ptr() for x in (*inputs, out)} <= set(packed)
    got = torch.autograd.grad(out.sum(), inputs)
    for a, b in zip(got, torch.autograd.grad(run().sum(), inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("n", range(5), ids=["q", "k", "v", "captured", "sink"])
def test_what_was_written_to_has_no_backward(n):
    inputs, run = learned()
    out = run()
    with torch.no_grad():
        inputs[n].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_frees_what_it_used_unless_told_otherwise():
    inputs, run = learned()
    out = run().sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    again = torch.autograd.grad(out, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs)
    (dq,) = torch.autograd.grad(run().sum(), inputs[:1], create_graph=True)
    with pytest.raises(BackendRefused, match="second derivative"):
        dq.sum().backward()


def test_only_what_is_asked_for_and_lse_alone():
    inputs, run = learned()
    every = torch.autograd.grad(run().sum(), inputs)
    for n, x in enumerate(inputs):
        (alone,) = torch.autograd.grad(run().sum(), [x])
        torch.testing.assert_close(alone, every[n])
    q, k, v = inputs[:3]
    made = hw.attention_with_stats(q, k, v, steep(1.5, TABLE))
    assert not made.max_logit.requires_grad
    grads = torch.autograd.grad(made.lse.sum(), (q, v))
    assert grads[0].abs().sum() > 0
    assert not grads[1].any()


@pytest.mark.parametrize("after", ["forward", "backward"])
def test_nothing_is_kept_alive_by_a_cycle(after):
    gc.collect()
    gc.disable()
    try:
        q, k, v = tensors(grad=True)
        table = torch.randn(2, 4, requires_grad=True)
        made = hw.attention_with_stats(q, k, v, steep(1.5, table))
        watched = [weakref.ref(x) for x in (q, k, v, table, *made)]
        if after == "backward":
            (made.out.sum() + made.lse.sum()).backward()
        del q, k, v, table, made
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_a_compiled_call_is_not_compiled_again_after_an_eager_one():
    q, k, v = tensors(grad=True)
    score, mask = hw.bias(TABLE[..., None, None]), hw.causal() & hw.sliding_window(5)
    run = torch.compile(lambda *qkv: hw.attention(*qkv, score, mask), backend="eager")
    first = run(q, k, v)
    hw.attention(q, k, v, score, mask)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(run(q, k, v), first)
    copy = pickle.loads(pickle.dumps(mask))
    assert copy == mask
    assert vars(copy).keys() == {"first", "second"}


def test_a_tensor_left_over_from_a_transform():
    kept = []
    torch.func.grad(lambda x: kept.append(x * 1) or x.sum())(tensors()[0])
    _, k, v = tensors(grad=True)
    (over,) = kept
    out = hw.attention(over, k, v, hw.softcap(5.0))
    torch.testing.assert_close(out, hw.attention(over.detach(), k, v, hw.softcap(5.0)))
    assert torch.autograd.grad(out.sum(), v)[0].abs().sum() > 0
