"""PTX as statements, in blocks that end where threads may part or have to wait."""

import re
from collections.abc import Iterator
from typing import NamedTuple

# Threads leave a block behind these; and before those others may go on.
ENDS = ("bra", "brx", "ret", "exit", "bar", "barrier", "trap")
TURNS = ("mbarrier.try_wait", "ld.volatile", "ld.acquire", "atom")
_PLACES = ("$L__tmp", "$L__func")  # nobody jumps there: for debuggers
_NAME = re.compile(r"[A-Za-z_$][\w$]*|%[\w.]+")


class Statement(NamedTuple):
    """An instruction.

    - `words`: the opcode between its dots.
    - `operands`: a name, a number's text, or a list of these where braces are; an address is
      `[name, bytes from there, *what else is in its brackets]` in a tuple.
    - `guard`: the predicate under which it happens, and whether that is to be false.
    - `where`: the line of the kernel's source, "kernel_forward.py:56:30".
    """

    words: tuple[str, ...]
    operands: list
    guard: tuple[str, bool] | None
    where: str
    text: str

    @property
    def opcode(self) -> str:
        return ".".join(self.words)

    def __str__(self) -> str:
        return f"{self.text} ({self.where})"


class Kernel(NamedTuple):
    """An entry of a module.

    - `parameters`: name and bytes.
    - `registers`: name and bits; predicates have one.
    - `blocks`: statements, of which none but the last jumps or waits.
    - `labels`: the block that begins there.
    - `tables`: labels among which `brx.idx` chooses.
    """

    name: str
    threads: int
    parameters: dict[str, int]
    registers: dict[str, int]
    blocks: list[list[Statement]]
    labels: dict[str, int]
    tables: dict[str, list[str]]


def parse(ptx: str) -> Kernel:
    """The one kernel of a module."""
    entry = re.search(r"\.entry (\w+)\((.*?)\)(.*?)\n\{\n(.*?)\n\$L__func_end", ptx, re.S)
    assert entry, "no kernel in this text"
    name, parameters, directives, body = entry.groups()
    threads = re.search(r"\.(?:req|max)ntid (\d+)", directives)
    assert threads, "how many threads a CTA has is not said"
    return Kernel(name, int(threads[1]), _parameters(parameters), *_blocks(body))


def _parameters(text: str) -> dict[str, int]:
    found = {}
    for line in filter(None, map(str.strip, text.split("\n"))):
        bits = re.search(r"\.[bfsu](\d+)\b", line)
        name = re.search(r"(\w+)(?:\[(\d+)\])?,?$", line)
        assert bits is not None, line
        assert name is not None, line
        found[name[1]] = int(bits[1]) // 8 * int(name[2] or 1)
    return found


def _blocks(body: str) -> tuple:
    """Registers, blocks, labels and tables of a kernel."""
    registers: dict[str, int] = {}
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    blocks: list[list[Statement]] = [[]]
    where = label = ""
    for text in _with_names_of_their_own(_pieces(body)):
        if text.startswith(".loc"):
            where = text.split()[1]
        elif text.startswith(".reg"):
            registers |= _declared(text)
        elif text.startswith(_PLACES):
            continue
        elif text.endswith(":"):
            if blocks[-1]:
                blocks.append([])
            label = text[:-1]
            labels[label] = len(blocks) - 1
        elif text.startswith(".branchtargets"):
            tables[label] = _NAME.findall(text.removeprefix(".branchtargets"))
        elif not text.startswith("."):
            made = _statement(text, where)
            if made.opcode.startswith(TURNS) and blocks[-1]:
                blocks.append([])
            blocks[-1].append(made)
            if made.words[0] in ENDS or made.opcode.startswith(TURNS):
                blocks.append([])
    return registers, blocks, labels, tables


