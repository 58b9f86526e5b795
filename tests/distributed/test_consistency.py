"""Ranks that do not make the same call raise, all of them, and say which differs in what."""

import tempfile
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import headway as hw
from headway.blocks import from_dense
from headway.distributed import Layout
from headway.distributed.exchange import consistency, fields
from headway.errors import ArgumentError, CapturedIndexError, UnknownKeyword
from processes import run_ranks

LENGTH = 96


def every_field(world: int, rank: int) -> None:
    group = dist.group.WORLD
    other = rank == 1

    def call(layout=None, dtype=torch.float32, heads=2, mask=None, score=None, length=None, **more):
        layout = Layout.contiguous(LENGTH, group) if layout is None else layout
        size = layout.local if length is None else length
        q, k, v = (torch.randn(1, heads, size, 8, dtype=dtype) for _ in range(3))
        q.requires_grad_(more.pop("learns", False))
        return hw.attention(q, k, v, score, mask, layout=layout, **more)

    documents = torch.arange(LENGTH) // 40
    mine = torch.arange(LENGTH) // (39 if other else 40)
    wrong = {
        "the layout": {"layout": Layout.zigzag(LENGTH, group) if other else None},
        "dtype": {"dtype": torch.float64 if other else torch.float32},
        "the sizes": {"heads": 4 if other else 2},
        "the mask": {"mask": hw.causal() if other else None},
        "numbers that": {"mask": hw.sliding_window(7 + other)},
        "tensors that": {"mask": hw.document(mine)},
        "the score": {"score": hw.softcap(3.0) if other else hw.alibi(2)},
        "tensors that score": {
            "score": hw.relative_bias(torch.full((2, 2 * LENGTH - 1), 0.5 * other))
        },
        "the sink": {"sink": torch.full((2,), float(other))},
        "the seed": {"dropout": 0.1, "seed": 3 + rank},
        "scale": {"scale": 0.5 + other},
        "the plan": {
            "layout": Layout.contiguous(LENGTH, group).using("ulysses" if other else "heads")
        },
        "whether it trains": {"learns": other},
    }
    for field, given in wrong.items():
        with pytest.raises(ArgumentError, match=f"rank.*{field}"):
            call(**given)
    # Tiles of the caller's own, of one text and other blocks.
    kept = torch.zeros(1, 1, 6, 6, dtype=torch.uint8)
    kept[..., 1 + other] = 2
    own = from_dense(kept, lambda b, h, i, j: j >= 0, (LENGTH, LENGTH), (16, 16))
    with pytest.raises(ArgumentError, match=r"rank.*the mask"):
        call(mask=own)
    call(mask=hw.document(documents))  # and they go on as if nothing had been
    with pytest.raises(ArgumentError, match=r"48 of 96" if other else "rank 1.*local length"):
        call(length=LENGTH // 2 + other)
    with pytest.raises(ArgumentError, match=r"rank.*the seed"):  # one gives it, one draws it
        call(dropout=0.1, seed=0 if other else None)
    few = torch.ones(LENGTH - 20 * other, dtype=torch.bool)
    error = CapturedIndexError if other else ArgumentError
    with pytest.raises(error, match="index 76" if other else "rank 1.*refused there"):
        call(mask=lambda b, h, i, j: few[j])
    flag = torch.ones((), dtype=torch.int32).expand(1)  # of stride 0, and contiguous
    call(mask=lambda b, h, i, j: flag[j * 0] > 0)
    documents[60:] += other  # in place, on one rank, after a call
    with pytest.raises(ArgumentError, match=r"rank.*tensors that"):
        call(mask=hw.document(documents))


def made_anew(world: int, rank: int) -> None:
    """A group that is made anew has the old one's name, and other ranks: no plan is taken from
    it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    expected = hw.attention(q, k, v, mask=hw.causal())
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for turn in range(2):
        group = dist.group.WORLD
        layout = Layout.contiguous(LENGTH, group)
        out = hw.attention(
            *(layout.shard(x, 2) for x in (q, k, v)), mask=hw.causal(), layout=layout
        )
        torch.testing.assert_close(out, layout.shard(expected, 2))
        if not turn:
            dist.destroy_process_group()
            file = f"file://{folder[0]}/store"
            dist.init_process_group(
                "gloo", init_method=file, rank=1 - rank, world_size=2, timeout=timedelta(seconds=60)
            )


def device_group(world: int, rank: int) -> None:
    """A group without collectives on the CPU, as NCCL's is: what ranks compare goes by another one
    of the same ranks, at every call, so that one rank's new kind of call is seen by all."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, LENGTH // 2, 8) for _ in range(3))
    layout = Layout.zigzag(LENGTH, dist.group.WORLD)
    call = lambda window: hw.attention(
        q, k, v, mask=hw.causal() & hw.sliding_window(window), layout=layout
    )
    consistency._channels.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(consistency, "_has_cpu", lambda group: False)
        out = call(20)
        (made,) = [channel.group for channel in consistency._channels.values()]
        assert made is not dist.group.WORLD
        assert dist.get_world_size(made) == world
        with pytest.raises(ArgumentError, match=r"rank.*numbers that score and mask capture"):
            call(20 if rank else 30)  # known to one rank, new on the other
        assert torch.equal(call(20), out)
        assert len(consistency._channels.values()) == 1
    consistency._channels.clear()


def stale(world: int, rank: int) -> None:
    """A layout of other ranks of a group of that name."""
    layout = Layout.zigzag(LENGTH, dist.group.WORLD)
    q = torch.randn(1, 2, layout.local, 8)
    if rank == 1:
        layout.rank = 0  # as if it had been made when ranks were others
    with pytest.raises(ArgumentError, match="made anew" if rank else "rank 1.*refused there"):
        hw.attention(q, q, q, layout=layout)


def refused(world: int, rank: int) -> None:
    """What is refused by name, on every rank; a batch of no rows is not."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    layout = Layout.zigzag(LENGTH, group)
    x = torch.randn(2, 1, 2, layout.local, 8)
    with pytest.raises(ArgumentError, match="vmap over a call with layout="):
        torch.func.vmap(lambda x: hw.attention(x, x, x, layout=layout))(x)
    ids = torch.arange(LENGTH) // 40
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fields, "capturing", lambda device: True)
        with pytest.raises(ArgumentError, match="a CUDA graph is being captured"):
            hw.attention(*[x[0]] * 3, mask=hw.document(ids), layout=layout)
        hw.attention(*[x[0]] * 3, mask=hw.causal(), layout=layout)
    for plan in ("heads", "gather", "ulysses"):
        q, k = (torch.zeros(0, h, layout.local, 8, requires_grad=True) for h in (4, 2))
        sink = torch.zeros(4, requires_grad=True)
        found = hw.attention_with_stats(
            q, k, k, mask=hw.document(ids), sink=sink, layout=layout.using(plan)
        )
        assert (found.out.shape, found.max_logit.shape) == (q.shape, (0, 4))
        grads = torch.autograd.grad(found.out.sum() + found.lse.sum(), (q, k, sink))
        assert [g.shape for g in grads] == [q.shape, k.shape, sink.shape]
        assert not grads[2].any()
    dist.barrier()
    dist.destroy_process_group(group)
    for call in (
        lambda: hw.attention(*[x[0]] * 3, layout=layout),
        lambda: layout.unshard(x[0], 2),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"process group .* was destroyed"):
            call()


def one_fails(world: int, rank: int) -> None:
    """A rank that leaves: the others' exchange fails, long before the group's time is up."""
    group = dist.new_group(timeout=timedelta(seconds=25))
    layout = Layout.contiguous(LENGTH, group)
    q = torch.randn(1, 2, layout.local, 8)
    hw.attention(q, q, q, layout=layout)
    if rank == 1:
        dist.destroy_process_group()
        raise SystemExit(0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        hw.attention(q, q, q, layout=layout)
    assert time.monotonic() - began < 20


def test_every_field(tmp_path):
    run_ranks(2, (every_field, device_group, stale, refused, made_anew), tmp_path)


def test_no_layout():
    q = torch.zeros(1, 2, 8, 4)
    layout = Layout.zigzag(8, (0, 2))
    for call in (
        lambda: hw.sigmoid_attention(q, q, q, bias=0.0, layout=layout),
        lambda: hw.attention_weights(q, q, layout=layout),
    ):
        with pytest.raises(UnknownKeyword, match=r"over ranks in headway\.attention and"):
            call()


def test_one_fails(tmp_path):
    run_ranks(2, (one_fails,), tmp_path)
