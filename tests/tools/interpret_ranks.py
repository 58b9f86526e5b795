"""Sums over ranks, and copies of rows, in Triton's interpreter, next to PyTorch's: the last line
printed is {case: what is wrong}."""

import json
import random
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from headway.backends.gpu.rank_copies import copy_rows
from headway.backends.gpu.rank_sums import write_sums
from headway.distributed.exchange.comm_plan import PendingReduce, RowCopies, RowRange, empty_message
from tools.interpreter import quicker

DTYPES = torch.float32, torch.float64, torch.float16  # NumPy has no bfloat16


def row_ranges(ranks: list[int], here: int, there: int) -> list[RowRange]:
    """Return ranges of the rows `here`, none twice for a rank, at random places of `there`."""
    found = []
    for rank in ranks:
        cuts = sorted(random.sample(range(here + 1), 2 * random.randint(0, 1 + (here > 3))))
        for first, stop in zip(cuts[::2], cuts[1::2], strict=True):
            found.append(RowRange(rank, first, random.randint(0, there), stop - first))
    return found


def wrong_sums(seed: int) -> str:
    """What is wrong with the sums of random row ranges."""
    random.seed(seed)
    torch.manual_seed(seed)
    b, h, held, dtype = 2, 3, random.choice([1, 37, 80]), random.choice(DTYPES)
    widths = random.choice([(8, 8), (8, 12), (5, 16)])
    own = row_ranges([0], held, 20)
    rows = max([s.reader_start + s.size for s in own], default=3)
    comm = SimpleNamespace(launch_cache={}, local=own, outgoing=row_ranges([1, 2, 3], held, 20))
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    parts = tuple([torch.randn(b, h, rows, w, dtype=acc) for w in widths])
    came = empty_message(comm.outgoing, parts).normal_()
    fresh = lambda w: torch.full((b, h + 2, held + 1, w), float("nan"), dtype=dtype)
    mine, right = ([fresh(w) for w in widths] for _ in range(2))
    inside = lambda of: tuple([x[:, 1:-1, :held] for x in of])
    write_sums(comm, parts, came, inside(mine))
    PendingReduce(comm, parts, lambda: None, came).write(inside(right))
    same = all(
        torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(mine, right, strict=True)
    )
    return "" if same else f"{dtype} {widths} {comm.local} {comm.outgoing}"


def wrong_copies(seed: int) -> str:
    """What is wrong with copies of random rows, of tensors that are views of larger ones."""
    random.seed(seed)
    torch.manual_seed(seed)
    b, h, tokens, dtype = 2, 3, random.choice([1, 64, 200]), random.choice(DTYPES)
    widths = random.choice([(8, 8), (8, 12), (5, 16), (4,)])
    spans, there = [], random.randint(0, 3)
    for s in row_ranges([0, 1], tokens, 0):
        spans.append((s.holder_start, there, s.size))
        there += s.size + random.randint(0, 2)
    around = lambda n, w: torch.randn(b, n + 1, h + 2, w, dtype=dtype).transpose(1, 2)
    inside = lambda of, n: tuple([x[:, 1:-1, :n] for x in of])
    parts = inside([around(tokens, w) for w in widths], tokens)
    mine, right = ([torch.full_like(around(there, w), 7.0) for w in widths] for _ in range(2))
    known = {}
    for _ in range(2):
        if not copy_rows(spans, known, parts, inside(mine, there)):
            return "refused"
    RowCopies(spans).run(parts, inside(right, there))
    same = all(torch.equal(x, y) for x, y in zip(mine, right, strict=True))
    columns = [x[..., ::2] for x in mine]
    wide = [torch.zeros(1, 1, 4, 600)]
    for what in (columns, wide, [x.long() for x in mine]):
        if copy_rows(spans, {}, what, what):
            return "took what is not for it"
    return "" if same else f"{dtype} {widths} {spans}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    with quicker():
        for wrong in (wrong_sums, wrong_copies):
            for seed in range(20):
                said = wrong(seed)
                if said:
                    found[f"{wrong.__name__} {seed}"] = said
    print(json.dumps(found))
