"""What was given in place of a score or a mask, and what to write instead: the words of errors."""

import inspect
import reprlib
from typing import Any

from torch import Tensor

from .mod import Mod

Sizes = tuple[int, int, int, int]

TAKES = {"score": "(score, b, h, q_idx, kv_idx)", "mask": "(b, h, q_idx, kv_idx)"}
_EXAMPLE = {"score": "softcap(30.0)", "mask": "causal()"}


def suggestion(kind: str, given: Any, sizes: Sizes | None = None) -> str:
    """The message for a `kind`, "score" or "mask", that is none, in a call of these sizes."""
    if isinstance(given, Tensor) or _is_array(given):
        return f"{kind} is {_tensor_as(kind, given, sizes, f'pass {kind}=')}"
    if _is_block_mask(given):
        way = "pass it as mask=" if kind == "score" else "its .mask is what it was built from"
        return f"{kind} is a block mask; {way}"
    return f"{kind}={_shown(given)} is {_as(kind, given, f'pass {kind}=')}"


def not_an_operand(sign: str, given: Any) -> str:
    """The message for an operand of `sign` that is none."""
    kind = "score" if sign == ">>" else "mask"
    if isinstance(given, Tensor) or _is_array(given):
        return f"{sign} combines {kind}s, but this is {_tensor_as(kind, given, None, 'write ')}"
    if _is_block_mask(given):
        return (
            f"{sign} combines {kind}s, but this is a block mask; combine what it was built from, "
            "its .mask, and build a block mask of the result"
        )
    return f"{sign} combines {kind}s, but {_shown(given)} is {_as(kind, given, 'write ')}"


def _as(kind: str, given: Any, write: str) -> str:
    """What something is, and what to write for it."""
    if isinstance(given, Mod):
        other, text = given.role, repr(given)
        return f"a {other}; pass it as {other}=" + (text if "<" not in text else "")
    if isinstance(given, type) and issubclass(given, Mod):
        if (other := given.role) != kind:
            return f"the class of a {other}; pass {other}={_call(given)}"
        return f"a class; {write}{_call(given)}"
    if isinstance(given, type):
        return f"a class; {write}{given.__qualname__}(...), an object of it"
    named = Mod.kinds.get(given) if isinstance(given, str) and given.islower() else None
    if named is not None:
        other = named.role
        return f"a text; {write if other == kind else f'pass {other}='}headway.{_call(named)}"
    flag = "; PyTorch's is_causal=True is mask=headway.causal()" if given is True else ""
    return (
        f"no function; a {kind} is a function of {TAKES[kind]} or a value of the library such as "
        f"headway.{_EXAMPLE[kind]}{flag}"
    )


def _tensor_as(kind: str, given: Any, sizes: Sizes | None, write: str) -> str:
    """What a tensor is, and every way to make a score or mask of it that a call of these sizes
    takes. In what it says to write, m is the tensor."""
    m = "torch.from_numpy(m)" if _is_array(given) else "m"
    shape, dtype = tuple(given.shape), str(given.dtype).removeprefix("torch.")
    start = f"a {'NumPy array' if _is_array(given) else 'tensor'} {shape} {dtype}"
    if dtype.startswith("complex"):
        return f"{start}; a {kind} is made of a bool or float tensor"
    found = layouts_of(shape, sizes)
    if not found:
        whole = "(b, h, q_len, kv_len)" + (f" = {sizes}" if sizes else "")
        return (
            f"{start}, which does not broadcast to {whole}; headway.dense(m) is made of a bool "
            "tensor that does, headway.bias(m) of a float one"
        )
    ways = []
    for n, (axes, index) in enumerate(found):
        made = _made(kind, dtype, m + index, write)
        ways.append(f"as {axes} {' or '.join(made if n == 0 else made[:1])}")
    text = f"{start}; {', '.join(ways)}"
    by_key = any(index == "[:, None, None]" for _, index in found)
    if by_key and "float" not in dtype and (sizes is None or shape[0] == sizes[0]):
        own = write if kind == "mask" else "pass mask="
        text += f"; or, where every row keeps its first keys, {own}headway.padding({m}.sum(-1))"
    return text


def _made(kind: str, dtype: str, m: str, write: str) -> list[str]:
    """The ways to make a score or mask of m, by its dtype; the likelier first."""
    as_mask, as_score = (write if kind == own else f"pass {own}=" for own in ("mask", "score"))
    if dtype == "bool":
        return [f"{as_mask}headway.dense({m})"]
    kept = f"{as_mask}headway.dense({m}.bool()) if 1 keeps a pair and 0 drops it"
    added = f"{as_score}headway.bias({m})"
    if "float" not in dtype:
        return [kept]
    return [added] if kind == "score" else [f"{added} if it is added to the scores", kept]


def layouts_of(shape: tuple[int, ...], sizes: Sizes | None) -> list[tuple[str, str]]:
    """How a tensor can lie over a call of these sizes, any if None: what its axes then are, and the
    index that makes it broadcast to (b, h, q_len, kv_len)."""
    ways = [(("batch", "heads", "q_len", "kv_len")[-len(shape) :] if shape else (), "", shape)]
    if len(shape) == 2:
        first, keys = shape
        ways.append((("batch", "kv_len"), "[:, None, None]", (first, 1, 1, keys)))
    if len(shape) == 3:
        ways.append((("batch", "q_len", "kv_len"), "[:, None]", (shape[0], 1, *shape[1:])))
        if sizes is not None and shape[0] == sizes[0] * sizes[1]:
            axes = "batch * heads", "q_len", "kv_len"
            ways.append((axes, f".unflatten(0, {sizes[:2]})", (*sizes[:2], *shape[1:])))
    found, seen = [], []
    for axes, index, laid in ways:
        whole = (*[1] * (4 - len(laid)), *laid)
        if len(whole) == 4 and whole not in seen and _broadcasts(whole, sizes):
            seen.append(whole)
            names = [name if n != 1 else "1" for name, n in zip(axes, shape, strict=True)]
            found.append((f"({', '.join(names)}{',' * (len(names) == 1)})", index))
    return found


def _broadcasts(shape: tuple[int, ...], sizes: Sizes | None) -> bool:
    return sizes is None or all(n in (1, size) for n, size in zip(shape, sizes, strict=True))


def _call(cls: type) -> str:
    """How a class of the library is called: `causal()`, `sliding_window(window)`."""
    needed = [
        name
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is parameter.empty
    ]
    return f"{cls.__name__}({', '.join(needed)})"


def _is_array(given: Any) -> bool:
    """A NumPy array of numbers, without loading NumPy."""
    kind = type(given)
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray" and given.dtype.kind in "biufc"


def _is_block_mask(given: Any) -> bool:
    """`blocks` stands above this package."""
    return hasattr(given, "tiles") and hasattr(given, "mask") and not isinstance(given, type)


def _shown(given: Any) -> str:
    if isinstance(given, type):
        return given.__qualname__
    return repr(given) if isinstance(given, Mod) else reprlib.repr(given)
