"""Interval rules, which compute bounds of an op's result from bounds of its operands.

A rule may be loose but never wrong:

- an op without a rule, a division by a number that may be zero, and an integer that may leave its
  dtype's range (and wrap) may be anything its dtype can hold;
- a float that may be NaN has NaN for its bounds, and a comparison with NaN bounds is unknown;
- float bounds are computed in the op's own dtype by the op itself: rounding keeps order. Where an
  implementation may not (exp, tanh, ...), the bounds are widened by 16 units of rounding.

(Moore, Kearfott & Cloud 2009, Introduction to Interval Analysis, chapters 2 and 5)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph import DTYPES, FLOATS, Graph, Node, Number
from ..ops import OPS, apply


class Bounds(NamedTuple):
    """The least and the greatest number that a value can be: tensors, or numbers for a constant.

    Integers of any width are held as int64.
    """

    lo: Any
    hi: Any


def anything(dtype: str) -> Bounds:
    """Return the bounds of an unknown value of a dtype."""
    if dtype in FLOATS:
        return Bounds(torch.nan, torch.nan)
    if dtype == "bool":
        return Bounds(False, True)
    return Bounds(torch.iinfo(DTYPES[dtype]).min, torch.iinfo(DTYPES[dtype]).max)


def node_bounds(graph: Graph, node: Node, args: list[Bounds], in_range: bool = False) -> Bounds:
    """Return the bounds of an op's result from those of its operands.

    `in_range`: the result is known to stay in its dtype's range, bounds included.
    """
    rule = rule_of(graph, node)
    bounds = _by_points(node, args) if rule is None else rule(node, *args)
    if node.dtype in FLOATS:
        is_nan = _is_nan(bounds.lo) | _is_nan(bounds.hi)
        return Bounds(_where(is_nan, torch.nan, bounds.lo), _where(is_nan, torch.nan, bounds.hi))
    if node.dtype == "bool" or in_range:
        return bounds
    may_wrap = _may_leave_int64(node, args)
    low, high = anything(node.dtype)
    if node.dtype != "i64":
        may_wrap = may_wrap | (bounds.lo < low) | (bounds.hi > high)
    return _unless(may_wrap, bounds, node.dtype)


def _may_leave_int64(node: Node, args: list[Bounds]) -> Tensor | bool:
    """Return where the result of an op, or an intermediate of its rule, may not fit int64."""
    may_wrap = False
    if node.op in _GROWING:
        for operand in args:
            may_wrap = may_wrap | (operand.lo < -HUGE) | (operand.hi > HUGE)
    if node.op == "mul":
        for a in args[0]:
            for b in args[1]:
                may_wrap = may_wrap | ((_tensor(a, torch.float64) * b).abs() >= HUGE)
    return may_wrap


def _by_points(node: Node, args: list[Bounds]) -> Bounds:
    """Bound an op without a rule: its value where every operand is one number, else anything."""
    exact = _all(*((a.lo == a.hi) for a in args))
    value = apply(node.op, tuple(a.lo for a in args), DTYPES[node.dtype])
    if node.dtype not in FLOATS and node.dtype != "bool":
        value = value.long()
    bounds = Bounds(value, value)
    if node.dtype in FLOATS and node.op not in _EXACT:
        bounds = _widened(bounds)  # PyTorch computes a number in several ways
    low, high = anything(node.dtype)
    return Bounds(_where(exact, bounds.lo, low), _where(exact, bounds.hi, high))


# -- rules ----------------------------------------------------------------------------------------

Rule = Callable[..., Bounds]

HUGE = 1 << 62  # larger integers may leave int64 in the next op
_EXACT = frozenset("floordiv truncdiv mod fmod fmax fmin copysign nextafter detach".split())
_GROWING = frozenset("add sub mul neg abs floordiv truncdiv mod fmod".split())  # these, of ints


def rule_of(graph: Graph, node: Node) -> Rule | None:
    """Return the rule of an op for the dtype that it computes in, or None."""
    dtype = operand_dtype(graph, node)
    kind = "float" if dtype in FLOATS else "bool" if dtype == "bool" else "int"
    return _RULES.get((node.op, kind)) or _RULES.get((node.op, "any"))


def operand_dtype(graph: Graph, node: Node) -> str:
    """Return the dtype that an op computes in: that of its first operand that is not a constant."""
    args = node.args[1:] if node.op == "where" else node.args
    for arg in args:
        if isinstance(arg, str):
            if arg[0] == "%":
                return graph.nodes[int(arg[1:])].dtype
            return next(i.dtype for i in graph.inputs if i.name == arg)
    return node.dtype


def _tensor(x: Tensor | Number, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor; numbers go to the CPU, whatever the caller's default device and dtype."""
    if isinstance(x, Tensor):
        return x if dtype is None else x.to(dtype)
    if dtype is None and isinstance(x, float):
        dtype = torch.float32
    return torch.tensor(x, dtype=dtype, device="cpu")


