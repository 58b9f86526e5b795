"""Rows are pulled out of the memory of the other cards of this host, by copy engines.

What a rank holds it lays into memory that all cards of the group see (symmetric memory); then it
says so, and each reader copies what it needs to where its kernel reads it. A collective's kernels
would take multiprocessors from attention; copy engines take none.

    main stream   lay n+1 out | kernel n                          | wait for n+1 | kernel n+1
    copy stream               | say it, wait for all | pull n+1

Nobody waits on the host (`symmetric.py`). There are some regions in turns: what was laid out at
turn t has been read when every rank has said t + 1, since each pulls before it speaks again.

A call, and a backward, runs ahead of the agreement that all ranks make it (`agreement.py`): a
comparison takes the host as long as some kernels take. Where ranks turn out not to agree, or one
has left, each lets go of its waits (`Memory.let_go`) and raises. A rank that leaves when all have
agreed makes the others wait in their streams, until the time limit of a later collective.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...caches import LRUCache
from ...errors import ArgumentError
from .agreement import Agreement
from .collective import Collective, all_gather
from .routes import (
    Arriving,
    Copies,
    Leaving,
    Parts,
    Returning,
    Routes,
    Transport,
    beginnings,
    message,
    stacked,
    unstacked,
    view_at,
)
from .symmetric import REGIONS, Copy, Memory, driver, together


class _Exchange(NamedTuple):
    """An exchange of tensors of one kind, as worked out for the memory that `own` is of, which has
    room for it.

    - `laying`: rows out in `mine`; `copies`: of what others have laid out.
    """

    own: Tensor
    laying: Copies
    mine: Parts
    copies: list[Copy]


class Pull(Transport):
    """Cards of one host that reach each other.

    - `agreement`: of a call that does not wait for it (`Transport.ahead_of`).
    """

    beside_kernels = True

    def __init__(self, memory: Any, agreement: Agreement | None = None) -> None:
        self.memory, self.agreement = memory, agreement

    def ahead_of(self, agreement: Agreement) -> Transport:
        """See `Transport`. Copies stay inside of the memory, whatever other ranks do."""
        return Pull(self.memory, agreement)

    def fetch(self, routes: Routes, parts: Parts) -> Arriving:
        """See `Transport`."""
        to = routes.empty(parts)

        def targets(to: list[Tensor]) -> Iterator[_Target]:
            for s in routes.incoming:
                for n, y in enumerate(to):
                    yield _Target(s.rank, s.at, n, n, y[:, :, s.to : s.to + s.size])

        exchange = self._begun(routes, False, parts, lambda: to, targets)
        exchange.laying.make(parts, exchange.mine)
        self.memory.exchange(exchange.copies, to)
        out = unstacked(to, parts)
        routes.copy_own(parts, out)
        return Arriving(out, self.memory.mark())

    def home(self, routes: Routes, parts: Parts) -> Returning:
        """See `Transport`."""
        return self.leaving(routes, parts).send(parts)

    def leaving(self, routes: Routes, like: Parts) -> Leaving:
        """See `Transport`. What is made in the room need not be laid out."""
        to = lambda: [message(routes.outgoing, like)]

        def targets(to: list[Tensor]) -> Iterator[_Target]:
            for s, begins in beginnings(routes.outgoing, like):
                for n, shape in enumerate(stacked(like, s.size)):
                    yield _Target(s.rank, s.to, n, 0, view_at(to[0], begins[n], shape))

        exchange = self._begun(routes, True, like, to, targets)

        def send(parts: Parts) -> Returning:
            (came,) = to()  # when what a kernel needs beside its results is free again
            if any(x is not y for x, y in zip(parts, exchange.mine, strict=True)):
                exchange.laying.make(parts, exchange.mine)
            self.memory.exchange(exchange.copies, [came])
            # A later, larger step may make new memory before these are added.
            return Returning(routes, parts, self.memory.mark(), came, exchange.own)

        return Leaving(exchange.mine, send)

    def _begun(
        self, routes: Routes, back: bool, parts: Parts, to: Callable[[], list[Tensor]],
        targets: "_Targets",
    ) -> _Exchange:  # fmt: skip
        """The exchange of rows of `parts`, when they may be laid out.

        - `back`: whether these are contributions to what was read, on their way home.
        - `to`: tensors like those that rows are copied into; `targets`: where in them.
        """
        memory = self.memory
        shapes = tuple([(*x.shape[:2], x.shape[3]) for x in parts])
        key = back, memory.turn % REGIONS, shapes, parts[0].dtype
        found = routes.known.get(key)
        if found is None or found.own is not memory.own:
            found = self._prepared(routes, back, parts, to(), targets)
            key = back, memory.turn % REGIONS, *key[2:]  # new memory begins with another turn
            routes.known[key] = found
        memory.begin()
        return found

    def _prepared(
        self, routes: Routes, back: bool, parts: Parts, to: list[Tensor], targets: "_Targets"
    ) -> _Exchange:  # fmt: skip
        """The exchange of a turn, with room for it. A rank begins with the next one's rows: if all
        began with those of the first, they would share what its links give."""
        memory, dtype = self.memory, parts[0].dtype
        if back:
            rows, laid = routes.rows, [(s.to, s.size) for s in routes.incoming]
        else:
            rows, laid = routes.held, [(s.at, s.size) for s in routes.outgoing]
        each = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in parts) * dtype.itemsize
        if memory.capacity < each * max(rows):
            if self.agreement is not None:
                self.agreement.wait()  # all ranks make new memory, or none
            memory.reserve(each * max(rows))
        regions = [
            memory.of(r, memory.turn % REGIONS, stacked(parts, n), dtype)
            for r, n in enumerate(rows)
        ]
        copies = []
        for t in sorted(targets(to), key=lambda t: (t.rank - memory.me) % memory.ranks):
            x = regions[t.rank][t.part][:, :, t.first : t.first + t.y.shape[2]]
            if x.numel():
                copies.append(Copy.of(x, t.to, t.y, t.y.data_ptr() - to[t.to].data_ptr()))
        spans = [(first, first, size) for first, size in _joined(laid)]
        return _Exchange(memory.own, Copies(spans), unstacked(regions[memory.me], parts), copies)


class _Target(NamedTuple):
    """Where rows go: from a rank's row `first` on, of its memory's tensor number `part`, into `y`,
    a view of a call's tensor number `to`."""

    rank: int
    first: int
    part: int
    to: int
    y: Tensor


