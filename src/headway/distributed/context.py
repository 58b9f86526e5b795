"""Attention over a sequence that is cut over ranks: the pair as operators, under autograd.

    headway::cp_forward   this rank's rows of out and lse, from the keys of all ranks
    headway::cp_backward  this rank's gradients; those of sinks and captured tensors are its share

To compilers they are opaque. Which rank holds what is in a tensor, so that another layout is no
other program. The forward's last result is the call's number, by which ranks see that they are in
the backward of the same call.
"""

from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..autograd import Pair, run_over_ranks
from ..backends.base import Call
from ..errors import ArgumentError
from ..operators import (
    flat,
    grads_like,
    library,
    once_differentiable_kernel,
    register_fake,
    results_like,
)
from ..surroundings import is_batched, transforms, unwrapped
from ..types import NAMESPACE, REPLICATED_KV, ExchangeSpec, Forward, Spec
from .layout import Layout
from .shard_table import NO_MESH

_Error = TypeVar("_Error", bound=BaseException)
_INPUTS = (
    "str spec, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? seed, "
    "Tensor[] tensors, SymInt[] ints, float[] floats, Tensor[] tiles, SymInt[] offsets, "
    "Tensor q_table, Tensor kv_table"
)
library.define(f"cp_forward({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
library.define(
    f"cp_backward({_INPUTS}, Tensor number, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
    "bool[] needs) -> Tensor[]"
)


class Layouts(NamedTuple):
    """The layouts of the queries and of the keys of one call; for self-attention they are one.

    - `kv`: None where every rank has all keys and values, in the order of the sequence.
    """

    q: Layout
    kv: Layout | None

    @staticmethod
    def of(layout: Any) -> "Layouts":
        """Return the layouts of a call from its argument `layout`.

        **Raises:** `ArgumentError` for anything but a layout, or two of the same ranks, and for a
        named plan of keys that nothing moves.
        """
        pair = layout if isinstance(layout, tuple) else (layout, layout)
        if not (
            len(pair) == 2
            and isinstance(pair[0], Layout)
            and (pair[1] is None or isinstance(pair[1], Layout))
        ):
            raise ArgumentError(
                f"layout is of type {type(layout).__name__}; pass a layout, as from headway."
                "distributed.Layout.zigzag(length, group), or a pair (layout of the queries, "
                "layout of the keys). The second is None if every rank has all keys"
            )
        q, kv = pair
        if kv is None:
            if (q.plan, q.transport) != ("auto", "auto"):
                raise ArgumentError(
                    f"layout=(layout, None): every rank has all keys, which do not travel; "
                    f'layout.using({q.plan!r}, {q.transport!r}) says how: leave both "auto"'
                )
            return Layouts(q, None)
        q_place, kv_place = ((x.group_name, x.ranks, x.rank, x.node) for x in (q, kv))
        if q_place != kv_place:
            raise ArgumentError("the layouts of queries and of keys are on different meshes")
        return Layouts(q, kv)

    def lengths(self, k: Tensor) -> tuple[int, int]:
        """Return the lengths of the whole sequences of queries and of keys."""
        return self.q.length, k.shape[2] if self.kv is None else self.kv.length


def attention(
    spec: Spec, call: Call, layouts: Layouts, own_tiles: bool, draws_seed: bool
) -> Forward:  # fmt: skip
    """Return out, lse, max_logit (over all ranks' queries) and row_max of this rank's queries,
    under autograd.

    - `own_tiles`: the tiles of the block mask are the caller's lists of blocks.
    - `draws_seed`: the caller gave no seed; the one that the first rank drew is used.
    """
    if not layouts.q.group_name:
        raise ArgumentError(NO_MESH)
    *operands, _, _ = flat(call)
    trainable = [call.q, call.k, call.v, call.sink, *call.captured.tensors[: spec.score_tensors]]
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in trainable)
    if not is_compiling() and transforms() and any(
        x is not None and is_batched(unwrapped(x)) for x in trainable
    ):  # fmt: skip
        raise ArgumentError(
            "vmap over a call with layout= is not possible: ranks exchange whole batches; pass the "
            "batch as the first dimension of q, k and v"
        )
    exchange = _exchange_of(layouts, own_tiles, trains, draws_seed, call)
    tables = layouts.q.table, (layouts.kv or layouts.q).table
    return run_over_ranks(_OVER_RANKS, spec.over_ranks(exchange), *operands, *tables)


def tell_ranks(layouts: Layouts, error: BaseException) -> None:
    """Tell the other ranks of a call, unless they know, that this one raises before its exchange:
    they raise too. An interrupt waits for none of them."""
    if layouts.q.group_name and not getattr(error, "ranks_told", False):
        from .exchange import run

        with suppress(Exception):
            device, waits = layouts.q.positions.device, isinstance(error, Exception)
            run.tell_refusal(layouts.q.group_name, device, waits)


def tell_refusal(layout: Any, error: _Error) -> _Error:
    """Tell the other ranks of an argument `layout` that this one refuses the call. Return the
    error."""
    q = layout[0] if isinstance(layout, tuple) and layout else layout
    if isinstance(q, Layout) and not is_compiling():
        tell_ranks(Layouts(q, None), error)
    return error


def _exchange_of(
    layouts: Layouts, own_tiles: bool, trains: bool, draws_seed: bool, call: Call
) -> ExchangeSpec:
    """Return the part of the spec that says how keys and values are exchanged."""
    q = layouts.q
    plan, transport = q.plan, q.transport
    if layouts.kv is None:
        plan, transport = REPLICATED_KV, "collective"
    constants = tuple([not tensor.requires_grad for tensor in call.captured.tensors])
    # Dynamo may make symbols of a layout's integers; their text is a constant again.
    rank, ranks, node_size = int(str(q.rank)), int(str(q.ranks)), int(str(q.node))
    return ExchangeSpec(
        plan, transport, own_tiles, trains, draws_seed, constants,
        call.sink is not None and not call.sink.requires_grad, rank, ranks, q.group_name, node_size,
        q.inside_name, q.between_name,
    )  # fmt: skip


# -- the operators --------------------------------------------------------------------------------


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    from .exchange import run  # needs NumPy, which nothing else does that is loaded at the start

    return run.forward(*inputs)


def _backward(*inputs: Any) -> list[Tensor]:
    from .exchange import run

    return run.backward(*inputs)


def _forward_fake(spec: str, q, k, v, *rest: Any) -> tuple[Tensor, ...]:
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return *results_like(spec, q, v, q.shape[0]), number


def _backward_fake(spec: str, q, k, v, sink, seed, tensors, *rest: Any) -> list[Tensor]:
    return grads_like(spec, q, k, v, sink, tensors, rest[-1])


library.impl("cp_forward", _forward, "CompositeExplicitAutograd")
library.impl("cp_backward", _backward, "CompositeExplicitAutograd")
library.impl("cp_forward", torch.library.fallthrough_kernel, "Autograd")  # it is above
register_fake("cp_forward", _forward_fake)
register_fake("cp_backward", _backward_fake)
_ours = getattr(torch.ops, NAMESPACE)
forward_op, backward_op = _ours.cp_forward, _ours.cp_backward
library.impl("cp_backward", once_differentiable_kernel(backward_op), "Autograd")
_OVER_RANKS = Pair(forward_op, backward_op, _forward, _backward)
