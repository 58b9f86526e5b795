"""Positions that no query has, offsets that mask nothing out, and parents after their children are refused;
all other calls mean what the definition says."""

import random

import pytest
import torch

import headway as hw
from headway.distributed import Layout
from headway.errors import ArgumentError
from variants import _in_tree


def made(q_len: int, kv_len: int, b: int = 1) -> tuple[torch.Tensor, ...]:
    new = torch.Generator().manual_seed(0)
    return tuple(torch.randn(b, 2, n, 8, generator=new) for n in (q_len, kv_len, kv_len))


def agrees(q, k, v, mask, kept) -> None:
    """The call's out is that of dense attention over the pairs that are kept, (b, q_len, kv_len)."""
    s = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~kept[:, None], -torch.inf)
    right = torch.softmax(s, -1).nan_to_num() @ v.double()
    torch.testing.assert_close(
        hw.attention(q, k, v, mask=mask).double(), right, rtol=1e-5, atol=1e-5
    )


def pairs(q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(q_len)[:, None], torch.arange(kv_len)[None]


def in_tree(parents: torch.Tensor, i: torch.Tensor, j: torch.Tensor, start: int) -> torch.Tensor:
    """The definition; what comes after the tree sees nothing."""
    return _in_tree(parents, i, j, start) & (i < start + len(parents))


def tree_of(numbers: random.Random, nodes: int) -> torch.Tensor:
    return torch.tensor([numbers.randrange(-1, n) for n in range(nodes)], dtype=torch.long)


def test_a_tree_that_no_query_is_in():
    """It is refused, and nothing else is: there the mask would be that of `causal()`."""
    numbers, refused = random.Random(1), 0
    for _ in range(40):
        q_len, kv_len, start = (numbers.randrange(1, 14) for _ in range(3))
        parents = tree_of(numbers, numbers.randrange(1, 6))
        q, k, v = made(q_len, kv_len)
        i, j = pairs(q_len, kv_len)
        kept = in_tree(parents, i, j, start)[None]
        tree, near = hw.tree(parents, start), (i - j).abs() < 4
        for mask, seen in ((tree, kept), (tree & hw.sliding_window(4), kept & near)):
            if q_len > start:
                agrees(q, k, v, mask, seen)
                continue
            refused += 1
            assert torch.equal(kept[0], j <= i)
            said = rf"start={start}\): no query is in the tree"
            with pytest.raises(ArgumentError, match=said):
                hw.attention(q, k, v, mask=mask)
            with pytest.raises(ArgumentError, match=said):
                hw.block_mask(mask, 1, 1, q_len, kv_len)
    assert 20 < refused < 60


def test_the_way_out_of_a_tree_that_no_query_is_in():
    q, k, v = made(3, 13)
    parents = torch.tensor([-1, 0, 0])
    with pytest.raises(
        ArgumentError, match=r"the 3 queries of this call are at positions 0 to 2.*a cache"
    ):
        hw.attention(q, k, v, mask=hw.tree(parents, 10))
    lengths = torch.tensor([13], dtype=torch.int32)
    got = hw.inference.attention(q, k, v, None, hw.tree(parents, 10), lengths=lengths)
    whole = hw.attention(torch.cat((k[:, :, :10], q), 2), k, v, mask=hw.tree(parents, 10))
    torch.testing.assert_close(got, whole[:, :, 10:])


def test_where_trees_begin_is_read_at_every_call():
    """In the batch some rows may have no query in their tree, and not all."""
    q, k, v = made(6, 6, b=2)
    start, parents = torch.tensor([2, 9]), torch.tensor([-1, 0, 0])
    mask = hw.tree(parents, start)
    i, j = pairs(6, 6)
    kept = torch.stack([in_tree(parents, i, j, int(n)) for n in start])
    for _ in range(2):
        agrees(q, k, v, mask, kept)
    start[0] = 6
    with pytest.raises(ArgumentError, match=r"tree\(start=6\)"):
        hw.attention(q, k, v, mask=mask)
    start[0] = 0
    hw.attention(q, k, v, mask=mask)


def test_trees_that_are_elsewhere_are_not_refused():
    parents = torch.tensor([-1, 0])
    q, k, v = made(4, 8)
    hw.explain(
        q, k[:, :, :4], v[:, :, :4], mask=hw.tree(parents, 5), layout=Layout.contiguous(8, (0, 2))
    )
    q, k, v = made(0, 3)
    assert hw.attention(q, k, v, mask=hw.tree(parents, 5)).shape == q.shape


def test_parents_come_before_their_children():
    numbers, refused = random.Random(2), 0
    for _ in range(40):
        nodes = numbers.randrange(1, 6)
        parents = tree_of(numbers, nodes)
        n = numbers.randrange(nodes)
        parents[n] = late = numbers.randrange(-1, nodes + 2)
        for given, place in (
            (parents, f"{n}"),
            (torch.stack([parents.clamp(max=-1), parents]), f"1, {n}"),
        ):
            if late < n:
                hw.tree(given)
                continue
            refused += 1
            said = rf"parents\[{place}\] is {late}, but a parent comes before its children, with a number below {n};"
            with pytest.raises(ArgumentError, match=said):
                hw.tree(given)
    assert refused > 20


def test_an_offset_that_masks_nothing_out():
    """A bare `causal(n)` of several queries."""
    numbers, refused = random.Random(3), 0
    for _ in range(40):
        q_len, kv_len = (numbers.randrange(0, 9) for _ in range(2))
        n = numbers.randrange(-3, 12)
        q, k, v = made(q_len, kv_len)
        i, j = pairs(q_len, kv_len)
        kept = (j <= i + n)[None]
        agrees(q, k, v, hw.causal(n) & hw.sliding_window(3), kept & ((i - j).abs() < 3))
        if n > 0 and q_len > 1 and kv_len and bool(kept.all()):
            refused += 1
            for mask in (hw.causal(n), hw.block_mask(hw.causal(n), 1, 1, q_len, kv_len)):
                for attend in (hw.attention, hw.attention_with_stats, hw.explain):
                    with pytest.raises(
                        ArgumentError, match=rf"mask=causal\({n}\) masks nothing out: each of"
                    ):
                        attend(q, k, v, mask=mask)
        else:
            agrees(q, k, v, hw.causal(n), kept)
        if q_len <= kv_len:  # as decoding and chunks of a prompt have it
            agrees(q, k, v, hw.causal(kv_len - q_len), (j <= i + kv_len - q_len)[None])
    assert refused > 5


@pytest.mark.parametrize("mask", [hw.causal(3), hw.tree(torch.tensor([-1, 0]), 2)], ids=repr)
def test_lengths_that_a_compiler_does_not_know(mask):
    torch._dynamo.reset()
    attend = torch.compile(
        lambda x: hw.attention(x, x, x, mask=mask), backend="eager", fullgraph=True
    )
    for unbacked in (True, False):
        x = torch.randn(1, 2, 7, 8)
        if unbacked:
            torch._dynamo.decorators.mark_unbacked(x, 2)
        else:
            torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(attend(x), hw.attention(x, x, x, mask=mask))


def test_explain_says_how_queries_are_aligned():
    q, k, v = made(7, 27)
    said = str(hw.explain(q, k, v, mask=hw.causal()))
    assert "7 queries, 27 keys: aligned at the top left, so queries are at positions 0 to 6" in said
    assert (
        "causal() lets query i see keys 0 to i; causal(20) aligns the last query with the last key"
        in said
    )
    said = str(hw.explain(q, k, v, mask=hw.causal(20) & hw.sliding_window(4)))
    assert "causal(20) aligns them at the bottom right, so query i sees keys 0 to i + 20" in said
    for queries, keys in ((27, 27), (27, 7), (0, 7)):
        assert hw.explain(*made(queries, keys)).alignment == ""
