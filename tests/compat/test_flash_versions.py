"""The calls of flash-attn 2, 3 and 4 and of PyTorch's varlen: random ones, each sequence by itself
against the definition; and what each of them refuses."""

import inspect
import random
from types import SimpleNamespace

import pytest
import torch

import headway as hw
import oracle
from headway.compat import flash, flash3, flash4, torch_varlen
from headway.errors import HeadwayError

TOLERANCE = {"rtol": 1e-8, "atol": 1e-9}
HQ, HK, D = 4, 2, 8


def curved(score, b, h, q_idx, kv_idx):
    return score + 0.1 * (h + b) * torch.sin(1.0 * q_idx - kv_idx)


def holes(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx + b) % 3 != 0


def one(q, k, v, n, call):
    """The definition for sequence n, (length, heads, width): out, lse and the largest logit."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    offset = k.shape[2] - q.shape[2]
    left, right = call.limits

    def kept(b, h, i, j):
        p = i + offset
        keep = (p - left <= j) if left is not None else j == j
        keep = keep & (j <= p + right) if right is not None else keep & (p == p)
        if call.chunk:
            keep = keep & (p.div(call.chunk, rounding_mode="floor") == j // call.chunk)
        return keep & holes(n, h, i, j) if call.mask else keep

    def score(s, b, h, i, j):
        if call.softcap:
            s = call.softcap * torch.tanh(s / call.softcap)
        if call.slopes is not None:
            slope = call.slopes[n, h] if call.slopes.dim() == 2 else call.slopes[h]
            s = s - slope * (i + offset - j).abs()
        return curved(s, n, h, i, j) if call.score else s

    made = oracle.attention(q, k, v, score, kept, scale=call.scale, sink=call.sink)
    return made.out[0].transpose(0, 1), made.lse[0], made.max_logit[0]


class Sequences:
    """Random sequences: packed by offsets or in padded rows, whole or used in part, in pages."""

    def __init__(self, heads, padded, used, *, most=14, paged=False, spare=0, lengths=None):
        self.lengths = lengths or [random.choice([0, 1, most, random.randint(2, most)])
                                   for _ in range(3)]  # fmt: skip
        self.most = max(*self.lengths, 1)
        room = [n + random.randint(0, 3) * used for n in self.lengths]
        self.cu = None
        if padded or paged:
            row = 16 if paged else self.most + 2 * used
            starts = [row * n for n in range(3)]
            tokens = 3 * row
            if not used and not paged:
                self.lengths = [row] * 3
        else:
            self.cu = torch.tensor([0, *room]).cumsum(0).int()
            starts, tokens = self.cu[:-1].tolist(), int(self.cu[-1]) + spare
        self.used = torch.tensor(self.lengths).int() if used or paged else None
        self.spans = [slice(a, a + n) for a, n in zip(starts, self.lengths, strict=True)]
        self.tensors = [
            torch.randn(tokens, heads, D, dtype=torch.float64, requires_grad=True)
            for _ in range(2 if heads == HK else 1)
        ]
        rows = (lambda x: x.view(3, -1, heads, D)) if padded and not paged else lambda x: x
        self.given = [rows(x) for x in self.tensors]
        self.table = None
        if paged:  # pages of 4 tokens, in any order
            order = torch.randperm(12)
            self.table = order.argsort().view(3, 4).int()
            self.given = [x.view(12, 4, heads, D)[order] for x in self.tensors]


def draw(**fixed):
    """Random options that every version has."""
    limits = random.choice([(None, None), (None, 0), (3, 0), (2, 1), (None, 2), (4, None)])
    call = SimpleNamespace(
        limits=limits, chunk=0, softcap=random.choice([0.0, 2.0]), slopes=None, score=False,
        mask=False, scale=random.choice([None, 0.4]), sink=None,
    )  # fmt: skip
    vars(call).update(fixed)
    return call


def window(call):
    return tuple(-1 if n is None else n for n in call.limits)


def judge(call, q, k, out, lse, max_logit=None):
    """Results of every sequence, 0 elsewhere, and gradients through out and lse."""
    if out.dim() == 4:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    there = torch.zeros(len(out), dtype=torch.bool)
    parts = []
    for n, (i, j) in enumerate(zip(q.spans, k.spans, strict=True)):
        parts.append(one(q.tensors[0][i], k.tensors[0][j], k.tensors[1][j], n, call))
        there[i] = True
    rows = torch.cat([torch.arange(i.start, i.stop) for i in q.spans])
    truth = (
        torch.zeros_like(out).index_copy(0, rows, torch.cat([o for o, _, _ in parts])),
        torch.zeros_like(lse).index_copy(1, rows, torch.cat([l for _, l, _ in parts], 1)),
    )
    torch.testing.assert_close(out, truth[0], **TOLERANCE)
    torch.testing.assert_close(lse[:, there], truth[1][:, there], **TOLERANCE)
    if max_logit is not None:
        torch.testing.assert_close(
            max_logit, torch.stack([m for _, _, m in parts]).amax(0), **TOLERANCE
        )
    if not (out.requires_grad and there.any()):
        return
    leaves = [*q.tensors, *k.tensors]
    leaves += [x for x in (call.sink, call.slopes) if x is not None and x.requires_grad]
    weights = torch.randn_like(out), torch.randn_like(lse)
    grads = []
    for o, l in ((out, lse), truth):
        l = torch.where(l.isfinite() & there, l, 0.0)
        total = (o * weights[0]).sum() + (l * weights[1]).sum()
        grads.append(
            torch.autograd.grad(
                total, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        )
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def sink():
    return (
        torch.randn(HQ, dtype=torch.float64, requires_grad=True) if random.random() < 0.5 else None
    )


@pytest.mark.parametrize("seed", range(12))
def test_flash_2_packed(seed):
    paged = seed % 3 == 2
    q = Sequences(HQ, False, False, spare=random.choice([0, 5]))
    k = Sequences(HK, False, False, spare=random.choice([0, 7]), paged=paged)
    slopes = torch.rand(3, HQ, dtype=torch.float64, requires_grad=True)
    slopes = random.choice([None, slopes, slopes[0].detach().requires_grad_()])
    call = draw(slopes=slopes, sink=sink())
    cu_k = k.cu if k.cu is not None else torch.tensor([0, *k.lengths]).cumsum(0).int()
    for trained in (True, False):
        with torch.set_grad_enabled(trained):
            out, lse, _ = flash.flash_attn_varlen_func(
                q.given[0], *k.given, q.cu, cu_k, q.most, k.most, 0.0, call.scale,
                window_size=window(call), softcap=call.softcap, alibi_slopes=call.slopes,
                return_attn_probs=True, block_table=k.table, learnable_sink=call.sink,
            )  # fmt: skip
        judge(call, q, k, out, lse)


@pytest.mark.parametrize("seed", range(14))
def test_flash_3_sequences(seed):
    q = Sequences(HQ, seed % 2 == 0, random.random() < 0.6)
    k = Sequences(HK, seed % 3 == 0, random.random() < 0.6)
    call = draw(chunk=random.choice([0, 4]), sink=sink())
    out, lse = flash3.flash_attn_varlen_func(
        q.given[0], *k.given, q.cu, k.cu, None, None, q.used, k.used, call.scale,
        window_size=window(call), attention_chunk=call.chunk, softcap=call.softcap, num_splits=2,
        pack_gqa=True, sm_margin=3, return_attn_probs=True, learnable_sink=call.sink,
    )  # fmt: skip
    judge(call, q, k, out, lse)


@pytest.mark.parametrize("seed", range(20))
def test_flash_4_sequences(seed):
    paged = seed % 4 == 3
    q = Sequences(HQ, seed % 2 == 0, random.random() < 0.6)
    k = Sequences(HK, seed % 3 == 0, random.random() < 0.6, paged=paged)
    mask = random.random() < 0.4
    limits = random.choice([(None, None), (None, 0), (-1, None), (None, -2), (4, -1), (-2, 5)])
    call = draw(
        limits=(None, None) if mask else limits, mask=mask, score=random.random() < 0.4,
        softcap=0.0, sink=sink(),
    )  # fmt: skip
    for trained in (True, False):
        with torch.set_grad_enabled(trained):
            out, lse = flash4.flash_attn_varlen_func(
                q.given[0], *k.given, cu_seqlens_q=q.cu, cu_seqlens_k=k.cu, seqused_q=q.used,
                seqused_k=k.used, page_table=k.table, softmax_scale=call.scale,
                window_size=call.limits, learnable_sink=call.sink, num_splits=3,
                score_mod=curved if call.score else None, mask_mod=holes if mask else None,
                return_lse=True,
            )  # fmt: skip
        judge(call, q, k, out, lse)


@pytest.mark.parametrize("seed", range(12))
def test_torch_varlen(seed):
    paged = seed % 3 == 2
    q = Sequences(HQ, False, False, spare=random.choice([0, 5]))
    k = Sequences(HK, False, random.random() < 0.5, spare=random.choice([0, 7]), paged=paged)
    call = draw(softcap=0.0)
    words = {
        "scale": call.scale, "window_size": window(call), "enable_gqa": True, "seqused_k": k.used,
        "block_table": k.table, "num_splits": 1,
    }  # fmt: skip
    tensors = q.given[0], *k.given, q.cu, k.cu, 20, 20
    for trained in (True, False):
        with torch.set_grad_enabled(trained):
            judge(call, q, k, *torch_varlen.varlen_attn_with_stats(*tensors, **words))
            out, lse = torch_varlen.varlen_attn(
                *tensors, return_aux=torch_varlen.AuxRequest(lse=True), **words
            )
            judge(call, q, k, out, lse)
    with torch.no_grad():
        into = torch.full_like(out, torch.nan)
        assert torch_varlen.varlen_attn_out(into, *tensors, **words) is into
        torch.testing.assert_close(into, out, **TOLERANCE)


def whole(length_q, length_k):
    q = Sequences(HQ, True, False, lengths=[length_q] * 3)
    return q, Sequences(HK, True, False, lengths=[length_k] * 3)


@pytest.mark.parametrize("seed", range(12))
def test_flash_3_and_4_dense(seed):
    q, k = whole(random.choice([1, 9, 14]), random.choice([2, 9, 14]))
    call = draw(chunk=random.choice([0, 5]), sink=sink())
    out, lse = flash3.flash_attn_func(
        q.given[0], *k.given, call.scale, window_size=window(call), attention_chunk=call.chunk,
        softcap=call.softcap, return_attn_probs=True, learnable_sink=call.sink,
    )  # fmt: skip
    judge(call, q, k, out, lse)
    limits = random.choice([(None, None), (None, 0), (-1, None), (None, -2), (4, -1), (-2, 5)])
    call = draw(limits=limits, score=random.random() < 0.5, softcap=0.0, sink=sink())
    out, lse = flash4.flash_attn_func(
        q.given[0], *k.given, None, None, call.scale, False, limits, call.sink,
        score_mod=curved if call.score else None, return_lse=True,
    )  # fmt: skip
    judge(call, q, k, out, lse)
    call = draw(limits=(None, None), mask=True, softcap=0.0)
    out, lse = flash4.flash_attn_func(
        q.given[0], *k.given, softmax_scale=call.scale, mask_mod=holes, return_lse=True
    )
    judge(call, q, k, out, lse)


@pytest.mark.parametrize("trained", [False, True])
def test_pages_without_lengths_are_full(trained):
    k = torch.randn(6, 4, HK, D, dtype=torch.float64, requires_grad=trained)
    q, table = torch.randn(2, 3, HQ, D, dtype=torch.float64), torch.tensor([[4, 0], [2, 5]]).int()
    out, _ = flash4.flash_attn_varlen_func(q, k, k, page_table=table, causal=True)
    keys = k[table.long()].flatten(1, 2)
    torch.testing.assert_close(out, flash.flash_attn_func(q, keys, keys, causal=True), **TOLERANCE)


def test_windows_without_a_key_and_causal():
    """FlashAttention-4 drops a window that holds no key."""
    q, k = whole(9, 9)
    for limits, causal, same in (
        ((-1, -1), False, (None, None)), ((-1, None), True, (None, 0)), ((3, None), True, (3, 0)),
        ((2, -3), False, (None, None)),
    ):  # fmt: skip
        out, lse = flash4.flash_attn_func(
            q.given[0], *k.given, causal=causal, window_size=limits, return_lse=True
        )
        judge(draw(limits=same, softcap=0.0, scale=None), q, k, out, lse)


def test_negative_windows_are_no_limit_in_2_and_3():
    q, k = whole(6, 9)
    plain = flash.flash_attn_func(q.given[0], *k.given)
    for window_size in ((-3, -7), torch.tensor([-2, -1]), (None, -5)):
        assert torch.equal(
            flash.flash_attn_func(q.given[0], *k.given, window_size=window_size), plain
        )
        assert torch.equal(
            flash3.flash_attn_func(q.given[0], *k.given, window_size=window_size), plain
        )


@pytest.mark.parametrize("packed", [False, True])
def test_qv_is_a_second_product(packed):
    q, k = whole(7, 9)
    qv = torch.randn(3, 7, HQ, D, dtype=torch.float64, requires_grad=True)
    joined = torch.cat((q.given[0], qv), -1), torch.cat(k.given, -1), k.given[1]
    expected = flash.flash_attn_func(*joined, causal=True)
    cu = torch.arange(4).int()
    if packed:
        flat = [x.flatten(0, 1) for x in (q.given[0], *k.given, qv)]
        out = flash3.flash_attn_varlen_func(
            *flat[:3], cu * 7, cu * 9, 7, 9, causal=True, qv=flat[3]
        ).view_as(expected)
    else:
        out = flash3.flash_attn_func(q.given[0], *k.given, None, True, qv)
        torch.testing.assert_close(
            flash4.flash_attn_func(q.given[0], *k.given, qv, causal=True)[0], expected, **TOLERANCE
        )
    torch.testing.assert_close(out, expected, **TOLERANCE)
    tensors = q.given[0], *k.given, qv
    assert flash4.flash_attn_func(*tensors, return_lse=True)[1].shape == (3, 7, HQ)
    assert flash4.flash_attn_func(*tensors[:3])[1].shape == (3, HQ, 7)
    alone, lse = flash4.flash_attn_func(None, None, k.given[1], qv, return_lse=True)
    torch.testing.assert_close(
        alone, flash.flash_attn_func(qv, k.given[1], k.given[1]), **TOLERANCE
    )
    assert lse.shape == (3, 7, HQ)
    with torch.no_grad():
        assert flash4.flash_attn_func(*tensors)[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_scales_multiply_q_k_and_v(dtype):
    q, k, v = (torch.randn(2, 9, h, 16).to(dtype) for h in (4, 2, 2))
    scales = [0.5 + torch.rand(2, 2) for _ in range(3)]
    wide = [
        x.float() * s.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, s in zip((q, k, v), scales, strict=True)
    ]
    expected = flash.flash_attn_func(*wide, causal=True)
    out = flash3.flash_attn_func(q, k, v, None, True, None, *scales)
    assert out.dtype == (torch.float32 if dtype == torch.float32 else torch.bfloat16)
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype != torch.float32 else {}
    torch.testing.assert_close(out.float(), expected, **close)
    cu = torch.tensor([0, 9, 18]).int()
    packed = flash3.flash_attn_varlen_func(
        *[x.flatten(0, 1) for x in (q, k, v)], cu, cu, 9, 9, None, None, None, True, None, *scales
    )
    torch.testing.assert_close(packed.view_as(out), out)


def test_packed_forms():
    q, k = whole(9, 9)
    qkv = torch.randn(18, 3, HQ, D, dtype=torch.float64)
    cu = torch.tensor([0, 7, 18]).int()
    expected = flash.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 11, 11, causal=True)
    assert torch.equal(flash.flash_attn_varlen_qkvpacked_func(qkv, cu, 11, causal=True), expected)
    assert torch.equal(
        flash.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], cu, cu, 11, 11, causal=True),
        expected,
    )
    dense = qkv.view(2, 9, 3, HQ, D)
    expected = flash.flash_attn_qkvpacked_func(dense, causal=True)
    assert torch.equal(flash3.flash_attn_qkvpacked_func(dense, causal=True), expected)
    mixed = torch.cat((q.given[0], *k.given), 2)
    expected = flash.flash_attn_func(q.given[0], *k.given, causal=True)
    ours = flash3.flash_attn_qkvpacked_func(mixed, causal=True, num_heads_q=HQ)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("with_mask", [False, True])
def test_blocks(with_mask):
    """Blocks of 8 by 4: the partial ones are where the mask decides."""
    q, k = whole(16, 12)
    state = torch.randint(0, 3, (3, HQ, 2, 3))
    count = lambda kind: (state == kind).sum(-1).int()
    index = lambda kind: (state == kind).int().sort(dim=-1, descending=True, stable=True)[1].int()
    blocks = flash4.BlockSparseTensorsTorch(
        count(1), index(1), count(2), index(2), block_size=(8, 4)
    )
    out, lse = flash4.flash_attn_func(
        q.given[0], *k.given, mask_mod=holes if with_mask else None, block_sparse_tensors=blocks,
        block_sparse_tensors_bwd=blocks, return_lse=True,
    )  # fmt: skip

    def kept(b, h, i, j):
        of_pair = state[b, h, i // 8, j // 4]
        return (of_pair == 2) | ((of_pair == 1) & (holes(b, h, i, j) if with_mask else j == j))

    tensors = [x.transpose(1, 2) for x in (q.given[0], *k.given)]
    truth = oracle.attention(*tensors, lambda s, *_: s, kept)
    torch.testing.assert_close(out, truth.out.transpose(1, 2), **TOLERANCE)
    torch.testing.assert_close(lse, truth.lse, **TOLERANCE)
    grads = [torch.autograd.grad(x.sin().sum(), q.tensors + k.tensors)
             for x in (out, truth.out.transpose(1, 2))]  # fmt: skip
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_combine_of_packed_and_partly_used_parts():
    parts, lse = torch.randn(3, 2, 6, HQ, D), torch.randn(3, 2, 6, HQ)
    lse[:, 0, 1] = -torch.inf
    parts[0, 0, 1] = torch.nan  # was never written
    weights = lse.softmax(0).nan_to_num(0)
    truth = (weights[..., None] * parts.nan_to_num(0)).sum(0)
    out, total = flash4.flash_attn_combine(parts, lse, return_lse=True)
    torch.testing.assert_close(out, truth)
    assert flash4.flash_attn_combine(parts, lse, return_lse=False)[1] is None
    used = torch.tensor([3, 5]).int()
    order = torch.tensor([1, 0]).int()
    there = torch.arange(6) < used[:, None]
    some, lse_there = flash4.flash_attn_combine(parts, lse, seqused=used, virtual_batch_idx=order)
    torch.testing.assert_close(some, torch.where(there[..., None, None], truth, 0.0))
    torch.testing.assert_close(lse_there[there], total[there])
    into = torch.full_like(truth, 7.0)
    flash4.flash_attn_combine(parts, lse, into, seqused=used)
    torch.testing.assert_close(into, torch.where(there[..., None, None], truth, 7.0))
    cu = torch.tensor([0, 6, 11]).int()
    packed, _ = flash4.flash_attn_combine(
        parts.flatten(1, 2), lse.flatten(1, 2), cu_seqlens=cu, seqused=used
    )
    there = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)[:, None, None]
    torch.testing.assert_close(packed, torch.where(there, truth.flatten(0, 1), 0.0))
    ours = flash3.flash_attn_combine(parts, lse, None, torch.bfloat16)[0]
    torch.testing.assert_close(ours, truth.to(torch.bfloat16))


def test_signatures():
    """The names and the order of the originals', ours are keywords after them."""
    first = {
        flash.flash_attn_varlen_qkvpacked_func: "qkv cu_seqlens max_seqlen dropout_p",
        flash.flash_attn_varlen_kvpacked_func: (
            "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p"
        ),
        flash3.flash_attn_func: (
            "q k v softmax_scale causal qv q_descale k_descale v_descale window_size "
            "attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs"
        ),
        flash3.flash_attn_varlen_func: (
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
            "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk "
            "softcap num_splits pack_gqa deterministic sm_margin return_attn_probs"
        ),
        flash3.flash_attn_qkvpacked_func: (
            "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk "
            "softcap deterministic num_heads_q sm_margin return_attn_probs"
        ),
        flash3.flash_attn_with_kvcache: (
            "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
            "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens "
            "q_descale k_descale v_descale softmax_scale causal window_size attention_chunk "
            "softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
            "return_softmax_lse"
        ),
        flash4.flash_attn_func: (
            "q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap "
            "num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod aux_tensors "
            "aux_scalars block_sparse_tensors block_sparse_tensors_bwd return_lse"
        ),
        flash4.flash_attn_varlen_func: (
            "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q "
            "seqused_k gather_kv_indices page_table softmax_scale causal window_size "
            "learnable_sink softcap num_splits pack_gqa deterministic score_mod score_mod_bwd "
            "mask_mod block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata "
            "seqlen_k_per_split disable_scheduler_metadata"
        ),
    }  # fmt: skip
    for function, names in first.items():
        parameters = list(inspect.signature(function).parameters.values())
        assert [p.name for p in parameters][: len(names.split())] == names.split()
        assert all(p.kind == p.KEYWORD_ONLY for p in parameters[len(names.split()) :]) or (
            "packed" in function.__name__
        )
    pytest.importorskip("torch.nn.attention.varlen")
    from torch.nn.attention import varlen

    for name in ("varlen_attn", "varlen_attn_out"):
        theirs = inspect.signature(getattr(varlen, name)).parameters.values()
        ours = inspect.signature(getattr(torch_varlen, name)).parameters
        for p in theirs:
            assert ours[p.name].kind == p.kind
            assert ours[p.name].default == p.default


