"""Modules and compilers over ranks: the losses and gradients of one process."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import headway as hw
from headway.distributed import Layout
from headway.errors import ArgumentError, BackendRefused
from headway.nn import MLA, Attention, Rotary, mla
from headway.stability import MaxLogit
from processes import run_ranks

LENGTHS = [40, 7, 50]
LENGTH = sum(LENGTHS)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(20, 32)
        self.first = Attention(32, heads=4, kv_heads=2, rotary=Rotary(8), sink=True)
        small = {"kv_lora_rank": 8, "nope_width": 4, "rope_width": 4, "value_width": 8}
        self.second = MLA(32, 2, **small)
        self.out = torch.nn.Linear(32, 20)

    def forward(self, tokens, mask, layout=None):
        x = self.tokens(tokens)
        x = x + self.first(x, mask, layout=layout)
        return self.out(x + self.second(x, mask, layout=layout))


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def loss_of(logits, labels):
    """A sum: the loss of the whole is the sum of the ranks'."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )


def modules(world: int, rank: int) -> None:
    """nn.Attention and nn.MLA take the layout; FSDP2 over the same ranks adds up what they share."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    mask = hw.causal() & hw.document.from_lengths(LENGTHS)
    tokens = torch.randint(0, 20, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    layout = Layout.of_lengths(LENGTHS, mesh["cp"], tile=8)
    labels = layout.shift(layout.shard(tokens), 1, fill=-100)
    after = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    assert torch.equal(layout.unshard(labels), after)

    one = model()
    record = [m for m in one.modules() if isinstance(m, MaxLogit)]
    loss = loss_of(one(tokens, mask), after)
    loss.backward()
    for expanded in (mla._EXPANDED, 0):  # latents travel, or keys and values of every head
        many = model()
        for block in (many.first, many.second):
            fully_shard(block, mesh=mesh["cp"])
        fully_shard(many, mesh=mesh["cp"])
        here = [m for m in many.modules() if isinstance(m, MaxLogit)]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(mla, "_EXPANDED", expanded)
            mine = loss_of(many(layout.shard(tokens), mask, layout), labels)
        (mine * world).backward()  # FSDP takes the mean
        total = mine.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, loss.detach(), rtol=1e-12, atol=0)
        for (name, p), q in zip(many.named_parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-10, msg=name
            )
        for a, b in zip(here, record, strict=True):
            torch.testing.assert_close(a.value, b.value)


def compiled(world: int, rank: int) -> None:
    """fullgraph=True; another layout and other documents compile nothing."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    table = torch.randn(4, 31, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, ids, layout):
        mask = hw.causal() & hw.document(ids)
        out = hw.attention(q, k, v, hw.relative_bias(table), mask, layout=layout)
        stats = hw.attention_with_stats(q, k, v, mask=mask, layout=layout)
        return out + stats.out, stats.lse

    whole = [torch.randn(1, h, 96, 8, dtype=torch.float64) for h in (4, 2, 2)]
    group = dist.group.WORLD
    program = torch.compile(run, fullgraph=True, backend=counter)
    for n, layout in enumerate((
        Layout.zigzag(96, group), Layout.contiguous(96, group),
        Layout(96, [(0, 0, 20), (1, 20, 68), (0, 68, 96)], group),
    )):  # fmt: skip
        ids = torch.arange(96) // (30 + n)
        leaves = [layout.shard(x, 2).requires_grad_() for x in whole]
        grads = []
        for fn in (run, program):
            out, lse = fn(*leaves, ids, layout)
            loss = out.square().sum() + lse.sum()
            grads.append(torch.autograd.grad(loss, (*leaves, table)))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1
    # A call's number is a result of the operator: backwards in another order are found.
    outs = [program(*leaves, ids, layout)[0] for _ in range(2)]
    with pytest.raises(ArgumentError, match="the backward of attention"):
        outs[rank == 1].sum().backward()


def checkpointed(world: int, rank: int) -> None:
    """Selective checkpointing keeps attention's results: nothing is fetched a second time in the
    recomputed forward."""
    layout = Layout.zigzag(64, dist.group.WORLD)
    x = [layout.shard(torch.randn(1, 2, 64, 8), 2).requires_grad_() for _ in range(3)]
    block = lambda q, k, v: hw.attention(q.sin(), k, v, mask=hw.causal(), layout=layout)
    policy = lambda: create_selective_checkpoint_contexts(hw.save_ops())
    out = checkpoint(block, *x, use_reentrant=False, context_fn=policy)
    grads = torch.autograd.grad(out.square().sum(), x)
    expected = torch.autograd.grad(block(*x).square().sum(), x)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)