def _where(cond: Any, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Run `torch.where`, keeping the dtype of the operand that is a tensor."""
    tensor = next((x for x in (a, b) if isinstance(x, Tensor)), None)
    if tensor is None:
        return torch.where(cond, _tensor(a), _tensor(b))
    a, b = (x if isinstance(x, Tensor) else tensor.new_full((), x) for x in (a, b))
    return torch.where(cond, a, b)


def _all(*conditions: Tensor | bool) -> Tensor:
    result = conditions[0]
    for cond in conditions[1:]:
        result = result & cond
    return _tensor(result)


def _is_nan(value: Tensor | Number) -> Tensor:
    return _tensor(value != value)


def _span(*values: Tensor) -> Bounds:
    """Return the least and the greatest of some values."""
    lo = hi = values[0]
    for value in values[1:]:
        lo, hi = torch.minimum(lo, value), torch.maximum(hi, value)
    return Bounds(lo, hi)


def _unless(unknown: Tensor | bool, bounds: Bounds, dtype: str) -> Bounds:
    """Return the bounds, replaced by those of anything where `unknown`."""
    if unknown is False:
        return bounds
    low, high = anything(dtype)
    unknown = _tensor(unknown)
    return Bounds(_where(unknown, low, bounds.lo), _where(unknown, high, bounds.hi))


def _add_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.lo + b.lo, a.hi + b.hi)


def _sub_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.lo - b.hi, a.hi - b.lo)


def _mul_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    values = _span(*(_tensor(x) * y for x in a for y in b))
    if node.args[0] == node.args[1]:  # a square is not negative
        lo = torch.where((a.lo <= 0) & (a.hi >= 0), 0, values.lo.clamp_min(0))
        values = Bounds(lo, values.hi)
    return values


def _neg(node: Node, a: Bounds) -> Bounds:
    return Bounds(-a.hi, -a.lo)


def _invert_int(node: Node, a: Bounds) -> Bounds:
    return Bounds(-1 - a.hi, -1 - a.lo)


def _abs(node: Node, a: Bounds) -> Bounds:
    return Bounds(torch.maximum(a.lo, -a.hi).clamp_min(0), torch.maximum(-a.lo, a.hi))


def _quotients(op: str, a: Bounds, b: Bounds) -> Bounds:
    """Return `a / b` for b of one sign, where it is monotone in each, so extreme at the corners."""
    mode = {"floordiv": "floor", "truncdiv": "trunc"}[op]
    corners = []
    for divisor in b:
        divisor = _tensor(divisor)
        divisor = torch.where(divisor == 0, 1, divisor)
        # The processor faults on the least int64 divided by -1.
        values = [_tensor(dividend).clamp(-HUGE, HUGE) for dividend in a]
        corners += [torch.div(dividend, divisor, rounding_mode=mode) for dividend in values]
    return _span(*corners)


def _may_be_zero(b: Bounds) -> Tensor | bool:
    return (b.lo <= 0) & (b.hi >= 0)


def _divide_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    return _unless(_may_be_zero(b), _quotients(node.op, a, b), "i64")


def _mod_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    # Within [b.lo + 1, 0] or [0, b.hi - 1]. Where a // b is one number q, it is a - q b.
    quotient = _quotients("floordiv", a, b)
    one_quotient = _all(b.lo == b.hi, quotient.lo == quotient.hi)
    positive = _tensor(b.lo > 0)
    lo = _where(positive, 0, _tensor(b.lo) + 1)
    hi = _where(positive, _tensor(b.hi) - 1, 0)
    lo = torch.where(one_quotient, a.lo - quotient.lo * b.lo, lo)
    hi = torch.where(one_quotient, a.hi - quotient.lo * b.lo, hi)
    return _unless(_may_be_zero(b), Bounds(lo, hi), "i64")


def _fmod_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    # It has the sign of a and is smaller than b. Where a / b truncates to one q, it is a - q b.
    quotient = _quotients("truncdiv", a, b)
    one_quotient = _all(b.lo == b.hi, quotient.lo == quotient.hi)
    limit = torch.maximum(_tensor(b.lo).abs(), _tensor(b.hi).abs()) - 1
    lo = torch.where(one_quotient, a.lo - quotient.lo * b.lo, torch.where(a.lo >= 0, 0, -limit))
    hi = torch.where(one_quotient, a.hi - quotient.lo * b.lo, torch.where(a.hi <= 0, 0, limit))
    return _unless(_may_be_zero(b), Bounds(lo, hi), "i64")


def _shift_right(node: Node, a: Bounds, b: Bounds) -> Bounds:
    steps = _tensor(b.lo)
    is_valid = _all(b.lo == b.hi, steps >= 0, steps < 8 * DTYPES[node.dtype].itemsize)
    steps = torch.where(is_valid, steps, 0)
    return _unless(~is_valid, Bounds(a.lo >> steps, a.hi >> steps), node.dtype)


def _finite(*operands: Bounds) -> Tensor:
    return _all(*((end - end == 0) for bounds in operands for end in bounds))


def _float(node: Node, a: Bounds, b: Bounds) -> Bounds:
    """Bound + - * / of floats, monotone in each operand, at the corners; inf may make a NaN."""
    finite = _finite(a, b)
    if node.op == "div":
        finite = finite & ~_tensor(_may_be_zero(b))
    dtype = DTYPES[node.dtype]
    values = _span(*(apply(node.op, (x, y), dtype) for x in a for y in b))
    if node.op == "mul" and node.args[0] == node.args[1]:
        lo = torch.where((a.lo <= 0) & (a.hi >= 0), 0, values.lo.clamp_min(0))
        values = Bounds(lo.to(dtype), values.hi)
    return Bounds(_where(finite, values.lo, torch.nan), _where(finite, values.hi, torch.nan))


def _rising(node: Node, *args: Bounds) -> Bounds:
    """Bound an op that never falls when an operand rises."""
    dtype = DTYPES[node.dtype]
    return Bounds(*(apply(node.op, tuple(a[end] for a in args), dtype) for end in (0, 1)))


def _widened(bounds: Bounds) -> Bounds:
    info = torch.finfo(bounds.lo.dtype)  # type: ignore[union-attr]
    lo, hi = bounds
    return Bounds(
        lo - lo.abs() * (16 * info.eps) - info.tiny,  # type: ignore[union-attr]
        hi + hi.abs() * (16 * info.eps) + info.tiny,  # type: ignore[union-attr]
    )


def _rising_about(node: Node, a: Bounds) -> Bounds:
    return _widened(_rising(node, a))


def _falling_about(node: Node, a: Bounds) -> Bounds:
    """Bound 1/x and 1/sqrt(x), which fall where x > 0."""
    lo, hi = _widened(Bounds(*_rising(node, a)[::-1]))
    positive = _tensor(a.lo > 0)
    return Bounds(_where(positive, lo, torch.nan), _where(positive, hi, torch.nan))


def _wave(node: Node, a: Bounds) -> Bounds:
    unit = torch.ones((), dtype=DTYPES[node.dtype], device="cpu")
    finite = _finite(a)
    return Bounds(_where(finite, -unit, torch.nan), _where(finite, unit, torch.nan))


def _sign_float(node: Node, a: Bounds) -> Bounds:
    lo, hi = _rising(node, a)
    nan = _is_nan(a.lo) | _is_nan(a.hi)  # torch's sign of NaN is 0
    return Bounds(_where(nan, -1.0, lo), _where(nan, 1.0, hi))


def _isnan(node: Node, a: Bounds) -> Bounds:
    maybe = _is_nan(a.lo) | _is_nan(a.hi)
    return Bounds(torch.zeros_like(maybe), maybe)


def _isinf(node: Node, a: Bounds) -> Bounds:
    always = _tensor((a.lo == a.hi) & ~_finite(a))
    return Bounds(always, ~_finite(a))


def _less(node: Node, a: Bounds, b: Bounds) -> Bounds:
    """Bound lt, le, gt and ge; written so that NaN bounds give (False, True)."""
    if node.op in ("gt", "ge"):
        a, b = b, a
    if node.op in ("lt", "gt"):
        always, never = a.hi < b.lo, a.lo >= b.hi
    else:
        always, never = a.hi <= b.lo, a.lo > b.hi
    return Bounds(_tensor(always), ~_tensor(never))


def _equal(node: Node, a: Bounds, b: Bounds) -> Bounds:
    never = _tensor((a.hi < b.lo) | (a.lo > b.hi))
    maybe = ~never
    # Two single numbers that are not apart; this order keeps most operands here small.
    always = maybe & (a.lo == a.hi) & (b.lo == b.hi)
    return Bounds(always, maybe) if node.op == "eq" else Bounds(never, ~always)


def _not(node: Node, a: Bounds) -> Bounds:
    lo, hi = _nonzero(a)
    return Bounds(~hi, ~lo)


def _nonzero(a: Bounds) -> Bounds:
    if isinstance(a.lo, Tensor) and a.lo.dtype == torch.bool:
        return a
    return _equal(Node("ne", (), "bool"), a, Bounds(0, 0))


def _xor_bool(node: Node, a: Bounds, b: Bounds) -> Bounds:
    exact = _all(a.lo == a.hi, b.lo == b.hi)
    value = a.lo ^ b.lo
    return Bounds(exact & value, ~exact | value)


def _select(node: Node, cond: Bounds, a: Bounds, b: Bounds) -> Bounds:
    dtype = DTYPES[node.dtype]
    if node.dtype not in FLOATS and node.dtype != "bool":
        dtype = torch.int64
    always, maybe = _tensor(cond.lo), _tensor(cond.hi)
    ends = []
    for end, extreme in ((0, torch.minimum), (1, torch.maximum)):
        a_end, b_end = (_tensor(v[end], dtype) for v in (a, b))
        either = torch.logical_and(a_end, b_end) if end == 0 else torch.logical_or(a_end, b_end)
        mixed = either if dtype == torch.bool else extreme(a_end, b_end)
        ends.append(torch.where(always, a_end, torch.where(maybe, mixed, b_end)))
    return Bounds(*ends)


def _convert(node: Node, a: Bounds) -> Bounds:
    dtype = DTYPES[node.dtype]
    lo, hi = (_tensor(end) for end in a)
    if node.dtype == "bool":
        return _nonzero(Bounds(lo, hi))
    if dtype.is_floating_point:
        return Bounds(lo.to(dtype), hi.to(dtype))
    if lo.is_floating_point():  # towards zero; undefined if it does not fit an int
        fits = (lo > -HUGE) & (hi < HUGE)
        low, high = anything(node.dtype)
        zero = torch.zeros((), dtype=lo.dtype, device="cpu")
        lo, hi = (torch.where(fits, end, zero).to(torch.int64) for end in (lo, hi))
        return Bounds(_where(fits, lo, low), _where(fits, hi, high))
    return Bounds(lo.to(torch.int64), hi.to(torch.int64))


_RULES: dict[tuple[str, str], Rule] = {
    ("add", "int"): _add_int,
    ("sub", "int"): _sub_int,
    ("mul", "int"): _mul_int,
    ("neg", "int"): _neg,
    ("invert", "int"): _invert_int,
    ("floordiv", "int"): _divide_int,
    ("truncdiv", "int"): _divide_int,
    ("mod", "int"): _mod_int,
    ("fmod", "int"): _fmod_int,
    ("shr", "int"): _shift_right,
    ("sign", "int"): _rising,
    ("sign", "float"): _sign_float,
    ("isnan", "float"): _isnan,
    ("isinf", "float"): _isinf,
    ("reciprocal", "float"): _falling_about,
    ("rsqrt", "float"): _falling_about,
    ("and", "bool"): _rising,
    ("or", "bool"): _rising,
    ("xor", "bool"): _xor_bool,
    ("neg", "float"): _neg,
    ("abs", "int"): _abs,
    ("abs", "float"): _abs,
    ("unrolled", "any"): lambda node, a, *rest: a,
    ("tangent", "any"): lambda node, a, *rest: a,
    ("eq", "any"): _equal,
    ("ne", "any"): _equal,
    ("not", "any"): _not,
    ("where", "any"): _select,
    ("to", "any"): _convert,
}
_RULES |= {(op, "any"): _less for op in ("lt", "le", "gt", "ge")}
_RULES |= {(op, "float"): _float for op in ("add", "sub", "mul", "div")}
_RULES |= {(op, "float"): _wave for op in ("sin", "cos")}
_RULES |= {(name, kind): _rising for name, op in OPS.items() if "rising" in op.traits
           for kind in ("int", "float")}  # fmt: skip
_RULES |= {(name, "float"): _rising_about for name, op in OPS.items() if "rising~" in op.traits}
