"""FlashAttention's signatures, against its documented formulas written densely, per sequence."""

import inspect
import math

import numpy as np
import pytest
import torch

import oracle
from headway.compat import flash
from headway.errors import ArgumentError

TOLERANCE = {"rtol": 1e-8, "atol": 1e-9}


def dense(q, k, v, *, scale=None, causal=False, window=(-1, -1), cap=0.0, slopes=None, sink=None):
    """One batch of `(b, length, h, d)`: (out, lse)."""
    offset = k.shape[1] - q.shape[1]
    left, right = window[0], 0 if causal else window[1]

    def kept(b, h, i, j):
        near = i + offset >= j - right if right >= 0 else i == i
        return near & (i + offset - left <= j) if left >= 0 else near & (j == j)

    def score(s, b, h, i, j):
        s = cap * torch.tanh(s / cap) if cap else s
        if slopes is None:
            return s
        slope = slopes[b, h] if slopes.dim() == 2 else slopes[h]
        return s - slope * (i + offset - j).abs()

    out = oracle.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), score, kept, scale=scale, sink=sink
    )
    return out.out.transpose(1, 2), out.lse


def inputs(q_len, kv_len, hq=4, hk=2, d=8, dv=8, b=2):
    return [
        torch.randn(b, n, h, w, dtype=torch.float64, requires_grad=True)
        for n, h, w in ((q_len, hq, d), (kv_len, hk, d), (kv_len, hk, dv))
    ]


def same(ours, truth, leaves):
    """Results, and gradients through out and lse."""
    weights = [torch.randn_like(x) for x in truth]
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
    finite = [torch.where(x.isfinite(), x, 0.0) for x in (*ours, *truth)]
    grads = [torch.autograd.grad(finite[n : n + 2], leaves, weights) for n in (0, 2)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("lengths", [(9, 9), (5, 12), (12, 5)], ids=str)
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (3, -1)), (False, (2, 1)),
                           (False, (-1, 2)), (False, (4, -1)), (False, (0, 0)), (True, (3, 5))],
)  # fmt: skip
def test_masks(lengths, causal, window):
    q, k, v = inputs(*lengths)
    out, lse, _ = flash.flash_attn_func(
        q, k, v, causal=causal, window_size=window, return_attn_probs=True
    )
    same((out, lse), dense(q, k, v, causal=causal, window=window), (q, k, v))
    if window == (-1, -1):
        nothing = flash.flash_attn_func(q, k, v, causal=causal, window_size=(None, None))
        assert torch.equal(nothing, out)


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("cap", [0.0, 2.5])
def test_softcap_alibi_sinks_and_scale_learn(cap, per_batch):
    q, k, v = inputs(7, 11, dv=5)
    slopes = torch.rand((2, 4) if per_batch else (4,), dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, lse, _ = flash.flash_attn_func(
        q, k, v, 0.0, 0.4, True, softcap=cap, alibi_slopes=slopes, return_attn_probs=True,
        learnable_sink=sink,
    )  # fmt: skip
    truth = dense(q, k, v, scale=0.4, causal=True, cap=cap, slopes=slopes, sink=sink)
    same((out, lse), truth, (q, k, v, slopes, sink))


def test_packed_forms():
    q, k, v = inputs(9, 9, hk=4)
    expected = flash.flash_attn_func(q, k, v, causal=True)
    packed = flash.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True)
    assert torch.equal(packed, expected)
    q, k, v = inputs(5, 9)
    expected = flash.flash_attn_func(q, k, v, window_size=(3, 0), softcap=3.0)
    packed = flash.flash_attn_kvpacked_func(
        q, torch.stack([k, v], 2), window_size=(3, 0), softcap=3.0
    )
    assert torch.equal(packed, expected)


def test_dropout_and_determinism():
    q, k, v = inputs(64, 64)
    out = []
    for _ in range(2):
        torch.manual_seed(3)
        out.append(flash.flash_attn_func(q, k, v, 0.5, deterministic=True))
    assert torch.equal(*out)
    assert not torch.equal(out[0], flash.flash_attn_func(q, k, v))
    with pytest.raises(NotImplementedError, match="return_attn_probs"):
        flash.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)


