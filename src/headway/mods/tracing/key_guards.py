"""Guard all that a recorded function can read, where Dynamo would take much of it for constant.

Dynamo guards what it expects to change. It does not guard builtins that a module hides later,
methods of classes, members of enums, hooks of modules or the sign of zero. So the walk of
`capture.py` goes over everything that a recorded function can reach, and its key is one more guard
of the compiled program: if it differs, Dynamo compiles anew. Code that Dynamo ran and the walk did
not reach cannot be guarded, and is refused.

Dynamo knows where it found an object (its source), so the key is that of the object that is there
in each call. Tensors and symbolic numbers are left to Dynamo.
"""

import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .bytecode import names_in_code
from .capture import ReadWalker, collect_reads
from .guards import Path
from .locations import file_owner, quote

_NUMBERS = {int, float}
_protocols: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


class Root(NamedTuple):
    """An object that a recorded function reaches: where Dynamo finds it (None: it is always the
    same), what it is now, and whether it was called."""

    source: Any
    value: Any
    called: bool


class _KeyWalker(ReadWalker):
    """A walk for a key that leaves out what Dynamo guards or passes: tensors, symbolic numbers."""

    def __init__(
        self, names: Iterable[str] = (), place: str = "", symbols: frozenset[str] = frozenset(),
        namespace: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(guarding=False)
        self.attribute_names = dict.fromkeys(names)
        self.place, self.symbols, self.namespace = place, symbols, namespace

    def follow_function(self, fn: types.FunctionType, path: Path, ancestors: tuple) -> None:
        super().follow_function(fn, path, ancestors)
        if fn.__code__ not in self.reads.codes:  # a pure one
            return
        handler, space = names_in_code(fn.__code__).handler, fn.__globals__
        if handler is not None:
            self.mark_opaque(*handler)
        module = sys.modules.get(space.get("__name__", ""))
        if space is not self.namespace and (module is None or vars(module) is not space):
            # Dynamo would read the globals of the module of that name.
            place = fn.__code__.co_filename, fn.__code__.co_firstlineno
            self.mark_opaque(f"runs {fn.__qualname__}, whose globals are no module's", place)

    def follow(self, value: Any, path: Path, ancestors: tuple[int, ...]) -> None:
        if self.symbols and type(value) in _NUMBERS and self._name(path) in self.symbols:
            self.reads.key.append(type(value))
        else:
            super().follow(value, path, ancestors)

    def follow_protocol(self, kind: type) -> None:
        """Refuse a class that got or lost methods of a protocol: Dynamo keeps what it saw first."""
        super().follow_protocol(kind)
        names = frozenset(
            name for cls in kind.__mro__ for name in cls.__dict__ if name[:2] == name[-2:] == "__"
        )
        if _protocols.setdefault(kind, names) != names:
            self.mark_opaque(f"uses {kind.__name__}, a class that changed after it was compiled")

    def follow_items(self, items: Any, keys: Any, step: str, path: Path, ancestors: tuple) -> None:
        for key, item in zip(keys, items, strict=True):
            self.follow(item, (*path, (step, key)), ancestors)

    def follow_tensor(self, tensor: Any, path: Path, ancestors: tuple, first_time: bool) -> None:
        self.reads.key.append(type(tensor))

    def follow_root(self, root: Any, called: bool) -> None:
        """Follow an object; one that is not called, by the names of its attributes alone."""
        if called:
            self.follow(root, (), ())
        else:
            self.follow_method_self(root, (), ())

    def _name(self, path: Path) -> str:
        """Return how Dynamo writes the source of an object."""
        text = self.place
        for step, key in path:
            if step == "attr":
                text += f".{key}"
            elif step == "global":
                text = f"G[{key!r}]"
            elif step == "cell":
                text += f".__closure__[{key}].cell_contents"
            else:
                text += f"[{key!r}]"
        return text


def guard_recorded(name: str, first: int | None) -> tuple[str, str | None]:
    """Guard what the function in the local `name` of the frame that Dynamo traces can read.

    Return its name and, if something cannot be guarded, the reason.

    - `first`: how many functions Dynamo had inlined before it ran this one; None before that: then
      only what Dynamo cannot run is looked for, and there are no guards yet.
    """
    tx = current_frame()
    if tx is None:
        return "function", None
    ran = {} if first is None else dict.fromkeys(_traced_codes()[first:])
    try:
        roots = list(_roots(tx, tx.symbolic_locals[name], ran))
    except _UnknownValueError as error:
        return "function", f"uses {error}, which is not guarded"
    walker = _follow(tx, roots)
    functions = [root.value for root in roots if isinstance(root.value, types.FunctionType)]
    function = functions[0].__qualname__ if functions else "function"
    if walker.reads.opaque_read is not None:
        return function, walker.reads.opaque_read
    for code in ran:
        if code not in walker.reads.codes and file_owner(code.co_filename) != "internal":
            place = quote((code.co_filename, code.co_firstlineno))
            return function, f"runs {code.co_qualname}, which no name leads to{place}"
    if first is not None:
        for root in roots:
            _install(root, walker)
    return function, None


def guard_constant(name: str) -> None:
    """Guard what a function that was traced as a constant can read, unless Dynamo guards it all."""
    tx = current_frame()
    if tx is None:
        return
    roots = list(_roots(tx, tx.symbolic_locals[name], {}))
    if not all(collect_reads(root.value, guarding=True).fully_guarded for root in roots):
        walker = _follow(tx, roots)
        for root in roots:
            _install(root, walker)


def current_frame() -> Any:
    """Return Dynamo's translator of the frame that it is tracing; None where Dynamo is not at work,
    as under `torch.export` with strict=False, whose programs have no guards."""
    from torch._dynamo.symbolic_convert import tls

    tx: Any = getattr(tls, "current_tx", None)
    return None if tx is None else tx.output.current_tx


def _follow(tx: Any, roots: list[Root]) -> _KeyWalker:
    """Return a walk over all roots, which knows the names of all attributes."""
    sources = chain.from_iterable(tx.output.shape_env.var_to_sources.values())
    symbols = frozenset(source.name for source in sources)
    walker = _KeyWalker((), "", symbols, tx.output.root_tx.f_globals)
    for root in roots:
        walker.follow_root(root.value, root.called)
    walker.finish()
    return walker


def allow_side_effects(allowed: bool) -> bool:
    """Say whether what Dynamo traces may change what exists outside of the body of a higher-order
    operator (a checkpoint, for example); return what was said before."""
    tx = current_frame()
    if tx is None:
        return allowed
    tracer = tx.output.current_tracer
    before = tracer.unsafe_allow_externally_visible_side_effects
    tracer.unsafe_allow_externally_visible_side_effects = allowed
    return before


def count_traced() -> int:
    """Return how many functions Dynamo has inlined."""
    return len(_traced_codes())


def _traced_codes() -> list[types.CodeType]:
    import torch

    context = torch._guards.TracingContext.try_get()
    return [] if context is None else context.traced_code


class _UnknownValueError(Exception):
    """A value of Dynamo's that stands for no object."""


def _roots(tx: Any, variable: Any, ran: dict[types.CodeType, None]) -> Iterator[Root]:
    """Yield the objects that a variable of Dynamo's can read, outside of the compiled region."""
    from torch._dynamo import variables as dynamo
    from torch._dynamo.exc import Unsupported

    if hasattr(variable, "is_realized"):
        if not variable.is_realized():  # nothing was read
            return
        variable = variable.realize()
    source = variable.source
    if isinstance(variable, dynamo.NestedUserFunctionVariable):
        code = variable.get_code()
        cells = tuple(types.CellType() for _ in code.co_freevars)
        yield Root(
            None, types.FunctionType(code, variable.f_globals, code.co_name, None, cells), True
        )
        parts = [variable.defaults, variable.kwdefaults]
        if variable.closure is not None:
            closure: Any = variable.closure
            for cell in closure.items:
                with suppress(Unsupported):  # a name not yet assigned
                    parts.append(tx.output.side_effects.load_cell(cell))
    elif isinstance(variable, dynamo.UserMethodVariable):
        yield Root(None, variable.fn, True)
        parts = [variable.obj]
    elif isinstance(variable, dynamo.UserFunctionVariable):
        yield Root(source, variable.fn, True)
        parts = []
    elif isinstance(variable, dynamo.FunctoolsPartialVariable):
        parts = [variable.func, *variable.args, *variable.keywords.values()]
    elif isinstance(variable, dynamo.ConstDictVariable):
        parts = list(variable.items.values())
    elif isinstance(variable, dynamo.BaseListVariable):
        parts = list(variable.items)
    elif isinstance(variable, (dynamo.TensorVariable, dynamo.SymNodeVariable)):
        parts = []
    elif isinstance(variable, dynamo.UserDefinedObjectVariable):
        value = variable.value
        kind = type(value)
        called = any(
            getattr(cls.__dict__.get(name), "__code__", None) in ran
            for cls in kind.__mro__
            for name in ("forward", "__call__")
        )
        if source is None:
            yield Root(None, kind, called)
            parts = list(tx.output.side_effects.store_attr_mutations.get(variable, {}).values())
        else:
            yield Root(source, value, called)
            parts = []
    else:
        try:
            value = variable.as_python_constant()
        except NotImplementedError as error:
            raise _UnknownValueError(f"a {variable.python_type_name()}") from error
        yield Root(source, value, True)
        parts = []
    for part in parts:
        if part is not None:
            yield from _roots(tx, part, ran)


def _install(root: Root, whole: _KeyWalker) -> None:
    """Add the guard that the key of an object is what it is now."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    source, constant, called = root
    place = "" if source is None else source.name
    names, symbols, namespace = tuple(whole.attribute_names), whole.symbols, whole.namespace

    def key(value: Any) -> list[Any] | None:
        walker = _KeyWalker(names, place, symbols, namespace)
        walker.follow_root(value, called)
        walker.finish()
        return None if walker.reads.opaque_read else walker.reads.key

    expected = key(constant)
    if source is None:
        is_same = lambda _: key(constant) == expected
    else:
        constant, is_same = None, lambda value: key(value) == expected

    def create(builder: Any, guard: Any) -> None:
        manager = builder.guard_manager.root
        if source is not None:
            manager = builder.get_guard_manager(guard)
        manager.add_lambda_guard(
            is_same, [f"what a score or mask reads: {place}"], guard.user_stack
        )

    install_guard(Guard(GlobalStateSource() if source is None else source, create))
