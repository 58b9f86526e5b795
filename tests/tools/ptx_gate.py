"""Proves that a refactoring changes no instruction of the GPU kernels: `make ptx BASE=main`.

Some fifty kinds of calls are compiled twice, with the sources of a commit and with those of the working
tree, as far as PTX; no GPU is needed, and nothing is assembled or run. Two texts are the same if their
instructions are, and what the assembler and the launch are told besides: options, warps, shared memory,
how tiles of a tensor are copied, the grid. Comments, lines and files of the source, sections for debuggers
and the names of functions and labels do not count: kernels may be renamed, and their modules moved.

This file compiles both sides, so it may rely on little that a refactoring moves: `prepare`,
`forward` and `backward` of a backend, and what Triton calls when it launches. A name that it needs from
within the backends is looked for in all their modules (`replaced`).

What a commit compiles to is kept in `.ptx/<commit>-<version of Triton>`, for the next time, beside
`.ptx/tree-<version>`; texts are kept as they are compared.
"""

import argparse
import difflib
import hashlib
import importlib
import io
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[2]
SHOWN = 30  # lines of a text, from the first that differs, that a report compares

# ---------------------------------------------------------------------------------------- kinds


class Kind(NamedTuple):
    """- `backend`; `steps`: "forward", "backward" or "both"; `d`, `dv`: widths.
    - `call`: of `calls`.
    - `dtype`: "f32" is multiplied as IEEE says, "tf32" is float32 on tensor cores.
    - `capability`: of the GPU, 80 or 90.
    """

    backend: str
    steps: str
    d: int
    dv: int
    call: str
    dtype: str = "bf16"
    capability: int = 90

    @property
    def name(self) -> str:
        widths = str(self.d) if self.d == self.dv else f"{self.d}_{self.dv}"
        steps = [] if self.steps == "both" else [self.steps]
        target = [f"sm{self.capability}"] if self.backend == "triton" else []
        dtype = [] if self.dtype == "bf16" and self.backend == "hopper" else [self.dtype]
        return "-".join([self.backend, *steps, *target, *dtype, widths, self.call])


KINDS = {
    kind.name: kind
    for kind in (
        Kind("hopper", "forward", 64, 64, "longest"),  # three consumers
        Kind("hopper", "forward", 64, 64, "document"),  # one consumer, several CTAs
        Kind("hopper", "forward", 64, 64, "affine"),
        Kind("hopper", "forward", 96, 96, "causal"),
        Kind("hopper", "forward", 96, 96, "stream_k"),  # acc in two pieces
        Kind("hopper", "forward", 96, 96, "learned"),  # out in float32
        Kind("hopper", "forward", 128, 128, "plain"),
        Kind("hopper", "forward", 128, 128, "plain", "f16"),
        Kind("hopper", "forward", 128, 128, "long"),
        Kind("hopper", "forward", 128, 128, "window"),
        Kind("hopper", "forward", 128, 128, "stream_k"),
        Kind("hopper", "forward", 128, 128, "affine"),
        Kind("hopper", "forward", 128, 128, "softcap"),
        Kind("hopper", "forward", 128, 128, "bias"),
        Kind("hopper", "forward", 128, 128, "blocks"),
        Kind("hopper", "forward", 192, 128, "sink"),
        Kind("hopper", "forward", 192, 128, "long"),
        Kind("hopper", "forward", 256, 256, "alibi"),
        Kind("hopper", "backward", 64, 64, "long"),  # lagged
        Kind("hopper", "backward", 64, 64, "in_turn"),
        Kind("hopper", "backward", 96, 96, "alibi"),
        Kind("hopper", "backward", 128, 128, "plain"),
        Kind("hopper", "backward", 128, 128, "segments"),
        Kind("hopper", "backward", 128, 128, "document"),
        Kind("hopper", "backward", 128, 128, "dense"),  # lagged
        Kind("hopper", "backward", 128, 128, "softcap"),
        Kind("hopper", "backward", 128, 128, "bias"),
        Kind("hopper", "backward", 128, 128, "learned"),
        Kind("hopper", "backward", 128, 128, "sink"),
        Kind("hopper", "backward", 192, 128, "causal"),
        Kind("hopper", "backward", 256, 256, "columns"),
        Kind("triton", "both", 128, 128, "plain"),
        Kind("triton", "both", 128, 128, "window"),
        Kind("triton", "both", 128, 128, "document"),
        Kind("triton", "both", 128, 128, "alibi"),
        Kind("triton", "both", 128, 128, "bias"),
        Kind("triton", "both", 128, 128, "sink"),
        Kind("triton", "both", 192, 128, "causal"),
        Kind("triton", "both", 256, 256, "causal"),  # dk and dv from a kernel each
        Kind("triton", "both", 64, 64, "dropout"),
        Kind("triton", "both", 64, 64, "positions"),
        Kind("triton", "both", 64, 64, "causal", "f32"),
        Kind("triton", "both", 64, 64, "causal", capability=80),
        Kind("triton", "both", 128, 128, "softcap", capability=80),
        Kind("triton", "both", 128, 128, "blocks", capability=80),
        Kind("triton", "both", 64, 64, "in_turn", capability=80),
        Kind("triton", "both", 64, 64, "learned", "f32", capability=80),
        Kind("triton", "both", 64, 64, "plain", "tf32", capability=80),
    )
}


