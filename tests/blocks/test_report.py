"""The page that zooms into a block mask: its grids are the tiles', its size is that of the runs."""

import base64
import json
import re
import zlib
from itertools import pairwise

import numpy as np
import pytest
import torch

import headway as hw
from headway.blocks import report
from headway.errors import ArgumentError


def told(page: str) -> dict:
    (text,) = re.findall(r"^const data = (.+);$", page, re.MULTILINE)
    return json.loads(text)


def dense(text: str, rows: int, columns: int) -> np.ndarray:
    """The states of a grid, read as the page reads them."""
    data = zlib.decompress(base64.b64decode(text))
    n = (len(data) // 4 - rows) // 3
    parts, at = [], 0
    for size in (rows, n, n, n):
        planes = np.frombuffer(data, np.uint8, 4 * size, at).reshape(4, size)
        parts.append(planes.T.copy().view("<i4").ravel())
        at += 4 * size
    in_row, start, count, kind = parts
    state, first = np.zeros((rows, columns), np.uint8), np.append(0, in_row.cumsum())
    for row, (a, z) in enumerate(pairwise(first)):
        for i in range(a, z):
            if row and (above := first[row - 1] + i - a) < a:
                start[i] += start[above]
                count[i] += count[above]
            assert not state[row, start[i] : start[i] + count[i]].any()
            state[row, start[i] : start[i] + count[i]] = kind[i]
    return state


def random(b: int, h: int, lengths: tuple[int, int]) -> hw.BlockMask:
    torch.manual_seed(lengths[0])
    table = torch.rand(b, h, -(-lengths[0] // 4), -(-lengths[1] // 4)) < 0.6
    mask = hw.block_table(table, 4) & hw.causal(lengths[1] - lengths[0])
    return hw.block_mask(mask, b, h, *lengths, tile=(4, 4))


@pytest.mark.parametrize("lengths", [(230, 230), (3, 301), (301, 3), (1, 1)])
def test_every_grid_has_the_states_of_the_tiles(lengths, monkeypatch):
    monkeypatch.setattr(report, "_COARSEST", 8)
    mask = random(2, 3, lengths)
    data = told(report.page(mask))
    assert data["shape"] == [2, 3, *lengths]
    assert [g["by"] for g in data["grids"]] == [2**n for n in range(len(data["grids"]))]
    for n, grid in enumerate(data["grids"]):
        side = 4 * grid["by"]
        want = mask.retile((side, side)).to_dense().flatten(0, 1)
        for group, state in zip(data["groups"], want, strict=True):
            got = dense(group["grids"][n], grid["rows"], grid["columns"])
            np.testing.assert_array_equal(got, state.numpy())
    assert [g["counts"] for g in data["groups"]] == [
        list(mask[b, h].counts()) for b in range(2) for h in range(3)
    ]
    assert data["groups"][4]["label"] == "batch 1, head 1"


def test_a_million_tokens_are_a_small_file(tmp_path):
    ids = (torch.arange(1_000_000) * 37 % 9973 == 0).cumsum(0)
    mask = hw.block_mask(hw.causal() & hw.document(ids), 1, 1, 1_000_000, 1_000_000)
    mask.save_report(tmp_path / "mask.html")
    text = (tmp_path / "mask.html").read_text(encoding="utf-8")
    assert len(text) < 200_000
    data = told(text)
    assert (data["grids"][0]["by"], max(data["grids"][-1].values()) <= 128) == (1, True)


def test_a_file_has_a_limit(monkeypatch):
    mask = random(1, 1, (1100, 1100))
    whole = told(report.page(mask))["grids"]
    for name, limit in (("_MAX_BYTES", 4000), ("_MAX_RUNS", 9000)):
        with monkeypatch.context() as lower:
            lower.setattr(report, name, limit)
            data = told(report.page(mask))
        assert 0 < len(data["grids"]) < len(whole)
        assert data["grids"] == whole[-len(data["grids"]) :]  # the coarser ones
        assert data["groups"][0]["counts"] == list(mask.counts())  # of tiles, as ever
    monkeypatch.setattr(report, "_MAX_BYTES", 0)
    assert len(told(report.page(mask))["grids"]) == 1


def test_more_groups_than_are_drawn(monkeypatch):
    monkeypatch.setattr(report, "MAX_GROUPS", 2)
    data = told(report.page(random(1, 3, (8, 8))))
    assert [len(data["groups"]), data["left_out"]] == [2, 1]


def test_the_page_asks_nothing_of_a_network(tmp_path):
    path = tmp_path / "mask.html"
    hw.block_mask(hw.causal(), 1, 1, 64, 64, tile=8).save_report(path, title="a </script> & b")
    text = path.read_text(encoding="utf-8")
    assert "//" not in re.sub(r"^.*// .*$", "", text, flags=re.MULTILINE)  # comments have a space
    assert not re.search(r"\b(src|href|import|fetch|url)\b\s*[=(]", text)
    assert "<title>a &lt;/script&gt; &amp; b</title>" in text
    assert text.count("</script>") == 1
    assert told(text)["title"] == "a </script> & b"


def test_what_is_no_page_is_refused(tmp_path):
    mask = hw.block_mask(hw.causal(), 1, 1, 64, 64)
    with pytest.raises(ArgumentError, match=r"must end in \.html; save_picture draws"):
        mask.save_report(tmp_path / "mask.png")
    with pytest.raises(ArgumentError, match="cannot write to"):
        mask.save_report(tmp_path / "no" / "mask.html")
    with pytest.raises(ArgumentError, match="no pair to draw"):
        hw.block_mask(hw.causal(), 1, 1, 0, 64).save_report(tmp_path / "mask.html")
