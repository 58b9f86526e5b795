"""Tiles that follow from intervals are those of the definition and of the search, and masks of this
kind take no search."""

import functools
import operator
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headway as hw
from headway.blocks import intervals, quadtree
from headway.mods import lower_mod
from headway.types import Coords

from .dense import CPU, build, check_build

KINDS = (
    "causal", "window", "abs", "below", "above", "document", "rows of documents", "chunk", "equal",
    "comes back", "short", "other keys", "padded", "other order",
)  # fmt: skip


@st.composite
def terms(draw, kind: str, length: int):
    """A mask of this kind."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n, flip = draw(st.integers(-9, 60)), draw(st.booleans())
    starts = torch.rand(2, length, generator=generator) < draw(st.sampled_from([0.02, 0.3, 1]))
    ids = starts.cumsum(1)
    if draw(st.booleans()):  # any order of ids, each in one place
        ids = torch.randperm(length + 2, generator=generator)[ids]
    backwards = ids[0].flip(0)
    padded = torch.where(
        torch.arange(length) < n + 9, starts[0].cumsum(0), torch.tensor([[-1], [-2]])
    )
    return {
        "causal": lambda: hw.causal(n),
        "window": lambda: hw.sliding_window(max(1, n)),
        "abs": lambda: lambda b, h, i, j: (n > (i - j).abs()) if flip else (j - i).abs() <= n,
        "below": lambda: lambda b, h, i, j: (i - j < n) if flip else (j + n >= i - 2),
        "above": lambda: lambda b, h, i, j: (n < j - i) if flip else (-j >= n - i),
        "document": lambda: hw.document(ids[0]),
        "rows of documents": lambda: lambda b, h, i, j: ids[b, i] == ids[b, j],
        "other keys": lambda: lambda b, h, i, j: ids[0, i] == ids.int()[1, j],
        "padded": lambda: lambda b, h, i, j: padded[0, i] == padded[1, j],
        "other order": lambda: lambda b, h, i, j: ids[0, i] == backwards[j],
        "chunk": lambda: lambda b, h, i, j: j // max(1, n) == i // max(1, n),
        "equal": lambda: lambda b, h, i, j: i - n == j,
        "comes back": lambda: hw.document(ids[0] % 3),
        "short": lambda: hw.document(ids[0, : length // 3]),
    }[kind]()


@st.composite
def interval_masks(draw, length: int):
    """A mask and whether every query keeps one interval of keys, as the code can know it."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    parts = [draw(terms(kind, length)) for kind in kinds]
    mask = lambda b, h, i, j: functools.reduce(operator.and_, [p(b, h, i, j) for p in parts])
    return mask if len(parts) > 1 else parts[0], not {
        "comes back",
        "short",
        "other keys",
        "other order",
    } & set(kinds)


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_tiles_from_intervals_are_those_of_every_pair(data):
    length = data.draw(st.integers(1, 140))
    mask, is_interval = data.draw(interval_masks(length))
    b, h = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3)]))
    tile = tuple(data.draw(st.sampled_from([1, 2, 5, 8, 32, 200])) for _ in range(2))
    graph, captured = lower_mod("mask", mask, torch.float32)
    reads_tensors = bool(captured.tensors)
    shape = (b, h, length, length)
    coords = Coords()
    if not reads_tensors:
        shape = (b, h, length, data.draw(st.integers(1, 140)))
        coords = Coords(0, 0, *(data.draw(st.sampled_from([0, 1, 37])) for _ in range(2)))
    searched = []
    search = quadtree.Search._coarse_to_fine

    def counted(self):
        searched.append(self)
        return search(self)

    try:
        with (
            patch.object(quadtree.Search, "_coarse_to_fine", counted),
            patch.object(intervals, "_MOST_SEGMENTS", 1000),
        ):
            check_build(graph, captured, shape, tile, coords)
    except hw.errors.CapturedIndexError:
        assert not is_interval
        return
    alike = shape[2:] == (shape[3],) * 2 and coords.q == coords.kv
    if is_interval and alike:
        assert not searched


@settings(max_examples=80, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_documents_of_other_lengths_in_queries_and_keys(data):
    """Documents of some queries and some keys, or of none; also rows of a batch, and distances."""
    draw = data.draw
    pairs = draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6)
    )
    q_ids, kv_ids = (
        torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(side))
        for side in zip(*pairs, strict=True)
    )
    ends = [torch.full((draw(st.integers(0, 30)),), -n) for n in (1, 2)]
    q_ids, kv_ids = torch.cat([q_ids, ends[0]]).int(), torch.cat([kv_ids, ends[1]])
    if not (len(q_ids) and len(kv_ids)):
        return
    low, high = draw(st.integers(-90, 5)), draw(st.integers(-5, 90))
    mask = draw(st.sampled_from([
        lambda b, h, i, j: q_ids[i] == kv_ids[j],
        lambda b, h, i, j: (kv_ids[j] == q_ids[i]) & (i - j <= high) & (i - j >= low),
        lambda b, h, i, j: (kv_ids[j] == q_ids[i]) & (i // 64 == j // 64),
    ]))  # fmt: skip
    graph, captured = lower_mod("mask", mask, torch.float32)
    tile = tuple(draw(st.sampled_from([1, 2, 5, 8, 32, 200])) for _ in range(2))
    with (
        patch.object(quadtree.Search, "_coarse_to_fine", side_effect=AssertionError),
        patch.object(intervals, "_MOST_SEGMENTS", 1000),
        patch.object(quadtree, "_SMALL_GRID", 0),
    ):
        check_build(graph, captured, (2, 1, len(q_ids), len(kv_ids)), tile)


def test_numbers_that_wrap_are_left_to_the_search():
    largest = 2**63 - 1
    for mask in (
        lambda b, h, i, j: i + largest >= j,
        lambda b, h, i, j: (i - j - largest - 1).abs() < 4,
        lambda b, h, i, j: i - j < largest,
    ):
        graph, captured = lower_mod("mask", mask, torch.float32)
        check_build(graph, captured, (1, 1, 50, 50), (8, 8))


@pytest.mark.parametrize("mask", [
    hw.causal() | hw.document(torch.arange(1000) // 90),
    hw.prefix(8),
    hw.document(torch.arange(1000)),  # too many segments
    lambda b, h, i, j: (i - j).abs() > 3,
    lambda b, h, i, j: (i - j).float() < 3.5,
    lambda b, h, i, j: i + j < 50,
    lambda b, h, i, j: 2 * i < j,
])  # fmt: skip
def test_other_masks_are_searched(mask):
    graph, captured = lower_mod("mask", mask, torch.float32)
    check_build(graph, captured, (1, 1, 1000, 1000), (50, 50))
    with patch.object(quadtree, "_SMALL_GRID", 0):
        search = quadtree.Search._coarse_to_fine
        with patch.object(quadtree.Search, "_coarse_to_fine", autospec=True, side_effect=search):
            build(graph, captured, (1, 1, 1000, 1000), (50, 50), CPU)
            assert quadtree.Search._coarse_to_fine.called  # type: ignore[attr-defined]
