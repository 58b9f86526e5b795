"""One of several ranks misbehaves, anywhere: every rank raises or goes on with right numbers, none
waits without a word. All go on with their next call where they raised in the same one; else every
later call over the group refuses."""

import contextlib
import io
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import headway as hw
from headway.backends import get
from headway.distributed import Layout, groups
from headway.distributed.exchange import consistency
from headway.distributed.exchange.collective import Collective
from headway.errors import ArgumentError, HeadwayError
from long import long
from processes import run_ranks

LENGTH, HEADS, WIDTH = 48, 4, 4
PLANS = "heads", "gather", "ulysses"
STEPS = 20  # of the first seeds below, they have every fault in a call that meets it


class Boom(Exception):
    """What a kernel or a hook raises here."""


@contextlib.contextmanager
def failing(owner: Any, name: str, turn: int):
    """Calls of a function raise, from call number `turn` on; they may never come to that."""
    real, calls = getattr(owner, name), iter(range(10**6))

    def fake(*args, **kwargs):
        if next(calls) >= turn:
            raise Boom
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, fake)
        yield


def refused(layout: Layout, x: Tensor) -> list[Callable[[], Any]]:
    """Calls that one rank refuses before it compares anything."""
    call = partial(hw.attention, layout=layout)
    stale = torch.arange(LENGTH) // 9
    blocks = hw.block_mask(hw.document(stale), 1, 1, LENGTH, LENGTH)
    stale[3:] += 1
    unclear = lambda s, b, h, i, j: s if s > 0 else -s
    return [
        lambda: call(x, x, x[:, :, :-1]), lambda: call(x, x.half(), x), lambda: call(x[..., 1:], x, x),
        lambda: call(x, x, x, unclear), lambda: call(x, x, x, backend="hopper"),
        lambda: call(x, x, x, sink=torch.zeros(HEADS + 1)),
        lambda: call(x, x, x, mask=hw.dense(torch.ones(1, 1, 5, 5, dtype=torch.bool))),
        lambda: call(x, x, x, mask=hw.document(torch.zeros(layout.local, dtype=torch.int64))),
        lambda: call(x, x, x, mask=blocks),
        lambda: torch.func.vmap(lambda x: call(x, x, x))(torch.stack([x, x])),
        lambda: call(x, x, x, windows=3), lambda: hw.attention(x, x, x, layout=(layout, 3)),
        lambda: hw.attention_with_stats(x, x, x, layout=layout, entropy=True),
        lambda: call(*[torch.nested.nested_tensor([*x.detach()], layout=torch.jagged)] * 3),
    ]  # fmt: skip


class Ranks:
    """The calls of one rank, which know what is right."""

    def __init__(self, seed: int) -> None:
        self.draw, self.numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        self.new_group()

    def new_group(self) -> None:
        self.group = dist.new_group(timeout=timedelta(seconds=60))
        self.rank, self.ranks = self.group.rank(), self.group.size()

    def step(self, odd: int, fault: str, turn: int, choice: int) -> None:
        """One call and its backward, in which rank `odd` has a fault."""
        layout = Layout.zigzag(LENGTH, self.group).using(self.draw.choice(PLANS))
        whole, w = (torch.randn(1, HEADS, LENGTH, WIDTH, generator=self.numbers) for _ in range(2))
        whole.requires_grad_()
        right = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        (grad,) = torch.autograd.grad((right * w).sum(), whole)
        at, mine = layout.positions, fault if self.rank == odd else ""
        x = whole.detach()[:, :, at].requires_grad_()
        call = lambda: hw.attention(x, x, x, mask=hw.causal(), layout=layout)
        if fault == "refuse":
            if mine:
                with pytest.raises((HeadwayError, ValueError, RuntimeError)):
                    (calls := refused(layout, x))[choice % len(calls)]()
            else:
                with pytest.raises(ArgumentError, match=f"rank {odd}: .* there"):
                    call()
            return
        if mine == "late":
            time.sleep(0.3)
        owner = Collective if mine.startswith("give up") else get("cpu")
        name = {"forward": "forward", "give up forward": "gather"}.get(mine)
        with failing(owner, name, turn) if name else contextlib.nullcontext():
            out = self.outcome(call, odd, fault if "forward" in fault else "", bool(mine))
        if out is None or out.isnan().any():
            assert out is None or "forward" in fault
            return
        torch.testing.assert_close(out, right[:, :, at].detach())
        loss = (out * w[:, :, at]).sum()
        if fault in ("hook", "left out"):
            if fault == "hook" and mine:
                out.register_hook(raises)
                with pytest.raises(Boom):
                    loss.backward()
            with pytest.raises(ArgumentError, match=f"Either rank {odd} left the backward out"):
                call() if mine else loss.backward()
            self.broken_group()  # rank `odd` is a call ahead
            return
        name = {"backward": "backward", "give up backward": "reduce_scatter"}.get(mine)
        backward = lambda: torch.autograd.grad(loss, x)[0]
        with failing(owner, name, turn) if name else contextlib.nullcontext():
            dx = self.outcome(backward, odd, fault if "backward" in fault else "", bool(mine))
        if dx is not None and not (dx.isnan().any() and "backward" in fault):
            torch.testing.assert_close(dx, grad[:, :, at])

    def outcome(
        self, call: Callable[[], Tensor], odd: int, fault: str, mine: bool
    ) -> Tensor | None:
        """What a call returns; None where it raises, as it has to where a rank has the fault."""
        if not fault:
            return call()
        gave_up = fault.startswith("give up")
        words = "over this process group any more" if gave_up else f"rank {odd} raised in "
        result = None
        try:
            result = call()
        except Boom:
            assert mine
        except RuntimeError as error:
            if mine or words not in str(error):
                raise
        # Of the others each may have had its results before the fault: then its next call raises.
        raised = torch.tensor(int(result is None))
        dist.all_reduce(raised.clone(), group=dist.group.WORLD)
        everyone = [torch.zeros_like(raised) for _ in range(self.ranks)]
        dist.all_gather(everyone, raised)
        if not int(everyone[odd]):  # its turn never came
            assert not sum(map(int, everyone))
            return result
        if result is not None or gave_up:
            with pytest.raises(RuntimeError, match=words):
                Layout.zigzag(LENGTH, self.group).shard(torch.zeros(LENGTH), 0)
        if gave_up or not all(everyone):  # some have come to their next call before they raised
            self.broken_group()
        return None

    def broken_group(self) -> None:
        """Every call over the group refuses, also on ranks that others have to tell; begin anew."""
        with pytest.raises(RuntimeError, match="over this process group any more"):
            Layout.zigzag(LENGTH, self.group).shard(torch.zeros(LENGTH), 0)
        self.new_group()


