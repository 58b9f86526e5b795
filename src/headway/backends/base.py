"""The interface of a backend: pure functions, `forward`, `backward` and `tangent`."""

import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..blocks import Tiles
from ..mods import causal, lower_mod
from ..mods.graph import Graph, parse
from ..surroundings import has_tangent, in_forward_mode, requires_grad
from ..types import (
    KV,
    Captured,
    Coords,
    Dual,
    Forward,
    Grads,
    Spec,
    Tangents,
    constant_under_compile,
    in_dtype,
)


@dataclass(frozen=True, eq=False, slots=True)
class CallSignature:
    """The properties that calls share when they differ only in the contents of their tensors, and
    in numbers that kernels take as arguments. Backends cache their plans by it.

    - `trained`: something requires grad.
    - `capture_sources`: for the score and for the mask, the tensors that their functions capture,
      as (number of the function, number among the tensors that it sees).
    - `captured`: the captured values, where there are none.
    - `checks_sizes`: whether every call has to pass `resolve.check_sizes`.
    """

    spec: Spec
    trained: bool
    capture_sources: list[tuple[tuple[int, int], ...]]
    captured: Captured | None
    checks_sizes: bool


class Call(NamedTuple):
    """The inputs of one call, besides its `Spec`."""

    q: Tensor  # (b, hq, q_len, d); `infer` may take it packed, see `KV`
    k: Tensor  # (b, hk, kv_len, d); in `infer` a cache, see `KV`
    v: Tensor  # (b, hk, kv_len, dv)
    sink: Tensor | None  # (hq,)
    seed: Tensor | None  # 0-d int64, where there is dropout
    captured: Captured
    tiles: Tiles | None  # of the caller's block mask
    coords: Coords
    signature: CallSignature | None = None  # None if unknown
    kv: KV | None = None  # in `infer`
    # Memory for results, out and lse or dq, dk and dv. A backend that uses it returns it.
    into: tuple[Tensor, ...] = ()
    prepared: Any = None  # result of the backend's `prepare` for this backward

    def replace(self, **fields: Any) -> "Call":
        """Return the call with other fields, and no signature: that describes the old ones."""
        return self._replace(signature=None, **fields)


class CapabilityKey(NamedTuple):
    """The properties for which a backend may reject a call. Data, lengths and numbers of heads are
    not among them.
    """

    dtype: torch.dtype
    device: torch.device
    d: int
    dv: int
    trained: bool  # anything requires grad
    learned: bool  # a tensor that the score captures requires grad
    scattered: bool  # the caller gave positions one by one
    cache: bool = False  # k and v are a cache: `infer` runs the call
    kv_dtype: torch.dtype | None = None  # of k and v, if not q's
    moves: bool = False  # an input has a tangent: `tangent` runs the call


def capability_key(call: Call, score_tensors: int) -> tuple:
    """Return the fields of a call's `CapabilityKey`; the score captures the first `score_tensors`
    tensors. Dynamo traces this code."""
    q, k, v, sink, coords = call.q, call.k, call.v, call.sink, call.coords
    learned = score_tensors > 0 and any(
        requires_grad(t) for t in call.captured.tensors[:score_tensors]
    )
    trained = requires_grad(q) or requires_grad(k) or requires_grad(v) or learned
    trained = trained or (sink is not None and requires_grad(sink))
    # Widths are constants of a compiled program, lengths are not.
    d, dv = operator.index(q.shape[3]), operator.index(v.shape[3])
    scattered = coords.q_pos is not None or coords.kv_pos is not None
    kv_dtype = None if k.dtype == q.dtype else k.dtype
    moves = False
    if in_forward_mode():
        inputs = [q, k, v, sink, *call.captured.tensors]
        moves = any([x is not None and has_tangent(x) for x in inputs])  # noqa: C419
    return (
        q.dtype, q.device, d, dv, trained, learned, scattered, call.kv is not None, kv_dtype, moves,
    )  # fmt: skip


# A hook takes the gradients of a node's inputs and outputs, and returns those of its inputs; None
# leaves them unchanged. A `Hook` of None registers nothing.
Hook = Callable[[Any, Any], Any] | None