def sharded(world: int, rank: int) -> None:
    """DTensors: heads and the sequence, and the sequence alone."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 38, 8, dtype=torch.float64) for h in (4, 2, 2))
    table = torch.randn(4, 77, dtype=torch.float64)
    mask = lambda b, h, i, j: i + h >= j
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    bias = table.clone().requires_grad_()
    expected = hw.attention(*leaves, hw.relative_bias(bias), mask)
    weight = torch.randn_like(expected)
    exact = torch.autograd.grad((expected * weight).sum(), (*leaves, bias))
    shapes = ((1, 2), (2, 1)) if world == 2 else ((2, 2),)
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("tp", "cp"))
        layout = Layout.contiguous(38, mesh["cp"])
        for place in (Shard(1), Replicate()):
            placed = [place, Shard(2)]
            given = [distribute_tensor(x, mesh, placed).requires_grad_() for x in (q, k, v)]
            learned = distribute_tensor(table, mesh, [Replicate()] * 2).requires_grad_()
            whole = [place, Replicate()]  # keys that every rank has
            own_kv = [distribute_tensor(x, mesh, whole).requires_grad_() for x in (k, v)]
            for chosen, kv in (
                (layout, given[1:]), (None, given[1:]), ((layout, None), own_kv), (None, own_kv),
            ):  # fmt: skip
                given[1:] = kv
                more = {} if chosen is None else {"layout": chosen}
                out = hw.attention(*given, hw.relative_bias(learned), mask, **more)
                assert out.placements == tuple(placed)
                torch.testing.assert_close(out.full_tensor(), expected)
                loss = (out * distribute_tensor(weight, mesh, placed)).sum()
                for a, b in zip(torch.autograd.grad(loss, (*given, learned)), exact, strict=True):
                    torch.testing.assert_close(a.full_tensor(), b)


def uneven_rows(world: int, rank: int) -> None:
    """DTensors of three rows over two ranks, with the sequence over ranks and without."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 10, 8, dtype=torch.float64) for _ in range(3))
    starts = torch.tensor([0, 3, 5])
    mask = lambda b, h, i, j: (j >= starts[b]) & (j <= i)
    expected = hw.attention_with_stats(q, k, v, mask=mask)
    shapes = {(2, 1): [Shard(0), Replicate()], (1, 2): [Replicate(), Shard(2)]}
    if world == 4:
        shapes = {(2, 2): [Shard(0), Shard(2)]}
    for shape, placed in shapes.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        given = [distribute_tensor(x, mesh, placed) for x in (q, k, v)]
        found = hw.attention_with_stats(*given, mask=mask)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a.full_tensor(), b)


def watched(world: int, rank: int) -> None:
    """Work is counted, of this rank's queries and all keys; tangents are refused, not dropped."""
    layout = Layout(48, [(0, 0, 30), (1, 30, 48)], dist.group.WORLD)
    q, k, v = (layout.shard(torch.randn(1, h, 48, 8), 2) for h in (4, 2, 2))
    with FlopCounterMode(display=False) as counter:
        out = hw.attention(q.requires_grad_(), k, v, mask=hw.causal(), layout=layout)
        assert counter.get_total_flops() == 2 * 4 * layout.local * 48 * 16
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 4 * layout.local * 48 * (16 + 40)
    with forward_ad.dual_level(), pytest.raises(BackendRefused, match="forward mode"):
        hw.attention(forward_ad.make_dual(q.detach(), torch.ones_like(q)), k, v, layout=layout)


