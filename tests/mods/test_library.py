"""Masks and scores of the library against their definitions, pair by pair in plain Python."""

import itertools
import math

import pytest
import torch

import headway
from blocks.dense import check_build, dense_mask
from headway.errors import ArgumentError
from headway.mods import (
    block_causal,
    block_table,
    causal,
    chunked,
    dilated,
    document,
    lower_mod,
    neighborhood,
    sliding_window,
    spans,
    strided,
    t5_bias,
    tiled,
    window_bias,
)
from headway.mods.bounds.interval import why_elements


def kept(mask, q_len: int, kv_len: int, b: int = 1) -> torch.Tensor:
    """bool `(b, q_len, kv_len)`, once it is certain that its tiles are right and need no pairs."""
    graph, captured = lower_mod("mask", mask, torch.float32)
    assert why_elements(graph) == []
    for tile in (16, 16), (5, 32):
        check_build(graph, captured, (b, 1, q_len, kv_len), tile)
    return dense_mask(graph, captured, (b, 1, q_len, kv_len))[:, 0]


def pairs(q_len: int, kv_len: int, rule) -> torch.Tensor:
    return torch.tensor([[bool(rule(i, j)) for j in range(kv_len)] for i in range(q_len)])


# -- gaps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "step"), [(1, 1), (4, 1), (3, 2), (5, 7), (2, 100)])
def test_dilated(window, step):
    reached = {n * step for n in range(window)}
    want = pairs(90, 70, lambda i, j: abs(i - j) in reached)
    assert torch.equal(kept(dilated(window, step), 90, 70)[0], want)
    if step == 1:
        assert torch.equal(kept(sliding_window(window), 90, 70)[0], want)


@pytest.mark.parametrize("stride", [1, 2, 9, 64])
def test_strided_is_both_heads_of_the_sparse_transformer(stride):
    """A1 = {max(0, i - l), ..., i} and A2 = {j : (i - j) mod l = 0}, causal."""
    want = pairs(
        100, 100,
        lambda i, j: j <= i and (max(0, i - stride) <= j or (i - j) % stride == 0),
    )  # fmt: skip
    assert torch.equal(kept(causal() & strided(stride), 100, 100)[0], want)


# -- chunks and blocks ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 16, 40, 1000])
def test_chunked(size):
    chunks = [range(n, n + size) for n in range(0, 90, size)]
    want = pairs(90, 70, lambda i, j: any(i in one and j in one for one in chunks))
    assert torch.equal(kept(chunked(size), 90, 70)[0], want)
    want &= pairs(90, 70, lambda i, j: j <= i)
    assert torch.equal(kept(causal() & chunked(size), 90, 70)[0], want)


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_block_causal(size):
    end = [(n + 1) * size for n in range(90) for _ in range(size)]  # of the block of query i
    want = pairs(90, 110, lambda i, j: j < end[i])
    assert torch.equal(kept(block_causal(size), 90, 110)[0], want)
    if size == 1:
        assert torch.equal(kept(causal(), 90, 110)[0], want)


def test_block_diffusion_as_documented():
    """BD3-LM's mask over noised and clean copies: a block diagonal, an offset block triangle, and a
    block triangle."""
    n, size = 24, 4

    def block_diffusion(b, h, i, j):
        mine, theirs = i % n // size, j % n // size
        noised = torch.where(j < n, mine == theirs, theirs < mine)
        return torch.where(i < n, noised, (j >= n) & (theirs <= mine))

    blocks = torch.arange(n) // size
    mine, theirs = blocks[:, None], blocks
    noised = torch.cat([mine == theirs, theirs < mine], 1)
    clean = torch.cat([torch.zeros(n, n, dtype=torch.bool), theirs <= mine], 1)
    graph, captured = lower_mod("mask", block_diffusion, torch.float32)
    got = dense_mask(graph, captured, (1, 1, 2 * n, 2 * n))[0, 0]
    assert torch.equal(got, torch.cat([noised, clean]))
    assert torch.equal(kept(block_causal(size), n, n)[0], clean[:, n:])


