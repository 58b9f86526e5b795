"""Against PyTorch's own function: the same results, gradients, shapes and error types."""

import math
import random
import sys
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import headway.compat.torch_sdpa as ours
from headway.compat import use_for_sdpa
from headway.compat.torch_sdpa import scaled_dot_product_attention
from headway.errors import ArgumentError

ORIGINAL = F.scaled_dot_product_attention


def original(*args, **kwargs):
    """The definition: PyTorch's plain formula, whatever kernels this machine has."""
    with sdpa_kernel(SDPBackend.MATH):
        return ORIGINAL(*args, **kwargs)


def same(shapes, mask=None, dtype=torch.float64, tolerance=1e-10, **kwargs):
    """Results and gradients of both on the same fresh inputs, an expanded gradient included."""
    leaves = [torch.randn(s, dtype=torch.float64).to(dtype) * 1.5 for s in shapes]
    if mask is not None and mask.is_floating_point() and not mask.isinf().all(-1).any():
        leaves.append(mask)
    results = []
    for f in (original, scaled_dot_product_attention):
        inputs = [x.clone().requires_grad_() for x in leaves]
        given = inputs[3] if len(inputs) > 3 else mask
        out = f(*inputs[:3], attn_mask=given, **kwargs)
        torch.manual_seed(0)
        out.backward(torch.randn(out.shape[-1:], dtype=out.dtype).expand_as(out))
        results.append([out, *[x.grad for x in inputs]])
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    return results[1]


SHAPES = {
    "4d": [(2, 4, 5, 8)] * 3,
    "3d": [(4, 5, 8), (4, 7, 8), (4, 7, 8)],
    "2d": [(5, 8), (7, 8), (7, 6)],
    "5d": [(3, 2, 4, 5, 8), (3, 2, 4, 6, 8), (3, 2, 4, 6, 8)],
    "6d": [(2, 1, 3, 4, 5, 8), (2, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8)],
    "mixed ranks": [(5, 8), (2, 4, 7, 8), (4, 7, 8)],
    "batch broadcasts": [(1, 4, 5, 8), (3, 4, 7, 8), (1, 4, 7, 8)],
    "one key head": [(2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 8)],
    "one query head": [(2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)],
    "widths": [(2, 3, 5, 7), (2, 3, 6, 7), (2, 3, 6, 13)],
    "no queries": [(2, 4, 0, 8), (2, 4, 5, 8), (2, 4, 5, 8)],
    "no keys": [(2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8)],
    "no batch": [(0, 4, 5, 8)] * 3,
    "no heads": [(2, 0, 5, 8)] * 3,
    "no width": [(2, 4, 5, 0), (2, 4, 6, 0), (2, 4, 6, 8)],
    "no value width": [(2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 0)],
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes(shapes, causal):
    same(shapes, is_causal=causal)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 8, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)],
        [(2, 8, 5, 16), (2, 2, 7, 16), (2, 4, 7, 16)],
        [(2, 6, 5, 16), (2, 3, 7, 16), (2, 2, 7, 12)],
        [(8, 5, 16), (2, 7, 16), (4, 7, 16)],
        [(3, 2, 4, 5, 8), (3, 2, 2, 5, 8), (3, 2, 2, 5, 8)],
    ],
    ids=str,
)
def test_grouped_heads(shapes):
    same(shapes, enable_gqa=True)


