"""Define block masks: a mask together with its full, partial and empty tiles (`tiles.py`)."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ArgumentError
from ..mods.base import Both, Either, MaskFn, Shifted, show
from ..mods.lowering import describe, lower_mod, restore
from ..mods.tracing.capture import collect_reads
from ..types import PACKAGE, as_int, refuse_under_compile
from .build import cached_build
from .provenance import Provenance, record_provenance
from .runs import Runs, coarser, combine
from .tiles import Tiles
from .unbuilt import Unbuilt, dense_tiles, facts_under_compile


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A mask together with its tiles. Build one with `headway.block_mask`; pass it as `mask=`.

    - `mask`: the mask itself, evaluated inside partial tiles.
    - `shape`: `(b, h, q_len, kv_len)`; b and h may be 1 and then hold for every batch or head.
    - `tile`: `(tile_q, tile_kv)`.
    - `tiles`: the runs of full and partial tiles, int32.
    - `decided`: the provenance of the tiles; None where the caller made them; `Unbuilt` where
      compiled code made the block mask, until you read `tiles`.

    A call refuses a block mask whose mask captures other tensors now, or one that was written to
    since: build it again then. It does not notice the writes that `clear_block_cache` names, nor
    those between replays of a CUDA graph. It also refuses a block mask that was built for one batch
    row or head, is used for more, and depends on which.
    """

    mask: MaskFn
    shape: tuple[int, int, int, int]
    tile: tuple[int, int]
    tiles: Tiles
    decided: Provenance | Unbuilt | None = None

    def __post_init__(self) -> None:
        if isinstance(self.decided, Provenance) and not torch.compiler.is_compiling():
            record_provenance(self.tiles, self.decided)

    def __getattr__(self, name: str) -> Any:
        """Build the tiles of an unbuilt block mask."""
        if name != "tiles":
            raise AttributeError(f"BlockMask has no attribute {name!r}")
        if torch.compiler.is_compiling():
            refuse_under_compile(
                ArgumentError,
                "the tiles of a block mask that compiled code makes are known when the program "
                "runs; read to_dense(), or build the block mask outside of what is compiled",
            )
        assert isinstance(self.decided, Unbuilt)
        graph, captured = lower_mod("mask", self.mask, torch.float32)
        tiles, b, h = cached_build(graph, captured, self.shape, self.tile, self.decided.device)
        provenance = Provenance(graph, captured.tensors)
        _set_fields(self, tiles=tiles, shape=(b, h, *self.shape[2:]), decided=provenance)
        self.__post_init__()
        return tiles

    def check_decided(self, formula: str | None, tensors: Sequence[Tensor]) -> None:
        """Check that the tiles are those of a mask with this formula and these tensors."""
        if isinstance(self.decided, Provenance):
            self.decided.check_call(formula, tensors)

    def check_rows(self, b: int, h: int) -> None:
        """Check that tiles that were built for one batch row or head hold for b and h of them.

        **Raises:** `ArgumentError` where the mask depends on which.
        """
        if self.decided is None:  # the caller says so
            return
        for name, built_for, used_for, depends in zip(
            "bh", self.shape[:2], (b, h), self.decided.depends, strict=True
        ):
            if built_for == 1 and used_for > 1 and depends:
                raise ArgumentError(
                    f"the block mask was built with {name}=1, but its mask depends on {name}, and "
                    f"it is used for {name}={used_for}; build it with block_mask(mask, ..., "
                    f"{name}={used_for})"
                )

    def _derived_provenance(self, mask: MaskFn, *others: "BlockMask") -> Provenance | None:
        """Return the provenance of a block mask that is derived from this one and others."""
        provenances = [m.decided for m in (self, *others) if m.decided is not None]
        if not provenances or torch.compiler.is_compiling():
            return self.decided if mask is self.mask else None  # type: ignore[return-value]
        for provenance in provenances:
            provenance.check()
        return Provenance.of(mask)

    def __getstate__(self) -> dict:
        """Return the state without version counters, which count in one process only."""
        tiles = self.tiles  # before what they were derived from
        if self.decided is not None:
            self.decided.check()
        return self.__dict__ | {"tiles": tiles, "decided": self.decided is not None}

    def __setstate__(self, state: dict) -> None:
        provenance = Provenance.of(state["mask"]) if state.pop("decided", False) else None
        self.__dict__.update(state, decided=provenance)
        self.__post_init__()

    @property
    def grid(self) -> tuple[int, int]:
        """Return the numbers of tiles along queries and keys."""
        return -(-self.shape[2] // self.tile[0]), -(-self.shape[3] // self.tile[1])

    @property
    def device(self) -> torch.device:
        decided = self.decided
        return decided.device if isinstance(decided, Unbuilt) else self.tiles.row_order.device

    # -- what it holds -----------------------------------------------------------------------------

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of full, partial and empty tiles."""
        full = int(self.tiles.rows_full.count.sum(dtype=torch.int64))
        partial = int(self.tiles.rows_partial.count.sum(dtype=torch.int64))
        rows, cols = self.grid
        return full, partial, self.shape[0] * self.shape[1] * rows * cols - full - partial

    def sparsity(self) -> float:
        """Return the share of empty tiles, from 0 to 1."""
        full, partial, empty = self.counts()
        return empty / max(full + partial + empty, 1)

    def to_dense(self) -> Tensor:
        """Return uint8 `(b, h, tile_rows, tile_cols)`: 0 empty, 1 partial, 2 full."""
        rows, cols = self.grid
        if facts_under_compile(self) is not None:
            return dense_tiles(self)
        return self.tiles.dense(cols).view(*self.shape[:2], rows, cols)

    def name(self) -> str:
        """Return the mask as it prints: `causal() & sliding_window(1024)`, or a function's name."""
        return show(self.mask)

    def summary(self) -> str:
        """Return one line: the mask, its shape, and the counts of full, partial and empty tiles."""
        full, partial, empty = self.counts()
        return (
            f"BlockMask({self.name()}, shape={self.shape}, tile={self.tile}, full={full}, "
            f"partial={partial}, empty={empty}, sparsity={self.sparsity():.1%})"
        )

    def picture(self, rows: int = 32) -> str:
        """Return the tiles of the first batch and head as text of at most `rows` lines.

        `██` is full, `▒▒` partial, `··` empty; where there are more tiles than lines, a cell stands
        for a square of them. Another head: `block_mask[b, h].picture()`.
        """
        from .picture import text

        return text(self, rows)

    def save_picture(self, path: str | PathLike, title: str | None = None) -> None:
        """Draw the tiles to a file: PNG, SVG or PDF by its ending. Batches and heads that the mask
        distinguishes are side by side, up to 16 of them; one alone: `block_mask[b, h]`.

        All but SVG need matplotlib: `pip install matplotlib`.
        """
        from .picture import draw

        draw(self, path, title)

    def save_report(self, path: str | PathLike, title: str | None = None) -> None:
        """Write a page of the tiles, `.html`, that zooms from all of them to one: one file for a
        browser, with no network. Batches and heads that the mask distinguishes are in it, up to 64.

        Its size follows the runs of live tiles, not `q_len * kv_len`, and stays below 4 MB: of
        tiles that need more, squares are drawn as one cell, as the page says.
        """
        from . import report

        report.save(self, path, title)

    def __repr__(self) -> str:
        lines = [self.summary()]
        if self.shape[0] * self.shape[1] > 1:
            lines.append("batch 0, head 0:")
        return "\n".join([*lines, self.picture(16)])

    def _repr_html_(self) -> str:
        """Return the picture as an SVG for notebooks, which loads nothing from a network."""
        from .picture import inline

        return inline(self)

    # -- parts and combinations --------------------------------------------------------------------

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> "BlockMask":
        """Return the block mask of a part: `block_mask[b, h, query_tiles, key_tiles]`.

        Each index is a number, whose dimension stays, or a slice without a step; trailing ones may
        be omitted. Queries and keys are cut at tiles. The part is a block mask in its own right:
        its mask sees the original indices, and its tensors are numbered from 0.
        """
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 4:
            raise ArgumentError(
                f"a block mask is indexed by batch, head, query tiles and key tiles, got "
                f"{len(index)} indices"
            )
        sizes = (*self.shape[:2], *self.grid)
        index = (*index, *[slice(None)] * (4 - len(index)))
        names = "batch", "head", "query tile", "key tile"
        (b0, b1), (h0, h1), (r0, r1), (c0, c1) = map(_limits, index, sizes, names)
        q0, q1 = (min(n * self.tile[0], self.shape[2]) for n in (r0, r1))
        kv0, kv1 = (min(n * self.tile[1], self.shape[3]) for n in (c0, c1))
        offsets = (b0, h0, q0, kv0)
        mask = Shifted(self.mask, *offsets) if any(offsets) else self.mask
        shape = b1 - b0, h1 - h0, q1 - q0, kv1 - kv0
        if (unbuilt := facts_under_compile(self)) is not None:
            return unbuilt_mask(mask, shape, self.tile, unbuilt)
        t = self.tiles
        rows = self._tile_rows(range(b0, b1), range(h0, h1), range(r0, r1), self.grid[0])
        cols = self._tile_rows(range(b0, b1), range(h0, h1), range(c0, c1), self.grid[1])
        tiles = Tiles.of_runs(
            t.rows_full.take(rows).cut(c0, c1), t.rows_partial.take(rows).cut(c0, c1),
            t.cols_full.take(cols).cut(r0, r1), t.cols_partial.take(cols).cut(r0, r1),
        )  # fmt: skip
        return BlockMask(mask, shape, self.tile, tiles, self._derived_provenance(mask))

    def __and__(self, other: "BlockMask") -> "BlockMask":
        """Return the pairs kept by both; lengths and tiles must be equal, b and h equal or 1.

        Tiles partial in both stay partial, even where together they keep nothing.
        """
        return self._combine(other, "&", Both)

    def __or__(self, other: "BlockMask") -> "BlockMask":
        """Return the pairs kept by either; lengths and tiles must be equal, b and h equal or 1.

        Tiles partial in both stay partial, even where together they keep every pair.
        """
        return self._combine(other, "|", Either)

    def _combine(self, other: "BlockMask", sign: str, kind: type[Both | Either]) -> "BlockMask":
        _check_pair(self, other, sign)
        mask, join = kind(self.mask, other.mask), operator.and_ if sign == "&" else operator.or_
        pairs = zip(self.shape[:2], other.shape[:2], strict=True)
        b, h = (a if c == 1 else c for a, c in pairs)
        shape = (b, h, *self.shape[2:])
        facts, of_other = facts_under_compile(self), facts_under_compile(other)
        if facts is not None and of_other is not None:
            return unbuilt_mask(mask, shape, self.tile, facts.joined(of_other))
        self_runs, other_runs = self._expanded(b, h), other._expanded(b, h)
        full = lambda a, a_part, b, b_part: join(a, b)
        live = lambda a, a_part, b, b_part: join(a | a_part, b | b_part)
        runs = []
        for n, width in ((0, self.grid[1]), (2, self.grid[0])):
            select_runs = combine([*self_runs[n : n + 2], *other_runs[n : n + 2]], width)
            runs.append(select_runs(lambda covered: full(*covered)))
            runs.append(select_runs(lambda covered: live(*covered) & ~full(*covered)))
        provenance = self._derived_provenance(mask, other)
        return BlockMask(mask, shape, self.tile, Tiles.of_runs(*runs), provenance)

    def _tile_rows(self, b: range, h: range, tile_rows: range, row_count: int) -> Tensor:
        """Return the numbers of tile rows (or columns) of some batches and heads, int64."""
        b_idx, h_idx, row_idx = (
            torch.arange(r.start, r.stop, device=self.device) for r in (b, h, tile_rows)
        )
        group = b_idx[:, None, None] * self.shape[1] + h_idx[:, None]
        return (group * row_count + row_idx).flatten()

    def _expanded(self, b: int, h: int) -> tuple[Runs, ...]:
        """Return the four runs for b batches and h heads, where this mask may have one."""
        runs = self.tiles[:4]
        if (b, h) == self.shape[:2]:
            return runs
        self.check_rows(b, h)
        group_idx = torch.arange(self.shape[0] * self.shape[1], device=self.device)
        group = group_idx.view(*self.shape[:2], 1).expand(b, h, 1)
        tile_rows = [group * n + torch.arange(n, device=self.device) for n in self.grid]
        return tuple(r.take(tile_rows[n // 2].flatten()) for n, r in enumerate(runs))

    def retile(self, tile: int | tuple[int, int]) -> "BlockMask":
        """Return the same mask in tiles of a multiple of the size; the mask is not evaluated."""
        requested, tile = tile, tile_of(tile)
        if any(n % m for n, m in zip(tile, self.tile, strict=True)):
            raise ArgumentError(
                f"tile={requested!r} must be multiples of the current tile {self.tile}"
            )
        if (unbuilt := facts_under_compile(self)) is not None:
            return unbuilt_mask(self.mask, self.shape, tile, unbuilt)
        (rows, cols), t = self.grid, self.tiles
        by_q, by_kv = tile[0] // self.tile[0], tile[1] // self.tile[1]
        runs = (*coarser(t.rows_full, t.rows_partial, (rows, cols), (by_q, by_kv)),
                *coarser(t.cols_full, t.cols_partial, (cols, rows), (by_kv, by_q)))  # fmt: skip
        return BlockMask(self.mask, self.shape, tile, Tiles.of_runs(*runs), self.decided)

    # -- other devices and files ----------------------------------------------------------------

    def to(self, device: torch.device | str) -> "BlockMask":
        """Return a copy on another device, with the tensors that the mask's library values hold."""
        device = torch.device(device)
        if facts_under_compile(self) is not None:
            if device == self.device:
                return self
            refuse_under_compile(
                ArgumentError,
                f"compiled code that makes a block mask on {self.device} cannot move it to "
                f"{device}; pass device= to block_mask",
            )
        parts = describe(self.mask)
        for fn in parts.functions:
            for _, t in collect_reads(fn).tensors:
                if t.dim() and t.device != torch.empty(0, dtype=torch.uint8, device=device).device:
                    raise ArgumentError(
                        f"the mask function {getattr(fn, '__qualname__', fn)} captures a tensor "
                        f"{tuple(t.shape)} on {t.device}, which to({str(device)!r}) cannot move; "
                        "build the block mask from a function that captures it there"
                    )
        mask = restore(parts._replace(tensors=[t.to(device) for t in parts.tensors]))
        tiles = Tiles.unflatten([t.to(device) for t in self.tiles.flatten()])
        return BlockMask(mask, self.shape, self.tile, tiles, self._derived_provenance(mask))

    def save(self, path: str | PathLike) -> None:
        """Write to a safetensors file: tiles, and the mask where it is made of library values.

        **Raises:** `ArgumentError` for a mask with a Python function in it, which no file holds.
        """
        tiles = self.tiles  # before what they were derived from
        if self.decided is not None:
            self.decided.check()
        from . import file

        file.save(path, self.mask, self.shape, self.tile, tiles)

    @staticmethod
    def load(path: str | PathLike, device: torch.device | str = "cpu") -> "BlockMask":
        """Read a file that `save` wrote.

        **Raises:** `CheckpointError` for a file that is no complete block mask.
        """
        from . import file

        return BlockMask(*file.load(path, device))


def unbuilt_mask(
    mask: MaskFn, shape: tuple[int, int, int, int], tile: tuple[int, int], decided: Unbuilt
) -> BlockMask:
    """Return a block mask of compiled code, whose tiles are built when they are first read."""
    block_mask = object.__new__(BlockMask)
    _set_fields(block_mask, mask=mask, shape=shape, tile=tile, decided=decided)
    return block_mask


def _set_fields(block_mask: BlockMask, **fields: Any) -> None:
    for name, item in fields.items():
        object.__setattr__(block_mask, name, item)


def tile_of(tile: Any, name: str = "tile") -> tuple[int, int]:
    """Return the queries and keys of a tile; a number stands for both."""
    sizes = tuple([as_int(n) for n in (tile if isinstance(tile, tuple | list) else (tile, tile))])
    if len(sizes) != 2 or any(n is None or n < 1 for n in sizes):
        raise ArgumentError(f"{name}={tile!r} must be one or two positive integers")
    return sizes


def _check_pair(mask: BlockMask, other: object, sign: str) -> None:
    """Raise unless `sign` may combine two block masks."""
    if not isinstance(other, BlockMask):
        raise ArgumentError(
            f"{sign} combines a block mask with another, not with {type(other).__name__}; combine "
            "the masks first and build one block mask of the result"
        )
    if mask.shape[2:] != other.shape[2:] or mask.tile != other.tile:
        raise ArgumentError(
            f"block masks combine only with equal lengths and tiles: {mask.shape[2:]} with tile "
            f"{mask.tile}, and {other.shape[2:]} with tile {other.tile}; retile() the finer"
        )
    if mask.device != other.device:
        raise ArgumentError(
            f"block masks on {mask.device} and {other.device} do not combine; move one with .to()"
        )
    pairs = zip(mask.shape[:2], other.shape[:2], strict=True)
    if any(a != b and 1 not in (a, b) for a, b in pairs):
        raise ArgumentError(
            f"block masks combine only where batch and heads are equal or 1: {mask.shape[:2]} and "
            f"{other.shape[:2]}"
        )


def _limits(index: int | slice, size: int, name: str) -> tuple[int, int]:
    """Return the first position and the end of an index into one dimension."""
    if (position := as_int(index)) is not None:
        if not -size <= position < size:
            raise ArgumentError(f"{name} index {index} is out of range for {size}")
        return position % size, position % size + 1
    if not isinstance(index, slice) or index.step not in (None, 1):
        raise ArgumentError(f"{name} index {index!r} must be a number or a slice without a step")
    if index.start is index.stop is None:  # (Dynamo makes a constant of a size in `indices`)
        return 0, size
    start, stop, _ = index.indices(size)
    return start, max(start, stop)


def formula_of(mask: Any) -> Any:
    """Return a mask as a function or value, that of a block mask too."""
    return mask.mask if isinstance(mask, BlockMask) else mask


def from_dense(
    state: Tensor, mask: MaskFn, lengths: tuple[int, ...], tile: tuple[int, int]
) -> BlockMask:
    """Return a block mask from uint8 `(b, h, tile_rows, tile_cols)`: 0 empty, 1 partial, 2 full."""
    tiles = Tiles.of_dense(state.flatten(0, 1).cpu().numpy(), state.device)
    return BlockMask(mask, (*state.shape[:2], *lengths), tile, tiles)  # type: ignore[arg-type]


def _flatten(m: BlockMask) -> tuple[list[Tensor], tuple]:
    return m.tiles.flatten(), (m.mask, m.shape, m.tile, m.decided)


def _flatten_with_keys(m: BlockMask) -> Any:
    tensors, rest = _flatten(m)
    return [(pytree.SequenceKey(n), tensor) for n, tensor in enumerate(tensors)], rest


pytree.register_pytree_node(
    BlockMask,
    _flatten,
    lambda tensors, rest: BlockMask(
        rest[0], rest[1], rest[2], Tiles.unflatten(list(tensors)), rest[3]
    ),
    serialized_type_name=f"{PACKAGE}.BlockMask",
    flatten_with_keys_fn=_flatten_with_keys,
)
