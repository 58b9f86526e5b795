"""Translate ops of PyTorch on symbols to ops of a graph.

In turn an op is a view, a rule below, an op of the table `ops.OPS` by its full name and overload,
or PyTorch's own decomposition into other ops; else it is refused. Rules give what others compute as
well in terms of them: `isin` is `(a == b).any(-1)`.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS

from . import vectors
from .aten import NAMES, OpCall, full_name
from .values import flatten_arguments

if TYPE_CHECKING:
    from .tracer import Tracer

aten = torch.ops.aten


def translate(tracer: "Tracer", func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Return the symbols of an op's results; `name` is without the underscore of in-place ops."""
    call = OpCall(tracer, func, name, args, kwargs)
    if func.namespace != "aten":
        return _library_op(call)
    if func.is_view and not _is_composite(func):
        return vectors.view(call)
    if (
        "dim" in call.pending
        and name not in vectors.SHAPING
        and _is_number(call.pending.get("self"))
    ):
        written = tracer.written if name[0] == "_" else full_name(func)
        tracer.refuse(
            f"calls {written} on one number",
            "a score or mask sees one pair at a time, and attention itself computes the softmax "
            "over keys; reduce rows of captured tensors only",
        )
    rule = RULES.get(name)
    if rule is not None:
        result = rule(call)
        if result is not NotImplemented:
            return result
        call = OpCall(tracer, func, name, args, kwargs)
    op, operands = NAMES.get(name, ("", ()))
    if not operands or not call.has(operands):
        return _decompose(call)
    values = [call.take(operand) for operand in operands]
    dtype = call.dtype()
    if op == "invert" and values[0].dtype == torch.bool:
        op = "not"
    if len(values) == 2:
        return call.binary(op, values[0], values[1], dtype)
    operand = values[0].dtype if dtype == torch.bool else dtype
    return tracer.emit(op, (tracer.cast(values[0], operand),), dtype)


