"""Arithmetic and comparisons: what an instruction does to the arrays of its operands."""

from collections.abc import Callable
from functools import partial, reduce

import numpy as np

from .conversions import f32_of, half_of
from .values import Lanes, Step, dtype_of

_ROUNDED = {"rn", "ftz", "approx", "full"}  # what is not told apart


def _only(lanes: Lanes, *known: str) -> str:
    """The type; other modifiers than those known would mean something else."""
    if {*lanes.words[1:-1]} - _ROUNDED - {*known}:
        raise lanes.unknown()
    return lanes.words[-1]


def _flushed(lanes: Lanes, step: Step, out: np.ndarray) -> Step:
    """With `ftz`, numbers too small for a full exponent become zero."""
    if "ftz" not in lanes.words:
        return lanes.done(step)

    def flushed() -> None:
        step()
        out[np.abs(out) < np.float32(2.0**-126)] = 0

    return lanes.done(flushed)


# -- functions of operands that all have the instruction's type ------------------------------------


def _by(of_whole: Callable, of_floats: Callable | None = None) -> Callable[[Lanes], Step]:
    """A maker of f(*operands, out)."""

    def made(lanes: Lanes) -> Step:
        if lanes.words[-1] in _BITS:
            return _halves(lanes)
        kind = _only(lanes)
        given, out = (
            [lanes.get(x, kind) for x in lanes.operands[1:]],
            lanes.put(lanes.operands[0], kind),
        )
        function = of_floats if of_floats is not None and kind[0] == "f" else of_whole
        return _flushed(lanes, partial(function, *given, out), out)

    return made


def _assigned(function: Callable) -> Callable:
    """f(a, out) of f(a)."""

    def into(a, out) -> None:
        out[:] = function(a)

    return into


def _quotient(a, b, out) -> None:
    """Towards zero; by zero it is anything, as where a thread's result is not wanted."""
    b = np.where(b == 0, 1, b).astype(b.dtype)
    out[:] = (a - np.fmod(a, b)) // b


def _remainder(a, b, out) -> None:
    out[:] = np.fmod(a, np.where(b == 0, 1, b).astype(b.dtype))


def _bits_of(a, begin, size, out) -> None:
    """bfe: bits from `begin` on; signed ones are filled with the last."""
    begin, size = (begin & 0xFF).astype(np.int64), (size & 0xFF).astype(np.int64)
    found = (a.astype(np.int64) >> begin) & ((np.int64(1) << size) - 1)
    if out.dtype.kind == "i":
        sign = np.where(size > 0, np.int64(1) << np.maximum(size - 1, 0), 0)
        found = (found ^ sign) - sign
    out[:] = found.astype(out.dtype)


def _extreme(of_numbers: Callable, of_any: Callable) -> Callable[[Lanes], Step]:
    """Of two or three. Of a number and a NaN the number is taken, unless told otherwise."""

    def made(lanes: Lanes) -> Step:
        words, lanes.words = lanes.words, tuple(w for w in lanes.words if w not in ("NaN", "relu"))
        by = of_numbers if words[-1][0] == "f" and "NaN" not in words else of_any

        def step(*given) -> None:
            *numbers, out = given
            reduce(lambda a, b: by(a, b, out), numbers)
            if "relu" in words:  # and not below zero
                np.maximum(out, 0, out)

        return _by(step)(lanes)

    return made


# -- numbers of 16 bits, and pairs in a register ---------------------------------------------------

_BITS = {"bf16": "b16", "f16": "b16", "bf16x2": "b32", "f16x2": "b32", "f32x2": "b64"}
_OF_HALVES = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax,
    "neg": np.negative, "abs": np.abs, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


def _halves(lanes: Lanes) -> Step:
    """Worked out in float32, and rounded once."""
    kind, bits = _only(lanes).removesuffix("x2"), _BITS[lanes.words[-1]]
    given = [lanes.get(x, bits) for x in lanes.operands[1:]]
    function, out = _OF_HALVES[lanes.words[0]], lanes.put(lanes.operands[0], bits)

    def numbers(x: np.ndarray) -> np.ndarray:
        each = np.ascontiguousarray(lanes.each(x))
        if kind == "f32":
            return each.view(np.float32)
        halves = each.view(np.uint16)
        return f32_of(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)

    def step() -> None:
        found = function(*map(numbers, given)).astype(np.float32)
        out[:] = (found if kind == "f32" else half_of(found, kind)).view(out.dtype)

    return lanes.done(step)


