"""Error messages for arguments that are not a score or mask, with what to write instead.

`suggestion` and `not_an_operand` recognise what callers usually pass by mistake: a tensor, a NumPy
array, a class instead of its instance, a name, a block mask, a mask as a score.
"""

import inspect
import reprlib
from typing import Any

from torch import Tensor

from .mod import Mod

CallSizes = tuple[int, int, int, int]

SIGNATURES = {"score": "(score, b, h, q_idx, kv_idx)", "mask": "(b, h, q_idx, kv_idx)"}
_EXAMPLE = {"score": "softcap(30.0)", "mask": "causal()"}


def suggestion(kind: str, argument: Any, sizes: CallSizes | None = None) -> str:
    """Return the message for an argument that should be a `kind`: "score" or "mask"."""
    if isinstance(argument, Tensor) or _is_array(argument):
        return f"{kind} is {_tensor_remedy(kind, argument, sizes, f'pass {kind}=')}"
    if _is_block_mask(argument):
        remedy = "pass it as mask=" if kind == "score" else "its .mask is what it was built from"
        return f"{kind} is a block mask; {remedy}"
    return f"{kind}={_show(argument)} is {_remedy(kind, argument, f'pass {kind}=')}"


def not_an_operand(sign: str, argument: Any) -> str:
    """Return the message for an operand of `sign` that is not a score or mask."""
    kind = "score" if sign == ">>" else "mask"
    if isinstance(argument, Tensor) or _is_array(argument):
        return (
            f"{sign} combines {kind}s, but this is {_tensor_remedy(kind, argument, None, 'write ')}"
        )
    if _is_block_mask(argument):
        return (
            f"{sign} combines {kind}s, but this is a block mask; combine what it was built from, "
            "its .mask, and build a block mask of the result"
        )
    return f"{sign} combines {kind}s, but {_show(argument)} is {_remedy(kind, argument, 'write ')}"


def _remedy(kind: str, argument: Any, write: str) -> str:
    """Return what a value is, and what to write instead of it."""
    if isinstance(argument, Mod):
        role, text = argument.role, repr(argument)
        return f"a {role}; pass it as {role}=" + (text if "<" not in text else "")
    if isinstance(argument, type) and issubclass(argument, Mod):
        if (role := argument.role) != kind:
            return f"the class of a {role}; pass {role}={_call(argument)}"
        return f"a class; {write}{_call(argument)}"
    if isinstance(argument, type):
        return f"a class; {write}{argument.__qualname__}(...), an object of it"
    cls = Mod.kinds.get(argument) if isinstance(argument, str) and argument.islower() else None
    if cls is not None:
        role = cls.role
        return f"a string; {write if role == kind else f'pass {role}='}headway.{_call(cls)}"
    flag = "; PyTorch's is_causal=True is mask=headway.causal()" if argument is True else ""
    signature = SIGNATURES[kind]
    return (
        f"not callable; a {kind} is a function of {signature} or a value of the library such as "
        f"headway.{_EXAMPLE[kind]}{flag}"
    )


def _tensor_remedy(kind: str, argument: Any, sizes: CallSizes | None, write: str) -> str:
    """Return what a tensor is, and every way to make a score or mask of it for a call's sizes.

    In the code that the message proposes, m is the tensor.
    """
    m = "torch.from_numpy(m)" if _is_array(argument) else "m"
    shape, dtype = tuple(argument.shape), str(argument.dtype).removeprefix("torch.")
    start = f"a {'NumPy array' if _is_array(argument) else 'tensor'} {shape} {dtype}"
    if dtype.startswith("complex"):
        return f"{start}; a {kind} is made of a bool or float tensor"
    layouts = layouts_of(shape, sizes)
    if not layouts:
        target = "(b, h, q_len, kv_len)" + (f" = {sizes}" if sizes else "")
        return (
            f"{start}, which does not broadcast to {target}; headway.dense(m) makes a mask of a "
            "bool tensor that does, headway.bias(m) a score of a float tensor"
        )
    ways = []
    for n, (axes, index) in enumerate(layouts):
        code = _conversions(kind, dtype, m + index, write)
        ways.append(f"as {axes} {' or '.join(code if n == 0 else code[:1])}")
    text = f"{start}; {', '.join(ways)}"
    by_key = any(index == "[:, None, None]" for _, index in layouts)
    if by_key and "float" not in dtype and (sizes is None or shape[0] == sizes[0]):
        write_mask = write if kind == "mask" else "pass mask="
        text += (
            f"; or, where every row keeps its first keys, {write_mask}headway.padding({m}.sum(-1))"
        )
    return text