def packed(lengths_q, lengths_k, hq=4, hk=2, d=8):
    offsets = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lengths_q, lengths_k)]
    sizes = ((sum(lengths_q), hq), (sum(lengths_k), hk), (sum(lengths_k), hk))
    qkv = [torch.randn(n, h, d, dtype=torch.float64, requires_grad=True) for n, h in sizes]
    return qkv, offsets, max(lengths_q), max(lengths_k)


@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (3, 0)), (False, (2, 1))]
)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        ([5, 9, 1, 14], [5, 9, 1, 14]),
        ([3, 0, 7, 2], [6, 4, 5, 0]),
        ([200, 130, 90], [250, 10, 150]),
    ],
    ids=str,
)
def test_varlen_is_each_sequence_by_itself(lengths_q, lengths_k, causal, window, extras):
    (q, k, v), (cu_q, cu_k), most_q, most_k = packed(lengths_q, lengths_k)
    more, theirs = {}, {}
    if extras:
        slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
        sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
        more = {"softcap": 3.0, "alibi_slopes": slopes, "learnable_sink": sink}
        theirs = {"cap": 3.0, "slopes": slopes, "sink": sink}
    leaves = (q, k, v, *((slopes, sink) if extras else ()))
    out, lse, _ = flash.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, most_q, most_k, causal=causal, window_size=window,
        return_attn_probs=True, **more,
    )  # fmt: skip
    assert lse.shape == (4, sum(lengths_q))
    parts = []
    for n, m in zip(cu_q.split(1)[:-1], range(len(lengths_q)), strict=True):
        i = slice(int(n), int(cu_q[m + 1]))
        j = slice(int(cu_k[m]), int(cu_k[m + 1]))
        o, l = dense(q[None, i], k[None, j], v[None, j], causal=causal, window=window, **theirs)
        parts.append((o[0], l[0]))
    truth = torch.cat([o for o, _ in parts]), torch.cat([l for _, l in parts], 1)
    same((out, lse), truth, leaves)


def test_varlen_of_many_tokens_makes_no_square():
    lengths = [64] * 512  # a square of 32768² booleans would be a gigabyte
    (q, k, v), (cu, _), most, _ = packed(lengths, lengths, hq=1, hk=1)
    with torch.no_grad():
        out = flash.flash_attn_varlen_func(q, k, v, cu, cu, most, most, causal=True)
        one = flash.flash_attn_func(*(x[None, 640:704] for x in (q, k, v)), causal=True)
    torch.testing.assert_close(out[640:704], one[0], **TOLERANCE)


def test_varlen_sees_offsets_that_change_in_place():
    (q, k, v), (cu, _), _, _ = packed([4, 8], [4, 8])
    first = flash.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12)
    cu[1] = 8
    second = flash.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12)
    alone = flash.flash_attn_func(*(x[None, :8] for x in (q, k, v)))
    torch.testing.assert_close(second[:8], alone[0], **TOLERANCE)
    assert not torch.equal(first, second)


def test_signatures_begin_with_flash_attn_2s():
    expected = (
        "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
        "return_attn_probs"
    ).split()
    for name, first in (
        ("flash_attn_func", ["q", "k", "v"]),
        ("flash_attn_qkvpacked_func", ["qkv"]),
        ("flash_attn_kvpacked_func", ["q", "kv"]),
    ):
        given = list(inspect.signature(getattr(flash, name)).parameters)
        assert given[: len(first) + 8] == first + expected
    given = list(inspect.signature(flash.flash_attn_varlen_func).parameters)
    assert given[3:7] == ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert given[7:16] == [*expected, "block_table"]