@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
@pytest.mark.parametrize(
    ("inputs", "shape"),
    [
        ("4d", (5, 5)), ("4d", (5, 1)), ("4d", (1, 5)), ("4d", (1, 1, 1, 5)), ("4d", (4, 5, 5)),
        ("4d", (2, 1, 5, 5)), ("4d", (2, 4, 1, 5)), ("4d", (1, 4, 5, 1)), ("4d", (2, 1, 1, 1)),
        ("3d", (4, 5, 7)), ("3d", (5, 7)), ("2d", (5, 7)), ("2d", (1, 7)),
        ("5d", (5, 6)), ("5d", (4, 1, 6)), ("5d", (2, 4, 5, 6)), ("5d", (3, 1, 4, 5, 1)),
        ("5d", (1, 2, 1, 5, 6)), ("5d", (1, 1, 4, 5, 6)), ("6d", (2, 1, 3, 1, 5, 6)),
        ("6d", (3, 4, 5, 6)), ("mixed ranks", (2, 4, 5, 7)), ("batch broadcasts", (3, 1, 5, 7)),
    ],
)  # fmt: skip
def test_masks(inputs, shape, kind):
    if kind == "bool":
        mask = torch.rand(shape) < 0.6
        mask[..., 0] = True
        same(SHAPES[inputs], mask)
    else:
        same(SHAPES[inputs], torch.randn(shape, dtype=torch.float64) * 2)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_long_masks_of_many_tiles(kind):
    shapes = [(1, 2, 389, 16), (1, 2, 401, 16), (1, 2, 401, 16)]
    dense = torch.rand(389, 401) < torch.rand(389, 1)
    mask = dense if kind == "bool" else torch.randn(2, 389, 401, dtype=torch.float64)
    same(shapes, mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_see_nothing(kind):
    mask = torch.rand(2, 1, 5, 5) < 0.6
    mask[0, 0, 2] = False
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    out, dq, dk, dv = same(SHAPES["4d"], mask)
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    assert (out[0, :, 2] == 0).all()
    assert (dq[0, :, 2] == 0).all()


def test_rows_of_the_lowest_finite_number_give_the_mean():
    # Only the result: log-sum-exp cannot hold log(5) next to 1e38, so that gradients of such rows
    # are 5 times too large, as they are from PyTorch's own fused kernels.
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    mask = torch.randn(5, 5)
    mask[2] = torch.finfo(torch.float32).min
    out = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, original(q, k, v, mask))
    torch.testing.assert_close(out[:, :, 2], v.mean(2))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_and_causal_both_hold(kind):
    q, k, v = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(6, 6) < 0.7
    given = mask if kind == "bool" else torch.randn(6, 6, dtype=torch.float64)
    both = (
        mask & torch.ones(6, 6, dtype=torch.bool).tril()
        if kind == "bool"
        else given + torch.full((6, 6), -math.inf, dtype=torch.float64).triu(1)
    )
    out = scaled_dot_product_attention(q, k, v, given, is_causal=True)
    torch.testing.assert_close(out, original(q, k, v, both))


@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (7, 5)], ids=str)
@pytest.mark.parametrize("corner", [causal_upper_left, causal_lower_right])
def test_causal_bias_objects(corner, lengths):
    q_len, kv_len = lengths
    q = torch.randn(2, 4, q_len, 8)
    k, v = (torch.randn(2, 4, kv_len, 8) for _ in range(2))
    diagonal = 0 if corner is causal_upper_left else kv_len - q_len
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(diagonal)
    out = scaled_dot_product_attention(q, k, v, corner(q_len, kv_len))
    torch.testing.assert_close(out, original(q, k, v, mask))


@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 2, torch.tensor(0.25)], ids=str)
def test_scale_is_honoured(scale):
    same(SHAPES["4d"], scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [None, "same", "float32", "bool"])
