"""One sequence over the cards of this machine, over NCCL: `make gpu-test`. Skipped where there are
fewer than two."""

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

import headway as hw
from cases import CASES, Case, problem
from checks import compare, gradients
from headway.distributed import Layout
from headway.distributed.exchange import plans, run
from headway.errors import ArgumentError
from tools.on_gpu import moved

from .test_exact import COMBINATIONS, PLANS, _over, layout_of, uneven

HALF = [case for case in CASES if "half" in case.tags]
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def results(case: Case, dtype: torch.dtype, layouts) -> dict[str, torch.Tensor]:
    """Of the whole sequence, put together from all ranks."""
    q_layout, kv_layout = layouts
    p = moved(problem(case, dtype), "cuda")
    q = q_layout.shard(p.q, 2)
    k, v = (kv_layout.shard(x, 2) for x in (p.k, p.v))
    options = {"scale": case.scale, "dropout": case.dropout}
    if case.dropout:
        options["seed"] = p.seed
    made = hw.attention_with_stats(
        q, k, v, p.score(), p.mask(), sink=p.sink, layout=layouts, **options
    )
    p = replace(p, dout=q_layout.shard(p.dout, 2), dlse=q_layout.shard(p.dlse, 2))
    found = gradients(p, made.out, made.lse)
    for grad in found.values():
        if q_layout.ranks > 1:
            dist.all_reduce(grad)
    found |= {
        "out": q_layout.unshard(made.out.detach(), 2),
        "lse": q_layout.unshard(made.lse.detach(), 2),
        "max_logit": made.max_logit,
    }
    return {name: x.cpu() for name, x in found.items()}


def table(world: int, rank: int) -> None:
    for n, case in enumerate(HALF[::12]):
        name, plan = COMBINATIONS[(7 * n) % len(COMBINATIONS)]
        q = layout_of(name, case.q_len, world, n).using(plan)
        kv = q if case.q_len == case.kv_len else layout_of(name, case.kv_len, world, n)
        found = results(case, torch.bfloat16, (q, kv))
        if rank == 0:  # what is right takes long to find
            wrong = compare(case, torch.bfloat16, found, True)
            assert not wrong, (case.name, name, plan, wrong)


def long_ones(world: int, rank: int) -> None:
    """What Hopper's kernels run by head: next to one card, whose errors are those of bfloat16."""
    torch.manual_seed(0)
    n = 2100 * world  # pieces long enough for kernels of their own
    q, k, v = (torch.randn(1, h, n, 128, **BF16) for h in (8, 4, 4))
    ids = torch.arange(n, device="cuda") // 700
    table = torch.randn(8, 2 * n - 1, device="cuda")
    calls = [
        (None, hw.causal()), (hw.alibi(8), hw.causal()), (None, hw.causal() & hw.document(ids)),
        (hw.relative_bias(table), hw.causal() & hw.sliding_window(500)), (hw.softcap(20.0), None),
    ]  # fmt: skip
    plans = [("heads", "pull"), ("heads", "collective"), *[(plan, "auto") for plan in PLANS[1:]]]
    cases = [(calls[0], way) for way in plans] + [(of, plans[0]) for of in calls[1:]]
    for number, ((score, mask), way) in enumerate(cases):
        for layout in (layout_of("zigzag", n, world, 0), uneven(n, world, 7))[number % 2 :][:1]:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            one = hw.attention(*leaves, score, mask)
            right = [one, *torch.autograd.grad(one, leaves, torch.ones_like(one))]
            cut = [layout.shard(x, 2) for x in leaves]
            out = hw.attention(*cut, score, mask, layout=layout.using(*way))
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
            for g in grads:
                dist.all_reduce(g)
            for x, y in zip((layout.unshard(out.detach(), 2), *grads), right, strict=True):
                error = (x.double() - y.double()).norm() / y.double().norm()
                assert error < 0.01, (way, score, mask, layout.sizes, error)


