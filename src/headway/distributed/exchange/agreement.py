"""Ranks compare what they are about to do, before they exchange anything.

A call of which one rank has another mask, length, dtype or seed would give wrong numbers, or wait
forever; so would the backwards of two calls in another order. So before its first exchange every
call, and every backward, gathers a few numbers from all ranks, one for each field; where they
differ, every rank raises, and says which rank differs in what.
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
from .board import Board, board_of

# What ranks do, and what they compare of it.
ATTENTION, SHARD, UNSHARD, SHIFT = "attention", "layout.shard", "layout.unshard", "layout.shift"
_CALL = (
    "the layout", "the layout of its keys", "the sizes (b, heads, widths)", "dtype or device",
    "the score", "the mask", "scale, dropout, sink or what is asked for",
    "numbers that score and mask capture", "tensors that score and mask capture", "the seed",
    "the plan", "whether it trains",
)  # fmt: skip
_MOVE = (
    "the layout", "the sizes beside the sequence", "dtype or device", "dim", "by or fill",
    "whether it trains",
)  # fmt: skip
_FIELDS = {ATTENTION: _CALL, SHARD: _MOVE, UNSHARD: _MOVE, SHIFT: _MOVE}
# A call, its backward, or the call once more while a backward runs, as checkpointing computes it.
_TOLD = ("{}", "the backward of {}, call {} over these ranks", "{}, again for a backward behind "
         "call {} over these ranks")  # fmt: skip
_CALLED, _BACKWARD, _AGAIN = range(3)
_DONE = [(name, how) for name in _FIELDS for how in range(len(_TOLD))]
_BEFORE = 3  # numbers before the fields: whether the call fits, what is done, of which call
_NUMBERS = _BEFORE + max(map(len, _FIELDS.values()))  # that every rank sends, whatever it does

# Fields on which a plan depends.
PLANNED = [n for n, name in enumerate(_CALL) if name not in ("the seed", "whether it trains")]
_DRAWN = 1 << 62  # a seed that the first rank draws


def fields_of(
    spec: Spec,
    call: Call,
    digests: tuple[int, int],
    plan: tuple,
    trains: bool,
    own_tiles: bool,
    fixed: tuple[bool, ...],
) -> list[int | Tensor]:
    """A number for every field of a call. A mask whose tiles are the caller's own is these tiles
    too.

    - `fixed`: which captured tensors do not learn.
    """
    (b, hq, _, d), hk, dv = call.q.shape, call.k.shape[1], call.v.shape[3]
    sizes = b, hq, hk, d, dv
    sizes, dtype, score, mask, asked, plan_ = _of_kind(
        spec, sizes, call.q.dtype, call.q.device, plan
    )
    seed = (_DRAWN if spec.dropout else 0) if call.seed is None else call.seed
    if own_tiles and call.tiles is not None:
        mask = hash_of([mask, *[_content(t) for t in call.tiles.flatten()]])
    tensors, ints, floats = call.captured
    return [
        *digests, sizes, dtype, score, mask, asked,
        hash_of((ints, floats)) if ints or floats else 0,
        _of_tensors(tensors, fixed) if tensors else 0, seed, plan_, int(trains),
    ]  # fmt: skip


@lru_cache(256)
def _of_kind(
    spec: Spec, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, plan: tuple
) -> tuple[int, ...]:
    """Those fields that are the same for all calls of a kind: sizes, dtype and device, score, mask,
    what is asked for, and the plan."""
    asked = [
        spec.scale, spec.dropout, spec.sink, spec.max_logit, spec.row_max, spec.partial,
        spec.deterministic, spec.tiles,
    ]  # fmt: skip
    of = sizes, (str(dtype), device.type), spec.score, spec.mask, asked, plan
    return tuple(map(hash_of, of))


def fields_of_move(
    digest: int, x: Tensor, dim: int, options: tuple[float, ...], trains: bool
) -> list[int]:
    """A number for every field of a layout's call on a tensor, along `dim` (0 or more)."""
    of = _of_tensor((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype, x.device.type, options)
    return [digest, *of[:2], dim, of[2], int(trains)]


@lru_cache(256)
def _of_tensor(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str, options: tuple[float, ...]
) -> tuple[int, ...]:
    return hash_of(sizes), hash_of((str(dtype), device)), hash_of(options)


class Agreement:
    """The comparison of what this rank is about to do with what all ranks are, which begins here:
    every time, since a rank cannot know that another one does something that is new. On the CPU, so
    that no device is waited for: where ranks are of one host they see whether they are alike on a
    board, and else, or to say what differs, they send each other their numbers.

    - `does`: one of the names above.
    - `fields`: of the call; None where this rank refuses it.
    - `group`: that compares.
    - `of`: in a backward, the `number` of the call that it is of; else 0.
    - `number`: which comparison of the group it is, the same on all ranks.
    """

    def __init__(
        self, does: str, fields: Sequence[int | Tensor] | None, group: Any, device: torch.device,
        of: int = 0,
    ) -> None:  # fmt: skip
        self.group, self.device, self.board, numbers = _comparing(group, device)
        self.number, behind = numbers.following()
        how = _BACKWARD if of else _CALLED if behind is None else _AGAIN
        start = int(fields is not None), _DONE.index((does, how)), of or behind or 0
        self.numbers = [*start, *map(int, fields or ())]
        self.waiting = True
        self.failure: Exception | None = None
        if self.board is None:
            self._send()
        else:
            self.board.say(hash(tuple(self.numbers)))  # of numbers: the same in every process

    def wait(self) -> None:
        """Until all ranks have said theirs.

        **Raises:** `ArgumentError`, on every rank, naming the ranks and the fields that differ.
        """
        if self.waiting:
            self.waiting = False
            try:
                self._compared()
            except Exception as error:  # noqa: BLE001 raised below, whenever it is asked for
                self.failure = error
        if self.failure is not None:
            raise self.failure

    def _compared(self) -> None:
        if self.board is not None:
            if self.board.alike() and self.numbers[0]:
                return
            self._send()  # all ranks have found that
        self.work.wait()
        _compare(self.gathered.tolist())

    def _send(self) -> None:
        padded = self.numbers + [0] * (_NUMBERS - len(self.numbers))
        mine = torch.tensor(padded, dtype=torch.int64, device=self.device)
        self.gathered = mine.new_empty((self.group.size(), len(mine)))
        # The group's own method: `dist.all_gather` takes the host three times as long.
        self.work = self.group.allgather([list(self.gathered.unbind())], [mine])
        self.sent = mine  # until it has been


def _compare(found: list[list[int]]) -> None:
    """Raise where ranks differ."""
    if found[0][0] and all(of == found[0] for of in found):
        return
    unfit = [r for r, of in enumerate(found) if not of[0]]
    if unfit:
        raise ArgumentError(
            f"{_ranks(unfit)}: the local length does not fit the layout, or the call was refused "
            "there; see the error on that rank. Cut every tensor with layout.shard()"
        )
    done = [_DONE[of[1]] for of in found]
    if any(x != done[0] for x in done) or any(of[2] != found[0][2] for of in found):
        told = [_TOLD[how].format(name, of[2]) for (name, how), of in zip(done, found, strict=True)]
        each = "; ".join(f"rank {r}: {what}" for r, what in enumerate(told))
        raise ArgumentError(
            f"ranks do not make the same call: {each}. All ranks of a layout make the same calls "
            "in the same order, and call backward in the same order"
        )
    for n, name in enumerate(_FIELDS[done[0][0]], _BEFORE):
        column = [of[n] for of in found]
        usual = max(column, key=column.count)
        others = [r for r, x in enumerate(column) if x != usual]
        if others:
            differ = f"{_ranks(others)} differ{'s' * (len(others) == 1)} from the others"
            if len(found) == 2:  # neither is the usual one
                differ = "ranks 0 and 1 differ"
            raise ArgumentError(
                f"ranks do not make the same call: {differ} in {name}; all ranks of a layout pass "
                "the same mask, score and options, with tensors that are the same everywhere"
            )


class _Numbers:
    """Numbers of a group's comparisons.

    A checkpoint computes its calls again while a backward runs, and these have new numbers, so that
    the backwards of two checkpoints would look alike. What tells them apart is the autograd node
    that is running: of all nodes autograd knows the order in which they were made.
    """

    most = 1024  # as far back a call is known

    def __init__(self) -> None:
        self.count = 0
        # Of calls outside of backwards: their place in autograd's order, and their number.
        self.made: list[tuple[int, int]] = []

    def following(self) -> tuple[int, int | None]:
        """Return the next number, and, where a backward runs, the number of the last call that was
        made before the node that is running; 0 where that is not known."""
        self.count += 1
        if torch._C._current_graph_task_id() < 0:
            self.made.append((torch.autograd._get_sequence_nr(), self.count))
            if len(self.made) > 2 * self.most:
                del self.made[: self.most]
            return self.count, None
        node = torch._C._current_autograd_node()
        before = 0 if node is None else bisect_right(self.made, (node._sequence_nr(), self.count))
        number = self.made[before - 1][1] if before else 0
        return self.count, number if number > self.count - self.most else 0


class _Comparing(NamedTuple):
    """How the ranks of a group compare: the group whose collectives do, where its tensors are, the
    board of a host, and the numbers of comparisons."""

    group: Any
    device: torch.device
    board: Board | None
    numbers: _Numbers


# By the group itself: one that is made anew has a companion of its own.
_companions: LRUCache[_Comparing] = LRUCache(64)
_CPU = torch.device("cpu")


def _comparing(group: Any, device: torch.device) -> _Comparing:
    """By the group itself where it has collectives on the CPU ("cpu:gloo,cuda:nccl"), else by one
    of the same ranks, which is made once. Without gloo, by the group on its device, for which the
    host then waits at every call."""
    found = _companions.get(group)
    if found is not None:
        return found
    made, on_cpu = group, _has_cpu(group)
    if not on_cpu and not dist.is_gloo_available():
        return _companions.put(group, _Comparing(group, device, None, _Numbers()))
    options = getattr(group._get_backend(_CPU if on_cpu else device), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.constants.default_pg_timeout
    if not on_cpu:
        made = dist.new_group(
            dist.get_process_group_ranks(group), timeout, "gloo", use_local_synchronization=True
        )
    board = board_of(made, timeout.total_seconds())
    return _companions.put(group, _Comparing(made, _CPU, board, _Numbers()))


def _has_cpu(group: Any) -> bool:
    return _CPU in getattr(group, "_device_types", ())


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def hash_of(value: Any) -> int:
    """A number, 63 bits, the same in every process."""
    found = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1


def _of_tensors(tensors: Sequence[Tensor], fixed: tuple[bool, ...]) -> int:
    """Shapes and dtypes, and what is in those that do not learn: others change with every step, and
    to read them would be to wait for the device."""
    parts: list[Any] = [(tuple(t.shape), str(t.dtype)) for t in tensors]
    parts += [_content(t) for t, here in zip(tensors, fixed, strict=True) if here]
    return hash_of(parts)


# A tensor is read once. (In a capture nothing can be read: what the host knew before is the plan.)
_contents: TensorCache[int] = TensorCache(256, in_captures=True)


def _content(t: Tensor) -> int:
    return read_once(t, None, _checksum)


def read_once(t: Tensor, key: Any, read: Callable[[Tensor], int]) -> int:
    """What is read of a tensor, for readers of that key, while nobody writes into it."""
    return _contents.of([t], key, lambda: read(t))


def _checksum(t: Tensor) -> int:
    flat = t.detach().contiguous().flatten()
    flat = flat.as_strided(flat.shape, (1,))  # of one element it may have any other
    if t.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    if t.device.type == "cpu":
        return zlib.crc32(flat.view(torch.uint8).numpy().data)
    whole = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])
    weight = torch.arange(len(whole), device=t.device) * 0x9E3779B97F4A7C1 + 1
    return int((whole.to(torch.int64) * weight).sum()) & (2**63 - 1)
