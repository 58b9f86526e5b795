"""Whatever ranks do that is not the same, every rank raises: nothing is exchanged, nothing hangs, and
they go on with their next call. Where only some of them were in a backward, some are a step ahead,
and every later call over their group refuses."""

import random
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headway as hw
from headway.distributed import Layout
from headway.errors import ArgumentError
from processes import run_ranks

LENGTH = 24  # of any layout below a rank has as many tokens
LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag}
STEPS = 40  # for a longer search, more


class Pending(NamedTuple):
    """A call whose backward is still to come: a loss, its leaf, and the gradient that is right."""

    loss: Tensor
    leaf: Tensor
    right: Tensor


class World:
    """The calls of one rank, which know what is right."""

    def __init__(self, group, seed: int) -> None:
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self.numbers = torch.Generator().manual_seed(seed)
        self.pending: list[Pending] = []

    def randn(self, *shape: int, dtype: torch.dtype) -> Tensor:
        made = torch.randn(*shape, generator=self.numbers, dtype=torch.float64)
        return made.to(dtype)

    def layout(self, name: str) -> Layout:
        return LAYOUTS[name](LENGTH, self.group)

    def attention(self, name: str, dtype: torch.dtype, width: int, wrong: bool, plan: str) -> None:
        layout = self.layout(name).using(plan)
        x, w = (self.randn(1, 2, LENGTH, width, dtype=dtype) for _ in range(2))
        whole = x.clone().requires_grad_()
        right = F.scaled_dot_product_attention(*[whole] * 3, is_causal=True)
        (grad,) = torch.autograd.grad((right * w).sum(), whole)
        at = layout.positions
        leaf = (x[:, :, at[1:]] if wrong else x[:, :, at]).requires_grad_()
        out = hw.attention(leaf, leaf, leaf, mask=hw.causal(), layout=layout)
        torch.testing.assert_close(out, right[:, :, at].detach())
        self.pending.append(Pending((out * w[:, :, at]).sum(), leaf, grad[:, :, at]))

    def unshard(self, name: str, dtype: torch.dtype, width: int, wrong: bool, dim: int) -> None:
        layout = self.layout(name)
        at, (x, w) = layout.positions, (self.randn(LENGTH, width, dtype=dtype) for _ in range(2))
        turned = lambda x: x if dim == 0 else x.T
        leaf = turned(x[at[1:]] if wrong else x[at]).requires_grad_()
        out = layout.unshard(leaf, dim)
        assert torch.equal(out, turned(x))
        right = turned(w[at]) * self.ranks
        self.pending.append(Pending((out * turned(w)).sum(), leaf, right))

    def shift(
        self, name: str, dtype: torch.dtype, width: int, wrong: bool, by: int, fill: float
    ) -> None:
        layout = self.layout(name)
        at, (x, w) = layout.positions, (self.randn(LENGTH, width, dtype=dtype) for _ in range(2))
        leaf = (x[at[1:]] if wrong else x[at]).requires_grad_()
        out = layout.shift(leaf, by, 0, fill)
        moved, back = torch.full_like(x, fill), torch.zeros_like(w)
        for p in range(LENGTH):
            if 0 <= p + by < LENGTH:
                moved[p], back[p + by] = x[p + by], w[p]
        assert torch.equal(out, moved[at])
        self.pending.append(Pending((out * w[at]).sum(), leaf, back[at]))

    def shard(self, name: str, dtype: torch.dtype, width: int, wrong: bool) -> None:
        layout = self.layout(name)
        x = self.randn(LENGTH, width, dtype=dtype)
        assert torch.equal(layout.shard(x[1:] if wrong else x, 0), x[layout.positions])

    def backward(self, number: int) -> None:
        of = self.pending[number]
        (grad,) = torch.autograd.grad(of.loss, of.leaf, retain_graph=True)
        torch.testing.assert_close(grad, of.right)


def action(draw: random.Random, pending: int) -> tuple:
    """What a rank may do: the name of a method of `World`, and its arguments."""
    if pending and draw.random() < 0.45:
        return "backward", draw.randrange(pending)
    name = draw.choice(("attention", "attention", "unshard", "shift", "shard"))
    given = (
        draw.choice(list(LAYOUTS)), draw.choice((torch.float32, torch.float64)),
        draw.choice((3, 4)), draw.random() < 0.1,
    )  # fmt: skip
    more = {
        "attention": (draw.choice(("heads", "gather", "ulysses")),),
        "unshard": (draw.choice((0, 1)),),
        "shift": (draw.choice((1, -2)), draw.choice((0.0, -7.0))),
        "shard": (),
    }
    return name, *given, *more[name]


