"""What each kernel reaches on this GPU, by itself, with several tiles: TFLOP/s.

    python tests/tools/triton_speed.py                    every case, about two minutes with 16 cores
    python tests/tools/triton_speed.py "128 causal" mla   some of them
    python tests/tools/triton_speed.py --compile          compile only, for an H200, with no GPU

Everything is compiled first, by as many processes as there are cores and without touching the GPU;
what a line says is the time of a kernel alone, many launches in a row. `*` marks the tiles that the
library takes. FLOPs count kept pairs only, two per multiplication: 2 products for the forward, 3
for dq, 4 for dk and dv (3 and 2 for one of them), 5 for all at once. The last line of a case is the backward as others
count it, 5 products in the time of all its kernels.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from triton.runtime.errors import PTXASError

import headway as hw
from headway.backends.gpu import captured_grads
from headway.backends.gpu.products import bits_of
from headway.backends.triton import launch
from headway.backends.triton.config import Tiling, passes
from headway.backends.triton.plan import planned
from headway.backends.triton.tuning import NO_ROOM
from headway.resolve import prepare

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import compile_triton

BF16, F32 = torch.bfloat16, torch.float32
PRODUCTS = {
    "forward": "dv", "backward_q": "dvd", "backward_kv": "dvdv", "backward_k": "dvd",
    "backward_v": "dv", "backward": "dvdvd",
}  # fmt: skip
SLACK = 5  # seconds of measuring that a case may take


class Case(NamedTuple):
    """A call, and the tiles tried beside those of the table: "m n warps stages" and, if
    tiles kept in part are visited in other steps, these; by kernel."""

    shape: tuple[int, ...]  # b, hq, hk, length, d, dv
    dtype: torch.dtype
    mods: str  # of MODS
    tiles: dict[str, str]


SCORED = {
    "forward": "128 64 8 3, 64 64 4 3, 64 64 4 2",
    "backward_q": "128 64 8 3, 64 64 4 2, 64 64 8 2",
    "backward_kv": "32 128 8 3, 32 64 4 3, 32 64 4 2",
}
MASKED = {
    "forward": "128 128 8 3, 128 64 8 3, 64 64 4 3, 64 64 4 2",
    "backward_q": "128 64 8 3, 64 64 4 2",
    "backward_kv": "64 128 8 3, 64 64 4 2, 32 64 4 3",
}
CASES = {
    "128 causal": Case((2, 16, 16, 8192, 128, 128), BF16, "causal", MASKED),
    "window": Case((2, 16, 16, 8192, 128, 128), BF16, "window", MASKED),
    "documents": Case((2, 16, 16, 8192, 128, 128), BF16, "documents", MASKED),
    "128 full": Case((2, 16, 16, 8192, 128, 128), BF16, "full", {
        "backward_q": "64 64 4 2", "backward_kv": "64 128 8 3"}),
    "64 causal": Case((2, 32, 32, 8192, 64, 64), BF16, "causal", {
        "forward": "128 64 4 3, 128 128 4 3, 64 64 4 3, 64 128 4 2",
        "backward_q": "64 128 4 2", "backward_kv": "64 64 4 2"}),
    "256 causal": Case((1, 8, 8, 16384, 256, 256), BF16, "causal", {
        "backward_q": "128 64 8 1", "backward_k": "32 128 8 2", "backward_v": "32 128 8 3"}),
    "mla causal": Case((2, 16, 16, 8192, 192, 128), BF16, "causal", {
        "forward": "128 128 8 2, 64 64 4 2, 64 64 4 3", "backward_q": "64 64 4 2",
        "backward_kv": "32 128 8 3, 32 64 4 2, 32 64 4 3"}),
    "softcap": Case((2, 16, 16, 8192, 128, 128), BF16, "softcap", SCORED),
    "relative": Case((2, 16, 16, 8192, 128, 128), BF16, "relative", SCORED),
    "f32 128": Case((2, 16, 16, 2048, 128, 128), F32, "full", {
        "forward": "64 32 8 2, 64 64 8 2, 32 32 2 2", "backward_q": "64 32 4 2, 64 32 8 2, 32 32 2 2",
        "backward_kv": "32 32 8 2, 64 64 8 2, 32 64 8 2, 16 64 4 2"}),
    "f32 64": Case((2, 16, 16, 2048, 64, 64), F32, "causal", {
        "forward": "64 64 4 3, 64 32 4 2, 64 64 8 2", "backward_q": "64 64 4 2, 64 64 8 2, 32 32 2 2",
        "backward_kv": "32 32 2 2, 64 64 8 2, 64 32 4 2, 64 64 4 2"}),
    "128 gqa": Case((2, 32, 8, 8192, 128, 128), BF16, "causal", {}),
    "alibi": Case((2, 16, 16, 8192, 128, 128), BF16, "alibi", {}),
}  # fmt: skip
WINDOW, DOCUMENTS = 1024, 12


def _documents(length: int, device: str) -> torch.Tensor:
    """Packed documents of uneven lengths."""
    parts = torch.rand(DOCUMENTS, generator=torch.Generator().manual_seed(0)) + 0.1
    return torch.bucketize(torch.arange(length), (parts.cumsum(0) / parts.sum() * length)).to(
        device
    )


MODS = {
    "full": lambda h, n, where: (None, None),
    "causal": lambda h, n, where: (None, hw.causal()),
    "window": lambda h, n, where: (None, hw.causal() & hw.sliding_window(WINDOW)),
    "documents": lambda h, n, where: (
        None, hw.causal() & hw.document(_documents(n, where).expand(2, n).contiguous())
    ),
    "softcap": lambda h, n, where: (hw.softcap(30.0), hw.causal()),
    "alibi": lambda h, n, where: (hw.alibi(h), hw.causal()),
    "relative": lambda h, n, where: (
        hw.relative_bias(torch.randn(h, 2 * n - 1, device=where, requires_grad=True)), None
    ),
}  # fmt: skip


def pairs(case: Case) -> float:
    """Kept pairs of one head and batch row."""
    n = case.shape[3]
    if case.mods in ("full", "relative"):
        return n * n
    if case.mods == "window":
        return n * WINDOW - WINDOW * (WINDOW - 1) / 2
    if case.mods == "documents":
        sizes = _documents(n, "cpu").bincount().double()
        return (sizes * (sizes + 1) / 2).sum().item()
    return n * (n + 1) / 2


class Bench:
    """The launches of one case."""

    def __init__(self, case: Case, device: str) -> None:
        b, hq, hk, n, d, dv = case.shape
        new = torch.randn if device == "cuda" else torch.empty
        shapes = (b, hq, n, d), (b, hk, n, d), (b, hk, n, dv), (b, hq, n, dv)
        self.q, self.k, self.v, self.dout = (
            new(s, dtype=case.dtype, device=device) for s in shapes
        )
        score, mask = MODS[case.mods](hq, n, device)
        self.spec, self.call = prepare(self.q, self.k, self.v, score, mask, backend="triton")
        self.case, self.device = case, device
        tensors = self.call.captured.tensors[: self.spec.score_tensors]
        self.needs = tuple(t.requires_grad for t in tensors)
        self.matrices: tuple = ()

    def plan(self, kernel: str):
        given = (self.q, self.k, self.v)
        if kernel == "forward":
            return planned(self.spec, self.call, (), *given)
        wanted = captured_grads.wanted(self.spec.score, self.needs)
        return planned(self.spec, self.call, wanted, *given, self.dout)

    def kernels(self) -> list[str]:
        return ["forward", *passes(bits_of(self.q.dtype), *self.case.shape[4:])]

    def configs(self, kernel: str) -> list[Tiling]:
        """The table's first, then the case's."""
        found = [launch.LAUNCHERS[kernel](self.plan(kernel)).candidates[0]]
        for text in self.case.tiles.get(kernel, "").split(","):
            if text:
                found.append(Tiling(*map(int, text.split())))
        return list(dict.fromkeys(found))

    def launcher(self, kernel: str, how: Tiling):
        """What launches a kernel with these tiles, into the same tensors each time."""
        plan = self.plan(kernel)
        known = launch.LAUNCHERS[kernel](plan)
        known.use_tiling(how)
        plan.choose_mask_tile([how])  # the block mask suits these tiles alone
        known.choose(0)
        if kernel == "forward":
            return lambda: launch.forward(self.spec, self.call)
        if not self.matrices:
            self.matrices = self._backward_inputs(plan)
        fixed, of_rows, dk, dv, dq, captured = self.matrices
        q, k, v, dout, workspace = fixed
        copied = (k, v) if kernel == "backward_q" else (q, dout)
        fixed = q, k, v, dout, *launch.transposed(plan, *copied), workspace
        given = {
            "backward_q": (
                *fixed,
                *of_rows,
                dq,
                *captured_grads.by_gather(plan.codegen_spec, captured),
            ),
            "backward_kv": (*fixed, dk, dv),
            "backward_k": (*fixed, dk, None),
            "backward_v": (*fixed, None, dv),
        }[kernel]
        return lambda: known(self.call, lambda slots: given)

    def _backward_inputs(self, plan) -> tuple:
        b, hq, _, n, d, dv = self.case.shape
        if self.device == "cuda":
            out, lse, *_ = launch.forward(self.spec, self.call)
        else:
            out, lse = torch.empty_like(self.dout), torch.empty(b, hq, n)
        # dq's kernel, which comes first, writes them for the others.
        workspace = torch.zeros(plan.workspace.size, device=self.device)
        shared = hq != self.k.shape[1]
        dtype = F32 if shared else self.q.dtype
        new = lambda width, dtype: torch.empty(b, hq, n, width, dtype=dtype, device=self.device)
        tensors = self.call.captured.tensors
        captured = captured_grads.zeros(tensors, self.needs, torch.device(self.device))
        fixed = (self.q, self.k, self.v, self.dout, workspace)
        return (
            fixed,
            (out, lse, None),
            new(d, dtype),
            new(dv, dtype),
            new(d, self.q.dtype),
            captured,
        )

    def flops(self, kernel: str) -> float:
        b, hq, _, _, d, dv = self.case.shape
        widths = {"d": d, "v": dv}
        return 2.0 * b * hq * pairs(self.case) * sum(widths[w] for w in PRODUCTS[kernel])


FIRST: list[float] = []  # seconds of first launches, which read what was compiled


def seconds(run) -> float:
    """Of one launch: the median of samples of several in a row, after two that are not counted."""
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    FIRST.append(time.perf_counter() - start)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def sample(number: int) -> float:
        events[0].record()
        for _ in range(number):
            run()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3 / number

    once = sample(1)
    number = max(2, min(50, round(0.02 / once)))
    return median(sample(number) for _ in range(3 if once < 0.02 else 1))


def compile_one(given: tuple[str, str, Tiling]) -> str:
    """Compile a kernel of a case into Triton's cache, on tensors that are never touched."""
    name, kernel, how = given
    try:
        with compile_triton.compiling("sm_90", []):
            Bench(CASES[name], "cpu").launcher(kernel, how)()
    except NO_ROOM:
        return "no room"
    except Exception as error:  # noqa: BLE001  (a compiler's failure is a result here)
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(names: list[str]) -> dict[tuple, str]:
    """What went wrong, by case, kernel and tiles."""
    torch.set_num_threads(1)
    work = []
    for name in names:
        with compile_triton.compiling("sm_90", []):
            bench = Bench(CASES[name], "cpu")
            work += [(name, k, how) for k in bench.kernels() for how in bench.configs(k)]
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        said = dict(zip(work, pool.map(compile_one, work), strict=True))
    print(f"compiled {len(work)} in {time.perf_counter() - start:.0f} s", flush=True)
    return said


