"""Tiles found by interval evaluation are those of the definition, for any mask, ids and lengths."""

from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.blocks import quadtree
from headway.errors import CapturedIndexError
from headway.mods.graph import Graph
from headway.types import Captured, Coords

from .dense import CPU, build, check_build, dense_mask
from .expressions import masks


class Problem(NamedTuple):
    graph: Graph
    captured: Captured
    shape: tuple[int, int, int, int]
    tile: tuple[int, int]
    coords: Coords

    def __repr__(self) -> str:
        return f"{self.graph}\n{self.captured[1:]} {self.shape} {self.tile} {self.coords[:4]}"


@st.composite
def problems(draw):
    b, h = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    q_len, kv_len = (draw(st.integers(1, 150)) for _ in range(2))
    tile = tuple(draw(st.sampled_from([1, 2, 5, 8, 16, 32])) for _ in range(2))
    longest = 220
    offsets = [draw(st.sampled_from([0, 0, 1, 37])) for _ in range(2)]
    kind = draw(st.sampled_from(["offset", "offset", "shared", "per batch"]))
    q_pos = kv_pos = None
    if kind != "offset":
        g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        size = (b,) if kind == "per batch" else ()
        q_pos = torch.randint(0, 187, (*size, q_len), generator=g).sort(-1).values
        kv_pos = torch.randint(0, 187, (*size, kv_len), generator=g)
    coords = Coords(0, 0, *offsets, q_pos, kv_pos)
    return Problem(*draw(masks(b, h, longest)), (b, h, q_len, kv_len), tile, coords)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(problems())
def test_tiles_equal_the_dense_result(problem):
    graph, captured, shape, tile, coords = problem
    try:
        dense_mask(graph, captured, shape, coords)
    except CapturedIndexError:
        for whole in (0, quadtree._SMALL_GRID):
            with pytest.raises(CapturedIndexError), patch.object(quadtree, "_SMALL_GRID", whole):
                build(graph, captured, shape, tile, CPU, coords)
        return
    check_build(graph, captured, shape, tile, coords)
