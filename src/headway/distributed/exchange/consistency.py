"""The consistency check: ranks agree on what they are about to do before they exchange anything.

A call of which one rank has another mask, length, dtype or seed would give wrong numbers or wait
forever; so would the backwards of two calls in another order, and a call that one rank refuses. So
every call, and every backward, compares a few numbers, one for each field. Where they differ, every
rank raises and says which rank differs in which field. A check takes the host some microseconds
through shared memory; by messages as long as some kernels take.

A rank that raises later, in a kernel, still sends what the others wait for, filled with NaN. Then
it begins one more check, which it refuses: the others come to it at the end of the same call, or
with their next one, and raise too. A rank that is late is waited for, and standard error says for
whom.

Ranks go on after an error, unless some raised in a backward and others outside of it, or in their
next call. Those are a step ahead, and all later results would mix steps, so the ranks give the
group up, and every later call refuses.
"""

import math
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError
from ..groups import GroupDict
from .fields import (
    ACTIONS,
    BACKWARD,
    FORWARD,
    NUMBERS,
    RECOMPUTE,
    described,
    error_of_other_calls,
    failure_words,
    in_backward,
    ranks_with,
)
from .in_progress import this_thread
from .pull import abort_transfers
from .shared_memory import RankLeft, SharedMemoryCompare, rank_names, shared_memory_compare

# Seconds until a rank says for whom it waits, and from then on between two such lines. A rank that
# has failed waits for the others as long as the first before it raises.
LATE_SECONDS = [10.0, 60.0]

# What a rank's check says: that it makes the call, refuses it, or has failed in the call before.
# Flags in shared memory are the latter, or that a rank has left an exchange undone.
_ACCEPTED, _REFUSED, _FAILED, _GAVE_UP, _HASHED = range(5)
_GAVE_UP_KEY = "headway-gave-up"  # in the store of ranks that share no memory
_POLL = timedelta(milliseconds=100)
_LEAVING_SECONDS = 1.0  # between the end of a rank's connections and that of its process
_ANEW = "Nothing can be exchanged over this process group any more: make it and its layouts anew"
_GAVE_UP_WORDS = (
    " left a call in the middle of an exchange, raised where the others were in another call, or "
    f"called from two threads; see the error there. {_ANEW}"
)
_OUT_OF_STEP = (
    "in an earlier call ranks raised in different places, so some are a step ahead of others, and "
    f"results would mix their steps. {_ANEW}"
)
_FIRST_CALL = (
    ", in its first call over this process group; a rank that does not come has raised before, or "
    "calls with a layout of another group"
)
_TWO_THREADS = (
    "two threads call over one process group at once, and ranks cannot tell their calls apart; "
    "give every thread a group of its own, dist.new_group(), and a layout on it"
)


class _GroupBroken(RuntimeError):
    """A rank has left an exchange undone, so nothing can be exchanged over the group any more."""


class _NotYet(Exception):
    """A check that is waited for at most for some seconds, which have passed."""


