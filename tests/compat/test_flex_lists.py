"""Lists of blocks, ours and PyTorch's: however they are written to, a call means what they name now."""

import gc
import random
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import headway as hw
from headway import caches
from headway.compat import flex, flex_lists, flex_mask

BLOCK, BLOCKS = 16, 4
LENGTH = BLOCK * BLOCKS
LIBRARIES = {"ours": flex, "PyTorch's": theirs}


def causal(b, h, i, j):
    return i >= j


def lists() -> list[torch.Tensor]:
    """Some partial and some full blocks in each row, int32 `(1, 1, rows)` and `(1, 1, rows, n)`."""
    found = []
    for _ in range(2):
        found.append(torch.randint(0, BLOCKS // 2 + 1, (1, 1, BLOCKS), dtype=torch.int32))
        found.append(torch.stack([torch.randperm(BLOCKS) for _ in range(BLOCKS)])[None, None].int())
    return found


def dense(kv_num, kv_indices, full_num, full_indices) -> torch.Tensor:
    """The definition: full blocks are kept, partial ones by the mask."""
    kept = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for num, indices, full in ((kv_num, kv_indices, False), (full_num, full_indices, True)):
        for row in range(BLOCKS):
            for column in indices[0, 0, row, : int(num[0, 0, row])].tolist():
                i = torch.arange(row * BLOCK, (row + 1) * BLOCK)[:, None]
                j = torch.arange(column * BLOCK, (column + 1) * BLOCK)
                kept[i, j] |= (i >= j) | full
    return kept


def right(q, of) -> torch.Tensor:
    kept = dense(*of)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q, kept)
    return torch.where(kept.any(1)[:, None], out, 0)


def made(library, of):
    return LIBRARIES[library].BlockMask.from_kv_blocks(
        *of, BLOCK_SIZE=BLOCK, mask_mod=causal, seq_lengths=(LENGTH, LENGTH)
    )


def call(q, mask):
    return flex.flex_attention(q, q, q, None, mask)


def forgetting(write):
    """A write that no version tells of."""

    def way(t, new):
        write(t, new)
        hw.clear_block_cache()

    return way


WAYS = {
    "copy_": lambda t, new: t.copy_(new),
    "view": lambda t, new: t[0].copy_(new[0]),
    "set_": lambda t, new: t.set_(new),
    "data": forgetting(lambda t, new: t.data.copy_(new)),
    "numpy": forgetting(lambda t, new: np.copyto(t.numpy(), new.numpy())),
    "dlpack": forgetting(lambda t, new: torch.from_dlpack(t).copy_(new)),
    "storage": forgetting(lambda t, new: t.untyped_storage().copy_(new.untyped_storage())),
}


@pytest.mark.parametrize("made_in", ["inference mode", "as ever"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_written_counts(library, way, made_in):
    inside = made_in == "inference mode"
    if inside and way == "set_":
        pytest.skip("PyTorch refuses it")
    q = torch.randn(1, 2, LENGTH, 8)
    with torch.inference_mode(inside):
        of = lists()
        mask = made(library, of)
    for _ in range(2):
        for _ in range(2):  # the second is known
            torch.testing.assert_close(call(q, mask), right(q, of))
        with torch.inference_mode(inside):
            at = random.randrange(4)
            WAYS[way](of[at], lists()[at])
    torch.testing.assert_close(call(q, mask), right(q, of))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_mask_made_in_inference_mode_trains(library):
    with torch.inference_mode():
        of = lists()
        mask = made(library, of)
        ids = torch.arange(LENGTH) // 9
        built = LIBRARIES[library].create_block_mask(
            lambda b, h, i, j: ids[i] == ids[j], None, None, LENGTH, LENGTH, "cpu", BLOCK
        )
    q = torch.randn(1, 2, LENGTH, 8, requires_grad=True)
    for given, kept in ((mask, dense(*of)), (built, ids[:, None] == ids)):
        (ours,) = torch.autograd.grad(call(q, given).square().sum(), q)
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, kept.clone())
        out = torch.where(kept.any(1)[:, None], out, 0)
        torch.testing.assert_close(ours, torch.autograd.grad(out.square().sum(), q)[0])


def test_nothing_is_kept_of_lists_that_are_gone():
    q, gone, before = torch.zeros(1, 1, LENGTH, 8), [], len(flex_mask._converted)
    for _ in range(8):
        of = lists()
        call(q, made("PyTorch's", of))
        gone.append(weakref.ref(of[0]))
    del of
    gc.collect()
    assert not [ref for ref in gone if ref() is not None]
    assert len(flex_mask._converted) <= before


@pytest.mark.parametrize("library", LIBRARIES)
def test_while_a_graph_is_captured_lists_are_read_by_the_graph(library):
    """Nothing that was found before is used, the host reads nothing, and nothing is kept."""
    q, of = torch.randn(1, 2, LENGTH, 8), lists()
    mask = made(library, of)
    torch.testing.assert_close(call(q, mask), right(q, of))
    before = len(flex_mask._converted)
    of[0].copy_(lists()[0])
    expected = right(q, of)
    with (
        mock.patch.object(flex_lists, "capturing", return_value=True),
        mock.patch.object(caches, "capturing", return_value=True),
        mock.patch.object(torch.Tensor, "aminmax", side_effect=AssertionError),
    ):
        found = [flex_mask.as_tiles(mask) for _ in range(2)]
    assert all(isinstance(x, flex_mask.in_blocks) for x in found)
    assert found[0].state.data_ptr() != found[1].state.data_ptr()
    torch.testing.assert_close(hw.attention(q, q, q, None, found[0]), expected)
    assert len(flex_mask._converted) == before
    torch.testing.assert_close(call(q, mask), expected)
