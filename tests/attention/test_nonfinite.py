"""NaN and infinity in the inputs come out again, where they must and nowhere else that matters."""

import math

import pytest
import torch

import headway as hw

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
LENGTHS = pytest.mark.parametrize("length", [40, 300])
MASKS = pytest.mark.parametrize(
    "mask",
    [None, hw.causal(), hw.causal() & hw.sliding_window(30)],
    ids=["full", "causal", "window"],
)
KINDS = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["f32", "bf16", "f64"]
)
B, H, ROW = 1, 2, 17  # where the bad number is put


def _inputs(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(2, 4, length, 8, dtype=dtype) for _ in range(3)]


def _seen(mask, length: int) -> torch.Tensor:
    i, j = torch.arange(length)[:, None], torch.arange(length)
    zero = torch.zeros((), dtype=torch.int64)
    kept = torch.ones(length, length, dtype=torch.bool)
    return kept if mask is None else mask(zero, zero, i, j) & kept


def _other_heads(x: torch.Tensor) -> torch.Tensor:
    others = torch.ones(2, 4, dtype=torch.bool)
    others[B, H] = False
    return x[others]


@BACKENDS
@LENGTHS
@MASKS
@DTYPES
def test_nan_in_q_stays_in_its_row(backend, length, mask, dtype):
    q, k, v = (x.requires_grad_() for x in _inputs(length, dtype))
    with torch.no_grad():
        q[B, H, ROW, 3] = math.nan
    for call in (hw.attention, lambda *a, **kw: hw.attention_with_stats(*a, **kw).out):
        out = call(q, k, v, None, mask, backend=backend)
        assert out[B, H, ROW].isnan().all()
        assert out[B, H, :ROW].isfinite().all()
        assert out[B, H, ROW + 1 :].isfinite().all()
        assert _other_heads(out).isfinite().all()
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        seen = _seen(mask, length)[ROW]
        assert dq[B, H, ROW].isnan().all()
        assert dq[B, H, :ROW].isfinite().all()
        assert dk[B, H][seen].isnan().all()
        assert dv[B, H][seen].isnan().all()
        for grad in (dq, dk, dv):
            assert _other_heads(grad).isfinite().all()
    stats = hw.attention_with_stats(q, k, v, None, mask, backend=backend)
    assert stats.lse[B, H, ROW].isnan()
    assert stats.max_logit[B, H].isnan()
    assert _other_heads(stats.max_logit).isfinite().all()


@MASKS
@pytest.mark.parametrize("length", [40, 1100])
@pytest.mark.parametrize("bad", [(math.nan,), (math.inf, -math.inf)], ids=["nan", "infinities"])
def test_nothing_is_hidden_from_compiled_programs(length, mask, bad):
    """A row of NaN logits leaves PyTorch's kernel as 0; an infinite query times 0 is NaN, too."""
    q, k, v = (x.requires_grad_() for x in _inputs(length, torch.float32))
    with torch.no_grad():
        q[B, H, ROW, : len(bad)] = torch.tensor(bad)
        k[B, H] = k[B, H].abs()
    call = lambda q, k, v: hw.attention(q, k, v, None, mask)
    for fn in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = fn(q, k, v)
        assert out.isnan().any(-1).nonzero().tolist() == [[B, H, ROW]]
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        seen = _seen(mask, length)[ROW]
        assert dq[B, H, ROW].isnan().all()
        assert dk[B, H][seen].isnan().all()
        assert dv[B, H][seen].isnan().all()


