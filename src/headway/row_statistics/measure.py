"""Statistics of the rows of P: the mean of a function of the pair, the entropy, the sink's mass.

Each is carried over the keys beside the softmax, and no square of weights is stored. The entropy is
a result of the forward, and so is the mean of a number that the score observes, in its place: a
call whose values have no columns computes nothing else.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arguments import flag_of
from ..distributed.context import tell_refusal
from ..errors import ArgumentError
from ..mods.library.packed import PackedMask
from ..run import run
from ..sharded import any_sharded
from ..types import AttentionOutput, Forward, Request
from .scores import Number, Observing


def mean(request: Request, f: Number) -> Tensor:
    """Return the sum over kept keys of P f, `(b, hq, q_len)`, differentiable. A sink takes its
    share of P, and adds nothing."""
    if any_sharded(request.q, request.k, request.v):
        raise ArgumentError("expect takes no DTensors; pass q.to_local() and k.to_local()")
    bare = _bare(request)
    return run(bare._replace(score=Observing(bare.score, f), entropy=True)).entropy


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
            error = f"{name}=True does not go with layout=; measure it on a rank that has all keys"
            raise tell_refusal(request.keys, ArgumentError(error))
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
        v=k.new_empty(*k.shape[:3], 0), dropout=0.0, seed=None, max_logit=False,
        row_max=False, entropy=False, auxiliary=True,
    )  # fmt: skip