WINDOWS = {
    "tensor": lambda left, right: torch.tensor([left, right]),
    "int32 tensor": lambda left, right: torch.tensor([left, right], dtype=torch.int32),
    "numbers of NumPy": lambda left, right: (np.int64(left), np.int32(right)),
    "array": lambda left, right: np.array([left, right]),
    "list": lambda left, right: [left, right],
}


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("window", [(3, 0), (-1, 2), (2, -1), (0, 0), (-1, -1)], ids=str)
def test_windows_of_anybodys_numbers(kind, window):
    q, k, v = inputs(6, 9)
    (p, r, s), (cu, cu_k), most, most_k = packed([4, 8], [5, 9])
    given = WINDOWS[kind](*window)
    for causal in (False, True):
        ours = flash.flash_attn_func(q, k, v, causal=causal, window_size=given)
        assert torch.equal(ours, flash.flash_attn_func(q, k, v, causal=causal, window_size=window))
        ours, plain = (
            flash.flash_attn_varlen_func(
                p, r, s, cu, cu_k, most, most_k, causal=causal, window_size=w
            ) for w in (given, window)
        )  # fmt: skip
        assert torch.equal(ours, plain)


def test_numbers_of_numpy():
    q, k, v = inputs(6, 9)
    ours = flash.flash_attn_func(q, k, v, np.float32(0), np.float32(0.5), softcap=np.float64(2.0))
    assert torch.equal(ours, flash.flash_attn_func(q, k, v, 0.0, 0.5, softcap=2.0))


SLOPES = torch.rand(4, dtype=torch.float64)
# Calls in the order of flash-attn 3 or 4, of their packed forms, and of flash-attn 1's Triton.
OTHER_ORDERS = {
    "3: scale, causal": ("softmax_scale", lambda f: f(0.25, True)),
    "3: scale, not causal": ("softmax_scale", lambda f: f(0.25, False)),
    "3: no scale, causal": ("dropout_p", lambda f: f(None, True)),
    "3: no scale": ("dropout_p", lambda f: f(None)),
    "3: scale, causal, qv": ("softmax_scale", lambda f: f(0.25, True, None)),
    "4: scale, causal, window": ("softmax_scale", lambda f: f(0.25, True, (None, None))),
    "4: qv first": ("dropout_p", lambda f: f(SLOPES, 0.25, True)),
    "1: bias, causal": ("dropout_p", lambda f: f(SLOPES, True)),
    "causal first": ("dropout_p", lambda f: f(True)),
    "window in the place of causal": ("causal", lambda f: f(0.0, None, (3, 0))),
    "scale in the place of causal": ("causal", lambda f: f(0.0, None, 0.25)),
    "cap in the place of the window": ("window_size", lambda f: f(0.0, None, True, 30.0)),
    "slopes in the place of the cap": ("softcap", lambda f: f(0.0, None, True, (3, 0), SLOPES)),
    "a flag in the place of the cap": ("softcap", lambda f: f(0.0, None, True, (3, 0), True)),
    "a flag in the place of slopes": (
        "alibi_slopes", lambda f: f(0.0, None, True, (3, 0), 0.0, True)
    ),
    "a tensor in the place of a flag": (
        "deterministic", lambda f: f(0.0, None, True, (3, 0), 0.0, None, SLOPES)
    ),
    "a window of fractions": ("window_size", lambda f: f(0.0, None, True, (3.0, 0.0))),
    "a window of flags": ("window_size", lambda f: f(0.0, None, True, (True, False))),
    "a window of three": ("window_size", lambda f: f(0.0, None, True, (3, 0, 0))),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_ORDERS)
