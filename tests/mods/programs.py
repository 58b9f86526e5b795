"""Random Python programs that define a mask or a score, and one thing about each to change.

A program is text. A *value* (a number, a word, a tensor, a function) is put somewhere by up to three
*forms*, one inside another: an item of a list that is an attribute of a submodule that a property
returns. A *host* is the function that reads the values: a closure, a method, a partial, a module.
Every form and host knows statements that change what is read there, so that a change somewhere in
the middle of such a chain changes the meaning of the function, and nothing else does.
"""

import random
import re
from dataclasses import dataclass, replace
from string import Template

B, H, Q_LEN, KV_LEN = 2, 2, 11, 13
LONGEST = max(Q_LEN, KV_LEN)

PRELUDE = """\
import collections, contextvars, dataclasses, enum, functools, itertools, math, operator, os, sys
import threading, types, typing, weakref
import numpy, torch
from torch import nn, tensor
import headway as hw
LEARNED = []
def learn(numbers):
    LEARNED.append(nn.Parameter(tensor(numbers)))
    return LEARNED[-1]
def put_in(holder, name, value):
    setattr(holder, name, value)
    return holder
"""


def asserts(value, i, j):
    """Return the value. (pytest rewrites assertions of the files that have tests.)"""
    assert i > j, "of a symbol"
    return value


@dataclass(frozen=True)
class Change:
    what: str  # the form or host, and how: what failures are counted by
    code: str


@dataclass(frozen=True)
class Held:
    """A value behind the global name `root`; `read` says how to get at it, with $r for the root."""

    root: str
    other: str  # an expression that makes another root, which holds the other value
    read: str
    kind: str
    changes: tuple[Change, ...] = ()
    values: bool = False  # reading it reads a tensor's value into Python


@dataclass
class Program:
    seed: int
    source: str
    changes: list[Change]  # applied one after the other; the function is called after each
    mask: str | None  # expressions
    score: str | None
    entrance: str
    name: str  # of the namespace that it runs in
    registered: bool  # is there a module of that name, with that namespace?
    values: bool
    forms: tuple[str, ...]

    def __str__(self) -> str:
        steps = "".join(f"\n# -- then: {c.what}\n{c.code}" for c in self.changes)
        where = "" if self.registered else ", in a namespace that is no module"
        return (
            f"# program {self.seed}: {self.entrance}(score={self.score}, mask={self.mask}), "
            f"__name__ = {self.name!r}{where}\n{self.source}{steps}"
        )


@dataclass(frozen=True)
class Form:
    """Where to put a value: $v is its root, $o another root, $of_x, $of_g ... how to read it from
    such a name, $n a number that makes names unique. With `inside` the form reads the value."""

    name: str
    setup: str
    root: str
    other: str
    read: str
    changes: tuple[str, ...] = ()
    kinds: str = "any"  # any | data (no functions: they would bind) | number | int | bool
    inside: bool = False


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def _class(name: str, *methods: str, base: str = "", init: str = "self.w = w") -> str:
    if base == "nn.Module":
        init = f"super().__init__()\n{init}"
    lines = [
        f"class {name}({base}):",
        _indented("def __init__(self, w):"),
        _indented(_indented(init)),
    ]
    return "\n".join([*lines, *map(_indented, methods)]) + "\n"


_GET = "def get(self):\n    return self.w"
_MADE = "I$n = C$n($v)"
_NEW = "C$n($o)"
_WRITE = ("I$n.w = $o",)
_NS = "types.SimpleNamespace(w=$o)"

