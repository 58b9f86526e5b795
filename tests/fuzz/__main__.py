"""Random calls against dense float64, in several processes: forward, backward, every gradient.

A case is a seed: masks and scores as expression trees over positions and captured tables, GQA, ragged
lengths and widths, layouts, sinks, statistics and their gradient, dropout, block masks with odd
tiles, shards. Tolerances are those of the tests (`checks.yardstick`). A seed that fails is run alone, and
made smaller, by `--seed N` with the same --backend and --structures.
"""

import argparse
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path

import torch

from .calls import fuzz
from .workers import Asked, Tally, many, result, smaller

STRUCTURES = {"cpu": 0, "reference": 0, "triton": 40, "hopper": 40}


def summary(asked: Asked, tally: Tally, seconds: float) -> str:
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    if asked.device == "cuda":
        import triton

        machine = f"{torch.cuda.get_device_name()}, {machine}"
        versions += f", Triton {triton.__version__}"
    of = f" of {asked.structures} structures" if asked.structures else ""
    lines = [
        f"fuzz, backend {asked.backend}, {date.today()}: {machine}; {versions}",
        f"{tally.ran} cases{of} from seed {asked.first} on, {tally.refused} refused, "
        f"{len(tally.failed)} failures, {seconds:.0f} s in {asked.workers} processes",
        "largest error in tolerances, and its seed:",
    ]
    lines += [
        f"  {name:14} {share:.3f}  {seed}" for name, (share, seed) in sorted(tally.worst.items())
    ]
    for made in sorted(tally.failed)[:50]:
        wrong = {n: f"{r:.3g}" for n, r in made.ratios.items() if not r <= 1}
        lines.append(
            f"failed: seed {made.seed}: {made.error.splitlines()[0] if made.error else wrong}"
        )
    return "\n".join(lines) + "\n"


def alone(seed: int, asked: Asked) -> bool:
    f = fuzz(seed, asked.backend, asked.structures)
    made = result(f, asked.backend, asked.device)
    print(f, *(f"{n:14} {r:.4g}" for n, r in made.ratios.items()), made.error, sep="\n")
    if made.fails:
        f = smaller(f, asked.backend, asked.device)
        made = result(f, asked.backend, asked.device)
        wrong = {n: r for n, r in made.ratios.items() if not r <= 1}
        print("\nwhat is left of it that fails:", f, made.error or wrong, sep="\n")
    return not made.fails


def main() -> int:
    parse = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parse.add_argument
    add("--cases", type=int, default=2000, help="how many per backend, refused ones aside (2000)")
    add("--backend", choices=[*STRUCTURES], default=["cpu"], nargs="+", help="one or several (cpu)")
    add("--first", type=int, default=0, help="the first seed (0)")
    add("--seed", type=int, help="this seed alone: shown, and made smaller if it fails")
    add("--structures", type=int, help="different functions, widths and dtypes; 0 is new ones for "
        "every seed (0 on a CPU, 40 on a card, where kernels compile)")  # fmt: skip
    add("--workers", type=int, help="processes (the cores, less two on a large machine)")
    add("--seconds", type=float, default=float("inf"), help="stop after so long, per backend")
    add("--out", type=Path, help="also write the summary to this file")
    given = parse.parse_args()
    cores = os.cpu_count() or 1
    texts, fine = [], True
    for backend in given.backend:
        asked = Asked(
            backend, "cuda" if backend in ("triton", "hopper") else "cpu",
            STRUCTURES[backend] if given.structures is None else given.structures,
            given.first, given.workers or (cores if cores < 8 else cores - 2),
        )  # fmt: skip
        if given.seed is not None:
            fine &= alone(given.seed, asked)
            continue
        begun = time.monotonic()
        tally = many(asked, given.cases, given.seconds)
        fine &= not tally.failed and tally.ran > 0
        texts.append(summary(asked, tally, time.monotonic() - begun))
        print(texts[-1], flush=True)
        if given.out is not None:
            given.out.write_text("\n".join(texts))
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
