"""MuonClip is saved and resumed by `torch.distributed.checkpoint`, which makes the state of a new
optimizer by a step of its own."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import headway
from headway.nn import Attention
from headway.optim import MuonClip


class Model(nn.Module):
    def __init__(self, plain=False):
        super().__init__()
        self.embedding = None if plain else nn.Embedding(11, 16)
        self.attention = Attention(16, 4, 2, bias=not plain)
        self.norm = nn.Identity() if plain else nn.RMSNorm(16)
        self.out = nn.Linear(16, 11, bias=False)

    def forward(self, tokens):
        if self.embedding is None:
            x = nn.functional.one_hot(tokens, 16).float()
        else:
            x = self.embedding(tokens)
        return self.out(self.norm(x + self.attention(x, headway.causal()))).log_softmax(-1)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(seed, sharded=False, plain=False):
    torch.manual_seed(seed)
    model = Model(plain)
    if sharded:
        fully_shard(model.attention)
        fully_shard(model)
    return model, MuonClip(model, lr=0.02, tau=0.01)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = -model(tokens)[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
        loss.backward()
        optimizer.step()
        assert optimizer.clipped.count > 0
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("kind", ["whole", "FSDP2", "no parameters for AdamW"])
def test_resumed_from_disk_it_trains_to_the_same_bits(group, tmp_path, kind, flat):
    sharded, plain = kind == "FSDP2", kind == "no parameters for AdamW"
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = make(0, sharded, plain)
    train(model, optimizer, range(3))
    states = get_state_dict(model, optimizer, options=options)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=tmp_path)
    expected = train(model, optimizer, range(3, 6))

    model, optimizer = make(1, sharded, plain)
    empty = get_state_dict(model, optimizer, options=options)
    loaded = dict(zip(("model", "optimizer"), empty, strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"], options=options,
    )  # fmt: skip
    assert all(group["lr"] == 0.02 for group in optimizer.param_groups)
    assert train(model, optimizer, range(3, 6)) == expected


@pytest.mark.parametrize("recorded", [False, True])
def test_the_step_that_makes_the_state_does_not_clip(recorded):
    """Nor does it lose what was recorded before."""
    model, optimizer = make(0)
    other, theirs = make(0)
    train(other, theirs, range(2))
    state = copy.deepcopy(get_optimizer_state_dict(other, theirs))
    before = copy.deepcopy(model.state_dict())
    if recorded:
        model(torch.arange(9)[None])
    largest = model.attention.max_logit.value.clone()
    set_optimizer_state_dict(model, optimizer, state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    torch.testing.assert_close(
        model.attention.max_logit.value, largest, rtol=0, atol=0, equal_nan=True
    )
    assert optimizer.clipped is None
    assert [group["lr"] for group in optimizer.param_groups] == [0.02] * 3


def test_a_warm_up_from_zero_clips():
    model, optimizer = make(0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)
    assert optimizer.param_groups[0]["lr"] == 0
    before = model.attention.q_proj.weight.clone()
    train(model, optimizer, [0])
    assert not torch.equal(before, model.attention.q_proj.weight)
    schedule.step()


def test_state_dicts_with_empty_groups_load():
    """As MuonClip wrote them once."""
    model, optimizer = make(0, plain=True)
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, [0])
    state = copy.deepcopy(optimizer.state_dict())
    empty = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "params": []}
    state["param_groups"] += [empty, empty]
    again, resumed = make(1, plain=True)
    resumed.load_state_dict(state)
    again.load_state_dict(model.state_dict())
    assert train(again, resumed, [1, 2]) == train(model, optimizer, [1, 2])
