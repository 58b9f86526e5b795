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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"

LIMITS = {
    "folders with more than 20 files": 2,
    "class names defined in several files": 60,
    "calls and requests read by position": 40,
    "docstrings that begin with a fragment": 700,
    "host functions above 60 lines": 10,
    "circles of imports": 4,
    "numbers for positions": 40,
    "trips of a parameter that climb up more than 3 times": 10,
}

# Siblings of one kind, whose folder says whose they are.
SIBLINGS = {"Arguments", "Plan"}

# Words that begin a phrase and no sentence. A docstring begins with a verb, or names its subject.
FRAGMENTS = set(
    "After And As At Before By For From How If In Its None Not Of On Or Than That Their Those To "
    "Under What When Where Whether Which Who Whose With Without".split()
)

# Participles and adverbs that say nothing of what a local holds.
BARE = set(
    "again apart asked at away begun below brought built chosen coming done drawn due early far "
    "first found further given going gone here kept known last late learned least left like looked "
    "lost made many meant missing more most near needed new next old once other own past put read "
    "said seen sent set shown taken than there told unseen used wanted whole written".split()
)

# Where a parameter enters, and what of it is followed.
TRIPS = (
    ("headway.api:attention", "q"),
    ("headway.api:attention", "mask"),
    ("headway.api:attention", "layout"),
    ("headway.run:run", "request"),
    ("headway.run:run_out", "request"),
    ("headway.api:block_mask", "mask"),
    ("headway.inference.attend:attention", "mask"),
    ("headway.inference.attend:attention", "lengths"),
    ("headway.resolve:resolve", "request"),
    ("headway.explain:explain", "mask"),
)


class Module:
    """A parsed file: its dotted name, its tree, and where the names that it imports come from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = path.relative_to(SOURCE).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(path.read_text())
        self.imports: dict[str, str] = {}  # a local name: the dotted name that it stands for
        typing_only = {
            id(node)
            for branch in ast.walk(self.tree)
            if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
            for node in ast.walk(branch)
        }
        for node in ast.walk(self.tree):
            if id(node) in typing_only:
                continue
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{source}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name.split(".")[0]] = alias.name

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        package = package[: len(package) - node.level + self.is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    def at(self, node: ast.AST) -> str:
        """The file and line of a node."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]

    def functions(self) -> Iterator[ast.FunctionDef]:
        """All functions and methods, nested ones among them."""
        return (n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef))


def crowded_folders(modules: list[Module]) -> list[str]:
    """Return folders with more than 20 Python files."""
    counts = Counter(module.path.parent for module in modules)
    return [f"{p.relative_to(ROOT)}: {n} files" for p, n in counts.items() if n > 20]


def repeated_classes(modules: list[Module]) -> list[str]:
    """Return the second and later definitions of a class name."""
    places = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name not in SIBLINGS:
                places[node.name].append(module.at(node))
    return [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]


def positional_reads(modules: list[Module]) -> list[str]:
    """Return where a `Call`, a `Request` or their `Coords` are read by position."""
    holders = ("call", "request", "coords")
    holds = lambda node: ast.unparse(node).split(".")[-1].lstrip("_") in holders
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assign):
                targets = node.targets[0]
                wide = isinstance(targets, ast.Tuple) and len(targets.elts) > 2
                if wide and isinstance(node.value, ast.Name | ast.Attribute) and holds(node.value):
                    found.append(f"{module.at(node)}: {ast.unparse(node)[:80]}")
            elif isinstance(node, ast.Subscript) and holds(node.value):
                number = isinstance(node.slice, ast.Constant) and type(node.slice.value) is int
                if number or isinstance(node.slice, ast.Slice):
                    found.append(f"{module.at(node)}: {ast.unparse(node)}")
    return found


