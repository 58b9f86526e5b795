"""Conversions between formats."""

from functools import partial

import numpy as np
import torch

from .values import Lanes, Step, dtype_of


def bf16_of(x: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers as bfloat16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def f32_of(bits: np.ndarray) -> np.ndarray:
    """bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def half_of(x: np.ndarray, kind: str) -> np.ndarray:
    """The bits of float32 numbers as "f16" or "bf16"."""
    return bf16_of(x) if kind == "bf16" else x.astype(np.float16).view(np.uint16)


_ROUNDED = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def _cvt(lanes: Lanes) -> Step:
    *how, to, kind = lanes.words[1:]
    if to in _FLOAT8 and kind == "f32" and how == ["rn", "satfinite"]:
        high, low = (lanes.get(x, kind) for x in lanes.operands[1:])
        return lanes.done(partial(_to_float8, high, low, lanes.put(lanes.operands[0], "u16"), to))
    if {*how} - {"rn", "rna", "ftz", *_ROUNDED}:
        raise lanes.unknown()
    if kind == "e4m3x2" and to == "f16x2":
        given, out = lanes.get(lanes.operands[1], "u16"), lanes.put(lanes.operands[0], "u32")
        return lanes.done(partial(_from_e4m3, given, out))
    if to in ("bf16x2", "f16x2"):
        high, low = (lanes.get(x, kind) for x in lanes.operands[1:])
        return lanes.done(partial(_pair, high, low, lanes.put(lanes.operands[0], "u32"), to[:-2]))
    given, out = lanes.get(lanes.operands[1], kind), lanes.put(lanes.operands[0], to)
    whole = next((_ROUNDED[x] for x in how if x in _ROUNDED), None)
    return lanes.done(partial(_converted, given, kind, out, to, whole))


def _pair(high: np.ndarray, low: np.ndarray, out: np.ndarray, kind: str) -> None:
    out[:] = half_of(high, kind).astype(np.uint32) << np.uint32(16) | half_of(low, kind)


_FLOAT8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def _to_float8(high: np.ndarray, low: np.ndarray, out: np.ndarray, kind: str) -> None:
    """Two float32 numbers as float8; what is larger than the largest finite one becomes that."""
    largest, dtype = torch.finfo(_FLOAT8[kind]).max, _FLOAT8[kind]
    high, low = (
        torch.tensor(x).clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()
        for x in (high, low)
    )
    out[:] = high.astype(np.uint16) << np.uint16(8) | low


def _from_e4m3(pair: np.ndarray, out: np.ndarray) -> None:
    """Two e4m3 numbers as float16: 4 bits of exponent less 7, 3 of fraction; all ones are NaN."""
    bits = np.stack([pair & np.uint16(0xFF), pair >> np.uint16(8)]).astype(np.int64)
    power, fraction = bits >> 3 & 15, bits & 7
    size = np.where(power > 0, np.ldexp(8.0 + fraction, power - 10), np.ldexp(fraction + 0.0, -9))
    value = np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size))
    low, high = value.astype(np.float16).view(np.uint16).astype(np.uint32)
    out[:] = high << np.uint32(16) | low


def _converted(given: np.ndarray, kind: str, out: np.ndarray, to: str, whole) -> None:
    if kind == "bf16":
        given = f32_of(given)
    if whole is not None:
        given = whole(given)
    if to == "bf16":
        found = bf16_of(given.astype(np.float32))
    elif to == "tf32":  # 13 bits fewer, to the nearest, ties away from zero
        found = (given.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    elif to[0] == "f" or given.dtype.kind != "f":
        found = given.astype(dtype_of(to))
    else:  # out of range it is the nearest there is, NaN is 0
        limits = np.iinfo(dtype_of(to))
        exact = np.nan_to_num(given.astype(np.float64), nan=0.0)
        last = np.nextafter(2.0**63, 0) if limits.max > 2**53 else limits.max
        found = np.clip(exact, limits.min, last).astype(dtype_of(to))
    out[:] = found.view(out.dtype) if found.dtype.itemsize == out.dtype.itemsize else found


MAKERS = {"cvt": _cvt}
