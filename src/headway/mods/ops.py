"""The ops of a graph, one line each: its text in kernels, PyTorch's names, what analyses rely on.

Texts are Triton's, on floats and on integers, and call `backends/gpu/device/maths.py` and
`special.py`. An op without a text is refused in kernels. Halves are computed in float32 and then
rounded, as PyTorch does. Derivatives are PyTorch's own: `evaluation/derivative.py` differentiates
`Op.value`, so what PyTorch's formula reads, such as the digamma of lgamma, is an op here too.

`tangent(value, x, slope)` is a value that also has a derivative by x. `unrolled(value, count)` is a
value that is reduced from so many numbers, if they are more than kernels take. Three more ops are
`to`, `where` and `gather`, which is up to who evaluates a graph.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PAIR = ("self", "other")
# Numbers of a short vector at most; `unrolled` marks the reduction of a longer one.
UNROLLED_IN_KERNELS = 16


class Op(NamedTuple):
    """One op.

    - `value`: computes it with torch, into `out=` if there is one.
    - `operands`: PyTorch's names of them.
    - `aten`: PyTorch's names of the op.
    - `floats`, `ints`: its text in kernels.
    - `traits`: what analyses may rely on, words of:
      - "rising": the result never falls when an operand rises; "rising~": up to rounding;
      - "finite": finite operands give a finite result, or one that is too large; "overflows": soon;
      - "keeps": the result's magnitude is at most that of the largest operand; "unit": at most 1;
      - "tensors": torch takes no Python numbers.
    """

    value: Callable[..., Tensor]
    operands: tuple[str, ...]
    aten: tuple[str, ...]
    floats: str | None
    ints: str | None
    traits: frozenset[str]


def _op(
    floats: str | None = None,
    ints: str | None = None,
    traits: str = "",
    aten: str = "",
    value: Callable[..., Tensor] | None = None,
    operands: tuple[str, ...] = ("self",),
) -> dict[str, Any]:
    return locals()


def _table(**lines: dict[str, Any]) -> dict[str, Op]:
    """Return the ops by name; PyTorch's name is the same where a line has no other."""
    table = {}
    for key, line in lines.items():
        name = key.rstrip("_")
        aten = tuple((line["aten"] or name).split())
        value = line["value"] or getattr(torch, aten[0])
        names = () if aten == ("-",) else aten
        traits = frozenset(line["traits"].split())
        table[name] = Op(value, line["operands"], names, line["floats"], line["ints"], traits)
    return table


def _detach(value: Tensor, out: Tensor | None = None) -> Tensor:
    return value.detach() if out is None else out.copy_(value)


def _unrolled(value: Tensor, count: int, out: Tensor | None = None) -> Tensor:
    return value.view(value.shape) if out is None else out.copy_(value)


