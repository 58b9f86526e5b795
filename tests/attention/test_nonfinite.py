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


# -- pairs that are not kept ----------------------------------------------------------------------

EVERY = {
    "flash": (None, 8),  # of the CPU: PyTorch's kernels where the widths are equal
    "blocks": (None, 5),
    "a score": (lambda s, b, h, i, j: s * 1.5, 8),
}
RUNS = pytest.mark.parametrize("run", EVERY)


def _results(run: str, backend: str, q, k, v, mask):
    """out alone, then out and all statistics."""
    score, width = EVERY[run]
    alone = lambda q, k, v: hw.attention(q, k, v, score, mask, backend=backend)
    stats = lambda q, k, v: hw.attention_with_stats(q, k, v, score, mask, backend=backend)
    v = v[..., :width]
    return alone(q, k, v), stats(q, k, v)


@BACKENDS
@RUNS
@pytest.mark.parametrize("length", [6, 300])
@pytest.mark.parametrize("mask", [None, hw.causal(), hw.padding(torch.tensor([0, 4]))], ids=str)
def test_a_query_of_logits_of_minus_infinity_sees_nothing(backend, run, length, mask):
    """T = -inf is not kept, for whatever reason."""
    q, k, v = _inputs(length, torch.float32)
    k[B, H, :, 0] = math.inf
    q[B, H, :, 0] = 1.0
    q[B, H, 2, 0] = -1.0
    for values in (v, torch.full_like(v, 2.0)):
        out, stats = _results(run, backend, q, k, values, mask)
        for found in (out, stats.out):
            assert (found[B, H, 2] == 0).all()
        assert stats.lse[B, H, 2] == -math.inf
    if mask is None:
        k[B, H, :, 0] = -math.inf  # and all the others
        q[B, H, 2, 0] = 1.0
        _, stats = _results(run, backend, q, k, v, mask)
        assert (stats.lse[B, H] == -math.inf).all()
        assert stats.max_logit[B, H] == -math.inf


@BACKENDS
@RUNS
@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("mask", [None, hw.causal(), hw.causal() & hw.sliding_window(2)], ids=str)
def test_a_row_of_nan_alone_is_not_hidden(backend, run, row, mask):
    """Where the only logits of a row are NaN, of a key's making."""
    q, k, v = _inputs(1 if mask is None else 6, torch.float32)
    k[B, H, min(row, k.shape[2] - 1), 3] = math.nan
    out, stats = _results(run, backend, q, k, v, mask)
    sees = _seen(mask, k.shape[2])[:, min(row, k.shape[2] - 1)]
    for found in (out, stats.out):
        assert found[B, H][sees].isnan().all()
    assert stats.lse[B, H][sees].isnan().all()
    assert stats.max_logit[B, H].isnan()


@pytest.mark.parametrize("mask", [None, hw.causal()], ids=str)
def test_the_same_of_compiled_programs(mask):
    """They cannot look, so PyTorch's kernel gets what it hides added."""
    q, k, v = _inputs(6, torch.float32)
    k[0, 0, 0, 3] = math.nan
    k[B, H, :, 0] = math.inf
    q[B, H, :, 0] = -1.0
    out = torch.compile(lambda *x: hw.attention(*x, None, mask), backend="aot_eager")(q, k, v)
    assert out[0, 0].isnan().all()
    assert (out[B, H] == 0).all()


MANY = {
    "window": hw.causal() & hw.sliding_window(30),
    "causal": hw.causal(),
    "dropped": lambda b, h, i, j: (j != ROW) & (i + j > 3),
    "document": hw.document(torch.arange(300) // 23),
}


@BACKENDS
@RUNS
@pytest.mark.parametrize("name", MANY)
def test_a_key_reaches_no_row_that_does_not_keep_it(backend, run, name):
    """Not out, nor lse, nor the largest logit, which is that of kept pairs."""
    mask = MANY[name]
    q, k, v = _inputs(300, torch.float32)
    right, stats = _results(run, backend, q, k, v, mask)
    free = ~_seen(mask, 300)[:, ROW]
    for value in (math.nan, math.inf, -math.inf):
        k[B, H, ROW, 3] = value
        made, with_stats = _results(run, backend, q, k, v, mask)
        for found in (made, with_stats.out):
            assert torch.allclose(found[B, H][free], right[B, H][free], atol=1e-6), value
            assert torch.allclose(_other_heads(found), _other_heads(right), atol=1e-6), value
        assert torch.allclose(with_stats.lse[B, H][free], stats.lse[B, H][free], atol=1e-6), value
        if free.all():
            assert torch.allclose(with_stats.max_logit, stats.max_logit), value


@BACKENDS
@RUNS
def test_a_key_that_no_query_keeps_spoils_no_other_head(backend, run):
    """Of its own head it may show in gradients: there 0 times NaN is added up."""
    score, width = EVERY[run]
    q, k, v = (x.requires_grad_() for x in _inputs(300, torch.float32))
    with torch.no_grad():
        k[B, H, ROW] = math.nan
    mask = lambda b, h, i, j: j != ROW
    out = hw.attention(q, k, v[..., :width], score, mask, backend=backend)
    assert out.isfinite().all()
    for grad in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
        assert _other_heads(grad).isfinite().all()
