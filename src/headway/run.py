"""Run a request, of training or of inference: local shards, `resolve`, the backend, DTensors."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.profiler import record_function

from . import autograd, forward_mode
from .arguments import DTYPES, check_no_gradient, check_results, check_tensors, scale_of
from .backends.base import Call
from .blocks import BlockMask, formula_of
from .distributed.context import Layouts, tell_ranks
from .distributed.context import attention as attention_over_ranks
from .errors import ArgumentError, BackendRefused, CapturedIndexError, HeadwayError
from .mods import causal, describe
from .mods.tracing.locations import find_line, quote
from .resolve import cast, resolve
from .sharded import Sharded, any_sharded
from .surroundings import requires_grad
from .types import (
    KV,
    NAMESPACE,
    AttentionGradients,
    Dual,
    Forward,
    Request,
    Spec,
    acc_dtype,
    in_dtype,
    inlined_or_eager,
    raise_under_compile,
)

_Result = TypeVar("_Result", Tensor, Forward, Dual)

# Each gets the request of every call that has run eagerly; none but in forwards that a
# `stability.Monitor` measures.
watchers: list[Callable[[Request], None]] = []


def watch(request: Request) -> None:
    """Show a call that has run to those who watch."""
    for watcher in tuple(watchers):
        watcher(request)


@inlined_or_eager
def run(request: Request) -> Forward:
    """Return all results of a call; those that were not requested are empty."""
    return _profile(request, _results)


@inlined_or_eager
def run_out(request: Request) -> Tensor:
    """Return the out of a call, by PyTorch's own operator where a backend prefers it."""
    return _profile(request, _out)


@inlined_or_eager
def run_along(request: Request, tangents: Any) -> Dual:
    """Return all results of a call and their tangents along those of its inputs."""
    if any(isinstance(x, Tensor) and x.is_nested for x in (request.q, request.k, request.v)):
        raise ArgumentError(
            "attention_jvp takes no nested tensors; pack them into one row, with "
            "mask=headway.document.from_cu_seqlens(...)"
        )
    if any_sharded(request.q, request.k, request.v):
        raise BackendRefused(
            "DTensors have no derivative in forward mode: pass to_local() of q, k and v, and of "
            "their tangents, where they are sharded along batch or heads"
        )
    along = lambda request, spec, call: forward_mode.attention_along(request, spec, call, tangents)
    return _profile(request, along)


def run_cpu_native(
    q: Any, k: Any, v: Any, mask: causal | None, scale: Any, dropout: Any, backend: Any
) -> Tensor | None:
    """Return the out of the most frequent call, `causal()` or no mask on the CPU, with the least
    host work and the fewest guards for `torch.compile`. None for other calls, and for those that
    `run_out` refuses."""
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu):
        return None
    if mask is not None and mask.offset != 0:
        return None
    if type(dropout) is not float or dropout != 0 or (backend != "auto" and backend != "cpu"):
        return None
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
    try:
        check_tensors(q, k, v)
    except ArgumentError:
        return None
    if q.dtype not in DTYPES:
        return None
    compiling = is_compiling()
    out = autograd.cpu_native(
        q, k, v, mask is not None, None if scale is None else scale_of(scale), compiling
    )
    if not compiling and watchers and out is not None:
        watch(Request(q, k, v, None, mask, scale, backend=backend))
    return out


_profiled = torch.autograd._profiler_enabled


@inlined_or_eager
def _profile(request: Request, compute: Callable[[Request, Spec, Call], _Result]) -> _Result:
    """Run the call, as a range of its own in a profiler's trace."""
    if is_compiling():
        return _run(request, compute)
    if _profiled():
        with record_function(f"{NAMESPACE}::attention"):
            result = _run(request, compute)
    else:
        result = _run(request, compute)
    if watchers:
        watch(request)
    return result