def nodes(world: int, rank: int) -> None:
    """Two dimensions, keys pulled between nodes and by collectives: next to one card."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 3000, 128, **BF16) for h in (8, 4, 4))
    for shape in [(n, world // n) for n in sorted({1, 2, world}) if world % n == 0]:
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("between", "inside"))
        for transport in ("auto", "collective"):
            layout = uneven(3000, world, 7).on(mesh).using("ulysses*heads", transport)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            one = hw.attention(*leaves, hw.alibi(8), hw.causal())
            right = [one, *torch.autograd.grad(one, leaves, torch.ones_like(one))]
            cut = [layout.shard(x, 2) for x in leaves]
            out = hw.attention(*cut, hw.alibi(8), hw.causal(), layout=layout)
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
            for g in grads:
                dist.all_reduce(g)
            for x, y in zip((layout.unshard(out.detach(), 2), *grads), right, strict=True):
                error = (x.double() - y.double()).norm() / y.double().norm()
                assert error < 0.01, (shape, transport, error)


def many_calls(world: int, rank: int) -> None:
    """Memory that is used again, streams, other layouts between: the same bits."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 4096, 128, **BF16) for h in (16, 8, 8))
    layouts = [layout_of("zigzag", 4096, world, 0), uneven(4096, world, 1)]
    first = [_over(at, q, k, v, hw.causal()) for at in layouts]
    for turn in range(30):
        if turn % world == rank:
            torch.cuda._sleep(3_000_000)  # one is late
        for at, right in zip(layouts, first, strict=True):
            assert torch.equal(_over(at, q, k, v, hw.causal()), right)


def in_streams(world: int, rank: int) -> None:
    """Chunks in two streams: the bits of chunks in one, for new masks at every call, while memory is
    taken and written by others."""
    torch.manual_seed(0)
    n = 1500 * world
    q, k, v = (torch.randn(1, h, n, 128, **BF16) for h in (16, 4, 4))
    group = dist.new_group(list(range(world)))  # whose symmetric memory has to grow between chunks
    layout = Layout.zigzag(n, group)
    mine = [layout.shard(x, 2).contiguous().requires_grad_() for x in (q, k, v)]
    with pytest.MonkeyPatch.context() as patched:
        chunks = {False: [1, 2, 1], True: [1, 3]}
        patched.setattr(plans, "chunk_heads", lambda inputs, back, bandwidth: chunks[back])
        run._plans.clear()
        for turn in range(20):
            cut = torch.tensor([0, 400 + 37 * turn, 900 + 11 * turn], device="cuda")
            ids = torch.searchsorted(cut, torch.arange(n, device="cuda"), right=True)
            found = []
            for transport in ("pull", "collective"):
                if turn % world == rank:
                    torch.cuda._sleep(1_000_000)  # one is late
                at = layout.using("heads", transport)
                out = hw.attention(
                    *mine, mask=hw.causal() & hw.document(ids), layout=at, deterministic=True
                )
                grads = torch.autograd.grad(out, mine, torch.ones_like(out))
                noise = [torch.full_like(x, float("nan")) for x in (*mine, out)]
                found.append([x.detach().clone() for x in (out, *grads)])
                del noise, out, grads
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), turn
        run._plans.clear()


def compiled(world: int, rank: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 2048, 64, **BF16) for h in (8, 4, 4))
    layout = layout_of("zigzag", 2048, world, 0)
    mine = [layout.shard(x, 2).contiguous().requires_grad_() for x in (q, k, v)]
    call = lambda q, k, v: hw.attention(q, k, v, hw.alibi(8), hw.causal(), layout=layout).sin()
    results = []
    for program in (call, torch.compile(call, fullgraph=True)):
        out = program(*mine)
        results.append([out, *torch.autograd.grad(out.sum(), mine)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def disagree(world: int, rank: int) -> None:
    """A difference raises on all ranks, and names it."""
    q, k, v = (torch.randn(1, h, 512, 64, **BF16) for h in (8, 4, 4))
    layout = layout_of("zigzag", 512, world, 0)
    window = 100 + (rank == 1)
    with pytest.raises(ArgumentError, match=r"rank 1|ranks 0 and 1"):
        _over(layout, q, k, v, hw.causal() & hw.sliding_window(window))
    known, other = hw.causal(), hw.causal() & hw.sliding_window(70)
    out = _over(layout, q, k, v, known)  # goes on afterwards
    assert out.isfinite().all()
    with pytest.raises(ArgumentError, match="rank"):  # known to the others, new on one
        _over(layout, q, k, v, other if rank == 1 else known)
    assert torch.equal(_over(layout, q, k, v, known), out)


ALL = many_calls, in_streams, long_ones, nodes, compiled, disagree, table


def _rank(rank: int, world: int, store: str) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=timedelta(seconds=90), device_id=torch.device("cuda", rank),
    )  # fmt: skip
    for case in ALL:
        case(world, rank)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 0:
            with Path(store).with_suffix(".log").open("a") as log:
                log.write(f"{case.__name__}\n")
    dist.destroy_process_group()


@pytest.mark.timeout(400)
def test_over_cards(tmp_path):
    """All in one start of the processes, which takes longest."""
    count = torch.cuda.device_count()
    mp.spawn(_rank, (count, str(tmp_path / "store")), count)
    assert len((tmp_path / "store.log").read_text().split()) == len(ALL)
