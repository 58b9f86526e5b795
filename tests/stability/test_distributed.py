"""Data-parallel (FSDP2, DDP), tensor-parallel and both at once, over gloo: the same weights as one
process."""

import importlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import headway
from headway.errors import ArgumentError
from headway.nn import MLA, Attention, Rotary
from headway.optim import MuonClip
from headway.stability import LogitError, QKClip, logit_stats, monitor
from processes import run_ranks

TAU = 1.5
WIDTH = 24


class Net(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        torch.manual_seed(0)
        init = lambda w: nn.init.normal_(w, std=0.5)
        mla = {"kv_lora_rank": 8, "nope_width": 8, "rope_width": 4, "value_width": 6, "init": init}
        self.layers = nn.ModuleList(
            [
                Attention(WIDTH, 4, 2, 6, bias=True, rotary=Rotary(6), init=init),
                Attention(WIDTH, 4, fused=fused, bias=True, scaling="init", init=init),
                MLA(WIDTH, 4, q_lora_rank=8, **mla),
                MLA(WIDTH, 4, **mla),
            ]
        )

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.rms_norm(x + layer(x, headway.causal()), (WIDTH,))
        return x.square().mean()


def data(step: int, rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return 2 * torch.randn(2, 9, WIDTH, generator=generator)


def train(net, clip, ranks: list[int], replicas: int) -> tuple[list, list]:
    """Three steps of two micro-batches each; this process computes those of `ranks`. Returns the
    number of clipped heads and the max logits of every step."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    counts, seen = [], []
    for step in range(3):
        for micro in range(2):
            for rank in ranks:
                (net(data(step, rank, micro)) / 2 / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        clipped = clip.step()
        counts.append(int(clipped.count))
        seen.append({name: s.clone() for name, s in clipped.max_logit.items()})
    clip.check()
    return counts, seen


def full(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def compare(net, reference):
    for (name, p), q in zip(net.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            full(p), q, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
        )


def split_heads(net, mesh):
    for layer in net.layers:
        plan = {"o_proj": RowwiseParallel()}
        for name in ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"):
            if getattr(layer, name, None) is not None:
                plan[name] = ColwiseParallel()
        parallelize_module(layer, mesh, plan)
    return net


def single(ranks: list[int], fused: bool):
    reference = Net(fused)
    counts, seen = train(reference, QKClip(reference, TAU, group="local"), ranks, 1)
    assert max(counts) > 0
    return reference, counts, seen


def fsdp(world: int, rank: int) -> None:
    reference, counts, seen = single(list(range(world)), fused=True)
    mesh = init_device_mesh("cpu", (world,))
    net = Net(fused=True)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert isinstance(net.layers[0].q_proj.weight, DTensor)
    ours = train(net, QKClip(net, TAU, group=mesh), [rank], world)
    assert ours[0] == counts
    for here, there in zip(ours[1], seen, strict=True):
        for name in there:
            torch.testing.assert_close(here[name], there[name], rtol=1e-4, atol=1e-5)
    compare(net, reference)


def tensor_parallel(world: int, rank: int) -> None:
    reference, _, seen = single([0], fused=False)
    mesh = init_device_mesh("cpu", (world,))
    net = split_heads(Net(fused=False), mesh)
    _, ours = train(net, QKClip(net, TAU, group="local"), [0], 1)
    heads = 4 // world
    for here, there in zip(ours, seen, strict=True):
        for name in there:
            mine = there[name][rank * heads : (rank + 1) * heads]
            torch.testing.assert_close(here[name], mine, rtol=1e-4, atol=1e-5)
    compare(net, reference)


def both(world: int, rank: int) -> None:
    replicas = world // 2
    reference, _, _ = single(list(range(replicas)), fused=False)
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "tp"))
    net = split_heads(Net(fused=False), mesh["tp"])
    for layer in net.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    assert len(net.layers[0].q_proj.weight.placements) == 2
    train(net, QKClip(net, TAU, group=mesh["dp"]), [rank // 2], replicas)
    compare(net, reference)


def ddp(world: int, rank: int) -> None:
    reference, counts, _ = single(list(range(world)), fused=True)
    net = nn.parallel.DistributedDataParallel(Net(fused=True))
    ours, _ = train(net, QKClip(net.module, TAU, group=dist.group.WORLD), [rank], world)
    assert ours == counts
    compare(net.module, reference)


def newton_schulz(grad, coefficients, count, eps):
    """As in torch.optim.Muon, whose bfloat16 would hide what is compared here."""
    (a, b, c), wide = coefficients, grad.shape[0] <= grad.shape[1]
    x = (grad if wide else grad.T).double()
    x = x / x.norm().clamp(min=eps)
    for _ in range(count):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.T).float()


def muonclip(world: int, rank: int) -> None:
    """Matrices that are cut over ranks are orthogonalised whole."""
    importlib.import_module("torch.optim._muon")._zeropower_via_newtonschulz = newton_schulz

    def step(net, optimizer, ranks: list[int]) -> int:
        for r in ranks:
            (net(data(0, r, 0)) / len(ranks)).backward()
        optimizer.step()
        return int(optimizer.clipped.count)

    options = {"lr": 0.02, "weight_decay": 0.1, "tau": TAU}
    reference = Net(fused=False)
    count = step(reference, MuonClip(reference, group="local", **options), list(range(world)))
    assert count > 0
    mesh = init_device_mesh("cpu", (world,))
    net = Net(fused=False)
    before = [p.detach().clone() for p in net.parameters()]
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert step(net, MuonClip(net, group=mesh, **options), [rank]) == count
    for (name, p), q, b in zip(net.named_parameters(), reference.parameters(), before, strict=True):
        if p.dim() == 2:  # AdamW's first step of a bias is the sign of what may only be rounding
            assert (full(p) - q).norm() < 1e-4 * (q - b).norm(), name


def reduction(world: int, rank: int) -> None:
    layer = Attention(8, 2)
    with pytest.raises(ArgumentError, match="several processes"):
        QKClip(layer)
    with pytest.raises(ArgumentError, match="several processes"):
        logit_stats(layer)
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    for bad in range(world):  # whatever the order of ranks
        net = nn.ModuleList([Attention(8, 2), Attention(8, 2)])
        clip = QKClip(net, 10.0, group=dist.group.WORLD)
        net[0].max_logit(torch.tensor([[float(rank), -math.inf if rank else -5.0]]))
        net[1].max_logit(torch.tensor([[math.nan if rank == bad else 1.0, 20.0 + rank]]))
        calls.clear()
        stats = logit_stats(net, dist.group.WORLD)
        assert len(calls) == 1  # one, for all layers
        assert stats["0"].tolist() == [world - 1, -5.0]
        assert stats["1"].tolist() == [math.inf, 19.0 + world]
        clip.step()
        with pytest.raises(LogitError, match=r"step: 1 head 0\. "):
            clip.check()
    dist.all_reduce = original


def monitored(world: int, rank: int) -> None:
    """DDP and FSDP2: a report over ranks is that of one process with all their data."""
    reference, group = Net(fused=True), dist.group.WORLD
    watch = monitor(reference)
    for other in range(world):
        reference(data(0, other, 0))
    expected = watch.report("local")
    with pytest.raises(ArgumentError, match="several processes"):
        watch.report()
    wrapped = nn.parallel.DistributedDataParallel(Net(fused=True))
    sharded = Net(fused=True)
    for net in (*sharded.layers, sharded):
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    for net in (wrapped, sharded):
        with monitor(net) as watch:
            net(data(0, rank, 0)).backward()
        report = watch.report(group)
        assert list(report) == [f"layers.{n}" for n in range(4)] == list(expected)
        for name, right in expected.items():
            for made, x in zip(report[name], right, strict=True):
                torch.testing.assert_close(made, x, rtol=1e-4, atol=1e-5)
    if rank == 0:
        watch.reset()
    with pytest.raises(
        ArgumentError, match=r"have measured other layers .*\[\[\], \[\('layers.0', 4\)"
    ):
        watch.report(group)


def fused_heads_cannot_be_split(world: int, rank: int) -> None:
    layer = Attention(8, 4, fused=True)
    plan = {"qkv_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    parallelize_module(layer, init_device_mesh("cpu", (world,)), plan)
    with pytest.raises(ArgumentError, match="use fused=False"):
        layer(torch.randn(1, 3, 8))


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (
            2,
            (
                reduction,
                monitored,
                fused_heads_cannot_be_split,
                ddp,
                fsdp,
                tensor_parallel,
                muonclip,
            ),
        ),
        (4, (both,)),
    ],
    ids=["two", "four"],
)
def test_same_weights_as_one_process(world, cases, tmp_path):
    run_ranks(world, cases, tmp_path)