@pytest.mark.parametrize("kind", ["plain", "kvpacked", "qkvpacked", "varlen"])
def test_the_order_of_another_flash_attn_is_refused_by_name(kind, case):
    q, k, v = (x.detach() for x in inputs(5, 5, hk=4))
    cu = torch.tensor([0, 5], dtype=torch.int32)
    call = {
        "plain": lambda *words: flash.flash_attn_func(q, k, v, *words),
        "kvpacked": lambda *words: flash.flash_attn_kvpacked_func(
            q, torch.stack([k, v], 2), *words
        ),
        "qkvpacked": lambda *words: flash.flash_attn_qkvpacked_func(
            torch.stack([q, k, v], 2), *words
        ),
        "varlen": lambda *words: flash.flash_attn_varlen_func(
            q[0], k[0], v[0], cu, cu, 5, 5, *words
        ),
    }[kind]
    name, given = OTHER_ORDERS[case]
    with pytest.raises(RuntimeError, match=f"^{name}") as error:
        given(call)
    assert isinstance(error.value, ArgumentError)
    if name in ("softmax_scale", "dropout_p", "causal"):
        assert "softmax_scale=0.25, causal=True" in str(error.value)


def test_the_order_of_another_varlen_is_refused_by_name():
    """flash-attn 3 has seqused_q and seqused_k before the scale."""
    used = torch.tensor([2, 3], dtype=torch.int32)
    for words in ((None, None, 0.25, True), (used, used, 0.25, True), (None, None, None, True)):
        with pytest.raises(RuntimeError, match=r"^dropout_p"):
            flash.flash_attn_varlen_func(P, P, P, CU, CU, 3, 3, *words)


Q = torch.randn(2, 5, 4, 8)
P = torch.randn(5, 4, 8)
CU = torch.tensor([0, 2, 5], dtype=torch.int32)
BAD = {
    "rank": lambda: flash.flash_attn_func(Q[0], Q, Q),
    "heads": lambda: flash.flash_attn_func(Q, Q[:, :, :3], Q[:, :, :3]),
    "batch": lambda: flash.flash_attn_func(Q, Q[:1], Q[:1]),
    "widths": lambda: flash.flash_attn_func(Q, torch.randn(2, 5, 4, 7), Q),
    "dtypes": lambda: flash.flash_attn_func(Q, Q.double(), Q),
    "dropout": lambda: flash.flash_attn_func(Q, Q, Q, 1.0),
    "window": lambda: flash.flash_attn_func(Q, Q, Q, window_size=(True, 0)),
    "window packed": lambda: flash.flash_attn_varlen_func(P, P, P, CU, CU, 3, 3, window_size=3),
    "softcap": lambda: flash.flash_attn_func(Q, Q, Q, softcap=-1.0),
    "slopes": lambda: flash.flash_attn_func(Q, Q, Q, alibi_slopes=torch.ones(3, 4)),
    "sink": lambda: flash.flash_attn_func(Q, Q, Q, learnable_sink=torch.ones(3)),
    "qkv": lambda: flash.flash_attn_qkvpacked_func(Q),
    "kv": lambda: flash.flash_attn_kvpacked_func(Q, torch.randn(2, 5, 3, 4, 8)),
    "offsets": lambda: flash.flash_attn_varlen_func(P, P, P, CU.float(), CU, 3, 3),
    "offsets begin": lambda: flash.flash_attn_varlen_func(P, P, P, CU - 1, CU, 3, 3),
    "offsets end": lambda: flash.flash_attn_varlen_func(P, P, P, CU * 2, CU, 6, 3),
    "offsets number": lambda: flash.flash_attn_varlen_func(P, P, P, CU[[0, 2]], CU, 5, 3),
    "too long": lambda: flash.flash_attn_varlen_func(P, P, P, CU, CU, 2, 3),
    "packed rank": lambda: flash.flash_attn_varlen_func(Q, P, P, CU, CU, 3, 3),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
def test_refused_as_the_original_does(call):
    with pytest.raises(RuntimeError, match=r"\w") as error:
        call()
    assert isinstance(error.value, ArgumentError)


def test_compiles_whole():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(q, k, v, cu):
        return flash.flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, causal=True, softcap=4.0)

    (q, k, v), (cu, _), most, _ = packed([5, 9], [5, 9])
    out = flash.flash_attn_varlen_func(q, k, v, cu, cu, most, most, causal=True, softcap=4.0)
    torch.testing.assert_close(f(q, k, v, cu), out)
    assert math.isfinite(out.sum())