FORMS = (
    # -- containers
    Form("list", "L$n = [0, $v]", "L$n", "[0, $o]", "$r[1]", ("L$n[1] = $o", "L$n[:] = [0, $o]")),
    Form("tuple", "L$n = (0, $v)", "L$n", "(0, $o)", "$r[-1]"),
    Form("dict", "D$n = {'w': $v, 'x': 0}", "D$n", "{'w': $o}", "$r['w']",
         ("D$n['w'] = $o", "D$n.update(w=$o)")),
    Form("dict.get", "D$n = {'w': $v}", "D$n", "{'w': $o}", "$r.get('w')", ("D$n['w'] = $o",)),
    Form("nested", "D$n = {'a': [1, ($v, 2)]}", "D$n", "{'a': [1, ($o, 2)]}", "$r['a'][1][0]",
         ("D$n['a'][1] = ($o, 2)", "D$n['a'] = [1, ($o, 2)]")),
    Form("key in a global", "K$n = 0\nL$n = [$v, $o]", "L$n", "[$o, $v]", "$r[K$n]",
         ("K$n = 1", "L$n.reverse()")),
    Form("word as key", "K$n = 'b'\nD$n = {'b': $v, 'c': $o}", "D$n", "{'b': $o}", "$r[K$n]",
         ("K$n = 'c'", "D$n['b'] = $o")),
    Form("length as key", "K$n = [0]\nL$n = [$v, $o]", "L$n", "[$o, $v]", "$r[len(K$n) - 1]",
         ("K$n.append(1)",)),
    Form("slice", "K$n = 0\nL$n = [$v, $o]", "L$n", "[$o, $v]", "$r[K$n:][0]", ("K$n = 1",)),
    Form("last of a loop", "def H$n(x):\n    for item in x:\n        pass\n    return item\nL$n = [0, $v]",
         "L$n", "[0, $o]", "H$n($r)", ("L$n.append($o)", "L$n[1] = $o")),
    Form("unpacked", "def H$n(x):\n    _, item = x\n    return item\nL$n = [0, $v]",
         "L$n", "[0, $o]", "H$n($r)", ("L$n[1] = $o",)),
    Form("comprehension", "L$n = [0, $v]", "L$n", "[0, $o]", "[x for x in $r][1]", ("L$n[1] = $o",)),
    Form("first value", "D$n = {'w': $v}", "D$n", "{'w': $o}", "next(iter($r.values()))",
         ("D$n['w'] = $o",)),
    Form("deque", "L$n = collections.deque([$v])", "L$n", "collections.deque([$o])", "$r[0]",
         ("L$n[0] = $o", "L$n.appendleft($o)")),
    Form("ChainMap", "L$n = collections.ChainMap({}, {'w': $v})", "L$n",
         "collections.ChainMap({'w': $o})", "$r['w']", ("L$n['w'] = $o",)),
    Form("mappingproxy", "D$n = {'w': $v}\nP$n = types.MappingProxyType(D$n)", "P$n",
         "types.MappingProxyType({'w': $o})", "$r['w']", ("D$n['w'] = $o",)),
    Form("attribute dict", "class A$n(dict):\n    __getattr__ = dict.__getitem__\nD$n = A$n(w=$v)",
         "D$n", "A$n(w=$o)", "$r.w", ("D$n['w'] = $o",)),
    Form("list of a class", "class A$n(list):\n    pass\nL$n = A$n([0, $v])", "L$n", "A$n([0, $o])",
         "$r[1]", ("L$n[1] = $o",)),
    Form("attribute of a list", "class A$n(list):\n    pass\nL$n = put_in(A$n(), 'w', $v)", "L$n",
         "put_in(A$n(), 'w', $o)", "$r.w", ("L$n.w = $o",)),
    Form("itemgetter", "L$n = [0, $v]", "L$n", "[0, $o]", "operator.itemgetter(1)($r)",
         ("L$n[1] = $o",)),
    # -- attributes
    Form("namespace", "N$n = types.SimpleNamespace(w=$v)", "N$n", _NS, "$r.w", ("N$n.w = $o",)),
    Form("chain", "N$n = types.SimpleNamespace(a=types.SimpleNamespace(w=$v))", "N$n",
         "types.SimpleNamespace(a=types.SimpleNamespace(w=$o))", "$r.a.w",
         ("N$n.a.w = $o", "N$n.a = types.SimpleNamespace(w=$o)")),
    Form("instance", _class("C$n") + _MADE, "I$n", _NEW, "$r.w",
         (*_WRITE, "I$n.__dict__['w'] = $o")),
    Form("class", "class C$n:\n    w = $v", "C$n", "type('C$n', (), {'w': $o})", "$r.w",
         ("C$n.w = $o",), "data"),
    Form("class of an instance", "class C$n:\n    w = $v\nI$n = C$n()", "I$n",
         "type('C$n', (), {'w': $o})()", "$r.w", ("C$n.w = $o", "I$n.w = $o"), "data"),
    Form("inherited", "class B$n:\n    w = $v\nclass C$n(B$n):\n    pass\nI$n = C$n()", "I$n",
         "type('C$n', (), {'w': $o})()", "$r.w", ("B$n.w = $o", "C$n.w = $o", "I$n.w = $o"), "data"),
    Form("another base", "class A$n:\n    w = $v\nclass B$n:\n    w = $o\nclass C$n(A$n):\n    pass\nI$n = C$n()",
         "I$n", "B$n()", "$r.w", ("C$n.__bases__ = (B$n,)", "I$n.__class__ = B$n"), "data"),
    Form("metaclass", "class M$n(type):\n    w = $v\nclass C$n(metaclass=M$n):\n    pass", "C$n",
         _NS, "$r.w", ("M$n.w = $o", "C$n.w = $o"), "data"),
    Form("__slots__", "class C$n:\n    __slots__ = ('w',)\n    def __init__(self, w):\n        self.w = w\n"
         + _MADE, "I$n", _NEW, "$r.w", _WRITE),
    Form("__slots__ of a base", "class B$n:\n    __slots__ = ('w',)\n"
         + _class("C$n", base="B$n") + _MADE, "I$n", _NEW, "$r.w", _WRITE),
    Form("attribute of a function", "def F$n():\n    pass\nF$n.w = $v", "F$n", _NS, "$r.w",
         ("F$n.w = $o",)),
    Form("dataclass", "@dataclasses.dataclass\nclass C$n:\n    w: object\n" + _MADE, "I$n", _NEW,
         "$r.w", _WRITE),
    Form("frozen dataclass", "@dataclasses.dataclass(frozen=True, eq=False)\nclass C$n:\n    w: object\n"
         + _MADE, "I$n", "dataclasses.replace(I$n, w=$o)", "$r.w",
         ("object.__setattr__(I$n, 'w', $o)",)),
    Form("namedtuple", "C$n = collections.namedtuple('C$n', 'x w')\nI$n = C$n(0, $v)", "I$n",
         "I$n._replace(w=$o)", "$r.w"),
    Form("thread local", "I$n = put_in(threading.local(), 'w', $v)", "I$n",
         "put_in(threading.local(), 'w', $o)", "$r.w", _WRITE),
    Form("weak reference", _class("C$n") + _MADE + "\nR$n = weakref.ref(I$n)", "R$n",
         "(lambda new=types.SimpleNamespace(w=$o): new)", "$r().w", _WRITE),
    Form("enum", "class E$n(enum.Enum):\n    A = $v\n    B = $o\nS$n = E$n.A", "S$n", "E$n.B",
         "$r.value", (), "number"),
    Form("IntEnum", "class E$n(enum.IntEnum):\n    A = $v\n    B = $o\nS$n = E$n.A", "S$n", "E$n.B",
         "$r", (), "int"),
    Form("attribute of an enum", "class E$n(enum.Enum):\n    A = 1\n    B = 2\nS$n = put_in(E$n.A, 'w', $v)",
         "S$n", "put_in(E$n.B, 'w', $o)", "$r.w", ("S$n.w = $o",)),
    Form("context variable", "V$n = contextvars.ContextVar('V$n')\nV$n.set($v)", "V$n",
         "types.SimpleNamespace(get=lambda new=$o: new)", "$r.get()", ("V$n.set($o)",)),
    # -- what classes can do
    Form("property", _class("C$n", "@property\ndef w(self):\n    return self._w", init="self._w = w")
         + _MADE, "I$n", _NEW, "$r.w", ("I$n._w = $o", "C$n.w = property(lambda self, new=$o: new)")),
    Form("property of a global", "G$n = $v\nclass C$n:\n    @property\n    def w(self):\n        return $of_g\nI$n = C$n()",
         "I$n", "types.SimpleNamespace(w=$now)", "$r.w", ("G$n = $o",), inside=True),
    Form("cached property", _class("C$n", "@functools.cached_property\ndef w(self):\n    return self.base",
         init="self.base = w") + _MADE, "I$n", _NEW, "$r.w",
         ("I$n.base = $o; I$n.__dict__.pop('w', None)", "I$n.__dict__['w'] = $o")),
    Form("method", _class("C$n", _GET) + _MADE, "I$n", _NEW, "$r.get()",
         (*_WRITE, "C$n.get = lambda self, new=$o: new", "I$n.get = lambda new=$o: new")),
    Form("bound method", _class("C$n", _GET) + _MADE + "\nH$n = I$n.get", "H$n", "C$n($o).get",
         "$r()", _WRITE),
    Form("method of a method", _class("C$n", "def get(self):\n    return self.inner()",
         "def inner(self):\n    return self.w") + _MADE, "I$n", _NEW, "$r.get()",
         (*_WRITE, "C$n.inner = lambda self, new=$o: new")),
    Form("method of a global", "G$n = $v\nclass C$n:\n    def get(self):\n        return self.inner()\n    def inner(self):\n        return $of_g\nI$n = C$n()",
         "I$n", "types.SimpleNamespace(get=lambda new=$now: new)", "$r.get()", ("G$n = $o",), inside=True),
    Form("static method", "G$n = $v\nclass C$n:\n    @staticmethod\n    def get():\n        return $of_g",
         "C$n", "types.SimpleNamespace(get=lambda new=$now: new)", "$r.get()", ("G$n = $o",), inside=True),
    Form("class method", "class C$n:\n    w = $v\n    @classmethod\n    def get(cls):\n        return cls.w",
         "C$n", "type('C$n', (C$n,), {'w': $o})", "$r.get()", ("C$n.w = $o",), "data"),
    Form("super", _class("B$n", _GET) + "class C$n(B$n):\n    def get(self):\n        return super().get()\n"
         + _MADE, "I$n", _NEW, "$r.get()", (*_WRITE, "B$n.get = lambda self, new=$o: new")),
    Form("__call__", _class("C$n", "def __call__(self):\n    return self.w") + _MADE, "I$n", _NEW,
         "$r()", (*_WRITE, "C$n.__call__ = lambda self, new=$o: new")),
    Form("__getattr__", _class("C$n", "def __getattr__(self, name):\n    return self.__dict__['box'][name]",
         init="self.box = {'w': w}") + _MADE, "I$n", _NEW, "$r.w", ("I$n.box['w'] = $o",)),
    Form("__getattribute__", "G$n = $v\nclass C$n:\n    def __getattribute__(self, name):\n        return G$n\nI$n = C$n()",
         "I$n", _NS, "$r.w", ("G$n = $o",)),
    Form("__getitem__", _class("C$n", "def __getitem__(self, key):\n    return self.w") + _MADE,
         "I$n", _NEW, "$r['w']", _WRITE),
    Form("__iter__", _class("C$n", "def __iter__(self):\n    yield self.w") + _MADE, "I$n", _NEW,
         "next(iter($r))", _WRITE),
    Form("__len__", _class("C$n", "def __len__(self):\n    return self.w") + _MADE, "I$n", _NEW,
         "len($r)", _WRITE, "int"),
    Form("__bool__", _class("C$n", "def __bool__(self):\n    return self.w") + _MADE, "I$n", _NEW,
         "bool($r)", _WRITE, "bool"),
    Form("__index__", _class("C$n", "def __index__(self):\n    return self.w") + _MADE, "I$n", _NEW,
         "operator.index($r)", _WRITE, "int"),
    Form("__add__", _class("C$n", "def __add__(self, other):\n    return self.w") + _MADE, "I$n", _NEW,
         "($r + 0)", _WRITE),
    Form("descriptor", "class D$n:\n    def __get__(self, of, cls=None):\n        return of._w\n"
         + "class C$n:\n    w = D$n()\n    def __init__(self, w):\n        self._w = w\n" + _MADE,
         "I$n", _NEW, "$r.w", ("I$n._w = $o",)),
    # -- modules of PyTorch
    Form("nn.Module", _class("C$n", base="nn.Module") + _MADE, "I$n", _NEW, "$r.w", _WRITE),
    Form("submodule", _class("S$n", base="nn.Module") + _class("C$n", base="nn.Module", init="self.sub = S$n(w)")
         + _MADE, "I$n", _NEW, "$r.sub.w", ("I$n.sub.w = $o", "I$n.sub = S$n($o)")),
    Form("submodule of a submodule", _class("S$n", base="nn.Module")
         + _class("T$n", base="nn.Module", init="self.sub = S$n(w)")
         + _class("C$n", base="nn.Module", init="self.top = T$n(w)") + _MADE, "I$n", _NEW,
         "$r.top.sub.w", ("I$n.top.sub.w = $o", "I$n.top = T$n($o)")),
    Form("ModuleList", _class("S$n", base="nn.Module") + "I$n = nn.ModuleList([nn.Identity(), S$n($v)])",
         "I$n", "nn.ModuleList([nn.Identity(), S$n($o)])", "$r[1].w",
         ("I$n[1].w = $o", "I$n[1] = S$n($o)")),
    Form("ModuleDict", _class("S$n", base="nn.Module") + "I$n = nn.ModuleDict({'a': S$n($v)})", "I$n",
         "nn.ModuleDict({'a': S$n($o)})", "$r['a'].w", ("I$n['a'].w = $o",)),
    Form("forward", _class("C$n", "def forward(self):\n    return self.w", base="nn.Module") + _MADE,
         "I$n", _NEW, "$r()", (*_WRITE, "I$n.forward = lambda new=$o: new")),
    Form("forward of a submodule", _class("S$n", "def forward(self):\n    return self.w", base="nn.Module")
         + _class("C$n", "def forward(self):\n    return self.sub()", base="nn.Module", init="self.sub = S$n(w)")
         + _MADE, "I$n", _NEW, "$r()", ("I$n.sub.w = $o", "S$n.forward = lambda self, new=$o: new")),
    Form("training", _class("C$n", "def forward(self):\n    return self.w[not self.training]",
         base="nn.Module", init="self.w = w") + "I$n = C$n([$v, $o])", "I$n", "C$n([$o, $v])", "$r()",
         ("I$n.eval()",)),
    # -- modules of Python
    Form("module", "O$n = put_in(types.ModuleType('settings'), 'w', $v)", "O$n", _NS, "$r.w",
         ("O$n.w = $o",)),
    Form("module with a false name", "O$n = put_in(types.ModuleType('torch.settings'), 'w', $v)",
         "O$n", _NS, "$r.w", ("O$n.w = $o",)),
    Form("function of a module", "O$n = put_in(types.ModuleType('settings'), 'x', $v)\n"
         "exec('def get():\\n    return x', O$n.__dict__)", "O$n",
         "types.SimpleNamespace(get=lambda new=$o: new)", "$r.get()",
         ("O$n.x = $o", "O$n.get = lambda new=$o: new")),
    Form("function of a namespace", "E$n = {'__name__': 'math', 'x': $v}\n"
         "exec('def get():\\n    return x', E$n)\nH$n = E$n['get']", "H$n", "(lambda new=$o: new)", "$r()",
         ("E$n['x'] = $o",)),
    Form("__getattr__ of a module", "O$n = types.ModuleType('settings')\nO$n.box = [$v]\n"
         "exec('def __getattr__(name):\\n    return box[0]', O$n.__dict__)", "O$n", _NS, "$r.w",
         ("O$n.box[0] = $o", "O$n.w = $o")),
    Form("import inside", "O$n = put_in(types.ModuleType('program_module_$n'), 'w', $v)\n"
         "sys.modules['program_module_$n'] = O$n\ndef H$n():\n    import program_module_$n\n    return program_module_$n.w",
         "H$n", "(lambda new=$o: new)", "$r()", ("O$n.w = $o",)),
    # -- functions
    Form("helper of a global", "G$n = $v\ndef H$n():\n    return $of_g", "H$n", "(lambda new=$now: new)", "$r()",
         ("G$n = $o", "Q$n = $now\nH$n.__code__ = (lambda: Q$n).__code__"), inside=True),
    Form("helper of a helper", "G$n = $v\ndef F$n():\n    return $of_g\ndef H$n():\n    return F$n()", "H$n",
         "(lambda new=$now: new)", "$r()", ("G$n = $o", "F$n = lambda new=$now: new"), inside=True),
    Form("helper's argument", "def H$n(x):\n    return $of_x", "$v", "$o", "H$n($r)",
         ("H$n = lambda _, x=$o: $of_x",), inside=True),
    Form("closure", "def M$n(x):\n    def get():\n        return $of_x\n    return get\nH$n = M$n($v)", "H$n",
         "M$n($o)", "$r()", ("H$n.__closure__[0].cell_contents = $o",), inside=True),
    Form("closure of a closure", "def M$n(x):\n    def get():\n        return (lambda: $of_x)()\n    return get\n"
         "def A$n(f):\n    return lambda: f()\nH$n = A$n(M$n($v))", "H$n", "A$n(M$n($o))", "$r()",
         inside=True),
    Form("nonlocal", "def M$n(x):\n    def get():\n        return x\n    def put(y):\n        nonlocal x\n        x = y\n"
         "    return get, put\nH$n, P$n = M$n($v)", "H$n", "M$n($o)[0]", "$r()", ("P$n($o)",)),
    Form("default", "def H$n(x=$v):\n    return $of_x", "H$n", "(lambda x=$o: $of_x)", "$r()",
         ("H$n.__defaults__ = ($o,)",), inside=True),
    Form("keyword default", "def H$n(*, x=$v):\n    return $of_x", "H$n", "(lambda *, x=$o: $of_x)",
         "$r()", ("H$n.__kwdefaults__['x'] = $o", "H$n.__kwdefaults__ = {'x': $o}"), inside=True),
    Form("partial", "def F$n(x):\n    return $of_x\nH$n = functools.partial(F$n, $v)", "H$n",
         "functools.partial(F$n, $o)", "$r()", inside=True),
    Form("partial keyword", "def F$n(x):\n    return $of_x\nH$n = functools.partial(F$n, x=$v)", "H$n",
         "functools.partial(F$n, x=$o)", "$r()", ("H$n.keywords['x'] = $o",), inside=True),
    Form("lru_cache", "K$n = 0\nL$n = [$v, $o]\n@functools.lru_cache\ndef H$n(k):\n    return L$n[k]",
         "H$n", "(lambda k, new=$o: new)", "$r(K$n)", ("K$n = 1", "L$n[0] = $o; H$n.cache_clear()")),
    Form("singledispatch", "G$n = $v\n@functools.singledispatch\ndef H$n(x):\n    return G$n", "H$n",
         "(lambda x, new=$o: new)", "$r(0)", ("G$n = $o", "H$n.register(int)(lambda x, new=$o: new)")),
    Form("functions by number", "K$n = 0\nL$n = [lambda x: x[0], lambda x: x[1]]\nT$n = ($v, $o)", "T$n",
         "($o, $v)", "L$n[K$n]($r)", ("K$n = 1", "L$n[0] = L$n[1]")),
    # -- names that are worked out
    Form("getattr", "A$n = 'w'\nN$n = types.SimpleNamespace(w=$v, x=$o)", "N$n",
         "types.SimpleNamespace(w=$o, x=$v)", "getattr($r, A$n)", ("A$n = 'x'", "N$n.w = $o")),
    Form("globals()", "G$n = $v", "G$n", "$o", "globals()['G$n']", ("G$n = $o",)),
    Form("vars()", "N$n = types.SimpleNamespace(w=$v)", "N$n", _NS, "vars($r)['w']", ("N$n.w = $o",)),
    Form("__dict__", "N$n = types.SimpleNamespace(w=$v)", "N$n", _NS, "$r.__dict__['w']",
         ("N$n.w = $o",)),
    Form("attrgetter", "N$n = types.SimpleNamespace(w=$v)", "N$n", _NS, "operator.attrgetter('w')($r)",
         ("N$n.w = $o",)),
    Form("eval", "G$n = $v", "G$n", "$o", "eval('G$n', globals())", ("G$n = $o",)),
    Form("map", "L$n = [$v]", "L$n", "[$o]", "next(map(lambda x: x, $r))", ("L$n[0] = $o",)),
    Form("max with a key", "L$n = [($v, 2), ($o, 1)]", "L$n", "[($o, 1)]",
         "max($r, key=operator.itemgetter(1))[0]", ("L$n[1] = (L$n[1][0], 3)",)),
)  # fmt: skip

