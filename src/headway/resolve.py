"""Resolve a request: from the caller's arguments to the `Spec` and `Call` that a backend takes.

    Request -> normalize -> look up -> check -> lower -> choose a backend -> Spec and Call

Each step calls the layers below it, and none calls back. A call whose signature is in the call
cache ends after the second step.
"""

import operator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import call_cache
from .arguments import (
    check_block_mask,
    check_cache,
    check_cache_block_mask,
    check_captured,
    check_coords,
    check_dtype,
    check_function,
    check_global,
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
from .blocks import BlockMask, facts_under_compile, formula_of
from .distributed.context import Layouts
from .errors import HeadwayError
from .mods import causal, lower, lower_under_compile, take_apart
from .mods.base import Mod
from .mods.graph import parse
from .mods.library.constants import to_device_cached
from .mods.lowering import Lowered
from .surroundings import requires_grad
from .types import (
    FLOAT8,
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
def prepare(*arguments: Any, **options: Any) -> tuple[Spec, Call]:
    """Return the spec and the data of a call, to run it in parts or elsewhere. The arguments are
    those of `Request`."""
    return resolve(Request(*arguments, **options))


@inlined_or_eager
def resolve(request: Request) -> tuple[Spec, Call]:
    """Return the arguments of a backend's pure functions for a request, checked.

    A call whose signature is in the call cache is not checked again.
    """
    compiling = is_compiling()
    if compiling or autocast_somewhere():
        request = _autocast(request)
    if request.deterministic is False and torch.are_deterministic_algorithms_enabled():
        request = request._replace(deterministic=True)
    key = None
    if not compiling and not _is_part(request):
        key, signature, contents = call_cache.lookup(request)
        if signature is not None:
            call = call_cache.call_of(request, signature, contents)
            if signature.checks_sizes:
                check_sizes(request)
            return signature.spec, call
    request = _check(request)
    lowered = _lower_mods(request, compiling)
    call = _call_of(request, lowered.captured)
    capability, spec_values = _spec_inputs(request, call, lowered)
    spec = None
    if compiling:
        values = _cached_spec_values(*capability, *spec_values)
        spec = None if values is None else Spec(*values)
    elif not needs_self_test(call.q.device):
        # The first call on a GPU is not cached: its kernels are compiled during the self-test.
        spec = _cached_spec(*capability, *spec_values)
        if key is not None and spec is not None:
            checks = any(map(_checks_sizes, (request.score, formula_of(request.mask))))
            call = call_cache.store(
                key, spec, capability, call, (lowered.score, lowered.mask), checks
            )
    if spec is None:
        spec = _choose_backend(capability, spec_values, call)
    return spec, call


autocast_somewhere = torch._C._is_any_autocast_enabled


def _autocast(request: Request) -> Request:
    """Return the request in the autocast dtype, as PyTorch's own attention does. A KV cache stays
    as it is: q takes its dtype, or the autocast dtype over a float8 cache."""
    q, k, v = request.q, request.k, request.v
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return request
    dtype = torch.get_autocast_dtype(q.device.type)
    if type(request.keys) is not KV:
        q, k, v = [cast(x, dtype) for x in (q, k, v)]
        return request._replace(q=q, k=k, v=v)
    if not isinstance(k, Tensor) or q.dtype == torch.float64:
        return request
    return request._replace(q=q.to(dtype if k.dtype in FLOAT8 else k.dtype))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in the autocast dtype; float64 tensors and integers are not converted."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _check(request: Request) -> Request:
    """Return the request with its numbers as Python's int, float and bool.

    **Raises:** `ArgumentError` for tensors, options and block masks that do not fit together.
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
    dropout = dropout_of(dropout) if type(dropout) is not float or dropout else 0.0
    if isinstance(mask, BlockMask) and type(keys) is not KV:
        check_block_mask(mask, q, _sizes(request)[2:])  # type: ignore[arg-type]
    sizes = _sizes(request)
    for kind, mod in (("score", request.score), ("mask", formula_of(mask))):
        if mod is not None:
            check_function(kind, mod, None if None in sizes else sizes)  # type: ignore[arg-type]
    check_sizes(request)
    return request._replace(
        scale=scale, dropout=dropout,
        deterministic=flag_of("deterministic", request.deterministic),
    )  # fmt: skip


def check_sizes(request: Request) -> None:
    """Check what the key of a call leaves out (`call_cache`): its number of keys, and the integers
    and tensors' values of score and mask.

    **Raises:** `ArgumentError` for a score or mask that does not fit these sizes.
    """
    if _is_part(request):
        return
    sizes, mask = _sizes(request), formula_of(request.mask)
    if type(mask) is causal and type(request.keys) is not KV:
        check_offset(mask, *sizes[2:])  # type: ignore[arg-type]
    for mod in (request.score, mask):
        if isinstance(mod, Mod):
            mod.check_sizes(*sizes)


def _checks_sizes(mod: Any) -> bool:
    """Return whether `check_sizes` may refuse a call because of its score or mask."""
    return type(mod) is causal or (isinstance(mod, Mod) and mod.checks_sizes())


def _sizes(request: Request) -> tuple[int, int, int | None, int | None]:
    """Return b, h, q_len and kv_len over all ranks. The lengths are None over a KV cache, whose
    lengths are on the device."""
    (b, hq, q_len, _), keys = request.q.shape, request.keys
    if type(keys) is KV:
        return keys.lengths.shape[0], hq, None, None
    if type(keys) is Layouts:
        return b, hq, *keys.lengths(request.k)
    return b, hq, q_len, request.k.shape[2]


def _is_part(request: Request) -> bool:
    """Return whether q and k are a part of the tensors whose coordinates score and mask see."""
    return request.offsets is not None or type(request.keys) is Coords


def _has_tiles(mask: Any) -> bool:
    """Return whether a mask is a block mask whose tiles exist when the call is resolved."""
    return isinstance(mask, BlockMask) and facts_under_compile(mask) is None


def _lower_mods(request: Request, compiling: bool) -> LoweredMods:
    """Return the graphs of score and mask.

    **Raises:** `ModError` for a function that cannot be traced; `ArgumentError` for a block mask
    whose mask has changed since it was built.
    """
    score, mask, block_mask = request.score, request.mask, None
    captured, score_counts = Captured([], [], []), (0, 0, 0)
    lowered_score = lowered_mask = None
    if score is not None:
        lowered_score, captured = _lower("score", score, request)
        score_counts = len(captured.tensors), len(captured.ints), len(captured.floats)
    if isinstance(mask, BlockMask):
        block_mask, mask = mask, mask.mask
    if mask is not None:
        lowered_mask, mask_captured = _lower("mask", mask, request)
        if block_mask is not None and type(request.keys) is KV:
            uses_query = parse(lowered_mask.text).uses("q_idx")
            capacity = request.keys.capacity(request.k)
            check_cache_block_mask(block_mask, uses_query, *_sizes(request)[:2], capacity)
        if block_mask is not None and not compiling:  # a compiled program checks when it runs
            block_mask.check_decided(lowered_mask.text, mask_captured.tensors)
        elif block_mask is not None and (unbuilt := facts_under_compile(block_mask)) is not None:
            unbuilt.check_unwritten(mask_captured.tensors)
        captured = mask_captured if score is None else captured.and_then(mask_captured)
    return LoweredMods(lowered_score, lowered_mask, captured, score_counts)


def _lower(kind: str, mod: Any, request: Request) -> tuple[Lowered, Captured]:
    """Return the graph of a score or mask, and the values that it captures."""
    double = request.backend == "reference" or request.q.dtype == torch.float64
    device = request.q.device
    structure, functions, captured = take_apart(mod)
    dtype = "f64" if double else "f32"
    if is_compiling():
        factors = [request.q, request.k]
        lowered, captured = lower_under_compile(
            kind, structure, dtype, functions, captured, factors
        )
    else:
        lowered, function_tensors = lower(kind, structure, dtype, *functions)
        captured = captured._replace(tensors=captured.tensors + function_tensors)
    if captured.tensors:
        captured = captured._replace(
            tensors=[to_device_cached(t, device) for t in captured.tensors]
        )
        check_captured(kind, captured, device)
    return lowered, captured


def _call_of(request: Request, captured: Captured) -> Call:
    """Return the data of a request."""
    q, keys, mask = request.q, request.keys, request.mask
    coords = keys if type(keys) is Coords else WHOLE
    if request.offsets is not None:
        coords = coords._replace(b=request.offsets[0], h=request.offsets[1])
    return Call(
        q, request.k, request.v, request.sink,
        seed_of(request.seed, q.device) if request.dropout else None,
        captured,
        mask.tiles if _has_tiles(mask) else None,
        coords,
        kv=keys if type(keys) is KV else None,
    )  # fmt: skip


def _spec_inputs(
    request: Request, call: Call, lowered: LoweredMods
) -> tuple[CapabilityKey, tuple[Any, ...]]:
    """Return the properties on which a backend may refuse the call, and the values of its spec: the
    scale may be None, and the backend is the requested one."""
    mask, counts = request.mask, lowered.score_counts
    capability = CapabilityKey(*capability_key(call, counts[0]))
    if type(request.keys) is Layouts:  # on some rank at least
        capability = capability._replace(scattered=True)
    if request.trains:
        learned = capability.learned or request.learned is not None
        capability = capability._replace(trained=True, learned=learned)
    if request.moves:
        capability = capability._replace(moves=True)
    tiles = None
    if _has_tiles(mask):  # (`dynamic=True` makes symbols of numbers)
        tiles = tuple([operator.index(n) for n in (*mask.shape[:2], *mask.tile)])
    return capability, (
        request.scale, lowered.score and lowered.score.text, lowered.mask and lowered.mask.text,
        request.dropout, request.sink is not None, request.max_logit, request.row_max,
        request.entropy, request.partial, request.deterministic, tiles, request.backend, *counts,
        needs_exact_out(request, capability),
    )  # fmt: skip


def needs_exact_out(request: Request, capability: CapabilityKey) -> bool:
    """Return whether the backward's delta needs an out that is not rounded to 16 bits. A sink and
    the tensors of a score add up delta's error in all rows. On the CPU dq and dk need it as well:
    everything else there is exact."""
    if request.partial or capability.dtype.itemsize != 2 or not torch.is_grad_enabled():
        return False
    sink_trained = request.sink is not None and requires_grad(request.sink)
    # (A GPU's kernels that tests run on the CPU do what they do on a GPU.)
    on_cpu = capability.device.type == "cpu" and request.backend not in ("triton", "hopper")
    return capability.learned or sink_trained or (on_cpu and capability.trained)


def _cached_spec(*inputs: Any) -> Spec | None:
    """Return the spec for a capability key and spec values, passed one by one. None for calls that
    are refused, and while a CUDA graph is captured, when a backend may be refused for a time."""
    if inputs[_DEVICE].type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    try:
        return _spec_once(*inputs)
    except (HeadwayError, TypeError):
        return None


_DEVICE = CapabilityKey._fields.index("device")


def _cached_spec_values(*inputs: Any) -> tuple | None:
    """Return the values of `_cached_spec`: `torch.compile` keeps constants of plain types alone."""
    spec = _cached_spec(*inputs)
    return None if spec is None else tuple(spec.values)


constant_under_compile(_cached_spec_values)


@lru_cache(maxsize=4096, typed=True)
def _spec_once(*inputs: Any) -> Spec:
    count = len(CapabilityKey._fields)
    return _choose_backend(CapabilityKey(*inputs[:count]), inputs[count:])


def _choose_backend(
    capability: CapabilityKey, spec_values: tuple, call: Call | None = None
) -> Spec:
    """Return the spec with its scale and a backend that takes it. An error shows the call."""
    check_dtype(capability.dtype)
    scale, *rest = spec_values
    spec = Spec(default_scale(capability.d) if scale is None else scale, *rest)
    return replace(spec, backend=choose(spec.backend, spec, capability, call))