@pytest.mark.parametrize(
    "shape", [(3, 2, 12, 9), (1, 2, 12, 9), (2, 12, 1), (1, 9), (1, 1)], ids=str
)
def test_block_table(shape):
    table = torch.rand(shape) < 0.5
    mask = block_table(table, (8, 5))
    full = table.expand(3, 2, 12, 9).repeat_interleave(8, 2).repeat_interleave(5, 3)[:, :, :90, :43]
    graph, captured = lower_mod("mask", mask, torch.float32)
    assert torch.equal(dense_mask(graph, captured, (3, 2, 90, 43)), full)
    for tile in (8, 5), (16, 16):
        check_build(graph, captured, (3, 2, 90, 43), tile)
    assert repr(mask) == f"block_table(bool{list(shape) if shape != (1, 1) else []}, (8, 5))"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((3, 2, 97, 45), "have 13 rows"), ((3, 2, 96, 46), "have 10 columns"),
     ((2, 2, 96, 45), "have 2 batch"), ((3, 4, 96, 45), "have 4 heads")],
    ids=str,
)  # fmt: skip
def test_block_tables_of_other_sizes(sizes, message):
    with pytest.raises(ArgumentError, match=message):
        headway.block_mask(block_table(torch.ones(3, 2, 12, 9).bool(), (8, 5)), *sizes)


# -- spans ----------------------------------------------------------------------------------------


def test_spans():
    ids = [-1] * 10 + [0] * 25 + [-1] * 3 + [1] * 20 + [2] * 12 + [-7] * 9 + [1] * 6
    same = lambda i, j: ids[i] == ids[j] and ids[i] >= 0
    n = len(ids)
    want = pairs(n, n, same)
    assert torch.equal(kept(spans(torch.tensor(ids)), n, n)[0], want)
    narrow = torch.tensor(ids, dtype=torch.int32)
    want = pairs(n, n, lambda i, j: j <= i or same(i, j))
    assert torch.equal(kept(causal() | spans(narrow), n, n)[0], want)