@BACKENDS
@LENGTHS
@MASKS
@KINDS
@pytest.mark.parametrize("which", [1, 2], ids=["k", "v"])
@pytest.mark.parametrize("stats", [False, True], ids=["out", "stats"])
def test_bad_keys_and_values_reach_every_row_that_sees_them(
    backend, length, mask, value, which, stats
):
    inputs = [x.requires_grad_() for x in _inputs(length, torch.float32)]
    with torch.no_grad():
        inputs[which][B, H, ROW, 3] = value
    if stats:
        out = hw.attention_with_stats(*inputs, None, mask, backend=backend).out
    else:
        out = hw.attention(*inputs, None, mask, backend=backend)
    exact = _plain(*inputs, _seen(mask, length))
    bad = ~exact[B, H].isfinite().all(-1)
    assert bad.any()
    assert not out[B, H][bad].isfinite().all(-1).any()
    assert _other_heads(out).isfinite().all()
    grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
    assert not grads[0][B, H][bad].isfinite().all(-1).any()
    for grad in grads:
        assert _other_heads(grad).isfinite().all()


def _plain(q, k, v, seen):
    """Rows that do not see a key do not see its NaN."""
    p = torch.softmax((q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~seen, -math.inf), -1)
    touched = torch.where(seen[..., None], p[..., None] * v[:, :, None], 0.0)
    return touched.sum(-2)


@BACKENDS
@pytest.mark.parametrize("where", ["first", "every"])
def test_nan_in_dout_reaches_the_gradients(backend, where):
    q, k, v = (x.requires_grad_() for x in _inputs(40, torch.float32))
    out = hw.attention(q, k, v, None, hw.causal(), backend=backend)
    dout = torch.randn_like(out)
    dout[B, H, ROW if where == "first" else slice(None), 0] = math.nan
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert dq[B, H, ROW].isnan().all()
    assert dk[B, H, : ROW + 1].isnan().all()
    assert dv[B, H, : ROW + 1, 0].isnan().all()
    for grad in (dq, dk, dv):
        assert _other_heads(grad).isfinite().all()


@BACKENDS
def test_nan_in_what_a_score_captures(backend):
    table = torch.randn(4, 40)
    table[H, ROW] = math.nan
    q, k, v = _inputs(40, torch.float32)
    out = hw.attention(q, k, v, lambda s, b, h, i, j: s + table[h, i], backend=backend)
    assert out[:, H, ROW].isnan().all()
    table[H, ROW] = 0
    assert (
        hw.attention(q, k, v, lambda s, b, h, i, j: s + table[h, i], backend=backend)
        .isfinite()
        .all()
    )


@BACKENDS
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1e4), (torch.bfloat16, 1e4), (torch.float16, 100.0)],
    ids=["f32", "bf16", "f16"],
)
def test_large_logits_do_not_overflow(backend, dtype, scale):
    """Where the softmax is one-hot, everything still is finite."""
    q, k, v = (x.requires_grad_() for x in _inputs(40, dtype))
    made = hw.attention_with_stats(q, k, v, None, hw.causal(), scale=scale, backend=backend)
    assert made.max_logit.min() > 5 * scale
    assert all(x.isfinite().all() for x in made)
    grads = torch.autograd.grad(made[:2], (q, k, v), [torch.randn_like(x) for x in made[:2]])
    assert all(g.isfinite().all() for g in grads)


@BACKENDS
@pytest.mark.parametrize("length", [5, 300])
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_rows_that_see_nothing(backend, length, sink):
    """0, -inf and zero gradients, with NaN in every value that they do not see."""
    q, k, v = (x.requires_grad_() for x in _inputs(length, torch.float32))
    weight = torch.randn(4).requires_grad_() if sink else None
    nothing = lambda b, h, i, j: (i != 3) & (j <= i)
    for dlse in (torch.zeros(2, 4, length), torch.randn(2, 4, length)):
        made = hw.attention_with_stats(q, k, v, None, nothing, sink=weight, backend=backend)
        assert (made.out[:, :, 3] == 0).all()
        expected = weight[None].expand(2, 4) if sink else torch.full((2, 4), -math.inf)
        assert torch.equal(made.lse[:, :, 3], expected)
        leaves = [q, k, v] + ([weight] if sink else [])
        grads = torch.autograd.grad(made[:2], leaves, [torch.randn_like(made.out), dlse])
        assert (grads[0][:, :, 3] == 0).all()
        assert all(g.isfinite().all() for g in grads)
