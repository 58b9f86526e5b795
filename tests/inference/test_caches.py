"""Caches: what is appended is what is attended to, in pages or without."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch

import headway as hw
from graphs import recording
from headway import inference
from headway.errors import ArgumentError, CacheFull
from headway.inference import Cache, Level, PagedCache
from headway.inference import cache as cache_module

HQ, HK, D = 6, 2, 16


def steps(cache, rows: int, seed: int = 0, dtype=torch.float32):
    """Chunks of prompts and single tokens; the results of every step, and of the definition."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, h, 30, D, generator=g).to(dtype) for h in (HQ, HK, HK))
    at = [0] * rows
    for counts in ([5, 1, 8], [1, 1, 1], [0, 1, 1], [12, 0, 1], [1, 1, 1]):
        cache.reserve(list(range(rows)), counts[:rows])
        most = max(counts[:rows])
        new = [torch.full((rows, h, most, D), torch.nan, dtype=dtype) for h in (HQ, HK, HK)]
        for r, n in enumerate(counts[:rows]):
            for x, whole in zip(new, (q, k, v), strict=True):
                if n:
                    x[r, :, -n:] = whole[r, :, at[r] : at[r] + n]
            at[r] += n
        for layer in (cache[0], cache[1]):
            layer.append(new[1], new[2])
            out = inference.attention(
                new[0].nan_to_num(0), *layer.kv, hw.alibi(HQ), hw.causal(), **layer.options
            )
            for r, n in enumerate(counts[:rows]):
                if not n:
                    continue
                whole = hw.attention(
                    *(x[r : r + 1, :, : at[r]].double() for x in (q, k, v)),
                    hw.alibi(HQ),
                    hw.causal(),
                )
                yield out[r, :, -n:], whole[0, :, -n:]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    "cache",
    [
        lambda: Cache(2, 3, HK, D, capacity=4),
        lambda: PagedCache(2, 20, 4, HK, D, rows=3),
    ],
    ids=["grows", "pages"],
)
def test_steps_equal_the_whole(cache):
    for got, wanted in steps(cache(), 3):
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=2e-5)


def test_packed_tokens():
    a, b = (PagedCache(1, 20, 4, HK, D, rows=3) for _ in range(2))
    k, v = torch.randn(2, 1, HK, 9, D).unbind(0)
    cu_q = torch.tensor([0, 5, 5, 7], dtype=torch.int32)
    for cache in (a, b):
        cache.reserve([0, 2], [5, 2])
    a[0].append(k, v, cu_q=cu_q)
    one = lambda x: torch.stack(
        [
            x[0, :, :5],
            torch.full((HK, 5, D), torch.nan),
            torch.nn.functional.pad(x[0, :, 5:7], (0, 0, 3, 0)),
        ]
    )
    b[0].append(one(k), one(v))
    assert torch.equal(a.page_table, b.page_table)
    assert torch.equal(a.keys[:, :-1], b.keys[:, :-1])
    assert torch.equal(a.values[:, :-1], b.values[:, :-1])


def test_a_fork_shares_pages_until_one_writes():
    cache = PagedCache(1, 8, 4, HK, D, rows=3)
    k, v = torch.randn(2, 1, HK, 6, D).unbind(0)
    token = lambda: torch.randn(3, HK, 1, D)
    cache.reserve(0, 6)
    cache[0].append(k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))
    fork = cache.fork(0)
    assert (fork, cache.free_pages, cache.row_lengths) == (1, 6, [6, 6, 0])
    cache.reserve([0, 1], 1)
    assert cache.free_pages == 5  # one of the two got a copy of the last page
    new_k, new_v = token(), token()
    cache[0].append(new_k, new_v)
    q = torch.randn(3, HQ, 1, D)
    out = inference.attention(q, *cache[0].kv, **cache[0].options)
    for row in (0, 1):
        keys, values = (
            torch.cat((k, new_k[row : row + 1]), 2),
            torch.cat((v, new_v[row : row + 1]), 2),
        )
        torch.testing.assert_close(out[row], hw.attention(q[row : row + 1], keys, values)[0])
    assert not out[2].any()
    cache.free([0, 1])
    assert (cache.free_pages, cache.row_lengths) == (8, [0, 0, 0])


