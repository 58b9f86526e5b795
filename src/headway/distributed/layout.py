"""Layouts: the assignment of a sequence's tokens to ranks."""

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..arguments import count_of, number_of
from ..errors import ArgumentError
from .place import place_of
from .shard_table import ShardTable, check_size, merge_pieces, table_digest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

PLANS = ("auto", "heads", "gather", "ulysses", "ulysses*heads")
TRANSPORTS = ("auto", "collective", "pull")


class Layout(ShardTable):
    """The assignment of a sequence's tokens to ranks: one value, equal on all ranks.

    ```python
    import torch
    import torch.distributed as dist
    import headway as hw
    from headway.distributed import Layout

    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
    layout = Layout.zigzag(1000, dist.group.WORLD)
    x = layout.shard(torch.randn(1, 8, 1000, 64), 2)  # (1, 8, local, 64)
    out = hw.attention(x, x, x, mask=hw.causal(), layout=layout)  # of this rank's tokens
    dist.destroy_process_group()
    ```

    Create it from one of these:

    - a one-dimensional `DeviceMesh` (`mesh["cp"]`), or a process group;
    - a `DeviceMesh` of two dimensions, nodes and the ranks of a node (`mesh["between", "inside"]`:
      rank after rank, node after node). The first layout on it creates the group of all its ranks
      (`DeviceMesh._flatten`), so every process of the job must take part;
    - a pair `(rank, ranks)` or `(rank, (nodes, ranks of a node))`. It then asks nothing of other
      processes, so a `DataLoader`'s worker may create it, and you can pickle it. Call `on(mesh)`
      before the first attention.

    Any length works with any number of ranks, and a rank may hold nothing. One layout is valid for
    all rows of a batch.

    **Arguments:**

    - `length`: the length of the whole sequence.
    - `pieces`: `(rank, start, stop)`: the rank holds positions `start` up to `stop`. The pieces
      cover the sequence once. A rank keeps its pieces in ascending order.
    - `mesh`: see above.

    **Attributes:**

    - `positions`: int64 `(local,)`, the position of every token of this rank, on the device of the
      mesh: `rotary.angles(layout.positions)`, `position_ids=layout.positions[None]`.
    - `pieces`, `sizes`: of all ranks: the pieces, and the number of tokens.
    - `rank`, `ranks`, `local`: of this rank, and how many tokens it holds.
    - `node`: the ranks of a node, of a mesh of two dimensions; 0 of one.
    - `plan`, `transport`: how keys and values travel, "auto" or what `using` named.

    **Raises:** `ArgumentError` where the pieces do not cover the sequence once.
    """

    sizes: tuple[int, ...]
    node: int
    inside_name: str  # of the group of this node's ranks
    between_name: str  # of the group of ranks with this rank's place in every node
    plan: str
    transport: str

    def __init__(self, length: int, pieces: Iterable[Sequence[int]], mesh: Any) -> None:
        self.length = count_of("length", length)
        self.plan = self.transport = "auto"
        self._place(mesh)
        values = pieces if isinstance(pieces, Tensor) else list(pieces)
        table = torch.as_tensor(values, dtype=torch.int64, device="cpu").reshape(-1, 3)
        self.table = _dynamic(merge_pieces(table[table[:, 2] > table[:, 1]]))
        self._check()
        rank, start, stop = self.table.unbind(1)
        sizes = torch.zeros(self.ranks, dtype=torch.int64, device="cpu")
        self.sizes = tuple(sizes.index_add_(0, rank, stop - start).tolist())
        self._find_positions()

    # -- constructors ------------------------------------------------------------------------------

    @staticmethod
    def contiguous(length: int, mesh: Any) -> "Layout":
        """Return a layout of one piece for each rank, in order, as `torch.tensor_split` cuts."""
        length, ranks = count_of("length", length), place_of(mesh).ranks
        cuts = [length * n // ranks for n in range(ranks + 1)]
        return Layout(length, [(n, *cuts[n : n + 2]) for n in range(ranks)], mesh)

    @staticmethod
    def zigzag(length: int, mesh: Any) -> "Layout":
        """Return a layout that balances a causal mask: rank n holds pieces n and 2 ranks - 1 - n of
        2 ranks pieces. (Zhu 2024, zigzag ring attention; Llama 3, arXiv 2407.21783, section
        3.3.2)"""
        length, ranks = count_of("length", length), place_of(mesh).ranks
        cuts = [length * n // (2 * ranks) for n in range(2 * ranks + 1)]
        return Layout(
            length, [(min(n, 2 * ranks - 1 - n), *cuts[n : n + 2]) for n in range(2 * ranks)], mesh
        )

    @staticmethod
    def of_lengths(
        documents: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        mesh: Any,
        *,
        tile: int = 128,
        slack: float = 0.03,
    ) -> "Layout":
        """Return a layout for packed causal documents. It cuts a document only where balance
        requires it.

        - `documents`: the lengths of the documents, integers or a tensor `(documents,)`. For a
          batch, a list per row, all of the same sum.
        - `tile`: pieces begin at multiples of it. In a long sequence, up to `tile` tokens of a
          document may therefore lie with the next document.
        - `slack`: the share of tokens, and of pairs to compute, that a rank may have above the
          mean, where that can be reached.
        """
        from .balance import balance_documents

        rows = _rows_of(documents)
        pieces = balance_documents(rows, place_of(mesh).ranks, *_balance_options(tile, slack))
        return Layout(int(sum(rows[0])), pieces, mesh)

    @staticmethod
    def balanced(
        length: int,
        mesh: Any,
        masks: Any,
        *,
        b: int = 1,
        h: int = 1,
        tile: int = 128,
        slack: float = 0.03,
    ) -> "Layout":
        """Return a layout that balances any mask, and moves the fewest bytes of those that do.

        - `masks`: the mask of a self-attention over `length` tokens, or a list with the mask of
          each layer: functions, library values or block masks.
        - `b`, `h`: batch rows and heads, for masks that depend on them. Block masks have their own.
        - `tile`: pieces begin at multiples of it.
        - `slack`: the share of tiles to compute that a rank may have above the mean, where that
          can be reached.
        """
        from .balance import balance_masks

        length, ranks = count_of("length", length), place_of(mesh).ranks
        masks = list(masks) if isinstance(masks, list | tuple) else [masks]
        sizes = count_of("b", b, 1), count_of("h", h, 1), length, length
        return Layout(
            length, balance_masks(masks, sizes, ranks, *_balance_options(tile, slack)), mesh
        )

    # -- the value ---------------------------------------------------------------------------------

    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """Return `(rank, start, stop)` of all pieces, rank after rank."""
        return tuple(tuple(piece) for piece in self.table.tolist())  # type: ignore[misc]

    def on(self, mesh: "DeviceMesh | ProcessGroup | tuple") -> "Layout":
        """Return the same layout on this mesh, of as many ranks.

        **Raises:** `ArgumentError` where the mesh has another number of ranks.
        """
        new, ranks = self._copy(), self.ranks
        new._place(mesh)
        if new.ranks != ranks:
            raise ArgumentError(
                f"the layout is for {ranks} ranks, but the mesh has {new.ranks}; make one for "
                "that many"
            )
        new._find_positions()
        return new

    def using(self, plan: str = "auto", transport: str = "auto") -> "Layout":
        """Return the same layout with a plan and a transport for keys and values.

        - `plan`: "heads" all-gathers keys and values by chunks of heads, "gather" in one chunk.
          "ulysses" uses all-to-alls. "ulysses*heads", on a 2-D mesh, uses "ulysses" inside a node
          and "heads" between nodes. "auto" takes the cheapest (see
          `headway.distributed.exchange.plans`).
        - `transport`: "collective" uses the collectives of `torch.distributed`. "pull" copies out
          of the memory of the other GPUs of the host with copy engines, which leaves all
          multiprocessors to attention. "auto" pulls where the GPUs of the group share a host and
          reach each other. It uses collectives elsewhere, for "ulysses", and while a CUDA graph is
          captured.

        **Raises:** `ArgumentError` for other names, and for "ulysses" with "pull".
        """
        if plan == "ring":
            raise ArgumentError(
                'plan="ring" was removed, since "heads" is faster; use layout.using("heads")'
            )
        for name, value, choices in (("plan", plan, PLANS), ("transport", transport, TRANSPORTS)):
            if value not in choices:
                raise ArgumentError(
                    f"{name}={value!r} must be one of {', '.join(map(repr, choices))}"
                )
        if plan == "ulysses" and transport == "pull":
            raise ArgumentError('plan="ulysses" sends by collectives alone; leave transport out')
        new = self._copy()
        new.plan, new.transport = plan, transport
        return new

    def digest(self) -> int:
        """Return a hash of 63 bits of the layout: equal layouts have equal ones, on all ranks."""
        return table_digest(self.table, self.length, self.ranks)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Layout)
            and (self.length, self.ranks) == (other.length, other.ranks)
            and torch.equal(self.table, other.table)
        )

    def __hash__(self) -> int:
        return self.digest()

    def __reduce__(self) -> tuple:
        """Pickle the layout without its mesh, which belongs to one process; see `on`."""
        shape = (self.ranks // self.node, self.node) if self.node else self.ranks
        place, names = (self.rank, shape), (self.plan, self.transport)
        return _unpickled, (self.length, self.table.tolist(), place, names)

    def __repr__(self) -> str:
        return (
            f"Layout(length={self.length}, ranks={self.ranks}, rank={self.rank}, "
            f"local={self.local}, pieces={len(self.table)}, plan={self.plan!r}, "
            f"transport={self.transport!r})"
        )

    # -- tensors -----------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part, along `dim`, of a tensor that every rank has: `(b, length, ...)`
        to `(b, local, ...)`, of any dtype. No data is sent.

        Call it on all ranks of the mesh: they first compare layout, shape and dtype. A layout made
        from `(rank, ranks)` compares nothing. Use one in a `DataLoader` worker, in a thread that
        prefetches, or to look at one rank's part.

        It is differentiable. The gradient of `x` is zero outside of this rank's part, so for a loss
        summed over ranks, sum the gradients over ranks.

        **Raises:** `ArgumentError` if `x` has another length, and on every rank if ranks differ.
        """
        # In a compiled program nobody is asked: a call that uses the part compares the layout. Nor
        # in a fork of the process that is a rank, as a worker of a DataLoader is.
        if self.group_name and not is_compiling() and self._process == os.getpid():
            from .exchange.resharding import shard

            shard(self, x, dim)
        check_size(x, dim, self.length, "the whole sequence")
        if self.positions.device == x.device:
            return x.index_select(dim, self.positions)
        return x.index_select(dim, self.positions.to(x.device))

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return on every rank the whole tensor from the parts of all ranks, along `dim`:
        `(b, local, ...)` to `(b, length, ...)`, of any dtype. Call it on all ranks.

        It is differentiable once. The backward adds up the gradients of all ranks, in their order.

        **Raises:** `ArgumentError` if `x` has another length, and on every rank if ranks differ in
        layout, shape, dtype or `dim`, or run the backward of different calls.
        """
        from .exchange.resharding import unshard

        return unshard(self, x, dim)

    def shift(self, x: Tensor, by: int = 1, dim: int = 1, fill: float = 0) -> Tensor:
        """Shift the whole tensor by `by` positions, and return this rank's part of the result.

        `x` is this rank's part, `(b, local, ...)` along `dim`, of any dtype. In positions of the
        whole, `result[p] = x[p + by]`, and `fill` where there is no such position. Call it on all
        ranks. Only tokens that another rank needs are sent. It is differentiable once.

        Labels of the next token are `layout.shift(tokens, 1, fill=-100)`. For the n-th multi-token
        prediction, shift by n.

        **Raises:** `ArgumentError` if `by` is not an integer or `x` has another length, and on
        every rank if ranks differ in layout, shape, dtype, `dim`, `by` or `fill`, or run the
        backward of different calls.
        """
        from .exchange.resharding import shift

        return shift(self, x, by, dim, fill)

    # -- below -------------------------------------------------------------------------------------

    def _copy(self) -> "Layout":
        new = object.__new__(Layout)
        new.__dict__.update(self.__dict__)
        return new

    def _place(self, mesh: Any) -> None:
        place = place_of(mesh)
        self.rank, self.ranks, self._device = place.rank, place.ranks, place.device
        self.group_name, self.node = place.group, place.node
        self.inside_name, self.between_name = place.inside, place.between
        self._process = os.getpid()

    def _find_positions(self) -> None:
        pieces = self.table[self.table[:, 0] == self.rank].tolist()
        ranges = [torch.arange(start, stop, device="cpu") for _, start, stop in pieces]
        positions = torch.zeros(0, dtype=torch.int64, device="cpu")
        if ranges:
            positions = torch.cat(ranges)
        self.positions, self.local = positions.to(self._device), len(positions)

    def _check(self) -> None:
        rank, start, stop = self.table.unbind(1)
        if len(rank) and (int(rank.min()) < 0 or int(rank.max()) >= self.ranks):
            raise ArgumentError(
                f"pieces name ranks {rank.unique().tolist()}; there are {self.ranks}"
            )
        start, order = start.sort()
        stop = stop[order]
        ends = torch.cat([stop.new_zeros(1), stop])
        begins = torch.cat([start, start.new_full((1,), self.length)])
        if not torch.equal(ends, begins):
            position = int(torch.minimum(ends, begins)[ends != begins][0])
            raise ArgumentError(
                f"pieces must cover positions 0 to {self.length} once: at {position} they overlap, "
                "leave a gap, or go past the end"
            )


def _unpickled(length: int, pieces: list, place: tuple, names: tuple[str, str]) -> Layout:
    return Layout(length, pieces, place).using(*names)


def _dynamic(table: Tensor) -> Tensor:
    """Tell `torch.compile` that the number of pieces varies, so that another layout compiles
    nothing. (`torch._dynamo.maybe_mark_dynamic` sets this mark, and loads the compiler.)"""
    table._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
    return table


def _rows_of(documents: Any) -> list[list[int]]:
    """Return the lengths of the documents of every row of the batch."""
    if isinstance(documents, Tensor):
        documents = documents.tolist()
    documents = list(documents)
    rows = documents if documents and isinstance(documents[0], list | tuple) else [documents]
    rows = [[count_of("documents", n) for n in row] for row in rows]
    if len({sum(row) for row in rows}) != 1:
        raise ArgumentError(
            f"documents: the rows' lengths add up to {[sum(row) for row in rows]}; all rows are of "
            "one length"
        )
    return rows


def _balance_options(tile: Any, slack: Any) -> tuple[int, float]:
    slack = number_of("slack", slack)
    if slack < 0:
        raise ArgumentError(f"slack={slack!r} must be 0 or more")
    return count_of("tile", tile, 1), slack
