"""`torch.nn.attention.flex_attention`: the same names, no compiler, gradients on CPU.

    from headway.compat.flex import flex_attention, create_block_mask

Beyond the original, it trains on a CPU, and takes captured tensors that are indexed several times,
trainable 0-d scalars, heads of any width, and any ratio of query to key heads. It accepts PyTorch's
own `BlockMask`. Headway's holds runs of tiles instead of lists of blocks, and is built from the
mask's formula.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import block_mask as _block_mask
from ..arguments import flag_of, shown
from ..errors import ArgumentError, HeadwayError
from ..mods import lower_mod
from ..mods.base import Both, Either, MaskFn, Mod, Not, ScoreFn
from ..mods.evaluation.pointwise import Positions, mask_at, score_at
from ..run import run, run_out
from ..types import Request, inlined_or_eager, raise_under_compile
from .errors import (
    CallAssertionError,
    CallAttributeError,
    CallError,
    CallTypeError,
    NotSupported,
    as_call_error,
)
from .flex_lists import block_pair, length_of
from .flex_mask import BlockMask as BlockMask
from .flex_mask import as_tiles, is_block_mask, refuse_sliced
from .flex_mask import noop_mask as noop_mask

__all__ = [
    "AuxOutput", "AuxRequest", "BlockMask", "and_masks", "create_block_mask", "create_mask",
    "flex_attention", "noop_mask", "or_masks",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return PyTorch's own type of options and its private names, where they are imported."""
    if name == "FlexKernelOptions" or (name.startswith("_") and not name.startswith("__")):
        from torch.nn.attention import flex_attention as original

        if hasattr(original, name):
            return getattr(original, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class AuxRequest(NamedTuple):
    """A request for results besides the output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The requested results, `(b, hq, q_len)`, float32 (float64 for float64); None for others."""

    lse: Tensor | None = None  # natural log, differentiable
    max_scores: Tensor | None = None  # the largest score of every query, without gradient


# PyTorch's keys, each also with `fwd_` or `bwd_`: how its kernels run, not what they compute.
_OPTIONS = frozenset(
    "num_warps num_stages BLOCK_M BLOCK_N BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2 PRESCALE_QK "
    "ROWS_GUARANTEED_SAFE BLOCKS_ARE_CONTIGUOUS WRITE_DQ FORCE_USE_FLEX_ATTENTION USE_TMA kpack "
    "matrix_instr_nonkdim waves_per_eu BACKEND SPLIT_KV SPARSE_Q_BLOCK_SIZE SPARSE_KV_BLOCK_SIZE "
    "IS_DIVISIBLE FLOAT32_PRECISION GQA_SHARED_HEADS HAS_FULL_BLOCKS SAFE_M_BOUNDARY "
    "SAFE_N_BOUNDARY num_consumer_groups num_buffers_warp_spec SKIP_MASK_SCORE "
    "PARTITION_SIZE".split()
)
_BACKENDS = "AUTO", "TRITON", "FLASH", "TRITON_DECODE"
_warned: set[str] = set()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFn | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Return softmax(score_mod(scale · query keyᵀ) where block_mask) value.

    **Arguments:**

    - `query` `(b, hq, l, e)`, `key` `(b, hk, s, e)`, `value` `(b, hk, s, ev)`. Key and value may
      have batch 1 if `block_mask` has the batch of `query`.
    - `score_mod`: `(score, b, h, q_idx, kv_idx) -> score`.
    - `block_mask`: from `create_block_mask`, Headway's or PyTorch's.
    - `scale`: the factor of the logits. None: `1/sqrt(e)`.
    - `enable_gqa`: must be True if `hq` differs from `hk`.
    - `return_lse`: return `(out, lse)`. `return_aux=AuxRequest(lse=True)` is the newer way.
    - `kernel_options`: PyTorch's keys are accepted and have no effect, since they tune its kernels.
      A warning names them once.
    - `return_aux`: an `AuxRequest`, Headway's or PyTorch's. The result is then `(out, AuxOutput)`.

    **Returns:** `(b, hq, l, ev)`, in the dtype of query. A query that attends to no key gets 0 and
    an lse of -inf.

    **Raises:** the types of the original: `ValueError` for shapes, dtypes and heads,
    `NotImplementedError` for tensors that are not 4-D, `RuntimeError` for a sliced mask.
    """
    enable_gqa = flag_of("enable_gqa", enable_gqa)
    return_lse = flag_of("return_lse", return_lse)
    try:
        _check(query, key, value, block_mask, enable_gqa)
    except HeadwayError as error:
        raise_under_compile(error)
        raise
    if return_lse and return_aux is not None:
        raise ArgumentError(
            "Cannot specify both return_lse and return_aux; return_aux=AuxRequest(lse=True) is the "
            "newer way"
        )
    _check_options(kernel_options, return_aux is not None and return_aux.max_scores)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    everything = block_mask is None or _holds_everywhere(block_mask)
    mask = None if everything else as_tiles(block_mask)
    request = Request(
        query, key, value, score_mod, mask, scale=scale,
        row_max=return_aux is not None and return_aux.max_scores,
    )  # fmt: skip
    if return_aux is None and not return_lse:
        return as_call_error(run_out, request)
    out, lse, _, row_max, _ = as_call_error(run, request)
    if return_aux is not None:
        return out, AuxOutput(
            lse if return_aux.lse else None, row_max if return_aux.max_scores else None
        )
    return out, lse


@inlined_or_eager
def create_block_mask(
    mask_mod: MaskFn,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Return a block mask: which blocks of a mask are empty, full or partial.

    The blocks follow from the mask's formula, so not every pair is evaluated.

    **Arguments:**

    - `mask_mod`: `(b, h, q_idx, kv_idx) -> bool`. True: the query attends to the key.
    - `B`, `H`: batch rows and query heads. None: one block mask for all.
    - `device`: None is the current accelerator, or the CPU if there is none.
    - `BLOCK_SIZE`: queries and keys in a block.
    - `separate_full_blocks`: False marks full blocks as partial.
    - `_compile`, `dq_kv_order`: accepted without effect: there is nothing to compile or to order.
    - `compute_dq_write_order`: refused, since only FlashAttention's kernels use it.

    **Raises:** `ModError` for a mask that cannot be traced.
    """
    if not torch.compiler.is_compiling() and _positional(mask_mod) != 4:  # (lowering checks it)
        raise CallAssertionError(
            "create_block_mask needs a mask of four arguments (b, h, q_idx, kv_idx), got "
            f"{shown(mask_mod)}"
        )
    if compute_dq_write_order:
        raise ArgumentError(
            "compute_dq_write_order schedules FlashAttention's kernels, which do not run here; "
            "deterministic gradients are headway.attention(..., deterministic=True)"
        )
    if not isinstance(dq_kv_order, bool):
        raise ArgumentError("dq_kv_order must be a bool")
    separate_full_blocks = flag_of("separate_full_blocks", separate_full_blocks)
    sizes = _sizes(B, H, Q_LEN, KV_LEN)
    options = {"device": _device(device), "tile": block_pair(BLOCK_SIZE)}
    tiles = as_call_error(_block_mask, mask_mod, *sizes, **options)
    blocks = BlockMask.of_tiles(tiles, sizes[:2])
    return blocks if separate_full_blocks else blocks.partial_only()


@inlined_or_eager
def create_mask(
    mod_fn: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the square of a mask, or where a score is not -inf: bool `(B, H, Q_LEN, KV_LEN)`."""
    shape = _sizes(B, H, Q_LEN, KV_LEN)
    if torch.compiler.is_compiling():
        pairs = _block_mask(mod_fn, *shape, device=_device(device), tile=1).to_dense()
        return (pairs == 2).expand(shape).clone()
    kind = {4: "mask", 5: "score"}.get(_positional(mod_fn))
    if kind is None:
        raise CallAssertionError(f"Expected 4 or 5 positional arguments, got {mod_fn}")
    graph, captured = lower_mod(kind, mod_fn, torch.float32)
    on = _device(device)
    positions = Positions(*[
        torch.arange(n, device=on).view([-1 if dim == d else 1 for d in range(4)])
        for dim, n in enumerate(shape)
    ])  # fmt: skip
    if kind == "mask":
        return mask_at(graph, captured, positions).expand(shape).clone()
    every = torch.ones(shape, dtype=torch.bool, device=on)
    zeros = torch.zeros(shape, device=on, dtype=torch.float32)
    (score,), _ = score_at(graph, captured, positions, zeros, every)
    return (~torch.isneginf(torch.as_tensor(score, device=on))).expand(shape).clone()


def and_masks(*mask_mods: MaskFn) -> MaskFn:
    """Return a mask of the pairs that every mask keeps."""
    return _combined(Both, mask_mods)


def or_masks(*mask_mods: MaskFn) -> MaskFn:
    """Return a mask of the pairs that any mask keeps."""
    return _combined(Either, mask_mods)


def _combined(kind: type, mask_mods: tuple[MaskFn, ...]) -> MaskFn:
    if not all(callable(mask) for mask in mask_mods):
        raise CallError(f"All inputs should be callable mask_mods: {mask_mods}")
    combined, *rest = mask_mods or (noop_mask if kind is Both else Not(noop_mask),)
    if not rest and not isinstance(combined, Mod):  # a name that it is given is not the function's

        def and_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return combined(b, h, q_idx, kv_idx)

        return and_mask
    for mask in rest:
        combined = kind(combined, mask)
    return combined


def _device(device: torch.device | str | None) -> torch.device | str:
    return device or torch.accelerator.current_accelerator() or "cpu"


def _sizes(
    B: int | None, H: int | None, Q_LEN: int, KV_LEN: int
) -> tuple[int, int, int, int]:  # fmt: skip
    """Return the four sizes of a mask as ints; None is 1, which holds for all."""
    return (
        length_of("B", 1 if B is None else B), length_of("H", 1 if H is None else H),
        length_of("Q_LEN", Q_LEN), length_of("KV_LEN", KV_LEN),
    )  # fmt: skip


def _positional(fn: Callable) -> int:
    """Count arguments without a default, by which FlexAttention tells scores from masks."""
    parameters = inspect.signature(fn).parameters.values()
    return sum(p.default is inspect.Parameter.empty for p in parameters)


# -- checks ---------------------------------------------------------------------------------------


def _check(query: Any, key: Any, value: Any, block_mask: Any, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise CallAttributeError(f"{name} must be a tensor, got {type(x).__name__}")
    if query.is_nested or key.is_nested or value.is_nested:
        raise NotSupported(
            "flex_attention does not take NestedTensor inputs; pack the sequences and pass "
            "block_mask=create_block_mask(headway.document(ids), ...)"
        )
    if not query.dim() == key.dim() == value.dim() == 4:
        raise (NotSupported if min(query.dim(), key.dim(), value.dim()) > 1 else ArgumentError)(
            "query, key, and value must be 4D tensors (batch, heads, length, width), got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}; add dimensions with "
            ".unsqueeze()"
        )
    hq, hk = query.shape[1], key.shape[1]
    if not enable_gqa and hq != hk:
        raise ArgumentError(
            "Expect query and key/value to have the same number of heads but got "
            f"Hq={hq} and Hkv={hk}; for grouped heads pass enable_gqa=True"
        )
    if enable_gqa and (hk == 0 or hq % hk):
        raise ArgumentError(
            f"Expect number of query heads to be a multiple of kv heads, got Hq={hq} and Hkv={hk}"
        )
    if block_mask is not None and not is_block_mask(block_mask):
        raise CallAttributeError(
            f"block_mask must be a BlockMask, got {type(block_mask).__name__}; build one with "
            "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
        )
    b = query.shape[0]
    masks_b = None if block_mask is None else block_mask.shape[0]
    if key.shape[0] != b and (key.shape[0] != 1 or masks_b != b):
        raise ArgumentError(
            "Expect query and key/value to have the same batch size, or key/value 1 and "
            f"block_mask query's, got {b}, {key.shape[0]} and {masks_b}"
        )
    if block_mask is None:
        return
    if hasattr(block_mask, "mask_mod"):
        refuse_sliced(block_mask)  # before its lengths, which are those of the whole
    lengths = (query.shape[2], key.shape[2])
    if tuple(block_mask.shape[-2:]) != lengths and not _holds_everywhere(block_mask):
        raise CallError(
            f"block_mask was created for block_mask.shape={tuple(block_mask.shape)} but got "
            f"q_len={lengths[0]} and kv_len={lengths[1]}; create one for these lengths, or crop it "
            "to its upper left corner with block_mask._adjust(q_len, kv_len)"
        )


def _holds_everywhere(block_mask: Any) -> bool:
    """PyTorch's stand-in for no mask has one block larger than any length."""
    return getattr(block_mask, "BLOCK_SIZE", None) == (1 << 30, 1 << 30)


def _check_options(options: Any, max_scores: bool) -> None:
    if not options:
        return
    if not isinstance(options, dict):
        raise CallTypeError(f"kernel_options must be a dict, got {type(options).__name__}")
    backend = options.get("BACKEND", "AUTO")
    if backend not in _BACKENDS:
        raise ArgumentError(
            f"kernel_options BACKEND={backend!r}; PyTorch has {', '.join(_BACKENDS)}"
        )
    if "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION"):
        raise CallError(
            "kernel_options BACKEND and FORCE_USE_FLEX_ATTENTION both choose a kernel; leave out "
            "FORCE_USE_FLEX_ATTENTION, which is the older one"
        )
    if backend == "FLASH" and max_scores:
        raise NotSupported(
            "kernel_options BACKEND='FLASH' does not return max_scores in PyTorch; leave it out "
            "here, where it chooses nothing"
        )
    if internal := [k for k in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX") if k in options]:
        raise CallAssertionError(
            f"kernel_options {', '.join(internal)} follow from return_aux=AuxRequest(lse=, "
            "max_scores=); leave them out"
        )
    unknown = [k for k in options if k.removeprefix("fwd_").removeprefix("bwd_") not in _OPTIONS]
    if unknown:
        raise ArgumentError(
            f"kernel_options {unknown} are not known; PyTorch's are {', '.join(sorted(_OPTIONS))}"
        )
    fresh = [key for key in options if key not in _warned]
    if fresh and not torch.compiler.is_compiling():
        _warned.update(fresh)
        warnings.warn(
            f"kernel_options {', '.join(fresh)} tune PyTorch's kernels and change nothing here",
            stacklevel=3,
        )
