"""The interface of a backend: two pure functions, `forward` and `backward`."""

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
from ..surroundings import learns
from ..types import KV, Captured, Coords, Forward, Grads, Spec, constant_under_compile, in_dtype


@dataclass(frozen=True, eq=False, slots=True)
class CallSignature:
    """What a call shares with every call that differs in the contents of its tensors alone (and in
    the numbers that kernels get as arguments). Backends find the plans they keep by it.

    - `trained`: something requires grad.
    - `picks`: of the score and of the mask: which tensors their functions capture, as (number of
      the function, number among the tensors that it sees).
    - `captured`: what is captured, where that is the same for all such calls.
    """

    spec: Spec
    trained: bool
    picks: list[tuple[tuple[int, int], ...]]
    captured: Captured | None


class Call(NamedTuple):
    """The inputs of one call, besides its `Spec`."""

    q: Tensor  # (b, hq, q_len, d); of `infer` maybe packed, see `KV`
    k: Tensor  # (b, hk, kv_len, d); of `infer` a cache, see `KV`
    v: Tensor  # (b, hk, kv_len, dv)
    sink: Tensor | None  # (hq,)
    seed: Tensor | None  # 0-d int64, where there is dropout
    captured: Captured
    tiles: Tiles | None  # of a given block mask
    coords: Coords
    signature: CallSignature | None = None  # None: unknown
    kv: KV | None = None  # of `infer`
    # Memory for results, out and lse or dq, dk and dv, which a backend may use, and then returns.
    into: tuple[Tensor, ...] = ()
    prepared: Any = None  # what the backend's `prepare` has found for this backward

    def replace(self, **fields: Any) -> "Call":
        """The call with other fields. Its signature is dropped, since it describes the old ones."""
        return self._replace(signature=None, **fields)


class CapabilityKey(NamedTuple):
    """The properties on which a backend may reject a call. Data, lengths and numbers of heads are
    not among them.
    """

    dtype: torch.dtype
    device: torch.device
    d: int
    dv: int
    trained: bool  # anything requires grad
    learned: bool  # a tensor that the score captures does
    scattered: bool  # positions are given one by one
    cache: bool = False  # k and v are a cache: `infer` runs the call
    kv_dtype: torch.dtype | None = None  # of k and v, where it is another than q's


def capability_key(call: Call, score_tensors: int) -> tuple:
    """The fields of a call's `CapabilityKey`; the score captures the first `score_tensors` tensors.
    Plain code that Dynamo can trace."""
    q, k, v, sink, _, (tensors, _, _), _, (_, _, _, _, q_pos, kv_pos, _), _, kv, *_ = call
    learned = score_tensors > 0 and any(learns(t) for t in tensors[:score_tensors])
    trained = learns(q) or learns(k) or learns(v) or learned
    trained = trained or (sink is not None and learns(sink))
    # Widths are constants of a compiled program, lengths are not.
    d, dv = operator.index(q.shape[3]), operator.index(v.shape[3])
    scattered = q_pos is not None or kv_pos is not None
    kv_dtype = None if k.dtype == q.dtype else k.dtype
    return q.dtype, q.device, d, dv, trained, learned, scattered, kv is not None, kv_dtype


# Takes the gradients of a node's inputs and outputs, returns those of its inputs (None: unchanged).
# None is no hook.
Hook = Callable[[Any, Any], Any] | None


