"""From a request to what a backend is given: look the call up, or check it, lower it, choose.

    Request -> normalize -> look up -> check -> lower -> Spec and Call

Each step calls what lies below it and none calls back. A call whose signature is in the call cache
ends after the second.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .arguments import (
    check_block_mask,
    check_cache,
    check_cache_block_mask,
    check_captured,
    check_coords,
    check_dtype,
    check_function,
    check_global,
    check_made_outside,
    check_offset,
    check_sink,
    check_tensors,
    default_scale,
    dropout_of,
    flag_of,
    scale_of,
    seed_of,
)
from .backends import choose, needs_self_test
from .backends.base import Call, CapabilityKey, capability_key
from .blocks import BlockMask
from .call_cache import lookup, recall, remember
from .distributed.context import Layouts
from .errors import HeadwayError, ModError
from .mods import captured_under_compile, causal, lower, lower_guarded, take_apart
from .mods.base import Mod
from .mods.graph import parse
from .mods.library.constants import to_device_cached
from .mods.lowering import Lowered
from .types import (
    KV,
    WHOLE,
    Captured,
    Coords,
    Request,
    Spec,
    constant_under_compile,
    inlined_or_eager,
)


class LoweredMods(NamedTuple):
    """The graphs of a call's score and mask, and what both capture: the score's first.

    - `score_counts`: tensors, ints and floats that are the score's.
    """

    score: Lowered | None
    mask: Lowered | None
    captured: Captured
    score_counts: tuple[int, int, int]


@inlined_or_eager
def prepare(*given: Any, **options: Any) -> tuple[Spec, Call]:
    """Return the spec and the data of a call, to run it in parts or elsewhere: `resolve` of
    `Request(...)`."""
    return resolve(Request(*given, **options))


@inlined_or_eager
def resolve(request: Request) -> tuple[Spec, Call]:
    """Check a request and say what to compute: the arguments of the pair of pure functions.

    A call whose signature is in the call cache is neither checked nor resolved again.
    """
    compiling = is_compiling()
    if compiling or autocast_somewhere():
        request = _autocast(request)
    key, contents = None, []
    if not compiling and _is_whole(request):
        key, signature, contents = lookup(request)
        if signature is not None:
            return signature.spec, recall(request, signature, contents)
    request = _checked(request)
    lowered = _lowered(request, compiling)
    call = _call(request, lowered.captured)
    capability, asked = _asked(request, call, lowered)
    spec = None
    if compiling:
        values = _cached_spec_values(*capability, *asked)
        spec = None if values is None else Spec(*values)
    elif not needs_self_test(call.q.device):
        # The first call on a card goes without: its kernels are compiled while the card is checked.
        spec = _cached_spec(*capability, *asked)
        if key is not None and spec is not None and not _checks_values(request):
            call = remember(key, spec, capability, call, (lowered.score, lowered.mask))
    if spec is None:
        spec = _resolve_spec(capability, asked, call)
    return spec, call


autocast_somewhere = torch._C._is_any_autocast_enabled


def _autocast(request: Request) -> Request:
    """Under autocast, attention runs in the autocast dtype, as PyTorch's own does; over a cache,
    which stays as it is, q takes the cache's dtype, or, over float8, the autocast dtype."""
    q, k, v = request.q, request.k, request.v
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return request
    dtype = torch.get_autocast_dtype(q.device.type)
    if type(request.keys) is not KV:
        q, k, v = [cast(x, dtype) for x in (q, k, v)]
        return request._replace(q=q, k=k, v=v)
    if not isinstance(k, Tensor) or q.dtype == torch.float64:
        return request
    return request._replace(q=q.to(dtype if k.dtype == torch.float8_e4m3fn else k.dtype))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as autocast has it: float64 and what is no float stay as they are."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _checked(request: Request) -> Request:
    """Return the request with its numbers as Python's own.

    **Raises:** `ArgumentError` for tensors, options and block masks that do not go together.
    """
    q, k, v, mask, keys = request.q, request.k, request.v, request.mask, request.keys
    if type(keys) is KV:
        check_cache(q, k, v, keys)
        check_global(mask)
    else:
        check_tensors(q, k, v)
        if type(keys) is Coords:
            check_coords(keys, q, k)
    scale = request.scale if request.scale is None else scale_of(request.scale)
    if request.sink is not None:
        check_sink(request.sink, q)
    dropout = request.dropout
    dropout = dropout_of(dropout) if dropout or type(dropout) is not float else 0.0
    if isinstance(mask, BlockMask) and type(keys) is not KV:
        check_block_mask(mask, q, _sizes(request)[2:])  # type: ignore[arg-type]
    if type(keys) is not KV and _is_whole(request) and type(formula := _formula(mask)) is causal:
        check_offset(formula, *_sizes(request)[2:])  # type: ignore[arg-type]
    return request._replace(
        scale=scale, dropout=dropout,
        deterministic=flag_of("deterministic", request.deterministic),
    )  # fmt: skip


def _sizes(request: Request) -> tuple[int, int, int | None, int | None]:
    """Return b, h, q_len and kv_len of the whole sequence; a cache has no lengths on the host."""
    (b, hq, q_len, _), keys = request.q.shape, request.keys
    if type(keys) is KV:
        return keys.lengths.shape[0], hq, None, None
    if type(keys) is Layouts:
        return b, hq, *keys.lengths(request.k)
    return b, hq, q_len, request.k.shape[2]


def _is_whole(request: Request) -> bool:
    """Return whether q and k are all that score and mask are made for, and no part of it."""
    return request.offsets is None and type(request.keys) is not Coords


