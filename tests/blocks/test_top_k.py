"""Block masks from lists of blocks."""

import math
import pickle

import pytest
import torch

import headway as hw
import oracle
from headway import BlockMask
from headway.errors import ArgumentError


def choice(b, h, rows, columns, k):
    """Lists with gaps (-1), in no order."""
    at = torch.rand(b, h, rows, columns).topk(min(k, columns)).indices
    return torch.where(torch.rand(at.shape) < 0.25, -1, at)


def kept(indices, block, q_len, kv_len):
    """Pair by pair: bool (b, h, q_len, kv_len)."""
    of_row = indices[:, :, torch.arange(q_len) // block[0]]  # (b, h, q_len, k)
    of_key = torch.arange(kv_len) // block[1]
    return (of_row[..., None, :] == of_key[:, None]).any(-1)


def dense(q, k, v, kept):
    s = (q @ oracle.to_heads(k, q.shape[1]).mT) / q.shape[3] ** 0.5
    p, _ = oracle.softmax(s.masked_fill(~kept, -math.inf), None)
    return p @ oracle.to_heads(v, q.shape[1])


SHAPES = {
    "even": (2, 4, (8, 8), 48, 48, 3),
    "short last blocks": (2, 4, (16, 32), 60, 80, 2),
    "one for all": (1, 1, (16, 8), 50, 30, 2),
    "one query": (2, 4, (1, 16), 5, 60, 2),
    "per batch": (2, 1, (32, 32), 100, 100, 2),
}


@pytest.mark.parametrize("mask", [None, hw.causal(3)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_to_chosen_blocks(name, mask):
    b, h, block, q_len, kv_len, most = SHAPES[name]
    rows, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    indices = choice(b, h, rows, columns, most)
    blocks = hw.top_k_blocks(indices, block, q_len, kv_len, mask=mask)
    assert blocks.tile == block
    assert blocks.shape == (b, h, q_len, kv_len)
    q = torch.randn(2, 4, q_len, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, kv_len, 8, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    right = kept(indices, block, q_len, kv_len)
    if mask is not None:
        right = right & mask(*oracle.grid(1, 1, q_len, kv_len))
    right = right.expand(2, 4, -1, -1)
    want = dense(*leaves, right)
    dout = torch.randn_like(want)
    grads = torch.autograd.grad(want, leaves, dout)
    coarser = blocks.retile((block[0] * 2, block[1] * 4))
    for given, backend in ((blocks, "cpu"), (coarser, "cpu"), (blocks, "reference")):
        out = hw.attention(q, k, v, None, given, backend=backend)
        torch.testing.assert_close(out, want)
        for got, true in zip(torch.autograd.grad(out, leaves, dout), grads, strict=True):
            torch.testing.assert_close(got, true)


def test_lists_of_key_heads():
    indices = choice(2, 2, 6, 5, 3)
    mask = lambda b, h, i, j: (i + h) % 3 != j % 3  # of query heads
    groups = hw.top_k_blocks(indices, 16, 96, 80, mask=mask, heads=6)
    every = hw.top_k_blocks(indices.repeat_interleave(3, 1), 16, 96, 80, mask=mask)
    q, (k, v) = torch.randn(2, 6, 96, 8), torch.randn(2, 2, 2, 80, 8)
    assert torch.equal(hw.attention(q, k, v, None, groups), hw.attention(q, k, v, None, every))
    with pytest.raises(ArgumentError, match=r"2 heads, but .* 6 query heads.*heads=6"):
        hw.attention(q, k, v, None, hw.top_k_blocks(indices, 16, 96, 80))


def test_tiles_are_the_blocks():
    indices = torch.tensor([[[[0, -1], [1, 0], [0, 2], [-1, -1]]]])
    blocks = hw.top_k_blocks(indices, 32)
    assert blocks.to_dense()[0, 0].tolist() == [
        [2, 0, 0, 0], [2, 2, 0, 0], [2, 0, 2, 0], [0, 0, 0, 0]
    ]  # fmt: skip
    blocks = hw.top_k_blocks(indices, 32, mask=hw.causal())
    assert blocks.to_dense()[0, 0].tolist() == [
        [1, 0, 0, 0], [2, 1, 0, 0], [2, 0, 1, 0], [0, 0, 0, 0]
    ]  # fmt: skip
    assert repr(blocks).startswith("BlockMask(block_table(bool[1, 1, 4, 4], (32, 32)) & causal(), ")


def test_a_block_that_is_named_twice_counts_once():
    once, twice = torch.tensor([[[[1, -1, 0]]]]), torch.tensor([[[[1, 1, 0]]]])
    q, k, v = torch.randn(3, 1, 1, 64, 8)
    q = q[:, :, :16]
    outs = [
        hw.attention(q, k, v, None, hw.top_k_blocks(x.to(dtype), 16, 16, 64))
        for x in (once, twice) for dtype in (torch.int64, torch.int32)
    ]  # fmt: skip
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_the_lists_are_copied():
    indices = torch.tensor([[[[0], [0]]]])
    blocks = hw.top_k_blocks(indices, 16)
    indices.fill_(1)
    q, k, v = torch.randn(3, 1, 1, 32, 8)
    got = hw.attention(q, k, v, None, blocks)
    torch.testing.assert_close(got, hw.attention(q, k[:, :, :16], v[:, :, :16]))


def test_saved_and_pickled(tmp_path):
    blocks = hw.top_k_blocks(choice(2, 2, 6, 5, 3), (16, 20), 96, 95, mask=hw.causal())
    blocks.save(tmp_path / "blocks")
    for again in (BlockMask.load(tmp_path / "blocks"), pickle.loads(pickle.dumps(blocks))):
        assert repr(again) == repr(blocks)
        q, k, v = torch.randn(2, 2, 96, 8), *torch.randn(2, 2, 2, 95, 8)
        assert torch.equal(hw.attention(q, k, v, None, again), hw.attention(q, k, v, None, blocks))


def test_a_mask_that_is_written_to_is_noticed():
    ids = torch.zeros(64, dtype=torch.int64)
    blocks = hw.top_k_blocks(torch.zeros(1, 1, 4, 1).long(), 16, mask=hw.document(ids))
    ids[3] = 1
    q, k, v = torch.randn(3, 1, 1, 64, 8)
    with pytest.raises(ArgumentError, match="written to since"):
        hw.attention(q, k, v, None, blocks)


def test_moba_as_documented():
    q, k, v = torch.randn(3, 1, 2, 256, 16, dtype=torch.float64)
    mean = lambda x: x.unflatten(2, (-1, 64)).mean(3)
    gate = mean(q) @ mean(k).mT
    gate = gate.masked_fill(torch.ones_like(gate).triu(1).bool(), -math.inf)
    score, chosen = gate.topk(2)
    chosen = torch.where(score > -math.inf, chosen, -1)
    mask = hw.top_k_blocks(chosen, 64, mask=hw.causal())
    i = torch.arange(256)
    right = kept(chosen, (64, 64), 256, 256) & (i <= i[:, None])
    torch.testing.assert_close(hw.attention(q, k, v, None, mask), dense(q, k, v, right))


@pytest.mark.parametrize(
    ("indices", "options", "message"),
    [
        (torch.tensor([[[[4]]]]), {"kv_len": 64}, "4 is not a valid block index: kv_len=64 in blocks of 16 has 4"),
        (torch.tensor([[[[-2]]]]), {}, "-2 is not a valid block index"),
        (torch.zeros(1, 1, 1), {}, r"\(b, h, rows, k\), got \(1, 1, 1\) float32"),
        ([[0]], {}, "got list"),
        (torch.zeros(1, 1, 2, 1).long(), {"q_len": 64}, "have 2 rows, but q_len=64 .* has 4"),
        (torch.zeros(1, 1, 2, 1).long(), {"block": 0}, "block=0 must be"),
        (torch.zeros(1, 1, 2, 1).long(), {"kv_len": 1.5}, "kv_len=1.5"),
        (torch.zeros(1, 1, 2, 1).long(), {"mask": hw.alibi(4)}, "pass it as score"),
        (torch.zeros(1, 2, 2, 1).long(), {"heads": 5}, "heads=5 must be a multiple of .* 2"),
        (torch.zeros(1, 2, 2, 1).long(), {"heads": 4.0}, "heads=4.0"),
        (torch.zeros(1, 1, 2, 1).long(), {"tile": 64}, "tile"),
    ],
)  # fmt: skip
def test_mistakes(indices, options, message):
    with pytest.raises((ArgumentError, TypeError), match=message):
        hw.top_k_blocks(indices, **{"block": 16} | options)
