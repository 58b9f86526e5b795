"""Checks of the arguments of a call: which argument, what was seen, the way out.

Everything here runs at every call, before any work; `torch.compile` traces it.
"""

import math
import sys
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .backends.base import Call
from .blocks import BlockMask, formula_of
from .dropout import draw_seed, seed_not_saved
from .errors import ArgumentError
from .mods import Captured, Mask, Score, causal
from .mods.base import Both, Either, Mod, Not, Then
from .mods.suggest import suggestion
from .operators import draw_seed_op
from .surroundings import requires_grad
from .types import (
    FLOAT8,
    KV,
    Coords,
    as_bool,
    as_int,
    as_real,
    constant_under_compile,
    fixed,
    surely,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def shown(value: Any) -> str:
    """Return a value as messages show it: a tensor's shape and dtype, a function's name."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return "a nested tensor"
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return value.__qualname__ if isinstance(value, FunctionType) else repr(value)


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Check that ranks, dtypes, devices and sizes of q, k and v fit together."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _check_types(q=q, k=k, v=v)
    if q.is_nested or k.is_nested or v.is_nested:
        check_dense(q=q, k=k, v=v)
    if not q.ndim == k.ndim == v.ndim == 4:
        name, x = next((n, x) for n, x in zip("qkv", (q, k, v), strict=True) if x.dim() != 4)
        raise ArgumentError(
            f"{name} must be (batch, heads, length, width), got {shown(x)}; "
            "add missing dimensions with .unsqueeze(), move heads with .transpose(1, 2)"
        )
    if not q.dtype == k.dtype == v.dtype:
        for name, x in zip("qkv", (q, k, v), strict=True):
            check_dtype(x.dtype, name)
        raise ArgumentError(
            f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; "
            "convert with .to()"
        )
    if not q.device == k.device == v.device:
        raise ArgumentError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}; "
            "move with .to()"
        )
    (b, hq, _, d), (b_k, hk, kv_len, d_k), (b_v, h_v, v_len, _) = q.shape, k.shape, v.shape
    if not b == b_k == b_v:
        raise ArgumentError(
            f"batch sizes differ: {_shapes(q, k, v)}; expand the smaller one with .expand()"
        )
    if hk != h_v:
        raise ArgumentError(f"k and v must have the same heads: {_shapes(q, k, v)}")
    if hk == 0 or hq % hk:
        raise ArgumentError(f"query heads must be a multiple of key heads: hq = {hq}, hk = {hk}")
    if kv_len != v_len:
        raise ArgumentError(f"k and v must have the same length: {_shapes(q, k, v)}")
    if d != d_k:
        raise ArgumentError(f"q and k must have the same width: {_shapes(q, k, v)}")


def check_dense(**tensors: Any) -> None:
    """Refuse nested tensors, given by their names."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.is_nested:
            raise ArgumentError(
                f"{name} is a nested tensor, which is not taken here (headway.attention takes q, k "
                "and v that all have layout=torch.jagged); pack its sequences into one, one after "
                "the other, and call headway.varlen_attention, or pass "
                "mask=headway.document(ids); or pad them and pass mask=headway.padding(lengths)"
            )


def check_dtype(dtype: torch.dtype, name: str = "q") -> None:
    """Check that attention is computed for a dtype."""
    if dtype not in DTYPES:
        raise ArgumentError(f"{name} is {dtype}; use float32, bfloat16, float16 or float64")


def _check_types(**tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a tensor, got {type(x).__name__}")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def scale_of(scale: Any) -> float:
    """Return the scale as a float."""
    if isinstance(scale, Tensor):
        raise ArgumentError(
            "scale is a tensor; pass a number, or multiply q by the tensor and pass scale=1.0, "
            "which trains it"
        )
    number = as_real(scale)
    # No math.isfinite: under torch.compile the number may be a symbol.
    if number is None or not -math.inf < number < math.inf:
        raise ArgumentError(f"scale={scale!r} must be a finite number, or None for 1/sqrt(d)")
    return fixed(number)


def default_scale(d: int) -> float:
    """Return the scale of heads of width d, 1/sqrt(d)."""
    return 1 / math.sqrt(d) if d else 1.0


def check_sink(sink: Any, q: Tensor) -> None:
    """Check that a sink has one float per query head, on q's device."""
    hq = q.shape[1]
    check_dense(sink=sink)
    if not isinstance(sink, Tensor) or sink.shape != (hq,) or not sink.is_floating_point():
        raise ArgumentError(f"sink must be a float tensor (hq,) = ({hq},), got {shown(sink)}")
    if sink.device != q.device:
        raise ArgumentError(f"sink is on {sink.device}, q on {q.device}; move it with .to()")


def dropout_of(dropout: Any) -> float:
    """Return the dropout as a float, a probability."""
    number = as_real(dropout)
    if number is None or not 0.0 <= number <= 1.0:
        raise ArgumentError(f"dropout={dropout!r} must be a probability, from 0 to 1")
    return fixed(number) if number else 0.0


def seed_of(seed: Any, device: torch.device) -> Tensor:
    """Return the seed as a 0-d int64 tensor, drawn if None."""
    if seed is None:
        if not is_compiling():
            return draw_seed(device)
        if _recomputes_everything():
            raise seed_not_saved("torch._functorch.config.activation_memory_budget")
        return draw_seed_op(device)
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype != torch.int64:
            raise ArgumentError(f"seed must be an integer or a 0-d int64 tensor, got {shown(seed)}")
        return seed
    number = as_int(seed)
    if number is None or not -(2**63) <= number < 2**63:
        raise ArgumentError(f"seed={seed!r} must be a 64-bit integer or a 0-d int64 tensor")
    return torch.tensor(number, dtype=torch.int64, device=device)


def _recomputes_everything() -> bool:
    """Return whether a compiled program saves nothing but its inputs for its backward."""
    config = sys.modules.get("torch._functorch.config")
    return config is not None and config.activation_memory_budget == 0


constant_under_compile(_recomputes_everything)


def check_function(kind: str, mod: Any, sizes: tuple[int, int, int, int] | None) -> None:
    """Check that a function or a value of the library can be a "score" or a "mask". The error
    suggests what to write for a call of these sizes (b, h, q_len, kv_len), where they are known."""
    if not callable(mod) or isinstance(mod, _WRONG_KIND[kind]):
        raise ArgumentError(suggestion(kind, mod, sizes))


_WRONG_KIND: dict[str, tuple[type, ...]] = {"score": (Mask, type), "mask": (Score, type)}


def count_of(name: str, number: Any, least: int = 0) -> int:
    """Return an integer that is `least` or more, as Python's int."""
    count = as_int(number)
    if count is None or count < least:
        raise ArgumentError(f"{name}={number!r} must be an integer, {least} or more")
    return count


def flag_of(name: str, flag: Any) -> bool:
    """Return a flag as Python's bool."""
    value = as_bool(flag)
    if value is None:
        raise ArgumentError(f"{name}={shown(flag)} must be True or False")
    return value


def number_of(name: str, number: Any) -> float:
    """Return a real number as a float."""
    value = as_real(number)
    if value is None:
        raise ArgumentError(f"{name}={number!r} must be a number")
    return float(value)


def check_sizes(mod: Any, b: int, h: int, q_len: int | None, kv_len: int | None) -> None:
    """Check that a value of the library captures tensors of exactly the call's sizes; a length of
    None fits any."""
    if isinstance(mod, Mod):
        mod.check_sizes(b, h, q_len, kv_len)


def check_captured(kind: str, captured: Captured, device: torch.device) -> None:
    """Check that captured tensors are on q's device, and that a mask captures none that requires
    grad."""
    for t in captured.tensors:
        if t.is_nested:
            raise ArgumentError(
                f"the {kind} captures a nested tensor; pad it, or capture its parts"
            )
        if t.device != device and t.dim():
            raise ArgumentError(
                f"the {kind} captures a tensor {shown(t)} on {t.device}, but q is on {device}; "
                "move it with .to()"
            )
        if kind == "mask" and requires_grad(t) and t.is_floating_point():
            raise ArgumentError(
                f"the mask captures a tensor {shown(t)} that requires grad, but a mask has no "
                "gradient; put it in the score, or capture tensor.detach()"
            )


def usable_device(device: Any) -> torch.device:
    """Return a device that exists here and is not "meta", with its index: "cuda" is the current
    one."""
    try:
        usable = torch.device(device)
        if usable.type != "meta":
            usable = torch.empty(0, dtype=torch.uint8, device=usable).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ArgumentError(f"device={device!r} cannot be used here: {error}") from error
    if usable.type == "meta":
        raise ArgumentError("device='meta' holds no numbers, and a block mask needs them")
    return usable


def check_coords(coords: Coords, q: Tensor, k: Tensor) -> None:
    """Check that coordinates are integers, with one position for every query and key where they are
    tensors."""
    for name in (*coords._fields[:4], "straight_below"):
        offset = getattr(coords, name)
        if isinstance(offset, bool) or not isinstance(offset, int | torch.SymInt):
            raise ArgumentError(f"coords: {name}={offset!r} must be an integer")
    (b, _, q_len, _), kv_len = q.shape, k.shape[2]
    for name, pos, length in (("q_pos", coords.q_pos, q_len), ("kv_pos", coords.kv_pos, kv_len)):
        if pos is None:
            continue
        what = f"coords: {name} must be integers ({length},) or ({b}, {length}), one for every"
        if (
            not isinstance(pos, Tensor)
            or pos.is_floating_point()
            or pos.is_complex()
            or pos.dtype == torch.bool
            or pos.dim() not in (1, 2)
            or pos.shape[-1] != length
            or (pos.dim() == 2 and pos.shape[0] != b)
        ):
            side = "query" if name == "q_pos" else "key"
            raise ArgumentError(f"{what} {side}, got {shown(pos)}")
        if pos.device != q.device:
            raise ArgumentError(
                f"coords: {name} is on {pos.device}, q on {q.device}; move it with .to()"
            )


def check_cache(q: Any, k: Any, v: Any, kv: KV) -> None:
    """Check that ranks, dtypes, devices and sizes of a KV cache and its queries fit together,
    without reading the tensors."""
    _check_types(q=q, k=k, v=v, lengths=kv.lengths)
    check_dense(q=q, k=k, v=v, lengths=kv.lengths, page_table=kv.page_table, cu_q=kv.cu_q)
    pages = kv.page_table is not None
    kv_axes = "(pages, hk, page, width)" if pages else "(b, hk, capacity, width)"
    for name, x, axes in (("q", q, "(b, hq, q_len, d)"), ("k", k, kv_axes), ("v", v, kv_axes)):
        if x.dim() != 4:
            raise ArgumentError(f"{name} must be {axes}, got {shown(x)}")
    check_dtype(q.dtype)
    if k.dtype != v.dtype or k.dtype not in (q.dtype, *FLOAT8):
        raise ArgumentError(
            f"k and v must have q's dtype, or be float8_e4m3fn or float8_e5m2, got q {q.dtype}, "
            f"k {k.dtype}, v {v.dtype}; convert q with .to(), or make the cache in that dtype"
        )
    rows = _rows(q, kv)
    _check_ints("lengths", kv.lengths, (rows,), "(b,)", q.device)
    if kv.page_table is not None:
        shape = (rows, kv.page_table.shape[1] if kv.page_table.dim() == 2 else 0)
        _check_ints("page_table", kv.page_table, shape, "(b, max_pages)", q.device)
    if not q.device == k.device == v.device:
        raise ArgumentError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}; "
            "move with .to()"
        )
    hq, hk = q.shape[1], k.shape[1]
    if k.shape[:3] != v.shape[:3]:
        raise ArgumentError(f"k and v differ before their width: {_shapes(q, k, v)}")
    if not pages and k.shape[0] != rows:
        raise ArgumentError(
            f"k and v have {k.shape[0]} rows, lengths has {rows}: {_shapes(q, k, v)}; expand the "
            "cache with .expand(), or say with page_table where the keys of every row lie"
        )
    if hk == 0 or hq % hk:
        raise ArgumentError(f"query heads must be a multiple of key heads: hq = {hq}, hk = {hk}")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"q and k must have the same width: {_shapes(q, k, v)}")