class Backend(Protocol):
    """A backend: two pure functions, and an honest account of what it cannot do."""

    name: str

    def reasons_against(self, spec: Spec, kind: CapabilityKey) -> list[str]:
        """The reasons why it cannot run such calls, each with the way out; empty if it can."""
        ...

    def limits(self, spec: Spec) -> list[str]:
        """Where its results deviate from the contract, each with the way out."""
        ...

    def accumulates(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which scores are computed for inputs of `dtype`."""
        ...

    def forward(self, spec: Spec, call: Call) -> Forward:
        """out, lse, max_logit, row_max; what the spec does not ask for is empty."""
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
    ) -> Grads:
        """Gradients, given the merged `out` and `lse` and the gradients of both.

        The backwards of disjoint key ranges, each given the same merged out and lse, sum to the
        exact gradients. `needs` says which tensors captured by the score want one.
        """
        ...

    def prepare(self, spec: Spec, call: Call, *given: Any) -> Any:
        """Of what `backward` is given, while nothing is in the call's k and v yet: what it need not
        compute any more with this as `Call.prepared`; None where there is nothing.
        """
        ...

    def infer(self, spec: Spec, call: Call) -> Forward:
        """`forward` of a call over a cache, `call.kv`: the queries of a row are its last ones.

        out and lse have q's layout, packed where q is; max_logit is `(rows, hq)`. Rows without
        queries or keys, and queries of no row, get out 0, lse -inf (or the sink). A given block
        mask covers positions: its tiles have one row, and the mask ignores q_idx, or a row for
        every `tile_q` positions. Has no backward.
        """
        ...

    def native(self, spec: Spec, call: Call, hook: Hook) -> Tensor | None:
        """`forward(spec, call).out` by one operator of PyTorch, which also differentiates it. A
        small call then costs half, and compilers see all of it. None where there is no such
        operator, or where `forward` or `backward` is faster. `hook` is registered with the
        operator's autograd node, if there is one.
        """
        ...

    def code(self, spec: Spec, call: Call) -> str:
        """The code that runs for the score and the mask, for people to read."""
        ...


# -- what backends share --------------------------------------------------------------------------


def no_limits(spec: Spec) -> list[str]:
    """`limits` of a backend that keeps the contract."""
    return []


def no_operator(spec: Spec, call: Call, hook: Hook) -> None:
    """`native` of a backend for whose calls PyTorch has no operator."""


def nothing_prepared(*given: Any) -> None:
    """`prepare` of a backend whose backward begins with the keys."""


def graph_text(spec: Spec, call: Call) -> str:
    """`code` of a backend that evaluates graphs with torch."""
    return "\n\n".join(text for text in (spec.score, spec.mask) if text is not None)


def launched(package: str, name: str) -> Callable[..., Any]:
    """`forward`, `backward` or `prepare` of a backend whose kernels are launched by its module
    `launch`.

    That module loads Triton. It is imported when one of them is first called.
    """

    @lru_cache(maxsize=1)
    def function() -> Callable[..., Any]:
        return getattr(importlib.import_module(".launch", package), name)

    return lambda *given: function()(*given)


def graphs(spec: Spec) -> tuple[Graph | None, Graph | None]:
    """The graphs of the score and of the mask."""
    return tuple(None if text is None else parse(text) for text in (spec.score, spec.mask))  # type: ignore[return-value]


def split(spec: Spec, captured: Captured) -> tuple[Captured, Captured]:
    """The captured values of the score, and those of the mask."""
    t, n, x = spec.score_tensors, spec.score_ints, spec.score_floats
    tensors, ints, floats = captured
    return Captured(tensors[:t], ints[:n], floats[:x]), Captured(tensors[t:], ints[n:], floats[x:])


# Rounding a larger |lse| changes P by more than 128 of P's own roundings. In a row where every
# score is a large finite minimum, log n is lost beside it. A backward that has all keys of such a
# row (no `partial`) computes its largest score and its sum of exponentials again.
LARGE_LSE = 256


def plainly_masked(spec: Spec) -> bool:
    """Whether there is no mask, or `causal()`: in long sequences most tiles are full."""
    return spec.mask is None or spec.mask == causal_text()


def causal_text() -> str:
    """The text of `causal()` in `Spec.mask`, which does not depend on its offset."""
    return _lowered_causal().text


constant_under_compile(causal_text)


@lru_cache(maxsize=1)
def _lowered_causal() -> Graph:
    return lower_mod("mask", causal(), torch.float32)[0]


def delta_of(out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """delta = rowsum(dout∘out) − dlse, (b, hq, q_len) in `dtype`: the softmax's derivative
    subtracts it from dP. `dlse` None: nothing depends on lse."""
    delta = (in_dtype(dout, dtype) * in_dtype(out, dtype)).sum(-1)
    return delta if dlse is None else delta - dlse


def scatter(grad: Tensor, indices: tuple[Tensor | int, ...], values: Tensor) -> None:
    """`grad[indices] += values` with repeated indices summed; `values` is reduced over the
    dimensions that the indices do not vary along before anything is scattered."""
    if not indices:
        grad += values.sum()
        return
    flat = torch.zeros((), dtype=torch.int64, device=grad.device)
    for index, stride in zip(indices, grad.stride(), strict=True):
        flat = flat + index * stride
    flat = flat.reshape((1,) * (values.dim() - flat.dim()) + flat.shape)
    values = values.sum_to_size(torch.broadcast_shapes(flat.shape, (1,) * values.dim()))
    grad.view(-1).index_add_(0, flat.flatten(), values.flatten())