def test_metadata_is_passed_on():
    lengths = torch.tensor([5, 7]).int()
    metadata = flash3.get_scheduler_metadata(2, 1, 16, 4, 2, 8, lengths, causal=True)
    q, k = torch.randn(2, 1, 4, 8), torch.randn(2, 16, 2, 8)
    ours = flash3.flash_attn_with_kvcache(
        q, k, k, cache_seqlens=lengths, scheduler_metadata=metadata, causal=True
    )
    torch.testing.assert_close(ours, flash.flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths))
    assert flash4.get_scheduler_metadata(1, 16, 4, 2, 8, 1, seqused_k=lengths) is None


@pytest.mark.parametrize("q_len", [1, 6])
def test_chunks_of_a_cache(q_len):
    q, k, v = torch.randn(2, q_len, 4, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    lengths = torch.tensor([9, 13]).int()
    out = flash3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=True, attention_chunk=4
    )
    for n, length in enumerate(lengths.tolist()):
        row = flash3.flash_attn_func(
            q[n : n + 1], k[n : n + 1, :length], v[n : n + 1, :length], causal=True,
            attention_chunk=4,
        )  # fmt: skip
        torch.testing.assert_close(out[n : n + 1], row)


def test_a_cache_in_float8():
    narrow = torch.float8_e4m3fn
    q, new = (torch.randn(2, 3, h, 16).to(narrow) for h in (4, 2))
    k, v = (torch.randn(2, 16, 2, 16).to(narrow) for _ in range(2))
    lengths, scales = torch.tensor([9, 13]).int(), 0.5 + torch.rand(3, 2, 2)
    words = {"cache_seqlens": lengths, "causal": True}
    wide = [x.float() for x in (q, k, v, new, new)]
    wide[0] *= scales[0].repeat_interleave(2, 1)[:, None, :, None]
    for x, scale in zip(wide[1:], scales[[1, 2, 1, 2]], strict=True):
        x *= scale[:, None, :, None]
    out = flash3.flash_attn_with_kvcache(
        q, k, v, new, new, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2], **words
    )
    assert out.dtype == torch.bfloat16
    expected = flash3.flash_attn_with_kvcache(*wide, **words)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("version", [flash, flash3, flash4])