def _rows(q: Tensor, kv: KV) -> int:
    """Return how many rows `lengths`, `cu_q` and `page_table` must have."""
    if kv.cu_q is None:
        return q.shape[0]
    if q.shape[0] != 1:
        raise ArgumentError(
            f"with cu_q, q is packed: (1, hq, tokens, d), got {shown(q)}; leave cu_q out where "
            "every row has q_len queries"
        )
    rows = kv.lengths.shape[0] if kv.lengths.dim() else 0
    _check_ints("cu_q", kv.cu_q, (rows + 1,), "(b + 1,)", q.device)
    return rows


def _check_ints(name: str, x: Any, shape: tuple[int, ...], axes: str, device: torch.device) -> None:
    """Check for an int32 tensor of this shape, on q's device."""
    if not isinstance(x, Tensor) or x.dtype != torch.int32 or tuple(x.shape) != shape:
        is_int64 = getattr(x, "dtype", None) == torch.int64
        advice = "; convert it once, with .int()" if is_int64 else ""
        raise ArgumentError(
            f"{name} must be an int32 tensor {axes} with b = {shape[0] - (name == 'cu_q')}, got "
            f"{shown(x)}{advice}"
        )
    if x.device != device:
        raise ArgumentError(
            f"{name} is on {x.device}, q on {device}; keep it there: a copy waits for the device"
        )


