"""Sizes of nothing, block masks in place of masks, and memory around the tensors."""

import math
from contextlib import contextmanager

import pytest
import torch

import headway as hw
from cases import BY_NAME
from checks import check

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
SCORE = lambda s, b, h, i, j: s * 0.5


# -- sizes of nothing -----------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("stats", [False, True], ids=["out", "stats"])
@pytest.mark.parametrize("mask", [None, hw.causal()], ids=["full", "causal"])
@pytest.mark.parametrize("score", [None, SCORE], ids=["", "score"])
@pytest.mark.parametrize(
    ("b", "hq", "hk", "q_len", "kv_len", "d", "dv"),
    [
        (0, 4, 2, 5, 7, 8, 8),
        (2, 0, 1, 5, 7, 8, 8),
        (2, 4, 2, 0, 7, 8, 8),
        (2, 4, 2, 5, 0, 8, 8),
        (2, 4, 2, 0, 0, 8, 8),
        (2, 4, 2, 300, 0, 8, 8),
        (2, 4, 2, 5, 7, 0, 8),
        (2, 4, 2, 5, 7, 8, 0),
    ],
)
def test_nothing(backend, stats, mask, score, b, hq, hk, q_len, kv_len, d, dv):
    sink = torch.randn(hq, requires_grad=True)
    leaf = lambda *size: torch.randn(size, requires_grad=True)
    q, k, v = leaf(b, hq, q_len, d), leaf(b, hk, kv_len, d), leaf(b, hk, kv_len, dv)
    for weight in (None, sink):
        if stats:
            made = hw.attention_with_stats(q, k, v, score, mask, sink=weight, backend=backend)
        else:
            made = (hw.attention(q, k, v, score, mask, sink=weight, backend=backend),)
        assert made[0].shape == (b, hq, q_len, dv)
        assert made[0].isfinite().all()
        if stats:
            assert made[1].shape == (b, hq, q_len)
            assert made[2].shape == (b, hq)
            if kv_len == 0:
                assert (made[2] == -math.inf).all()
                expected = made[1].new_tensor(-math.inf) if weight is None else sink[:, None]
                assert torch.equal(made[1], expected.expand_as(made[1]))
        leaves = [q, k, v] + ([] if weight is None else [sink])
        for leaf_, grad in zip(leaves, torch.autograd.grad(made[0].sum(), leaves), strict=True):
            assert grad.shape == leaf_.shape
            assert grad.isfinite().all()


@pytest.mark.parametrize("std", [1, 8])
@pytest.mark.parametrize("mask", [None, hw.causal()], ids=["full", "causal"])
def test_rows_that_cannot_hold_the_maximum(mask, std):
    """The CPU backend leaves out rows whose lse is below the largest logit so far."""
    q, k = (std * torch.randn(1, 3, 900, 16) for _ in range(2))
    made, right = (
        hw.attention_with_stats(q, k, k, None, mask, backend=backend).max_logit
        for backend in ("cpu", "reference")
    )
    torch.testing.assert_close(made, right.float(), rtol=1e-5, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("kept", [True, False])
def test_a_mask_of_one_bool_for_all_pairs(backend, kept):
    q, k, v = (torch.randn(2, 2, 40, 8) for _ in range(3))
    mask = lambda b, h, i, j: (i >= 0) == kept
    made, right = (
        hw.attention_with_stats(q, k, v, mask=m, backend=backend)
        for m in (hw.dense(torch.tensor(kept)), mask)
    )
    for a, b in zip(made, right, strict=True):
        torch.testing.assert_close(a, b)


# -- block masks ----------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize(
    "name", ["mask_padding_sink", "mask_by_head", "score_relative_masked", "long_score_twice"]
)
def test_block_masks_small(name, backend):
    check(BY_NAME[name], backend, torch.float64, tile=(16, 8))


@BACKENDS
def test_one_block_mask_for_every_batch_and_head(backend):
    q, k, v = (torch.randn(3, 4, 300, 8) for _ in range(3))
    mask = hw.causal() & hw.sliding_window(70)
    blocks = hw.block_mask(mask, 1, 1, 300, 300)
    torch.testing.assert_close(
        hw.attention(q, k, v, None, blocks, backend=backend),
        hw.attention(q, k, v, None, mask, backend=backend),
    )


# -- scales ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, hw.causal()], ids=["full", "causal"])
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-60])
def test_scales_that_are_not_above_zero(scale, mask):
    """PyTorch's kernel scales after it has masked, which makes NaN of -inf."""
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 2, 20, 8)

    def out(q, k, v, backend="cpu"):
        return hw.attention(q, k, v, None, mask, scale=scale, backend=backend)

    def stats(q, k, v):
        return hw.attention_with_stats(q, k, v, None, mask, scale=scale).out

    truth = out(q, k, v, "reference")
    grads = torch.autograd.grad(truth, (q, k, v), dout)
    for function in (out, stats, torch.compile(out, backend="eager", fullgraph=True)):
        found = function(q, k, v)
        torch.testing.assert_close(found, truth)
        torch.testing.assert_close(torch.autograd.grad(found, (q, k, v), dout), grads)


# -- memory around the tensors --------------------------------------------------------------------


@contextmanager
def _guarded():
    """Every tensor that Python code makes lies between two bands; yields a check of the bands."""
    band, made = 64, []

    def guard(shape, dtype, fill):
        size = math.prod(shape)
        whole = torch.full((size + 2 * band,), 7, dtype=dtype)
        inside = whole[band : band + size]
        inside.fill_(fill)
        made.append((whole, size))
        return inside.view(shape)

    def wrap(real, fill, of_tensor):
        def make(*args, **kwargs):
            like = real(*args, **kwargs)
            if like.device.type == "cpu" and like.dtype.is_floating_point:
                return guard(like.shape, like.dtype, fill)
            return like

        return make

    def intact():
        for whole, size in made:
            assert (whole[:band] == 7).all()
            assert (whole[band + size :] == 7).all()
        return len(made)

    with pytest.MonkeyPatch.context() as patch:
        for name, fill in (("empty", math.nan), ("zeros", 0), ("empty_like", math.nan),
                           ("zeros_like", 0)):  # fmt: skip
            patch.setattr(torch, name, wrap(getattr(torch, name), fill, False))
        for name, fill in (("new_empty", math.nan), ("new_zeros", 0)):
            patch.setattr(torch.Tensor, name, wrap(getattr(torch.Tensor, name), fill, True))
        yield intact


@pytest.mark.parametrize(
    "name",
    """length_65 length_127_causal lengths_65_255_end fourteen_8_64_127_causal
    fourteen_4_64_129 layout_guarded mask_causal_late score_relative_masked
    long_causal_window long_score_twice""".split(),
)
def test_nothing_is_written_outside(name):
    """And what is made without being filled is written before it is read: it starts as NaN."""
    with _guarded() as intact:
        check(BY_NAME[name], "cpu", torch.float32)
        check(BY_NAME[name], "cpu", torch.float32, stats=False)
        assert intact()
