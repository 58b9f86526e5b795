"""The consistency check: ranks compare what they are about to do before they exchange anything.

A call of which one rank has another mask, length, dtype or seed would give wrong numbers or wait
forever; so would the backwards of two calls in another order. So every call, and every backward,
compares a few numbers, one for each field. Where they differ, every rank raises and says which rank
differs in which field. A check takes the host some microseconds through shared memory; by messages
as long as some kernels take.
"""

import hashlib
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...backends.base import Call
from ...caches import LRUCache, TensorCache
from ...errors import ArgumentError
from ...types import Spec
from .shared_memory import SharedMemoryCompare, shared_memory_compare

# Operations, and the fields of each that ranks compare.
ATTENTION, SHARD, UNSHARD, SHIFT = "attention", "layout.shard", "layout.unshard", "layout.shift"
_CALL_FIELDS = (
    "the layout", "the layout of its keys", "the sizes (b, heads, widths)", "dtype or device",
    "the score", "the mask", "scale, dropout, sink or what is asked for",
    "numbers that score and mask capture", "tensors that score and mask capture", "the seed",
    "the plan", "whether it trains",
)  # fmt: skip
_MOVE_FIELDS = (
    "the layout", "the sizes beside the sequence", "dtype or device", "dim", "by or fill",
    "whether it trains",
)  # fmt: skip
_FIELDS = {
    ATTENTION: _CALL_FIELDS, SHARD: _MOVE_FIELDS, UNSHARD: _MOVE_FIELDS, SHIFT: _MOVE_FIELDS
}  # fmt: skip
# A call, its backward, or the call repeated in a backward, as activation checkpointing does.
_DESCRIPTIONS = (
    "{}", "the backward of {}, call {} over these ranks",
    "{}, again for a backward behind call {} over these ranks",
)  # fmt: skip
_FORWARD, _BACKWARD, _RECOMPUTE = range(3)
_ACTIONS = [(name, phase) for name in _FIELDS for phase in range(len(_DESCRIPTIONS))]
_HEADER = 3  # numbers before the fields: whether the call was accepted, the action, its call
_NUMBERS = _HEADER + max(map(len, _FIELDS.values()))  # that every rank sends for any operation

# Indices of the fields that a plan depends on.
PLAN_FIELDS = [
    n for n, name in enumerate(_CALL_FIELDS) if name not in ("the seed", "whether it trains")
]
_DRAWN_SEED = 1 << 62  # stands for a seed that the first rank draws


def fields_of(
    spec: Spec,
    call: Call,
    digests: tuple[int, int],
    plan: tuple,
    trains: bool,
    own_tiles: bool,
    constants: tuple[bool, ...],
) -> list[int | Tensor]:
    """Return a number for every field of a call. Where a mask's tiles are the caller's own, they
    count as a part of the mask.

    - `digests`: of the layouts of queries and keys.
    - `constants`: for each captured tensor, whether it is not trained.
    """
    (b, hq, _, d), hk, dv = call.q.shape, call.k.shape[1], call.v.shape[3]
    sizes, dtype, score, mask, options, plan_hash = _spec_hashes(
        spec, (b, hq, hk, d, dv), call.q.dtype, call.q.device, plan
    )
    seed = (_DRAWN_SEED if spec.dropout else 0) if call.seed is None else call.seed
    if own_tiles and call.tiles is not None:
        mask = hash_of([mask, *[_content(t) for t in call.tiles.flatten()]])
    tensors, ints, floats = call.captured
    return [
        *digests, sizes, dtype, score, mask, options,
        hash_of((ints, floats)) if ints or floats else 0,
        _hash_of_tensors(tensors, constants) if tensors else 0, seed, plan_hash, int(trains),
    ]  # fmt: skip


@lru_cache(256)
def _spec_hashes(
    spec: Spec, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, plan: tuple
) -> tuple[int, ...]:
    """Return the fields that do not depend on data: sizes, dtype and device, score, mask, options,
    and the plan."""
    options = [
        spec.scale, spec.dropout, spec.sink, spec.max_logit, spec.row_max, spec.partial,
        spec.deterministic, spec.tiles,
    ]  # fmt: skip
    values = sizes, (str(dtype), device.type), spec.score, spec.mask, options, plan
    return tuple(map(hash_of, values))


def fields_of_move(
    digest: int, x: Tensor, dim: int, options: tuple[float, ...], trains: bool
) -> list[int]:
    """Return a number for every field of a layout's operation on a tensor, along `dim` (0 or
    more)."""
    other_sizes = (*x.shape[:dim], *x.shape[dim + 1 :])
    sizes, dtype, numbers = _tensor_hashes(other_sizes, x.dtype, x.device.type, options)
    return [digest, sizes, dtype, dim, numbers, int(trains)]


