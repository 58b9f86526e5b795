"""The public calls: check the arguments once, say what to compute, run the pair."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Never

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.profiler import record_function

from . import ops
from .arguments import (
    DTYPES,
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
    check_sizes,
    check_tensors,
    count_of,
    default_scale,
    dropout_of,
    flag_of,
    scale_of,
    seed_of,
    usable_device,
)
from .backends import choose, unchecked
from .backends.base import Call, CapabilityKey, capability_key
from .blocks import BlockMask, Decided, cached_build
from .blocks.mask import tile_of
from .call_cache import lookup, recall, remember
from .distributed.context import Layouts
from .distributed.context import attention as over_ranks
from .distributed.layout import Layout
from .errors import CapturedIndexError, HeadwayError, ModError
from .keywords import unknown_keywords
from .mods import (
    captured_under_compile,
    causal,
    describe,
    lower,
    lower_guarded,
    lower_mod,
    take_apart,
)
from .mods.base import MaskFn, Mod, ScoreFn
from .mods.constants import brought
from .mods.graph import parse
from .mods.lowering import Lowered
from .mods.places import place_of_line, quote
from .sharded import Sharded, any_sharded
from .types import (
    NAMESPACE,
    WHOLE,
    AttentionOutput,
    Captured,
    Request,
    Spec,
    constant_under_compile,
    inlined_or_eager,
)


def attention(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    v: Tensor,  # (b, hk, kv_len, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    layout: Layout | tuple[Layout, Layout | None] | None = None,
    **unknown: Never,
) -> Tensor:
    """softmax(score(scale · q kᵀ) where mask) v: exact attention for any score and mask.

    Differentiable in q, k, v, `sink`, and every tensor that `score` captures and that requires
    grad. Query head h reads key head `h // (hq // hk)`. A query that may see no key gets 0.
    DTensors may be sharded along batch and heads (see `headway.sharded`).

    **Arguments:**

    - `q`, `k`, `v`: `(b, hq, q_len, d)`, `(b, hk, kv_len, d)` and `(b, hk, kv_len, dv)`, float64,
      float32, bfloat16 or float16, of one dtype and device; any lengths and widths, `dv` may differ
      from `d`, and `hq` must be a multiple of `hk`. Computed in float32 (float64 for float64).
    - `score`: `(score, b, h, q_idx, kv_idx) -> score`, plain PyTorch on numbers that broadcast, or
      a value of the library such as `alibi(8) >> softcap(30.0)`. It sees the scaled logit.
    - `mask`: `(b, h, q_idx, kv_idx) -> bool`, True keeps the pair; a value of the library such as
      `causal() & sliding_window(1024)`; or a `BlockMask` built by `block_mask`.
    - `scale`: multiplies `q kᵀ`, once; `1/sqrt(d)` if None. 0.0 is honoured.
    - `sink`: `(hq,)`, a logit per query head that joins the softmax but has no value (GPT-OSS).
    - `dropout`: the probability to drop a pair after the softmax; the rest is scaled by 1/(1-p).
    - `seed`: of the dropout, a number or a 0-d int64 tensor; PyTorch's generator draws it if None.
    - `deterministic`: bit-equal gradients run after run.
    - `backend`: "auto", or a name from `headway.backends.NAMES`, which then never falls back.
    - `layout`: where the sequence is cut over ranks, which tokens q, k and v are: a
      `headway.distributed.Layout`, or two, of the queries and of the keys; `(layout, None)` where
      every rank has all keys and values. Score, mask and what they capture are those of the whole
      sequence, equal on all ranks. A seed that is not given is drawn on the first rank.
      Gradients of sinks and captured tensors are this rank's share: their sum over ranks is the
      whole, as of every weight. So are those of keys and values that every rank has.

    **Returns:** `(b, hq, q_len, dv)`, the dtype of q.

    **Raises:** `ArgumentError`, `ModError` (naming the line of the function), `CapturedIndexError`,
    `BackendRefused`.

    (Vaswani et al. 2017, arXiv 1706.03762; computed as in Dao et al. 2022, arXiv 2205.14135)
    """
    if unknown:
        raise unknown_keywords(attention, unknown)
    mask = mask if layout is not None else _or_none(mask, q, k)
    plainest = layout is None and score is None and sink is None and type(deterministic) is bool
    if plainest and (mask is None or type(mask) is causal):
        out = _plain(q, k, v, mask, scale, dropout, backend)
        if out is not None:
            return out
    request = Request(q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend)
    return _run(request if layout is None else request._replace(layout=layout))


def attention_with_stats(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    v: Tensor,  # (b, hk, kv_len, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    layout: Layout | tuple[Layout, Layout | None] | None = None,
    **unknown: Never,
) -> AttentionOutput:
    """`attention`, and what training needs besides: the differentiable log-sum-exp of every query
    and the largest logit of every head (see `AttentionOutput`); with a `layout`, of the queries of
    all ranks.

    The same arguments and errors as `attention`.
    """
    if unknown:
        raise unknown_keywords(attention_with_stats, unknown)
    mask = mask if layout is not None else _or_none(mask, q, k)
    request = Request(
        q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend, True
    )
    out, lse, max_logit, _ = _run(request if layout is None else request._replace(layout=layout))
    return AttentionOutput(out, lse, max_logit)


def block_mask(
    mask: MaskFn,
    b: int | None,
    h: int | None,
    q_len: int,
    kv_len: int,
    *,
    device: torch.device | str | None = None,
    tile: int | tuple[int, int] = (128, 128),
    **unknown: Never,
) -> BlockMask:
    """Decide once which tiles of a mask are empty, full or partial, to use it in many calls.

    **Arguments:**

    - `mask`: a function or a value of the library, as for `attention`.
    - `b`, `h`: batch and query heads; 1, or None, broadcasts, for a mask that ignores them. (A call
      of more rows or heads refuses a block mask whose mask depends on them.)
    - `q_len`, `kv_len`: lengths; no multiple of the tile is needed.
    - `device`: of the result; that of the tensors that the mask captures, or the CPU, if None.
    - `tile`: queries and keys in a tile; a number stands for both.

    **Returns:** a `BlockMask`; its size follows the runs of live tiles, not `q_len * kv_len`. The
    tiles of the same mask, sizes, device and unwritten tensors are found once: see
    `clear_block_cache`, also for the writes that go unnoticed.
    """
    if unknown:
        raise unknown_keywords(block_mask, unknown)
    sizes = (
        count_of("b", 1 if b is None else b), count_of("h", 1 if h is None else h),
        count_of("q_len", q_len), count_of("kv_len", kv_len),
    )  # fmt: skip
    tile = tile_of(tile)
    check_function("mask", mask, sizes)
    check_sizes(mask, *sizes)
    graph, captured = lower_mod("mask", mask, torch.float32)
    if device is None:
        device = captured.tensors[0].device if captured.tensors else "cpu"
    device = usable_device(device)
    check_captured("mask", captured, device)
    decided = Decided(graph, captured.tensors)
    try:
        tiles, mask_b, mask_h = cached_build(graph, captured, sizes, tile, device)
    except CapturedIndexError as error:
        raise with_place(error, mask) from None
    return BlockMask(mask, (mask_b, mask_h, *sizes[2:]), tile, tiles, decided)


def _or_none(mask: Any, q: Any, k: Any) -> Any:
    """No mask for the `causal(n)` of a decoding step, whose one query sees every key."""
    if type(mask) is not causal or mask.offset <= 0 or is_compiling():
        return mask
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k)):
        return mask
    return None if q.shape[2] <= 1 and mask.offset >= k.shape[2] - 1 else mask


def _plain(
    q: Any, k: Any, v: Any, mask: causal | None, scale: Any, dropout: Any, backend: Any
) -> Tensor | None:
    """The call that is made most, with as little around the kernel as there can be, and as few
    things for `torch.compile` to guard: `causal()` or no mask, on the CPU. None for any other, and
    for what `_run` refuses."""
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu):
        return None
    if mask is not None and mask.offset != 0:
        return None
    if dropout != 0 or type(dropout) is not float or (backend != "auto" and backend != "cpu"):
        return None
    if torch.is_autocast_enabled("cpu"):
        q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v)
    if q.dtype not in DTYPES:
        return None
    scale = None if scale is None else scale_of(scale)
    return ops.plain(q, k, v, mask is not None, scale)


@inlined_or_eager
def _run(request: Request) -> Any:
    """The call: its out alone, or all results where the largest logits are asked for."""
    if not is_compiling() and _profiled():
        with record_function(f"{NAMESPACE}::attention"):
            return _run_request(request)
    return _run_request(request)


_profiled = torch.autograd._profiler_enabled


@inlined_or_eager
def _run_request(request: Request) -> Any:
    sharded = None
    if not type(request.q) is type(request.k) is type(request.v) is Tensor and any_sharded(
        request.q, request.k, request.v
    ):
        sharded = Sharded(request)
        request = sharded.local_request(request)
    spec, call = resolve(request)
    run = ops.attention if request.max_logit else ops.output
    if request.layout is not None:
        run = partial(_over_ranks, request)
    try:
        if sharded is None:
            return run(spec, call)
        return sharded.whole(run(spec, sharded.local_call(call)))
    except CapturedIndexError as error:
        raise with_place(error, request.score, request.mask) from None


def _over_ranks(request: Request, spec: Spec, call: Call) -> Any:
    """The call where the sequence is cut over ranks."""
    given = request.mask
    own_tiles = isinstance(given, BlockMask) and given.decided is None
    drawn = bool(request.dropout) and request.seed is None
    results = over_ranks(spec, call, Layouts.of(request.layout), own_tiles, drawn)
    return results if request.max_logit else results.out


def with_place(error: CapturedIndexError, *mods: Any) -> CapturedIndexError:
    """The error with the file and line of the user's function that it comes from."""
    given = [mod.mask if isinstance(mod, BlockMask) else mod for mod in mods if mod is not None]
    functions = [fn for mod in given for fn in describe(mod).functions]
    place = place_of_line(functions, error.line)
    return CapturedIndexError(f"{error}{quote(place)}", error.line) if place else error


