"""flash_attn_with_kvcache and flash_attn_combine against plain attention over each row's keys."""

import pytest
import torch

import headway as hw
from headway.compat.flash import flash_attn_combine, flash_attn_func, flash_attn_with_kvcache
from headway.errors import ArgumentError

B, HQ, HK, D, CAPACITY = 3, 6, 2, 16, 32
LENGTHS = torch.tensor([5, 0, 21], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def drawn(new: int = 2, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    return (
        draw(B, new, HQ, D), draw(B, CAPACITY, HK, D), draw(B, CAPACITY, HK, D),
        draw(B, new, HK, D), draw(B, new, HK, D),
    )  # fmt: skip


OPTIONS = [
    {"causal": True},
    {"causal": True, "window_size": (7, 0), "softcap": 12.0},
    {"window_size": (4, 1), "alibi_slopes": torch.rand(HQ)},
    {"causal": True, "alibi_slopes": torch.rand(B, HQ), "softmax_scale": 0.1},
    {},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[", ".join(o) or "plain" for o in OPTIONS])
@pytest.mark.parametrize("paged", [False, True])
def test_appended_and_attended(options, paged):
    q, k_cache, v_cache, k, v = drawn()
    k_cache_, v_cache_, table = k_cache.clone(), v_cache.clone(), None
    if paged:
        order = torch.randperm(B * 4)
        table = order.argsort().view(B, 4).int()
        k_cache, v_cache = (x.view(B * 4, 8, HK, D)[order].clone() for x in (k_cache, v_cache))
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS, block_table=table,
        return_softmax_lse=True, num_splits=3, pack_gqa=True, sm_margin=4, **options,
    )  # fmt: skip
    for row, length in enumerate(LENGTHS.tolist()):
        keys, values = (
            torch.cat((old[row, :length], new[row]))[None]
            for old, new in ((k_cache_, k), (v_cache_, v))
        )
        own = dict(options)
        if "alibi_slopes" in own and own["alibi_slopes"].dim() == 2:
            own["alibi_slopes"] = own["alibi_slopes"][row : row + 1]
        wanted, wanted_lse, _ = flash_attn_func(
            q[row : row + 1], keys, values, return_attn_probs=True, **own
        )
        torch.testing.assert_close(out[row], wanted[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[row], wanted_lse[0], atol=2e-5, rtol=2e-5)
        if not paged:
            assert torch.equal(k_cache[row, length : length + 2], k[row])


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_leftpad_and_rows_of_the_cache(interleaved):
    q, k_cache, v_cache, k, v = drawn()
    angles = torch.rand(64, 4) * 6
    cos, sin = angles.cos(), angles.sin()
    pad, rows = (
        torch.tensor([2, 0, 4], dtype=torch.int32),
        torch.tensor([2, 0, 1], dtype=torch.int32),
    )
    before_k, before_v = k_cache.clone(), v_cache.clone()
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, LENGTHS + 4, rows, pad, causal=True,
        rotary_interleaved=interleaved,
    )  # fmt: skip

    def turned(x, at):  # (length, heads, d)
        c, s = cos[at][:, None], sin[at][:, None]
        part = x[..., :8]
        a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        halves = a * c - b * s, b * c + a * s
        part = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
        return torch.cat((part, x[..., 8:]), -1)

    for row, length in enumerate((LENGTHS + 4).tolist()):
        at = torch.arange(2) + length  # a position in the cache, whatever the padding before
        keys = torch.cat((before_k[rows[row], pad[row] : length], turned(k[row], at)))
        values = torch.cat((before_v[rows[row], pad[row] : length], v[row]))
        wanted = flash_attn_func(turned(q[row], at)[None], keys[None], values[None], causal=True)
        torch.testing.assert_close(out[row], wanted[0], atol=2e-5, rtol=2e-5)


def test_packed_queries_and_scales():
    q, k_cache, v_cache, _, _ = drawn()
    cu = torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    q = q.flatten(0, 1)[:4]
    scale = torch.rand(B, HK) + 0.5
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=LENGTHS, cu_seqlens_q=cu, max_seqlen_q=3, causal=True,
        q_descale=scale, k_descale=scale, v_descale=scale,
    )  # fmt: skip
    for row in (0, 2):
        i, n = slice(int(cu[row]), int(cu[row + 1])), int(LENGTHS[row])
        s = scale[row, :, None]
        wanted = flash_attn_func(
            (q[i] * s.repeat_interleave(3, 0))[None], (k_cache[row, :n] * s)[None],
            (v_cache[row, :n] * s)[None], causal=True,
        )  # fmt: skip
        torch.testing.assert_close(out[i], wanted[0], atol=2e-5, rtol=2e-5)


def test_partial_results_are_combined():
    q, k, v = torch.randn(3, 1, 2, 30, D).unbind(0)
    parts = [
        hw.attention_with_stats(q, k[:, :, at], v[:, :, at]) for at in (slice(0, 9), slice(9, 30))
    ]
    outs = torch.stack([p.out.transpose(1, 2) for p in parts])
    lses = torch.stack([p.lse.transpose(1, 2) for p in parts])
    out, lse = flash_attn_combine(outs, lses)
    whole = hw.attention_with_stats(q, k, v)
    torch.testing.assert_close(out.transpose(1, 2), whole.out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.transpose(1, 2), whole.lse, atol=2e-5, rtol=2e-5)
    nothing = flash_attn_combine(outs * 0, lses - torch.inf)
    assert not nothing[0].any()