@lru_cache(256)
def _tensor_hashes(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str, options: tuple[float, ...]
) -> tuple[int, ...]:
    return hash_of(sizes), hash_of((str(dtype), device)), hash_of(options)


class ConsistencyCheck:
    """A comparison of what this rank is about to do with what the other ranks are. It begins when
    it is made: at every call, since a rank cannot know that another one makes a new kind of call.

    The comparison runs on the CPU, so that no device is waited for. Ranks of one host compare in
    shared memory. Ranks of several hosts, and ranks that differ, send each other their numbers.

    - `operation`: one of the names above.
    - `fields`: of the call; None where this rank refuses it.
    - `group`: the ranks that compare.
    - `forward_number`: in a backward, the `number` of its forward; else 0.
    - `number`: of this check among the group's checks, the same on all ranks.
    """

    def __init__(
        self, operation: str, fields: Sequence[int | Tensor] | None, group: Any,
        device: torch.device, forward_number: int = 0,
    ) -> None:  # fmt: skip
        channel = _channel(group, device)
        self.group, self.device = channel.group, channel.device
        self.shared_memory = channel.shared_memory
        self.number, call_before = channel.counter.next_number()
        phase = _RECOMPUTE if call_before is not None else _FORWARD
        if forward_number:
            phase = _BACKWARD
        action = _ACTIONS.index((operation, phase))
        header = int(fields is not None), action, forward_number or call_before or 0
        self.numbers = [*header, *map(int, fields or ())]
        self.pending = True
        self.failure: Exception | None = None
        if self.shared_memory is None:
            self._send()
        else:
            # The hash of a tuple of integers is the same in every process.
            self.shared_memory.write(hash(tuple(self.numbers)))

    def wait(self) -> None:
        """Wait until all ranks have reported.

        **Raises:** `ArgumentError`, on every rank, naming the ranks and the fields that differ.
        """
        if self.pending:
            self.pending = False
            try:
                self._compare()
            except Exception as error:  # noqa: BLE001 raised below, at every wait
                self.failure = error
        if self.failure is not None:
            raise self.failure

    def _compare(self) -> None:
        if self.shared_memory is not None:
            if self.shared_memory.all_equal() and self.numbers[0]:
                return
            self._send()  # all ranks come here, to find out what differs
        self.work.wait()
        _raise_differences(self.gathered.tolist())

    def _send(self) -> None:
        padded = self.numbers + [0] * (_NUMBERS - len(self.numbers))
        local = torch.tensor(padded, dtype=torch.int64, device=self.device)
        self.gathered = local.new_empty((self.group.size(), len(local)))
        # The group's own method: `dist.all_gather` takes the host three times as long.
        self.work = self.group.allgather([list(self.gathered.unbind())], [local])
        self.sent = local  # kept alive until it has been sent


def _raise_differences(per_rank: list[list[int]]) -> None:
    """Raise where the numbers of ranks differ."""
    first = per_rank[0]
    if first[0] and all(numbers == first for numbers in per_rank):
        return
    refused = [rank for rank, numbers in enumerate(per_rank) if not numbers[0]]
    if refused:
        raise ArgumentError(
            f"{_ranks(refused)}: the local length does not fit the layout, or the call was refused "
            "there; see the error on that rank. Cut every tensor with layout.shard()"
        )
    actions = [(_ACTIONS[numbers[1]], numbers[2]) for numbers in per_rank]
    if any(action != actions[0] for action in actions):
        described = [
            f"rank {rank}: {_DESCRIPTIONS[phase].format(operation, call)}"
            for rank, ((operation, phase), call) in enumerate(actions)
        ]
        raise ArgumentError(
            f"ranks do not make the same call: {'; '.join(described)}. All ranks of a layout make "
            "the same calls in the same order, and call backward in the same order"
        )
    (operation, _), _ = actions[0]
    for n, name in enumerate(_FIELDS[operation], _HEADER):
        column = [numbers[n] for numbers in per_rank]
        majority = max(column, key=column.count)
        outliers = [rank for rank, number in enumerate(column) if number != majority]
        if outliers:
            differ = f"{_ranks(outliers)} differ{'s' * (len(outliers) == 1)} from the others"
            if len(per_rank) == 2:  # neither is a majority
                differ = "ranks 0 and 1 differ"
            raise ArgumentError(
                f"ranks do not make the same call: {differ} in {name}; all ranks of a layout pass "
                "the same mask, score and options, with tensors that are the same everywhere"
            )


