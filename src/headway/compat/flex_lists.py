"""The lists of blocks of PyTorch's `BlockMask`: sizes, orders, and the state of each block."""

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..caches import version_of
from ..errors import ArgumentError
from ..mods import Mask
from ..mods.base import MaskFn, value
from ..surroundings import capturing
from ..types import as_int
from .errors import CallAssertionError, CallError, CallTypeError

KV_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
Q_LISTS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
WRITE_ORDERS = ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")


@value
class in_blocks(Mask):
    """True in full blocks, `mask` in partial ones, False in the rest.

    - `state`: uint8 `(b or 1, h or 1, block rows, block columns)`: 0 empty, 1 partial, 2 full.
    - `_varies`: "bh", with "1" for a dimension of `state` that has size 1.
    """

    mask: MaskFn
    state: Tensor
    block_q: int
    block_kv: int
    _varies: str

    def __init__(self, mask: MaskFn, state: Tensor, block: tuple[int, int]) -> None:
        sizes = zip("bh", state.shape, strict=False)
        varies = "".join([n if size > 1 else "1" for n, size in sizes])
        self._set(mask=mask, state=state, block_q=block[0], block_kv=block[1], _varies=varies)

    def __call__(self, b, h, q_idx, kv_idx):
        at = {"b": b, "h": h, "1": 0}
        leading = [at[name] for name in self._varies]
        state = self.state[(*leading, q_idx // self.block_q, kv_idx // self.block_kv)]
        return (state == 2) | ((state == 1) & self.mask(b, h, q_idx, kv_idx))


def block_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the sizes of a block in queries and in keys; a number stands for both."""
    sizes: Any = size
    number = as_int(size)
    return (number, number) if number is not None else tuple([as_int(n) for n in sizes])


def length_of(name: str, length: Any) -> int:
    """Return a length as an int; NumPy's integers are integers."""
    number = as_int(length)
    if number is None:
        raise CallTypeError(f"{name} must be an integer, got {type(length).__name__} {length!r}")
    return number


def absent_lists(lists: Any, of_queries: Any) -> frozenset[str]:
    """Return the names of lists that a `BlockMask` is created without; refuse halves of a pair."""
    absent: set[str] = set()
    for names, tensors in ((KV_LISTS, lists), (Q_LISTS, of_queries)):
        if (tensors[2] is None) != (tensors[3] is None):
            raise CallAssertionError(f"{' and '.join(names[2:])} must be both provided or omitted")
        absent |= {name for name, x in zip(names, tensors, strict=True) if x is None}
    return frozenset(absent)


def mark_ragged_edges(state: Tensor, lengths: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Call blocks partial that lengths cut, as the original does, whatever the mask keeps."""
    for dim, length, size in zip((-2, -1), lengths, block, strict=True):
        if length % size:
            state.narrow(dim, -1, 1).clamp_(max=1)
    return state


def without_copies(state: Tensor, depends: tuple[bool, bool]) -> Tensor:
    """Return one state for all batch rows (all heads) if they are equal and the mask ignores it."""
    for dim, is_read in enumerate(depends):
        first = state.narrow(dim, 0, min(1, state.shape[dim]))
        if not is_read and state.shape[dim] > 1 and bool((state == first).all()):
            state = first
    return state


def count_columns(indices: Tensor, lengths: tuple[int, int], block: tuple[int, int]) -> int:
    """Return how many blocks of keys there are: a list need not have room for all of them."""
    return max(indices.shape[-1], -(-lengths[1] // block[1]))


def refuse_write_order(*orders: Any) -> None:
    """Refuse what schedules FlashAttention's own kernels."""
    if any(x is not None for x in orders):
        raise ArgumentError(
            "dq_write_order, dq_write_order_full and dq_kv_order schedule FlashAttention's "
            "kernels, which do not run here; leave them out: deterministic gradients are "
            "headway.attention(..., deterministic=True)"
        )


def refuse_unknown_time() -> NoReturn:
    """Refuse blocks that compiled code returned, and that may be older than what the mask reads."""
    raise ArgumentError(
        "this block mask was cut from another in compiled code, which does not say when its blocks "
        "were found; use it there, or return the whole and cut it outside, or set mask_mod if you "
        "vouch for the blocks"
    )


def state_of_lists(lists: Any, columns: int) -> Tensor:
    """Return the state of lists, uint8 (..., rows, columns): 0 empty, 1 partial, 2 full."""
    num_blocks, indices, full_num, full_indices = lists
    with torch.inference_mode(False):  # captures of CUDA graphs need a version counter
        state = _named_blocks(num_blocks, indices, columns)
        if full_num is None or full_indices is None:
            return state
        return torch.maximum(state, 2 * _named_blocks(full_num, full_indices, columns))


def _named_blocks(num_blocks: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return uint8 (..., rows, columns), 1 for the blocks that the lists name."""
    named = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    # Entries after a row's blocks are undefined: scatter them to an extra column, then drop it.
    column = torch.where(named, indices.long(), columns)
    if not is_recorded(column) and column.numel() and column.device.type != "meta":
        low, high = (int(n) for n in torch.where(named, column, 0).aminmax())
        if low < 0 or high >= columns:
            raise CallError(
                f"a list of blocks names {high if high >= columns else low}, but there are "
                f"{columns}, counted from 0"
            )
    out = torch.zeros(*column.shape[:-1], columns + 1, dtype=torch.uint8, device=column.device)
    return out.scatter(-1, column, 1)[..., :columns]


def is_recorded(lists: Tensor) -> bool:
    """Return whether a graph is recorded: the lists may name other blocks when it is replayed."""
    return torch.compiler.is_compiling() or capturing(lists.device)


def version_of_list(tensor: Tensor | None) -> float:
    """Return a number that changes with every write; NaN for tensors that count no writes, and in
    compiled code, which cannot read the counter."""
    if torch.compiler.is_compiling():
        return math.nan
    version = -1 if tensor is None else version_of(tensor)
    return math.nan if version is None else version