def test_a_full_cache_says_so_and_nothing_has_changed():
    cache = PagedCache(1, 3, 4, HK, D, rows=2, max_pages=2)
    cache.reserve(0, 4)
    before = cache.page_table.clone(), cache.lengths.clone(), cache.free_pages
    with pytest.raises(CacheFull, match="3 pages are needed for 8 tokens, 2 of 3 are free"):
        cache.reserve([0, 1], [1, 7])
    with pytest.raises(CacheFull, match="more than max_pages=2 pages of 4 hold"):
        cache.reserve(1, 9)
    assert torch.equal(before[0], cache.page_table)
    assert torch.equal(before[1], cache.lengths)
    assert cache.free_pages == before[2]
    cache.reserve(1, 8)
    cache.truncate(1, 3)
    assert (cache.free_pages, cache.row_lengths) == (1, [4, 3])
    fixed = Cache(1, 2, HK, D, capacity=4, max_capacity=6)
    fixed.reserve([0, 1], [6, 2])
    with pytest.raises(CacheFull, match="row 0 would have 7 keys"):
        fixed.reserve([0, 1], 1)
    assert fixed.row_lengths == [6, 2]
    with pytest.raises(CacheFull, match="all 2 rows are in use"):
        cache.fork(0)


def test_float8_caches():
    scale = torch.rand(2, HK) * 0.02 + 0.01
    cache = PagedCache(
        2, 20, 4, HK, D, rows=3, dtype=torch.float8_e4m3fn, k_scale=scale, v_scale=scale
    )
    for got, wanted in steps(cache, 3):  # 3 bits of mantissa
        assert (got - wanted).norm() < 0.1 * wanted.norm()


def test_wrong_arguments_of_caches():
    cache = PagedCache(1, 3, 4, HK, D, rows=2)
    with pytest.raises(ArgumentError, match=r"reserve: row 2 of a cache of 2 rows"):
        cache.reserve(2, 1)
    with pytest.raises(ArgumentError, match=r"k must be \(rows, hk, tokens, width\)"):
        cache[0].append(torch.randn(2, HK, 1, D + 1), torch.randn(2, HK, 1, D))
    for scale in (2.0, torch.ones(HK), torch.ones(1, HK).int()):
        with pytest.raises(ArgumentError, match=r"v_scale must be a float tensor \(\) or \(layers"):
            Cache(1, 2, HK, D, capacity=4, v_scale=scale)
    for scale in (torch.tensor(0.0), torch.tensor([[1.0], [torch.nan]])):
        with pytest.raises(ArgumentError, match=r"k_scale has (0\.0|nan), but what is written"):
            Cache(2, 2, 1, D, capacity=4, k_scale=scale)
    with pytest.raises(ArgumentError, match=r"write copy\.deepcopy"):
        copy.copy(cache)
    with pytest.raises(ArgumentError, match="a cache is of float32"):
        PagedCache(1, 3, 4, HK, D, rows=2, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="row 0 has 0 keys, not 2"):
        cache.truncate(0, 2)


def both_kinds(layers: int = 1, rows: int = 2) -> list:
    return [Cache(layers, rows, 1, 2, capacity=8), PagedCache(layers, 4, 4, 1, 2, rows=rows)]


def of(number: float, tokens: int = 1, rows: int = 2) -> torch.Tensor:
    return torch.full((rows, 1, tokens, 2), number)


def test_reserving_row_by_row_is_reserving_at_once():
    for cache in both_kinds():
        for _ in range(2):
            for row in range(2):
                cache.reserve(row, 1)
            cache[0].append(of(5.0), of(5.0))
        cache.reserve(0, 1)
        cache.reserve(0, 1)
        cache[0].append(of(5.0, 2), of(5.0, 2))
        out = inference.attention(of(0.0), *cache[0].kv, **cache[0].options)
        assert torch.equal(out, of(5.0))
        assert cache.row_lengths == [4, 2]


