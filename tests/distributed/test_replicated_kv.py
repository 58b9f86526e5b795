"""Keys that every rank holds whole, `layout=(layout, None)`: what one process computes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import headway as hw
from cases import CASES
from headway.distributed import Layout
from headway.distributed.exchange import query_shards
from headway.errors import ArgumentError
from processes import run_ranks

from .test_exact import one_case


def layouts(length: int) -> dict[str, Layout]:
    """Even and uneven cuts; in the last one rank holds nothing."""
    group, a, b = dist.group.WORLD, length // 5, length // 2
    return {
        "contiguous": Layout.contiguous(length, group),
        "zigzag": Layout.zigzag(length, group),
        "uneven": Layout(length, [(1, 0, a), (0, a, b), (1, b, length)], group),
        "empty": Layout(length, [(1, 0, length)], group),
    }


def table(world: int, rank: int) -> None:
    """Of the shared table: grouped heads, learned biases, documents, sinks, dropout."""
    for n, case in enumerate(CASES[world::9]):
        name, layout = list(layouts(case.q_len).items())[n % 4]
        try:
            one_case(case, torch.float64, (layout, None))
        except Exception as error:
            raise AssertionError(f"{case.name}, {name}") from error


def block_masks(world: int, rank: int) -> None:
    """A block mask of the whole, its own tiles too; a seed that the first rank draws."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 320, 8, dtype=torch.float64) for _ in range(3))
    mask = hw.block_mask(lambda b, h, i, j: i - j >= 3 * h + b, 2, 2, 320, 320, tile=32)
    for layout in layouts(320).values():
        found = hw.attention(layout.shard(q, 2), k, v, mask=mask, layout=(layout, None))
        torch.testing.assert_close(found, layout.shard(hw.attention(q, k, v, mask=mask), 2))
    kept = (torch.rand(1, 2, 10, 10) < 0.5).to(torch.uint8)
    own = hw.blocks.from_dense(
        kept * 2, lambda b, h, i, j: kept[0, h, i // 32, j // 32] > 0, (320, 320), (32, 32)
    )
    layout = Layout.balanced(320, dist.group.WORLD, hw.causal(), tile=32)
    found = hw.attention(layout.shard(q, 2), k, v, mask=own, layout=(layout, None))
    torch.testing.assert_close(found, layout.shard(hw.attention(q, k, v, mask=own), 2))
    memory = k[:, :, :0]  # no keys at all
    found = hw.attention(layout.shard(q, 2), memory, memory, layout=(layout, None))
    assert found.eq(0).all()


def refused(world: int, rank: int) -> None:
    layout = Layout.zigzag(64, dist.group.WORLD)
    q, k = torch.randn(1, 2, layout.local, 8), torch.randn(1, 2, 40, 8)
    for way in ({"plan": "ulysses"}, {"plan": "heads"}, {"transport": "collective"}):
        with pytest.raises(ArgumentError, match="do not travel"):
            hw.attention(q, k, k, layout=(layout.using(**way), None))
    with pytest.raises(ArgumentError, match="layout is of type"):
        hw.attention(q, k, k, layout=(None, layout))
    short = k[:, :, : 40 - rank]
    with pytest.raises(ArgumentError, match=r"rank.*the layout of its keys"):
        hw.attention(q, short, short, layout=(layout, None))
    with pytest.raises(ArgumentError, match="by the layout" if rank else "rank 1.*local length"):
        hw.attention(q[:, :, rank:], k, k, layout=(layout, None))
    assert "every rank has all" in str(hw.explain(q, k, k, mask=hw.causal(), layout=(layout, None)))


def shards(world: int, rank: int) -> None:
    """Queries in four shards, a kernel each, as on a GPU: their sums of dk and dv are rounded
    once."""
    layout = Layout(256, [(n % 2, 32 * n, 32 * n + 32) for n in range(8)], dist.group.WORLD)
    slopes = torch.tensor([0.3, 0.05])
    score = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()
    calls = []

    def split(inputs, kv_ranges):
        calls.append(rank)
        return True

    for dtype in (torch.float16, torch.bfloat16):
        q, k, v, w = (3 * torch.randn(1, 2, 256, 16, dtype=torch.float64) for _ in range(4))
        q, k, v, w = (x.to(dtype) for x in (q, k, v, w))
        mine = [layout.shard(q, 2), k, v]
        exact = [x.double().requires_grad_() for x in mine]
        rows = (exact[0] @ exact[1].mT) / 4
        rows = (
            rows
            - slopes.double()[:, None, None] * (layout.positions[:, None] - torch.arange(256)).abs()
        )
        upstream = layout.shard(w, 2)
        right = torch.autograd.grad(rows.softmax(-1) @ exact[2], exact, upstream.double())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(query_shards, "splits_queries", split)
            x = [t.requires_grad_() for t in mine]
            out = hw.attention(*x, score, layout=(layout, None))
        assert calls
        for grad, truth in zip(torch.autograd.grad(out, x, upstream), right, strict=True):
            rms = lambda error: error.square().mean().sqrt()
            assert rms(grad.double() - truth) <= 1.3 * rms(truth.to(dtype).double() - truth)


def latents(world: int, rank: int) -> None:
    """Small latents travel and every rank expands them: gradients of the latents come home summed,
    and those of the weight that expands are each rank's share."""
    torch.manual_seed(0)
    q, x = torch.randn(2, 4, 60, 8), torch.randn(2, 60, 5)
    given = [t.double().requires_grad_() for t in (q, x, torch.randn(2 * 4 * 8, 5))]
    dout = torch.randn(2, 4, 60, 8).double()

    def heads(x, weight):
        return (
            torch.nn.functional.linear(x, weight).unflatten(-1, (8, 8)).transpose(1, 2).chunk(2, 1)
        )

    one = hw.attention(given[0], *heads(*given[1:]), mask=hw.causal())
    right = torch.autograd.grad(one, given, dout)
    for layout in layouts(60).values():
        kv = heads(layout.unshard(layout.shard(given[1])), given[2])
        here = layout.shard(given[0], 2), *kv
        out = hw.attention(*here, mask=hw.causal(), layout=(layout, None))
        torch.testing.assert_close(out, layout.shard(one, 2), rtol=1e-12, atol=1e-12)
        for a, b in zip(torch.autograd.grad(out, given, layout.shard(dout, 2)), right, strict=True):
            dist.all_reduce(a)
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def compiled(world: int, rank: int) -> None:
    layout = Layout.zigzag(64, dist.group.WORLD)
    q, k = torch.randn(1, 4, layout.local, 8), torch.randn(1, 2, 40, 8)
    run = lambda q, k: hw.attention(q, k, k, mask=hw.causal(), layout=(layout, None))
    program = torch.compile(run, backend="aot_eager", fullgraph=True)
    grads = []
    for fn in (run, program):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        grads.append(torch.autograd.grad(fn(*leaves).square().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    with FlopCounterMode(display=False) as counter:
        run(q, k)
    assert counter.get_total_flops() == 2 * 4 * layout.local * 40 * 16


def d_tensors(world: int, rank: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = Layout.contiguous(64, mesh["cp"])
    q = distribute_tensor(torch.randn(1, 2, 64, 8), mesh, [Shard(2)])
    with pytest.raises(ArgumentError, match="where all ranks have all keys they are Replicate"):
        hw.attention(q, q, q, layout=(layout, None))


def narrow_sums(world: int, rank: int) -> None:
    """Narrow gradients of unshard are added in float32: 256 and two halves of a step are 258."""
    layout = Layout(8, [(0, 0, 8)], dist.group.WORLD)
    x = torch.zeros(1, layout.local, dtype=torch.bfloat16, requires_grad=True)
    share = (256.0, 1.0, 1.0)[rank]
    layout.unshard(x).backward(torch.full((1, 8), share, dtype=torch.bfloat16))
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.eq(258).all()


def test_two_ranks(tmp_path):
    run_ranks(2, (table, shards, block_masks, latents, compiled, refused, d_tensors), tmp_path)


def test_three_ranks(tmp_path):
    run_ranks(3, (table, latents, narrow_sums), tmp_path)