def check_scale(name: str, scale: Any, axes: str, *shapes: tuple[int, ...]) -> None:
    """Check that a scale of keys or values is one float or a tensor of floats of these shapes."""
    fits = isinstance(scale, Tensor) and tuple(scale.shape) in ((), *shapes)
    if not fits or not scale.is_floating_point():
        raise ArgumentError(f"{name} must be a float tensor {axes}, got {shown(scale)}")


def check_results(call: Call, **results: Any) -> None:
    """Check the results of a forward, and their gradients, in the shapes of its call. `dlse`,
    `entropy` and `dentropy` may be None."""
    rows = call.q.shape[:3]
    for name, x in results.items():
        if name in ("dlse", "entropy", "dentropy") and x is None:
            continue
        of_rows = name.endswith(("lse", "entropy"))
        shape = rows if of_rows else (*rows, call.v.shape[3])
        axes = "(b, hq, q_len)" if of_rows else "(b, hq, q_len, dv)"
        check_dense(**{name: x})
        if not isinstance(x, Tensor) or x.shape != shape or not x.is_floating_point():
            got = shown(x) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be a float tensor {axes} = {tuple(shape)}, got {got}")
        if x.device != call.q.device:
            raise ArgumentError(f"{name} is on {x.device}, q on {call.q.device}; move with .to()")


