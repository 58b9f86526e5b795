"""FlexAttention's `BlockMask`: lists of full and partial blocks, converted to Headway's tiles."""

import math
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..blocks import BlockMask as TileMask
from ..blocks import Provenance, Unbuilt, from_dense
from ..caches import TensorCache
from ..errors import ArgumentError
from ..mods import Mask
from ..mods.base import MaskFn
from ..types import PACKAGE
from .errors import CallError, CallTypeError
from .flex_lists import (
    KV_LISTS,
    Q_LISTS,
    WRITE_ORDERS,
    absent_lists,
    block_pair,
    count_columns,
    in_blocks,
    is_recorded,
    length_of,
    mark_ragged_edges,
    refuse_unknown_time,
    refuse_write_order,
    state_of_lists,
    version_of_list,
    without_copies,
)


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """Keep every pair: the mask function `(batch, head, token_q, token_kv) -> True`."""
    return batch.new_ones((), dtype=torch.bool)


def sliced_mask(*_: Tensor) -> Tensor:
    """Raise: this stands for the mask of a sliced `BlockMask`, whose positions are unknown."""
    raise CallError(
        "Cannot use mask_mod from a sliced BlockMask: set block_mask.mask_mod to one that sees the "
        "positions of the part, and block_mask.seq_lengths to its lengths"
    )