@inlined_or_eager
def _run(request: Request, compute: Callable[[Request, Spec, Call], _Result]) -> _Result:
    shards = None
    try:
        if not type(request.q) is type(request.k) is type(request.v) is Tensor and any_sharded(
            request.q, request.k, request.v
        ):
            shards = Sharded(request)
            request = shards.local_request(request)
        spec, call = resolve(request)
        if shards is None:
            return compute(request, spec, call)
        return shards.as_dtensors(compute(request, spec, shards.local_call(call)))
    except BaseException as error:
        if isinstance(error, HeadwayError):
            raise_under_compile(error)
        layouts = request.keys if shards is None else shards.layouts
        if type(layouts) is Layouts and not is_compiling():
            tell_ranks(layouts, error)
        if isinstance(error, TypeError) and "SymInt" in str(error):  # no key of a cache can hold it
            raise ArgumentError(
                "a length, batch or head count is symbolic outside of torch.compile and "
                "torch.export (make_fx(tracing_mode='symbolic') makes it so, and "
                "FakeTensorMode(shape_env=...)); use one of these, or trace with plain sizes"
            ) from error
        if isinstance(error, CapturedIndexError):
            raise with_place(error, request.score, request.mask) from None
        raise


def _out(request: Request, spec: Spec, call: Call) -> Tensor:
    if type(request.keys) is KV or type(request.keys) is Layouts:
        return _results(request, spec, call).out
    if forward_ad._current_level >= 0:
        return forward_mode.attention(spec, call).out
    return autograd.attention_out(spec, call)


def _results(request: Request, spec: Spec, call: Call) -> Forward:
    if type(request.keys) is KV:
        if torch.is_grad_enabled():
            check_no_gradient(call)
        return autograd.infer(spec, call)
    if type(request.keys) is Layouts:
        mask = request.mask
        custom_tiles = isinstance(mask, BlockMask) and mask.decided is None
        draws_seed = bool(request.dropout) and request.seed is None
        return attention_over_ranks(spec, call, request.keys, custom_tiles, draws_seed)
    if forward_ad._current_level >= 0:
        return forward_mode.attention(spec, call)
    return autograd.attention(spec, call)


@inlined_or_eager
def run_backward(
    request: Request, out: Any, lse: Any, dout: Any, dlse: Any, entropy: Any, dentropy: Any
) -> AttentionGradients:
    """Return the gradients of a call from the results of its forward, and their gradients."""
    if any_sharded(request.q, request.k, request.v):
        raise ArgumentError("attention_backward takes no DTensors; pass q.to_local(), k and v too")
    if request.dropout and request.seed is None:
        raise ArgumentError("dropout needs the seed of the forward: pass seed= to both")
    if (entropy is None) != (dentropy is None):
        raise ArgumentError("entropy and dentropy go together: pass both, or neither")
    request = request._replace(entropy=entropy is not None)
    try:
        spec, call = resolve(request)
    except CapturedIndexError as error:
        raise with_place(error, request.score, request.mask) from None
    check_results(call, out=out, lse=lse, dout=dout, dlse=dlse, entropy=entropy, dentropy=dentropy)
    acc = acc_dtype(call.q.dtype)
    captured, learned = call.captured.tensors[: spec.score_tensors], request.learned
    needs = [
        requires_grad(t) and t.is_floating_point()
        if learned is None
        else any(t is other for other in learned)
        for t in captured
    ]
    dlse = None if dlse is None else in_dtype(dlse, acc)
    if dentropy is not None:  # dT = −P (log P + H): the part of H is one of lse
        dentropy, of_lse = in_dtype(dentropy, acc), in_dtype(dentropy * entropy, acc)
        dlse = -of_lse if dlse is None else dlse - of_lse
    dq, dk, dv, *others = autograd.gradients(
        spec, call, in_dtype(out, acc), in_dtype(lse, acc), in_dtype(dout, call.q.dtype), dlse,
        tuple(needs), dentropy,
    )  # fmt: skip
    dsink = None if call.sink is None else others.pop(0)
    return AttentionGradients(dq, dk, dv, dsink, tuple(others))


def with_place(error: CapturedIndexError, *mods: Any) -> CapturedIndexError:
    """Return the error with the file and line of the user's function that it comes from."""
    functions = [fn for m in mods if m is not None for fn in describe(formula_of(m)).functions]
    place = find_line(functions, error.line)
    return CapturedIndexError(f"{error}{quote(place)}", error.line) if place else error