def test_what_is_refused():
    q, k_cache, v_cache, k, v = drawn()
    with pytest.raises(RuntimeError, match="arguments follow flash-attn 2"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, q)
    with pytest.raises(NotImplementedError, match="qv"):
        flash_attn_with_kvcache(q, k_cache, v_cache, qv=q)
    with pytest.raises(RuntimeError, match="k and v go together"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k)
    table, idx = torch.zeros(B, 2, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"block_table with cache_batch_idx.*name it page_table"):
        flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table, cache_batch_idx=idx)
    with pytest.raises(RuntimeError, match="two names of one argument"):
        flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table, page_table=table)
    with pytest.raises(RuntimeError, match=r"cache_batch_idx must be int32 \(b,\) = \(3,\)"):
        flash_attn_with_kvcache(q, k_cache, v_cache, page_table=table, cache_batch_idx=idx[1:])
    with pytest.raises(ArgumentError, match=r"lengths\[0\] = 40"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=40)
    ints, ones = torch.zeros(B, dtype=torch.int32), torch.ones(CAPACITY, 4)
    rotary = {"rotary_cos": ones, "rotary_sin": ones}
    for name, wrong, others in (
        ("cache_seqlens", [ints[1:], ints.float(), ints[0], 3.0, [0] * B], {}),
        ("cache_leftpad", [ints[1:], ints.float(), [0] * B, 0], {}),
        ("rotary_seqlens", [ints[1:], ints.float(), [0] * B, 0], rotary),
        ("cache_batch_idx", [ints[1:], ints.float()], {}),
        ("block_table", [ints, table.float(), table[1:], [[0]] * B], {}),
        ("page_table", [ints, table.float(), [[0]]], {"cache_batch_idx": ints}),
        ("k_descale", [torch.ones(HK), 2.0, ones], {}),
        ("v_descale", [torch.ones(B), 2.0, ones], {}),
        ("cu_seqlens_k_new", [ints], {}), ("rotary_seqlens", [ints], {}),
    ):  # fmt: skip
        for x in wrong:
            with pytest.raises(RuntimeError, match=name):
                flash_attn_with_kvcache(q, k_cache, v_cache, **{name: x}, **others)
    for ends, words in (
        ([0, 2], "has 1 sequences, but q has 3"),
        ([0, 3, 2, 4], "cu_seqlens_k_new must rise from 0 to at most"),
    ):
        with pytest.raises(RuntimeError, match=words):
            flash_attn_with_kvcache(
                q, k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), cache_seqlens=0,
                cu_seqlens_k_new=torch.tensor(ends),
            )  # fmt: skip


def test_new_keys_of_no_row_are_written_nowhere_and_read_by_no_host():
    """A graph without breaks has no place where the host waits for a number."""
    q, _, _, k, v = drawn()
    k, v, ends = k.flatten(0, 1), v.flatten(0, 1), torch.tensor([0, 1, 1, 3], dtype=torch.int32)
    starts = torch.tensor([2, 0, 5], dtype=torch.int32)
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="eager")
    for call in (flash_attn_with_kvcache, compiled):
        k_cache, v_cache = torch.zeros(2, B, 32, *k.shape[1:])
        with torch.no_grad():
            call(q, k_cache, v_cache, k, v, cache_seqlens=starts, cu_seqlens_k_new=ends)
        for cache, new in ((k_cache, k), (v_cache, v)):
            expected = torch.zeros_like(cache)
            expected[0, 2], expected[2, 5:7] = new[0], new[1:3]
            assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_seqlens": 31}, "number 32.*room for 32 keys"),
        ({"cache_seqlens": -2}, "number -2"),
        ({"cache_seqlens": 3, "cache_batch_idx": [0, -1]}, "row of the cache.* -1"),
        ({"cache_seqlens": 3, "block_table": [[0], [7]]}, "page .* 7, which is none"),
        ({"cache_seqlens": 3, "rotary_cos": 20, "rotary_sin": 20}, "at least the 32 positions"),
        (
            {
                "cache_seqlens": 3,
                "rotary_cos": 32,
                "rotary_sin": 32,
                "causal": True,
                "rotary_seqlens": [3, 31],
            },
            "have 32 positions, but a query or new key is at 32",
        ),
        (
            {"cache_seqlens": 3, "page_table": [[0], [1]], "cache_batch_idx": [0, 2]},
            r"cache_batch_idx\[1\] = 2 is no row of page_table, which has 2",
        ),
    ],
)
def test_what_has_no_place_is_written_nowhere(options, words):
    """Indices that would count from the end, and angles of another position, are no answer."""
    k_cache, new = torch.randn(2, 32, 2, 8), torch.randn(2, 2, 2, 8)
    before = k_cache.clone()
    made = {
        name: torch.tensor(x, dtype=torch.int32) if isinstance(x, list)
        else torch.ones(x, 4) if name.startswith("rotary") else x
        for name, x in options.items()
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=words):
        flash_attn_with_kvcache(new, k_cache, k_cache.clone(), new, new, **made)
    assert torch.equal(k_cache, before)