class BlockMask:
    """A block mask with FlexAttention's interface: which blocks are empty, full or partial.

    The lists (`kv_num_blocks`, `kv_indices`, ..., int32) are created on first use. You may set them
    or write to them in place. The lists of keys determine the visited blocks. Those of queries must
    name the same blocks, or are refused. `mask_mod` and `seq_lengths` may be set, which sliced
    masks need.

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
        lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        of_queries = q_num_blocks, q_indices, full_q_num_blocks, full_q_indices
        absent = absent_lists(lists, of_queries)
        refuse_write_order(dq_write_order, dq_write_order_full, dq_kv_order)
        block = block_pair(BLOCK_SIZE)
        state = state_of_lists(lists, count_columns(kv_indices, seq_lengths, block))
        self._set(state, tuple(seq_lengths), block, mask_mod, None, absent)
        for name, tensor in zip(KV_LISTS, lists, strict=True):
            self._shared_lists[name] = tensor, version_of_list(tensor)
        for name, tensor in zip(Q_LISTS, of_queries, strict=True):
            if tensor is not None:
                self._shared_lists[name] = tensor, None

    # The mask and the versions of its tensors that the blocks were derived from. None where the
    # caller vouches for the blocks: by passing or writing lists, or by setting the mask.
    _provenance: Provenance | Unbuilt | None = None

    def _set(self, state, lengths, block, mask_mod, tiles, absent=frozenset()) -> "BlockMask":
        self._state: Tensor | None = state  # uint8 (..., rows, columns): 0 empty, 1 partial, 2 full
        self._tiles: TileMask | None = tiles
        # Lists that others hold and may write to, with the versions that the state agrees with
        # (None: not compared yet). If there is one, there are all four of keys, which determine it.
        self._shared_lists: dict[str, tuple[Tensor | None, float | None]] = {}
        # References to lists of queries read before the keys' lists changed: refused if written to.
        self._outdated_lists: list[tuple[str, Any, float | None]] = []
        self._cache_clears = TensorCache.clears  # at the last comparison with the lists
        self._batch: tuple[int, ...] = tuple(state.shape[:-2]) if state is not None else ()
        self._seq_lengths, self._block, self._mask_mod = lengths, block, mask_mod
        self._absent_lists: frozenset[str] = absent  # those that are None
        return self

    @classmethod
    def of_tiles(
        cls, tiles: TileMask, batch: tuple[int, ...], absent: frozenset[str] = frozenset()
    ) -> "BlockMask":
        """Return Headway's block mask as FlexAttention's, for this many batch rows and heads."""
        lengths = tiles.shape[2:]
        block_mask = cls.__new__(cls)._set(None, lengths, tiles.tile, tiles.mask, tiles, absent)
        block_mask._batch, block_mask._provenance = batch, tiles.decided
        return block_mask

    def _checked_provenance(self) -> Provenance | Unbuilt | None:
        """Return the provenance; raise if a tensor of the mask was written to since, or may be."""
        if isinstance(self._provenance, Unbuilt) and not torch.compiler.is_compiling():
            if self._tiles is None:
                refuse_unknown_time()
            self._known_state()
        if self._provenance is not None:
            self._provenance.check()
        return self._provenance

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: it shares no lists, and derives its provenance anew."""
        self._apply_list_writes()
        derived = self._checked_provenance() is not None
        return vars(self) | {"_shared_lists": {}, "_outdated_lists": [], "_provenance": derived}

    def __setstate__(self, state: dict) -> None:
        provenance = Provenance.of(state["_mask_mod"]) if state.pop("_provenance") else None
        self.__dict__.update(state, _provenance=provenance)

    def _with(self, state: Tensor, lengths: tuple[int, int], mask_mod: MaskFn) -> "BlockMask":
        """Return a block mask of other blocks; with the same mask, of the same provenance."""
        block_mask = BlockMask.__new__(BlockMask)._set(
            state, lengths, self._block, mask_mod, None, self._absent_lists
        )
        provenance = self._checked_provenance()
        block_mask._provenance = provenance if mask_mod is self._mask_mod else None
        return block_mask

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
        """Return a block mask of the blocks of every row: `kv_num_blocks` `(b, h, rows)` and
        `kv_indices` `(b, h, rows, columns)`, of which each row's first `kv_num_blocks` are read.

        Without `compute_q_blocks` the lists of queries are None; nothing else changes.
        """
        block = block_pair(BLOCK_SIZE)
        if seq_lengths is None:
            rows, cols = kv_indices.shape[-2:] if kv_indices.dim() > 1 else (0, 0)  # refused below
            seq_lengths = rows * block[0], cols * block[1]
        block_mask = cls(
            seq_lengths, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices,
            BLOCK_SIZE=block, mask_mod=noop_mask if mask_mod is None else mask_mod,
            dq_write_order=dq_write_order, dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, Tensor) else None,
        )  # fmt: skip
        if compute_q_blocks:
            absent = block_mask._absent_lists
            full = () if "full_kv_indices" in absent else Q_LISTS[2:]
            block_mask._absent_lists = absent.difference(Q_LISTS[:2], full)
        return block_mask

    # -- what it holds -----------------------------------------------------------------------------

    @property
    def tiles(self) -> TileMask:
        """Headway's block mask: pass it to `headway.attention` as `mask`."""
        self._apply_list_writes()
        if self._tiles is None:
            state = self._current_state()
            rows, cols = state.shape[2:]
            lengths, block = self._seq_lengths, self._block
            if lengths[0] > rows * block[0] or lengths[1] > cols * block[1]:
                raise ArgumentError(
                    f"seq_lengths={lengths} do not fit {rows} x {cols} blocks of {block}"
                )
            provenance = self._checked_provenance()
            depends = (False, False) if provenance is None else provenance.depends
            state = without_copies(state, depends)
            mask = in_blocks(self._mask_mod, state, block)
            used = state[:, :, : -(-lengths[0] // block[0]), : -(-lengths[1] // block[1])]
            self._tiles = from_dense(used, mask, lengths, block)
            if provenance is not None and not torch.compiler.is_compiling():
                self._tiles = replace(self._tiles, decided=Provenance.of(mask))
        return self._tiles

    def _current_state(self) -> Tensor:
        """Apply writes to lists; return the state of every block, uint8 (b, h, rows, columns)."""
        self._apply_list_writes()
        return self._known_state()

    def _own_state(self) -> Tensor:
        """Return `_current_state` with the dimensions of the lists, which need not have b and h."""
        state = self._current_state()
        return state.reshape(*self._batch, *state.shape[-2:])

    def _known_state(self) -> Tensor:
        """Return the state of every block without writes that are not applied yet."""
        state = self._state
        if state is None:
            assert self._tiles is not None
            state = mark_ragged_edges(self._tiles.to_dense(), self._seq_lengths, self._block)
            state = state.expand(*self._batch, -1, -1)
            if not torch.compiler.is_compiling():  # the tiles may be built later
                self._state, self._provenance = state, self._tiles.decided
        return state.reshape(*[1] * (4 - state.dim()), *state.shape) if state.dim() < 4 else state

    @property
    def mask_mod(self) -> MaskFn:
        """The mask inside partial blocks."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: MaskFn) -> None:
        self._state = self._own_state()  # the tiles, which are dropped, may be all there is
        self._checked_provenance()
        self._mask_mod, self._tiles, self._provenance = mask_mod, None, None

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """`(q_len, kv_len)`."""
        return self._seq_lengths

    @seq_lengths.setter
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        self._state = self._own_state()  # the tiles, which are dropped, may be all there is
        self._seq_lengths, self._tiles = tuple(lengths), None

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """`(queries, keys)` in a block."""
        return self._block

    def _list(self, name: str) -> Tensor | None:
        """Return one of the eight lists: the shared one, or a new one, which is then shared."""
        if name in self._absent_lists:
            return None
        if name in self._shared_lists:
            return self._shared_lists[name][0]
        state = self._known_state().eq(2 if name.startswith("full") else 1)
        state = state.reshape(*self._batch, *state.shape[-2:])
        if name in Q_LISTS:
            state = state.transpose(-1, -2)
        with torch.inference_mode(False):  # tensors made in inference mode count no writes
            if name.endswith("num_blocks"):
                tensor = state.clone().sum(-1, dtype=torch.int32)
            else:
                tensor = state.to(torch.int8).argsort(dim=-1, descending=True, stable=True).int()
        if not torch.compiler.is_compiling():
            self._shared_lists[name] = tensor, tensor._version
            for other in KV_LISTS:
                self._list(other)
        return tensor

    def _apply_list_writes(self) -> None:
        """Update the state from lists that were set or written to; refuse lists that disagree."""
        if not self._shared_lists and not self._outdated_lists:
            return
        self._outdated_lists = [entry for entry in self._outdated_lists if entry[1]() is not None]
        for name, former, version in self._outdated_lists:
            if version_of_list(former()) != version:
                raise CallError(
                    f"{name} was written to, but it had been read before a list of keys changed "
                    "and no longer belongs to this BlockMask: read it again"
                )
        shared = self._shared_lists
        changed = {name for name, (x, v) in shared.items() if v is None or version_of_list(x) != v}
        # You clear caches after writes that change no version (`x.data`): compare the contents.
        if shared and self._cache_clears != TensorCache.clears:
            self._cache_clears, before = TensorCache.clears, self._known_state()
            same = torch.equal(self._state_of_key_lists().view_as(before), before)
            changed |= (set(Q_LISTS) if same else set(KV_LISTS)) & shared.keys()
        if changed.intersection(KV_LISTS):
            state = self._state_of_key_lists()
            self._state, self._tiles, self._batch = state, None, tuple(state.shape[:-2])
            self._provenance = None
            for name in [name for name in Q_LISTS if name in shared and name not in changed]:
                tensor, version = shared.pop(name)
                self._outdated_lists.append((name, weakref.ref(tensor), version))
        if named := changed.intersection(Q_LISTS):
            lists = [self._list(name) for name in Q_LISTS]
            state = self._known_state()
            of_queries = state_of_lists(lists, state.shape[-2]).transpose(-1, -2)
            if of_queries.shape[-2:] != state.shape[-2:] or not bool((of_queries == state).all()):
                raise CallError(
                    f"{', '.join(sorted(named))}: the lists of queries name other blocks than "
                    "those of keys, which say what is visited; leave them out, or read them off "
                    "the mask: they are worked out"
                )
        for name in changed:
            shared[name] = shared[name][0], version_of_list(shared[name][0])

    def _state_of_key_lists(self) -> Tensor:
        """Return the state of every block that the lists of keys name."""
        lists: list[Any] = [self._list(name) for name in KV_LISTS]
        return state_of_lists(lists, count_columns(lists[1], self._seq_lengths, self._block))

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Lengths, the eight lists, block sizes and mask, in the original's order."""
        lists = [getattr(self, name) for name in KV_LISTS + Q_LISTS]
        lengths, block = (self._seq_lengths,), (self._block,)
        if flatten:
            (lengths,), (block,) = lengths, block
        return (*lengths, *lists, *[None] * len(WRITE_ORDERS), *block, self._mask_mod)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(b, h, q_len, kv_len)`."""
        return (*self._batch, *self._seq_lengths)

    @property
    def device(self) -> torch.device:
        """Return the device of the blocks."""
        return self._tiles.device if self._tiles is not None else self._current_state().device

    def numel(self) -> int:
        """The number of pairs."""
        return math.prod(self.shape)

    def sparsity(self) -> float:
        """The share of empty blocks, in percent."""
        state = self._current_state()
        return 100 * (1 - float((state > 0).double().mean())) if state.numel() else 100.0

    def to_dense(self) -> Tensor:
        """int32 `(b, h, rows, columns)`: 1 where a block is not empty."""
        return (self._own_state() > 0).to(torch.int32)

    def to_string(self, grid_size: tuple[int, int] | int = (20, 20), limit: int = 4) -> str:
        """The blocks of at most `limit` batches and heads as text of a limited number of lines."""
        rows = grid_size if isinstance(grid_size, int) else grid_size[0]
        state = self._current_state()
        texts = []
        for b in range(min(state.shape[0], limit)):
            for h in range(min(state.shape[1], limit)):
                part = state[b : b + 1, h : h + 1]
                one = from_dense(part, noop_mask, self._seq_lengths, self._block)
                title = f"\n{(b, h)}\n" if state.shape[0] * state.shape[1] > 1 else "\n"
                texts.append(title + one.picture(rows if rows > 0 else max(state.shape[2:])))
        return "".join(texts)

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n"
            f"{self.to_string().strip()}\n)"
        )

    # -- flat --------------------------------------------------------------------------------------

    _TENSOR_ATTRS = [*KV_LISTS, *Q_LISTS, *WRITE_ORDERS[:3]]  # noqa: RUF012
    _CONTEXT_ATTRS = ["seq_lengths", "BLOCK_SIZE", "mask_mod", WRITE_ORDERS[3]]  # noqa: RUF012

    def _dq_kv_order(self) -> None:
        """Return None: gradients are not scheduled by block masks here."""

    def _flatten_with_keys(self) -> tuple[tuple, tuple]:
        """Return the lists with their names as keys, and what `_unflatten` needs besides."""
        lists = {name: getattr(self, name) for name in self._TENSOR_ATTRS}
        absent = tuple(name for name, x in lists.items() if x is None)
        leaves = tuple((pytree.GetAttrKey(n), x) for n, x in lists.items() if x is not None)
        return leaves, (*[getattr(self, name) for name in self._CONTEXT_ATTRS], absent)

    def _flatten(self) -> tuple[tuple, tuple]:
        """Return the lists that are not None, and what `_unflatten` needs besides."""
        leaves, context = self._flatten_with_keys()
        return tuple(x for _, x in leaves), context

    @classmethod
    def _unflatten(cls, leaves: Any, context: tuple) -> "BlockMask":
        """Return the block mask that was flattened."""
        names = [name for name in cls._TENSOR_ATTRS if name not in context[-1]]
        fields: dict[str, Any] = dict.fromkeys(cls._TENSOR_ATTRS)
        fields |= zip(names, leaves, strict=True)
        return cls(**fields | dict(zip(cls._CONTEXT_ATTRS, context, strict=False)))

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
        state = self._own_state()
        at = tuple(keep(i, n) for i, n in zip(index, state.shape, strict=False))
        return self._with(state[at], self._seq_lengths, sliced_mask)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> "BlockMask":
        """Return the upper left corner of these lengths, with the same mask."""
        new_q_len = length_of("new_q_len", new_q_len)
        new_kv_len = length_of("new_kv_len", new_kv_len)
        state = self._current_state()
        rows, cols = -(-new_q_len // self._block[0]), -(-new_kv_len // self._block[1])
        if rows > state.shape[2] or cols > state.shape[3]:
            raise ArgumentError(
                f"lengths {(new_q_len, new_kv_len)} have more blocks than "
                f"{tuple(state.shape[2:])}; create a new block mask"
            )
        state = state[:, :, :rows, :cols].clone()
        return self._with(state, (new_q_len, new_kv_len), self._mask_mod)

    def partial_only(self) -> "BlockMask":
        """The same with full blocks called partial."""
        absent = self._absent_lists.union(KV_LISTS[2:], Q_LISTS[2:])
        if torch.compiler.is_compiling():
            partial = self._with(
                self._current_state().clamp(max=1), self._seq_lengths, self._mask_mod
            )
            partial._absent_lists = absent
            return partial
        tiles = self.tiles
        state = tiles.to_dense().clamp(max=1)
        only = from_dense(state, tiles.mask, tiles.shape[2:], tiles.tile)
        return BlockMask.of_tiles(replace(only, decided=tiles.decided), self._batch, absent)

    def to(self, device: torch.device | str) -> "BlockMask":
        """Return the block mask on another device; captured tensors are not moved."""
        return self._with(self._current_state().to(device), self._seq_lengths, self._mask_mod)


def _list_property(name: str) -> property:
    def get(self: BlockMask) -> Tensor | None:
        self._apply_list_writes()
        return self._list(name)

    def set_(self: BlockMask, tensor: Tensor | None) -> None:
        optional = name.startswith("full")
        if not isinstance(tensor, Tensor) and not (tensor is None and optional):
            raise CallTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        pair = name.removesuffix("num_blocks").removesuffix("indices")
        self._absent_lists = frozenset(x for x in self._absent_lists if not x.startswith(pair))
        self._list(name)  # shares all lists of keys: the state is derived from all four
        self._shared_lists[name] = tensor, None

    return property(get, set_, doc="A list of blocks, as the original has it.")


for _name in KV_LISTS + Q_LISTS:
    setattr(BlockMask, _name, _list_property(_name))
for _name in WRITE_ORDERS:
    setattr(BlockMask, _name, property(lambda _: None, lambda _, order: refuse_write_order(order)))


def refuse_sliced(mask: Any) -> None:
    """Raise for a part of a block mask, ours or PyTorch's, that was given no mask."""
    if mask.mask_mod is sliced_mask or (
        not isinstance(mask, BlockMask)
        and getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error"
    ):
        sliced_mask()


def as_tiles(mask: Any) -> TileMask | Mask:
    """Return the mask that `headway.attention` takes for a `BlockMask`, ours or PyTorch's."""
    if isinstance(mask, TileMask):
        return mask
    ours = isinstance(mask, BlockMask)
    refuse_sliced(mask)
    if ours and not mask._shared_lists:  # no one else can write to its blocks
        if mask._tiles is None and torch.compiler.is_compiling():
            return in_blocks(mask.mask_mod, mask._current_state(), mask.BLOCK_SIZE)
        return mask.tiles
    lists: list[Any] = [mask._list(x) if ours else getattr(mask, x) for x in KV_LISTS]
    lengths, block = mask.seq_lengths, mask.BLOCK_SIZE
    if is_recorded(lists[0]):
        if ours and not torch.compiler.is_compiling():
            mask._checked_provenance()
        state = state_of_lists(lists, count_columns(lists[1], lengths, block))
        return in_blocks(mask.mask_mod, state, block)
    if ours:
        return mask.tiles
    tensors = [x for x in lists if x is not None]
    # The cached tiles hold the mask function, so its id is not used again.
    key = id(mask.mask_mod), tuple(lengths), tuple(block), len(tensors)
    make = lambda: BlockMask(lengths, *lists, BLOCK_SIZE=block, mask_mod=mask.mask_mod).tiles
    return _converted.of(tensors, key, make)


_converted: TensorCache[TileMask] = TensorCache(64)


def is_block_mask(mask: Any) -> bool:
    """Return whether a mask is ours, Headway's or PyTorch's, without loading PyTorch's compiler."""
    return isinstance(mask, BlockMask | TileMask) or (
        type(mask).__name__ == "BlockMask" and hasattr(mask, "kv_indices")
    )


def _flatten_with_keys(m: BlockMask) -> Any:
    return [(pytree.GetAttrKey("tiles"), m.tiles)], (m._batch, m._absent_lists)


pytree.register_pytree_node(
    BlockMask,
    lambda m: ([m.tiles], (m._batch, m._absent_lists)),
    lambda tiles, context: BlockMask.of_tiles(next(iter(tiles)), *context),
    serialized_type_name=f"{PACKAGE}.compat.flex.BlockMask",
    flatten_with_keys_fn=_flatten_with_keys,
)
