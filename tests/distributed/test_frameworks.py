"""What training frameworks do with a layout: torchtitan's blocks, transformers' models, FSDP2; with
checkpointing and compilers, over two ranks, next to one process."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import headway as hw
from headway.distributed import Layout
from headway.errors import ArgumentError
from headway.nn import Attention, Rotary
from headway.stability import MaxLogit
from processes import run_ranks

from .test_models import LENGTH, LENGTHS, _alone


class InnerAttention(torch.nn.Module):
    """With the words of torchtitan's: (tokens, heads, width), `attention_masks` for all layers."""

    def __init__(self):
        super().__init__()
        self.max_logit = MaxLogit(4)

    def forward(
        self, q_TNH, k_TNH, v_TNH, *, attention_masks, scale=None, enable_gqa=False,
        out_transform=None, **kwargs,
    ):  # fmt: skip
        mask, layout = attention_masks
        q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, k_TNH, v_TNH))
        out, lse, top = hw.attention_with_stats(q, k, v, mask=mask, scale=scale, layout=layout)
        self.max_logit(top)
        out = out[0].transpose(0, 1)
        return out if out_transform is None else out_transform(out, lse[0].T)


class Layer(torch.nn.Module):
    """As `GQAttention`: projects, rotates by `positions`, calls the inner one, projects."""

    def __init__(self):
        super().__init__()
        self.wqkv, self.wo = torch.nn.Linear(32, 64), torch.nn.Linear(32, 32)
        self.rope, self.inner_attention = Rotary(8), InnerAttention()
        self.sinks = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x_TD, attention_masks, positions):
        q, k, v = (x.unflatten(-1, (-1, 8)) for x in self.wqkv(x_TD).split([32, 16, 16], -1))
        angles = self.rope.angles(positions)
        q, k = (self.rope.rotate(x.transpose(0, 1), angles).transpose(0, 1) for x in (q, k))
        out = self.inner_attention(
            q, k, v, attention_masks=attention_masks, scale=None, enable_gqa=True,
            out_transform=lambda out, lse: out * (lse - self.sinks).sigmoid()[..., None],
        ).contiguous()  # fmt: skip
        return x_TD + self.wo(out.view(out.shape[0], -1))


def selective(seen):
    """A policy as torchtitan's: a function of the operator, which saves what is in a set."""
    saved = {torch.ops.aten.mm.default, *hw.save_ops()}

    def policy(ctx, func, *args, **kwargs):
        seen.append((ctx.is_recompute, str(func)))
        kept = func in saved
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)