def test_compiled(version):
    q = Sequences(HQ, False, False, lengths=[5, 9, 2])
    k = Sequences(HK, False, False, lengths=[5, 9, 2])

    def call(q, k, v, cu):
        out = version.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=9, max_seqlen_k=9, causal=True
        )
        return out[0] if isinstance(out, tuple) else out

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    tensors = q.given[0], *k.given, q.cu
    torch.testing.assert_close(compiled(*tensors), call(*tensors), **TOLERANCE)


Q, K = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
P, R, CU = Q.flatten(0, 1), K.flatten(0, 1), torch.tensor([0, 4, 10]).int()
TABLE = torch.zeros(2, 3).int()


def cute(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score


def packed3(**words):
    return flash3.flash_attn_varlen_func(P, R, R, CU, CU, 6, 6, **words)


def packed4(**words):
    return flash4.flash_attn_varlen_func(P, R, R, cu_seqlens_q=CU, cu_seqlens_k=CU, **words)


REFUSED = {
    "CuTe score": ("PyTorch's ops", lambda: flash4.flash_attn_func(Q, K, K, score_mod=cute)),
    "CuTe mask": ("PyTorch's ops", lambda: flash4.flash_attn_func(Q, K, K, mask_mod=cute)),
    "aux": ("capture", lambda: flash4.flash_attn_func(Q, K, K, score_mod=curved, aux_tensors=[Q])),
    "score_mod_bwd": ("score_mod_bwd", lambda: flash4.flash_attn_func(Q, K, K, score_mod_bwd=cute)),
    "gather": ("gather_kv_indices", lambda: flash4.flash_attn_func(Q, K, K, None, TABLE)),
    "order of 3 in 4": (
        "qv must be a tensor", lambda: flash4.flash_attn_func(Q, K, K, 0.25)
    ),
    "order of 2 in 3": ("causal", lambda: flash3.flash_attn_func(Q, K, K, 0.1, None, True)),
    "mask and window": (
        "mask_mod", lambda: flash4.flash_attn_func(Q, K, K, causal=True, mask_mod=holes)
    ),
    "mask of another number of sequences": (
        r"padding.*\(3,\)", lambda: packed4(mask_mod=hw.padding(torch.tensor([1, 2, 3])))
    ),
    "score is a number": (r"score=3 is not callable", lambda: packed4(score_mod=3)),
    "softcap and score": (
        "softcap", lambda: flash4.flash_attn_func(Q, K, K, softcap=2.0, score_mod=curved)
    ),
    "seqused": ("seqused_k", lambda: packed3(seqused_k=torch.tensor([9, 1]).int())),
    "seqused shape": ("seqused_q", lambda: packed4(seqused_q=torch.tensor([1]).int())),
    "seqused below 0": ("seqused_k", lambda: packed4(seqused_k=torch.tensor([-1, 1]).int())),
    "no offsets": ("cu_seqlens_q", lambda: flash3.flash_attn_varlen_func(P, R, R, None, CU, 6, 6)),
    "counts differ": (
        "3 sequences|sequences and k",
        lambda: flash4.flash_attn_varlen_func(P, K, K, cu_seqlens_q=torch.tensor([0, 1, 2, 10]).int()),
    ),
    "pages and offsets": (
        "page_table",
        lambda: flash4.flash_attn_varlen_func(
            P, K, K, cu_seqlens_q=CU, cu_seqlens_k=CU, page_table=TABLE
        ),
    ),
    "page out of range": (
        "page", lambda: flash.flash_attn_varlen_func(
            P.requires_grad_(), K, K, CU, CU, 6, 6, block_table=TABLE + 7
        ),
    ),
    "rows of the table": (
        "table", lambda: flash.flash_attn_varlen_func(P, K, K, CU, CU, 6, 6, block_table=TABLE[:1]),
    ),
    "tuning": ("num_splits", lambda: flash3.flash_attn_func(Q, K, K, num_splits=None)),
    "chunk": ("attention_chunk", lambda: flash3.flash_attn_func(Q, K, K, attention_chunk=-1)),
    "descale": ("q_descale", lambda: flash3.flash_attn_func(Q, K, K, q_descale=torch.ones(2, 4))),
    "qv": ("qv", lambda: flash3.flash_attn_func(Q, K, K, qv=Q[..., :3])),
    "heads packed": (
        "num_heads_q", lambda: flash3.flash_attn_qkvpacked_func(Q, num_heads_q=4)
    ),
    "blocks": (
        "block_sparse_tensors", lambda: flash4.flash_attn_func(
            Q, K, K, block_sparse_tensors=flash4.BlockSparseTensorsTorch(
                torch.ones(2, 4, 2).int(), torch.zeros(2, 4, 2, 1).int()
            )
        ),
    ),
    "order of rows": (
        "virtual_batch_idx", lambda: flash4.flash_attn_combine(
            torch.ones(2, 2, 3, 4, 8), torch.ones(2, 2, 3, 4),
            virtual_batch_idx=torch.tensor([0, 0]).int(),
        ),
    ),
    "lengths": (
        "block_table", lambda: flash.flash_attn_with_kvcache(
            Q[:, :1], K, K, cache_seqlens=torch.tensor([1, 7]).int()
        ),
    ),
    "gqa": ("enable_gqa", lambda: torch_varlen.varlen_attn(P, R, R, CU, CU, 6, 6)),
    "pages without lengths": (
        "seqused_k", lambda: torch_varlen.varlen_attn(
            P, K, K, CU, None, 6, 6, enable_gqa=True, block_table=TABLE
        ),
    ),
    "cu_seq": (
        "cu_seq_k", lambda: torch_varlen.varlen_attn(P, R, R, CU, CU + 5, 6, 6, enable_gqa=True)
    ),
    "max": ("max_q=2", lambda: torch_varlen.varlen_attn(P, R, R, CU, CU, 2, 6, enable_gqa=True)),
    "out": (
        "out must be", lambda: torch_varlen.varlen_attn_out(
            P[:3], P.detach(), R, R, CU, CU, 6, 6, enable_gqa=True
        ),
    ),
    "out with gradients": (
        "no_grad", lambda: torch_varlen.varlen_attn_out(
            P, P.detach().requires_grad_(), R, R, CU, CU, 6, 6, enable_gqa=True
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    words, call = REFUSED[case]
    with pytest.raises(RuntimeError, match=words) as error:
        call()
    assert isinstance(error.value, HeadwayError)