def hugging_face(world: int, rank: int) -> None:
    """A model of transformers, its sequence over ranks; positions that begin at 0 are refused."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headway.integrations import transformers as hf

    hf.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="headway",
    )  # fmt: skip
    llama = LlamaForCausalLM(config).double()
    tokens = torch.randint(0, 30, (1, LENGTH))
    mask = hw.causal() & hw.document.from_lengths(LENGTHS)
    layout = Layout.zigzag(LENGTH, dist.group.WORLD)
    alone = llama(
        tokens, attention_mask=hf.mask_over_ranks(Layout.contiguous(LENGTH, _alone()), mask),
        position_ids=torch.arange(LENGTH)[None], use_cache=False,
    ).logits  # fmt: skip
    given = {"attention_mask": hf.mask_over_ranks(layout, mask), "use_cache": False}
    here = llama(layout.shard(tokens), position_ids=layout.positions[None], **given).logits
    torch.testing.assert_close(here, layout.shard(alone), rtol=1e-6, atol=1e-6)
    with pytest.raises(ArgumentError, match="position_ids"):
        llama(layout.shard(tokens), position_ids=torch.arange(layout.local)[None], **given)
    rows = layout.shard(tokens).expand(2, -1)
    with pytest.raises(ArgumentError, match="attention_mask is for"):
        llama(rows, position_ids=layout.positions[None], **given)
    q = torch.randn(1, 2, layout.local, 8)
    layer = torch.nn.Module(), q, q, q, given["attention_mask"]
    with pytest.raises(BackendRefused, match="does not tell"):
        hf.attention_forward(*layer)
    torch._dynamo.reset()
    run = lambda at: hf.attention_forward(*layer, position_ids=at)[0]
    program = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        program(layout.positions[None]),
        hw.attention(q, q, q, mask=mask, layout=layout).transpose(1, 2),
    )
    with pytest.raises(RuntimeError, match="not those of the layout"):
        program(layout.positions[None] + 1)
    # A layer's own window, where one mask is given to layers with and without.
    there = {"position_ids": layout.positions[None], "sliding_window": 9}
    found, _ = hf.attention_forward(*layer, **there)
    expected = hw.attention(q, q, q, mask=mask & hw.sliding_window(9), layout=layout)
    torch.testing.assert_close(found, expected.transpose(1, 2))


class InnerAttention(torch.nn.Module):
    """What torchtitan calls: (tokens, heads, width) of packed documents."""

    def forward(self, q, k, v, *, attention_metadata, scale=None, enable_gqa=False):
        mask, layout = attention_metadata
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = hw.attention(q, k, v, mask=mask, scale=scale, layout=layout)
        return out[0].transpose(0, 1)


class TitanBlock(torch.nn.Module):
    """torchtitan's outer attention: a fused projection, and the inner attention's results."""

    def __init__(self):
        super().__init__()
        self.wqkv, self.wo = torch.nn.Linear(32, 64), torch.nn.Linear(32, 32)
        self.inner_attention = InnerAttention()

    def forward(self, x, attention_metadata):
        q, k, v = (p.unflatten(-1, (-1, 8)) for p in self.wqkv(x).split((32, 16, 16), -1))
        out = self.inner_attention(
            q, k, v, attention_metadata=attention_metadata, scale=None, enable_gqa=True
        )
        return x + self.wo(out.flatten(1))


def titan(world: int, rank: int) -> None:
    """Blocks as torchtitan has them, with documents packed across ranks by its head-and-tail
    permutation; compiled, and with selective checkpointing."""
    torch.manual_seed(0)
    length = 48 * world
    positions = torch.cat([torch.arange(n) for n in (50, 7, length - 57)])
    chunks = torch.arange(length).chunk(2 * world)
    order = [torch.cat((chunks[r], chunks[2 * world - 1 - r])) for r in range(world)]
    pieces = []
    for holder, tokens in enumerate(order):
        ends = (tokens.diff() != 1).nonzero()[:, 0] + 1
        pieces += [(holder, int(x[0]), int(x[-1]) + 1) for x in tokens.tensor_split(ends)]
    layout, mine = Layout(length, pieces, dist.group.WORLD), order[rank]
    assert torch.equal(layout.positions, mine)
    mask = hw.causal() & hw.document((positions == 0).cumsum(0))
    block = TitanBlock().double()
    x, dout = torch.randn(2, length, 32, dtype=torch.float64)
    x.requires_grad_()
    leaves = [x, *block.parameters()]
    one = block(x, (mask, None))
    expected = torch.autograd.grad(one, leaves, dout)
    policy = lambda: create_selective_checkpoint_contexts(hw.save_ops())
    kept = lambda *of: checkpoint(block, *of, use_reentrant=False, context_fn=policy)
    torch._dynamo.reset()
    for run in (block, kept, torch.compile(block, backend="aot_eager", fullgraph=True)):
        out = run(x[mine], (mask, layout))
        torch.testing.assert_close(out, one[mine])
        grads = torch.autograd.grad(out, leaves, dout[mine])
        for a, b in zip(grads, expected, strict=True):
            dist.all_reduce(a)
            torch.testing.assert_close(a, b)


def _alone():
    """A group of this rank alone."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def cross(world: int, rank: int) -> None:
    """Queries and keys of two sequences, each with its layout; one of them whole on one rank."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (50, 33, 33))
    mask = lambda b, h, i, j: j <= i
    expected = hw.attention(q, k, v, mask=mask)
    of_q = Layout.zigzag(50, dist.group.WORLD)
    for of_kv in (
        Layout.contiguous(33, dist.group.WORLD),
        Layout(33, [(1, 0, 33)], dist.group.WORLD),
    ):
        for plan in ("heads", "gather", "ulysses"):
            pair = of_q.using(plan), of_kv
            found = hw.attention(
                of_q.shard(q, 2), of_kv.shard(k, 2), of_kv.shard(v, 2), mask=mask, layout=pair
            )
            torch.testing.assert_close(found, of_q.shard(expected, 2))


def test_two_ranks(tmp_path):
    cases = modules, compiled, checkpointed, sharded, uneven_rows, watched, cross, titan
    if importlib.util.find_spec("transformers"):
        cases += (hugging_face,)
    run_ranks(2, cases, tmp_path)


def test_two_by_two(tmp_path):
    run_ranks(4, (sharded, uneven_rows), tmp_path)
