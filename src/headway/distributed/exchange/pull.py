"""The transport "pull": GPUs of one host copy rows out of each other's memory by copy engines.

A rank lays its rows out in memory that all GPUs of the group can read (symmetric memory), signals
that, and each reader copies what it needs to where its kernel reads it. The kernels of a collective
take multiprocessors from attention; copy engines take none. For two H200s and causal 16k a card
then ran no kernel for 0.7 % of a forward and 5.1 % of a backward (docs/lab/ranks.md).

    main stream   lay out n+1 | kernel n                                | wait for n+1 | kernel n+1
    copy stream               | signal, wait for all ranks | pull n+1

The host waits for nothing (`symmetric_memory.py`). The memory has several regions, used in turns:
the rows of turn t have been read when every rank has signalled turn t + 1, since each rank pulls
before it signals again.

A call runs ahead of its consistency check (`consistency.py`), which takes the host as long as some
kernels take. Where the check fails, or a rank has left, every rank releases its waiting streams
(`SymmetricMemory.release`) and raises. A rank that leaves after the check makes the others wait in
their streams, until a later collective times out.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ArgumentError
from ..groups import GroupDict
from .collective import Collective, all_gather
from .comm_plan import (
    CommPlan,
    Parts,
    PendingGather,
    PendingReduce,
    ReduceSender,
    RowCopies,
    Transport,
    empty_message,
    message_offsets,
    stacked_shapes,
    unstack,
    view_at,
)
from .symmetric_memory import REGIONS, StridedCopy, SymmetricMemory, driver, on_all_ranks


class _PreparedExchange(NamedTuple):
    """The copies of an exchange between tensors of given shapes.

    - `memory`: the symmetric memory that they were prepared for.
    - `layout_copies`: lay rows out in `send_buffers`; `pulls`: copy what others have laid out.
    """

    memory: Tensor
    layout_copies: RowCopies
    send_buffers: Parts
    pulls: list[StridedCopy]


class _PullTarget(NamedTuple):
    """Rows to pull: from `peer`'s tensor number `part`, row `first` on, into `view`, which is a
    part of the target number `target`."""

    peer: int
    first: int
    part: int
    target: int
    view: Tensor


_PullTargets = Callable[[list[Tensor]], Iterable[_PullTarget]]


class Pull(Transport):
    """A transport between GPUs of one host that can read each other's memory.

    - `check`: the consistency check of a call that does not wait for it (`Transport.ahead_of`).
    """

    overlaps_kernels = True

    def __init__(self, memory: Any, check: Any = None) -> None:
        self.memory, self.check = memory, check

    def ahead_of(self, check: Any) -> Transport:
        """See `Transport`. Copies stay inside of the memory, whatever other ranks do."""
        return Pull(self.memory, check)

    def gather(self, comm: CommPlan, parts: Parts) -> PendingGather:
        """See `Transport`."""
        buffers = comm.empty_buffers(parts)

        def targets(buffers: list[Tensor]) -> Iterator[_PullTarget]:
            for rows in comm.incoming:
                stop = rows.reader_start + rows.size
                for n, buffer in enumerate(buffers):
                    view = buffer[:, :, rows.reader_start : stop]
                    yield _PullTarget(rows.peer, rows.holder_start, n, n, view)

        exchange = self._begin(comm, False, parts, lambda: buffers, targets)
        exchange.layout_copies.run(parts, exchange.send_buffers)
        self.memory.exchange(exchange.pulls, buffers)
        rows_read = unstack(buffers, parts)
        comm.copy_local(parts, rows_read)
        return PendingGather(rows_read, self.memory.wait_function())

    def reduce_scatter(self, comm: CommPlan, parts: Parts) -> PendingReduce:
        """See `Transport`."""
        return self.reduce_sender(comm, parts).send(parts)

    def reduce_sender(self, comm: CommPlan, like: Parts) -> ReduceSender:
        """See `Transport`. Gradients that are written into the send buffers need no copy."""
        new_message = lambda: [empty_message(comm.outgoing, like)]

        def targets(messages: list[Tensor]) -> Iterator[_PullTarget]:
            for rows, offsets in message_offsets(comm.outgoing, like):
                for n, shape in enumerate(stacked_shapes(like, rows.size)):
                    view = view_at(messages[0], offsets[n], shape)
                    yield _PullTarget(rows.peer, rows.reader_start, n, 0, view)

        exchange = self._begin(comm, True, like, new_message, targets)

        def send(parts: Parts) -> PendingReduce:
            (received,) = new_message()  # only now: the kernel's workspace is free again
            buffers = exchange.send_buffers
            if any(x is not buffer for x, buffer in zip(parts, buffers, strict=True)):
                exchange.layout_copies.run(parts, buffers)
            self.memory.exchange(exchange.pulls, [received])
            wait = self.memory.wait_function()
            # A later, larger chunk may reserve new memory before these are added.
            return PendingReduce(comm, parts, wait, received, exchange.memory)

        return ReduceSender(exchange.send_buffers, send)

    def _begin(
        self, comm: CommPlan, is_reduce: bool, parts: Parts,
        new_targets: Callable[[], list[Tensor]], targets: _PullTargets,
    ) -> _PreparedExchange:  # fmt: skip
        """Return the prepared exchange of `parts`, once its region may be written.

        - `is_reduce`: rows are contributions, on their way to the holders.
        - `new_targets`: allocates tensors that rows are copied into; `targets`: where in them.
        """
        memory = self.memory
        shapes = tuple([(*x.shape[:2], x.shape[3]) for x in parts])
        key = is_reduce, memory.turn % REGIONS, shapes, parts[0].dtype
        exchange = comm.launch_cache.get(key)
        if exchange is None or exchange.memory is not memory.local:
            exchange = self._prepare(comm, is_reduce, parts, new_targets(), targets)
            key = is_reduce, memory.turn % REGIONS, *key[2:]  # new memory begins another turn
            comm.launch_cache[key] = exchange
        memory.wait_for_region()
        return exchange

    def _prepare(
        self, comm: CommPlan, is_reduce: bool, parts: Parts, buffers: list[Tensor],
        targets: _PullTargets,
    ) -> _PreparedExchange:  # fmt: skip
        """Prepare the exchange of a turn, and reserve memory for it. A rank pulls from the next
        rank first: if all began with the first rank, they would share its links' bandwidth."""
        memory, dtype = self.memory, parts[0].dtype
        if is_reduce:
            rows_per_rank = comm.tokens_read
            sent = [(rows.reader_start, rows.size) for rows in comm.incoming]
        else:
            rows_per_rank = comm.tokens_held
            sent = [(rows.holder_start, rows.size) for rows in comm.outgoing]
        row_bytes = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in parts) * dtype.itemsize
        if memory.capacity < row_bytes * max(rows_per_rank):
            if self.check is not None:
                self.check.wait()  # all ranks reserve new memory, or none
            memory.reserve(row_bytes * max(rows_per_rank))
        region = memory.turn % REGIONS
        laid_out = [
            memory.tensors(rank, region, stacked_shapes(parts, rows), dtype)
            for rank, rows in enumerate(rows_per_rank)
        ]
        pulls = []
        distance = lambda target: (target.peer - memory.rank) % memory.ranks
        for target in sorted(targets(buffers), key=distance):
            stop = target.first + target.view.shape[2]
            source = laid_out[target.peer][target.part][:, :, target.first : stop]
            if source.numel():
                offset = target.view.data_ptr() - buffers[target.target].data_ptr()
                pulls.append(StridedCopy.of(source, target.target, target.view, offset))
        spans = [(first, first, size) for first, size in _merge_spans(sent)]
        send_buffers = unstack(laid_out[memory.rank], parts)
        return _PreparedExchange(memory.local, RowCopies(spans), send_buffers, pulls)


