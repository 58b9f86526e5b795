"""Rows pulled out of the memory of other ranks, here a file that all of them map: the same bits as
by collectives, whoever is late."""

import ctypes
import itertools
import tempfile
import time
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import headway as hw
from headway.backends import get
from headway.distributed import Layout
from headway.distributed.exchange import headwise, pull, query_shards, run
from headway.distributed.exchange.pull import REGIONS, Pull, describe_transport, transport_of
from headway.distributed.exchange.streams import StreamPool
from headway.errors import ArgumentError
from processes import run_ranks

from .test_exact import NAMES, layout_of

ROOM = 1 << 22  # bytes of a region


class Shared:
    """`pull.SymmetricMemory` on the CPU, where copies are made at once.

    - `regions`: with 1 what is read may be overwritten.
    - `late`: seconds that a rank takes before it reads.
    """

    def __init__(self, folder: Path, regions: int = REGIONS, late: float = 0.0) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.turn, self.regions, self.late = 0, regions, late
        files = [str(folder / f"memory-{r}") for r in range(self.ranks)]
        self.bytes = [
            torch.from_file(file, shared=True, size=REGIONS * ROOM, dtype=torch.uint8)
            for file in files
        ]
        self.local, self.capacity = self.bytes[self.rank], ROOM
        dist.barrier()

    def tensors(self, rank, region, shapes, dtype):
        at, found = region % self.regions * ROOM, []
        for shape in shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            found.append(self.bytes[rank][at : at + size].view(dtype).view(shape))
            at += size
        return found

    def wait_for_region(self) -> None:
        pass

    def exchange(self, copies, to) -> None:
        self.turn += 1
        dist.barrier()
        time.sleep(self.late * (self.turn % self.ranks == self.rank))
        for x in copies:
            target = to[x.target].data_ptr() + x.offset
            for n in range(x.height):
                line = target + n * x.target_pitch, x.source + n * x.source_pitch
                ctypes.memmove(*line, x.width)

    def wait_function(self):
        return lambda: None


class InTurn(StreamPool):
    """Streams of the CPU, where all is done in turn: keys are fetched before the first kernel."""

    def __init__(self) -> None:
        self.streams, self.kept_alive = [None], []

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def stream(self, chunk: int):
        return nullcontext()


class WritesInto:
    """A backend that writes into the memory it is given."""

    def __init__(self, name: str) -> None:
        self.backend = get(name)

    def prepare(self, spec, call, *given):
        return call.q.shape, given[0].data_ptr()

    def forward(self, spec, call):
        found = self.backend.forward(spec, call)
        return found._replace(**self.moved(call, found, ("out", "lse")))

    def backward(self, spec, call, *more):
        assert call.prepared == (call.q.shape, more[0].data_ptr())
        found = self.backend.backward(spec, call, *more)
        return found._replace(**self.moved(call, found, ("q", "k", "v")))

    def moved(self, call, found, names) -> dict:
        pairs = zip(names, call.into, strict=False)
        return {name: x.copy_(getattr(found, name)) for name, x in pairs}


def results(layout: Layout, q, k, v, dout, mask) -> list[torch.Tensor]:
    mine = [layout.shard(x, 2).detach().requires_grad_() for x in (q, k, v)]
    out = hw.attention(*mine, hw.alibi(q.shape[1]), mask, layout=layout)
    return [out.detach(), *torch.autograd.grad(out, mine, layout.shard(dout, 2))]


def compared(folder: Path, **how) -> bool:
    """Whether pulls give the bits of collectives, in every layout and plan that has them."""
    torch.manual_seed(0)
    n, same = 301, True
    q, k, v = (torch.randn(2, h, n, 8) for h in (6, 3, 3))
    narrow = v[..., :4]
    dout, usual = torch.randn_like(q), run.transport_of
    mask = hw.causal() & hw.document.from_lengths([70, 131, 1, 99])
    memory = Shared(folder, **how)
    for name, plan in itertools.product(NAMES, ("heads", "gather")):
        layout = layout_of(name, n, dist.get_world_size(), 5).using(plan)
        if name == "zigzag":  # keys and values that are not alike
            v, dout = narrow, dout[..., :4]
        by_collectives = results(layout, q, k, v, dout, mask)
        run.transport_of = lambda *of: Pull(memory)
        by_pulls = results(layout, q, k, v, dout, mask)
        run.transport_of = usual
        same &= all(torch.equal(a, b) for a, b in zip(by_pulls, by_collectives, strict=True))
    assert memory.turn > 0
    return same


