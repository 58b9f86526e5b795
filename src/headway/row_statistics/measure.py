"""Statistics of the rows of P: the mean of a function of the pair, the entropy, the sink's mass.

Each is carried over the keys beside the softmax, and no square of weights is stored. Where a
backend has tangents, a mean is the tangent of lse along c, where c · f is added to the score;
elsewhere it is the gradient of c. An lse whose score has another derivative carries the gradient of
a mean: dT = P (f − E) + P f'. The entropy is a result of the forward.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..arguments import flag_of
from ..backends import order, reasons_against
from ..backends.base import CapabilityKey
from ..errors import ArgumentError
from ..mods.library.packed import PackedMask
from ..resolve import resolve
from ..run import run, run_along, run_backward
from ..sharded import any_sharded
from ..surroundings import in_forward_mode, requires_grad, transforms
from ..types import AttentionOutput, Forward, Request, Spec, constant_under_compile
from .scores import Added, Carrier, Number


def mean(request: Request, f: Number) -> Tensor:
    """Return the sum over kept keys of P f, `(b, hq, q_len)`, differentiable. A sink takes its
    share of P, and adds nothing."""
    bare, sink = _bare(request), request.sink
    with torch.no_grad():
        fixed = _detached(bare)
        lse = None if _has_tangents(fixed) else run(fixed).lse
        lse, result = _mean(fixed, lse, f)
    if not torch.is_grad_enabled():
        return result
    moved = _moved(bare._replace(sink=fixed.sink), result, f)
    if sink is None:
        return result + moved
    share = torch.where(lse == -math.inf, 0.0, (sink[:, None] - lse).exp())
    return result + moved - result * (share - share.detach())


def sink_mass(request: Request, lse: Tensor) -> Tensor:
    """Return P of the sink, or without one P of the first key of the sequence, `(b, hq, q_len)`,
    differentiable. `lse` is that of the call."""
    sink = request.sink
    if sink is not None:
        seen = lse != -math.inf
        return torch.where(seen, (sink[:, None] - torch.where(seen, lse, 0.0)).exp(), 0.0)
    # The mean of values that are 1 at first keys.
    k, mask = request.k, request.mask
    if isinstance(mask, PackedMask):
        positions = mask.pos if mask.kv_pos is None else mask.kv_pos
    else:
        positions = torch.arange(k.shape[2], device=k.device)
    # PyTorch's kernels on the CPU take values as wide as keys.
    width = max(k.shape[3], 1) if k.is_cpu else 1
    v = (positions == 0).to(k.dtype)[:, None].expand(*k.shape[:3], width)
    rounds = k.dtype.itemsize == 2 or torch.is_autocast_enabled(k.device.type)
    return run(_bare(request)._replace(v=v, partial=rounds)).out[..., 0]


def asking_for(request: Request, wanted: dict[str, Any]) -> Request:
    """Return the request with the entropy, if wanted, as a result of its forward. Refuse statistics
    where they cannot be measured: with a layout, of DTensors."""
    for name, flag in wanted.items():
        if not flag_of(name, flag):
            continue
        if request.keys is not None:
            raise ArgumentError(
                f"{name}=True does not go with layout=; measure it on a rank that has all keys"
            )
        if any_sharded(request.q, request.k, request.v):
            raise ArgumentError(f"{name}=True takes no DTensors; pass q.to_local(), k and v too")
    return request._replace(entropy=bool(wanted["entropy"]))


def with_statistics(
    request: Request, result: AttentionOutput, forward: Forward, wanted: dict[str, Any],
    view: Callable[[Tensor], Tensor] = lambda x: x,
) -> AttentionOutput:  # fmt: skip
    """Add the wanted statistics of rows to the result of a call, which is made of `forward`; `view`
    brings them into the shape of the result's."""
    if wanted["entropy"]:
        result.entropy = view(forward.entropy)
    if wanted["sink_mass"]:
        result.sink_mass = view(sink_mass(request, forward.lse))
    return result


def passes(request: Request, wanted: dict[str, Any], trained: bool) -> list[str]:
    """Return what the wanted statistics cost beside a call, which `asking_for` has returned."""
    lines = []
    if wanted["entropy"]:
        lines.append("entropy: in the forward")
    if wanted["sink_mass"]:
        gradient = "; its gradient a backward" * trained
        composed = f"a pass of its own, one forward with values of one column{gradient}"
        of_sink = "of the sink and lse, no pass"
        lines.append(f"sink_mass: {composed if request.sink is None else of_sink}")
    return lines


def _bare(request: Request) -> Request:
    """Return the request without values, dropout and what else lse does not depend on."""
    k = request.k
    return request._replace(
        v=k.new_zeros(()).expand(*k.shape[:3], 1), dropout=0.0, seed=None, max_logit=False,
        row_max=False, entropy=False, auxiliary=True,
    )  # fmt: skip


def _has_tangents(request: Request) -> bool:
    """Return whether a backend that the request allows has tangents."""
    q = request.q
    return _any_has_tangents(request.backend, q.dtype, q.device, operator.index(q.shape[3]))


def _any_has_tangents(backend: str, dtype: torch.dtype, device: torch.device, d: int) -> bool:
    spec = Spec(1.0)
    kind = CapabilityKey(dtype, device, d, 1, False, False, False, moves=True)
    return any(not reasons_against(name, spec, kind) for name in order(backend, spec, kind))


constant_under_compile(_any_has_tangents)


def _detached(request: Request) -> Request:
    q, k, sink = request.q, request.k, request.sink
    return request._replace(
        q=q.detach(), k=k.detach(), sink=None if sink is None else sink.detach()
    )


def _mean(request: Request, lse: Tensor | None, f: Number) -> tuple[Tensor, Tensor]:
    """Return lse and the mean of f, without derivatives, of a request without values. Give the lse
    where there are no tangents."""
    (b, hq, q_len, _), score = request.q.shape, request.score
    if lse is None:
        acc = torch.float64 if request.q.dtype == torch.float64 else torch.float32
        c = torch.zeros(b, hq, q_len, dtype=acc, device=request.q.device)
        added = request._replace(score=Added(c, score, f), moves=True)
        dual = run_along(added, {c: torch.ones_like(c)})
        return dual.lse, dual.lse_tangent
    c = torch.zeros_like(lse)
    added = request._replace(score=Added(c, score, f), trains=True, learned=(c,))
    out = request.q.new_zeros(b, hq, q_len, 1)
    return lse, run_backward(added, out, lse, out, torch.ones_like(lse)).captured[0]


def _moved(request: Request, mean: Tensor, f: Number) -> Tensor:
    """Return zeros whose gradient is that of the mean of f."""
    request = request._replace(score=Carrier(mean, request.score, f))
    if not _learns(request):
        return torch.zeros_like(mean)
    carrier = run(request).lse
    carrier = torch.where(carrier.isinf(), 0.0, carrier)
    return carrier - carrier.detach()


def _learns(request: Request) -> bool:
    """Return whether anything that a request reads may have a derivative."""
    sharded = any_sharded(request.q, request.k, request.v)
    if is_compiling() or transforms() or in_forward_mode() or sharded:
        return True
    _, call = resolve(request)
    return any(map(requires_grad, (call.q, call.k, *call.captured.tensors)))