def titan(world: int, rank: int) -> None:
    """Packed documents across ranks; every layer checkpointed selectively, or compiled as well."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    mask = hw.causal() & hw.document((positions == 0).cumsum(0))
    layout = Layout.zigzag(LENGTH, dist.group.WORLD)
    torch.manual_seed(0)
    x, weight = torch.randn(2, LENGTH, 32, dtype=torch.float64)
    layers = torch.nn.ModuleList(Layer() for _ in range(2)).double()

    def run(layers, x, weight, masks, positions):
        leaf = x.clone().requires_grad_()
        h = leaf
        for layer in layers:
            h = layer(h, masks, positions)
        grads = torch.autograd.grad((h * weight).sum(), (leaf, *parameters))
        return h, *grads

    parameters = list(layers.parameters())
    tops = [layer.inner_attention.max_logit for layer in layers]
    out, dx, *dp = run(layers, x, weight, (mask, None), positions)
    top = [record.value.clone() for record in tops]
    here = [layout.shard(t, 0) for t in (x, weight, positions)]
    for compiles in (False, True):
        torch._dynamo.reset()
        seen = []
        wrapped = [
            checkpoint_wrapper(layer, context_fn=selective(seen), early_stop=False)
            for layer in layers
        ]
        if compiles:
            wrapped = [torch.compile(x, backend="aot_eager", fullgraph=True) for x in wrapped]
        for record in tops:
            record.reset()
        found, d_here, *shares = run(wrapped, *here[:2], (mask, layout), here[2])
        torch.testing.assert_close(found, layout.shard(out, 0))
        torch.testing.assert_close(d_here, layout.shard(dx, 0))
        for share, whole in zip(shares, dp, strict=True):
            dist.all_reduce(share)
            torch.testing.assert_close(share, whole)
        for record, expected in zip(tops, top, strict=True):
            torch.testing.assert_close(record.value, expected)
        assert (False, "headway.cp_forward.default") in seen


def llama(config, layers=2):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=30,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="headway",
            **config,
        )
    ).double()


def hugging_face(world: int, rank: int) -> None:
    """Llama with a layout in its mask: gradients of one process, plain, checkpointed, checkpointed
    selectively, compiled; masks and positions of the rank alone are refused."""
    from headway.integrations import transformers as hf

    hf.register()
    model = llama({}).train()
    tokens = torch.randint(0, 30, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = hw.causal() & hw.document.from_lengths(LENGTHS)
    positions = torch.arange(LENGTH)[None]
    layout = Layout.zigzag(LENGTH, dist.group.WORLD)
    weight = torch.randn(1, LENGTH, 30, generator=torch.Generator().manual_seed(1)).double()
    alone = hf.mask_over_ranks(Layout.contiguous(LENGTH, _alone()), mask, dtype=torch.float64)
    given = {"attention_mask": alone, "position_ids": positions, "use_cache": False}
    expected = model(tokens, **given).logits
    exact = torch.autograd.grad((expected * weight).sum(), list(model.parameters()))

    over = hf.mask_over_ranks(layout, mask, dtype=torch.float64)
    given = {"attention_mask": over, "position_ids": layout.positions[None], "use_cache": False}

    def same(model, of):
        out = model(layout.shard(tokens), **given).logits
        torch.testing.assert_close(out, layout.shard(expected), rtol=1e-6, atol=1e-6)
        grads = torch.autograd.grad((out * layout.shard(weight)).sum(), list(of.parameters()))
        for grad, whole in zip(grads, exact, strict=True):
            dist.all_reduce(grad)
            torch.testing.assert_close(grad, whole, rtol=1e-5, atol=1e-5)

    same(model, model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same(model, model)
    seen = []
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": selective(seen)})
    same(model, model)
    assert (False, "headway.cp_forward.default") in seen
    model.gradient_checkpointing_disable()

    here = layout.shard(tokens)
    with pytest.raises(ArgumentError, match="position_ids"):
        model(here, **given | {"position_ids": torch.arange(layout.local)[None]})
    with pytest.raises(ArgumentError, match="position_ids"):
        model(here, **given | {"position_ids": None})
    with pytest.raises(ArgumentError, match="mask is a tensor"):
        hf.mask_over_ranks(layout, torch.ones(1, layout.local))


def hugging_face_compiled(world: int, rank: int) -> None:
    """A whole model as one graph, also with checkpointed layers; and its layers one by one."""
    from headway.integrations import transformers as hf

    hf.register()
    torch._dynamo.reset()
    model = llama({}).train()
    tokens = torch.randint(0, 30, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = hw.causal() & hw.document.from_lengths(LENGTHS)
    layout = Layout.zigzag(LENGTH, dist.group.WORLD)
    over = hf.mask_over_ranks(layout, mask, dtype=torch.float64)
    given = {"attention_mask": over, "position_ids": layout.positions[None], "use_cache": False}
    results = []
    for way in ("eager", "whole", "checkpointed", "layers"):
        run = model
        if way == "whole":
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
        if way == "checkpointed":
            model.gradient_checkpointing_enable(
                {"use_reentrant": False, "context_fn": selective([])}
            )
            run = torch.compile(model, backend="aot_eager")
        if way == "layers":
            model.gradient_checkpointing_disable()
            for layer in model.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        out = run(layout.shard(tokens), **given).logits
        results.append((out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(32)
        self.attention = Attention(32, heads=4, kv_heads=2, rotary=Rotary(8))

    def forward(self, x, mask, layout):
        return x + self.attention(self.norm(x), mask, layout=layout)


def fsdp(world: int, rank: int) -> None:
    """FSDP2 over the ranks of the sequence; blocks checkpointed selectively, then compiled."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    mask = hw.causal() & hw.document.from_lengths(LENGTHS)
    layout = Layout.of_lengths(LENGTHS, mesh["cp"], tile=8)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 1, LENGTH, 32, dtype=torch.float64)
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        one = torch.nn.ModuleList(Block() for _ in range(2)).double()
        h = x
        for block in one:
            h = block(h, mask, None)
        (h * weight).sum().backward()
        torch.manual_seed(1)
        many = [Block().double() for _ in range(2)]
        seen, run = [], []
        for block in many:
            wrapped = checkpoint_wrapper(block, context_fn=selective(seen))
            if compiles:
                wrapped.compile(backend="aot_eager")
            run.append(fully_shard(wrapped, mesh=mesh))
        mine = layout.shard(x)
        for block in run:
            mine = block(mine, mask, layout)
        torch.testing.assert_close(mine, layout.shard(h))
        ((mine * layout.shard(weight)).sum() * world).backward()  # FSDP takes the mean
        for block, whole in zip(many, one, strict=True):
            for p, q in zip(block.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        assert (False, "headway.cp_forward.default") in seen


def test_two_ranks(tmp_path):
    cases = titan, fsdp
    if importlib.util.find_spec("transformers"):
        cases += (hugging_face, hugging_face_compiled)
    run_ranks(2, cases, tmp_path)