def _conversions(kind: str, dtype: str, m: str, write: str) -> list[str]:
    """Return the ways to make a score or mask of m, by its dtype, the likelier first."""
    as_mask, as_score = (write if kind == role else f"pass {role}=" for role in ("mask", "score"))
    if dtype == "bool":
        return [f"{as_mask}headway.dense({m})"]
    as_bool = f"{as_mask}headway.dense({m}.bool()) if 1 keeps a pair and 0 drops it"
    as_bias = f"{as_score}headway.bias({m})"
    if "float" not in dtype:
        return [as_bool]
    return [as_bias] if kind == "score" else [f"{as_bias} if it is added to the scores", as_bool]


def layouts_of(shape: tuple[int, ...], sizes: CallSizes | None) -> list[tuple[str, str]]:
    """Return how a tensor may broadcast to a call of these sizes, or of any sizes if None.

    Each way is the names of its axes, and the index that makes it broadcast to
    (b, h, q_len, kv_len).
    """
    ways = [(("batch", "heads", "q_len", "kv_len")[-len(shape) :] if shape else (), "", shape)]
    if len(shape) == 2:
        batch, kv_len = shape
        ways.append((("batch", "kv_len"), "[:, None, None]", (batch, 1, 1, kv_len)))
    if len(shape) == 3:
        ways.append((("batch", "q_len", "kv_len"), "[:, None]", (shape[0], 1, *shape[1:])))
        if sizes is not None and shape[0] == sizes[0] * sizes[1]:
            axes = "batch * heads", "q_len", "kv_len"
            ways.append((axes, f".unflatten(0, {sizes[:2]})", (*sizes[:2], *shape[1:])))
    layouts, shapes = [], []
    for axes, index, indexed_shape in ways:
        shape_4d = (*[1] * (4 - len(indexed_shape)), *indexed_shape)
        if len(shape_4d) == 4 and shape_4d not in shapes and _broadcasts(shape_4d, sizes):
            shapes.append(shape_4d)
            names = [name if n != 1 else "1" for name, n in zip(axes, shape, strict=True)]
            layouts.append((f"({', '.join(names)}{',' * (len(names) == 1)})", index))
    return layouts


def _broadcasts(shape: tuple[int, ...], sizes: CallSizes | None) -> bool:
    return sizes is None or all(n in (1, size) for n, size in zip(shape, sizes, strict=True))


def _call(cls: type) -> str:
    """Return the call of a class of the library: `causal()`, `sliding_window(window)`."""
    required = [
        name
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is parameter.empty
    ]
    return f"{cls.__name__}({', '.join(required)})"


def _is_array(argument: Any) -> bool:
    """Return whether a value is a NumPy array of numbers, without loading NumPy."""
    kind = type(argument)
    return (
        kind.__module__ == "numpy" and kind.__name__ == "ndarray" and argument.dtype.kind in "biufc"
    )


def _is_block_mask(argument: Any) -> bool:
    """Return whether a value looks like a block mask; `blocks` may not be imported here."""
    return (
        hasattr(argument, "tiles") and hasattr(argument, "mask") and not isinstance(argument, type)
    )


def _show(argument: Any) -> str:
    if isinstance(argument, type):
        return argument.__qualname__
    return repr(argument) if isinstance(argument, Mod) else reprlib.repr(argument)
