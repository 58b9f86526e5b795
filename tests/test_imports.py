"""What `import headway` loads and costs, and how long a file may be.

Who may import whom is checked by import-linter (`make check`; the rules are in pyproject.toml).
"""

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))
LONGEST = 400  # lines of code in one file: what one reads in a sitting
KERNEL = 600  # of one that is a kernel, from its arguments to its end

LAZY = ("triton", "matplotlib", "rich", "tyro", "transformers", "safetensors", "sympy")

# Modules that only Unix has: with none of them everything is imported, as on Windows.
UNIX = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog")
ANYWHERE = """
import importlib, os, pkgutil, sys
import torch
sys.modules.update(dict.fromkeys(sys.argv[1].split(), None))  # an import of these now fails
for name in ("fork", "sysconf", "getuid", "getloadavg", "sched_getaffinity", "O_DIRECTORY"):
    vars(os).pop(name, None)
import headway
import headway_lab
walk = pkgutil.walk_packages
modules = [*walk(headway.__path__, "headway."), *walk(headway_lab.__path__, "headway_lab.")]
for module in modules:
    parts = module.name.split(".")
    if parts[1] != "backends" and parts[-1] != "__main__":
        importlib.import_module(module.name)
q = torch.randn(1, 2, 8, 4, requires_grad=True)
headway.attention(q, q, q, mask=headway.causal()).sum().backward()
from headway.cli.doctor import examine
assert "Error" not in str(examine()["versions"])
"""

# What PyTorch loads by itself (CUDA builds load Triton) is not ours to answer for.
LOADED = """
import json, sys
import torch
before = set(sys.modules)
import headway
imported = set(sys.modules)
q = torch.randn(1, 2, 8, 4, requires_grad=True)
table = torch.zeros(2, 9, requires_grad=True)
for score in (None, lambda s, b, h, i, j: s * s.exp() + table[h, (i - j).clamp(0, 8)]):
    headway.attention(q, q, q, score, headway.causal()).sum().backward()
assert q.grad.isfinite().all() and table.grad.abs().max() > 0
print(json.dumps([sorted(imported - before), sorted(set(sys.modules) - before)]))
"""

# A full collection looks at all of PyTorch's objects (0.1 s), wherever the count of allocations has
# it fall: in this import or in what comes next.
IMPORT_TIME = """
import gc
import time
import torch
gc.disable()
before = time.process_time()
import headway
taken = time.process_time() - before
print(taken / before, taken)
"""


def run_fresh(code: str, *arguments: str) -> str:
    """What `code` prints in a process of its own, which keeps bytecode as an installed package's
    is kept: compiling our sources and not PyTorch's would not be a comparison."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_and_cpu_attention_load_nothing_heavy():
    by_import, by_call = json.loads(run_fresh(LOADED))
    assert [m for m in by_import if m.split(".")[0] in LAZY] == []
    assert [m for m in by_call if m.split(".")[0] in LAZY] == []


def test_everything_imports_without_what_only_unix_has():
    """Every module but those of the GPU backends, which are Triton's to place."""
    run_fresh(ANYWHERE, " ".join(UNIX))


def test_import_costs_little_beyond_torch():
    """A tenth of what `import torch` does, and a tenth of a second."""
    tries = []
    while len(tries) < 12 and min(tries, default=(1.0,))[0] > 0.1:  # a busy machine gets twelve
        share, seconds = map(float, run_fresh(IMPORT_TIME).split())
        tries.append((max(share, seconds), share, seconds))
    assert min(tries)[0] <= 0.1, f"(worst, share of import torch, seconds) in each try: {tries}"


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Lines that hold code: blank lines, comments and docstrings are free."""
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            code.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(code)


def test_code_lines_counts_code_only():
    source = '"""Doc.\n\nMore.\n"""\n\n# why\nx = 1  # because\ny = """a\n\nb"""\n\n\n'
    function = 'def f():\n    """Doc."""\n    return (\n        1\n    )\n'
    assert code_lines(source) == 4  # x, and the three lines of y
    assert code_lines(source + function) == 8


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-3:]))
def test_file_is_short(path: Path):
    lines = code_lines(path.read_text(encoding="utf-8"))
    most = KERNEL if path.stem.startswith("kernel") else LONGEST
    assert lines <= most, f"{path.name} has {lines} lines of code: give a part a file of its own"


def test_no_unrolled_loop_names_a_constant():
    """Triton refuses a constexpr that is defined twice, in the second turn of an unrolled loop: for
    a width of two pieces alone, say."""
    found = [
        f"{file}:{named.lineno}"
        for file in SOURCES
        for loop in ast.walk(ast.parse(file.read_text()))
        if isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter)
        for named in ast.walk(loop)
        if isinstance(named, ast.AnnAssign) and "constexpr" in ast.unparse(named.annotation)
    ]
    assert not found
