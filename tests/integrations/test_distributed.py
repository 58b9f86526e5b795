"""FSDP2 and tensor parallelism over two processes: the results and gradients of one."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import headway as hw
from headway.errors import ArgumentError
from headway.stability import MaxLogit
from processes import run_ranks


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)
        self.table = torch.nn.Parameter(torch.randn(2, 31))
        self.out = torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = hw.attention(q, k, v, hw.relative_bias(self.table), hw.causal())
        return x + self.out(out.transpose(1, 2).flatten(2))


def fsdp(world: int, rank: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    whole = torch.nn.Sequential(Block(), Block())
    x = torch.randn(4, 12, 16)
    torch.manual_seed(0)
    sharded = torch.nn.Sequential(Block(), Block())
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    whole(x).square().mean().backward()
    sharded(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    for (name, p), q in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-6, msg=name)


def meanflow(world: int, rank: int) -> None:
    """`torch.func.jvp` of a sharded net, and a backward of its primal: a MeanFlow step."""
    mesh = init_device_mesh("cpu", (world,))
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(torch.nn.Sequential(Block(), Block()))
    whole, sharded = nets
    x, moves = torch.randn(2, 4, 12, 16)
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)

    def step(net, x, moves):
        out, tangent = torch.func.jvp(net, (x,), (moves,))
        (out - tangent.detach()).square().mean().backward()
        return tangent.detach()

    mine = slice(2 * rank, 2 * rank + 2)
    right = step(whole, x, moves)[mine]
    torch.testing.assert_close(step(sharded, x[mine], moves[mine]), right, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-5, msg=name)


def tensor_parallel(world: int, rank: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 11, 8, requires_grad=True) for h in (4, 2, 2))
    table = torch.randn(4, 31, requires_grad=True)
    score = lambda s, b, h, i, j: s * (1 + 0.1 * b) + table[h, i - j + 15]
    mask = lambda b, h, i, j: i + h >= j
    sink = torch.randn(4, requires_grad=True)
    out, lse, top = hw.attention_with_stats(q, k, v, score, mask, sink=sink)
    weight = torch.randn_like(out)
    expected = torch.autograd.grad((out * weight).sum() + lse.sum(), (q, k, v, table, sink))
    whole = distribute_tensor(table.detach(), mesh, [Replicate()]).requires_grad_()
    for place in (Shard(1), Shard(0), Replicate()):
        leaves = [distribute_tensor(x.detach(), mesh, [place]).requires_grad_() for x in (q, k, v)]
        score = lambda s, b, h, i, j: s * (1 + 0.1 * b) + whole[h, i - j + 15]
        sinks = distribute_tensor(sink.detach(), mesh, [Replicate()]).requires_grad_()
        result = hw.attention_with_stats(*leaves, score, mask, sink=sinks)
        for x, y in zip(result, (out, lse, top), strict=True):
            assert x.placements == (place,)
            torch.testing.assert_close(x.full_tensor(), y)
        record = MaxLogit(4)  # of the heads and rows that this rank has
        record(result.max_logit)
        mine = result.max_logit.to_local().amax(0)
        assert torch.equal(record.value[: len(mine)], mine)
        assert record.heads_here() == len(mine)
        loss = (result.out * distribute_tensor(weight, mesh, [place])).sum() + result.lse.sum()
        grads = torch.autograd.grad(loss, (*leaves, whole, sinks))
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-4, atol=1e-5)
    for bad in ([Shard(3)],):
        x = distribute_tensor(torch.randn(2, 2, 4, 8), mesh, bad)
        with pytest.raises(ArgumentError, match="Shard"):
            hw.attention(x, x, x)
    x = distribute_tensor(torch.randn(2, 2, 4, 8), mesh, [Shard(1)])
    for wrong in (
        lambda: hw.attention(x, x.to_local(), x),
        lambda: hw.attention(x, x, x, sink=sink),
    ):
        with pytest.raises(ArgumentError, match="is not a DTensor"):
            wrong()
    with pytest.raises(ArgumentError, match="seed"):
        hw.attention(x, x, x, dropout=0.5)


def test_two_processes(tmp_path):
    run_ranks(2, (fsdp, meanflow, tensor_parallel), tmp_path)