def _merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans of rows (first, size) that overlap or touch."""
    merged: list[tuple[int, int]] = []
    for first, size in sorted(spans):
        if merged and first <= sum(merged[-1]):
            start = merged[-1][0]
            merged[-1] = start, max(sum(merged[-1]), first + size) - start
        else:
            merged.append((first, size))
    return merged


# -- the choice ------------------------------------------------------------------------------------

# A transport, or why pulls are not possible.
_transports: GroupDict[Transport | str] = GroupDict()


def transport_of(
    name: str, group: Any, device: torch.device, check: Any
) -> Transport:  # fmt: skip
    """Return the transport of that name. "auto" pulls where all GPUs of the group are of one host
    and can read each other's memory; all ranks choose the same. While a CUDA graph is captured it
    is collectives, since the host counts the turns of pulls.

    - `check`: the call's `consistency.ConsistencyCheck`; None where it has passed.

    **Raises:** `ArgumentError` for "pull" where that is impossible.
    """
    if name == "collective" or device.type != "cuda":
        transport: Transport | str = Collective()
        if name == "pull":
            transport = f"tensors are on {device.type}"
    elif torch.cuda.is_current_stream_capturing():
        transport = "a CUDA graph is being captured" if name == "pull" else Collective()
    else:
        key = group, device
        cached = _transports.get(key)
        if cached is None:
            if check is not None:
                check.wait()  # ranks find out together what is possible
            cached = _transports.put(key, _try_pull(group, device))
        transport = Collective() if name == "auto" and isinstance(cached, str) else cached
    if isinstance(transport, str):
        raise ArgumentError(
            f'transport="pull" is not possible here: {transport}; use "collective", or "auto"'
        )
    return transport if check is None else transport.ahead_of(check)


def abort_transfers(group: Any, all_present: bool) -> None:
    """Abort the transfers of a call that some ranks have begun and others have not, whatever
    transport each of them would use, and among whichever ranks of the group.

    - `group`: of a consistency check, with collectives on the CPU.
    - `all_present`: all ranks call this, and will make other calls.
    """
    ranks = set(dist.get_process_group_ranks(group))
    memories = [
        transport.memory
        for transport in _transports.values()
        if isinstance(transport, Pull) and transport.memory.members <= ranks
    ]
    for memory in memories:
        memory.release()
    if all_present and torch.cuda.is_initialized():
        dist.barrier(group)  # nobody writes flags any more
        for memory in memories:
            memory.restart()
        dist.barrier(group)


def describe_transport(name: str, group: Any, device: torch.device) -> str:
    """Describe how rows would travel, without trying anything.

    - `group`: None where there is none yet.
    """
    if device.type != "cuda":
        return f"collectives, tensors are on {device.type}"
    if name == "collective":
        return "collectives, as named"
    transport = None if group is None else _transports.get((group, device))
    if isinstance(transport, str):
        return f"collectives: {transport}"
    if transport is not None:
        return "pulled by copy engines"
    return "pulled by copy engines, if the group's cards are of one host and reach each other"


def reserved_bytes() -> int:
    """Return the bytes of this process's symmetric memory, which PyTorch's allocator does not
    count."""
    memories = [x.memory for x in _transports.values() if isinstance(x, Pull)]
    return sum(memory.local.numel() for memory in memories)


def _try_pull(group: Any, device: torch.device) -> Transport | str:
    """Return pulls, or why they are not possible. All ranks call it at once and get the same."""
    obstacle = _obstacle(group, device)
    if obstacle:
        return obstacle
    try:
        memory = SymmetricMemory(group, device)
        on_all_ranks(lambda: _self_test(memory), group, device)
    except RuntimeError as error:  # on all ranks
        return f"symmetric memory does not work on every rank ({str(error).partition(chr(10))[0]})"
    return Pull(memory)


def _self_test(memory: SymmetricMemory) -> None:
    """Pull a number from every rank; RuntimeError where it is another one."""
    shape, region = (1, 2, 8, 16), memory.turn % REGIONS
    tensor_of = lambda rank: memory.tensors(rank, region, [shape], torch.float32)[0]
    memory.wait_for_region()
    tensor_of(memory.rank).fill_(memory.rank)
    received = torch.full(
        (memory.ranks, *shape), -1.0, dtype=torch.float32, device=memory.device
    )  # fmt: skip
    pulls = []
    for rank in range(memory.ranks):
        offset = received[rank].data_ptr() - received.data_ptr()
        pulls.append(StridedCopy.of(tensor_of(rank), 0, received[rank], offset))
    memory.exchange(pulls, [received])
    memory.wait_function()()
    numbers = [x.unique().tolist() for x in received]
    if numbers != [[float(rank)] for rank in range(memory.ranks)]:
        raise RuntimeError(f"what was read of the ranks is {numbers}")


def _obstacle(group: Any, device: torch.device) -> str:
    """Return why GPUs cannot pull from each other; empty where all ranks are on one host, each on
    its own GPU, and every GPU can read every other's memory."""
    import hashlib
    import socket

    try:
        from torch.distributed import _symmetric_memory as symmetric

        supported = hasattr(symmetric, "rendezvous") and hasattr(driver(), "cuStreamWaitValue32_v2")
    except (ImportError, OSError):
        supported = False
    index = torch.cuda.current_device() if device.index is None else device.index
    number = lambda text: int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=7).digest(), "little"
    )
    host = number(socket.gethostname())
    gpu = number(str(torch.cuda.get_device_properties(index).uuid))
    peers = [n for n in range(torch.cuda.device_count()) if n != index]
    reaches = all(torch.cuda.can_device_access_peer(index, peer) for peer in peers)
    local = torch.tensor([int(supported and reaches), host, gpu], dtype=torch.int64, device=device)
    gathered = local.new_empty(3 * dist.get_world_size(group))
    all_gather(gathered, local, group=group)
    possible, hosts, gpus = zip(*gathered.view(-1, 3).tolist(), strict=True)
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if len(set(gpus)) < len(gpus):
        return "ranks share a card"
    if not all(possible):
        return "cards do not reach each other, or PyTorch has no symmetric memory"
    return ""