@lru_cache(maxsize=1024)
def _is_composite(func: Any) -> bool:
    """Return whether PyTorch itself only calls other ops in it, such as `to`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _library_op(call: OpCall) -> Any:
    """Translate an op of another library: by what it is made of, if that is Python."""
    tracer, func = call.tracer, call.func
    definition = OPDEFS.get(func.name())
    implementations = getattr(definition, "_backend_fns", {})
    if definition is None and _is_python(func) and not torch.is_grad_enabled():
        with tracer:  # it has no derivative: as what an autograd Function computes
            return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *call.args)
    if definition is None or set(implementations) != {None} or func._schema.is_mutable:
        return _decompose(call)
    if tracer.record_detach and torch.is_grad_enabled():
        tracer.needs_gradients = True
    with tracer:
        result = definition._init_fn(*call.args, **call.kwargs)
    for tensor in flatten_arguments((result,), {}):
        tracer.library_ops[id(tensor)] = full_name(func)
    return result


def _is_python(func: Any) -> bool:
    """Return whether one function of Python computes an op, on every device and without autograd:
    `torch.library.impl(op, "CompositeExplicitAutograd", function)`."""
    name, key = func.name(), "CompositeExplicitAutograd"
    registered = f"{name.replace('::', '/')}/{key}" in torch.library._impls
    others = [device for device in ("CPU", "CUDA", "Autograd") if _has_kernel(name, device)]
    return registered and not others and not func._schema.is_mutable


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def _decompose(call: OpCall) -> Any:
    from torch._decomp import decomposition_table

    tracer, func = call.tracer, call.func
    if func in decomposition_table:
        with tracer:
            return decomposition_table[func](*call.args, **call.kwargs)
    with tracer:
        result = func.decompose(*call.args, **call.kwargs)
    if result is not NotImplemented:
        return result
    flat = flatten_arguments(call.args, call.kwargs)
    if not any(map(tracer.is_symbol, flat)):
        tracer.refuse(
            f"computes {full_name(func)} on a whole captured tensor",
            "do it once, outside the function, and capture the result",
        )
    tracer.refuse(
        f"calls {full_name(func)}",
        "use pointwise arithmetic, comparisons, torch.where and indexing of captured tensors",
    )


# -- arithmetic -----------------------------------------------------------------------------------


def _where(call: OpCall) -> Any:
    if not call.has(("condition", "self", "other")):
        return NotImplemented
    condition, a, b = (call.take(name) for name in ("condition", "self", "other"))
    dtype = call.dtype()
    tracer = call.tracer
    # As they are: a graph's `where` may have numbers of another dtype.
    operands = tracer.operand(condition), tracer.operand(a), tracer.operand(b)
    return tracer.emit("where", operands, dtype)


def _relu(call: OpCall) -> Tensor:
    tracer, value = call.tracer, call.take("self")
    dtype = call.dtype()
    if not (tracer.record_detach and dtype.is_floating_point):
        return call.binary("max", value, 0, dtype)
    clipped = tracer.call_op(aten.le.Scalar, value, 0)  # at 0 the derivative is 0
    return tracer.emit("where", (tracer.operand(clipped), 0.0, tracer.operand(value)), dtype)


def _square(call: OpCall) -> Tensor:
    value = call.take("self")
    return call.binary("mul", value, value, call.dtype())


def _clamp(call: OpCall) -> Tensor:
    """Clamp a value; at a bound its derivative is 1, where that of `maximum` is one half."""
    tracer = call.tracer
    value, low, high = map(call.take, ("self", "min", "max"))
    dtype = call.dtype()
    for op, test, limit in (("max", aten.ge, low), ("min", aten.le, high)):
        if limit is None:
            continue
        bounded = call.binary(op, value, limit, dtype)
        if tracer.record_detach and dtype.is_floating_point:
            inside = tracer.call_op(
                test.Tensor if isinstance(limit, Tensor) else test.Scalar, value, limit
            )
            operands = tracer.operand(inside), tracer.cast(value, dtype), tracer.operand(bounded)
            bounded = tracer.emit("where", operands, dtype)
        value = bounded
    return value


def _add(call: OpCall) -> Any:
    if not call.has(("self", "other")):
        return NotImplemented
    a, b, alpha = map(call.take, ("self", "other", "alpha"))
    dtype, name = call.dtype(), call.name
    if name == "rsub":  # other - alpha * self
        a, b, name = b, a, "sub"
    if alpha != 1:
        is_tensor = isinstance(b, Tensor)  # its product with alpha has the result's dtype
        b = call.binary("mul", b, alpha, dtype) if is_tensor else b * alpha
    return call.binary(name, a, b, dtype)


def _div(call: OpCall) -> Tensor:
    a, b, mode = map(call.take, ("self", "other", "rounding_mode"))
    division = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}[mode]
    return call.binary(division, a, b, call.dtype())


def _round(call: OpCall) -> Any:
    if "decimals" not in call.pending:
        return NotImplemented
    value, decimals = call.take("self"), call.take("decimals")
    call.dtype()
    scale = 10.0 ** abs(decimals)
    scale_op, unscale_op = (aten.mul, aten.div) if decimals > 0 else (aten.div, aten.mul)
    scaled = call.tracer.call_op(scale_op.Tensor, value, scale)
    rounded = call.tracer.call_op(aten.round.default, scaled)
    return call.tracer.call_op(unscale_op.Tensor, rounded, scale)


def _logical(call: OpCall) -> Tensor:
    a, b = map(call.take, ("self", "other"))
    call.dtype()
    a, b = (
        call.tracer.call_op(aten.ne.Scalar, x, 0) if x.dtype != torch.bool else x for x in (a, b)
    )
    return call.binary(call.name.removeprefix("logical_"), a, b, torch.bool)


def _polygamma(call: OpCall) -> Any:
    n, value = call.take("n"), call.take("self")
    dtype = call.dtype()
    if n not in (0, 1) or (n and call.tracer.record_detach):  # its derivative is none here
        return NotImplemented
    op = "trigamma" if n else "digamma"
    return call.tracer.emit(op, (call.tracer.cast(value, dtype),), dtype)


RULES: dict[str, Callable[[OpCall], Any]] = {
    **dict.fromkeys(("clone", "lift_fresh_copy", "contiguous", "positive"), vectors.same),
    **dict.fromkeys(("cat", "stack", "flip", "roll", "repeat"), vectors.move),
    **{
        name + of: partial(vectors.create, value=value)
        for name, value in (("zeros", 0), ("ones", 1))
        for of in ("", "_like")
    },
    "new_zeros": partial(vectors.create, value=0),
    "new_ones": partial(vectors.create, value=1),
    **dict.fromkeys(
        ("_efficientzerotensor", "empty_like", "new_empty"), partial(vectors.create, value=0)
    ),
    **dict.fromkeys(("full_like", "new_full", "full", "scalar_tensor"), vectors.create),
    "_to_copy": vectors.to, "copy": vectors.copy,
    "index_select": vectors.index_select, "take": vectors.take, "gather": vectors.gather,
    "index": vectors.index, "isin": vectors.isin, "mean": vectors.mean,
    "bucketize": vectors.bucketize, "searchsorted": vectors.searchsorted,
    **{
        name: partial(vectors.reduce_short, op=op)
        for name, op in (
            ("sum", "add"), ("prod", "mul"), ("any", "or"), ("all", "and"),
            ("amax", "max"), ("amin", "min"), ("max", "max"), ("min", "min"),
        )
    },
    **dict.fromkeys(("dot", "vdot", "mv", "mm", "bmm"), vectors.matmul),
    "where": _where, "relu": _relu, "square": _square,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    **dict.fromkeys(("add", "sub", "rsub"), _add),
    "div": _div, "round": _round, "polygamma": _polygamma,
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _logical),
}  # fmt: skip