# How a kind of value is used: x is the value. A mask's lines are joined by & and |; a score's run
# one after the other.
MASK_USES = {
    "int": ("(i - j).abs() < x", "i >= j - x", "(i + j) % (x + 1) != 0", "i // x >= j // x"),
    "float": ("(i - j) * x < 1.3", "(i - j).abs() * 0.3 < abs(x)"),
    "bool": ("((i >= j) if x else (i <= j))",),
    "word": ("((i >= j) if x == 'left' else (i <= j))",),
    "ids": ("x[i] == x[j]", "x[i] >= x[j]"),
    "keep": ("x[j]", "x[i] | (i == j)"),
    "heads": ("x[h] * (i - j) < 1.3", "x[h] < 0.1 * (i - j).abs()"),
    "columns": ("x[j] < 0.2", "x[i] < x[j]", "x[(i + j) % x.shape[0]] < 0.2"),
    "one": ("(i - j) * x < 1.3",),
    "one int": ("(i - j).abs() < x", "i >= j - x"),
    "list": ("x[0][j] <= x[1][j] + x[2][i]",),
    "mask": ("x(b, h, i, j)",),
}
SCORE_USES = {
    "int": ("s + 0.2 * x * (j - i)", "s * x", "torch.where((i - j).abs() < x, s, -1.5)"),
    "float": ("s + x * (j - i)", "s * (x + 3)", "x * torch.tanh(s / x) + x * j",
              "s * x + (torch.tanh(s * x) - s * x).detach()"),
    "bool": ("s * 2 if x else s - 0.3 * (i - j).abs()",),
    "word": ("s + 0.3 * (i - j) if x == 'left' else s - 0.3 * (i - j)",),
    "ids": ("s + x[j] * 0.5", "torch.where(x[i] == x[j], s, s - 2)"),
    "keep": ("torch.where(x[j], s, s - 1.5)",),
    "heads": ("s + x[h] * (j - i)", "s * x[h]"),
    "columns": ("s + x[j]", "s + x[j % x.shape[0]]", "s + x[j % len(x)] * x[i % x.numel()]", "s + x[j] * x.shape[0] * 0.1",
                "s + x[j].detach() * s",
                "s * x[j]"),
    "one": ("s * x", "s + x * (j - i)", "s + x.exp() * (j - i)"),
    "one int": ("torch.where((i - j).abs() < x, s, -1.5)", "s + 0.2 * x * (j - i)"),
    "list": ("s + x[0][j] + 2 * x[1][j] - 0.5 * x[2][i] * j",),
    "mask": ("torch.where(x(b, h, i, j), s, s - 1.5)",),
    "score": ("x(s, b, h, i, j)",),
}  # fmt: skip
NUMBERS = ("int", "float", "bool", "word")