def test_spans_of_batches_and_of_other_keys():
    ids = torch.randint(-1, 3, (2, 40)).sort().values
    keys = torch.randint(-2, 3, (33,))
    got = kept(spans(ids, keys), 40, 33, b=2)
    want = (ids[:, :, None] == keys) & (ids[:, :, None] >= 0)
    assert torch.equal(got, want)
    with pytest.raises(
        ArgumentError, match=r"spans: ids, which is of the keys too without kv_ids,"
    ):
        headway.block_mask(spans(ids), 2, 1, 40, 33)
    with pytest.raises(ArgumentError, match=r"spans: ids has shape \(2, 40\)"):
        headway.block_mask(spans(ids, keys), 3, 1, 40, 33)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: chunked(0), r"chunked\(size=0\)"),
        (lambda: block_causal(2.5), r"block_causal\(size=2.5\)"),
        (lambda: spans([0, 1]), r"spans\(ids=list\)"),
        (lambda: spans(torch.zeros(3)), "spans: ids must be an int tensor"),
        (
            lambda: spans(torch.zeros(3).long(), torch.zeros(1, 2, 3).long()),
            "spans: kv_ids must be",
        ),
        (lambda: block_table(torch.zeros(2, 2), 4), "block_table: table must be a bool tensor"),
        (lambda: block_table(torch.zeros(2).bool(), 4), r"of shape \(2,\)"),
        (lambda: block_table(torch.zeros(2, 2).bool(), (4, 0)), r"block=\(4, 0\)"),
        (lambda: dilated(0, 2), r"dilated\(window=0\)"),
        (lambda: dilated(2, 0), r"dilated\(step=0\)"),
        (lambda: dilated(2, 1.5), r"dilated\(step=1.5\)"),
        (lambda: strided(-1), r"strided\(stride=-1\)"),
        (
            lambda: neighborhood((4, 4), 3),
            r"shape=\(4, 4\) and kernel=\(3,\) .* one number for each",
        ),
        (lambda: neighborhood((2,) * 4, (1,) * 4), "1 to 3 of them"),
        (lambda: neighborhood((4, 0), (1, 1)), r"neighborhood\(shape=0\)"),
        (lambda: neighborhood((4, 4), (5, 1)), r"kernel=\(5, 1\) is larger than shape=\(4, 4\)"),
        (lambda: tiled(causal(), (10, 10), (3, 5)), r"tile=\(3, 5\) must divide shape=\(10, 10\)"),
        (lambda: tiled(3, (10,), (5,)), "tiled: mask=3 is not callable"),
    ],
)
def test_wrong_numbers_are_named(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


# -- images and videos ----------------------------------------------------------------------------


def neighbours(shape, kernel) -> torch.Tensor:
    """The definition: windows shifted to stay inside, found by trying all of them."""
    points = list(itertools.product(*map(range, shape)))
    near = []
    for n, k in zip(shape, kernel, strict=True):
        starts = range(n - k + 1)
        window = [min(starts, key=lambda s: (abs(x - k // 2 - s), s)) for x in range(n)]
        near.append([set(range(s, s + k)) for s in window])
    return torch.tensor(
        [[all(y in near[d][x] for d, (x, y) in enumerate(zip(p, q, strict=True))) for q in points]
         for p in points]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [(40, 5), ((40,), (4,)), ((8, 9), (3, 5)), ((8, 9), (8, 2)), ((1, 30), (1, 7)),
     ((4, 5, 6), (3, 3, 1)), ((3, 4, 5), (2, 4, 3))],
    ids=str,
)  # fmt: skip
def test_neighborhood(shape, kernel):
    mask = neighborhood(shape, kernel)
    n = math.prod(mask.shape)
    got = kept(mask, n, n)[0]
    assert torch.equal(got, neighbours(mask.shape, mask.kernel))
    assert (got.sum(1) == math.prod(mask.kernel)).all()  # every query sees equally many


@pytest.mark.parametrize("lengths", [(65, 64), (64, 65)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [neighborhood((8, 8), (3, 3)), tiled(causal(), (8, 8), (2, 4)),
     tiled(neighborhood((8, 8), (3, 3)), (16, 8), (2, 4)) & causal()],
    ids=str,
)  # fmt: skip
def test_positions_past_the_end_of_a_grid_are_refused(mask, lengths):
    with pytest.raises(ArgumentError, match=r"shape=\(8, 8\) has 64 points, .*=65"):
        headway.block_mask(mask, 1, 1, *lengths)
    headway.block_mask(mask, 1, 1, 64, 60)


def test_a_neighborhood_of_odd_kernel_is_centred():
    got = kept(neighborhood((9, 9), (3, 5)), 81, 81)[0].view(9, 9, 9, 9)
    assert got[4, 4].nonzero().tolist() == [[y, x] for y in (3, 4, 5) for x in range(2, 7)]
    assert got[0, 8].nonzero().tolist() == [[y, x] for y in (0, 1, 2) for x in range(4, 9)]


@pytest.mark.parametrize(
    ("shape", "tile"), [((24,), (8,)), ((8, 12), (4, 3)), ((4, 6, 4), (2, 3, 4))], ids=str
)
def test_tiled_order(shape, tile):
    order = tiled(causal(), shape, tile).order()
    image = torch.arange(math.prod(shape)).view(shape)
    first = image[tuple(slice(0, t) for t in tile)].flatten()
    assert torch.equal(order[: math.prod(tile)], first)
    assert torch.equal(order.sort().values, image.flatten())
    for part in order.view(-1, math.prod(tile)):  # every tile is a box of neighbours
        points = torch.stack(torch.unravel_index(part, shape))
        assert (points.amax(1) - points.amin(1) + 1).tolist() == list(tile)
    inner = neighborhood(shape, tile) & causal()
    got = kept(tiled(inner, shape, tile), len(order), len(order))[0]
    assert torch.equal(got, kept(inner, len(order), len(order))[0][order][:, order])


def test_tiled_attention_is_attention_reordered():
    inner = neighborhood((8, 12), (3, 5))
    layout = tiled(inner, (8, 12), (4, 4))
    q, k, v = torch.randn(3, 1, 2, 96, 8)
    order = layout.order()
    out = headway.attention(*(x[:, :, order] for x in (q, k, v)), mask=layout)
    want = headway.attention(q, k, v, mask=inner)
    torch.testing.assert_close(out[:, :, order.argsort()], want)
    assert repr(layout) == "tiled(neighborhood((8, 12), (3, 5)), (8, 12), (4, 4))"
    assert layout == tiled(neighborhood((8, 12), (3, 5)), [8, 12], [4, 4])


def test_tiles_make_windows_sparse():
    """A 13 x 13 window of a 128 x 128 image, in tiles of 128 tokens."""
    inner = neighborhood((128, 128), (13, 13))
    masks = inner, tiled(inner, (128, 128), (8, 16))
    rows, tiles = (headway.block_mask(m, 1, 1, 16384, 16384).sparsity() for m in masks)
    assert (rows, tiles) == pytest.approx((1 - 13 / 128, 1 - 9 / 128), abs=0.01)


# -- packed documents -----------------------------------------------------------------------------


def by_lengths(q: list[int], k: list[int], q_len: int, kv_len: int) -> torch.Tensor:
    """Blocks along the diagonal; whatever follows the last is padding."""
    out = torch.zeros(q_len, kv_len, dtype=torch.bool)
    i = j = 0
    for m, n in zip(q, k, strict=True):
        out[i : i + m, j : j + n] = True
        i, j = i + m, j + n
    return out


def test_from_lengths():
    lengths = [5, 0, 17, 1, 40]
    mask = document.from_lengths(lengths)
    assert mask.ids.shape == (63,)
    assert mask.kv_ids is None
    assert torch.equal(kept(mask, 63, 63)[0], by_lengths(lengths, lengths, 63, 63))
    same = document.from_lengths(torch.tensor(lengths, dtype=torch.int32))
    assert torch.equal(same.ids, mask.ids)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    for cumulative in (ends, ends.int(), ends.tolist()):
        assert torch.equal(document.from_cu_seqlens(cumulative).ids, mask.ids)


def test_padding_sees_nothing_and_is_not_seen():
    lengths = [5, 30]
    mask = document.from_lengths(lengths, q_len=50)
    assert torch.equal(kept(mask, 50, 50)[0], by_lengths(lengths, lengths, 50, 50))
    mask = document.from_lengths(lengths, q_len=50, kv_len=60)
    assert torch.equal(kept(mask, 50, 60)[0], by_lengths(lengths, lengths, 50, 60))


def test_other_lengths_of_keys():
    q, k = [3, 0, 20], [10, 7, 31]
    mask = document.from_lengths(q, k)
    assert torch.equal(kept(mask, 23, 48)[0], by_lengths(q, k, 23, 48))
    ends = [torch.tensor([0, *x]).cumsum(0) for x in (q, k)]
    mask = document.from_cu_seqlens(*ends, kv_len=64)
    assert torch.equal(kept(mask, 23, 64)[0], by_lengths(q, k, 23, 64))


def test_ragged_batches():
    rows = [[5, 30], [10, 10, 10, 1], [], [40]]
    mask = document.from_lengths(rows)
    assert mask.ids.shape == (4, 40)
    got = kept(mask, 40, 40, b=4)
    for row, lengths in zip(got, rows, strict=True):
        assert torch.equal(row, by_lengths(lengths, lengths, 40, 40))
    ends = [torch.tensor([0, *x]).cumsum(0) for x in rows]
    assert torch.equal(document.from_cu_seqlens(ends).ids, mask.ids)
    even = document.from_lengths(torch.tensor([[3, 4], [2, 5]]))
    assert even.ids.tolist() == [[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]
    assert even.kv_ids is None
    q, k, v = torch.randn(3, 4, 2, 40, 8)
    out = headway.attention(q, k, v, mask=causal() & mask)
    alone = headway.attention(*(x[1:2, :, 20:30] for x in (q, k, v)), mask=causal())
    torch.testing.assert_close(out[1:2, :, 20:30], alone)
    assert (out[0, :, 35:] == 0).all()
    assert (out[2] == 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: document.from_lengths([3, -2]), "lengths is negative at index 1"),
        (lambda: document.from_lengths([[3], [4, -1]]), r"lengths\[1\] is negative at index 1"),
        (lambda: document.from_lengths([2.5]), "lengths must be a list of integers .*float"),
        (lambda: document.from_lengths(["a"]), "lengths must be integers"),
        (lambda: document.from_lengths([[3], 4]), r"lengths\[1\] must be a list"),
        (lambda: document.from_lengths(torch.zeros(0, 3).long()), "lengths has no rows"),
        (lambda: document.from_cu_seqlens([0, 4, 2]), "cu_seqlens falls at index 2"),
        (lambda: document.from_cu_seqlens([1, 4]), "cu_seqlens must start with 0"),
        (lambda: document.from_cu_seqlens([]), "cu_seqlens must start with 0"),
        (lambda: document.from_lengths([3, 2], [5]), "queries are 2 documents, keys 1"),
        (lambda: document.from_lengths([[3], [2]], [[5], []]), r"documents, keys \[1, 0\]"),
        (lambda: document.from_lengths([5, 5], q_len=8), "q_len=8, but the documents have 10"),
        (lambda: document.from_lengths([5], [9], kv_len=8), "kv_len=8, but the documents have 9"),
    ],
)
def test_wrong_lengths_are_named(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


# -- T5 -------------------------------------------------------------------------------------------


def t5_bucket(distance: int, buckets: int, most: int, bidirectional: bool) -> int:
    """The paper's buckets, one distance (j - i) at a time, in the arithmetic of T5's own code."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    log = torch.log(torch.tensor(float(distance)) / exact) / math.log(most / exact)
    return first + min(exact + int(log * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (64, 1000), (4, 3)])
def test_t5_bias(buckets, most, bidirectional):
    table = torch.randn(buckets, 3, dtype=torch.float64, requires_grad=True)
    score = t5_bias(table, most, bidirectional)
    q_len, kv_len = 200, 150
    bucket = torch.tensor(
        [[t5_bucket(j - i, buckets, most, bidirectional) for j in range(kv_len)]
         for i in range(q_len)]
    )  # fmt: skip
    q = torch.randn(2, 3, q_len, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, kv_len, 8, dtype=torch.float64)
    out = headway.attention(q, k, v, score=score, scale=1.0)
    logits = q @ k.mT + table[bucket].permute(2, 0, 1)
    want = logits.softmax(-1) @ v
    torch.testing.assert_close(out, want)
    weight = torch.randn_like(out)
    grads = [torch.autograd.grad((o * weight).sum(), table)[0] for o in (out, want)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: t5_bias(torch.zeros(31, 2)), "31 rows; it needs an even number, at least 4"),
        (lambda: t5_bias(torch.zeros(1, 2), bidirectional=False), "1 rows"),
        (lambda: t5_bias(torch.zeros(32, 2), 8), r"max_distance=8\).* above 8"),
        (lambda: t5_bias(torch.zeros(32)), r"float tensor \(buckets, heads\)"),
        (lambda: t5_bias(torch.zeros(32, 2).long()), "float tensor"),
    ],
)
def test_wrong_tables_are_named(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


# -- windows of images ----------------------------------------------------------------------------


def swin_index(h: int, w: int) -> torch.Tensor:
    """(h * w, h * w): the row of the table for two points, by their offset."""
    points = list(itertools.product(range(h), range(w)))
    offsets = list(itertools.product(range(1 - h, h), range(1 - w, w)))
    return torch.tensor([[offsets.index((y - v, x - u)) for v, u in points] for y, x in points])


def beit_index(h: int, w: int) -> torch.Tensor:
    """The same with a class token first."""
    rows = (2 * h - 1) * (2 * w - 1)
    index = torch.zeros(h * w + 1, h * w + 1).long()
    index[1:, 1:] = swin_index(h, w)
    index[0], index[:, 0], index[0, 0] = rows, rows + 1, rows + 2
    return index


@pytest.mark.parametrize("window", [(4, 4), (3, 5), (1, 6)], ids=str)
@pytest.mark.parametrize("token", [False, True])
def test_window_bias(window, token):
    index = (beit_index if token else swin_index)(*window)
    table = torch.randn(int(index.max()) + 1, 2, dtype=torch.float64, requires_grad=True)
    q, k, v = torch.randn(3, 3, 2, len(index), 8, dtype=torch.float64)
    out = headway.attention(q, k, v, window_bias(table, window))
    want = (q @ k.mT / 8**0.5 + table[index].permute(2, 0, 1)).softmax(-1) @ v
    torch.testing.assert_close(out, want)
    weight = torch.randn_like(out)
    grads = [torch.autograd.grad((o * weight).sum(), table)[0] for o in (out, want)]
    torch.testing.assert_close(*grads)


def test_shifted_windows_as_documented():
    """Swin's block: roll, cut into windows, mask what did not lie together."""
    (H, W), (h, w), s = (8, 12), (4, 6), 2
    table = torch.randn((2 * h - 1) * (2 * w - 1), 2, dtype=torch.float64)
    q, k, v = torch.randn(3, 1, 2, H * W, 8, dtype=torch.float64)
    wrapped = lambda n: (torch.arange(n) >= n - s).long()
    part = wrapped(H)[:, None] * 2 + wrapped(W)
    window = torch.arange(H)[:, None] // h * (W // w) + torch.arange(W) // w
    order = tiled(causal(), (H, W), (h, w)).order()
    mask = document((window * 4 + part).flatten()[order])
    image = lambda x: x.unflatten(2, (H, W))
    rolled = [image(x).roll((-s, -s), (2, 3)).flatten(2, 3)[:, :, order] for x in (q, k, v)]
    ours = headway.attention(*rolled, window_bias(table, (h, w)), mask)
    ours = image(ours[:, :, order.argsort()]).roll((s, s), (2, 3)).flatten(2, 3)
    # Point by point: where each lies after the roll, in which window, and whether it came around.
    bias = torch.full((2, H * W, H * W), -math.inf, dtype=torch.float64)
    index, points = swin_index(h, w), list(itertools.product(range(H), range(W)))
    for (i, (y, x)), (j, (t, u)) in itertools.product(enumerate(points), repeat=2):
        (a, b), (c, d) = (((y - s) % H, (x - s) % W), ((t - s) % H, (u - s) % W))
        if (a // h, b // w) == (c // h, d // w) and (y < s, x < s) == (t < s, u < s):
            bias[:, i, j] = table[index[a % h * w + b % w, c % h * w + d % w]]
    want = (q @ k.mT / 8**0.5 + bias).softmax(-1) @ v
    torch.testing.assert_close(ours, want)


@pytest.mark.parametrize(
    ("table", "window", "q_len", "message"),
    [
        ((49, 2), (4, 4), 20, "at most 16 positions, or a multiple of it, .* has q_len=20"),
        ((52, 2), (4, 4), 34, "at most 17 positions, with the class token, .* has q_len=34"),
        ((49, 3), (4, 4), 16, "table has shape"),
        ((48, 2), (4, 4), 16, r"\(49, heads\), one row per offset .*, or \(52, heads\)"),
        ((49, 2), 4, 16, "window=4"),
        ((49, 2), (4, 0), 16, "two integers"),
        ((49,), (4, 4), 16, r"float tensor \(49, heads\)"),
    ],
)
def test_wrong_windows_are_named(table, window, q_len, message):
    q = torch.randn(1, 2, q_len, 8)
    with pytest.raises(ArgumentError, match=message):
        headway.attention(q, q, q, window_bias(torch.zeros(table), window))