def steps(seed: int, world: int, rank: int) -> None:
    """Random calls and backwards; in some turns one rank does something else."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    draw, at = random.Random(seed), World(group, seed)
    unlike = 0
    for step in range(STEPS):
        mine = usual = action(draw, len(at.pending))
        odd = draw.randrange(world) if draw.random() < 0.4 else None
        if odd is not None:
            # Often nearly the same: one argument is another.
            other = action(draw, len(at.pending))
            if usual[0] == other[0] and len(usual) > 2 and draw.random() < 0.8:
                n = draw.randrange(1, len(usual))
                other = (*usual[:n], other[n], *usual[n + 1 :])
            mine = other if rank == odd else usual
            unlike += other != usual
        fits = (odd is None or other == usual) and not (len(usual) > 2 and usual[4])
        state, before = at.numbers.get_state(), len(at.pending)
        try:
            if fits:
                getattr(at, mine[0])(*mine[1:])
            else:
                with pytest.raises(ArgumentError, match=r"rank|tokens"):
                    getattr(at, mine[0])(*mine[1:])
        except BaseException as error:
            raise AssertionError(f"seed {seed}, step {step}, {mine}, usual {usual}") from error
        if not fits:  # the numbers that were drawn differ from rank to rank
            at.numbers.set_state(state)
            del at.pending[before:]
        if odd is not None and (other[0] == "backward") != (usual[0] == "backward"):
            refuses(group)
            at.group = group = dist.new_group(timeout=timedelta(seconds=60))
            at.pending.clear()
    assert unlike > STEPS // 8


def refuses(group) -> None:
    with pytest.raises(RuntimeError, match="over this process group any more"):
        Layout.contiguous(LENGTH, group).shard(torch.zeros(LENGTH), 0)


def named(world: int, rank: int) -> None:
    """What the error says."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    other = rank == 1
    layout = Layout.contiguous(LENGTH, group)
    differs = Layout.zigzag(LENGTH, group) if other else layout
    x = torch.randn(1, layout.local, 3)
    whole = torch.randn(1, LENGTH, 3)
    wide = torch.randn(1, layout.local, 3 + other)
    calls = {
        "in the layout": lambda: differs.unshard(x),
        "in dtype": lambda: layout.unshard(x.double() if other else x),
        "in the sizes": lambda: layout.unshard(wide),
        "in dim": lambda: layout.unshard(torch.randn(layout.local, layout.local), int(other)),
        "in whether it trains": lambda: layout.unshard(x.clone().requires_grad_(other)),
        "in by or fill": lambda: layout.shift(x, 1 + other),
        "in by or fill;": lambda: layout.shift(x, 1, fill=-100 * other),
        "in dtype or": lambda: layout.shift(x.int() if other else x.long()),
        "in the layout;": lambda: differs.shard(whole),
        "in dtype or device": lambda: layout.shard(whole.double() if other else whole),
        "rank 0: layout.shard; rank 1: layout.unshard": (
            lambda: layout.unshard(x) if other else layout.shard(whole)
        ),
    }
    for words, call in calls.items():
        with pytest.raises(ArgumentError, match=words):
            call()
    for call in (
        lambda: layout.unshard(x[:, other:]), lambda: layout.shard(whole[:, other:]),
        lambda: layout.shift(x, 1.5 if other else 1),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="tokens|integer" if other else "rank 1: .* there"):
            call()


def backwards(world: int, rank: int) -> None:
    """Calls that are alike in all but their numbers, whose backwards are in another order."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    layout = Layout.zigzag(LENGTH, group)
    for plan in ("heads", "gather", "ulysses"):
        leaves = [torch.randn(1, 2, layout.local, 4).requires_grad_() for _ in range(2)]
        outs = [hw.attention(x, x, x, mask=hw.causal(), layout=layout.using(plan)) for x in leaves]
        for out in outs if rank == 0 else outs[::-1]:
            with pytest.raises(ArgumentError, match=r"rank 0: the backward of attention, call \d+"):
                out.sum().backward(retain_graph=True)
        for out in outs:
            out.sum().backward()
    for move in (layout.unshard, layout.shift):
        x = torch.randn(1, layout.local, 4).requires_grad_()
        outs = [move(x) for _ in range(2)]
        with pytest.raises(ArgumentError, match=r"the backward of layout\.\w+, call \d+"):
            outs[rank == 1].sum().backward()
    x = leaves[0]
    out = hw.attention(x, x, x, layout=layout).sum()
    both = out.backward, lambda: hw.attention(x, x, x, layout=layout)
    with pytest.raises(ArgumentError, match=r"0: the backward of attention.*rank 1: attention"):
        both[rank]()
    refuses(group)
    layout = layout.on(dist.new_group(timeout=timedelta(seconds=60)))
    # Computed again while a backward runs.
    call = lambda x: hw.attention(x.sin(), x, x, mask=hw.causal(), layout=layout).cos()
    for reentrant in (False, True):
        outs = [checkpoint(call, x, use_reentrant=reentrant) for x in leaves]
        with pytest.raises(ArgumentError, match=r"rank 0: attention, again .* behind call \d+"):
            outs[rank == 1].sum().backward()
        outs = [checkpoint(call, x, use_reentrant=reentrant) for x in leaves]
        for out in outs[::-1]:
            out.sum().backward()


def alone(world: int, rank: int) -> None:
    """A layout without a mesh asks nobody; nor does a backward in which nothing travels."""
    if rank == 1:
        Layout.zigzag(LENGTH, (rank, world)).shard(torch.randn(1, LENGTH))
    layout = Layout.zigzag(LENGTH, dist.group.WORLD)
    q, kv = torch.randn(1, 2, layout.local, 4), torch.randn(1, 2, 5, 4)
    out = hw.attention(q, kv, kv.requires_grad_(), layout=(layout, None))
    if rank == 1:
        out.sum().backward()


def test_random_steps(tmp_path):
    run_ranks(2, (partial(steps, 2),), tmp_path)


def test_random_steps_of_three(tmp_path):
    run_ranks(3, (partial(steps, 3),), tmp_path)


def test_named(tmp_path):
    run_ranks(2, (named, backwards, alone), tmp_path)
