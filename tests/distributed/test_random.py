"""Random calls over ranks: masks and scores of the fuzzer, random layouts and plans."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from cases import Problem
from fuzz.calls import Fuzz, fuzz, known, problem_of
from fuzz.functions import MILD
from processes import run_ranks

from .test_exact import NAMES, PLANS, layout_of, one_case

CALLS = 25  # of every number of ranks; for a longer search, more


def call_of(seed: int) -> Fuzz:
    """In float64, and without rows whose every score is a large minimum: these lose log n in a
    merge."""
    f = replace(fuzz(seed, "cpu"), dtype=torch.float64, coords=None, places=False)
    return f if f.score is None else replace(f, score=replace(f.score, low=MILD))


def inputs(f: Fuzz) -> Problem:
    """Learned tables are of float64 too: each rank's share of a gradient is rounded."""
    made = problem_of(f)
    wide = {
        name: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in made.captured.items()
    }
    return replace(made, captured=wide)


def calls(seeds: range, world: int, rank: int) -> None:
    """The calls of some seeds, next to one process."""
    for seed in seeds:
        draw, f = random.Random(f"over ranks {seed}"), call_of(seed)
        plan, (name, other) = draw.choice((*PLANS, "local")), draw.choices(NAMES, k=2)
        c = f.case
        q = layout_of(name, c.q_len, world, seed)
        same = c.q_len == c.kv_len and draw.random() < 0.7
        kv = q if same else layout_of(other, c.kv_len, world, seed + 1)
        layouts = (q, None) if plan == "local" else (q.using(plan), kv)
        with known(f):
            try:
                one_case(c, torch.float64, layouts, lambda *_, f=f: inputs(f))
            except Exception as error:
                what = f"{name}, {other}, {plan}, {world} ranks: {f}"
                raise AssertionError(what) from error


@pytest.mark.parametrize("world", [2, 3])
def test_random_calls(world, tmp_path):
    seeds = range(10_000 * world, 10_000 * world + CALLS)
    run_ranks(world, (partial(calls, seeds),), tmp_path)