def test_dtypes(dtype, masked):
    q, k, v = (torch.randn(2, 4, 33, 16, dtype=dtype) for _ in range(3))
    mask = None if masked is None else torch.randn(33, 33)
    mask = {"same": lambda: mask.to(dtype), "bool": lambda: mask > -1}.get(masked, lambda: mask)()
    out = scaled_dot_product_attention(q, k, v, mask)
    assert out.dtype == dtype
    exact = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    truth = original(q.double(), k.double(), v.double(), exact)
    theirs = original(q, k, v, mask)
    assert (out - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 1e-7


def test_nan_and_infinity_are_not_hidden():
    for where, bad in ((0, math.nan), (1, math.nan), (2, math.nan), (0, math.inf), (2, math.inf)):
        qkv = [torch.randn(1, 2, 5, 8) for _ in range(3)]
        qkv[where][0, 0, 1, 0] = bad
        out, theirs = scaled_dot_product_attention(*qkv), original(*qkv)
        assert torch.equal(out.isnan(), theirs.isnan())
        assert not out.isfinite().all()
    q = torch.randn(1, 2, 5, 8)
    assert scaled_dot_product_attention(q, q, q, torch.full((5, 5), math.inf)).isnan().all()


def test_dropout_is_applied_always_and_seeded_by_torch():
    q, k = (torch.randn(2, 4, 64, 8, dtype=torch.float64) for _ in range(2))
    v = torch.eye(64, dtype=torch.float64).expand(2, 4, 64, 64)  # the result is P itself
    p = original(q, k, v)
    out = []
    for _ in range(2):
        torch.manual_seed(5)
        out.append(scaled_dot_product_attention(q, k, v, dropout_p=0.3))
    assert torch.equal(*out)
    dropped = out[0] == 0
    assert abs(dropped.double().mean() - 0.3) < 0.02
    torch.testing.assert_close(out[0][~dropped], (p / (1 - round(0.3 * 2**15) / 2**15))[~dropped])
    assert (scaled_dot_product_attention(q, k, v, dropout_p=1.0) == 0).all()


def test_transposed_inputs_and_autocast():
    q, k, v = (torch.randn(2, 7, 4, 8).transpose(1, 2) for _ in range(3))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), original(q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        mask = torch.randn(7, 7)
        out = scaled_dot_product_attention(q, k.bfloat16(), v, mask)
        theirs = original(q, k.bfloat16(), v, mask)
    assert out.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(out, theirs, rtol=0.03, atol=0.03)


def random_call(rng: random.Random):
    """Shapes that may or may not fit each other."""
    rank, q_len, kv_len = (
        rng.choice([2, 3, 4, 4, 4, 5]),
        rng.choice([1, 3, 5]),
        rng.choice([1, 4, 5]),
    )
    widths = [(q_len, 4), (kv_len, 4), (kv_len, rng.choice([4, 6]))]
    before = [
        [rng.choice([1, 2]), rng.choice([1, 2, 2]), rng.choice([1, 2, 4, 4])] for _ in range(3)
    ]
    shapes = [(*b[len(b) - rank + 2 :], *w) for b, w in zip(before, widths, strict=True)]
    mask = None
    if rng.random() < 0.6:
        dims = [
            rng.choice([1, 2]),
            rng.choice([1, 4]),
            rng.choice([1, q_len]),
            rng.choice([1, kv_len, 3]),
        ]
        mask = torch.randn(dims[-rng.choice([2, 3, 4]) :], dtype=torch.float64)
        mask = mask > -1 if rng.random() < 0.5 else mask
    return shapes, mask, rank > 2 and rng.random() < 0.5


def test_whatever_the_original_takes_we_take_and_agree(seed):
    rng, taken, refused = random.Random(seed), 0, 0
    for _ in range(250):
        shapes, mask, gqa = random_call(rng)
        q, k, v = (torch.randn(s, dtype=torch.float64) for s in shapes)
        try:
            truth = original(q, k, v, mask, enable_gqa=gqa)
        except (RuntimeError, IndexError):
            refused += 1
            continue
        out = scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa)
        torch.testing.assert_close(out, truth)
        taken += 1
    assert taken > 50
    assert refused > 20