class _CallCounter:
    """The numbers of a group's checks.

    Checkpointing repeats calls while a backward runs. These get new numbers, so that the backwards
    of two checkpoints would look alike. They are told apart by the autograd node that is running,
    since autograd numbers all nodes in the order in which they were made.
    """

    history = 1024  # calls back that are remembered

    def __init__(self) -> None:
        self.count = 0
        # For calls outside of backwards: autograd's sequence number, and the call's number.
        self.forward_calls: list[tuple[int, int]] = []

    def next_number(self) -> tuple[int, int | None]:
        """Return the next number. Where a backward runs, return also the number of the last call
        that was made before the running node; 0 where it is not remembered."""
        self.count += 1
        if torch._C._current_graph_task_id() < 0:
            self.forward_calls.append((torch.autograd._get_sequence_nr(), self.count))
            if len(self.forward_calls) > 2 * self.history:
                del self.forward_calls[: self.history]
            return self.count, None
        node = torch._C._current_autograd_node()
        calls_before = 0
        if node is not None:
            calls_before = bisect_right(self.forward_calls, (node._sequence_nr(), self.count))
        number = self.forward_calls[calls_before - 1][1] if calls_before else 0
        return self.count, number if number > self.count - self.history else 0


class _CheckChannel(NamedTuple):
    """The means by which the ranks of a group compare.

    - `group`: whose collectives are used, on tensors on `device`.
    - `shared_memory`: of ranks of one host; else None.
    """

    group: Any
    device: torch.device
    shared_memory: SharedMemoryCompare | None
    counter: _CallCounter


# The key is the group itself: a new group of the same name gets a channel of its own.
_channels: LRUCache[_CheckChannel] = LRUCache(64)
_CPU = torch.device("cpu")


def _channel(group: Any, device: torch.device) -> _CheckChannel:
    """Return the channel of a group: the group itself where it has collectives on the CPU
    ("cpu:gloo,cuda:nccl"), else a new gloo group of the same ranks. Without gloo it is the group on
    its device, and then the host waits for the device at every call."""
    channel = _channels.get(group)
    if channel is not None:
        return channel
    check_group, on_cpu = group, _has_cpu(group)
    if not on_cpu and not dist.is_gloo_available():
        return _channels.put(group, _CheckChannel(group, device, None, _CallCounter()))
    options = getattr(group._get_backend(_CPU if on_cpu else device), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.constants.default_pg_timeout
    if not on_cpu:
        check_group = dist.new_group(
            dist.get_process_group_ranks(group), timeout, "gloo", use_local_synchronization=True
        )
    shared_memory = shared_memory_compare(check_group, timeout.total_seconds())
    channel = _CheckChannel(check_group, _CPU, shared_memory, _CallCounter())
    return _channels.put(group, channel)


def _has_cpu(group: Any) -> bool:
    return _CPU in getattr(group, "_device_types", ())


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def hash_of(value: Any) -> int:
    """Return a hash of 63 bits that is the same in every process."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _hash_of_tensors(tensors: Sequence[Tensor], constants: tuple[bool, ...]) -> int:
    """Hash shapes and dtypes, and the contents of tensors that are not trained. The others change
    with every optimizer step, and to read them would be to wait for the device."""
    parts: list[Any] = [(tuple(t.shape), str(t.dtype)) for t in tensors]
    pairs = zip(tensors, constants, strict=True)
    parts += [_content(tensor) for tensor, constant in pairs if constant]
    return hash_of(parts)


# Checksums of tensors. (During a capture no tensor can be read: then cached ones count.)
_contents: TensorCache[int] = TensorCache(256, in_captures=True)


def _content(t: Tensor) -> int:
    return read_once(t, None, _checksum)


def read_once(t: Tensor, key: Any, read: Callable[[Tensor], int]) -> int:
    """Return `read(t)`, cached until somebody writes into the tensor.

    - `key`: of the reader.
    """
    return _contents.of([t], key, lambda: read(t))


def _checksum(t: Tensor) -> int:
    flat = t.detach().contiguous().flatten()
    flat = flat.as_strided(flat.shape, (1,))  # a tensor of one element may have any stride
    if t.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    if t.device.type == "cpu":
        return zlib.crc32(flat.view(torch.uint8).numpy().data)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]
    words = flat.view(integer)
    weights = torch.arange(len(words), device=t.device) * 0x9E3779B97F4A7C1 + 1
    return int((words.to(torch.int64) * weights).sum()) & (2**63 - 1)