class _Writer:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.seed = seed
        self.count = 0
        self.lines: list[str] = []
        self.forms: list[str] = []
        self.values = False
        self.learns = False

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    # -- values -----------------------------------------------------------------------------------

    def two(self, kind: str) -> tuple[str, str]:
        """Two different values of a kind, as text."""
        d = self.draw
        if kind == "int":
            return tuple(map(str, d.sample(range(1, 8), 2)))
        if kind == "float":
            return tuple(map(str, d.sample([-0.7, -0.31, 0.23, 0.45, 0.9, 1.6], 2)))
        if kind == "bool":
            return tuple(map(str, d.sample([True, False], 2)))
        if kind == "word":
            return tuple(map(repr, d.sample(["left", "right"], 2)))
        learns = self.learns and kind in ("heads", "columns", "one") and d.random() < 0.3
        make = "learn" if learns else "tensor"
        longer = 3 * (kind == "columns" and d.random() < 0.3)  # the second has another shape
        made = [f"{make}({self.numbers(kind, n, n * longer)})" for n in range(2)]
        if make == "tensor" and kind in ("ids", "columns") and d.random() < 0.15:
            made[1] += d.choice([".double()", ".half()", ".float()", ".int()"])
        return tuple(made)

    def numbers(self, kind: str, n: int, longer: int = 0) -> object:
        """What the n-th tensor of a kind holds."""
        d = self.draw
        if kind == "one":
            return (-0.8, 0.6, 0.3)[n]
        if kind == "one int":
            return (2, 6, 4)[n]
        if kind == "ids":
            return [d.randrange(4) for _ in range(LONGEST)]
        if kind == "keep":
            return [d.random() < 0.5 for _ in range(LONGEST)]
        length = H if kind == "heads" else LONGEST + longer
        return [round(d.uniform(-1.5, 1.5), 2) for _ in range(length)]

    def leaf(self, kind: str) -> Held:
        if kind in ("mask", "score"):
            return self.function(kind)
        if kind == "list":
            return self.aliased_tensors()
        if kind in ("int", "float", "bool") and self.draw.random() < 0.3:
            return self.read_of_tensor(kind)
        old, new = self.two(kind)
        if kind == "int" and self.draw.random() < 0.08:
            return self.outside(old, new)
        name = self.name("V")
        self.lines.append(f"{name} = {old}")
        changes = ()
        if kind not in NUMBERS:
            write = f"{name}.copy_(tensor({self.numbers(kind, 2)}))"
            changes = (Change("tensor: written", write),)
        return Held(name, new, "$r", kind, changes)

    def read_of_tensor(self, kind: str) -> Held:
        """A number that comes out of a tensor."""
        d = self.draw
        self.values = True
        old, new = self.two(kind)
        name = self.name("V")
        if kind == "bool":
            read = d.choice(["$r", "bool($r)", "$r.item()", "(True if $r else False)"])
            make = lambda x: f"tensor({x})"
        else:
            to = kind
            read, make = d.choice([
                ("$r.item()", lambda x: f"tensor({x})"),
                (f"{to}($r)", lambda x: f"tensor({x})"),
                ("$r.tolist()[1]", lambda x: f"tensor([1, {x}])"),
                (f"{to}($r[1])", lambda x: f"tensor([1, {x}])"),
                ("$r[1].item()", lambda x: f"tensor([1, {x}])"),
                ("$r.sum().item()", lambda x: f"tensor([{x}])"),
                (f"{to}($r.numpy())", lambda x: f"tensor({x})"),
                ("[x.item() for x in $r][0]", lambda x: f"tensor([{x}])"),
                ("len($r)", lambda x: f"torch.zeros({abs(int(float(x) * 4)) + 1})"),
            ])  # fmt: skip
        self.lines.append(f"{name} = {make(old)}")
        written = Change("value of a tensor: written", f"{name}.copy_({make(new)})")
        changes = () if read == "len($r)" else (written,)
        return Held(name, make(new), read, kind, changes, True)

    def outside(self, old: str, new: str) -> Held:
        """A number that lives in the process, or in an array."""
        name = self.name("V")
        if self.draw.random() < 0.5:
            self.lines.append(f"os.environ['PROGRAM_{name}'] = '{old}'\n{name} = 'PROGRAM_{name}'")
            write = Change("os.environ: written", f"os.environ['PROGRAM_{name}'] = '{new}'")
            self.lines.append(f"os.environ['OTHER_{name}'] = '{new}'")
            return Held(name, f"'OTHER_{name}'", "int(os.environ[$r])", "int", (write,))
        self.lines.append(f"{name} = numpy.array([0, {old}])")
        write = Change("numpy array: written", f"{name}[1] = {new}")
        return Held(name, f"numpy.array([0, {new}])", "int($r[1])", "int", (write,))

    def function(self, kind: str) -> Held:
        """Functions made of the same parts, in two ways: what tells them apart is which part is
        where."""
        d = self.draw
        parts = [self.name("F") for _ in range(d.choice([2, 2, 3]))]
        texts = (
            ["i >= j", "(i - j).abs() < 4", "(i + j) % 3 != 0", "j < 5", "i // 4 == j // 4"]
            if kind == "mask"
            else [
                "s + 0.3 * j",
                "s * 1.7",
                "s - 0.2 * (i - j).abs()",
                "torch.tanh(s)",
                "s + 0.1 * i * j",
            ]
        )
        args = "b, h, i, j" if kind == "mask" else "s, b, h, i, j"
        for part, text in zip(parts, d.sample(texts, len(parts)), strict=True):
            self.lines.append(
                f"{part} = lambda {args}: {text}" if d.random() < 0.5
                else f"def {part}({args}):\n    return {text}"
            )  # fmt: skip
        one = self.name("M")
        if kind == "mask":
            self.lines.append(d.choice([
                f"def {one}(f, g, k):\n    both = lambda a, c: (lambda b, h, i, j: a(b, h, i, j) & c(b, h, i, j))\n"
                "    either = lambda a, c: (lambda b, h, i, j: a(b, h, i, j) | c(b, h, i, j))\n"
                "    return either(both(f, g), k)",
                f"def {one}(*fs):\n    def fold(b, h, i, j):\n        kept = fs[0](b, h, i, j)\n"
                "        for n, f in enumerate(fs[1:]):\n"
                "            kept = kept ^ f(b, h, i, j) if n else kept & f(b, h, i, j)\n        return kept\n    return fold",
                f"def {one}(f, g, k):\n    fs = [f, g, k]\n    return lambda b, h, i, j: (fs[0](b, h, i, j) & fs[1](b, h, i, j)) | fs[2](b, h, i, j)",
                f"class {one}:\n    def __init__(self, f, g, k):\n        self.fs = {{'f': f, 'g': g, 'k': k}}\n"
                "    def __call__(self, b, h, i, j):\n        fs = self.fs\n"
                "        return (fs['f'](b, h, i, j) | fs['g'](b, h, i, j)) & fs['k'](b, h, i, j)",
            ]))  # fmt: skip
        else:
            self.lines.append(d.choice([
                f"def {one}(*fs):\n    def fold(s, b, h, i, j):\n        for f in fs:\n            s = f(s, b, h, i, j)\n"
                "        return s\n    return fold",
                f"def {one}(f, g, k):\n    then = lambda a, c: (lambda s, b, h, i, j: c(a(s, b, h, i, j), b, h, i, j))\n"
                "    return then(then(f, g), k)",
                f"def {one}(f, g, k):\n    return lambda s, b, h, i, j: f(s, b, h, i, j) + 2 * g(s, b, h, i, j) - k(s, b, h, i, j)",
            ]))  # fmt: skip
        old, new = self.orders(parts)
        name = self.name("V")
        self.lines.append(f"{name} = {one}({old})")
        return Held(name, f"{one}({new})", "$r", kind)

    def aliased_tensors(self) -> Held:
        """A list of three tensors, of which two may be the same."""
        parts = [self.name("T") for _ in range(2)]
        for part in parts:
            self.lines.append(f"{part} = {self.two('columns')[0].replace('learn', 'tensor')}")
        old, new = self.orders(parts)
        form = self.draw.choice(["[{}]", "({})", "dict(enumerate([{}]))"])
        name = self.name("V")
        self.lines.append(f"{name} = {form.format(old)}")
        changes = [Change("tensor: written", f"{parts[0]}.copy_({parts[0]}.flip(0) * 1.5)")]
        if "(" not in form:
            changes.append(Change("aliases: swapped", f"{name}[:] = [{new}]"))
        return Held(name, form.format(new), "$r", "list", tuple(changes))

    def orders(self, parts: list[str]) -> tuple[str, str]:
        """Two ways to fill three places."""
        d = self.draw
        while True:
            old, new = ([d.choice(parts) for _ in range(3)] for _ in range(2))
            if old != new:
                return ", ".join(old), ", ".join(new)

    # -- forms ------------------------------------------------------------------------------------

    def put(self, held: Held) -> Held:
        """The value inside one more form."""
        kind = held.kind
        bare = held.read == "$r" and held.root[0] == "V" and not held.values
        while True:
            form = self.draw.choice(FORMS)
            fits = (
                form.kinds == "any"
                or (form.kinds == "data" and kind not in ("mask", "score") and not held.root.startswith("H"))
                or (bare and (form.kinds == kind or (form.kinds == "number" and kind in NUMBERS)))
            )  # fmt: skip
            if fits:
                break
        n = self.name("")
        inside = {
            f"of_{x}": Template(held.read).substitute(r=name)
            for x, name in (("x", "x"), ("g", f"G{n}"))
        }
        fill = lambda text: Template(text).safe_substitute(
            n=n, v=held.root, o=held.other, now=Template(held.read).substitute(r=f"({held.other})"), **inside
        )  # fmt: skip
        self.lines.append(fill(form.setup))
        self.forms.append(form.name)
        changes = [
            Change(
                f"{form.name}: {c.replace('$now', 'new').replace('$n', '').replace('$o', 'new')}",
                fill(c),
            )
            for c in form.changes
        ]
        read = fill(form.read)
        if not form.inside:
            read = Template(held.read).substitute(r=read)
        return replace(
            held, root=fill(form.root), other=fill(form.other), read=read,
            changes=(*held.changes, *changes),
        )  # fmt: skip

    # -- hosts ------------------------------------------------------------------------------------

    def host(self, kind: str, held: list[Held]) -> tuple[str, list[Change]]:
        """A function that reads the values: its expression, and how to rebind what it reads."""
        d = self.draw
        args = "b, h, i, j" if kind == "mask" else "s, b, h, i, j"
        fn, host = self.name("FN"), d.choice(HOSTS)
        self.forms.append(f"host {host}")
        many = range(len(held))
        places = [_place(host, n, x.root) for n, x in enumerate(held)]
        lines = []
        for n, (x, place) in enumerate(zip(held, places, strict=True)):
            lines.append((f"x{n}", Template(x.read).substitute(r=place), x.kind))
        body = _body(kind, lines, d)
        given, names = ", ".join(x.root for x in held), ", ".join(f"p{n}" for n in many)
        others = lambda n: ", ".join(x.other if m == n else x.root for m, x in enumerate(held))
        as_self = "\n".join(f"self.p{n} = p{n}" for n in many)
        write, remake = [], []
        if host == "global":
            self.lines.append(f"def {fn}({args}):\n{_indented(body)}")
            write = [f"{x.root} = {x.other}" for x in held]
        elif host in ("closure", "inner closure", "lambda"):
            text = f"def fn({args}):\n{_indented(body)}\nreturn fn"
            if host == "inner closure":
                text = f"def middle():\n{_indented(text)}\nreturn middle()"
            if host == "lambda":
                text = f"def fn({args}):\n{_indented(body)}\nreturn lambda {args}: fn({args})"
            self.lines.append(
                f"def make_{fn}({names}):\n{_indented(text)}\n{fn} = make_{fn}({given})"
            )
            remake = [f"{fn} = make_{fn}({others(n)})" for n in many]
            if host == "closure":
                write = [
                    f"for name, cell in zip({fn}.__code__.co_freevars, {fn}.__closure__ or ()):\n"
                    f"    if name == 'p{n}':\n        cell.cell_contents = {x.other}"
                    for n, x in enumerate(held)
                ]
        elif host in ("default", "keyword default"):
            star = "*, " if host == "keyword default" else ""
            inner = ", ".join(f"p{n}=p{n}" for n in many)
            text = f"def fn({args}, {star}{inner}):\n{_indented(body)}\nreturn fn"
            self.lines.append(
                f"def make_{fn}({names}):\n{_indented(text)}\n{fn} = make_{fn}({given})"
            )
            remake = [f"{fn} = make_{fn}({others(n)})" for n in many]
            write = [
                f"{fn}.__kwdefaults__['p{n}'] = {x.other}"
                if star
                else f"{fn}.__defaults__ = ({others(n)},)"
                for n, x in enumerate(held)
            ]
        elif host == "partial":
            self.lines.append(
                f"def of_{fn}({names}, {args}):\n{_indented(body)}\n{fn} = functools.partial(of_{fn}, {given})"
            )
            remake = [f"{fn} = functools.partial(of_{fn}, {others(n)})" for n in many]
        elif host == "partial keyword":
            keys = lambda values: ", ".join(f"p{n}={x}" for n, x in enumerate(values))
            now = keys(x.root for x in held)
            self.lines.append(
                f"def of_{fn}({args}, {names}):\n{_indented(body)}\n{fn} = functools.partial(of_{fn}, {now})"
            )
            remake = [
                f"{fn} = functools.partial(of_{fn}, {keys(y.other if m == n else y.root for m, y in enumerate(held))})"
                for n in many
            ]
            write = [f"{fn}.keywords['p{n}'] = {x.other}" for n, x in enumerate(held)]
        elif host == "class attributes":
            attributes = "\n".join(
                f"p{n} = staticmethod({x.root}) if isinstance({x.root}, types.FunctionType) else {x.root}"
                for n, x in enumerate(held)
            )
            self.lines.append(
                f"class Host{fn}:\n{_indented(attributes)}\n    def __call__(self, {args}):\n{_indented(_indented(body))}\n{fn} = Host{fn}()"
            )
            write = [
                f"Host{fn}.p{n} = (lambda y: staticmethod(y) if isinstance(y, types.FunctionType) else y)({x.other})"
                for n, x in enumerate(held)
            ]
        else:  # an instance: of a class or a module; the function is it, or a method of it
            base = "nn.Module" if "module" in host else ""
            method = {"callable": "__call__", "module": "forward"}.get(host, "fn")
            methods = [f"def {method}(self, {args}):\n{_indented(body)}"]
            if "two" in host:
                methods = [f"def fn(self, {args}):\n    return self.inner({args})",
                           f"def inner(self, {args}):\n{_indented(body)}"]  # fmt: skip
            init = ("super().__init__()\n" if base else "") + as_self
            text = f"class Host{fn}({base}):\n    def __init__(self, {names}):\n{_indented(_indented(init))}\n"
            at = ".fn" if method == "fn" else ""
            kept = f"I{fn}" if at else fn
            self.lines.append(
                text + "\n".join(map(_indented, methods)) + f"\n{kept} = Host{fn}({given})"
            )
            if at:
                self.lines.append(f"{fn} = {kept}.fn")
            remake = [f"{fn} = Host{fn}({others(n)}){at}" for n in many]
            write = [f"{kept}.p{n} = {x.other}" for n, x in enumerate(held)]
        changes = [Change(f"host {host}: written", c) for c in write]
        changes += [Change(f"host {host}: another of the same code", c) for c in remake]
        if (
            len(held) > 1
            and len({x.kind for x in held}) == 1
            and host == "closure"
            and held[0].read == held[1].read == "$r"
        ):
            swapped = ", ".join(x.root for x in (held[1], held[0], *held[2:]))
            changes.append(Change("host closure: swapped", f"{fn} = make_{fn}({swapped})"))
            changes.append(
                Change(
                    "host closure: one in two roles",
                    f"{fn} = make_{fn}({', '.join([held[0].root] * 2 + [x.root for x in held[2:]])})",
                )
            )
        return fn, changes