_Targets = Callable[[list[Tensor]], Iterable[_Target]]


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same rows (first, size) in as few spans as may be."""
    found: list[tuple[int, int]] = []
    for first, size in sorted(spans):
        if found and first <= sum(found[-1]):
            before = found[-1][0]
            found[-1] = before, max(sum(found[-1]), first + size) - before
        else:
            found.append((first, size))
    return found


# -- which one -------------------------------------------------------------------------------------

_made: LRUCache[Transport | str] = LRUCache(64)


def transport_of(
    name: str, group: Any, device: torch.device, agreement: Agreement | None
) -> Transport:
    """The transport of that name; for "auto" pulls where all cards of the group are of one host and
    reach each other. All ranks find the same. While a CUDA graph is captured, collectives: the
    turns of pulls are counted on the host.

    - `agreement`: of the call; None where ranks have agreed.

    **Raises:** `ArgumentError` for "pull" where that is impossible.
    """
    if name == "collective" or device.type != "cuda":
        found: Transport | str = Collective()
        if name == "pull":
            found = f"tensors are on {device.type}"
    elif torch.cuda.is_current_stream_capturing():
        found = "a CUDA graph is being captured" if name == "pull" else Collective()
    else:
        key = group, device
        known = _made.get(key)
        if known is None and agreement is not None:
            agreement.wait()  # what is possible ranks find out together
        found = _made.put(key, _pull_of(group, device)) if known is None else known
        if name == "auto" and isinstance(found, str):
            found = Collective()
    if isinstance(found, str):
        raise ArgumentError(
            f'transport="pull" is not possible here: {found}; use "collective", or "auto"'
        )
    return found if agreement is None else found.ahead_of(agreement)


def abandon(agreement: Agreement, anew: bool) -> None:
    """Let go of a call that some ranks of a group have begun and others have not, whatever
    transport each of them had in mind, and among whichever ranks of the group.

    - `anew`: all ranks call this, and will make other calls.
    """
    ranks = set(dist.get_process_group_ranks(agreement.group))
    mine = [
        made.memory
        for made in _made.values()
        if isinstance(made, Pull) and made.memory.members <= ranks
    ]
    for memory in mine:
        memory.let_go()
    if anew:
        dist.barrier(agreement.group)  # nobody writes flags any more
        for memory in mine:
            memory.restart()
        dist.barrier(agreement.group)


def told(name: str, group: Any, device: torch.device) -> str:
    """How rows travel, for people to read; nothing is found out for it.

    - `group`: None where there is none yet.
    """
    if device.type != "cuda":
        return f"collectives, tensors are on {device.type}"
    if name == "collective":
        return "collectives, as named"
    known = None if group is None else _made.get((group, device))
    if isinstance(known, str):
        return f"collectives: {known}"
    if known is not None:
        return "pulled by copy engines"
    return "pulled by copy engines, if the group's cards are of one host and reach each other"


def reserved() -> int:
    """Bytes of symmetric memory of this process, which PyTorch's allocator does not count."""
    made = [x.memory for x in _made.values() if isinstance(x, Pull)]
    return sum(memory.own.numel() for memory in made)


