"""List the globals and attributes that byte code reads by name, nested functions included."""

import dis
import sys
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .locations import Location
from .purity import READING_METHODS, is_constant_module

_DUNDERS = frozenset(
    "__class__ __call__ __getitem__ __len__ __contains__ __and__ __or__ __xor__ __invert__ __add__ "
    "__sub__ __mul__ __truediv__ __floordiv__ __mod__ __neg__ __abs__ __eq__ __ne__ __lt__ __le__ "
    "__gt__ __ge__ __init__ __enter__ __exit__".split()
)


class CodeNames(NamedTuple):
    """The names that a code object and the functions nested in it read.

    - `codes`: these code objects.
    - `globals`: names of globals, each with its first location.
    - `attributes`: names of attributes.
    - `opaque_read`: the first instruction that cannot be followed, with its location.
    - `reading_method`: the first method in C that reads by name and is not called right there, with
      its location: nobody sees when other C code calls it.
    - `compares_objects`: it asks more of numbers and strings than their values: which are the same
      one (`is`), or what the text of an object is.
    - `handler`: the first handler of exceptions, whose code may depend on what is missing.
    - `location`: the first line of the code.

    Compared by identity: equal code objects share one object.
    """

    codes: tuple[types.CodeType, ...]
    globals: tuple[tuple[str, Location], ...]
    attributes: tuple[str, ...]
    opaque_read: tuple[str, Location] | None
    reading_method: tuple[str, Location] | None
    compares_objects: bool
    handler: tuple[str, Location] | None
    location: Location

    __hash__ = object.__hash__
    __eq__ = object.__eq__


# By identity: a code object hashes all of its constants each time. The value holds the code object,
# so that its id stays valid.
_names_by_id: dict[int, tuple[types.CodeType, CodeNames]] = {}


def names_in_code(code: types.CodeType) -> CodeNames:
    """Return the names that code reads; scanned once for a code object."""
    cached = _names_by_id.get(id(code))
    if cached is None:
        if len(_names_by_id) >= 4096:
            _names_by_id.clear()
        cached = _names_by_id[id(code)] = code, _scan(code)
    return cached[1]


@lru_cache(maxsize=4096)
def _scan(code: types.CodeType) -> CodeNames:
    codes = list(_nested(code))
    names: dict[str, dict[str, Location]] = {"global": {}, "attr": {}}
    opaque_read: tuple[str, Location] | None = None
    reading_method: tuple[str, Location] | None = None
    compares_objects = False
    handler: tuple[str, Location] | None = None
    for nested in codes:
        line, before = nested.co_firstlineno, ""
        formats = any(type(const) is str and "%" in const for const in nested.co_consts)
        handlers = 0
        for op in dis.get_instructions(nested):
            line = op.starts_line if type(op.starts_line) is int else line
            line = getattr(op, "line_number", None) or line
            location = nested.co_filename, line
            handlers += (op.opname == "PUSH_EXC_INFO") - (op.opname == "WITH_EXCEPT_START")
            access = _ACCESS.get(op.opname)
            compares_objects |= (
                (op.opname == "IS_OP" and before != "LOAD_CONST")
                or op.opname.startswith("FORMAT_")
                or (op.opname == "BINARY_OP" and op.argrepr == "%" and formats)
                or op.argval in _OBJECT_FUNCTIONS
            )
            before = op.opname
            if access in names:
                names[access].setdefault(op.argval, location)
                if op.argval in READING_METHODS and not _is_call(op):
                    reading_method = reading_method or (op.argval, location)
            elif access is None and op.opcode in dis.hasname:
                opaque_read = opaque_read or (f"has the instruction {op.opname}", location)
            by_dunder = access == "attr" and op.argval[:2] == "__" and op.argval not in _DUNDERS
            if by_dunder or (access == "import" and not is_constant_module(op.argval)):
                opaque_read = opaque_read or (f"reads {op.argval}", location)
            elif op.opname == "BEFORE_WITH":
                names["attr"].update({"__enter__": location, "__exit__": location})
            elif op.opname in _OPAQUE_OPCODES:
                opaque_read = opaque_read or (f"has the instruction {op.opname}", location)
        if handlers:
            location = nested.co_filename, nested.co_firstlineno
            handler = handler or (
                "handles exceptions, and what is missing is not guarded",
                location,
            )
    location = code.co_filename, code.co_firstlineno
    return CodeNames(
        tuple(codes),
        tuple(names["global"].items()),
        tuple(names["attr"]),
        opaque_read,
        reading_method,
        compares_objects,
        handler,
        location,
    )


# Instructions with a name, and what they read: "" for writes. (`lowering` does not keep a trace
# that changes what it reads.)
_ACCESS = {
    "LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_ATTR": "attr", "LOAD_METHOD": "attr",
    "LOAD_SUPER_ATTR": "attr", "IMPORT_FROM": "attr", "IMPORT_NAME": "import",
    "STORE_ATTR": "", "STORE_GLOBAL": "", "STORE_NAME": "", "DELETE_ATTR": "", "DELETE_GLOBAL": "",
    "DELETE_NAME": "",
}  # fmt: skip
_OBJECT_FUNCTIONS = ("str", "is_", "is_not")  # a tuple, since some arguments have no hash
_OPAQUE_OPCODES = {"MATCH_CLASS", "LOAD_BUILD_CLASS", "LOAD_LOCALS", "IMPORT_STAR"}


def _is_call(op: dis.Instruction) -> bool:
    """Return whether an attribute is loaded to be called (from Python 3.12 on, a bit says so)."""
    is_load = op.opname == "LOAD_ATTR"
    return not is_load or (sys.version_info >= (3, 12) and bool((op.arg or 0) & 1))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)