def fragments(modules: list[Module]) -> list[str]:
    """Return docstrings of functions and classes that begin with a fragment of a sentence."""
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].strip(",.:;") in FRAGMENTS:
                    found.append(f"{module.at(node)}: {' '.join(words[:6])}")
    return found


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def long_functions(modules: list[Module]) -> list[str]:
    """Return functions of the host with more than 60 lines below signature and docstring."""
    found = []
    for module in modules:
        for node in module.functions():
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and not _is_kernel(node):
                lines = (node.end_lineno or 0) - body[0].lineno + 1
                if lines > 60:
                    found.append(f"{module.at(node)}: {node.name}, {lines} lines")
    return found


def _imported_modules(module: Module, names: set[str]) -> set[str]:
    """Return the modules of ours that one imports, anywhere in it."""
    imported = set()
    for dotted in module.imports.values():
        if dotted not in names:
            dotted = dotted.rpartition(".")[0]
        if dotted in names and dotted != module.name:
            imported.add(dotted)
    return imported


def circles(modules: list[Module]) -> list[str]:
    """Return sets of modules that import each other, in functions or at the top (Tarjan 1972)."""
    names = {module.name for module in modules}
    # A package's own file hands names on: its import of a module in it is no dependency.
    edges = {
        m.name: set() if m.is_package else _imported_modules(m, names)
        for m in modules
    }  # fmt: skip
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(" <-> ".join(circle))

    sys.setrecursionlimit(10_000)
    for name in edges:
        if name not in order:
            visit(name)
    return found


def bare_numbers(modules: list[Module]) -> list[str]:
    """Return numbers above 2 that stand alone as an argument of a function of ours, or several in
    a list, in the files of kernels."""
    found = []
    for module in modules:
        if ".backends.hopper" not in module.name:
            continue
        local = {function.name for function in module.functions()}
        for node in ast.walk(module.tree):
            big = lambda n: isinstance(n, ast.Constant) and type(n.value) is int and n.value > 2
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                ours = module.imports.get(node.func.id, "").startswith("headway")
                if (ours or node.func.id in local) and any(map(big, node.args)):
                    found.append(f"{module.at(node)}: {ast.unparse(node)[:80]}")
            elif isinstance(node, ast.List) and len(node.elts) > 1 and all(map(big, node.elts)):
                found.append(f"{module.at(node)}: {ast.unparse(node)[:80]}")
    return found