# -- instructions whose operands have types of their own -------------------------------------------


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _mul(lanes: Lanes) -> Step:
    """Of whole numbers all bits, the lower or the upper half."""
    if lanes.words[-1] in _BITS:
        return _halves(lanes)
    kind = _only(lanes, "lo", "hi", "wide")
    a, b = (lanes.get(x, kind) for x in lanes.operands[1:])
    if "wide" in lanes.words:
        out = lanes.put(lanes.operands[0], _wide(kind))
        return lanes.done(partial(np.multiply, a, b, out, dtype=out.dtype))
    out = lanes.put(lanes.operands[0], kind)
    if "hi" not in lanes.words:
        return _flushed(lanes, partial(np.multiply, a, b, out), out)
    bits = 8 * out.dtype.itemsize
    wide = dtype_of(_wide(kind)) if bits < 64 else object  # Python's numbers have any length

    def step() -> None:
        out[:] = (a.astype(wide) * b.astype(wide)) >> bits

    return lanes.done(step)


def _mad(lanes: Lanes) -> Step:
    """Of whole numbers a product, or all bits of it, and a third one."""
    kind = _only(lanes, "lo", "wide")
    result = _wide(kind) if "wide" in lanes.words else kind
    kinds = kind, kind, result
    a, b, c = (lanes.get(x, k) for x, k in zip(lanes.operands[1:], kinds, strict=True))
    out = lanes.put(lanes.operands[0], result)

    def step() -> None:
        np.add(np.multiply(a, b, dtype=out.dtype), c, out)

    return lanes.done(step)


def _fma(lanes: Lanes) -> Step:
    """The product of two float32 is exact in float64."""
    if lanes.words[-1] in _BITS:
        return _halves(lanes)
    kind = _only(lanes)
    a, b, c = (lanes.get(x, kind) for x in lanes.operands[1:])
    out, product = lanes.put(lanes.operands[0], kind), np.empty(lanes.count, np.float64)

    def step() -> None:
        np.multiply(a, b, product, dtype=np.float64)
        np.add(product, c, product)
        np.copyto(out, product, "same_kind")

    return _flushed(lanes, step, out)


def _selp(lanes: Lanes) -> Step:
    kind = _only(lanes)
    a, b = (lanes.get(x, kind) for x in lanes.operands[1:3])
    which, out = lanes.get(lanes.operands[3], "pred"), lanes.put(lanes.operands[0], kind)

    def step() -> None:
        out[:] = np.where(which, a, b)

    return lanes.done(step)


_COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip
_COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _setp(lanes: Lanes) -> Step:
    """Comparisons: none holds for NaN but those with a `u` behind, all of which do; `nan` and `num`
    ask for it alone. With a second word, together with a predicate."""
    kind, how = lanes.words[-1], lanes.words[1]
    more = [w for w in lanes.words[2:-1] if w != "ftz"]
    a, b = (lanes.get(x, kind) for x in lanes.operands[1:3])
    out = lanes.put(lanes.operands[0], "pred")
    other = lanes.get(lanes.operands[3], "pred") if more else None
    plain = how if how in _COMPARED or how in ("nan", "num") else how.removesuffix("u")
    if plain not in (*_COMPARED, "nan", "num") or (more and more[0] not in _COMBINED):
        raise lanes.unknown()

    def step() -> None:
        nan = np.isnan(a) | np.isnan(b) if kind[0] == "f" else np.False_
        if plain in ("nan", "num"):
            found = nan if plain == "nan" else ~nan
        else:
            found = _COMPARED[plain](a, b)
            found = found & ~nan if how == plain else found | nan
        out[:] = found if other is None else _COMBINED[more[0]](found, other)

    return lanes.done(step)


def _set(lanes: Lanes) -> Step:
    """A comparison of pairs of half-precision numbers that NaN passes: all bits of the halves where
    it holds, or 1.0, and 0."""
    if lanes.words[:2] != ("set", "geu") or lanes.words[2:] not in (
        ("f16x2", "f16x2"),
        ("u32", "f16x2"),
    ):
        raise lanes.unknown()
    a, b = (lanes.get(x, "b32") for x in lanes.operands[1:])
    out = lanes.put(lanes.operands[0], "b32")
    halves = lambda x: np.ascontiguousarray(lanes.each(x)).view(np.float16)
    true = np.uint16(0x3C00 if lanes.words[2] == "f16x2" else 0xFFFF)

    def step() -> None:
        out[:] = (~(halves(a) < halves(b)) * true).view(out.dtype)

    return lanes.done(step)


