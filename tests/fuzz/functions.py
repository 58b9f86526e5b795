"""Random masks and scores, as text: expression trees over positions and captured tables.

A finite minimum of a `where` is written `LOW`. It is -1e9 or the like for the library, and a few hundred
below all other scores for the oracle: the softmax is the same, but float64 can tell such rows apart.
"""

import random
from dataclasses import dataclass, field

MILD = -300.0  # LOW, for the oracle
IDS = "int8 int16 int32 int64 uint8".split()
FLOATS = "float32 bfloat16 float16".split()


@dataclass(frozen=True)
class Table:
    """A captured tensor. `axes` says what it is indexed with: b, h, p (a position), q, k (the query's,
    the key's) and r (their distance, from -6 to 6)."""

    name: str
    axes: str
    dtype: str
    learned: bool = False


@dataclass
class Function:
    """`text` is an expression of s, b, h, i, j and the tables; library values have `library`, an
    expression of hw and the tables, that says the same."""

    text: str
    tables: list[Table] = field(default_factory=list)
    library: str = ""
    low: float = MILD


class Writer:
    def __init__(self, draw: random.Random, dtype: str) -> None:
        self.draw = draw
        self.tables: list[Table] = []
        self.floats = [dtype] if dtype == "float64" else [*FLOATS, "float32"]
        self.letter = "t"
        self.low = MILD

    def table(self, axes: str, dtype: str, learned: bool = False) -> str:
        for t in self.tables:
            if t.axes == axes and t.dtype == dtype and self.draw.random() < 0.5:
                return t.name
        name = f"{self.letter}{len(self.tables)}"
        self.tables.append(Table(name, axes, dtype, learned))
        return name

    def number(self, low: float, high: float) -> str:
        return f"{self.draw.uniform(low, high):.4g}"

    # -- whole numbers ----------------------------------------------------------------------------

    def ids(self, at: str, dtype: str | None = None) -> str:
        """ids[i], ids[b, j] ..."""
        d = self.draw
        axes = d.choice(["p", "p", "bp", "hp"])
        name = self.table(axes, dtype or d.choice(IDS))
        return f"{name}[{', '.join([*axes[:-1], at])}]"

    def whole(self, depth: int) -> str:
        d = self.draw
        if depth == 0 or d.random() < 0.2:
            kind = d.choice("i j distance distance h b ids ids constant".split())
            if kind == "distance":
                return "(i - j)"
            if kind == "ids":
                return f"{self.ids(d.choice('ij'))}.long()"
            return str(d.randint(-5, 30)) if kind == "constant" else kind
        a = self.whole(depth - 1)
        op = d.choice("+ - * abs // % min max clamp where bits shift sign narrow square".split())
        n = d.randint(1, 9)
        if op in "+-":
            return f"({a} {op} {self.whole(depth - 1)})"
        if op == "*":
            return f"({a} * {d.choice([-3, -1, 2, 3, 5])})"
        if op in ("//", "%"):
            return f"({a} {op} {d.choice([n, -n, 16])})"
        if op == "abs":
            return f"({a} + 0 * i).abs()"
        if op in ("min", "max"):
            return f"torch.{op}imum({a} + 0 * i, {self.whole(depth - 1)} + 0 * j)"
        if op == "clamp":
            return f"({a} + 0 * i).clamp({-n}, {3 * n})"
        if op == "where":
            return f"torch.where({self.boolean(depth - 1)}, {a} + 0 * i, {self.whole(depth - 1)} + 0 * j)"
        if op == "bits":
            return f"(({a} + 0 * i) {d.choice('&|^')} {n})"
        if op == "shift":
            return f"(({a} + 0 * i).abs() {d.choice(['<<', '>>'])} {d.randint(0, 3)})"
        if op == "sign":
            return f"torch.sign({a} + 0 * i)"
        if op == "narrow":
            return f"({a} + 0 * i).to(torch.{d.choice(IDS)}).long()"
        return f"(({a}) * ({a}))"

    # -- booleans ---------------------------------------------------------------------------------

    def boolean(self, depth: int) -> str:
        d = self.draw
        kinds = "causal window document keep compare blocks heads floats".split()
        if depth > 0:
            kinds += "and and or or not xor where".split()
        kind = d.choice(kinds)
        n = d.randint(1, 40)
        if kind == "causal":
            return f"(i {d.choice(['>=', '>', '<='])} j + {d.randint(-9, 9)})"
        if kind == "window":
            return f"((i - j).abs() < {n})"
        if kind == "document":
            axes = d.choice(["p", "bp"])
            before = "b, " * (len(axes) - 1)
            name = self.table(axes, d.choice(IDS))
            return f"({name}[{before}i] == {name}[{before}j])"
        if kind == "keep":
            return self.ids(d.choice("ij"), "bool")
        if kind == "compare":
            op = d.choice(["<", "<=", ">", ">=", "!=", "=="])
            return f"({self.whole(2)} {op} {self.whole(1)} + 0 * i)"
        if kind == "blocks":
            return f"((i // {n} + j // {d.randint(1, 40)}) % {d.randint(2, 3)} == 0)"
        if kind == "heads":
            return f"(i - j < {d.randint(1, 9)} * (h + 1))"
        if kind == "floats":  # stored numbers, compared as they are: no rounding can tell
            name = self.table("hp" if d.random() < 0.5 else "p", d.choice(self.floats))
            t = next(t for t in self.tables if t.name == name)
            at = lambda p: f"{name}[{', '.join([*t.axes[:-1], p])}]"
            other = at("j") if d.random() < 0.5 else d.choice(["0.25", "-0.5", "0.0"])
            return f"({at('i')} {d.choice(['<', '>='])} {other})"
        a, b = self.boolean(depth - 1), self.boolean(depth - 1)
        if kind == "not":
            return f"(~{a})"
        if kind == "where":
            return f"torch.where({self.boolean(depth - 1)}, {a}, {b})"
        return f"({a} {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[kind]} {b})"

    # -- scores -----------------------------------------------------------------------------------

    def learned(self, axes: str, low: str = "") -> str:
        name = self.table(axes, self.draw.choice(self.floats), self.draw.random() < 0.6)
        at = {"r": "(i - j).clamp(-6, 6) + 6", "p": self.draw.choice("ij"), "q": "i", "k": "j"}
        inside = ", ".join(at.get(a, a) for a in axes)
        return f"{name}[{inside}]" if axes else name

    def step(self) -> str:
        """s becomes this."""
        d, n = self.draw, self.number
        kind = d.choice(
            "gain gain shift alibi bias bias bias relative relative gains softcap softcap temperature "
            "choose choose smooth twice".split()
        )
        if kind == "gain":
            return f"s * {n(-1.5, 1.5)}"
        if kind == "shift":
            return f"{n(0.5, 1.4)} * s + {n(-0.1, 0.1)} * (j - i) + {n(-2, 2)}"
        if kind == "alibi":
            return f"s - {self.learned('h')}.abs() * 0.3 * (i - j).abs()"
        if kind == "bias":
            return f"s + {self.learned(d.choice(['h', 'p', 'hp', 'bp', 'qk', 'b', 'hqk']))}"
        if kind == "relative":
            return f"s + {self.learned(d.choice(['r', 'hr']))}"
        if kind == "gains":
            return f"s * (1 + 0.5 * {self.learned(d.choice(['h', 'p', 'hr']))})"
        if kind == "softcap":
            cap = n(1, 9)
            return f"{cap} * torch.tanh(s / {cap})"
        if kind == "temperature":
            return f"s * (0.3 * {self.learned('')}).exp()"
        if kind == "choose":
            return f"torch.where({self.boolean(1)}, s, {d.choice([n(-4, 1), f's * {n(-1, 1)}', f's - {n(0, 4)}'])})"
        if kind == "smooth":
            return d.choice([
                f"s * torch.sigmoid({n(-1, 1)} * s)", f"s + torch.sin({n(0.3, 2)} * s)",
                f"torch.maximum(s, {n(0.1, 0.8)} * s)", f"(s * s + {n(0.1, 1)}).sqrt() * {n(-1, 1)}",
                f"s - {n(0.01, 0.1)} * ((i - j).abs() + 1).float().sqrt()", f"torch.clamp(s, {n(-3, -1)}, {n(1, 3)})",
            ])  # fmt: skip
        return f"{n(0.2, 0.9)} * s + s.tanh() * {self.learned('hr')}"


