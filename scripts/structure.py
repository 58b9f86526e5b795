"""Count what makes source hard to read, and name each place: a part of `make check`.

    scripts/structure.py            one line for each count; the places of those above their limit
    scripts/structure.py --places   the places of all

A count above its limit fails. Limits only go down: lower one when a change has made room.
"""

import argparse
import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"

# Sibling modules define classes of these names, and their folders tell them apart.
SIBLINGS = {"Arguments", "Plan"}

# Words that begin a phrase, not a sentence. A docstring begins with a verb or with its subject.
FRAGMENTS = set(
    "After And As At Before By For From How If In Its None Not Of On Or Than That Their Those To "
    "Under What When Where Whether Which Who Whose With Without".split()
)

# Participles and adverbs that do not say what a local holds.
BARE = set(
    "again apart asked at away begun below brought built chosen coming done drawn due early far "
    "first found further given going gone here kept known last late learned least left like looked "
    "lost made many meant missing more most near needed new next old once other own past put read "
    "said seen sent set shown taken than there told unseen used wanted whole written".split()
)

# Values that are followed: the function that they enter, and their parameter.
TRIPS = (
    ("headway.api:attention", "q"),
    ("headway.api:attention", "mask"),
    ("headway.api:attention", "layout"),
    ("headway.api:block_mask", "mask"),
    ("headway.run:run", "request"),
    ("headway.run:run_out", "request"),
    ("headway.resolve:resolve", "request"),
    ("headway.inference.attend:attention", "mask"),
    ("headway.inference.attend:attention", "lengths"),
    ("headway.explain:explain", "mask"),
)
MOST_CLIMBS = 3
MOST_FILES = 20
MOST_LINES = 60