def _pieces(body: str) -> Iterator[str]:
    """Statements, labels ("name:"), braces that are scopes, and ".loc file:line:column"."""
    left = ""
    for line in body.split("\n"):
        text, _, remark = line.partition("//")
        if text.strip().startswith(".loc"):
            yield f".loc {(remark.split() or ['?'])[0]}"
            continue
        left = f"{left} {text}".strip()
        while left:
            if left[0] in "{}":
                size = 1
            elif label := re.match(r"[\w$]+:(?!:)", left):
                size = label.end()
            elif ";" in left:
                size = left.index(";") + 1
            else:
                break
            yield left[:size].rstrip("; ")
            left = left[size:].strip()


def _with_names_of_their_own(pieces: Iterator[str]) -> Iterator[str]:
    """Scopes taken away: what is declared in one is called by another name in each."""
    found: list[tuple[str, tuple[int, ...]]] = []
    own: dict[int, set[str]] = {}
    scopes: tuple[int, ...] = ()
    for text in pieces:
        if text == "{":
            scopes = (*scopes, len(own))
            own[scopes[-1]] = set()
        elif text == "}":
            scopes = scopes[:-1]
        else:
            if scopes and text.endswith(":"):
                own[scopes[-1]].add(text[:-1])
            elif scopes and text.startswith(".reg"):
                own[scopes[-1]] |= set(_declared(text))
            found.append((text, scopes))

    for text, scopes in found:
        inner = {name: f"{name}${scope}" for scope in scopes for name in own[scope]}
        yield _renamed(text, inner) if inner else text


def _renamed(text: str, names: dict[str, str]) -> str:
    """An instruction, a label or a declaration by other names: all but the opcode."""
    if text.startswith(".reg"):
        bits = text.split()[1]
        return "\n".join(f".reg {bits} {names[name]}" for name in _declared(text))
    if text.endswith(":") or text.startswith("."):
        return names.get(text[:-1], text[:-1]) + ":" if text.endswith(":") else text
    opcode = re.match(r"(@!?)?([\w%$]+\s+)?", text) if text[0] == "@" else None
    begin = opcode.end() if opcode else 0
    end = begin + re.match(r"[\w.:]*", text[begin:]).end()  # type: ignore[union-attr]
    change = lambda part: _NAME.sub(lambda m: names.get(m[0], m[0]), part)
    return change(text[:begin]) + text[begin:end] + change(text[end:])


def _declared(text: str) -> dict[str, int]:
    """Registers and their bits: ".reg .b32 %r<3>, p"."""
    found = {}
    for line in text.split("\n"):
        _, kind, names = line.split(None, 2)
        bits = 1 if kind == ".pred" else int(re.sub(r"\D", "", kind))
        for name, many in re.findall(r"(%?[\w$]+)(?:<(\d+)>)?", names):
            found |= {f"{name}{n}": bits for n in range(int(many))} if many else {name: bits}
    return found


def _statement(text: str, where: str) -> Statement:
    made = re.match(r"(?:@(!?)([\w%$]+)\s+)?([\w.:]+)\s*(.*)", text, re.S)
    assert made, text
    negated, guard, opcode, operands = made.groups()
    words = tuple(opcode.replace("::", "_").split("."))
    # One pair of a result and a predicate is written with a bar between.
    operands = re.sub(r"(%\w+)\|(%\w+)", r"\1, \2", operands)
    return Statement(
        words, _operands(operands), (guard, bool(negated)) if guard else None, where, text
    )


def _operands(text: str) -> list:
    if "[" not in text and "{" not in text:
        return [piece for piece in map(str.strip, text.split(",")) if piece]
    found, depth, begin = [], 0, 0
    for n, c in enumerate(text + ","):
        depth += (c in "[{") - (c in "]}")
        if c == "," and not depth:
            if piece := text[begin:n].strip():
                found.append(_operand(piece))
            begin = n + 1
    return found


def _operand(text: str):
    if text[0] == "{":
        return _operands(text[1:-1])
    if text[0] == "[":
        first, *others = _operands(text[1:-1])
        base, _, more = first.partition("+")
        return (base.strip(), int(more or "0", 0), *others)
    return text
