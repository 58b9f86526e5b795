"""The threads of a CTA: which of them run together, and whose turn it is."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from . import conversions, copies, matrix, memory, numbers, tensor_memory, warps
from .source import ENDS, TURNS, Kernel, Statement
from .values import Fault, Lanes, Registers, Step

SEED = 0
PATIENCE = 1000  # turns of each group in a row in which nobody comes to a barrier's end


_MAKERS: dict[str, Callable[[Lanes], Step]] = {}
for kinds in (numbers, conversions, warps, memory, matrix, copies, tensor_memory):
    _MAKERS |= kinds.MAKERS


class Group:
    """Threads that are at the same instruction: whole warps, side by side."""

    def __init__(self, lanes: slice, block: int = 0) -> None:
        self.lanes, self.block = lanes, block
        self.stays = False  # what it looked for is not there yet


class Code(NamedTuple):
    """A block for some threads."""

    steps: list[tuple[Callable[[], object], Statement]]
    leaves: Callable[[Group], None]


class Machine:
    """A CTA of one kernel: one after the other, they have the same threads and memory."""

    def __init__(self, kernel: Kernel, shared: int) -> None:
        self.kernel, self.registers = kernel, Registers(kernel)
        together = all(_everybody(x, kernel.threads) for block in kernel.blocks for x in block)
        self.random = np.random.default_rng(SEED)
        self.memories = memory.Memories(memory.Shared(shared, together), self.random)
        self.code: dict[tuple[int, int, int], Code] = {}
        self.queues = [copies.Queue() for _ in range(kernel.threads // 32)]
        # Blocks that look at what others may change.
        self.looks = [any(x.opcode.startswith(TURNS) for x in block) for block in kernel.blocks]

    def run(self, grid: tuple[int, int, int]) -> None:
        """All CTAs, in the order of their numbers."""
        for axis, count in zip("xyz", grid, strict=True):
            self.registers.cta[f"%nctaid.{axis}"][0] = count
        with np.errstate(all="ignore"):
            for z in range(grid[2]):
                for y in range(grid[1]):
                    for x in range(grid[0]):
                        self.cta(x, y, z)

    def cta(self, *at: int) -> None:
        for axis, number in zip("xyz", at, strict=True):
            self.registers.cta[f"%ctaid.{axis}"][0] = number
        self.registers.garbage(self.random)
        self.memories.shared.begin()
        self.memories.barriers.clear()
        self.memories.tensor_memory = tensor_memory.TensorMemory()
        self.waiting: dict[int, list[Group]] = {}
        self.groups = [Group(slice(0, self.kernel.threads))]
        idle = 0
        while self.groups:
            group = self.groups.pop(int(self.random.integers(len(self.groups))))
            idle = 0 if self.turn(group) else idle + 1
            if idle > PATIENCE * len(self.groups):
                raise Fault(self.stuck())
        if any(group.block >= 0 for there in self.waiting.values() for group in there):
            raise Fault(self.stuck())
        try:
            for queue in self.queues:
                queue.end()
        except Fault as fault:
            raise Fault(f"{fault}: at the end of {self.kernel.name}") from None

    def turn(self, group: Group) -> bool:
        """Blocks, until the threads part, wait, or look for what others do; whether they got on."""
        while True:
            looks, group.stays = self.looks[group.block], False
            self.block(group)
            if group.block < 0:
                return True
            if looks:
                self.groups.append(group)
                return not group.stays

    def block(self, group: Group) -> None:
        code = self.of(group)
        for step, statement in code.steps:
            try:
                step()
            except Fault as fault:
                raise Fault(f"{fault}: {statement}, {self.kernel.name}") from None
        code.leaves(group)

    def stuck(self) -> str:
        """Who waits for what."""
        said = ["nobody gets any further"]
        there = [group for groups in self.waiting.values() for group in groups]
        for group in (*self.groups, *(group for group in there if group.block >= 0)):
            first = next(x for block in self.kernel.blocks[group.block - 1 :] for x in block[-1:])
            said.append(
                f"threads from {group.lanes.start} on, {group.lanes.stop - group.lanes.start} of them: {first}"
            )
        return "\n  ".join(said)

    # -- what blocks are made of ----------------------------------------------

    def of(self, group: Group) -> Code:
        key = group.block, group.lanes.start, group.lanes.stop
        if key not in self.code:
            self.code[key] = self.compiled(group.block, group.lanes)
        return self.code[key]

    def compiled(self, number: int, lanes: slice) -> Code:
        block = self.kernel.blocks[number]
        leaves = self.leaving(block[-1], number, lanes) if block else None
        inside = block if leaves is None else block[:-1]
        steps = [(self.step(lanes, x), x) for x in inside]
        return Code(steps, leaves or partial(_go, number + 1))

    def lanes(self, lanes: slice, statement: Statement) -> Lanes:
        queues = self.queues[lanes.start // 32 : lanes.stop // 32]
        return Lanes(self.registers, lanes, statement, self.memories, queues)

    def step(self, lanes: slice, statement: Statement) -> Step:
        make = _MAKERS.get(statement.words[0])
        try:
            if make is None:
                raise Fault("not known here")
            return make(self.lanes(lanes, statement))
        except Fault as fault:
            raise Fault(f"{fault}: {statement}, {self.kernel.name}") from None

    def leaving(self, statement: Statement, number: int, lanes: slice):
        """What the last instruction of a block does with those who come to it."""
        head, operands = statement.words[0], statement.operands
        if head in ("ret", "exit"):
            return _end
        if head == "trap":
            raise Fault(f"a trap: {statement}, {self.kernel.name}")
        if head == "bra":
            target = self.kernel.labels[operands[0]]
            if statement.guard is None:
                return partial(_go, target)
            condition = self.lanes(lanes, statement).active
            return partial(self.part, lambda: np.where(condition(), target, number + 1), target)
        if head == "brx":
            index = self.lanes(lanes, statement).get(operands[0], "u32")
            table = np.array([self.kernel.labels[x] for x in self.kernel.tables[operands[1]]])
            return partial(self.part, lambda: table[index], 0)
        if statement.words[:2] == ("mbarrier", "try_wait"):
            return partial(_look, copies.waits(self.lanes(lanes, statement)), number + 1)
        if head in ("bar", "barrier"):
            if statement.words[1] == "warp":
                return partial(_go, number + 1)
            return partial(self.arrive, statement, self.which(lanes, statement), number + 1)
        return None

    def which(self, lanes: slice, statement: Statement) -> Callable[[], int]:
        """The number of a barrier: in a register, or not."""
        numbers = self.lanes(lanes, statement).get(statement.operands[0], "u32")

        def read() -> int:
            found = np.unique(numbers)
            if len(found) != 1:
                raise Fault(f"threads that come together to several barriers: {statement}")
            return int(found[0])

        return read

    def part(self, targets: Callable[[], np.ndarray], target: int, group: Group) -> None:
        """Each goes where it is to go; warps that go the same way stay together.

        Where some leave out what others do, and nobody waits there for anybody, they go on
        together behind it, from the block `target`.
        """
        to = targets().reshape(-1, 32)
        if (to != to[:, :1]).any():
            raise Fault("threads of a warp part: not known here")
        to = to[:, 0]
        begins = [0, *(int(n) + 1 for n in np.flatnonzero(to[1:] != to[:-1])), len(to)]
        if len(begins) == 2:
            group.block = int(to[0])
            return
        first = group.lanes.start
        parts = [
            Group(slice(first + 32 * a, first + 32 * b), int(to[a])) for a, b in pairwise(begins)
        ]
        if self.left_out(group.block + 1, target):
            for part in parts:
                while part.block != target:
                    self.block(part)
            group.block = target
        else:
            self.groups += parts
            group.block = -1

    def left_out(self, begin: int, end: int) -> bool:
        """Whether these blocks are entered at the first alone, and left to what is behind them."""
        for number in range(begin, end):
            last = self.kernel.blocks[number][-1]
            to = self.kernel.labels[last.operands[0]] if last.words[0] == "bra" else number + 1
            if last.words[0] in (*ENDS[1:], "mbarrier") or not begin <= to <= end:
                return False
        return end > begin

    def arrive(
        self, statement: Statement, which: Callable[[], int], after: int, group: Group
    ) -> None:
        """Wait until so many threads have come, or be one of those who come; who goes on from one
        place goes on together."""
        _, *count = statement.operands
        threads = int(count[0]) if count else self.kernel.threads
        there = self.waiting.setdefault(which(), [])
        stays = statement.words[1] != "arrive"
        there.append(Group(group.lanes, after if stays else -1))
        group.block = -1 if stays else after
        come = sum(x.lanes.stop - x.lanes.start for x in there)
        if come > threads:
            raise Fault(f"{come} threads at a barrier for {threads}: {statement}")
        if come == threads:
            self.memories.shared.barrier()
            self.groups += _joined(sorted((x for x in there if x.block >= 0), key=_first))
            there.clear()


def _first(group: Group) -> int:
    return group.lanes.start


def _joined(groups: list[Group]) -> list[Group]:
    """Neighbours at the same place, as one."""
    found: list[Group] = []
    for group in groups:
        last = found[-1] if found else None
        if last and last.block == group.block and last.lanes.stop == group.lanes.start:
            last.lanes = slice(last.lanes.start, group.lanes.stop)
        else:
            found.append(group)
    return found


def _go(target: int, group: Group) -> None:
    group.block = target


def _look(come: Callable[[], bool], after: int, group: Group) -> None:
    group.block, group.stays = after, not come()


def _end(group: Group) -> None:
    group.block = -1


def _everybody(statement: Statement, threads: int) -> bool:
    """Whether nobody waits for some of the others alone."""
    if statement.words[0] == "mbarrier":
        return False
    if statement.words[0] in ("bar", "barrier") and statement.words[1] != "warp":
        return len(statement.operands) == 1 or int(statement.operands[1]) == threads
    return True