@inlined_or_eager
def prepare(*given: Any, **options: Any) -> tuple[Spec, Call]:
    """`resolve(Request(...))`: the spec and the data of a call, to run it in parts or elsewhere."""
    return resolve(Request(*given, **options))


@inlined_or_eager
def resolve(request: Request) -> tuple[Spec, Call]:
    """Check a request and say what to compute: the arguments of the pair of pure functions.

    A call whose signature is in the call cache is neither checked nor resolved again.
    """
    compiling = is_compiling()
    if (compiling or autocast_somewhere()) and (
        request.kv is None
        and isinstance(request.q, Tensor)
        and torch.is_autocast_enabled(request.q.device.type)
    ):
        q, k, v = _autocast(request.q, request.k, request.v)
        request = Request(q, k, v, *request[3:])
    key, contents = None, []
    layouts = None
    if request.layout is not None:
        layouts = Layouts.of(request.layout)
        request = request._replace(layout=layouts)
    if not compiling and request.coords is None:
        key, signature, contents = lookup(request)
        if signature is not None:
            seed = seed_of(request.seed, request.q.device) if request.dropout else None
            return signature.spec, recall(request, seed, signature, contents)
    q, k, v, score, mask, scale, sink = request[:7]
    kv = request.kv
    if kv is None:
        check_tensors(q, k, v)
        if request.coords is not None:
            check_coords(request.coords, q, k)
    else:
        check_cache(q, k, v, kv)
        check_global(mask)
    if type(request.deterministic) is not bool:
        request = request._replace(deterministic=flag_of("deterministic", request.deterministic))
    if scale is not None:
        scale = scale_of(scale)
    if sink is not None:
        check_sink(sink, q)
    dropout = request.dropout
    dropout = dropout_of(dropout) if dropout or type(dropout) is not float else 0.0
    lengths = q.shape[2], k.shape[2]  # of the whole
    if layouts is not None:
        lengths = layouts.lengths(k)
    seed = seed_of(request.seed, q.device) if dropout else None
    tiles, shape, blocks = None, None, None
    if isinstance(mask, BlockMask):
        tiles, shape, blocks = mask.tiles, (*mask.shape[:2], *mask.tile), mask
        if kv is None:
            check_block_mask(mask, q, lengths)
        mask = mask.mask
    if kv is None and request.coords is None and type(mask) is causal:
        check_offset(mask, *lengths)
    double = request.backend == "reference" or q.dtype == torch.float64
    whole = request.coords is None  # else q and k are a part of what the mods are made for
    sizes = (q.shape[0], q.shape[1], *lengths)
    if kv is not None:
        sizes = (kv.lengths.shape[0], q.shape[1], None, None)
    of_score, of_mask, captured, counts = None, None, None, (0, 0, 0)
    if score is not None:
        of_score, captured = _checked_and_lowered("score", score, double, q.device, sizes, whole)
        counts = len(captured.tensors), len(captured.ints), len(captured.floats)
    if mask is not None:
        of_mask, more = _checked_and_lowered("mask", mask, double, q.device, sizes, whole)
        if blocks is not None and kv is not None:
            by_query = parse(of_mask.text).uses("q_idx")
            check_cache_block_mask(blocks, by_query, *sizes[:2], kv.capacity(k))
        if blocks is not None and not compiling:  # a compiled program asks when it is run
            blocks.check_decided(of_mask.text, more.tensors)
        captured = more if captured is None else captured.and_then(more)
    if captured is None:
        captured = Captured([], [], [])
    coords = WHOLE if request.coords is None else request.coords
    call = Call(q, k, v, sink, seed, captured, tiles, coords, None, kv)
    capability = CapabilityKey(*capability_key(call, counts[0]))
    if layouts is not None:  # on some rank at least
        capability = capability._replace(scattered=True)
    asked = (
        scale, of_score and of_score.text, of_mask and of_mask.text, dropout, sink is not None,
        request.max_logit, request.row_max, request.partial, request.deterministic, shape,
        request.backend, *counts,
        capability.learned and q.dtype.itemsize == 2 and torch.is_grad_enabled(),
    )  # fmt: skip
    if compiling:
        values = _cached_spec_values(*capability, *asked)
        spec = None if values is None else Spec(*values)
    else:
        # The first call on a card goes without: its kernels are compiled while the card is checked.
        spec = None if unchecked(q.device) else _cached_spec(*capability, *asked)
        again = kv is None and isinstance(mask, Mod) and mask.checks_values()
        if key is not None and spec is not None and not again:
            call = remember(key, spec, capability, call, [of_score, of_mask])
    if spec is None:
        spec = _resolve_spec(capability, asked, call)
    return spec, call


autocast_somewhere = torch._C._is_any_autocast_enabled


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


def _checked_and_lowered(
    kind: str, mod: Any, double: bool, device: torch.device, sizes: tuple, whole: bool
) -> tuple[Lowered, Captured]:
    """A score or mask, checked for a call of these sizes (b, h, q_len, kv_len), of which lengths
    are None over a cache: its graph and what it captures."""
    of_library = isinstance(mod, Mod)
    check_function(kind, mod, None if None in sizes else sizes)
    structure, functions, captured = take_apart(mod)
    if whole and of_library and captured.tensors:
        mod.check_sizes(*sizes)
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
        captured = captured._replace(tensors=[brought(t, device) for t in captured.tensors])
        check_captured(kind, captured, device)
    return lowered, captured


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, attention runs in the autocast dtype, as PyTorch's own does."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )
