"""How long block masks take to build, and how much memory: `python -m headway.bench.block_masks`.

Each mask is built by `headway.block_mask` as a user would, nothing cached, in tiles of 128; at
16,384 tokens also by PyTorch's `create_block_mask`, and compared tile by tile. Peak memory is that
of a process that builds one mask, above what it had before. Prints a table and, given the name of a
file, writes a CSV.
"""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..api import block_mask
from ..blocks import BlockMask
from ..mods import Mask, causal, document, prefix, sliding_window
from .child import peak
from .machine import here
from .timing import compare, seconds

TILE = 128
MOST_SECONDS = {1 << 17: 0.05, 1 << 20: 1.0}
MOST_BYTES = 1e9
FASTER = 500  # than create_block_mask, at the shortest length
SHORT = 1 << 14


def packed(length: int, device: str, mean: int = 2000) -> Mask:
    """Packed documents, of 1 to twice the mean's tokens."""
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * mean, (2 * length // mean + 8,), generator=draws)
    return document(torch.repeat_interleave(lengths)[:length].to(device))


MASKS: dict[str, Callable[[int, str], Mask]] = {
    "causal": lambda length, device: causal(),
    "window 4096": lambda length, device: causal() & sliding_window(4096),
    "prefix 1000": lambda length, device: causal() | prefix(1000),
    "documents": lambda length, device: packed(length, device),
    "causal documents": lambda length, device: causal() & packed(length, device),
    "window & documents | prefix": lambda length, device: (
        causal() & sliding_window(4096) & packed(length, device) | prefix(1000)
    ),
}


def rows(repeats: int = 7, device: str = "cpu") -> list[dict[str, Any]]:
    """One line per mask and length: times in ms, memory in MB, and what was asked for."""
    return [
        row(name, length, repeats, device) for length in (SHORT, *MOST_SECONDS) for name in MASKS
    ]


def row(name: str, length: int, repeats: int, device: str) -> dict[str, Any]:
    """One line of `rows`."""
    mask = MASKS[name](length, device)
    build = lambda: block_mask(mask, 1, 1, length, length, device=device, tile=(TILE, TILE))
    timing = compare({name: build}, repeats, device)[name]
    full, partial, empty = (built := build()).counts()
    line: dict[str, Any] = {
        "mask": name, "length": length, "full": full, "partial": partial, "empty": empty,
        "ms": timing.median * 1e3, "low": timing.low * 1e3, "high": timing.high * 1e3,
        "runs": timing.runs,
        "result_mb": sum(t.numel() * t.element_size() for t in built.tiles.flatten()) / 1e6,
    }  # fmt: skip
    asked = []
    if length == SHORT:
        line["torch_ms"], same = theirs(mask, built, length, device)
        line["ratio"] = line["torch_ms"] / line["ms"]
        asked += [("equal", same), (f">= {FASTER}x", line["ratio"] >= FASTER)]
    else:
        most = MOST_SECONDS[length]
        asked.append((f"<= {most * 1e3:g} ms", timing.median <= most))
        line["peak_mb"] = ask_peak(name, length, device) / 1e6
        asked.append((f"<= {MOST_BYTES / 1e6:g} MB", line["peak_mb"] * 1e6 <= MOST_BYTES))
    line["target"] = ", ".join(text for text, _ in asked)
    line["verdict"] = "pass" if all(good for _, good in asked) else "fail"
    return line


def theirs(mask: Mask, ours: BlockMask, length: int, device: str) -> tuple[float, bool]:
    """ms of PyTorch's own, once, and whether it says the same of every tile."""
    from torch.nn.attention.flex_attention import create_block_mask

    made = []
    time = seconds(
        lambda: made.append(
            create_block_mask(mask, None, None, length, length, device, BLOCK_SIZE=TILE)
        ),
        device,
    )
    state = torch.zeros(ours.grid, dtype=torch.uint8)
    for value, counts, indices in (
        (1, made[0].kv_num_blocks, made[0].kv_indices),
        (2, made[0].full_kv_num_blocks, made[0].full_kv_indices),
    ):
        assert counts is not None
        assert indices is not None
        for r, n in enumerate(counts[0, 0].tolist()):
            state[r, indices[0, 0, r, :n].long().cpu()] = value
    return time * 1e3, torch.equal(state, ours.to_dense()[0, 0].cpu())


def ask_peak(name: str, length: int, device: str) -> int:
    """Bytes at the peak of building one mask, in a fresh process with as many threads."""
    question = json.dumps([name, length, device, torch.get_num_threads()])
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--peak", question],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    return int(done.stdout)


def answer_peak(name: str, length: int, device: str, threads: int) -> int:
    """What `ask_peak` gets, in the fresh process."""
    torch.set_num_threads(threads)
    mask = MASKS[name](length, device)
    block_mask(causal(), 1, 1, 256, 256, device=device)  # what a first call loads
    before = peak(device)
    block_mask(mask, 1, 1, length, length, device=device, tile=(TILE, TILE))
    return peak(device) - before


def main(arguments: list[str]) -> int:
    """Exit status 0 if every figure was reached."""
    if arguments[:1] == ["--peak"]:
        sys.stdout.write(str(answer_peak(*json.loads(arguments[1]))))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines, machine = rows(device=device), asdict(here(device))
    for line in lines:
        figures = f"{line['ms']:9.2f} ms {line.get('peak_mb', line['result_mb']):8.1f} MB"
        ratio = f"{line['ratio']:8.0f}x" if "ratio" in line else " " * 9
        sys.stdout.write(
            f"{line['mask']:<28}{line['length']:>9,}{figures}{ratio}  {line['target']}: "
            f"{line['verdict']}\n"
        )
    if arguments:
        columns = [*machine, *dict.fromkeys(key for line in lines for key in line)]
        with open(arguments[0], "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            for line in lines:
                short = {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}
                writer.writerow(machine | short)
    return 0 if all(line["verdict"] == "pass" for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