LIBRARY = (  # the same, as a value and as a formula; n and m are numbers, T is a table of such axes
    # Not bare, since a bare one that masks nothing out is refused.
    ("hw.causal({n}) & hw.causal(20)", "(j - {n} <= i)", ""),
    ("hw.sliding_window({m})", "((i - j).abs() < {m})", ""),
    ("hw.causal() & hw.sliding_window({m})", "((j <= i) & (i - j < {m}))", ""),
    ("hw.causal() | hw.prefix({m})", "((j <= i) | (j < {m}))", ""),
    ("hw.sliding_window({m}) | hw.global_tokens(3)", "(((i - j).abs() < {m}) | (i < 3) | (j < 3))", ""),
    ("hw.causal() & hw.strided({m})", "((j <= i) & ((i - j < {m}) | ((i - j) % {m} == 0)))", ""),
    ("hw.dilated({m}, 3)", "(((i - j).abs() < 3 * {m}) & ((i - j) % 3 == 0))", ""),
    ("hw.padding({t})", "(j < {t}[b])", "b"),
    ("hw.causal() & hw.padding({t})", "((j <= i) & (j < {t}[b]))", "b"),
)  # fmt: skip


def mask(draw: random.Random, dtype: str) -> Function:
    w = Writer(draw, dtype)
    w.letter = "m"
    if draw.random() < 0.35:
        value, formula, axes = draw.choice(LIBRARY)
        name = w.table(axes, "int64") if axes else ""
        fill = {"n": draw.randint(-9, 20), "m": draw.randint(2, 40), "t": name}
        return Function(formula.format(**fill), w.tables, value.format(**fill))
    return Function(w.boolean(draw.randint(0, 3)), w.tables)


def score(draw: random.Random, dtype: str, lows: list[float]) -> Function:
    w = Writer(draw, dtype)
    steps = [w.step() for _ in range(draw.choice([1, 1, 2, 3]))]
    if draw.random() < 0.25:  # last: what is no number, or hardly one
        other = "float('-inf')"
        if lows and draw.random() < 0.5:
            other, w.low = "LOW", draw.choice(lows)
        if other != "LOW" and draw.random() < 0.5:
            steps.append(f"s + torch.where({w.boolean(1)}, 0.0, {other})")
        else:
            steps.append(f"torch.where({w.boolean(1)}, s, {other})")
    return Function("\n".join(steps), w.tables, low=w.low)