HOSTS = (
    "global", "global", "closure", "closure", "inner closure", "lambda", "default", "keyword default",
    "partial", "partial keyword", "class attributes", "callable", "method", "two methods",
    "module", "module method", "two methods of a module",
)  # fmt: skip


def _place(host: str, n: int, root: str) -> str:
    if host == "global":
        return root
    by_self = ("class attributes", "callable", "method", "two methods", "module", "module method",
               "two methods of a module")  # fmt: skip
    return f"self.p{n}" if host in by_self else f"p{n}"


def _body(kind: str, lines: list[tuple[str, str, str]], d: random.Random) -> str:
    uses = MASK_USES if kind == "mask" else SCORE_USES
    made, parts = [], []
    for name, read, of in lines:
        if d.random() < 0.5:
            made.append(f"{name} = {read}")
            read = name
        use = d.choice(uses[of])
        parts.append(_put(use, read))
    if kind == "mask":
        joined = f"({parts[0]})"
        for part in parts[1:]:
            joined = f"({joined}{d.choice([' & ', ' | ', ' ^ '])}({part}))"
        return "\n".join([*made, f"return {joined}"])
    if d.random() < 0.1:  # what has no gradient must have none
        made.append("with torch.no_grad():\n    s = s + 0.5 * s")
    return "\n".join([*made, *(f"s = {part}" for part in parts), "return s"])


