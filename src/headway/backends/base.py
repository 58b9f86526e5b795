"""What every backend implements: the pair of pure functions that everything else is made of."""

import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..blocks import Tiles
from ..mods import causal, lower_mod
from ..mods.graph import Graph, parse
from ..types import Captured, Coords, Forward, Grads, Spec, constant_under_compile, in_dtype


@dataclass(frozen=True, eq=False, slots=True)
class CallSignature:
    """What calls have in common that differ in nothing but what is in their tensors (and in the
    numbers that kernels are given): by it backends find what they keep for such calls.

    - `trained`: something requires grad.
    - `picks`: of the score and of the mask: which tensors their functions capture, as which
      function and which of those that it sees.
    - `captured`: where that is the same for all of them.
    """

    spec: Spec
    trained: bool
    picks: list[tuple[tuple[int, int], ...]]
    captured: Captured | None


class Call(NamedTuple):
    """The inputs of one call, besides its `Spec`."""

    q: Tensor  # (b, hq, q_len, d)
    k: Tensor  # (b, hk, kv_len, d)
    v: Tensor  # (b, hk, kv_len, dv)
    sink: Tensor | None  # (hq,)
    seed: Tensor | None  # 0-d int64, where there is dropout
    captured: Captured
    tiles: Tiles | None  # of a given block mask
    coords: Coords
    signature: CallSignature | None = (
        None  # None: not known; so in whatever `_replace` makes of a call
    )


def _changed(call: Call, **fields: Any) -> Call:
    fields.setdefault("signature", None)
    return _replace(call, **fields)


_replace, Call._replace = Call._replace, _changed  # type: ignore[method-assign]


class CapabilityKey(NamedTuple):
    """What calls are alike in that a backend may refuse: nothing of data, lengths and heads."""

    dtype: torch.dtype
    device: torch.device
    d: int
    dv: int
    trained: bool  # anything requires grad
    learned: bool  # a tensor that the score captures does
    scattered: bool  # positions are given one by one


def capability_key(call: Call, score_tensors: int) -> tuple:
    """The fields of the call's `Kind`; the score captures the first so many tensors. Plain code
    that Dynamo can trace."""
    q, k, v, sink, _, (tensors, _, _), _, (_, _, _, _, q_pos, kv_pos), _ = call
    learned = score_tensors > 0 and any(t.requires_grad for t in tensors[:score_tensors])
    trained = q.requires_grad or k.requires_grad or v.requires_grad or learned
    trained = trained or (sink is not None and sink.requires_grad)
    # Widths are constants of a compiled program, lengths are not.
    d, dv = operator.index(q.shape[3]), operator.index(v.shape[3])
    scattered = q_pos is not None or kv_pos is not None
    return q.dtype, q.device, d, dv, trained, learned, scattered


# Gets the gradients of a node's inputs and outputs, returns those of its inputs (or None: as they
# are); None is no hook.
Hook = Callable[[Any, Any], Any] | None


class Backend(Protocol):
    """A backend: two pure functions, and an honest account of what it cannot do."""

    name: str

    def reasons_against(self, spec: Spec, kind: CapabilityKey) -> list[str]:
        """Why it cannot run such calls, each with the way out; empty if it can."""
        ...

    def limits(self, spec: Spec) -> list[str]:
        """Where its results of such calls are not those of the contract, each with the way out."""
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

    def native(self, spec: Spec, call: Call, hook: Hook) -> Tensor | None:
        """`forward(spec, call).out` by one operator of PyTorch, which differentiates it: with
        nothing of ours around it a small call costs half, and compilers see all of it. None where
        there is no such operator, or one of the pair is better. `hook` is registered with the node
        of its gradients, if there is one.
        """
        ...

    def code(self, spec: Spec, call: Call) -> str:
        """What runs for the score and the mask, for people to read."""
        ...


def graphs(spec: Spec) -> tuple[Graph | None, Graph | None]:
    """The graphs of the score and of the mask."""
    return tuple(None if text is None else parse(text) for text in (spec.score, spec.mask))  # type: ignore[return-value]


def split(spec: Spec, captured: Captured) -> tuple[Captured, Captured]:
    """What the score captures, and what the mask captures."""
    t, n, x = spec.score_tensors, spec.score_ints, spec.score_floats
    tensors, ints, floats = captured
    return Captured(tensors[:t], ints[:n], floats[:x]), Captured(tensors[t:], ints[n:], floats[x:])


# Where |lse| is larger, rounding it changes P by more than 128 roundings of its own: of rows whose
# every score is a large finite minimum, log n is lost beside it. A backward that has all keys of
# such a row (no `partial`) takes its largest score and the sum of exponentials anew.
LARGE_LSE = 256


@lru_cache
def launch_module(package: str) -> ModuleType:
    """The module `launch` of a backend, which is loaded when the backend is first run."""
    return importlib.import_module(".launch", package)


def plainly_masked(spec: Spec) -> bool:
    """Whether there is no mask, or `causal()`: most tiles are whole, where lines are long."""
    return spec.mask is None or spec.mask == causal_text()


def causal_text() -> str:
    """What `causal()` is in `Spec.mask`, whatever its offset."""
    return _lowered_causal().text


constant_under_compile(causal_text)


@lru_cache(maxsize=1)
def _lowered_causal() -> Graph:
    return lower_mod("mask", causal(), torch.float32)[0]


def delta_of(out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """delta = rowsum(dout∘out) − dlse, (b, hq, q_len) in `dtype`: what the softmax's derivative
    takes off dP. `dlse` None: nothing depends on lse."""
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