def test_other_calls_between_reserve_and_append():
    """They change what they name and no more."""
    cache = PagedCache(1, 6, 4, 1, 2, rows=4)
    cache.reserve([0, 1], [3, 2])
    cache[0].append(of(1.0, 3, 4), of(1.0, 3, 4))
    cache.reserve([0, 1], 1)
    cache.free(1)
    assert [cache.fork(1), cache.fork(1)] == [2, 3], "empty rows are rows"
    cache.truncate(0, 4)
    cache[0].append(of(7.0, 1, 4), of(7.0, 1, 4))
    out = inference.attention(of(0.0, 1, 4), *cache[0].kv, **cache[0].options)
    assert torch.equal(out[:, 0, 0, 0], torch.tensor([2.5, 0.0, 0.0, 0.0]))


def test_what_was_not_reserved_is_refused_before_anything_is_written():
    for cache in both_kinds(layers=2):
        for x in cache.stored:
            x.fill_(777.0)
        with pytest.raises(ArgumentError, match="nothing was reserved for layer 0 since it last"):
            cache[0].append(of(1.0), of(1.0))
        cache.reserve([0, 1], [3, 1])
        with pytest.raises(ArgumentError, match="3 tokens were reserved for row 0, got 1"):
            cache[0].append(of(1.0), of(1.0))
        short = of(1.0, 3, 1)
        ends = torch.tensor([0, 2, 4], dtype=torch.int32)
        with pytest.raises(ArgumentError, match=r"4 tokens were reserved \(row 0: 3, row 1: 1\)"):
            cache[0].append(short, short, cu_q=ends)
        with pytest.raises(ArgumentError, match=r"3 tokens were reserved for row 0, but cu_q .* 2"):
            cache[0].append(of(1.0, 4, 1), of(1.0, 4, 1), cu_q=ends)
        with pytest.raises(ArgumentError, match=r"layer 1 has not appended .* append first"):
            cache[1].options  # noqa: B018
        assert all((x == 777.0).all() for x in cache.stored)
        cache[0].append(of(1.0, 3), of(1.0, 3))
        with pytest.raises(ArgumentError, match="nothing was reserved for layer 0"):
            cache[0].append(of(2.0, 3), of(2.0, 3))
        with pytest.raises(ArgumentError, match=r"layer 1 has not appended .*, but others have"):
            cache.reserve(0, 1)
        with pytest.raises(ArgumentError, match="some layers have appended and others have not"):
            cache.truncate(0, 1)
        if isinstance(cache, PagedCache):
            cache = PagedCache(2, 6, 4, 1, 2, rows=2)
            cache.reserve(0, 3)
            with pytest.raises(ArgumentError, match="fork: 3 tokens are reserved for row 0"):
                cache.fork(0)
        cache.truncate(0, 0)  # what was begun is given up
        cache.truncate(1, 0)
        cache.reserve(0, 1)
        assert cache.row_lengths == [1, 0]


def test_rows_and_tokens_are_integers_of_anybody():
    for cache in both_kinds():
        cache.reserve(np.int64(1), np.int32(2))
        assert cache.row_lengths == [0, 2]
        for rows, tokens, words in (
            (0, 1.0, "reserve: tokens must be an integer or a sequence of integers, got 1.0"),
            (torch.tensor([0]), 1, "reserve: rows must be an integer or a sequence"),
            (-1, 1, "reserve: row -1 of a cache of 2 rows; rows are integers, 0 to 1"),
            ([True], 1, "row True of a cache"),
        ):
            with pytest.raises(ArgumentError, match=words):
                cache.reserve(rows, tokens)
        for row in (2, -1):
            with pytest.raises(ArgumentError, match=f"truncate: row {row} of a cache of 2 rows"):
                cache.truncate(row, 0)
            forget = cache.clear if isinstance(cache, Cache) else cache.free
            with pytest.raises(ArgumentError, match=f": row {row} of a cache of 2 rows"):
                forget(row)
        assert cache[np.int64(0)].n == 0
        for n in (1, -1):
            with pytest.raises(IndexError, match=rf"cache\[{n}\]: a layer is an integer, 0 to 0"):
                cache[n]
        for n in ("0", 0.0, slice(1), True):
            with pytest.raises(ArgumentError, match="a layer is an integer, 0 to 0"):
                cache[n]
        with pytest.raises(ArgumentError, match="length=-1 must be an integer, 0 or more"):
            cache[0].positions(-1)
    pages = PagedCache(1, 4, 4, 1, 2, rows=3)
    assert [pages.fork(np.int64(0)), pages.fork(0)] == [1, 2]
    with pytest.raises(ArgumentError, match="fork: row -1 of a cache of 3 rows"):
        pages.fork(-1)


