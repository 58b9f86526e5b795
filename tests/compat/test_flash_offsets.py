"""Offsets of packed sequences: however they are written to, a call means what they hold now; and
nothing is kept of those that are gone."""

import gc
import random
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headway as hw
from headway import caches, packed
from headway.compat import flash

TOTAL = 270  # more than one tile


def cuts() -> list[int]:
    return [0, *sorted(random.choices(range(TOTAL + 1), k=3)), TOTAL]


def call(q, cu_q, cu_k, window=(-1, -1)):
    return flash.flash_attn_varlen_func(
        q, q, q, cu_q, cu_k, TOTAL, TOTAL, causal=True, window_size=window
    )


def dense(q, cu_q, cu_k):
    """Each sequence by itself, by PyTorch: the last query sees the last key."""
    out = torch.zeros_like(q)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        kept = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        x, y = q[a:b].transpose(0, 1)[None], q[c:d].transpose(0, 1)[None]
        made = torch.nn.functional.scaled_dot_product_attention(x, y, y, kept)
        out[a:b] = torch.where(kept.any(1)[:, None], made[0], 0).transpose(0, 1)
    return out


def through_storage(offsets, new):
    offsets.untyped_storage().copy_(new.untyped_storage())


def through_another(offsets, new):
    other = torch.empty(0, dtype=offsets.dtype)
    other.set_(offsets.untyped_storage(), 0, offsets.shape)
    other.copy_(new)


def in_inference_mode(offsets, new):
    with torch.inference_mode():
        offsets.copy_(new)


WAYS = {
    "copy_": lambda t, new: t.copy_(new),
    "item": lambda t, new: [t.__setitem__(n, x) for n, x in enumerate(new)],
    "view": lambda t, new: t[1:].copy_(new[1:]),
    "detach": lambda t, new: t.detach().copy_(new),
    "out": lambda t, new: torch.add(new, 0, out=t),
    "set_": lambda t, new: t.set_(new),
    "resize_": lambda t, new: t.resize_(0).resize_(len(new)).copy_(new),
    "data": lambda t, new: t.data.copy_(new),
    "other data": lambda t, new: setattr(t, "data", new),
    "numpy": lambda t, new: np.copyto(t.numpy(), new.numpy()),
    "dlpack": lambda t, new: torch.from_dlpack(t).copy_(new),
    "storage": through_storage,
    "another tensor": through_another,
    "inference mode": in_inference_mode,
}