def calls(length: int = 384) -> dict[str, dict[str, Any]]:
    """What calls bring besides q, k and v: arguments of `prepare`, and sizes that are not the usual
    ones (`length`, `batch`, key `heads`)."""
    import torch

    import headway as hw

    def table(*size: int) -> torch.Tensor:
        return torch.rand(size).requires_grad_()

    ids = torch.arange(2 * length).reshape(2, length) // 100
    dense = torch.rand(4, length, length) < 0.5
    learned, gain = table(4, length), table()
    places = torch.arange(length) * 2
    return {
        "plain": {},
        "causal": {"mask": hw.causal()},
        "window": {"mask": hw.causal() & hw.sliding_window(256), "length": 2048},
        "document": {"mask": hw.causal() & hw.document(ids)},
        "dense": {"mask": lambda b, h, i, j: dense[h, i, j]},
        "blocks": {"mask": hw.block_mask(hw.causal(), None, None, length, length)},
        "alibi": {"score": hw.alibi(torch.rand(4)), "mask": hw.causal()},
        "affine": {"score": lambda s, b, h, i, j: 1.1 * s + 0.01 * (j - i)},
        "softcap": {"score": hw.softcap(30.0), "mask": hw.causal()},
        "bias": {"score": hw.relative_bias(table(4, 2 * length - 1))},
        "columns": {"score": lambda s, b, h, i, j: s + learned[h, j]},
        "learned": {"score": lambda s, b, h, i, j: s * gain.exp() + gain * learned[h, i]},
        "long": {"mask": hw.causal(), "length": 2048},
        "longest": {"mask": hw.causal(), "length": 8192},
        "stream_k": {"length": 2048, "batch": 1},
        "segments": {"mask": hw.causal(), "heads": 4, "batch": 33},
        "sink": {"mask": hw.causal(), "sink": torch.zeros(4), "max_logit": True},
        "in_turn": {"mask": hw.causal(), "deterministic": True},
        "dropout": {"mask": hw.causal(), "dropout": 0.25, "seed": 1},
        "positions": {"mask": hw.causal(), "coords": hw.types.Coords(q_pos=places, kv_pos=places)},
    }


# ---------------------------------------------------------------- the child: compiles one side

# Bytes of shared memory that a program may have; what asks for more takes a smaller tile.
SHARED = {80: 166912, 90: 232448}
# Of what the compiler says of a kernel, what assembler and launch depend on.
FACTS = (
    "num_warps", "num_ctas", "cluster_dims", "shared", "maxnreg", "ptx_options", "enable_fp_fusion",
    "global_scratch_size", "launch_cooperative_grid", "launch_pdl", "tensordesc_meta",
)  # fmt: skip


