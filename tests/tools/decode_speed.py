"""What the kernel of inference takes on this GPU with other tiles, and other shares of keys.

    python tests/tools/decode_speed.py                  every row of the table, under 100 s
    python tests/tools/decode_speed.py "1x8k" pages     some of them, by a part of the name
    python tests/tools/decode_speed.py --compile        compile only, for an H200, with no GPU

Everything is compiled first, by as many processes as there are cores. Every call is captured in a
CUDA graph; a row's graphs are replayed in turns. `out` of every variant is next to that of the first
one, and has the same bits when it is replayed. Microseconds, medians.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

import headway as hw
from headway import inference
from headway.backends.gpu.inference import plan
from headway.backends.gpu.inference.config import LaunchConfig
from headway_lab.bench.timing import captured, compare

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import compile_triton

SHORT = 256  # keys where nothing runs: a kernel has no lengths
ROUNDS = 11


class Row(NamedTuple):
    """A row of the table: sizes, a window, a page."""

    b: int
    hq: int
    hk: int
    length: int
    d: int
    dv: int = 0  # of MLA
    window: int = 0
    page: int = 0


ROWS = {
    "1x8k 32/8": Row(1, 32, 8, 8192, 128),
    "1x8k window": Row(1, 32, 8, 8192, 128, window=4096),
    "8x8k 32/8": Row(8, 32, 8, 8192, 128),
    "8x8k window": Row(8, 32, 8, 8192, 128, window=4096),
    "64x4k 32/8": Row(64, 32, 8, 4096, 128),
    "1x128k 32/8": Row(1, 32, 8, 131072, 128),
    "16x16k 64/8": Row(16, 64, 8, 16384, 128),
    "8x8k pages 16": Row(8, 32, 8, 8192, 128, page=16),
    "8x8k pages 64": Row(8, 32, 8, 8192, 128, page=64),
    "32x4k 64 wide": Row(32, 16, 16, 4096, 64),
    "64 wide, pages 16": Row(32, 16, 16, 4096, 64, page=16),
    "64 wide, pages 64": Row(32, 16, 16, 4096, 64, page=64),
    "MLA 16": Row(128, 16, 1, 4096, 576, 512),
    "MLA 128": Row(128, 128, 1, 4096, 576, 512),
}


class Variant(NamedTuple):
    keys: int = 256
    config: LaunchConfig | None = None


def variants(row: Row) -> dict[str, Variant]:
    """As it is; with other tiles, or more keys of a CTA."""
    found = {"as it is": Variant()}
    if row.b <= 8:
        found |= {f"keys {n}": Variant(keys=n) for n in (128, 512, 1024)}
    tiles: dict[int, tuple[tuple[int, int, int, int], ...]] = {
        64: ((64, 4, 3, 4), (64, 4, 4, 3), (64, 4, 6, 2)),
        128: ((64, 4, 4, 2), (32, 4, 5, 2), (64, 4, 6, 1)),
        576: ((32, 4, 3, 2), (64, 4, 3, 1), (32, 8, 4, 1)),
    }
    if row.page:  # numbers of pages take room for twice the stages
        tiles[64] = (64, 4, 3, 2), (64, 4, 4, 2), (64, 4, 6, 2), (128, 4, 2, 2)
        tiles[128] = (64, 4, 2, 2), (32, 4, 3, 2), (32, 4, 4, 2)
    if row.hq == 128:
        tiles[576] = ((32, 8, 3, 1), (32, 8, 4, 1))
    for sizes in tiles[row.d]:
        found[" ".join(map(str, sizes))] = Variant(config=LaunchConfig(*sizes))
    return found


class Calls:
    """The calls of a row, by variant. Plans are kept: graphs need their kernels."""

    def __init__(self, row: Row, device: str) -> None:
        self.row, self.kept = row, {}
        compiled = device == "cpu"
        new = torch.empty if compiled else torch.randn
        b, length = (2, SHORT) if compiled else (row.b, row.length)
        make = lambda *shape: new(shape, device=device, dtype=torch.bfloat16)
        self.q = make(b, row.hq, 1, row.d)
        self.k = make(b, row.hk, length, row.d)
        self.v = self.k[..., : row.dv] if row.dv else make(b, row.hk, length, row.d)
        n = torch.full((b,), length, dtype=torch.int32, device=device)
        self.given: dict[str, Any] = {"lengths": n, "backend": "triton"}
        if row.window:
            self.given["mask"] = hw.causal() & hw.sliding_window(row.window)
        self.cache = self.k, self.v
        if row.page:
            pages = b * length // row.page
            order = torch.randperm(pages, device=device)
            self.given["page_table"] = order.argsort().view(b, -1).int()
            self.cache = tuple(
                x.view(b, row.hk, -1, row.page, row.d).transpose(1, 2).flatten(0, 1)[order]
                for x in (self.k, self.v)
            )

    def call(self, variant: Variant) -> torch.Tensor:
        configs = plan.launch_configs
        if variant.config is not None:
            configs = lambda *given: (variant.config,)
        with ExitStack() as stack:
            for name, by in (
                ("MIN_KEYS", variant.keys), ("launch_configs", configs),
                ("cached", partial(self.cached, variant)),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(plan, name, by))
            return inference.attention(self.q, *self.cache, **self.given)

    def cached(self, variant: Variant, key: tuple, make: Callable[[], plan.Plan]) -> plan.Plan:
        if (variant, key) not in self.kept:
            self.kept[variant, key] = make()
        return self.kept[variant, key]

    def sdpa(self) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, enable_gqa=self.row.hq != self.row.hk
        )


def compile_one(given: tuple[str, str]) -> str:
    """Compile a variant into Triton's cache: what went wrong, if anything did."""
    row = ROWS[given[0]]
    kernels: list[Any] = []
    try:
        with compile_triton.compiling("sm_90", kernels):
            Calls(row, "cpu").call(variants(row)[given[1]])
    except Exception as error:  # noqa: BLE001  (a compiler's failure is a result here)
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def compile_all(names: list[str]) -> dict[tuple[str, str], str]:
    """What went wrong, by row and variant. Rows that differ in lengths have the same kernels."""
    of_kind: dict[tuple, tuple[str, str]] = {}
    kinds = {}
    for name in names:
        for what, variant in variants(ROWS[name]).items():
            row = ROWS[name]
            kind = (*row._replace(b=0, length=0, window=bool(row.window)), variant)
            of_kind.setdefault(kind, (name, what))
            kinds[name, what] = kind
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        said = dict(zip(of_kind, pool.map(compile_one, of_kind.values()), strict=True))
    print(f"compiled {len(said)} in {time.perf_counter() - start:.0f} s", flush=True)
    return {which: said[kind] for which, kind in kinds.items()}