def _put(use: str, read: str) -> str:
    """`use` with `read` in the place of x, which stands alone wherever it means the value."""
    return re.sub(r"(?<![\w.])x\b", lambda _: read if read.isidentifier() else f"({read})", use)


def program(seed: int, entrances: tuple[str, ...], only: tuple[str, ...] = ()) -> Program:
    """The program of a seed, of `only` such kinds of values if given."""
    w = _Writer(seed)
    d = w.draw
    what = d.choice(["mask", "mask", "score", "score", "both"])
    w.learns = what == "score"  # masks have no gradient
    kinds = {"mask": [*MASK_USES], "score": [*SCORE_USES], "both": [*MASK_USES]}[what]
    kinds = [kind for kind in kinds if not only or kind in only] or kinds
    held = []
    for _ in range(d.choice([1, 1, 2, 2, 3])):
        kind = held[0].kind if held and d.random() < 0.3 else d.choice(kinds)
        one = w.leaf(kind)
        for _ in range(d.choice([0, 1, 1, 2, 2, 3])):
            one = w.put(one)
        held.append(one)
    changes = [c for x in held for c in x.changes]
    shown: dict[str, str | None] = {"mask": None, "score": None}
    for kind in ("mask", "score"):
        if what in (kind, "both"):
            fn, more = w.host(kind, held)
            changes += more
            library = {
                "mask": ["{}", "{}", "{}", "hw.causal(4) & {}", "{} | hw.sliding_window(2)", "~(hw.prefix(2) | {})"],
                "score": ["{}", "{}", "{}", "hw.softcap(3.0) >> {}", "{} >> hw.softcap(4.0)"],
            }[kind]  # fmt: skip
            shown[kind] = d.choice(library).format(fn)
    if what == "score" and d.random() < 0.5:
        shown["mask"] = "hw.causal(3)"
    if what != "mask" and d.random() < 0.15:
        changes = [Change("default dtype", "torch.set_default_dtype(torch.bfloat16)")]
    if not changes:
        return program(seed + 1_000_003, entrances, only)
    steps = [d.choice(changes) for _ in range(d.choice([1, 1, 2]))]
    fits = [e for e in entrances if shown["mask"] or "block_mask" not in e]
    name, registered = d.choice(
        [(f"program_{seed}", True)] * 12
        + [(f"program_{seed}", False), ("math", False), ("__main__", False)]
    )
    return Program(
        seed, PRELUDE + "\n".join(w.lines) + "\n", steps, shown["mask"], shown["score"],
        d.choice(fits), name, registered, w.values, tuple(w.forms),
    )  # fmt: skip