class Backend(Protocol):
    """A backend: pure functions, and an account of the calls that it cannot run."""

    name: str

    def reasons_against(self, spec: Spec, kind: CapabilityKey) -> list[str]:
        """Return the reasons why it cannot run such calls, each with a way out; empty if it can."""
        ...

    def limits(self, spec: Spec) -> list[str]:
        """Return where its results deviate from the contract, each with a way out."""
        ...

    def accumulates(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which scores are computed for inputs of `dtype`."""
        ...

    def forward(self, spec: Spec, call: Call) -> Forward:
        """Return out, lse, max_logit, row_max, entropy; those that the spec does not ask for are
        empty. Where the score observes a number f (`observes`), E = Σ P f is in entropy's place.
        """
        ...

    def backward(
        self,
        spec: Spec,
        call: Call,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        needs: tuple[bool, ...],
        dentropy: Tensor | None = None,
    ) -> Grads:
        """Return the gradients, given the merged `out` and `lse` and the gradients of both.

            dT = P (dP∘K − delta − dentropy log P)      delta = rowsum(dout∘out) − dlse

        `dentropy` is None if nothing depends on the entropy H; else dlse has −dentropy H in it.
        Where the score observes f, f is in the place of −log P, and dS has P dentropy f' in it.
        The backwards of disjoint key ranges, each given the same merged out and lse, sum to the
        exact gradients. `needs` says which tensors captured by the score need one.
        """
        ...

    def tangent(self, spec: Spec, call: Call, along: Tangents) -> Dual:
        """Return `forward`, and how out, lse and entropy move along the tangents, in one pass:

            S' = scale (q' kᵀ + q k'ᵀ)      T' = score'(S) S' + Σ (derivative by g) g'
            lse' = Σ P T' + P_sink sink'    out' = (P (T' − lse')∘K) v + (P∘K) v'
            entropy' = −Σ P log P (T' − lse') − P_sink log P_sink (sink' − lse')
            or, where the score observes f, Σ P (f (T' − lse') + f')

        g are the numbers that the score reads of captured tensors, K = keep/(1-p). A pair that is
        not kept counts nothing, whatever T' is there; a query that sees nothing gets 0 and 0. With
        `partial`, those of disjoint keys add up as `merge` differentiated says.
        """
        ...

    def prepare(self, spec: Spec, call: Call, *backward_args: Any) -> Any:
        """Compute the part of `backward` that reads no k and no v, before these have arrived.
        `backward` takes the result as `Call.prepared`. Return None where there is no such part.
        """
        ...

    def infer(self, spec: Spec, call: Call) -> Forward:
        """Return `forward` of a call over a cache, `call.kv`, whose queries are a row's last
        positions. It has no backward.

        out and lse have q's layout, packed where q is; max_logit is `(rows, hq)`. Rows without
        queries or keys, and queries of no row, get out 0, lse -inf (or the sink). The caller's
        block mask covers positions: it has a row of tiles for every `tile_q` positions, or a single
        one if the mask ignores q_idx.
        """
        ...

    def native(self, spec: Spec, call: Call, hook: Hook) -> Tensor | None:
        """Return `forward(spec, call).out` by one operator of PyTorch, which also differentiates
        it. A small call then costs half, and compilers see all of it. Return None where there is no
        such operator, or where `forward` or `backward` is faster. `hook` is registered with the
        operator's autograd node, if there is one.
        """
        ...

    def code(self, spec: Spec, call: Call) -> str:
        """Return the code that runs for the score and the mask, for people to read."""
        ...


# -- what backends share --------------------------------------------------------------------------


def no_limits(spec: Spec) -> list[str]:
    """Return no limits: `limits` of a backend that keeps the contract."""
    return []


def no_operator(spec: Spec, call: Call, hook: Hook) -> None:
    """Return None: `native` of a backend for whose calls PyTorch has no operator."""


def nothing_prepared(*backward_args: Any) -> None:
    """Return None: `prepare` of a backend whose backward begins with the keys."""


def graph_text(spec: Spec, call: Call) -> str:
    """Return the graphs: `code` of a backend that evaluates them with torch."""
    return "\n\n".join(text for text in (spec.score, spec.mask) if text is not None)


def launched(package: str, name: str) -> Callable[..., Any]:
    """Return a function of a backend's module `launch`, which launches its kernels.

    That module loads Triton, so it is imported when the function is first called.
    """

    @lru_cache(maxsize=1)
    def function() -> Callable[..., Any]:
        return getattr(importlib.import_module(".launch", package), name)

    return lambda *args: function()(*args)


def graphs(spec: Spec) -> tuple[Graph | None, Graph | None]:
    """Return the graphs of the score and of the mask."""
    score, mask = spec.score, spec.mask
    return None if score is None else parse(score), None if mask is None else parse(mask)


def observes(spec: Spec) -> bool:
    """Return whether the score observes a number, whose mean under P is in the entropy's place."""
    return spec.score is not None and parse(spec.score).observes


def split(spec: Spec, captured: Captured) -> tuple[Captured, Captured]:
    """Return the captured values of the score, and those of the mask."""
    t, n, f = spec.score_tensors, spec.score_ints, spec.score_floats
    tensors, ints, floats = captured
    return Captured(tensors[:t], ints[:n], floats[:f]), Captured(tensors[t:], ints[n:], floats[f:])


# Rounding a larger |lse| changes P by more than 128 of P's own roundings. In a row where every
# score is a large finite minimum, log n is lost beside it. A backward that has all keys of such a
# row (no `partial`) computes its largest score and its sum of exponentials again.
_LARGE_LSE = 256


def large_lse(lse: Tensor) -> Tensor:
    """Return in which rows the backward must not compute P from lse."""
    return (lse.abs() > _LARGE_LSE) & lse.isfinite()


def plainly_masked(spec: Spec) -> bool:
    """Return whether there is no mask, or `causal()`: in long sequences most tiles are full."""
    return spec.mask is None or spec.mask == causal_text()


def causal_text() -> str:
    """Return the text of `causal()` in `Spec.mask`, which does not depend on its offset."""
    return _lowered_causal().text


constant_under_compile(causal_text)


@lru_cache(maxsize=1)
def _lowered_causal() -> Graph:
    return lower_mod("mask", causal(), torch.float32)[0]


def delta_of(out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return delta = rowsum(dout∘out) − dlse, (b, hq, q_len) in `dtype`, which the softmax's
    derivative subtracts from dP. `dlse` is None if nothing depends on lse."""
    delta = (in_dtype(dout, dtype) * in_dtype(out, dtype)).sum(-1)
    return delta if dlse is None else delta - dlse


def scatter(grad: Tensor, indices: tuple[Tensor | int, ...], values: Tensor) -> None:
    """Add `values` to `grad[indices]`, with repeated indices summed. `values` is first reduced over
    the dimensions that the indices do not vary along."""
    if not indices:
        grad += values.sum()
        return
    flat_index = torch.zeros((), dtype=torch.int64, device=grad.device)
    for index, stride in zip(indices, grad.stride(), strict=True):
        flat_index = flat_index + index * stride
    flat_index = flat_index.reshape((1,) * (values.dim() - flat_index.dim()) + flat_index.shape)
    values = values.sum_to_size(flat_index.shape)
    grad.view(-1).index_add_(0, flat_index.flatten(), values.flatten())