Q = torch.randn(2, 4, 5, 8)
REFUSED = {
    "1-D": ((Q[0, 0, 0],) * 3, {}),
    "widths": ((Q, torch.randn(2, 4, 5, 7), Q), {}),
    "batches": ((Q, torch.randn(3, 4, 5, 8), torch.randn(3, 4, 5, 8)), {}),
    "heads": ((Q, Q[:, :2], Q[:, :2]), {}),
    "heads do not divide": ((Q, Q[:, :3], Q[:, :3]), {"enable_gqa": True}),
    "more key heads": ((Q[:, :2], Q, Q), {"enable_gqa": True}),
    "dropout 1.5": ((Q, Q, Q), {"dropout_p": 1.5}),
    "dropout -0.1": ((Q, Q, Q), {"dropout_p": -0.1}),
    "dropout nan": ((Q, Q, Q), {"dropout_p": math.nan}),
    "dropout text": ((Q, Q, Q), {"dropout_p": "a"}),
    "integers": ((Q.long(),) * 3, {}),
    "dtypes": ((Q, Q.double(), Q), {}),
    "devices": ((Q, Q.to("meta"), Q), {}),
    "list": (([1.0], Q, Q), {}),
    "none": ((Q, None, Q), {}),
    "scale text": ((Q, Q, Q), {"scale": "a"}),
    "scale learned": ((Q, Q, Q), {"scale": torch.tensor(0.5, requires_grad=True)}),
    "causal number": ((Q, Q, Q), {"is_causal": 1}),
    "mask list": ((Q, Q, Q, [1]), {}),
    "mask function": ((Q, Q, Q, lambda b, h, i, j: i >= j), {}),
    "mask int": ((Q, Q, Q, torch.ones(5, 5).long()), {}),
    "mask float64": ((Q, Q, Q, torch.ones(5, 5).double()), {}),
    "mask float16": ((Q, Q, Q, torch.ones(5, 5).half()), {}),
    "mask length": ((Q, Q, Q, torch.ones(4, 5)), {}),
    "mask heads": ((Q, Q, Q, torch.ones(3, 5, 5)), {}),
    "mask batch": ((Q, Q, Q, torch.ones(3, 1, 5, 5)), {}),
    "mask larger than q": ((Q[:1], Q[:1], Q[:1], torch.ones(2, 1, 5, 5)), {}),
    "mask 5-D": ((Q, Q, Q, torch.ones(2, 1, 1, 5, 5)), {}),
    "corner and causal": ((Q, Q, Q, causal_lower_right(5, 5)), {"is_causal": True}),
    "corner of other lengths": ((Q, Q, Q, causal_lower_right(4, 5)), {}),
    "unknown": ((Q, Q, Q), {"window": 4}),
    "sparse": ((Q.to_sparse(), Q, Q), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_originals_error_type(name):
    args, kwargs = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
        ORIGINAL(*args, **kwargs)
    with pytest.raises(theirs.type, match=r"\w") as mine:
        scaled_dot_product_attention(*args, **kwargs)
    by_python = ("unknown", "sparse")  # refused before we look
    assert isinstance(mine.value, ArgumentError) == (name not in by_python)


def test_an_error_names_the_argument_and_the_way_out():
    with pytest.raises(RuntimeError, match=r"query 4, key 2, value 2.*enable_gqa=True"):
        scaled_dot_product_attention(Q, Q[:, :2], Q[:, :2])
    with pytest.raises(RuntimeError, match=r"attn_mask \(4, 5\).*\(2, 4, 5, 5\)"):
        scaled_dot_product_attention(Q, Q, Q, torch.ones(4, 5))


# -- rerouting ------------------------------------------------------------------------------------


def test_use_for_sdpa_reroutes_and_restores():
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True).train()
    x = torch.randn(2, 5, 16, requires_grad=True)
    plain = module(x, x, x, need_weights=False)[0]
    with use_for_sdpa():
        assert F.scaled_dot_product_attention is ours.scaled_dot_product_attention
        assert torch._C._nn.scaled_dot_product_attention is ours.scaled_dot_product_attention
        assert ORIGINAL is ours.scaled_dot_product_attention, "names bound by import as well"
        rerouted = module(x, x, x, need_weights=False)[0]
        with use_for_sdpa():
            pass
        assert F.scaled_dot_product_attention is ours.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is ORIGINAL
    assert torch._C._nn.scaled_dot_product_attention is ORIGINAL
    assert ORIGINAL is not ours.scaled_dot_product_attention
    torch.testing.assert_close(rerouted, plain)


def test_use_for_sdpa_restores_what_was_imported_meanwhile(tmp_path, monkeypatch):
    tmp_path.joinpath("late.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as theirs\n"
        "from headway.compat.torch_sdpa import scaled_dot_product_attention as ours\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: dict(vars(m)) for name, m in sys.modules.items() if name.startswith("torch.nn")}
    with use_for_sdpa():
        import late

        assert late.theirs is ours.scaled_dot_product_attention
    assert late.theirs is ORIGINAL
    assert ours.scaled_dot_product_attention is not ORIGINAL
    for name, held in before.items():
        now = vars(sys.modules[name])
        assert all(now[key] is item for key, item in held.items()), name
    del sys.modules["late"]


def test_use_for_sdpa_restores_after_an_error():
    with pytest.raises(KeyError, match="inside"), use_for_sdpa():
        raise KeyError("inside")
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert type(F.scaled_dot_product_attention).__name__ == "builtin_function_or_method"


def test_compiles_whole():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(q, mask):
        both = scaled_dot_product_attention(q, q, q, mask, is_causal=True)
        return both + scaled_dot_product_attention(q, q[:, :1], q[:, :1], scale=0.5)

    q = torch.randn(2, 4, 5, 8, requires_grad=True)
    mask = torch.randn(5, 5, requires_grad=True)
    f(q, mask).sum().backward()
    compiled = [x.grad.clone() for x in (q, mask)]
    q.grad = mask.grad = None
    causal = torch.full((5, 5), -math.inf).triu(1)
    both = original(q, q, q, mask + causal) + original(q, q[:, :1], q[:, :1], scale=0.5)
    both.sum().backward()
    for a, b in zip(compiled, (q, mask), strict=True):
        torch.testing.assert_close(a, b.grad)


class Logged(torch.Tensor):
    """A subclass that sees what is done to it, and answers one function itself."""

    seen: ClassVar[list] = []
    answers = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            cls.seen.append(sorted(kwargs or {}))
            if cls.answers:
                return "its own"
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("at", ["query", "key", "value", "attn_mask"])
def test_subclasses_have_their_say(at):
    inputs = {name: torch.randn(1, 2, 5, 8) for name in ("query", "key", "value")}
    inputs["attn_mask"] = torch.randn(5, 5)
    truth = F.scaled_dot_product_attention(**inputs)
    inputs[at] = inputs[at].as_subclass(Logged)
    Logged.seen.clear()
    with use_for_sdpa():
        out = F.scaled_dot_product_attention(**inputs)
        assert type(out) is Logged
        assert len(Logged.seen) == 1
        torch.testing.assert_close(out.as_subclass(torch.Tensor), truth)
        Logged.answers = True
        try:
            assert F.scaled_dot_product_attention(**inputs) == "its own"
        finally:
            Logged.answers = False


def test_function_modes_have_their_say():
    class Mode(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += func is F.scaled_dot_product_attention
            return func(*args, **kwargs or {})

    q = torch.randn(1, 2, 5, 8)
    with use_for_sdpa(), Mode() as mode:
        F.scaled_dot_product_attention(q, q, q)
    assert mode.seen == 1


def test_torchscript_inside_calls_ours(monkeypatch):
    calls = []
    real = ours.attention
    monkeypatch.setattr(ours, "attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    want = layer(x, x, x, need_weights=False)[0]

    def three(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with use_for_sdpa():
        scripted = torch.jit.script(layer)
        function = torch.jit.script(three)
        torch.testing.assert_close(scripted(x, x, x, need_weights=False)[0], want)
        q = torch.randn(1, 2, 5, 4, requires_grad=True)
        out = function(q, q, q)
    assert len(calls) == 2
    right = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(out, right)
    (got,), (true,) = (torch.autograd.grad(y.sin().sum(), q) for y in (out, right))
    torch.testing.assert_close(got, true)


def test_pytorchs_registry_of_implementations():
    functional, registry = torch.nn.functional, torch.nn.attention
    holder = [functional.scaled_dot_product_attention]  # in a list: not rerouted
    ours.register()
    assert "headway" in registry.list_flash_attention_impls()
    assert functional.scaled_dot_product_attention is holder[0]
    registry.activate_flash_attention_impl("headway")
    assert registry.current_flash_attention_impl() == "headway"
    with use_for_sdpa():
        assert functional.scaled_dot_product_attention is scaled_dot_product_attention
    assert functional.scaled_dot_product_attention is scaled_dot_product_attention
    registry.activate_flash_attention_impl("headway")  # again: the first one is removed
    assert functional.scaled_dot_product_attention is scaled_dot_product_attention
    registry.restore_flash_attention_impl()
    assert functional.scaled_dot_product_attention is holder[0]
    with use_for_sdpa():
        registry.activate_flash_attention_impl("headway")
    assert functional.scaled_dot_product_attention is scaled_dot_product_attention
    registry.restore_flash_attention_impl()
    assert functional.scaled_dot_product_attention is holder[0]