class _Driver:
    """As much of a driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(kind: Kind) -> list[tuple[str, str]]:
    """(kernel's name, its text) of all launches of a call, in their order."""
    import torch
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, str]] = []
    run, add_stages, room = JITFunction.run, CUDABackend.add_stages, SHARED[kind.capability]

    card = SimpleNamespace(multi_processor_count=132)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if warmup:  # looked up before it is launched
            return
        made = run(self, *args, grid=grid, warmup=True, **kwargs)
        if made.metadata.shared > room:
            raise OutOfResources(made.metadata.shared, room, "shared memory")
        facts = [f"grid: {grid}"]
        facts += [f"{fact}: {getattr(made.metadata, fact, None)}" for fact in FACTS]
        found.append((self.__name__, "\n".join([*facts, normalised(made.asm["ptx"])])))

    def up_to_ptx(self: Any, stages: dict, *args: Any) -> None:
        add_stages(self, stages, *args)
        stages["cubin"] = lambda ptx, metadata: b""

    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(CUDABackend, "add_stages", up_to_ptx),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=card),
        replaced("compile_in_parallel", lambda *of: None),  # what is launched, and nothing ahead
    ):
        driver.set_active(_Driver(kind.capability))  # type: ignore[arg-type]
        _call(kind)
    if not found:
        raise RuntimeError("nothing was launched")
    return found


def _prepare() -> tuple[Any, str]:
    """`prepare`, and what it calls the coordinates: older sources have other names."""
    try:
        from headway.resolve import prepare
    except ImportError:
        from headway.api import prepare

        return prepare, "coords"
    return prepare, "keys"


def _call(kind: Kind) -> None:
    import torch

    prepare, keys = _prepare()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if kind.dtype == "tf32" else "highest")
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}.get(kind.dtype, torch.float32)
    call = dict(calls()[kind.call])
    length, batch, heads = (
        call.pop(n, x) for n, x in (("length", 384), ("batch", 2), ("heads", 2))
    )
    shapes = (4, kind.d), (heads, kind.d), (heads, kind.dv)
    q, k, v = (torch.randn(batch, h, length, width).to(dtype) for h, width in shapes)
    backend = importlib.import_module(f"headway.backends.{kind.backend}")
    if "coords" in call:
        call[keys] = call.pop("coords")
    spec, given = prepare(q, k, v, **call)  # which backend could run it here does not matter
    if kind.steps != "backward":
        backend.forward(spec, given)
    if kind.steps != "forward":
        rows, dout = torch.zeros(q.shape[:3]), torch.zeros(batch, 4, length, kind.dv).to(dtype)
        needs = tuple(t.requires_grad for t in given.captured.tensors[: spec.score_tensors])
        out = dout.to(spec.out_dtype(dtype))
        backend.backward(spec, given, out, rows, dout, rows, needs)


@contextmanager
def replaced(name: str, by: Any) -> Iterator[None]:
    """Inside, a function of the backends is another one, in whatever modules it has its name."""
    backends = importlib.import_module("headway.backends")
    for module in pkgutil.walk_packages(backends.__path__, "headway.backends."):
        importlib.import_module(module.name)
    inside = [m for n, m in sys.modules.items() if n.startswith("headway.backends")]
    having = [m for m in inside if callable(vars(m).get(name))]
    if not having:
        raise LookupError(
            f"no module of headway.backends has a function {name}: what is it called now?"
        )
    with ExitStack() as stack:
        for module in having:
            stack.enter_context(mock.patch.object(module, name, by))
        yield


def compile_all(source: Path, out: Path, jobs: int, names: list[str]) -> None:
    """Write the texts of kinds below `out`, each kind compiled in a process of its own, so that none
    depends on others; print how long each took."""
    import torch

    import headway
    import triton  # noqa: F401  (the processes begin with what is imported here)

    found = Path(str(headway.__file__)).resolve()
    if not found.is_relative_to(source.resolve()):
        sys.exit(f"headway is that of {found}, not of {source}")
    torch.set_num_threads(1)
    running: dict[int, tuple[str, float]] = {}
    todo = names[::-1]
    while todo or running:
        while todo and len(running) < jobs:
            name, began = todo.pop(), time.monotonic()
            process = os.fork()
            if not process:
                os._exit(_compile(name, out))
            running[process] = name, began
        process, status = os.wait()
        name, began = running.pop(process)
        print(name, status, f"{time.monotonic() - began:.1f}", flush=True)


def _compile(name: str, out: Path) -> int:
    """Write the texts of a kind, all or none; if that fails, why."""
    try:
        texts = compiled(KINDS[name])
    except BaseException:  # noqa: BLE001  (written down, for the report)
        (out / f"{name}.error").write_text(traceback.format_exc())
        return 1
    with tempfile.TemporaryDirectory(dir=out) as folder:
        for n, (kernel, text) in enumerate(texts):
            (Path(folder) / f"{n}-{kernel}.ptx").write_text(text)
        (out / name).mkdir()
        for file in Path(folder).iterdir():
            file.rename(out / name / file.name)
    return 0


