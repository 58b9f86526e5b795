"""What code reads by name: globals and attributes, once for a code object and those inside it."""

import dis
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .locations import Place
from .purity import is_fixed_module

_DUNDERS = frozenset(
    "__class__ __call__ __getitem__ __len__ __contains__ __and__ __or__ __xor__ __invert__ __add__ "
    "__sub__ __mul__ __truediv__ __floordiv__ __mod__ __neg__ __abs__ __eq__ __ne__ __lt__ __le__ "
    "__gt__ __ge__ __init__ __enter__ __exit__".split()
)


class Code(NamedTuple):
    """Of a code object and the functions inside it: the names of globals and attributes that they
    read, and what in them cannot be followed, with its place. Compared by identity: one of equal
    code objects stands for all."""

    all: tuple[types.CodeType, ...]
    globals: tuple[tuple[str, Place], ...]
    attributes: tuple[str, ...]
    unseen: tuple[str, Place] | None
    place: Place

    __hash__ = object.__hash__
    __eq__ = object.__eq__


_codes: dict[int, tuple[types.CodeType, Code]] = {}


def code_of(code: types.CodeType) -> Code:
    """Looked up by identity, since a code object hashes all of its constants each time."""
    known = _codes.get(id(code))
    if known is None:
        if len(_codes) >= 4096:
            _codes.clear()
        known = _codes[id(code)] = code, _names(code)  # holds the code: the id stays its own
    return known[1]


@lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> Code:
    codes = list(_nested(code))
    names: dict[str, dict[str, Place]] = {"global": {}, "attr": {}}
    unseen: tuple[str, Place] | None = None
    for of in codes:
        line = of.co_firstlineno
        for step in dis.get_instructions(of):
            line = step.starts_line if type(step.starts_line) is int else line
            line = getattr(step, "line_number", None) or line
            what = _NAMING.get(step.opname)
            if what in names:
                names[what].setdefault(step.argval, (of.co_filename, line))
            elif what is None and step.opcode in dis.hasname:
                unseen = unseen or (f"has the instruction {step.opname}", (of.co_filename, line))
            odd = what == "attr" and step.argval[:2] == "__" and step.argval not in _DUNDERS
            odd |= what == "import" and not is_fixed_module(step.argval)
            if odd or step.opname in _OPAQUE:
                what = f"reads {step.argval}" if odd else f"has the instruction {step.opname}"
                unseen = unseen or (what, (of.co_filename, line))
    place = code.co_filename, code.co_firstlineno
    named = tuple(names["global"].items()), tuple(names["attr"])
    return Code(tuple(codes), *named, unseen, place)


# What is written is no read (and a trace that changes what it reads is not kept: `lowering`).
_NAMING = {
    "LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_ATTR": "attr", "LOAD_METHOD": "attr",
    "LOAD_SUPER_ATTR": "attr", "IMPORT_FROM": "attr", "IMPORT_NAME": "import",
    "STORE_ATTR": "", "STORE_GLOBAL": "", "STORE_NAME": "", "DELETE_ATTR": "", "DELETE_GLOBAL": "",
    "DELETE_NAME": "",
}  # fmt: skip
_OPAQUE = {"MATCH_CLASS", "LOAD_BUILD_CLASS", "LOAD_LOCALS", "IMPORT_STAR"}


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)