def test_replays_of_a_graph_run_no_python():
    """The device counts what was reserved, by itself, replay by replay; and what the host cannot
    know it does not refuse."""
    for cache in both_kinds(layers=2):
        k, q = of(0.0), of(0.0)
        cache.reserve([0, 1], 1)
        with (
            mock.patch.object(cache_module, "may_be_replayed", return_value=True),
            recording() as graph,
        ):
            for n in range(2):
                cache[n].append(k, k)
        for number, rows in ((1.0, [0, 1]), (2.0, [1]), (3.0, [0]), (4.0, [0, 1])):
            for row in rows:
                cache.reserve(row, 1)
            k.fill_(number)
            graph.replay()
            if number == 2.0:
                cache.truncate(1, cache.row_lengths[1])
        cache.reserve(0, 2)
        cache[0].append(of(5.0, 2), of(5.0, 2))
        assert cache.row_lengths == [6, 4]
        out = inference.attention(q, *cache[0].kv, **cache[0].options)
        wanted = [(0 + 1 + 3 + 4 + 5 + 5) / 6, (0 + 1 + 2 + 4) / 4]
        torch.testing.assert_close(out[:, 0, 0, 0], torch.tensor(wanted))


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("score", [None, hw.alibi(HQ)], ids=["plain", "alibi"])
def test_a_cascade_equals_the_whole(q_len, score):
    """A prompt of two groups, then every row's own keys."""
    g = torch.Generator().manual_seed(3)
    new = lambda *shape: torch.randn(*shape, generator=g)
    rows = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    prompts, own = torch.tensor([20, 9], dtype=torch.int32), [3, 7, 4, 3]
    pk, pv, k, v = new(2, HK, 24, D), new(2, HK, 24, D), new(4, HK, 8, D), new(4, HK, 8, D)
    q, sink = new(4, HQ, q_len, D), new(HQ)
    mask = hw.causal() & hw.sliding_window(15)
    out = inference.cascade(
        q, [Level(pk, pv, prompts, None, rows), (k, v, torch.tensor(own, dtype=torch.int32))],
        score, mask, sink=sink,
    )  # fmt: skip
    for row, (group, n) in enumerate(zip(rows.tolist(), own, strict=True)):
        length = int(prompts[group])
        keys, values = (
            torch.cat((a[group, :, :length], c[row, :, :n]), 1)[None] for a, c in ((pk, k), (pv, v))
        )
        total = torch.tensor([length + n], dtype=torch.int32)
        wanted = inference.attention(
            q[row : row + 1],
            keys,
            values,
            score,
            mask,
            lengths=total,
            sink=sink,
            backend="reference",
        )
        torch.testing.assert_close(out[row : row + 1], wanted, atol=2e-5, rtol=2e-5)


def test_a_tree_of_drafts_in_a_cache():
    """Every path from the root is ordinary decoding."""
    parents = torch.tensor([-1, 0, 0, 1, 2])
    cache = Cache(1, 2, HK, D, capacity=32)
    k, v = torch.randn(2, 2, HK, 17, D).unbind(0)
    cache.reserve([0, 1], [17, 12])
    cache[0].append(k, v)
    q = torch.randn(2, HQ, 5, D)
    mask = hw.tree(parents, cache.lengths - 5)
    out = inference.attention(q, *cache[0].kv, None, mask, **cache[0].options)
    for row, n in enumerate((17, 12)):
        keys, values = k[row : row + 1, :, 17 - n :], v[row : row + 1, :, 17 - n :]
        for path in ([0], [0, 1], [0, 1, 3], [0, 2, 4]):
            at = torch.tensor([*range(n - 5), *(n - 5 + node for node in path)])
            alone = hw.attention(q[row : row + 1, :, path[-1:]], keys[:, :, at], values[:, :, at])
            torch.testing.assert_close(out[row, :, path[-1]], alone[0, :, 0], atol=2e-5, rtol=2e-5)
