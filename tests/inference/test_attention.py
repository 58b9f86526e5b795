"""Attention over caches equals attention over each row's own keys."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import headway as hw
from cases import CASES, problem
from headway import inference
from headway.errors import ArgumentError
from headway.types import FLOAT8

from .gather import Caches, by_rows, caches, paged

BACKENDS = ["cpu", "reference"]
LENGTHS = [0, 1, 7, 8, 9, 40]
SQUARE = [  # every score and mask of the table whose sequences are as long as their keys
    c for c in CASES if c.q_len == c.kv_len and c.name in (f"mask_{c.mask}", f"score_{c.score}_masked")
]  # fmt: skip


def close(result: tuple, wanted: list[Tensor], tolerance: float = 2e-5) -> None:
    for x, y in zip(result, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("group", "hk"), [(1, 2), (5, 1), (7, 2), (8, 1)])
def test_rows_of_any_length_in_pages_and_without(backend, group, hk):
    c = caches(LENGTHS, group * hk, hk, dv=12)
    score = hw.alibi(group * hk) >> hw.softcap(20.0)
    wanted = by_rows(c, score, hw.causal())
    in_pages = inference.attention_with_stats(
        c.q, c.k, c.v, score, hw.causal(), backend=backend, **c.options
    )
    close(in_pages, wanted)
    plain = inference.attention_with_stats(
        c.q, *c.contiguous(), score, hw.causal(), lengths=c.lengths, backend=backend
    )
    for x, y in zip(plain, in_pages, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_the_function_that_trained_serves(case):
    """The last queries of a sequence, by the score and mask of the whole."""
    case = replace(case, captured="accumulate")
    p = problem(case, torch.float32)
    score, mask = p.score(), p.mask()
    options = {"scale": case.scale, "sink": p.sink}
    whole = hw.attention_with_stats(
        p.q.double(), p.k.double(), p.v.double(), score, mask, backend="reference", **options
    )
    count = min(5, case.q_len)
    seen = whole.lse[whole.lse.isfinite()].abs()
    tolerance = 5e-5 * max(1.0, *seen.flatten().tolist(), 0.0)
    k, v, table = paged(p.k, p.v, 16)
    lengths = torch.full((case.b,), case.kv_len, dtype=torch.int32)
    for n, k_, v_, pages, backend in (
        (1, p.k, p.v, None, "cpu"), (count, k, v, table, "cpu"), (count, k, v, table, "reference"),
    ):  # fmt: skip
        got = inference.attention_with_stats(
            p.q[:, :, -n:], k_, v_, score, mask, lengths=lengths, page_table=pages,
            backend=backend, **options,
        )  # fmt: skip
        close(got[:2], [x[:, :, -n:] for x in whole[:2]], tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_and_many_queries_packed(backend):
    """Decoding and chunks of prompts in one call; tokens of nobody get 0."""
    c = caches([5, 40, 33, 0, 12], 6, 2, page=4)
    counts = [1, 25, 3, 0, 12]
    cu_q = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    g = torch.Generator().manual_seed(1)
    q = torch.randn(1, 6, sum(counts) + 3, 16, generator=g)
    score, mask = hw.alibi(6), hw.causal() & hw.sliding_window(9) | hw.prefix(2)
    out, lse, max_logit = inference.attention_with_stats(
        q, c.k, c.v, score, mask, cu_q=cu_q, max_q=25, backend=backend, **c.options
    )
    for row, count in enumerate(counts):
        i = slice(int(cu_q[row]), int(cu_q[row + 1]))
        one = Caches(
            q[:, :, i], c.k, c.v, c.lengths[row : row + 1], c.page_table, c.keys[row : row + 1],
            c.values[row : row + 1],
        )  # fmt: skip
        if count:
            wanted = by_rows(one, score, mask)
            close((out[:, :, i], lse[:, :, i], max_logit[row : row + 1]), wanted)
    assert torch.equal(out[:, :, -3:], torch.zeros(1, 6, 3, 16))
    assert bool((lse[:, :, -3:] == -torch.inf).all())


def test_where_pages_lie_changes_no_bit():
    c = caches([9, 40], 4, 2)
    order = torch.randperm(len(c.k), generator=torch.Generator().manual_seed(2))
    table = torch.where(c.page_table >= 0, order.argsort()[c.page_table.clamp(0).long()], -1)
    score = hw.relative_bias(torch.randn(4, 33))
    there = inference.attention(c.q, c.k, c.v, score, **c.options)
    here = inference.attention(
        c.q, c.k[order], c.v[order], score, lengths=c.lengths, page_table=table.int()
    )
    assert torch.equal(there, here)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "mask", [None, hw.causal() & hw.sliding_window(12)], ids=["none", "window"]
)
def test_dtypes(dtype, mask):
    c = caches([3, 70], 8, 2, dtype=dtype, page=16, d=32)
    for k, v, table in ((c.k, c.v, c.page_table), (*c.contiguous(), None)):
        out = inference.attention(c.q, k, v, None, mask, lengths=c.lengths, page_table=table)
        assert out.dtype == dtype
        close((out,), by_rows(c, None, mask)[:1], 1e-12 if dtype == torch.float64 else 2e-3 * 4)


def test_heads_last_is_a_view():
    c = caches([9, 40], 4, 2)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (c.k, c.v))
    assert torch.equal(
        inference.attention(c.q, k, v, **c.options), inference.attention(c.q, c.k, c.v, **c.options)
    )


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_with_scales(dtype):
    c = caches([9, 40, 0], 4, 2, page=8)
    k8, v8 = (x.nan_to_num(0.0).to(dtype) for x in (c.k, c.v))
    scales = torch.tensor(0.5), torch.rand(2) + 0.5, torch.rand(3, 2) + 0.5
    for scale in scales:
        by_row = scale.expand(3, 2)
        keys, values = [], []
        for row, length in enumerate(c.lengths.tolist()):
            at = c.page_table[row, : -(-length // 8)].long()
            for x8, of in ((k8, keys), (v8, values)):
                own = x8.float()[at].transpose(0, 1).flatten(1, 2)[None, :, :length].double()
                of.append(own * by_row[row].double()[:, None, None])
        wanted = by_rows(c._replace(keys=keys, values=values), None, hw.causal())
        for backend in BACKENDS:
            got = inference.attention_with_stats(
                c.q, k8, v8, None, hw.causal(), k_scale=scale, v_scale=scale, backend=backend,
                **c.options,
            )  # fmt: skip
            close(got, wanted)


def test_values_may_be_columns_of_the_keys():
    c = caches([9, 40], 4, 1, d=48)
    got = inference.attention(c.q, c.k, c.k[..., :32], **c.options)
    wanted = by_rows(c._replace(values=[k[..., :32] for k in c.keys]))
    close((got,), wanted[:1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_mask_chooses_pages(backend):
    c = caches([40, 64], 4, 2, page=8)
    capacity = c.page_table.shape[1] * 8
    chosen = torch.tensor([[0, 3], [1, 4], [2, -1], [0, 1], [5, 7], [4, 2], [0, 6], [3, 1]])
    mask = hw.top_k_blocks(chosen.view(2, 4, 1, 2), 8, 1, capacity)
    got = inference.attention_with_stats(c.q, c.k, c.v, None, mask, backend=backend, **c.options)
    close(got, by_rows(c, None, mask.mask))
    positions = hw.block_mask(hw.causal() & hw.sliding_window(9), 1, 1, capacity, capacity, tile=16)
    got = inference.attention_with_stats(
        c.q, c.k, c.v, None, positions, backend=backend, **c.options
    )
    close(got, by_rows(c, None, positions.mask))


def test_only_keys_that_the_mask_allows_are_read():
    """Of a window, of padding, of sinks and a window: NaN elsewhere does not show."""
    k, v = torch.full((1, 1, 600, 16), torch.nan), torch.full((1, 1, 600, 16), torch.nan)
    q, lengths = torch.randn(1, 2, 1, 16), torch.tensor([600], dtype=torch.int32)
    for mask, seen in (
        (hw.causal() & hw.sliding_window(50), [slice(550, 600)]),
        (hw.padding(torch.tensor([70])) & hw.causal(), [slice(0, 70)]),
        (hw.causal() & hw.sliding_window(9) | hw.prefix(4), [slice(0, 4), slice(591, 600)]),
        (lambda b, h, i, j: (j >= i - 20) & (j < 590), [slice(579, 590)]),
    ):
        k1, v1 = k.clone(), v.clone()
        for keys in seen:
            k1[:, :, keys], v1[:, :, keys] = (
                torch.randn(1, 1, keys.stop - keys.start, 16) for _ in "kv"
            )
        out = inference.attention(q, k1, v1, None, mask, lengths=lengths)
        assert not out.isnan().any()


def test_wrong_arguments_are_named():
    c = caches([3, 9], 4, 2)
    attend = lambda **given: inference.attention(c.q, c.k, c.v, **{**c.options, **given})
    with pytest.raises(ArgumentError, match=r"lengths must be an int32 tensor \(b,\) with b = 2"):
        attend(lengths=c.lengths.long())
    with pytest.raises(ArgumentError, match="page_table must be an int32 tensor"):
        attend(page_table=c.page_table.long())
    with pytest.raises(ArgumentError, match=r"k and v have .* rows, lengths has 2"):
        attend(page_table=None)
    with pytest.raises(ArgumentError, match="cu_q needs max_q"):
        attend(cu_q=c.lengths)
    with pytest.raises(ArgumentError, match="max_q=3 goes with cu_q"):
        attend(max_q=3)
    with pytest.raises(ArgumentError, match=r"causal\(8\): queries of a cache are at their global"):
        attend(mask=hw.causal(8))
    with pytest.raises(ArgumentError, match=r"k_scale must be a float tensor"):
        attend(k_scale=torch.ones(3))
    with pytest.raises(ArgumentError, match="alibi: slopes has shape"):
        attend(score=hw.alibi(8))
    with pytest.raises(
        ArgumentError, match=r"block mask is for 64 keys, the cache has room for 24"
    ):
        attend(mask=hw.block_mask(hw.causal(), 1, 1, 64, 64))
    with pytest.raises(ArgumentError, match="k and v must have q's dtype"):
        inference.attention(c.q.half(), c.k, c.v, **c.options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'; write mask="):
        attend(causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_host_can_see_is_checked(backend):
    c = caches([3, 9], 4, 2)
    attend = lambda **given: inference.attention(
        c.q, c.k, c.v, backend=backend, **{**c.options, **given}
    )
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"lengths\[1\] = 99 is not from 0 to .* 24"):
        attend(lengths=ints(3, 99))
    with pytest.raises(ArgumentError, match=r"lengths\[0\] = -1"):
        attend(lengths=ints(-1, 3))
    with pytest.raises(ArgumentError, match=r"page_table\[1, 2\] = -1 is none of the"):
        attend(lengths=ints(3, 17))
    q = torch.randn(1, 4, 6, 16)
    with pytest.raises(ArgumentError, match="cu_q must rise from 0 to 6"):
        inference.attention(q, c.k, c.v, cu_q=ints(0, 4, 2), max_q=4, backend=backend, **c.options)


def test_out_is_written_to():
    """Into an engine's buffer, (tokens, heads · width), of which this is a view."""
    c = caches(LENGTHS, 4, 2, dv=12)
    right = inference.attention(c.q, c.k, c.v, mask=hw.causal(), **c.options)
    b, hq, q_len, dv = right.shape
    buffer = torch.full((b, q_len, hq * dv + 3), 7.0)
    out = buffer[..., :-3].unflatten(-1, (hq, dv)).transpose(1, 2)
    made = inference.attention(c.q, c.k, c.v, mask=hw.causal(), out=out, **c.options)
    assert made is out
    assert torch.equal(out, right)
    assert (buffer[..., -3:] == 7.0).all()
    for wrong, message in (
        (right[:1], r"out must be \(6, 4, .*, 12\) of q's dtype"), (right.double(), "q's dtype"),
        (right.to("meta"), "out is on meta, q on cpu"), (3, "got int"),
        (right[:, :1].expand(-1, hq, -1, -1), "several of its elements are one number"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            inference.attention(c.q, c.k, c.v, out=wrong, **c.options)


def test_gradients_are_refused():
    c = caches([3, 9], 4, 2)
    q = torch.inference_mode(False)(lambda: c.q.clone().requires_grad_())()
    with torch.inference_mode(False), pytest.raises(ArgumentError, match="q requires grad"):
        inference.attention(q, c.k, c.v, **c.options)
    out = torch.inference_mode(False)(lambda: torch.zeros(2, 4, 8, c.v.shape[3]).requires_grad_())()
    with torch.inference_mode(False), pytest.raises(ArgumentError, match="out requires grad"):
        inference.attention(c.q, c.k, c.v, out=out[:, :, : c.q.shape[2]], **c.options)


@torch.inference_mode(False)
def test_a_batch_of_calls():
    """`torch.vmap` maps over anything but memory that is written to."""
    q, k = torch.randn(3, 2, 4, 1, 8), torch.randn(3, 2, 2, 16, 8)
    lengths = torch.tensor([[5, 3], [0, 16], [2, 2]], dtype=torch.int32)
    table, sink = torch.randn(3, 16), torch.randn(3, 4)

    def call(q, k, lengths, table, sink):
        score = lambda s, b, h, i, j: s + table[i - j]
        return inference.attention_with_stats(
            q, k, k, score, hw.causal(), lengths=lengths, sink=sink
        )

    made = torch.vmap(call)(q, k, lengths, table, sink)
    for n, entry in enumerate(zip(q, k, lengths, table, sink, strict=True)):
        close((x[n] for x in made), call(*entry))
    cache = inference.Cache(1, 2, 2, 8, capacity=4)
    cache.reserve([0, 1], 1)
    kv = {"lengths": lengths[0], "out": torch.zeros(2, 4, 1, 8)}
    pages = torch.zeros(2, 2, 2, 4, 8)
    for write in (
        lambda q, k: inference.attention(q, k, k, **kv),
        lambda q, k: cache[0].append(k[:, :, :1], k[:, :, :1]),
        lambda q, k: inference.write(k[:, :, 0], k[:, :, 0], *pages, lengths[0]),
    ):
        with pytest.raises(ArgumentError, match=r"write outside of torch\.vmap"):
            torch.vmap(write)(q, k)