def _formula(mask: Any) -> Any:
    """Return a mask without its tiles."""
    return mask.mask if isinstance(mask, BlockMask) else mask


def _checks_values(request: Request) -> bool:
    """Return whether a value of the library has to look at its tensors at every call."""
    mask = _formula(request.mask)
    return type(request.keys) is not KV and isinstance(mask, Mod) and mask.checks_values()


def _lowered(request: Request, compiling: bool) -> LoweredMods:
    """Return the graphs of score and mask.

    **Raises:** `ModError` for a function that cannot be traced; `ArgumentError` for what a call of
    these sizes cannot use, and for a block mask whose mask has changed since it was built.
    """
    score, mask, blocks = request.score, request.mask, None
    sizes, captured, score_counts = _sizes(request), Captured([], [], []), (0, 0, 0)
    of_score = of_mask = None
    if score is not None:
        of_score, captured = _lower("score", score, request, sizes)
        score_counts = len(captured.tensors), len(captured.ints), len(captured.floats)
    if isinstance(mask, BlockMask):
        blocks, mask = mask, mask.mask
    if mask is not None:
        of_mask, more = _lower("mask", mask, request, sizes)
        if blocks is not None and type(request.keys) is KV:
            by_query = parse(of_mask.text).uses("q_idx")
            check_cache_block_mask(blocks, by_query, *sizes[:2], request.keys.capacity(request.k))
        if blocks is not None and not compiling:  # a compiled program asks when it is run
            blocks.check_decided(of_mask.text, more.tensors)
        captured = more if score is None else captured.and_then(more)
    return LoweredMods(of_score, of_mask, captured, score_counts)


def _lower(
    kind: str, mod: Any, request: Request, sizes: tuple[int, int, int | None, int | None]
) -> tuple[Lowered, Captured]:
    """Return the graph of a score or mask and what it captures, checked for a call of these sizes
    (b, h, q_len, kv_len)."""
    double = request.backend == "reference" or request.q.dtype == torch.float64
    device = request.q.device
    check_function(kind, mod, None if None in sizes else sizes)  # type: ignore[arg-type]
    structure, functions, captured = take_apart(mod)
    if _is_whole(request) and isinstance(mod, Mod) and captured.tensors:
        mod.check_sizes(*sizes)  # type: ignore[arg-type]
    dtype = "f64" if double else "f32"
    if is_compiling():
        check_made_outside(kind, functions)
        lowered = lower_guarded(kind, structure, dtype, *functions)
        if isinstance(lowered, str):
            raise ModError(lowered)
        captured = captured_under_compile(functions, captured, lowered)
    else:
        lowered, theirs = lower(kind, structure, dtype, *functions)
        captured = captured._replace(tensors=captured.tensors + theirs)
    if captured.tensors:
        captured = captured._replace(
            tensors=[to_device_cached(t, device) for t in captured.tensors]
        )
        check_captured(kind, captured, device)
    return lowered, captured


def _call(request: Request, captured: Captured) -> Call:
    """Return the data of a request."""
    q, keys, mask = request.q, request.keys, request.mask
    coords = keys if type(keys) is Coords else WHOLE
    if request.offsets is not None:
        coords = coords._replace(b=request.offsets[0], h=request.offsets[1])
    return Call(
        q, request.k, request.v, request.sink,
        seed_of(request.seed, q.device) if request.dropout else None,
        captured,
        mask.tiles if isinstance(mask, BlockMask) else None,
        coords,
        kv=keys if type(keys) is KV else None,
    )  # fmt: skip


def _asked(
    request: Request, call: Call, lowered: LoweredMods
) -> tuple[CapabilityKey, tuple[Any, ...]]:
    """Return the properties on which a backend may refuse the call, and the values of its spec, of
    which the backend is the one that was asked for."""
    mask, counts = request.mask, lowered.score_counts
    capability = CapabilityKey(*capability_key(call, counts[0]))
    if type(request.keys) is Layouts:  # on some rank at least
        capability = capability._replace(scattered=True)
    shape = (*mask.shape[:2], *mask.tile) if isinstance(mask, BlockMask) else None
    return capability, (
        request.scale, lowered.score and lowered.score.text, lowered.mask and lowered.mask.text,
        request.dropout, request.sink is not None, request.max_logit, request.row_max,
        request.partial, request.deterministic, shape, request.backend, *counts,
        capability.learned and call.q.dtype.itemsize == 2 and torch.is_grad_enabled(),
    )  # fmt: skip


def _cached_spec(*known: Any) -> Spec | None:
    """The spec of calls of one capability key that ask for the same: worked out once, then looked
    up. None for what is refused, and while a CUDA graph is captured, when a backend may be refused
    for the time being."""
    if known[1].type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    try:
        return _resolve_once(*known)
    except (HeadwayError, TypeError):
        return None


def _cached_spec_values(*known: Any) -> tuple | None:
    """`_cached_spec` at compile time, where constants are plain values."""
    spec = _cached_spec(*known)
    return None if spec is None else tuple(spec.values)


constant_under_compile(_cached_spec_values)


@lru_cache(maxsize=4096, typed=True)
def _resolve_once(*known: Any) -> Spec:
    count = len(CapabilityKey._fields)
    return _resolve_spec(CapabilityKey(*known[:count]), known[count:])


def _resolve_spec(key: CapabilityKey, asked: tuple, call: Call | None = None) -> Spec:
    """The spec of what is asked, its values in their order, with the scale and the backend decided.
    An error shows the call."""
    check_dtype(key.dtype)
    scale, *rest = asked
    spec = Spec(default_scale(key.d) if scale is None else scale, *rest)
    return replace(spec, backend=choose(spec.backend, spec, key, call))