def _mov(lanes: Lanes) -> Step:
    """Also parts of a register to several, and several to one; the lowest come first."""
    to, given = lanes.operands
    kind = lanes.words[-1]
    several = given if isinstance(given, list) else to if isinstance(to, list) else []
    part = f"b{int(kind[1:]) // len(several)}" if several else kind
    if several is given:
        step = partial(_pack, [lanes.get(x, part) for x in given], lanes.put(to, kind))
    elif several is to:
        step = partial(_unpack, lanes.get(given, kind), [lanes.put(x, part) for x in to])
    else:
        step = partial(np.copyto, lanes.put(to, kind), lanes.get(given, kind))
    return lanes.done(step)


def _pack(parts: list[np.ndarray], out: np.ndarray) -> None:
    bits, kind = 8 * parts[0].dtype.itemsize, out.dtype.type
    found = parts[0].astype(kind)
    for n, part in enumerate(parts[1:], 1):
        found = found | part.astype(kind) << kind(n * bits)
    out[:] = found


def _unpack(whole: np.ndarray, outs: list[np.ndarray]) -> None:
    kind, bits = whole.dtype.type, 8 * outs[0].dtype.itemsize
    for n, out in enumerate(outs):
        out[:] = (whole >> kind(n * bits)).astype(out.dtype)


def _prmt(lanes: Lanes) -> Step:
    """Four bytes of eight; with 8 added to its number, a byte's sign is all there is of it."""
    _only(lanes)
    a, b, which = (lanes.get(x, "u32") for x in lanes.operands[1:])
    out = lanes.put(lanes.operands[0], "u32")

    def step() -> None:
        eight = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        found = np.zeros_like(out)
        for n in range(4):
            chosen = (which >> np.uint32(4 * n)).astype(np.uint64)
            byte = eight >> np.uint64(8) * (chosen & np.uint64(7)) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), 0xFF, 0)
            byte = np.where(chosen & np.uint64(8), sign, byte).astype(np.uint32)
            found |= byte << np.uint32(8 * n)
        out[:] = found

    return lanes.done(step)


def _funnel(lanes: Lanes) -> Step:
    """shf: 32 of the 64 bits of two registers, the second above the first, shifted."""
    if lanes.words[1:] not in (("l", "wrap", "b32"), ("r", "wrap", "b32")):
        raise lanes.unknown()
    low, high, by = (lanes.get(x, "u32") for x in lanes.operands[1:])
    out, left = lanes.put(lanes.operands[0], "u32"), lanes.words[1] == "l"

    def step() -> None:
        both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        n = (by & np.uint32(31)).astype(np.uint64)
        found = both << n >> np.uint64(32) if left else both >> n
        out[:] = found.astype(np.uint32)

    return lanes.done(step)


def _shift(function: Callable) -> Callable[[Lanes], Step]:
    def made(lanes: Lanes) -> Step:
        kind = _only(lanes)
        a, by = lanes.get(lanes.operands[1], kind), lanes.get(lanes.operands[2], "u32")
        out = lanes.put(lanes.operands[0], kind)
        most = 8 * out.dtype.itemsize  # by more, the same is left

        def step() -> None:
            out[:] = function(a, np.minimum(by, most).astype(a.dtype))

        return lanes.done(step)

    return made


def _nothing(lanes: Lanes) -> Step:
    return lambda: None


MAKERS: dict[str, Callable[[Lanes], Step]] = {
    "add": _by(np.add), "sub": _by(np.subtract), "mul": _mul, "mad": _mad, "fma": _fma,
    "div": _by(_quotient, np.divide), "rem": _by(_remainder), "neg": _by(np.negative),
    "abs": _by(np.abs), "min": _extreme(np.fmin, np.minimum), "max": _extreme(np.fmax, np.maximum),
    "and": _by(np.bitwise_and), "or": _by(np.bitwise_or), "xor": _by(np.bitwise_xor),
    "not": _by(np.invert), "shl": _shift(np.left_shift), "shr": _shift(np.right_shift),
    "bfe": _by(_bits_of), "prmt": _prmt, "shf": _funnel, "selp": _selp, "setp": _setp, "set": _set, "mov": _mov, "cvta": _mov,
    "ex2": _by(np.exp2), "lg2": _by(np.log2), "sin": _by(np.sin), "cos": _by(np.cos),
    "tanh": _by(np.tanh), "sqrt": _by(np.sqrt), "rcp": _by(_assigned(lambda a: 1 / a)),
    "rsqrt": _by(_assigned(lambda a: 1 / np.sqrt(a))),
    "setmaxnreg": _nothing, "griddepcontrol": _nothing, "nanosleep": _nothing,
}  # fmt: skip