@torch.inference_mode()
def measure(name: str, failed: dict[tuple[str, str], str]) -> None:
    calls = Calls(ROWS[name], "cuda")
    graphs, first = {}, None
    for what, variant in variants(calls.row).items():
        note = failed.get((name, what), "")
        try:
            if note:
                raise RuntimeError(note)
            graph, out = captured(partial(calls.call, variant))
        except Exception as error:  # noqa: BLE001  (a result)
            print(f"{name:18} {what:12} {str(error)[:100]}", flush=True)
            continue
        graph.replay()
        found = out.clone()
        graph.replay()
        first = found if first is None else first
        error = (found.float() - first.float()).abs().max().item()
        if not error <= 0.01 or not torch.equal(found, out):
            print(f"{name:18} {what:12} WRONG: off by {error:.1e}, or other bits", flush=True)
        graphs[what] = graph
    if not (calls.row.dv or calls.row.window):
        graphs["sdpa"] = captured(calls.sdpa)[0]
    times = compare({what: g.replay for what, g in graphs.items()}, ROUNDS, "cuda")
    base = times["as it is"].median if "as it is" in times else float("nan")
    for what, t in times.items():
        spread = f"{t.low * 1e6:8.1f} .. {t.high * 1e6:.1f}"
        print(f"{name:18} {what:12} {t.median * 1e6:8.1f} us  {base / t.median:5.2f}x {spread}")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    some = [a for a in arguments if not a.startswith("-")]
    names = [name for name in ROWS if not some or any(a in name for a in some)]
    failed = compile_all(names)
    if "--compile" in arguments:
        print(*(f"{what}: {why}" for what, why in failed.items() if why), sep="\n")
        return
    start = time.perf_counter()
    for name in names:
        measure(name, failed)
        torch.cuda.empty_cache()
    print(f"measured in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