def normalised(ptx: str) -> str:
    """The instructions: no comments, no lines and files of the source, no sections for debuggers, no
    labels that nothing jumps to; functions and other labels are numbered."""
    lines, in_debug = [], False
    for line in re.sub(r"/\*.*?\*/", "", ptx, flags=re.DOTALL).splitlines():
        line = line.split("//")[0].rstrip()
        in_debug = in_debug or re.match(r"\s*\.section\s+\.debug", line) is not None
        if in_debug:
            in_debug = not line.endswith("}")
        elif line and not re.match(r"\s*\.(loc|file)\s", line):
            lines.append(line)
    text = "\n".join(lines)
    # (Labels within braces, of inline assembly, may come several times.)
    labels = dict.fromkeys(re.findall(r"^\s*([\w$]+):", text, re.MULTILINE))
    used = re.findall(r"[\w$]+(?![\w$]|:)", text)
    for label in labels.keys() - set(used):
        text = re.sub(rf"^\s*{re.escape(label)}:[ \t]*\n?", "", text, flags=re.MULTILINE)
    functions = re.findall(
        r"^(?!\.extern).*?\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text, re.M
    )
    new = {name: f"function{n}" for n, name in enumerate(dict.fromkeys(functions))}
    new |= {name: f"$L{n}" for n, name in enumerate(x for x in labels if x in set(used))}
    if not new:
        return text + "\n"
    known = "|".join(map(re.escape, sorted(new, key=len, reverse=True)))
    # A parameter is called after its function.
    whole = rf"(?<![\w$%.])({known})(?=_param_\d+|_retval\d+|(?![\w$]))"
    return re.sub(whole, lambda found: new[found[1]], text) + "\n"


# ------------------------------------------------------------------------------------ the report


class Report(NamedTuple):
    """- `lines`: of the table; `same`: how many texts are, of `total`."""

    lines: list[str]
    same: int
    total: int


def compare(base: Path, tree: Path, names: list[str]) -> Report:
    """The texts of two folders, kind by kind, and in a kind by their order."""
    lines, same, total = [], 0, 0
    wide = max(map(len, names), default=0)
    for name in names:
        sides = [_texts(folder / name) for folder in (base, tree)]
        errors = [_error(folder / f"{name}.error") for folder in (base, tree)]
        if not any(sides):
            total += 1
            lines.append(f"missing  {name:{wide}}  on both sides")
        for one, other in zip_longest(*sides):
            total += 1
            if one is None or other is None:
                at = "BASE" if other is None else "the working tree"
                lines.append(f"missing  {name:{wide}}  {_kernel(one or other)}: only in {at}")
                continue
            kernels = " -> ".join(dict.fromkeys(map(_kernel, (one, other))))
            texts = [file.read_text().splitlines() for file in (one, other)]
            alike = texts[0] == texts[1]
            same += alike
            lines.append(f"{'same   ' if alike else 'differs'}  {name:{wide}}  {kernels}")
            if not alike:
                lines += [f"         {x}" for x in (*_first_difference(*texts), one, other)]
        lines += [f"         {error}" for error in errors if error]
    return Report(lines, same, total)


def _texts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ptx"), key=lambda file: int(file.name.split("-")[0]))


def _kernel(file: Path | None) -> str:
    return "" if file is None else file.stem.split("-", 1)[1]


def _error(file: Path) -> str:
    """The last line of what went wrong, and where the rest is."""
    return f"{file.read_text().splitlines()[-1]} ({file})" if file.exists() else ""


def _first_difference(one: list[str], other: list[str]) -> list[str]:
    first = next(n for n, (a, b) in enumerate(zip_longest(one, other)) if a != b)
    at = slice(max(first - 2, 0), first + SHOWN)
    diff = difflib.unified_diff(one[at], other[at], lineterm="", n=2)
    # Files' names and places within the piece say nothing; of more than one place the first.
    found: list[str] = []
    for line in list(diff)[3:]:
        if line.startswith("@@"):
            break
        found.append(line)
    return [f"line {first + 1}:", *found[:SHOWN]]