def _pull_of(group: Any, device: torch.device) -> Transport | str:
    """Pulls, or why there are none; all ranks ask at once, and answer alike."""
    why = _why_not(group, device)
    if why:
        return why
    try:
        memory = Memory(group, device)
        together(lambda: _try_out(memory), group, device)
    except RuntimeError as error:  # on all ranks
        return f"symmetric memory does not work on every rank ({str(error).partition(chr(10))[0]})"
    return Pull(memory)


def _try_out(memory: Memory) -> None:
    """Read a number of every rank. RuntimeError where it is another one."""
    shape, region = (1, 2, 8, 16), memory.turn % REGIONS
    of = lambda rank: memory.of(rank, region, [shape], torch.float32)[0]
    memory.begin()
    of(memory.me).fill_(memory.me)
    found = torch.full(
        (memory.ranks, *shape), -1.0, dtype=torch.float32, device=memory.device
    )  # fmt: skip
    at = lambda r: found[r].data_ptr() - found.data_ptr()
    memory.exchange([Copy.of(of(r), 0, found[r], at(r)) for r in range(memory.ranks)], [found])
    memory.mark()()
    read = [y.unique().tolist() for y in found]
    if read != [[float(r)] for r in range(memory.ranks)]:
        raise RuntimeError(f"what was read of the ranks is {read}")


def _why_not(group: Any, device: torch.device) -> str:
    """Of one host, and every card reaches every other; each is of one rank."""
    import hashlib
    import socket

    try:
        from torch.distributed import _symmetric_memory as symmetric

        fine = hasattr(symmetric, "rendezvous") and hasattr(driver(), "cuStreamWaitValue32_v2")
    except (ImportError, OSError):
        fine = False
    index = torch.cuda.current_device() if device.index is None else device.index
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest()
    card = hashlib.blake2b(
        str(torch.cuda.get_device_properties(index).uuid).encode(), digest_size=7
    ).digest()
    number = lambda x: int.from_bytes(x, "little")
    seen = torch.cuda.device_count()
    reaches = all(torch.cuda.can_device_access_peer(index, n) for n in range(seen) if n != index)
    mine = torch.tensor(
        [int(fine and reaches), number(host), number(card)], dtype=torch.int64, device=device
    )
    every = mine.new_empty(3 * dist.get_world_size(group))
    all_gather(every, mine, group=group)
    found = every.view(-1, 3).tolist()
    if len({row[1] for row in found}) > 1:
        return "the ranks are on several hosts"
    if len({row[2] for row in found}) < len(found):
        return "ranks share a card"
    if not all(row[0] for row in found):
        return "cards do not reach each other, or PyTorch has no symmetric memory"
    return ""