def check_no_gradient(call: Call) -> None:
    """Refuse tensors that require grad in a call over a KV cache."""
    cache = call.kv
    assert cache is not None
    inputs = {
        "q": call.q, "k": call.k, "v": call.v, "sink": call.sink, "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
        **{f"a tensor {shown(t)} that the score captures": t for t in call.captured.tensors},
    }  # fmt: skip
    for name, x in inputs.items():
        if x is not None and requires_grad(x):
            raise ArgumentError(
                f"{name} requires grad, but inference has no gradient; call it under "
                "torch.inference_mode() or torch.no_grad(), or train with headway.attention"
            )


def check_global(mask: Any) -> None:
    """Refuse `causal(n)` with n > 0 over a KV cache, where query positions are global and need no
    offset."""
    for part in leaves_of(formula_of(mask)):
        if isinstance(part, causal) and part.offset > 0:
            raise ArgumentError(
                f"{part!r}: queries of a cache are at their global positions, lengths - q_len + i, "
                "so that the mask of training works as it is: write causal()"
            )


def check_offset(mask: causal, q_len: int, kv_len: int) -> None:
    """Refuse a `causal(n)` of several queries that masks nothing out: n was meant as a length."""
    n = mask.offset
    if n > 0 and surely(q_len > 1) and surely(kv_len > 0) and surely(n >= kv_len - 1):
        raise ArgumentError(
            f"mask=causal({n}) masks nothing out: each of {q_len} queries sees all {kv_len} keys, "
            "since the number shifts the diagonal. It is not a length: write causal(), or "
            "causal(kv_len - q_len) to align the last query with the last key, or mask=None to see "
            "every key"
        )


def leaves_of(mod: Any) -> list[Any]:
    """Return the values of a score or mask that combine no others, and its functions."""
    if not isinstance(mod, Both | Either | Not | Then):
        return [mod]
    return [part for name in mod.fields for part in leaves_of(getattr(mod, name))]


def check_cache_block_mask(
    mask: BlockMask, uses_query: bool, rows: int, hq: int, capacity: int
) -> None:
    """Check that a block mask covers the positions of a cache; `uses_query`: it depends on
    q_idx."""
    q_len, kv_len = mask.shape[2:]
    if kv_len != capacity:
        raise ArgumentError(
            f"the block mask is for {kv_len} keys, the cache has room for {capacity}: build it for "
            "the capacity"
        )
    if q_len != capacity and (uses_query or q_len > mask.tile[0]):
        raise ArgumentError(
            f"the block mask is for q_len={q_len}. Over a cache q_idx is a position: build it with "
            f"q_len={capacity}, or with one row of tiles and a mask that ignores q_idx"
        )
    _check_batch_and_heads(mask, rows, hq)


def _check_batch_and_heads(mask: BlockMask, rows: int, hq: int) -> None:
    b, h = mask.shape[:2]
    if (b != 1 and b != rows) or (h != 1 and h != hq):  # (Dynamo: `in` compares no symbols)
        raise ArgumentError(
            f"the block mask is for batch {b} and {h} heads, but the call has batch {rows} and "
            f"{hq} query heads; build it for these numbers, or for 1 where all rows or heads share "
            f"it. If it lists blocks of key heads, pass heads={hq} to headway.top_k_blocks"
        )
    mask.check_rows(rows, hq)


def check_block_mask(mask: BlockMask, q: Tensor, lengths: tuple[int, int]) -> None:
    """Check that a block mask has the call's sizes and device; `lengths` of queries and keys."""
    if mask.shape[2:] != lengths:
        raise ArgumentError(
            f"the block mask is for lengths {tuple(mask.shape[2:])}, but q and k have {lengths}; "
            "build one with block_mask(mask, b, h, q_len, kv_len)"
        )
    _check_batch_and_heads(mask, *q.shape[:2])
    if mask.device != q.device:
        raise ArgumentError(
            f"the block mask is on {mask.device}, q on {q.device}; move it with .to()"
        )