# ----------------------------------------------------------------------------------- both sides


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="ptx_gate.py",
        description="Compare the PTX of the kernels in the working tree with that of a commit.",
        epilog="Exit status: 0 if all texts are the same, 1 if one differs or is on one side only.",
    )
    parser.add_argument("base", nargs="?", default="HEAD", help="the commit (default: HEAD)")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN",
        help="kinds whose name has this in it, which may be a pattern as of file names; may be given "
        "several times",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="kinds compiled at once (default: one per core)",
    )  # fmt: skip
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH",
        help="the Python, and with it the Triton, to compile with (default: this one)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the kinds, and do nothing")
    given = parser.parse_args()
    only = [f"*{pattern}*" for pattern in given.only or [""]]
    names = [name for name in KINDS if any(fnmatch(name, pattern) for pattern in only)]
    if not names:
        parser.error(f"no kind's name has {' or '.join(given.only)} in it; --list prints them")
    if given.list:
        print(*names, sep="\n")
        return 0
    commit = _git("rev-parse", "--verify", "--quiet", f"{given.base}^{{commit}}").decode().strip()
    if not commit:
        parser.error(f"{given.base} is no commit")

    began = time.monotonic()
    triton, *others = _versions(given.python)
    kept = Path(os.path.relpath(ROOT / ".ptx"))
    base, tree = (kept / f"{of}-{triton}" for of in (commit[:12], "tree"))
    stamp = " ".join([hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), triton, *others])
    _keep(base, stamp)
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        old, new = Path(temporary) / "base", Path(temporary) / "tree"
        # A copy of the working tree, too: what is edited meanwhile is not compiled.
        shutil.copytree(ROOT / "src", new / "src")
        missing = [name for name in names if not (base / name).exists()]
        if missing:
            with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "src"))) as archive:
                archive.extractall(old, filter="data")
            _compile_side(f"{commit[:12]}", old / "src", base, missing, given)
        _compile_side("working tree", new / "src", tree, names, given)
    report = compare(base, tree, names)
    print(*report.lines, sep="\n")
    print(f"{time.monotonic() - began:.0f} seconds")
    print(f"{report.same} of {report.total} PTX texts are the same (Triton {triton})")
    return int(report.same < report.total)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE).stdout


def _versions(python: str) -> list[str]:
    """Of Triton, PyTorch and Python."""
    code = "import sys, triton, torch; print(triton.__version__, torch.__version__, sys.version)"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{python} has no Triton and PyTorch to compile with")
    return done.stdout.split()


def _keep(folder: Path, stamp: str) -> None:
    """Make a folder for what a commit compiles to; empty it where other kinds or versions are in it."""
    of = folder / "compiled-by"
    if not of.exists() or of.read_text() != stamp:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        of.write_text(stamp)
    for file in folder.glob("*.error"):
        file.unlink()


def _compile_side(side: str, source: Path, out: Path, names: list[str], given: Any) -> None:
    """Compile kinds with the sources of one side, and show how far that is."""
    own = ("TRITON_", "MLIR_", "LLVM_", "PYTHONPATH")  # another compiler than by default
    env = {name: x for name, x in os.environ.items() if not name.startswith(own)}
    env |= {
        "PYTHONPATH": str(source),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [given.python, "-P", Path(__file__).resolve(), "--compile", source, out.resolve()]
    child = subprocess.Popen(
        [*map(str, command), str(given.jobs), *names], env=env, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    bar = sys.stderr.isatty()
    for n, line in enumerate(child.stdout, 1):
        name, status, seconds = line.split()
        said = f"{name}{' FAILED' if status != '0' else ''}, {seconds} s"
        if bar:
            done = 30 * n // len(names)
            end = "\n" if n == len(names) else ""
            text = f"\r{side} [{'#' * done}{'.' * (30 - done)}] {n}/{len(names)} {said}"
            print(f"{text}\x1b[K", end=end, file=sys.stderr, flush=True)
        else:
            print(f"{side} {n}/{len(names)}: {said}", file=sys.stderr, flush=True)
    if child.wait():
        sys.exit(f"{side}: compiling stopped (status {child.returncode})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        source, out, jobs, *names = sys.argv[2:]
        compile_all(Path(source), Path(out), int(jobs), names)
    else:
        sys.exit(main())