def raises(grad: Tensor) -> None:
    raise Boom


FAULTS = (
    "refuse", "refuse", "late", "forward", "backward", "hook", "left out", "give up forward",
    "give up backward", "",
)  # fmt: skip


def faults(seed: int, world: int, rank: int) -> None:
    """Random calls, in most of which one rank has a fault."""
    consistency.LATE_SECONDS[:] = 0.5, 2.0
    ranks = Ranks(seed)
    for n in range(STEPS):
        draw = ranks.draw
        step = (
            draw.randrange(world), draw.choice(FAULTS), draw.choice((0, 0, 1, 2, 5)),
            draw.randrange(100),
        )  # fmt: skip
        try:
            ranks.step(*step)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, step {n}, rank {rank}: {step}: {error}") from error


@contextlib.contextmanager
def interrupted(line: int):
    """The line of that number, of those of `headway.distributed` that run, raises as the handler of
    a signal does."""
    lines, folder = iter(range(10**9)), os.path.dirname(groups.__file__)

    def of_line(frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and next(lines) == line:
            sys.settrace(None)
            raise (Boom if line % 3 else KeyboardInterrupt)
        return of_line

    sys.settrace(lambda frame, *_: of_line if frame.f_code.co_filename.startswith(folder) else None)
    try:
        yield
    finally:
        sys.settrace(None)


def interrupts(seed: int, world: int, rank: int) -> None:
    """Anything may raise on any line of one rank: the others are right or raise. So is the next
    call, everywhere, unless all calls refuse from then on."""
    consistency.LATE_SECONDS[:] = 2.0, 2.0
    ranks = Ranks(seed)
    draw, numbers = ranks.draw, ranks.numbers
    for n in range(STEPS):
        odd, line, plan = draw.randrange(world), draw.randrange(600), draw.choice(PLANS)
        layout = Layout.zigzag(LENGTH, ranks.group).using(plan)
        errors = []
        for turn in range(3):
            whole = torch.randn(1, HEADS, LENGTH, WIDTH, generator=numbers, requires_grad=True)
            right = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
            (grad,) = torch.autograd.grad(right.square().sum(), whole)
            x = whole.detach()[:, :, layout.positions].requires_grad_()
            bad = interrupted(line) if (turn, rank) == (1, odd) else contextlib.nullcontext()
            try:
                with bad:
                    out = hw.attention(x, x, x, mask=hw.causal(), layout=layout)
                    out.square().sum().backward()
            except (Boom, KeyboardInterrupt, ArgumentError, RuntimeError) as error:
                errors.append(str(error))
                continue
            for actual, expected in ((out, right), (x.grad, grad)):
                if not actual.isnan().any() or not turn:
                    where = f"seed {seed}, step {n}, rank {rank}, turn {turn}, line {line} of {odd}"
                    torch.testing.assert_close(
                        actual, expected[:, :, layout.positions], msg=lambda m, w=where: f"{w}: {m}"
                    )
        failed = torch.tensor(len(errors))
        dist.all_reduce(failed, group=dist.group.WORLD)
        if failed:
            ranks.new_group()


def by_messages(seed: int, world: int, rank: int) -> None:
    """The same for ranks that share no memory. What they were sent by a rank that failed is NaN."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(consistency, "shared_memory_compare", lambda group, timeout: None)
        faults(seed, world, rank)


def late(world: int, rank: int) -> None:
    """A rank that is late, and one that a loss leaves out of a backward: standard error says for
    whom the others wait and in what call."""
    consistency.LATE_SECONDS[:] = 0.3, 0.4
    for shared in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            if not shared:
                patched.setattr(consistency, "shared_memory_compare", lambda *_: None)
            layout = Layout.zigzag(LENGTH, dist.new_group(timeout=timedelta(seconds=60)))
            x = torch.randn(1, 2, layout.local, 4).requires_grad_()
            call = partial(hw.attention, x, x, x, layout=layout)
            loss = call().sum()
            waits(rank, call, "attention, call 2 over")
            waits(rank, loss.backward, "the backward of attention, call 1 over")


def waits(rank: int, call: Callable[[], Any], words: str) -> None:
    """Ranks wait for rank 1, and say so once or twice."""
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        call()
    lines = said.getvalue().splitlines()
    assert len(lines) in ((0,) if rank == 1 else (1, 2)), lines
    for line in lines:
        assert f"headway: rank {rank} has waited" in line
        assert f"for rank 1, in {words}" in line


def first_call(world: int, rank: int) -> None:
    """A rank that makes no first call over a group: the others say for whom they wait, also where
    an interrupt ends that, and raise when the group's time is up."""
    consistency.LATE_SECONDS[:] = 0.3, 0.4
    late, other = (dist.new_group(timeout=timedelta(seconds=n)) for n in (60, 3))
    layout = Layout.zigzag(LENGTH, late)
    words = "in its first call over this process group"
    dist.barrier()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        if rank == 1:
            time.sleep(3.0)
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
            threading.Timer(0.7, signal.raise_signal, (signal.SIGINT,)).start()
            with pytest.raises(KeyboardInterrupt):
                layout.shard(torch.zeros(LENGTH), 0)
        layout.shard(torch.zeros(LENGTH), 0)
    assert (f"rank {rank} has waited 0 s for rank 1, {words}" in said.getvalue()) == (rank != 1)
    if rank == 1:
        return
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(RuntimeError) as raised:
        Layout.zigzag(LENGTH, other).shard(torch.zeros(LENGTH), 0)
    assert f"rank 1 made no call in 3 s, {words}" in str(raised.value)


def skips(world: int, rank: int) -> None:
    """A rank that leaves out one of several equal calls: the first backward raises everywhere."""
    layout = Layout.zigzag(LENGTH, dist.new_group(timeout=timedelta(seconds=60)))
    x = torch.randn(1, 2, layout.local, 4).requires_grad_()

    def step() -> None:
        h = x
        for n in range(3):
            if rank != 1 or n != 1:
                h = hw.attention(h, h, h, mask=hw.causal(), layout=layout)
        h.sum().backward()

    with pytest.raises(ArgumentError, match="rank 1 left a call out"):
        step()


def leaves(name: str, world: int, rank: int) -> None:
    """A rank that leaves, before a call or in it: the others raise, and name it."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    layout = Layout.zigzag(LENGTH, group)
    x = torch.randn(1, 2, layout.local, 4).requires_grad_()
    out = hw.attention(x, x, x, mask=hw.causal(), layout=layout)
    if rank == 1 and not name:
        os._exit(0)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            owner = Collective if name == "gather" else get("cpu")
            patched.setattr(owner, name, lambda *args, **kwargs: os._exit(0))
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 has left"):
            out.sum().backward()
    assert time.monotonic() - began < 30


def leaves_by_messages(world: int, rank: int) -> None:
    """The same for ranks that share no memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(consistency, "shared_memory_compare", lambda group, timeout: None)
        leaves("", world, rank)


def leaves_first(name: str, world: int, rank: int) -> None:
    """A rank that leaves before its first call over a group, or in it: the others name it."""
    layout = Layout.zigzag(LENGTH, dist.new_group(timeout=timedelta(seconds=60)))
    x = torch.randn(1, 2, layout.local, 4)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if rank == 1:
            raise SystemExit
        return s

    dist.barrier()
    began = time.monotonic()
    with (
        contextlib.suppress(SystemExit)
        if rank == 1
        else pytest.raises(
            (ArgumentError, RuntimeError),
            match="rank 1 has left" if name == "before" else "rank 1: ",
        )
    ):
        if rank == 1 and name == "before":
            time.sleep(0.5)
            os._exit(0)
        hw.attention(x, x, x, score, layout=layout)
    assert time.monotonic() - began < 30


def skips_batches(world: int, rank: int) -> None:
    """A loop that goes on after every error, as one that skips bad batches does. What raises on one
    rank puts it a step ahead of the others: no step mixes with another."""
    consistency.LATE_SECONDS[:] = 1.0, 1.0
    for fault in ("hook", "left out", "kernel"):
        layout = Layout.zigzag(LENGTH, dist.new_group(timeout=timedelta(seconds=60)))
        right = []
        for step in range(6):
            whole = torch.full((1, 2, LENGTH, 4), step + 1.0)
            x = whole[:, :, layout.positions].requires_grad_()
            bad = rank == 1 and step == 2
            name = "backward" if bad and fault == "kernel" else ""
            try:
                out = hw.attention(x, x, x, layout=layout)
                if bad and fault == "hook":
                    out.register_hook(raises)
                loss = x.sum() if bad and fault == "left out" else out.sum()
                with failing(get("cpu"), name, 0) if name else contextlib.nullcontext():
                    loss.backward()
            except (Boom, ArgumentError, RuntimeError):
                continue
            right.append(step)
            torch.testing.assert_close(out, x)  # equal values, so their mean
        assert fault == "kernel" or right[-1] <= 2


def threads(world: int, rank: int) -> None:
    """Two threads over one group: each call raises or is right, and a thread is told."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    layout = Layout.zigzag(LENGTH, group)
    whole = torch.randn(2, 1, 2, LENGTH, 4, generator=torch.Generator().manual_seed(0))
    right = F.scaled_dot_product_attention(whole, whole, whole)[..., layout.positions, :]
    consistency.LATE_SECONDS[:] = 0.2, 10.0
    errors: list[str] = []

    def call(n: int) -> None:
        x = whole[n][:, :, layout.positions]
        for _ in range(50):
            try:
                out = hw.attention(x, x, x, layout=layout)
            except (ArgumentError, RuntimeError) as error:
                errors.append(str(error))
                return
            torch.testing.assert_close(out, right[n])

    running = [threading.Thread(target=call, args=(n,), daemon=True) for n in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
    assert not any(thread.is_alive() for thread in running)
    assert errors
    told = torch.tensor(int(any("two threads" in text for text in errors)))
    dist.all_reduce(told, dist.ReduceOp.MAX)
    assert told, errors


@pytest.mark.parametrize("seed", [1634, *map(long, range(20))])
def test_faults(seed, tmp_path):
    run_ranks(3, (partial(faults, seed),), tmp_path)


@pytest.mark.parametrize("seed", [0, *map(long, range(1, 20))])
def test_interrupts(seed, tmp_path):
    run_ranks(3, (partial(interrupts, seed),), tmp_path)


@pytest.mark.parametrize("seed", [2357, *map(long, range(20))])
def test_faults_by_messages(seed, tmp_path):
    run_ranks(3, (partial(by_messages, seed),), tmp_path)


def test_late(tmp_path):
    run_ranks(3, (late, first_call, skips), tmp_path)


def test_what_is_kept_for_a_group_lasts_as_long_as_it():
    alive = [Mock(group_name=str(n)) for n in range(100)]
    by_name = {group.group_name: group for group in alive}
    kept: groups.GroupDict[int] = groups.GroupDict()
    with patch.object(groups, "resolve_group", lambda name: by_name.get(name)):
        for n, group in enumerate(alive):
            kept.put((group, "cpu") if n % 2 else group, n)
        assert len(kept) == 100
        del by_name["7"]
        by_name["8"] = alive[9]  # another group of that name
        kept.put(alive[0], 0)
    assert sorted(kept.values()) == [n for n in range(100) if n not in (7, 8)]


@pytest.mark.parametrize("name", ["", "backward", "gather"])
def test_leaves(name, tmp_path):
    run_ranks(3, (partial(leaves, name),), tmp_path)


def test_leaves_by_messages(tmp_path):
    run_ranks(3, (leaves_by_messages,), tmp_path)


@pytest.mark.parametrize("name", ["before", "in"])
def test_leaves_first(name, tmp_path):
    run_ranks(3, (partial(leaves_first, name),), tmp_path)


def test_skips_batches(tmp_path):
    run_ranks(3, (skips_batches,), tmp_path)


def test_threads(tmp_path):
    run_ranks(2, (threads,), tmp_path)
