"""Who sends which tokens to whom, and back.

A rank wants the keys of some stretches of the sequence. Every rank works out the same plan from the
same layout and mask, so nothing is asked: each sends what it holds of what others want, by one
uneven all-to-all, and gets what it wants in the order of the sequence. The way home is the same,
turned around; contributions are added in the order of ranks, so that sums are the same every time.

Only collectives: a chain of sends and receives waits forever where a rank has left.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class Pieces:
    """The pieces of a layout in the order of the sequence, and where each lies in its rank."""

    def __init__(self, table: Tensor, ranks: int) -> None:
        found = table.numpy()
        size = found[:, 2] - found[:, 1]
        total = size.cumsum() - size  # pieces are sorted by rank
        first = np.searchsorted(found[:, 0], found[:, 0])
        order = found[:, 1].argsort(kind="stable")
        self.ranks, self.sizes = ranks, np.bincount(found[:, 0], size, ranks).astype(np.int64)
        self.rank, self.start, self.stop = found[order].T.copy()
        self.at = (total - total[first])[order]  # in its rank's tensor
        self.length = int(self.sizes.sum())

    def of(self, rank: int) -> np.ndarray:
        """(start, stop) of the pieces of a rank, ascending, `(pieces, 2)`."""
        mine = self.rank == rank
        return np.stack([self.start[mine], self.stop[mine]], 1)

    def cut(self, wanted: np.ndarray) -> tuple[np.ndarray, ...]:
        """Stretches (start, stop), ascending, cut where the rank changes: rank, start in the rank's
        tensor, and size of each part."""
        if not len(self.start):
            return (np.zeros(0, np.int64),) * 3
        first = np.searchsorted(self.start, wanted[:, 0], side="right") - 1
        last = np.searchsorted(self.start, wanted[:, 1], side="left")
        count = np.maximum(last - first, 0)
        which = np.repeat(np.arange(len(wanted)), count)
        piece = np.arange(len(which)) - np.repeat(count.cumsum() - count, count) + first[which]
        start = np.maximum(wanted[which, 0], self.start[piece])
        stop = np.minimum(wanted[which, 1], self.stop[piece])
        return self.rank[piece], self.at[piece] + start - self.start[piece], stop - start


class Routes:
    """One exchange: what rank r wants, `wanted[r]`, stretches (start, stop) in ascending order.

    - `step`: only what rank r wants of rank `r - step` (a ring's); None: of all.
    - `rows`: number of tokens that this rank gets; `sent`, `received`: tokens of other ranks.
    """

    def __init__(
        self,
        pieces: Pieces,
        wanted: list[np.ndarray],
        group: Any,
        device: torch.device,
        step: int | None = None,
    ) -> None:
        me, ranks = dist.get_rank(group), pieces.ranks
        self.group, self.local = group, int(pieces.sizes[me])
        send, self.send_sizes = [], []
        where = np.zeros(0, np.int64)
        for r, stretches in enumerate(wanted):
            rank, at, size = pieces.cut(stretches)
            if step is not None:
                of = rank == (r - step) % ranks
                rank, at, size = rank[of], at[of], size[of]
            mine = rank == me
            send.append(places(at[mine], size[mine]))
            self.send_sizes.append(len(send[-1]))
            if r == me:
                total = np.bincount(rank, size, ranks).astype(np.int64)
                order = np.argsort(rank, kind="stable")  # as parts arrive: rank after rank
                before = np.empty(len(rank), np.int64)
                before[order] = size[order].cumsum() - size[order]
                where = places(before, size)
                self.receive_sizes = total.tolist()
        self.rows = sum(self.receive_sizes)
        self.received = self.rows - self.receive_sizes[me]
        self.sent = sum(self.send_sizes) - self.send_sizes[me]
        self.send = _index(np.concatenate(send) if send else np.zeros(0, np.int64), device)
        in_order = bool((np.diff(where) == 1).all())
        self.order = None if in_order else _index(where, device)
        self.back = None if in_order else _index(np.argsort(where, kind="stable"), device)

    def fetch(self, x: Tensor) -> "Arriving":
        """Begin to fetch what is wanted of tensors `(local, ...)`, rows of tokens."""
        out = x.new_empty((self.rows, *x.shape[1:]))
        given = x.index_select(0, self.send)
        work = all_to_all(out, given, self.receive_sizes, self.send_sizes, self.group)
        return Arriving(work, out, given, self.order)

    def home(self, x: Tensor) -> "Returning":
        """Begin to send rows `(rows, ...)` back to where they came from."""
        given = x.contiguous() if self.back is None else x.index_select(0, self.back)
        out = x.new_empty((sum(self.send_sizes), *x.shape[1:]))
        work = all_to_all(out, given, self.send_sizes, self.receive_sizes, self.group)
        return Returning(work, out, given, self)


class Gathering(Routes):
    """Every rank gets all tokens, by one all-gather."""

    def __init__(self, pieces: Pieces, group: Any, device: torch.device) -> None:
        everything = np.array([[0, pieces.length]])
        super().__init__(pieces, [everything] * pieces.ranks, group, device)
        self.most = int(pieces.sizes.max())
        rank, at, size = pieces.cut(everything)
        where = places(rank * self.most + at, size)
        self.gathered = _index(where, device)

    def fetch(self, x: Tensor) -> "Arriving":
        """Begin to gather rows `(local, ...)` of all ranks."""
        given = x.contiguous()
        if self.local < self.most:
            given = x.new_zeros((self.most, *x.shape[1:]))
            given[: self.local] = x
        out = x.new_empty((self.most * len(self.send_sizes), *x.shape[1:]))
        if not out.numel():
            return Arriving(None, out, given, self.gathered)
        work = all_gather(out, given, group=self.group, async_op=True)
        return Arriving(work, out, given, self.gathered)


class Arriving:
    """Rows that are on their way here."""

    def __init__(self, work: Any, out: Tensor, given: Tensor, order: Tensor | None) -> None:
        self.work, self.out, self.given, self.order = work, out, given, order

    def wait(self) -> Tensor:
        """The rows, in the order of the sequence."""
        if self.work is not None:
            self.work.wait()
        return self.out if self.order is None else self.out.index_select(0, self.order)


class Returning:
    """Rows that are on their way home."""

    def __init__(self, work: Any, out: Tensor, given: Tensor, routes: Routes) -> None:
        self.work, self.out, self.given, self.routes = work, out, given, routes

    def add_to(self, total: Tensor) -> None:
        """Add what came home to `total` `(local, ...)`, rank after rank."""
        if self.work is not None:
            self.work.wait()
        parts = self.out.split(self.routes.send_sizes)
        for place, part in zip(self.routes.send.split(self.routes.send_sizes), parts, strict=True):
            if len(part):
                total.index_add_(0, place, part)


# PyTorch 2.13 gave it a new name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_to_all(out: Tensor, given: Tensor, to_get: list, to_give: list, group: Any) -> Any:
    """Begin an exchange of which every rank knows the sizes; what to wait for."""
    return dist.all_to_all_single(out, given, to_get, to_give, group=group, async_op=True)


def places(start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, ... for size[0] places, then those of the next."""
    total = int(size.sum())
    before = size.cumsum() - size
    return np.arange(total) + np.repeat(start - before, size)


def _index(x: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(device)
