"""Arithmetic on runs, next to the dense square."""

import numpy as np
import pytest
import torch

from headway.blocks.runs import Runs, cover


@pytest.mark.parametrize("turn", range(20))
def test_cover_and_ends(turn, seed):
    draw = np.random.default_rng(seed)
    lines, width, count = (int(n) for n in draw.integers([1, 1, 0], [9, 30, 40]))
    line = draw.integers(0, lines, count)
    start, stop = np.sort(draw.integers(0, width + 1, (2, count)), 0)
    dense = np.zeros((lines, width), int)
    for r, a, b in zip(line, start, stop, strict=True):
        dense[r, a:b] += 1
    found = cover(line, start, stop, lines, width)
    assert found.dtype == np.int32
    assert (found == dense).all()

    live = torch.from_numpy(dense > 0)
    key = live.nonzero()
    runs = Runs.of_keys(
        key[:, 0] * (width + 1) + key[:, 1], torch.ones(len(key)).long(), lines, width
    )
    assert runs.ends().tolist() == [int(row.nonzero().max()) + 1 if row.any() else 0
                                    for row in live]  # fmt: skip
