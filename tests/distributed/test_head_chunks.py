"""How many heads a chunk has, on cards that are not here: no card is asked, so all ranks choose alike."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import headway as hw
from headway.distributed import Layout
from headway.distributed.exchange import cost
from headway.distributed.exchange.comm_plan import SequenceShards
from headway.distributed.exchange.plan_inputs import MAX_CHUNK_BYTES, CallSizes, plan_inputs
from headway.resolve import prepare

LINK = 250e9


def setting(hq: int, hk: int, length: int, share: float, longest: float, needed: float = 1.0):
    """Of four ranks, each with its part of `length` queries, `share` of all pairs, and the keys
    that it needs; the longest work tile has `longest` of the keys or queries."""
    held = np.full(4, length // 4)
    group = hq // hk
    return SimpleNamespace(
        sizes=CallSizes(1, hq, hk, 128, 128, 2), device=torch.device("cuda"),
        q=SimpleNamespace(sizes=held), kv=SimpleNamespace(sizes=held),
        kv_tokens_read=[int(needed * length)] * 4, rank_pairs=np.full(4, share * length * length / 4),
        kv_bytes_per_token=512, all_kv_fits=hk * int(needed * length) * 512 <= MAX_CHUNK_BYTES,
        longest_work_tile=(128 * length * longest, 128 * length / 4 * group * longest),
    )  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("heads", [(4, 1), (12, 3), (32, 8), (64, 8), (32, 32), (30, 15)])
@pytest.mark.parametrize("length", [2000, 32768, 100_000, 1 << 18, 1 << 20])
def test_all_heads_once(heads, length, backward):
    """And no step has more keys and values than it may, where one head has not."""
    s = setting(*heads, length, 0.5, 1.0)
    found = cost.chunk_heads(s, backward, LINK)
    assert sum(found) == heads[1]
    assert min(found) > 0
    assert max(found) == 1 or max(found) * length * 256 * 2 <= MAX_CHUNK_BYTES


def test_ends_are_small():
    """Behind a causal mask: what nothing hides is the way of the first keys, and of the last
    gradients."""
    s = setting(32, 8, 32768, 0.5, 1.0)
    first, *_ = cost.chunk_heads(s, False, LINK)
    assert first < 4
    *_, last = cost.chunk_heads(s, True, LINK)
    assert last < 4


def test_long_documents_are_few_chunks():
    """Where one column has most of a head's work, kernels of few heads would take as long as one
    of all; in streams only the last one has nothing beside it."""
    s = setting(64, 8, 1 << 17, 0.07, 0.8)
    assert not s.all_kv_fits
    assert min(cost.chunk_heads(s, True, LINK)) > 1
    s = setting(64, 8, 32768, 0.07, 0.8, needed=0.6)
    assert s.all_kv_fits
    *_, last = cost.chunk_heads(s, True, LINK)
    assert last > 4


def test_host_keeps_up():
    """Kernels that take less than the host are not divided."""
    for backward in (False, True):
        assert cost.chunk_heads(setting(8, 8, 2048, 0.5, 1.0), backward, LINK) == [8]


def test_longest_work_tile():
    """Of a real mask: next to its dense tiles."""
    length, ranks = 2048, 3
    mask = hw.causal() & hw.document.from_lengths([700, 900, 448])
    layout = Layout.balanced(length, (0, ranks), mask)
    spec, call = prepare(*(torch.randn(1, h, length, 16) for h in (4, 2, 2)), mask=mask)
    pieces = SequenceShards(layout.table, ranks)
    s = plan_inputs(spec, call, pieces, pieces, None, 0, False)
    live = hw.block_mask(mask, 1, 1, length, length, tile=(128, 128)).to_dense()[0, 0].numpy() > 0
    columns = max(live[s.mask.owner == r].sum(0).max() for r in range(ranks))
    assert s.longest_work_tile == (live.sum(1).max() * 128**2, columns * 2 * 128**2)