class Module:
    """A parsed file: its nodes, and the full names of what it imports."""

    def __init__(self, path: Path, source: str) -> None:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        self.path = path
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(source)
        self.nodes: list[ast.AST] = []  # in the order of the source, a node before what it holds
        self.ends: dict[ast.AST, tuple[int, int]] = {}  # the nodes from a function to its end
        self.imports: dict[str, str] = {}  # a local name: the dotted name that it stands for
        self._visit(self.tree)

    def _visit(self, node: ast.AST) -> None:
        start = len(self.nodes)
        self.nodes.append(node)
        if isinstance(node, ast.ImportFrom):
            source = self._absolute(node)
            for alias in node.names:
                self.imports[alias.asname or alias.name] = f"{source}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.imports[alias.asname or alias.name.split(".")[0]] = alias.name
        elif isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING":
            return  # no import of a running program
        for field in node._fields:
            value = getattr(node, field, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                    self._visit(child)
        if isinstance(node, ast.FunctionDef):
            self.ends[node] = start, len(self.nodes)

    def _absolute(self, node: ast.ImportFrom) -> str:
        """Return the dotted name of the module that a statement imports from."""
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        package = package[: len(package) - node.level + self.is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    def at(self, node: ast.AST) -> str:
        """Return the file and line of a node."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]

    def functions(self) -> Iterable[ast.FunctionDef]:
        """Return all functions and methods, nested ones among them."""
        return self.ends.keys()  # type: ignore[return-value]

    def inside(self, function: ast.FunctionDef) -> list[ast.AST]:
        """Return the nodes of a function, itself first."""
        start, end = self.ends[function]
        return self.nodes[start:end]


def last_name(node: ast.AST) -> str:
    """Return the name that a variable or an attribute ends with, "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


# -- the counts: each returns the places that it counts -------------------------------------------


def crowded_folders(modules: list[Module]) -> list[str]:
    """Return folders with more than 20 Python files."""
    counts = Counter(module.path.parent for module in modules)
    return [f"{p.relative_to(ROOT)}: {n} files" for p, n in counts.items() if n > MOST_FILES]


def repeated_classes(modules: list[Module]) -> list[str]:
    """Return the class names that several files define."""
    places = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name not in SIBLINGS:
                places[node.name].append(module.at(node))
    return [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]


def positional_reads(modules: list[Module]) -> list[str]:
    """Return where a `Call`, a `Request` or their `Coords` are read by position."""
    holds = lambda node: last_name(node).lstrip("_") in ("call", "request", "coords")
    is_int = lambda node: isinstance(node, ast.Constant) and type(node.value) is int
    places = []
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Assign):
                target = node.targets[0]
                wide = isinstance(target, ast.Tuple) and len(target.elts) > 2
                by_position = wide and holds(node.value)
            elif isinstance(node, ast.Subscript):
                by_position = holds(node.value) and (
                    is_int(node.slice) or isinstance(node.slice, ast.Slice)
                )
            else:
                continue
            if by_position:
                places.append(f"{module.at(node)}: {ast.unparse(node)[:80]}")
    return places


def fragments(modules: list[Module]) -> list[str]:
    """Return docstrings of functions and classes that begin with a fragment of a sentence."""
    places = []
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                words = (ast.get_docstring(node, clean=False) or "").split()
                if words and words[0].strip(",.:;") in FRAGMENTS:
                    places.append(f"{module.at(node)}: {' '.join(words[:6])}")
    return places


def long_functions(modules: list[Module]) -> list[str]:
    """Return functions of the host with more than 60 lines below signature and docstring."""
    places = []
    for module in modules:
        for node in module.functions():
            has_docstring = ast.get_docstring(node, clean=False) is not None
            body = node.body[1:] if has_docstring else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > MOST_LINES and not _is_kernel(node):
                places.append(f"{module.at(node)}: {node.name}, {lines} lines")
    return places


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def circles(modules: list[Module]) -> list[str]:
    """Return sets of modules that import each other, in functions or at the top (Tarjan 1972)."""
    names = {module.name for module in modules}
    # A package's own file hands names on: its import of a module in it is no dependency.
    edges = {m.name: [] if m.is_package else _imported_modules(m, names) for m in modules}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    places: list[str] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in edges[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                places.append(" <-> ".join(circle))

    for name in edges:
        if name not in order:
            visit(name)
    return places


def _imported_modules(module: Module, names: set[str]) -> list[str]:
    """Return the modules among `names` that a module imports, anywhere in it."""
    imported = set()
    for dotted in module.imports.values():
        if dotted not in names:
            dotted = dotted.rpartition(".")[0]
        if dotted in names and dotted != module.name:
            imported.add(dotted)
    return sorted(imported)


def bare_numbers(modules: list[Module]) -> list[str]:
    """Return numbers above 2, in the files of the Hopper kernels, that are an argument of a function
    of ours, or all that a list holds."""
    is_big = lambda n: isinstance(n, ast.Constant) and type(n.value) is int and n.value > 2
    places = []
    for module in modules:
        if ".backends.hopper" not in module.name:
            continue
        defined = {function.name for function in module.functions()}
        for node in module.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                imported = module.imports.get(node.func.id, "").startswith("headway")
                bare = (imported or node.func.id in defined) and any(map(is_big, node.args))
            elif isinstance(node, ast.List):
                bare = len(node.elts) > 1 and all(map(is_big, node.elts))
            else:
                continue
            if bare:
                places.append(f"{module.at(node)}: {ast.unparse(node)[:80]}")
    return places


def climbing_trips(
    modules: list[Module], trips: Iterable[tuple[str, str]] = TRIPS, layers: list[str] | None = None
) -> list[str]:
    """Return the trips that climb up more than 3 times, and those that name no function. A trip
    follows a parameter from call to call; it climbs where a higher layer of the package comes next
    (the layers of pyproject.toml's first import contract, the highest first)."""
    if layers is None:
        contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
        layers = contracts["contracts"][0]["layers"]
    floors = {
        name.strip(" ()"): -n
        for n, layer in enumerate(layers)
        for name in layer.replace(":", "|").split("|")
    }
    code = Functions(modules)
    places = []
    for start, parameter in trips:
        function = start.replace(":", ".")
        if function not in code.functions:
            places.append(f"{start}: there is no such function")
            continue
        stays = Trip(code, parameter).from_(function)
        levels = [floors.get(dotted.split(".")[1], min(floors.values())) for dotted in stays]
        climbs = sum(above > below for below, above in pairwise(levels))
        if climbs > MOST_CLIMBS:
            rooms = " > ".join(dotted.split(".", 1)[1] for dotted in stays)
            places.append(f"{start} {parameter}: {climbs} climbs, {len(stays)} stays: {rooms}")
    return places


class Functions:
    """All functions at the top of modules, by their dotted names."""

    def __init__(self, modules: list[Module]) -> None:
        self.modules = {module.name: module for module in modules}
        self.functions = {
            f"{module.name}.{node.name}": (module, node)
            for module in modules
            for node in module.tree.body
            if isinstance(node, ast.FunctionDef)
        }

    def called(self, module: Module, callee: ast.expr) -> str:
        """Return the dotted name of a called function, through packages that hand it on."""
        first, *rest = ast.unparse(callee).split(".")
        dotted = ".".join([module.imports.get(first, f"{module.name}.{first}"), *rest])
        while dotted not in self.functions:
            package, _, name = dotted.rpartition(".")
            onward = self.modules.get(package)
            if onward is None or onward.imports.get(name, dotted) == dotted:
                break
            dotted = onward.imports[name]
        return dotted


class Trip:
    """The way of a value from function to function, depth first, in the order of the source: by
    itself, and in what holds it (a request, a call)."""

    def __init__(self, code: Functions, value: str) -> None:
        self.code, self.value = code, value
        self.stays: list[str] = []  # the functions on the way
        self._followed: set[tuple[str, str]] = set()

    def from_(self, dotted: str) -> list[str]:
        """Return the functions that the value passes from the one whose parameter it is."""
        self._enter(dotted, self.value, self.value == "request")
        return self.stays

    def _enter(self, dotted: str, parameter: str, is_holder: bool) -> None:
        """Enter a function as one of its parameters, which is the value or holds it."""
        if (dotted, parameter) in self._followed:
            return
        self._followed.add((dotted, parameter))
        self.stays.append(dotted)
        module, function = self.code.functions[dotted]
        kinds = {parameter: "holder" if is_holder else "value"}  # of local names
        steps = [n for n in module.inside(function) if isinstance(n, ast.Call | ast.Assign)]
        for node in sorted(steps, key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0)):
            if isinstance(node, ast.Assign):
                self._assign(node, kinds)
                continue
            callee = self.code.called(module, node.func)
            if callee in self.code.functions:
                for name, expression in self._passed(callee, node):
                    if kind := self._kind(expression, kinds):
                        self._enter(callee, name, kind == "holder")

    def _assign(self, node: ast.Assign, kinds: dict[str, str]) -> None:
        """Note which names an assignment lets hold the value."""
        for target in node.targets:
            if isinstance(target, ast.Name):
                if kind := self._kind(node.value, kinds):
                    kinds[target.id] = kind
            elif isinstance(target, ast.Tuple):
                sources = node.value.args if isinstance(node.value, ast.Call) else [node.value]
                same_name = any(last_name(name) == self.value for name in target.elts)
                if same_name and any(self._kind(source, kinds) for source in sources):
                    kinds[self.value] = "value"

    def _passed(self, callee: str, node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Return the parameters that a call sets, with their expressions."""
        takes = self.code.functions[callee][1].args
        names = [argument.arg for argument in (*takes.posonlyargs, *takes.args)]
        yield from zip(names, node.args, strict=False)
        yield from ((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg)

    def _kind(self, node: ast.expr, kinds: dict[str, str]) -> str:
        """Return "value" or "holder" for an expression that is one, "" for any other."""
        kind = lambda inner: self._kind(inner, kinds)
        if isinstance(node, ast.Name):
            return kinds.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return "value" if node.attr == self.value and kind(node.value) == "holder" else ""
        if isinstance(node, ast.IfExp):
            return kind(node.body) or kind(node.orelse)
        if isinstance(node, ast.Starred):
            return kind(node.value)
        if isinstance(node, ast.Call):
            callee = last_name(node.func).lstrip("_")
            if callee == "replace" and isinstance(node.func, ast.Attribute):
                return kind(node.func.value)
            passed = [*node.args, *(keyword.value for keyword in node.keywords)]
            if callee[:1].isupper() and any(map(kind, passed)):
                return "holder"
        return ""


# -- what is reported without a limit -------------------------------------------------------------


def local_names(modules: list[Module]) -> tuple[float, float]:
    """Return the mean length of local names, and the share of bare participles and adverbs."""
    names: list[str] = []
    for module in modules:
        for function in module.functions():
            arguments = function.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            local = {argument.arg for argument in every}
            for node in module.inside(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    local.add(node.id)
            names += sorted(local - {"self", "cls", "_"})
    return sum(map(len, names)) / len(names), sum(n in BARE for n in names) / len(names)


# What is counted, how, and how many there may be.
CHECKS = (
    ("folders with more than 20 files", crowded_folders, 0),
    ("class names defined in several files", repeated_classes, 2),
    ("calls and requests read by position", positional_reads, 0),
    ("docstrings that begin with a fragment", fragments, 0),
    ("host functions above 60 lines", long_functions, 0),
    ("circles of imports", circles, 0),
    ("numbers for positions", bare_numbers, 0),
    ("trips of a parameter that climb up more than 3 times", climbing_trips, 0),
)


def main() -> int:
    """Print every count beside its limit; 1 if one is above it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--places", action="store_true", help="name the places of all counts")
    arguments = parser.parse_args()
    modules = [Module(path, path.read_text()) for path in sorted(SOURCE.rglob("*.py"))]
    failed = False
    for title, check, limit in CHECKS:
        places = check(modules)
        failed |= len(places) > limit
        print(f"{len(places):5} {title} (at most {limit})")
        if len(places) > limit or arguments.places:
            print(*(f"        {place}" for place in places), sep="\n")
    length, share = local_names(modules)
    print(f"{length:5.1f} letters in the mean local name; {share:.2%} bare participles and adverbs")
    return failed


if __name__ == "__main__":
    sys.exit(main())