@contextmanager
def shared_folder():
    """One that all ranks know."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()


def right(world: int, rank: int) -> None:
    with shared_folder() as folder:
        assert compared(folder)
        assert compared(folder, late=0.01)


def in_streams(world: int, rank: int) -> None:
    """All fetched at once, and results written where they belong and gradients where they leave."""
    with shared_folder() as folder, pytest.MonkeyPatch.context() as patched:
        usual = headwise.HeadwiseAllGather._stream_pool
        made = []

        def stream_pool(self, chunks, call, transport):
            if not isinstance(transport, Pull) or len(chunks) < 2:
                return usual(self, chunks, call, transport)
            made.append(InTurn())
            return made[-1]

        patched.setattr(headwise.HeadwiseAllGather, "_stream_pool", stream_pool)
        patched.setattr(query_shards, "get", WritesInto)
        assert compared(folder, late=0.003)
        assert made


def two_steps(world: int, rank: int) -> None:
    """When the keys of the next step are fetched, those of one step are there, and no other's."""
    alive: list[weakref.ref] = []
    gather = Pull.gather

    def counted(self, *given):
        assert sum(of() is not None for of in alive) <= 1
        pending = gather(self, *given)
        alive.append(weakref.ref(pending.buffers[0]))
        return pending

    with shared_folder() as folder, pytest.MonkeyPatch.context() as patched:
        memory = Shared(folder)
        patched.setattr(Pull, "gather", counted)
        patched.setattr(run, "transport_of", lambda *of: Pull(memory))
        q, k, v = (torch.randn(1, h, 64, 8) for h in (10, 5, 5))
        layout = Layout.zigzag(64, dist.group.WORLD).using("heads")
        results(layout, q, k, v, torch.randn_like(q), hw.causal())
        assert len(alive) == 2 * 5


def overwritten(world: int, rank: int) -> None:
    """With one region for all turns it is seen that a late rank reads what comes next."""
    with shared_folder() as folder:
        wrong = torch.tensor(int(not compared(folder, regions=1, late=0.03)))
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    assert wrong


@pytest.mark.parametrize(
    ("world", "case"),
    [(2, right), (3, right), (2, in_streams), (3, in_streams), (2, two_steps), (3, overwritten)],
)
def test_pulls(world, case, tmp_path):
    run_ranks(world, (case,), tmp_path)


def test_explained():
    layout = Layout.zigzag(64, (0, 2))
    q, k = torch.randn(1, 2, 32, 8), torch.randn(1, 1, 32, 8)
    said = str(hw.explain(q, k, k, mask=hw.causal(), layout=layout))
    assert "transport: collectives, tensors are on cpu" in said
    cuda, group = torch.device("cuda", 0), Mock(group_name="none")
    assert describe_transport("collective", None, cuda) == "collectives, as named"
    assert describe_transport("auto", None, cuda).startswith("pulled by copy engines, if")
    pull._transports.put((group, cuda), "ranks share a card")
    assert describe_transport("auto", group, cuda) == "collectives: ranks share a card"
    pull._transports.put((group, cuda), Pull(None))
    assert describe_transport("pull", group, cuda) == "pulled by copy engines"
    pull._transports.clear()


def test_by_name():
    with pytest.raises(ArgumentError, match="tensors are on cpu"):
        transport_of("pull", None, torch.device("cpu"), None)
    with pytest.raises(ArgumentError, match="must be one of"):
        Layout.zigzag(10, (0, 2)).using(transport="push")
    with pytest.raises(ArgumentError, match="collectives alone"):
        Layout.zigzag(10, (0, 2)).using("ulysses", "pull")