class _Tangent(torch.autograd.Function):
    """A value whose derivative by x is a slope, whatever it was computed by."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return grads[0], grads[0] * slope, None


def _tangent(value: Tensor, x: Tensor, slope: Tensor, out: Tensor | None = None) -> Tensor:
    if out is not None:
        return out.copy_(value)
    return _Tangent.apply(value, x, slope) if torch.is_grad_enabled() else value


_UNARY = _table(
    neg=_op("-{}", "-{}", "finite keeps"),
    abs=_op("tl.abs({})", "tl.abs({})", "finite keeps"),
    sign=_op("maths.sign({}).to(tl.float32)", "maths.sign({})", "finite unit", "sign sgn"),
    exp=_op("tl.exp({})", None, "finite overflows rising~"),
    exp2=_op("tl.exp2({})", None, "finite overflows rising~", "exp2 special_exp2"),
    expm1=_op("maths.expm1({})", None, "finite overflows rising~", "expm1 special_expm1"),
    log=_op("tl.log({})", None, "rising~"),
    log2=_op("tl.log2({})", None, "rising~"),
    log10=_op("tl.log({}) * 0.4342944819032518", None, "rising~"),
    log1p=_op("maths.log1p({})", None, "rising~", "log1p special_log1p"),
    sqrt=_op("tl.sqrt({})", None, "rising~"),
    rsqrt=_op("tl.rsqrt({})"),
    reciprocal=_op("1 / {}"),
    sin=_op("tl.sin({})", None, "finite"),
    cos=_op("tl.cos({})", None, "finite"),
    tan=_op("tl.sin({0}) / tl.cos({0})"),
    asin=_op("special.asin({})", None, "rising~"),
    acos=_op("special.acos({})"),
    atan=_op("special.atan({})", None, "finite rising~"),
    sinh=_op("special.sinh({})", None, "finite overflows rising~"),
    cosh=_op("special.cosh({})", None, "finite overflows"),
    tanh=_op("maths.tanh({})", None, "finite unit rising~"),
    asinh=_op("special.asinh({})", None, "finite rising~"),
    acosh=_op("special.acosh({})", None, "rising~"),
    atanh=_op("special.atanh({})", None, "rising~"),
    sigmoid=_op("maths.sigmoid({})", None, "finite unit rising~", "sigmoid special_expit"),
    erf=_op("tl.erf({})", None, "finite unit rising~", "erf special_erf"),
    erfc=_op("special.erfc({})", None, "finite", "erfc special_erfc"),
    erfinv=_op("special.erfinv({})", None, "rising~", "erfinv special_erfinv"),
    lgamma=_op("special.lgamma({})", None, "", "lgamma special_gammaln"),
    digamma=_op("special.digamma({})", None, "", "digamma special_digamma special_psi"),
    trigamma=_op(
        "special.trigamma({})", None, "", "-", lambda a, **out: torch.polygamma(1, a, **out)
    ),
    i0=_op("special.i0({})", None, "finite overflows", "i0 special_i0"),
    i1=_op("special.i1({})", None, "finite overflows", "special_i1", torch.special.i1),
    floor=_op("tl.floor({})", "{}", "finite keeps rising"),
    ceil=_op("tl.ceil({})", "{}", "finite keeps rising"),
    round=_op("maths.round_even({})", "{}", "finite keeps rising"),
    trunc=_op("maths.trunc({})", "{}", "finite keeps rising", "trunc fix"),
    isnan=_op("{0} != {0}"),
    isinf=_op('tl.abs({}) == float("inf")'),
    signbit=_op("special.signbit({})", "{} < 0"),
    not_=_op("{} == 0", "{} == 0", "", "logical_not"),
    invert=_op(None, "~{}", "", "bitwise_not"),
    detach=_op("{}", None, "finite", "-", _detach),
)
_BINARY = {
    name: op._replace(operands=PAIR if len(op.operands) == 1 else op.operands)
    for name, op in _table(
        add=_op("{} + {}", "{} + {}", "finite"),
        sub=_op("{} - {}", "{} - {}", "finite"),
        mul=_op("{} * {}", "{} * {}", "finite"),
        div=_op("{} / {}"),
        floordiv=_op(
            "tl.floor({} / {})", "maths.floordiv({}, {})", "", "floor_divide",
            lambda a, b, **out: torch.div(a, b, rounding_mode="floor", **out),
        ),
        truncdiv=_op(
            "maths.trunc({} / {})", "maths.truncdiv({}, {})", "", "-",
            lambda a, b, **out: torch.div(a, b, rounding_mode="trunc", **out),
        ),
        mod=_op("{0} - tl.floor({0} / {1}) * {1}", "maths.mod({}, {})", "", "remainder"),
        fmod=_op("{0} - maths.trunc({0} / {1}) * {1}", "{0} - maths.truncdiv({0}, {1}) * {1}"),
        pow=_op("maths.power({}, {})", None, "tensors", operands=("self", "exponent")),
        max=_op(
            "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)", "tl.maximum({}, {})",
            "finite keeps rising tensors", "maximum",
        ),
        min=_op(
            "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)", "tl.minimum({}, {})",
            "finite keeps rising tensors", "minimum",
        ),
        fmax=_op(
            "tl.where(({0} > {1}) | ({1} != {1}), {0}, {1})", "tl.maximum({}, {})",
            "finite tensors",
        ),
        fmin=_op(
            "tl.where(({0} < {1}) | ({1} != {1}), {0}, {1})", "tl.minimum({}, {})",
            "finite tensors",
        ),
        atan2=_op("special.atan2({}, {})", None, "finite tensors", "atan2 arctan2"),
        hypot=_op("special.hypot({}, {})", None, "finite tensors"),
        copysign=_op("special.copysign({}, {})", None, "finite tensors"),
        nextafter=_op("special.nextafter({}, {})", None, "tensors"),
        eq=_op("{} == {}", "{} == {}"),
        ne=_op("{} != {}", "{} != {}"),
        lt=_op("{} < {}", "{} < {}"),
        le=_op("{} <= {}", "{} <= {}"),
        gt=_op("{} > {}", "{} > {}"),
        ge=_op("{} >= {}", "{} >= {}"),
        and_=_op(None, "{} & {}", "", "bitwise_and"),
        or_=_op(None, "{} | {}", "", "bitwise_or"),
        xor=_op(None, "{} ^ {}", "", "bitwise_xor"),
        shl=_op(None, "{} << {}", "tensors", "bitwise_left_shift __lshift__"),
        shr=_op(None, "{} >> {}", "tensors", "bitwise_right_shift __rshift__"),
        unrolled=_op(traits="finite keeps", aten="-", value=_unrolled),
    ).items()
}  # fmt: skip
_TERNARY = _table(
    tangent=_op("{0}", None, "finite tensors", "-", _tangent, ("value", "x", "slope")),
)
OPS = _UNARY | _BINARY | _TERNARY
UNARY, BINARY = frozenset(_UNARY), frozenset(_BINARY)
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def has_trait(op: str, *traits: str) -> bool:
    """Return whether an op has one of some traits; `to`, `where` and `gather` have none."""
    return op in OPS and not OPS[op].traits.isdisjoint(traits)


def apply(op: str, args: tuple, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Run one op (not a gather) with torch; numbers in `args` are constants of the op's dtype."""
    out_kwargs = {} if out is None else {"out": out}
    if op == "to":
        value = args[0]
        if dtype == torch.bool:
            return value != 0
        return value.to(dtype)
    if op == "where":
        cond, a, b = args
        return torch.where(
            cond, _as_tensor(a, args, dtype), _as_tensor(b, args, dtype), **out_kwargs
        )
    if not isinstance(args[0], Tensor) or "tensors" in OPS[op].traits:
        args = tuple(_as_tensor(a, args) for a in args)
    return OPS[op].value(*args, **out_kwargs)


def _as_tensor(
    value: Tensor | int | float | bool, args: tuple, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a number as a 0-d tensor like the last tensor in `args`; a tensor unchanged."""
    if isinstance(value, Tensor):
        return value
    tensor = next(a for a in args[::-1] if isinstance(a, Tensor))
    return tensor.new_full((), value, dtype=dtype)