def measure(name: str, failed: dict[tuple, str]) -> None:
    bench = Bench(CASES[name], "cuda")
    best: dict[str, float] = {}
    table: dict[str, float] = {}
    for kernel in bench.kernels():
        configs, start = bench.configs(kernel), time.perf_counter()
        for n, how in enumerate(configs):
            text = f"{name:11} {kernel:11} {how.m:3} x {how.n:3} {how.warps} {how.stages} {how.edge or '':2}"
            said = failed.get((name, kernel, how), "")
            if not said and time.perf_counter() - start < SLACK:
                try:
                    taken = seconds(bench.launcher(kernel, how))
                except (*NO_ROOM, PTXASError) as error:
                    said = str(error)[:80]
                else:
                    best[kernel] = min(taken, best.get(kernel, taken))
                    if n == 0:
                        table[kernel] = taken
                    speed = bench.flops(kernel) / taken / 1e12
                    said = f"{'*' if n == 0 else ' '} {taken * 1e3:8.3f} ms  {speed:5.0f}"
            print(f"{text}  {said}", flush=True)
    forward, five = (bench.flops(kernel) / 1e12 for kernel in ("forward", "backward"))
    several = [k for k in bench.kernels() if k.startswith("backward_")]
    two = lambda t: five / sum(t.get(k, inf) for k in several)
    print(
        f"{name:11} forward {forward / table.get('forward', inf):.0f}, best "
        f"{forward / best.get('forward', inf):.0f}; "
        f"backward {two(table):.0f}, best {two(best):.0f}", flush=True,
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    names = [a for a in arguments if not a.startswith("-")] or list(CASES)
    failed = compile_all(names)
    if "--compile" in arguments:
        print(*(f"{what}: {why}" for what, why in failed.items() if why), sep="\n")
        return
    start = time.perf_counter()
    for name in names:
        measure(name, failed)
    print(f"measured in {time.perf_counter() - start:.0f} s, {sum(FIRST):.0f} of first launches")


if __name__ == "__main__":
    main(sys.argv[1:])