class ConsistencyCheck:
    """One call as all ranks of a group make it: a context manager around all that may fail on one.

        with ConsistencyCheck(ATTENTION, group, device) as check:
            fields = ...            # where this raises, every rank does
            check.begin(fields)
            check.wait()            # where ranks differ, every rank raises
            ...                     # exchanges, and kernels by `in_progress.guarded`

    The comparison runs on the CPU, so that no device is waited for. Ranks of one host compare in
    shared memory. Ranks of several hosts, and ranks that differ, send each other their numbers.

    - `operation`: one of the names in `fields.py`.
    - `forward_number`: in a backward, the `number` of its forward; else 0.
    - `number`: of this check among the group's checks, the same on all ranks; 0 before it begins.
    - `error`: what this rank raised between exchanges.
    - `tells`: it says how the call ended, and is no call of its own.

    **Raises:** `ArgumentError`, on every rank, naming the ranks and the fields that differ, or the
    rank that refuses the call; `RuntimeError` where a rank raised later or has left. An error that
    this rank raised is raised here, after the others were told.
    """

    def __init__(
        self, operation: str, group: Any, device: torch.device, forward_number: int = 0
    ) -> None:
        self.channel = channel = _channel(group, device)
        self.group, self.shared_memory = channel.group, channel.shared_memory
        self.operation, self.forward_number, self.number = operation, forward_number, 0
        self.pending, self.tells, self.work = False, False, None
        self.sent: torch.Tensor | None = None
        self.disagreement: Exception | None = None
        self.error: Exception | None = None
        self.waits_since: float | None = None

    # -- the call ----------------------------------------------------------------------------------

    def __enter__(self) -> "ConsistencyCheck":
        channel = self.channel
        if not channel.lock.acquire(blocking=False):
            channel.give_up(_TWO_THREADS)
            raise mark_told(ArgumentError(_TWO_THREADS))
        if channel.unfinished is not None:
            check, channel.unfinished = channel.unfinished, None
            with suppress(Exception):
                check.wait()
            if channel.broken:
                channel.lock.release()
                raise mark_told(RuntimeError(channel.broken))
        this_thread.check = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self._end(error)
        except BaseException as raised:
            mark_told(raised)
            raise
        finally:
            this_thread.check = None
            self.channel.lock.release()

    def _end(self, error: BaseException | None) -> None:
        """Agree with the other ranks on how the call ended."""
        if error is not None:
            mark_told(error)
        if not self.number:
            self._tell(_REFUSED, error)
            return
        if self.disagreement is not None or isinstance(error, RankLeft | _GroupBroken):
            return
        if error is not None:
            with suppress(Exception):
                self.wait(_patience(error))
            if self.disagreement is None:
                self.channel.give_up("this rank" + _GAVE_UP_WORDS)
            return
        self.wait()
        if self.error is not None:
            self._tell(_FAILED, self.error)
            raise self.error
        elif failed := self._failed_ranks():
            failure = RuntimeError(failure_words(rank_names(failed), str(self)))
            self._tell(_ACCEPTED, failure)
            raise failure

    def begin(self, fields: Sequence[Any], state: int = _ACCEPTED) -> None:
        """Begin to compare this rank's fields with those of the others."""
        self.number, call_before = self.channel.counter.next_number()
        phase = RECOMPUTE if call_before is not None else FORWARD
        if self.forward_number:
            phase = BACKWARD
        action = ACTIONS.index((self.operation, phase))
        self.numbers = [state, action, self.forward_number or call_before or 0, *map(int, fields)]
        self.pending = True
        if self.shared_memory is None:
            self._send()
        else:
            # The hash of a tuple of integers is the same in every process. Numbers without its bit
            # are a state and an action.
            number = (
                hash(tuple(self.numbers)) | _HASHED if state == _ACCEPTED else action << 3 | state
            )
            self.shared_memory.write(number)

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until all ranks have reported; see **Raises** above. Where it fails, the transfers
        that have begun are aborted, by all ranks together.

        - `seconds`: to wait at most. `_NotYet` is raised then.
        """
        if self.pending:
            self.limit, self.waits_since = seconds, None
            try:
                error = self._compare()
            except (RankLeft, _GroupBroken) as raised:
                error = raised
            self.disagreement = error  # raised at every wait
            if error is not None:
                abort_transfers(self.group, not isinstance(error, RankLeft | _GroupBroken))
            self.pending = False
        if self.disagreement is not None:
            raise self.disagreement

    def fail(self, error: Exception) -> None:
        """Note an error of this rank, before the exchanges go on without results."""
        self.error = self.error or error
        if self.shared_memory is not None:
            self.shared_memory.failures[self.shared_memory.rank] = self.number << 2 | _FAILED

    def wait_for(self, work: Any) -> None:
        """Wait for a collective on the CPU; see `in_progress.wait_for`."""
        self.limit, self.waits_since = math.inf, None
        while True:
            try:
                work.wait(_POLL)
                return
            except RuntimeError:
                over = work.is_completed()
                self._raise_left(_LEAVING_SECONDS if over else 0)
                if over:
                    raise
            self._report_late(lambda: "the rows of another rank")

    # -- what ranks compare ------------------------------------------------------------------------

    def _compare(self) -> Exception | None:
        """Wait for all ranks; return the error that all of them raise."""
        if self.work is None:
            if self.sent is not None:  # an interrupt came while it was sent
                self._break("this rank" + _GAVE_UP_WORDS)
            assert self.shared_memory is not None
            equal = self.shared_memory.all_equal(self._report_late)
            if equal and self.numbers[0] == _ACCEPTED:
                return None
            numbers = self.shared_memory.numbers()
            error = self._error_of_states([(number & 7, number >> 3) for number in numbers])
            if error is not None:
                return error
            self._send()  # all ranks come here, to find out what differs
        self._wait_for_messages()
        return self._difference(self.gathered.tolist())

    def _send(self) -> None:
        padded = self.numbers + [0] * (NUMBERS - len(self.numbers))
        local = torch.tensor(padded, dtype=torch.int64, device=self.channel.device)
        self.gathered = local.new_empty((self.group.size(), len(local)))
        self.sent = local  # kept alive until it has been sent
        # The group's own method: `dist.all_gather` takes the host three times as long.
        self.work = self.group.allgather([list(self.gathered.unbind())], [local])

    def _wait_for_messages(self) -> None:
        assert self.work is not None
        if self.channel.device.type != "cpu":
            self.work.wait()
            return
        while True:
            try:
                self.work.wait(_POLL)
                return
            except RuntimeError as error:
                if self.work.is_completed():
                    self._raise_left(_LEAVING_SECONDS)
                    raise RankLeft(f"{self._lost()} {self}: {error}") from error
            self.channel.store().set(self._waiting_key(self.group.rank()), "")
            self._raise_left()
            self._report_late(self._absent)

    def _difference(self, per_rank: list[list[int]]) -> Exception | None:
        """Return the error of ranks whose numbers differ."""
        first = per_rank[0]
        if first[0] == _ACCEPTED and all(numbers == first for numbers in per_rank):
            return None
        error = self._error_of_states([(numbers[0], numbers[1]) for numbers in per_rank])
        if error is not None:
            return error
        if len({in_backward(numbers[1]) for numbers in per_rank}) > 1:
            self.channel.give_up(_OUT_OF_STEP)
        return error_of_other_calls(per_rank)

    def _error_of_states(self, per_rank: list[tuple[int, int]]) -> Exception | None:
        """Return the error where a rank does not accept its call, from all states and actions."""
        states = [state for state, _ in per_rank]
        refused = {in_backward(action) for state, action in per_rank if state == _REFUSED}
        here = in_backward(self.numbers[1])
        failed = _FAILED in states
        if (failed and not self.tells) or refused - {here}:
            self.channel.give_up(_OUT_OF_STEP)
        if failed:
            call = f"call {self.number - 1} over these ranks"
            return RuntimeError(failure_words(ranks_with(states, _FAILED), call))
        if refused:
            return ArgumentError(
                f"{ranks_with(states, _REFUSED)}: the local length does not fit the layout, or the "
                "call was refused there; see the error on that rank. Cut every tensor with "
                "layout.shard()"
            )
        return None

    # -- ranks that fail, leave, or are late -------------------------------------------------------

    def _next(self) -> "ConsistencyCheck":
        """Return another check of this call."""
        check = ConsistencyCheck.__new__(ConsistencyCheck)
        check.__dict__.update(self.__dict__, number=0, disagreement=None, error=None)
        check.work, check.sent, check.tells = None, None, True
        return check

    def _tell(self, state: int, error: BaseException | None) -> None:
        """Agree that this call has failed. This rank waits for the others for some seconds: one
        that is elsewhere learns of it with its next call over this group."""
        check = self._next()
        try:
            check.begin((), state)
            check.wait(_patience(error))
        except _NotYet:
            self.channel.unfinished = check
        except Exception:  # noqa: BLE001 this rank's own error is raised
            return

    def _failed_ranks(self) -> list[int]:
        """Return which ranks of this host have failed in this call.

        **Raises:** `RuntimeError` where a rank has given up.
        """
        if self.channel.broken:
            raise _GroupBroken(self.channel.broken)
        if self.shared_memory is None:
            return []
        flags = self.shared_memory.failures.tolist()
        if any(flag & 3 == _GAVE_UP for flag in flags):
            self._break(ranks_with([flag & 3 for flag in flags], _GAVE_UP) + _GAVE_UP_WORDS)
        return [rank for rank, flag in enumerate(flags) if flag >> 2 == self.number]

    def _break(self, why: str) -> None:
        self.channel.broken = why
        raise _GroupBroken(why)

    def _raise_left(self, seconds: float = 0) -> None:
        """Raise where a rank has left, or does in the next seconds."""
        until = time.monotonic() + seconds
        while self.shared_memory is not None:
            left = self.shared_memory.left()
            if left:
                raise RankLeft(f"{rank_names(left)} has left, and this rank is in {self}")
            if time.monotonic() >= until:
                return
            time.sleep(1e-2)

    def _report_late(self, whom: Callable[[], str]) -> None:
        """Say on standard error for whom this rank waits, from time to time."""
        now = time.monotonic()
        if self.waits_since is None:
            self.waits_since, self.next_line = now, LATE_SECONDS[0]
        waited = now - self.waits_since
        if waited >= self.limit:
            raise _NotYet
        self._failed_ranks()
        if self.shared_memory is None and self.channel.store().check([_GAVE_UP_KEY]):
            self._break(self.channel.store().get(_GAVE_UP_KEY).decode() + _GAVE_UP_WORDS)
        if waited >= self.next_line:
            self.next_line += LATE_SECONDS[1]
            _say_late(self.group.rank(), waited, f"{whom()}, in {self}")

    def _absent(self) -> str:
        """Return the words for the ranks that do not wait in this check."""
        ranks, store = range(self.group.size()), self.channel.store()
        return rank_names(r for r in ranks if not store.check([self._waiting_key(r)]))

    def _lost(self) -> str:
        """Return the words for the ranks that have not come when a connection is closed."""
        with suppress(Exception):  # the store may have been in the rank that left
            self.channel.store().set(self._waiting_key(self.group.rank()), "")
            time.sleep(_LEAVING_SECONDS)  # the others notice it now
            return f"{self._absent()} has left, or is late, and this rank is in"
        return "a rank has left, and this rank is in"

    def _waiting_key(self, rank: int) -> str:
        """Return the key in the store of a rank that waits in this check."""
        return f"headway-waits-{self.number}-{rank}"

    def __str__(self) -> str:
        return described(self.numbers[1], self.numbers[2], self.number)


def _patience(error: BaseException | None) -> float:
    """Return for how many seconds a rank with an error waits for others. An interrupt is to end
    the call at once."""
    return LATE_SECONDS[0] if isinstance(error, Exception) else 0


def mark_told(error: BaseException) -> BaseException:
    """Mark an error that the other ranks know of, and return it."""
    error.ranks_told = True  # type: ignore[attr-defined]
    return error


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


class _CheckChannel:
    """The means by which the ranks of a group compare.

    - `group`: whose collectives are used, on tensors on `device`.
    - `shared_memory`: of ranks of one host; else None.
    - `lock`: of the thread whose call runs.
    - `unfinished`: a check in which this rank did not wait for all of the others.
    - `broken`: why nothing can be exchanged any more.
    """

    def __init__(
        self, group: Any, device: torch.device, shared_memory: SharedMemoryCompare | None
    ) -> None:
        self.group, self.device, self.shared_memory = group, device, shared_memory
        self.counter, self.lock = _CallCounter(), threading.Lock()
        self.unfinished: ConsistencyCheck | None = None
        self.broken = ""

    def give_up(self, why: str) -> None:
        """Tell the other ranks that this one leaves an exchange undone, or makes no sense of it."""
        self.broken = why
        if self.shared_memory is not None:
            self.shared_memory.failures[self.shared_memory.rank] = _GAVE_UP
        else:
            self.store().set(_GAVE_UP_KEY, f"rank {self.group.rank()}")

    def store(self) -> Any:
        """Return the store of the group."""
        return dist.distributed_c10d._get_process_group_store(self.group)


# The key is the group itself: a new group of the same name gets a channel of its own.
_channels: GroupDict[_CheckChannel] = GroupDict()
# Groups whose channels are being made, and whether another thread has asked for one meanwhile.
_groups_in_creation: dict[Any, bool] = {}
_creation = threading.Lock()
# Collectives in which the ranks of a group meet for the first time; an interrupt may end the wait.
_meetings: GroupDict[Any] = GroupDict()
_CPU = torch.device("cpu")


def _channel(group: Any, device: torch.device) -> _CheckChannel:
    """Return the channel of a group, which all ranks make together at its first use."""
    channel = _channels.get(group)
    if channel is None:
        with _creation:
            crossed = group in _groups_in_creation
            _groups_in_creation[group] = crossed
        if crossed:
            raise mark_told(ArgumentError(_TWO_THREADS))
        try:
            channel = _channels.put(group, _new_channel(group, device))
        finally:
            with _creation:
                crossed = _groups_in_creation.pop(group)
        if crossed:
            channel.give_up(_TWO_THREADS)
    if channel.broken:
        raise mark_told(RuntimeError(channel.broken))
    return channel


def _new_channel(group: Any, device: torch.device) -> _CheckChannel:
    """Return a channel over the group itself where it has collectives on the CPU
    ("cpu:gloo,cuda:nccl"), else over a new gloo group of the same ranks. Without gloo it is the
    group on its device, and then the host waits for the device at every call."""
    check_group, on_cpu = group, _has_cpu(group)
    options = getattr(group._get_backend(_CPU if on_cpu else device), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.constants.default_pg_timeout
    _meet(group, timeout.total_seconds())
    if not on_cpu and not dist.is_gloo_available():
        return _CheckChannel(group, device, None)
    if not on_cpu:
        check_group = dist.new_group(
            dist.get_process_group_ranks(group), timeout, "gloo", use_local_synchronization=True
        )
    shared_memory = shared_memory_compare(check_group, timeout.total_seconds())
    return _CheckChannel(check_group, _CPU, shared_memory)


def _meet(group: Any, timeout: float) -> None:
    """Wait until every rank makes its first call over a group. Say on standard error for whom.

    **Raises:** `RankLeft` where a rank makes none in the group's time, or has left.
    """
    store = dist.distributed_c10d._get_process_group_store(group)
    keys = [f"headway-first-call-{rank}" for rank in range(group.size())]
    meeting = _meetings.get(group)
    if meeting is None and _has_cpu(group):  # gloo notices a rank that has left
        number = torch.zeros(1, dtype=torch.float32, device="cpu")
        gathered = [torch.zeros_like(number) for _ in keys]
        meeting = _meetings.put(group, group.allgather([gathered], [number]))
    store.set(keys[group.rank()], "")
    absent = lambda: rank_names(rank for rank, key in enumerate(keys) if not store.check([key]))
    start, next_line, pause = time.monotonic(), LATE_SECONDS[0], 1e-3
    for key in keys:  # one at a time: a store serves many ranks
        while not store.check([key]):
            waited = time.monotonic() - start
            if waited >= timeout:
                late = f"{absent()} made no call in {timeout:.0f} s{_FIRST_CALL}"
                raise mark_told(RankLeft(late))
            if meeting is not None and meeting.is_completed() and waited + 1 < timeout:
                try:
                    meeting.wait()
                except RuntimeError as error:
                    time.sleep(_LEAVING_SECONDS)  # the others may be on their way
                    lost = f"{absent()} has left, or is late{_FIRST_CALL}"
                    raise mark_told(RankLeft(lost)) from error
            if waited >= next_line:
                next_line += LATE_SECONDS[1]
                _say_late(group.rank(), waited, absent() + _FIRST_CALL)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
    _meetings.pop(group, None)


def _say_late(rank: int, waited: float, whom: str) -> None:
    text = f"headway: rank {rank} has waited {waited:.0f} s for {whom}"
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _has_cpu(group: Any) -> bool:
    return _CPU in getattr(group, "_device_types", ())