@pytest.mark.parametrize("made_in", ["inference mode", "as ever"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_counts(way, made_in):
    dtype = random.choice([torch.int32, torch.int64])
    q = torch.randn(TOTAL, 2, 8)
    with torch.inference_mode(made_in == "inference mode"):
        cu_q, cu_k = (torch.tensor(cuts(), dtype=dtype) for _ in range(2))
    if made_in == "inference mode" and way in ("other data", "set_"):
        pytest.skip("PyTorch refuses it")
    for _ in range(2):
        own = random.random() < 0.5
        pair = (cu_q, cu_q) if own else (cu_q, cu_k)
        for _ in range(2):  # the second is known
            torch.testing.assert_close(call(q, *pair), dense(q, *(c.tolist() for c in pair)))
        for t in {id(t): t for t in random.choice([pair, pair[:1], pair[1:]])}.values():
            with torch.inference_mode(t.is_inference()):
                WAYS[way](t, torch.tensor(cuts(), dtype=dtype))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_offsets_made_in_inference_mode_train(mode):
    with torch.inference_mode():
        offsets = torch.tensor(cuts(), dtype=torch.int32)
    q = torch.randn(TOTAL, 2, 8, requires_grad=True)
    with mode():
        call(q.detach(), offsets, offsets)
    out = call(q, offsets, offsets, (5, 0))
    (grad,) = torch.autograd.grad(out.sum(), q)
    fresh = torch.tensor(offsets.tolist(), dtype=torch.int32)
    again = call(q, fresh, fresh, (5, 0))
    assert torch.equal(out, again)
    assert torch.equal(grad, torch.autograd.grad(again.sum(), q)[0])


@pytest.mark.parametrize("one", [True, False], ids=["one tensor", "two"])
def test_nothing_is_kept_of_offsets_that_are_gone(one):
    q = torch.zeros(TOTAL, 1, 1)
    before = len(packed._packings)
    gone = []
    for _ in range(6):
        cu_q = torch.tensor(cuts(), dtype=torch.int32)
        cu_k = cu_q if one else cu_q.clone()
        call(q, cu_q, cu_k, (3, 0))
        gone += weakref.ref(cu_q), weakref.ref(cu_k)
        gone.append(weakref.ref(packed._packings.values()[-1][2].ids))
    del cu_q, cu_k
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert len(packed._packings) <= before


def test_of_a_buffer_one_version_is_kept():
    q, offsets = torch.zeros(TOTAL, 1, 1), torch.tensor(cuts(), dtype=torch.int32)
    call(q, offsets, offsets)
    before = len(packed._packings)
    for _ in range(6):
        offsets.copy_(torch.tensor(cuts()))
        call(q, offsets, offsets)
    assert len(packed._packings) == before


def test_refusals_are_those_of_what_is_written_now():
    q, offsets = torch.randn(5, 1, 8), torch.tensor([0, 3, 5], dtype=torch.int32)
    go = lambda most: flash.flash_attn_varlen_func(q, q, q, offsets, offsets, most, most)
    go(3)
    with pytest.raises(RuntimeError, match="max_seqlen_q=2, but the longest sequence of q has 3"):
        go(2)
    go(torch.tensor(3))
    offsets[2] = 6
    with pytest.raises(
        RuntimeError, match=r"cu_seqlens_q must rise from 0 to at most 5.* \[0, 3, 6\]"
    ):
        go(3)


# -- while a CUDA graph is captured ---------------------------------------------------------------


class Readers(TorchDispatchMode):
    """How many operators are given memory of these tensors."""

    def __init__(self, *of: torch.Tensor) -> None:
        super().__init__()
        self.places, self.count = {t.untyped_storage().data_ptr() for t in of}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.count += any(x.untyped_storage().data_ptr() in self.places for x in given)
        return func(*args, **(kwargs or {}))


def test_a_capture_finds_and_leaves_nothing():
    """All that a captured call makes of offsets is made by operators in the graph, from them."""
    q, offsets = torch.randn(TOTAL, 2, 8), torch.tensor(cuts(), dtype=torch.int32)
    sides = [packed.Side(x, TOTAL, q.device, offsets, longest=TOTAL) for x in "qk"]
    packing = lambda: packed.pack(*sides)
    call(q, offsets, offsets)
    known, known_size = packing(), len(packed._packings)
    assert packing() is known
    with (
        mock.patch.object(caches, "capturing", return_value=True),
        mock.patch.object(packed.Side, "check_numbers"),  # on a GPU nobody reads them
    ):
        counts, made = [], []
        for _ in range(2):
            made.append(packing())
            with Readers(offsets) as readers:
                made.append(packing())
            counts.append(readers.count)
    assert counts[0] == counts[1] > 0
    tensors = [t for x in made for t in (x.ids, x.kv_ids, x.pos)]
    assert len({t.data_ptr() for t in tensors}) == 12
    assert len(packed._packings) == known_size
    assert packing() is known


def test_a_trace_reads_offsets():
    """What a call before it has made of the same offsets is no constant of the program."""
    q, offsets = torch.randn(TOTAL, 2, 8), torch.tensor(cuts(), dtype=torch.int32)
    windowed = lambda q, cu: call(q, cu, cu, (40, 0))
    windowed(q, offsets)
    program = make_fx(windowed)(q, offsets)
    for _ in range(2):
        torch.testing.assert_close(program(q, offsets), windowed(q, offsets))
        offsets = torch.tensor(cuts(), dtype=torch.int32)


def test_clearing_the_caches_forgets_offsets():
    """As after a write on a GPU that no counter tells of."""
    q, offsets = torch.randn(TOTAL, 2, 8), torch.tensor(cuts(), dtype=torch.int32)
    call(q, offsets, offsets)
    assert len(packed._packings)
    hw.clear_block_cache()
    assert not len(packed._packings)
