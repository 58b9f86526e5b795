"""FlexAttention's `BlockMask`: lists of full and partial blocks, over Headway's runs of tiles."""

import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..blocks import BlockMask as TileMask
from ..blocks import from_dense
from ..errors import ArgumentError
from ..mods import Mask
from ..mods.base import MaskFn, value
from .errors import CallAssertionError, CallError

_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
          "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")  # fmt: skip


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """Keeps every pair."""
    return batch.new_ones((), dtype=torch.bool)


def sliced_mask(*_: Tensor) -> Tensor:
    """In place of the mask of a sliced `BlockMask`, whose positions are no longer known."""
    raise CallError(
        "Cannot use mask_mod from a sliced BlockMask: set block_mask.mask_mod to one that sees the "
        "positions of the part, and block_mask.seq_lengths to its lengths"
    )


@value
class in_blocks(Mask):
    """True in full blocks, `mask` in partial ones, False in the rest.

    `state` is uint8 `(b or 1, h or 1, block rows, block columns)`: 0 empty, 1 partial, 2 full.
    """

    mask: MaskFn
    state: Tensor
    block_q: int
    block_kv: int
    _varies: str

    def __init__(self, mask: MaskFn, state: Tensor, block: tuple[int, int]) -> None:
        varies = "".join(
            [n if size > 1 else "1" for n, size in zip("bh", state.shape, strict=False)]
        )
        fields = (mask, state, *block, varies)
        for name, item in zip(self.fields, fields, strict=True):
            object.__setattr__(self, name, item)

    def __call__(self, b, h, q_idx, kv_idx):
        lead = [at if on != "1" else 0 for at, on in zip((b, h), self._varies, strict=True)]
        state = self.state[(*lead, q_idx // self.block_q, kv_idx // self.block_kv)]
        return (state == 2) | ((state == 1) & self.mask(b, h, q_idx, kv_idx))


class BlockMask:
    """Which blocks of the (query, key) square are empty, full or partial, as FlexAttention has it.

    The lists (`kv_num_blocks`, `kv_indices`, ..., int32) are made when something asks for them.
    `mask_mod` and `seq_lengths` may be set, which sliced masks need.

    - `seq_lengths`: `(q_len, kv_len)`.
    - `BLOCK_SIZE`: `(queries, keys)` in a block.
    - `mask_mod`: evaluated in partial blocks.
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None = None,
        q_indices: Tensor | None = None,
        full_q_num_blocks: Tensor | None = None,
        full_q_indices: Tensor | None = None,
        BLOCK_SIZE: tuple[int, int] = (128, 128),
        mask_mod: MaskFn = noop_mask,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        if kv_indices.dim() < 2:
            raise CallError("BlockMask must have at least 2 dimensions")
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise CallAssertionError(
                "full_kv_num_blocks and full_kv_indices must be both provided or omitted"
            )
        _no_write_order(dq_write_order, dq_write_order_full, dq_kv_order)
        state = _state(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        self._set(state, tuple(seq_lengths), _pair(BLOCK_SIZE), mask_mod, None)

    def _set(self, state, seq_lengths, block, mask_mod, tiles) -> "BlockMask":
        self._state: Tensor | None = state  # uint8 (..., rows, columns): 0 empty, 1 partial, 2 full
        self._tiles: TileMask | None = tiles
        self._batch: tuple[int, ...] = tuple(state.shape[:-2]) if state is not None else ()
        self._seq_lengths, self._block, self._mask_mod = seq_lengths, block, mask_mod
        return self

    @classmethod
    def of_tiles(cls, tiles: TileMask, batch: tuple[int, ...]) -> "BlockMask":
        """Headway's block mask as FlexAttention's, for so many batch rows and heads."""
        new = cls.__new__(cls)._set(None, tiles.shape[2:], tiles.tile, tiles.mask, tiles)
        new._batch = batch
        return new

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskFn | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> "BlockMask":
        """From the blocks of every row: `kv_num_blocks` `(b, h, rows)` and `kv_indices`
        `(b, h, rows, columns)`, of which each row's first `kv_num_blocks` are read.

        `compute_q_blocks` is accepted and changes nothing: the transposed lists are always known.
        """
        block = _pair(BLOCK_SIZE)
        if seq_lengths is None:
            rows, cols = kv_indices.shape[-2:] if kv_indices.dim() > 1 else (0, 0)  # refused below
            seq_lengths = rows * block[0], cols * block[1]
        return cls(
            seq_lengths, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices,
            BLOCK_SIZE=block, mask_mod=noop_mask if mask_mod is None else mask_mod,
            dq_write_order=dq_write_order, dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, Tensor) else None,
        )  # fmt: skip

    # -- what it holds -----------------------------------------------------------------------------

    @property
    def tiles(self) -> TileMask:
        """Headway's block mask: pass it to `headway.attention` as `mask`."""
        if self._tiles is None:
            state = self._square()
            rows, cols = state.shape[2:]
            lengths, block = self._seq_lengths, self._block
            if lengths[0] > rows * block[0] or lengths[1] > cols * block[1]:
                raise ArgumentError(
                    f"seq_lengths={lengths} do not fit {rows} x {cols} blocks of {block}"
                )
            mask = in_blocks(self._mask_mod, state, block)
            used = state[:, :, : -(-lengths[0] // block[0]), : -(-lengths[1] // block[1])]
            self._tiles = from_dense(used, mask, lengths, block)
        return self._tiles

    def _square(self) -> Tensor:
        """The state of every block, uint8 (b, h, rows, columns)."""
        if self._state is None:
            assert self._tiles is not None
            self._state = self._tiles.to_dense().expand(*self._batch, -1, -1)
        state = self._state
        return state.reshape(*[1] * (4 - state.dim()), *state.shape) if state.dim() < 4 else state

    @property
    def mask_mod(self) -> MaskFn:
        """The mask inside partial blocks."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: MaskFn) -> None:
        self._square()
        self._mask_mod, self._tiles = mask_mod, None

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """`(q_len, kv_len)`."""
        return self._seq_lengths

    @seq_lengths.setter
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        self._square()
        self._seq_lengths, self._tiles = tuple(lengths), None

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """`(queries, keys)` in a block."""
        return self._block

    def __getattr__(self, name: str) -> Any:
        if name not in _LISTS:
            raise AttributeError(f"BlockMask has no attribute {name!r}")
        self._square()
        assert self._state is not None
        state: Tensor = self._state.eq(2 if name.startswith("full") else 1)
        if name.removeprefix("full_").startswith("q_"):
            state = state.transpose(-1, -2)
        if name.endswith("num_blocks"):
            return state.sum(-1, dtype=torch.int32)
        return state.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Lengths, the eight lists, block sizes and mask, in the original's order."""
        lists = [getattr(self, name) for name in _LISTS]
        if flatten:
            return (
                *self._seq_lengths,
                *lists,
                None,
                None,
                None,
                None,
                *self._block,
                self._mask_mod,
            )
        return (self._seq_lengths, *lists, None, None, None, None, self._block, self._mask_mod)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(b, h, q_len, kv_len)`."""
        return (*self._batch, *self._seq_lengths)

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self._tiles.device if self._tiles is not None else self._square().device

    def numel(self) -> int:
        """The number of pairs."""
        return math.prod(self.shape)

    def sparsity(self) -> float:
        """The share of empty blocks, in percent."""
        state = self._square()
        return 100 * (1 - float((state > 0).double().mean())) if state.numel() else 100.0

    def to_dense(self) -> Tensor:
        """int32 `(b, h, rows, columns)`: 1 where a block is not empty."""
        self._square()
        return (self._state > 0).to(torch.int32)  # type: ignore[operator]

    def to_string(self, grid_size: tuple[int, int] | int = (20, 20), limit: int = 4) -> str:
        """The blocks of at most `limit` batches and heads as text of at most so many lines."""
        rows = grid_size if isinstance(grid_size, int) else grid_size[0]
        state = self._square()
        shown = []
        for b in range(min(state.shape[0], limit)):
            for h in range(min(state.shape[1], limit)):
                one = from_dense(
                    state[b : b + 1, h : h + 1], noop_mask, self._seq_lengths, self._block
                )
                title = f"\n{(b, h)}\n" if state.shape[0] * state.shape[1] > 1 else "\n"
                shown.append(title + one.picture(rows if rows > 0 else max(state.shape[2:])))
        return "".join(shown)

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n"
            f"{self.to_string().strip()}\n)"
        )

    # -- parts -------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> "BlockMask":
        """A part by batch, head and block row; numbers keep their dimension.

        As in the original, the part has no mask until `mask_mod` is set: only you know whether it
        should count queries from the start of the part or of the whole.
        """
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 3:
            raise IndexError("too many indices for a BlockMask: batch, head, query block")
        keep = lambda i, n: slice(i % n, i % n + 1) if isinstance(i, int) and -n <= i < n else i
        self._square()
        state = self._state
        assert state is not None
        at = tuple(keep(i, n) for i, n in zip(index, state.shape, strict=False))
        block, lengths = self._block, self._seq_lengths
        return BlockMask.__new__(BlockMask)._set(state[at], lengths, block, sliced_mask, None)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> "BlockMask":
        """The upper left corner of these lengths, with the same mask."""
        state = self._square()
        rows, cols = -(-new_q_len // self._block[0]), -(-new_kv_len // self._block[1])
        if rows > state.shape[2] or cols > state.shape[3]:
            raise ArgumentError(
                f"lengths {(new_q_len, new_kv_len)} have more blocks than "
                f"{tuple(state.shape[2:])}; create a new block mask"
            )
        state = state[:, :, :rows, :cols].clone()
        # The last block of a row may be full only as far as the old length.
        if new_q_len > self._seq_lengths[0]:
            state[:, :, -1].clamp_(max=1)
        if new_kv_len > self._seq_lengths[1]:
            state[..., -1].clamp_(max=1)
        new = BlockMask.__new__(BlockMask)
        return new._set(state, (new_q_len, new_kv_len), self._block, self._mask_mod, None)

    def partial_only(self) -> "BlockMask":
        """The same with full blocks called partial."""
        tiles = self.tiles
        state = tiles.to_dense().clamp(max=1)
        only = from_dense(state, tiles.mask, tiles.shape[2:], tiles.tile)
        return BlockMask.of_tiles(only, self._batch)

    def to(self, device: torch.device | str) -> "BlockMask":
        """On another device; what the mask captures stays where it is."""
        state = self._square().to(device)
        new = BlockMask.__new__(BlockMask)
        return new._set(state, self._seq_lengths, self._block, self._mask_mod, None)


def as_tiles(mask: Any) -> TileMask | Mask:
    """What to give to `headway.attention` for a `BlockMask`, ours or PyTorch's."""
    if isinstance(mask, BlockMask):
        if mask.mask_mod is sliced_mask:
            sliced_mask()
        return mask.tiles
    if isinstance(mask, TileMask):
        return mask
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        sliced_mask()
    lists = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    if torch.compiler.is_compiling():  # no weak references there: tiles are found at run time
        return in_blocks(mask.mask_mod, _state(*lists), mask.BLOCK_SIZE)
    stamp = (mask.mask_mod, mask.seq_lengths, [(id(x), x._version) for x in lists if x is not None])
    known = _converted.get(mask)
    if known is None or known[0] != stamp:
        ours = BlockMask(
            mask.seq_lengths, *lists, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod
        )
        known = _converted[mask] = stamp, ours.tiles
    return known[1]


_converted: "weakref.WeakKeyDictionary[Any, tuple[Any, TileMask]]" = weakref.WeakKeyDictionary()


def is_block_mask(mask: Any) -> bool:
    """Ours, Headway's, or PyTorch's (without importing PyTorch's, which loads the compiler)."""
    return isinstance(mask, BlockMask | TileMask) or (
        type(mask).__name__ == "BlockMask" and hasattr(mask, "kv_indices")
    )


def _state(
    num_blocks: Tensor, indices: Tensor, full_num: Tensor | None, full_indices: Tensor | None
) -> Tensor:
    """uint8 (..., rows, columns): 0 empty, 1 partial, 2 full."""
    state = _dense(num_blocks, indices)
    if full_num is None or full_indices is None:
        return state
    return torch.maximum(state, 2 * _dense(full_num, full_indices))


def _dense(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """uint8 (..., rows, columns), 1 for the blocks that the lists name."""
    columns = indices.shape[-1]
    named = torch.arange(columns, device=indices.device) < num_blocks[..., None]
    # What comes after a row's blocks is undefined: send it to one column too many.
    at = torch.where(named, indices.long(), columns)
    out = torch.zeros(*at.shape[:-1], columns + 1, dtype=torch.uint8, device=at.device)
    return out.scatter(-1, at, 1)[..., :columns]


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]


def _no_write_order(*given: Any) -> None:
    if any(x is not None for x in given):
        raise ArgumentError(
            "dq_write_order, dq_write_order_full and dq_kv_order schedule FlashAttention's "
            "kernels, which do not run here; leave them out: deterministic gradients are "
            "headway.attention(..., deterministic=True)"
        )


pytree.register_pytree_node(
    BlockMask,
    lambda m: ([m.tiles], m._batch),
    lambda tiles, batch: BlockMask.of_tiles(next(iter(tiles)), batch),
    serialized_type_name="headway.compat.flex.BlockMask",
)
