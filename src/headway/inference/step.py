"""The host's half of a step: what was reserved, and which layers still have to append it.

`reserve` any number of times, then `append` once in every layer, then `reserve` again. What does
not fit is refused here, before anything is written, and nothing is read from the device.
"""

from typing import Any

import torch
from torch import Tensor

from ..arguments import shown
from ..errors import ArgumentError


class Turn:
    """A flag of one layer: `due` from `reserve` until it has appended. It is an object so that one
    compiled block can serve every layer."""

    def __init__(self) -> None:
        self.due = False


class Reservation:
    """`tokens` are those reserved since the last step, by row. `sizes` is an empty tensor, the most
    of a row by all of them: a compiler takes sizes as variable, where it would compile anew for
    every number.

    Replays of a CUDA graph run no Python. Once an append is in one, `replayed`, what was reserved
    earlier counts as written at the next `reserve`, and only the newest is checked. What is written
    does not depend on it: the device counts by itself (`written` of a cache).
    """

    def __init__(self, layers: int, rows: int) -> None:
        self.tokens = [0] * rows
        self.turns = [Turn() for _ in range(layers)]
        self.replayed = False
        self.sizes = _empty(0, 0)

    @property
    def most(self) -> int:
        """Tokens of the row that reserved the most."""
        return self.sizes.shape[0]

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return self.sizes.shape[1]

    def check_reserve(self) -> None:
        """Refuse while some layers have appended and others have not."""
        due_layers = [turn.due for turn in self.turns]
        if self.total and not self.replayed and any(due_layers) and not all(due_layers):
            raise ArgumentError(
                f"reserve: layer {due_layers.index(True)} has not appended the tokens that were "
                f"reserved before ({self._all()}), but others have; append once in every layer, or "
                "truncate the rows to what they had"
            )

    def reserve(self, counts: dict[int, int]) -> None:
        """Count tokens by row, beside those that no layer has appended yet."""
        if self.replayed or not all(turn.due for turn in self.turns):
            self.tokens = [0] * len(self.tokens)
        for row, count in counts.items():
            self.tokens[row] += count
        self._recount()
        for turn in self.turns:
            turn.due = True

    def check_append(self, n: int, turn: Turn, tokens: int, cu_q: Tensor | None) -> None:
        """Layer n, whose turn this is, gets as many tokens as were reserved, and once."""
        if not turn.due:
            raise ArgumentError(
                f"append: nothing was reserved for layer {n} since it last appended; call "
                "reserve(rows, tokens) first, then append once in every layer"
            )
        if cu_q is not None:
            if tokens < self.total:
                raise ArgumentError(
                    f"append: {self.total} tokens were reserved ({self._all()}), got {tokens}"
                )
            if type(cu_q) is Tensor and cu_q.is_cpu and not torch.compiler.is_compiling():
                self._check_ends(cu_q.tolist(), tokens)
        elif tokens < self.most:
            row = self.tokens.index(self.most)
            raise ArgumentError(
                f"append: {self.most} tokens were reserved for row {row}, got {tokens}; give all "
                "that were reserved since the last step in one call"
            )

    def _check_ends(self, ends: list[int], tokens: int) -> None:
        """Check, where the host can read them, that packed rows have the reserved tokens."""
        if ends[0] != 0 or ends[-1] > tokens:
            raise ArgumentError(f"cu_q must rise from 0 to at most {tokens} tokens, got {ends}")
        for row, reserved in enumerate(self.tokens):
            if ends[row + 1] - ends[row] < reserved:
                raise ArgumentError(
                    f"append: {reserved} tokens were reserved for row {row}, but cu_q gives it "
                    f"{ends[row + 1] - ends[row]}"
                )

    def check_read(self, n: int, turn: Turn) -> None:
        """Layer n has appended what `lengths` counts."""
        if turn.due and self.total and not self.replayed:
            raise ArgumentError(
                f"cache[{n}].options: layer {n} has not appended the tokens that were reserved "
                f"({self._all()}), and attention would read what lies there; append first"
            )

    def waiting(self, row: int) -> int:
        """Tokens of a row that some layer has not appended."""
        return self.tokens[row] if any(turn.due for turn in self.turns) else 0

    def check_fork(self, row: int) -> None:
        """A row is whole before another shares its pages."""
        if self.waiting(row) and not self.replayed:
            raise ArgumentError(
                f"fork: {self.waiting(row)} tokens are reserved for row {row} that not every layer "
                "has appended; append first"
            )

    def shorten(self, row: int, by: int) -> None:
        """A row loses its last `by` keys, those that were reserved first of all."""
        remaining = max(0, self.waiting(row) - by)
        if by and remaining and not self.replayed and not all(turn.due for turn in self.turns):
            raise ArgumentError(
                f"truncate: {self.waiting(row)} tokens are reserved for row {row} that some layers "
                "have appended and others have not; append in every layer first, or truncate all "
                "of them"
            )
        self.tokens[row] = remaining
        self._recount()

    def forget(self, rows: list[int]) -> None:
        """Nothing is reserved for these rows."""
        for row in rows:
            self.tokens[row] = 0
        self._recount()

    def _recount(self) -> None:
        most, total = max(self.tokens, default=0), sum(self.tokens)
        if (most, total) != (self.most, self.total):
            self.sizes = _empty(most, total)

    def _all(self) -> str:
        return ", ".join(f"row {row}: {n}" for row, n in enumerate(self.tokens) if n)


def _empty(most: int, total: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(most, total, 0, dtype=torch.uint8, device="cpu")


def may_be_replayed(x: Tensor) -> bool:
    """Return whether work on x may become part of a CUDA graph. A compiled program is traced once,
    and may be captured later."""
    return x.is_cuda and (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing())


def check_offsets(cu_q: Any, rows: int, device: torch.device) -> None:
    """Check the offsets of packed tokens: integers, one more than rows, on the cache's device."""
    if (
        not isinstance(cu_q, Tensor)
        or tuple(cu_q.shape) != (rows + 1,)
        or cu_q.dtype not in (torch.int32, torch.int64)
    ):
        raise ArgumentError(f"cu_q must be int32 (rows + 1,) = ({rows + 1},), got {shown(cu_q)}")
    if cu_q.device != device:
        raise ArgumentError(f"cu_q is on {cu_q.device}, the cache on {device}; move it with .to()")