class Trip:
    """Follows a value from function to function, depth first, in the order of the source: by itself,
    and in what holds it (a request, a call)."""

    def __init__(self, modules: list[Module], floors: dict[str, int], value: str) -> None:
        self.modules = {module.name: module for module in modules}
        self.floors = floors
        self.value = value
        self.functions = {
            f"{m.name}.{n.name}": (m, n)
            for m in modules
            for n in m.tree.body
            if isinstance(n, ast.FunctionDef)
        }
        self.stays: list[tuple[int, str]] = []  # the floor and name of each function on the way
        self.seen: set[tuple[str, str]] = set()

    def _resolve(self, module: Module, callee: ast.expr) -> str:
        """Return the dotted name of a called function, through packages that hand it on."""
        first, *rest = ast.unparse(callee).split(".")
        dotted = ".".join([module.imports.get(first, f"{module.name}.{first}"), *rest])
        for _ in range(4):
            if dotted in self.functions:
                break
            package, _, name = dotted.rpartition(".")
            onward = self.modules.get(package)
            if onward is None or name not in onward.imports:
                break
            dotted = onward.imports[name]
        return dotted

    def follow(self, dotted: str, parameter: str, held: bool) -> None:
        """Enter a function as one of its parameters, which is the value or holds it."""
        if (dotted, parameter) in self.seen:
            return
        self.seen.add((dotted, parameter))
        module, function = self.functions[dotted]
        self.stays.append((self.floors.get(module.name.split(".")[1], 0), dotted))
        itself, holders = (set(), {parameter}) if held else ({parameter}, set())

        def carries(node: ast.expr) -> str:
            """Return "value" or "holder" for an expression that is one, "" for any other."""
            if isinstance(node, ast.Name):
                return "value" if node.id in itself else "holder" if node.id in holders else ""
            if isinstance(node, ast.Attribute) and carries(node.value) == "holder":
                return "value" if node.attr == self.value else ""
            if isinstance(node, ast.IfExp):
                return carries(node.body) or carries(node.orelse)
            if isinstance(node, ast.Starred):
                return carries(node.value)
            if isinstance(node, ast.Call):
                callee = ast.unparse(node.func).split(".")[-1].lstrip("_")
                if callee == "replace":
                    return carries(node.func.value)  # type: ignore[attr-defined]
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                if callee[:1].isupper() and any(map(carries, given)):
                    return "holder"
            return ""

        nodes = [n for statement in function.body for n in ast.walk(statement)]
        nodes = [n for n in nodes if isinstance(n, ast.Call | ast.Assign)]
        for node in sorted(nodes, key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0)):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        kind = carries(node.value)
                        if kind:
                            (itself if kind == "value" else holders).add(target.id)
                    elif isinstance(target, ast.Tuple):
                        inner = (
                            node.value.args if isinstance(node.value, ast.Call) else [node.value]
                        )
                        for name in target.elts:
                            if ast.unparse(name) == self.value and any(map(carries, inner)):
                                itself.add(self.value)
                continue
            callee = self._resolve(module, node.func)
            if callee not in self.functions:
                continue
            takes = self.functions[callee][1].args
            names = [argument.arg for argument in (*takes.posonlyargs, *takes.args)]
            passed = [*zip(names, node.args, strict=False)]
            passed += [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
            for name, expression in passed:
                kind = carries(expression)
                if kind:
                    self.follow(callee, name, kind == "holder")

    def climbs(self) -> int:
        """Count the moves from one floor to a higher one."""
        return sum(
            above > below
            for (below, _), (above, _) in zip(self.stays, self.stays[1:], strict=False)
        )


def climbing_trips(modules: list[Module]) -> list[str]:
    """Return the trips of named parameters that climb up more than 3 times."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    floors = {
        name.strip(" ()"): len(layers) - n
        for n, layer in enumerate(layers)
        for name in layer.replace(":", "|").split("|")
    }
    found = []
    for start, parameter in TRIPS:
        trip = Trip(modules, floors, parameter)
        trip.follow(start.replace(":", "."), parameter, held=parameter == "request")
        if trip.climbs() > 3:
            rooms = [dotted.split(".", 1)[1] for _, dotted in trip.stays]
            found.append(
                f"{start} {parameter}: {trip.climbs()} climbs, {len(rooms)} stays: "
                f"{' > '.join(rooms)}"
            )
    return found


def local_names(modules: list[Module]) -> tuple[float, float]:
    """Return the mean length of local names, and the share of bare participles and adverbs."""
    names = []
    for module in modules:
        for function in module.functions():
            arguments = function.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            local = {a.arg for a in every} | {
                n.id
                for n in ast.walk(function)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            names += sorted(local - {"self", "cls", "_"})
    return sum(map(len, names)) / len(names), sum(n in BARE for n in names) / len(names)


CHECKS = dict(zip(LIMITS, (
    crowded_folders, repeated_classes, positional_reads, fragments, long_functions, circles,
    bare_numbers, climbing_trips,
), strict=True))  # fmt: skip


def main() -> int:
    """Print every count beside its limit; 1 if one is above it."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--places", action="store_true", help="name the places of all counts")
    arguments = arguments.parse_args()
    modules = [Module(path) for path in sorted(SOURCE.rglob("*.py"))]
    failed = False
    for title, check in CHECKS.items():
        places = check(modules)
        above = len(places) > LIMITS[title]
        failed |= above
        print(f"{len(places):5} {title} (at most {LIMITS[title]})")
        if above or arguments.places:
            print(*(f"        {place}" for place in places), sep="\n")
    length, share = local_names(modules)
    print(f"{length:5.1f} letters in the mean local name; {share:.2%} bare participles and adverbs")
    return failed


if __name__ == "__main__":
    sys.exit(main())
