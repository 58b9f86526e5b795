"""The plan that "auto" takes on cards: next to the times that are committed in bench/results."""

import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from headway.distributed import Layout
from headway.distributed.exchange.comm_plan import SequenceShards
from headway.distributed.exchange.cost import costs
from headway.distributed.exchange.nodes import LocalNode, NodeGroups, local_node
from headway.distributed.exchange.plan_inputs import PlanInputs, plan_inputs
from headway.distributed.exchange.plans import plan_name
from headway.resolve import prepare
from headway_lab.bench.cases import RANK_CASES

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CASES = {case.name: case for case in RANK_CASES}
CARDS = {"two": 2, "four": 4}
# Rows of steps that are not what they were: documents ran in steps of 1, 6 and 1 heads, until these
# knew the longest work tile. The H200s' rows of the same case are of steps since.
OTHER_STEPS = ("h100", 4, "ranks-documents-64-8-32k")

Run = tuple[str, int, str]  # kind of card, how many, and the case


def measured() -> Iterator[tuple[Run, dict[str, dict[str, float]]]]:
    """The newest milliseconds of every case by direction and plan, where several were timed."""
    newest: dict[Run, str] = {}
    found: dict[Run, dict[str, dict[str, float]]] = {}
    for path in sorted(RESULTS.glob("*/ranks-*.csv")):
        ranks = next(n for word, n in CARDS.items() if f"-{word}-" in path.name)
        with path.open() as file:
            rows = [row for row in csv.DictReader(file) if row["unit"] == "ms" and row["median"]]
        for name in sorted({row["case"] for row in rows}):
            run = path.parent.name, ranks, name
            here = [row for row in rows if row["case"] == name]
            if newest.get(run, "") > here[0]["date"]:
                continue
            newest[run] = here[0]["date"]
            times: dict[str, dict[str, float]] = defaultdict(dict)
            for row in here:
                who = row["contestant"]
                if who == "headway":  # "auto"; the note names the plan that it was
                    who = "headway, " + row["note"].partition("plan: ")[2].partition(",")[0]
                if who.startswith("headway, "):
                    plan = times[row["direction"]]
                    name_ = who.removeprefix("headway, ")
                    plan[name_] = min(float(row["median"]), plan.get(name_, float("inf")))
            found[run] = times
    for run, times in found.items():
        if all(len(of) > 1 for of in times.values()) and run != OTHER_STEPS:
            yield run, times


@lru_cache
def on_cards(name: str, ranks: int) -> PlanInputs:
    """The setting of a case of the bench on so many cards, none of which is here."""
    case, zero = CASES[name], torch.zeros((), dtype=torch.bfloat16)
    mask = case.mask()
    local = "documents" in name or "window" in name
    layout = (
        Layout.balanced(case.length, (0, ranks), mask)
        if local
        else Layout.zigzag(case.length, (0, ranks))
    )
    heads = case.hq, case.hk, case.hk
    return set_on_cards(layout, mask, *(zero.expand(1, h, case.length, case.d) for h in heads))[0]


def set_on_cards(layout: Layout, mask, q, k, v) -> tuple[PlanInputs, LocalNode | None]:
    spec, call = prepare(q, k, v, mask=mask)
    pieces = SequenceShards(layout.table, layout.ranks)
    cards = lambda s: replace(s, device=torch.device("cuda"))
    inputs = plan_inputs(spec, call, pieces, pieces, None, 0, False)
    if not layout.node:
        return cards(inputs), None
    node = local_node(spec, call, inputs, NodeGroups(layout.node, None, None), False)
    return cards(inputs), node._replace(inputs=cards(node.inputs))


MEASURED = dict(measured())


@pytest.mark.parametrize("run", MEASURED, ids=lambda run: "-".join(map(str, run)))
def test_the_plan_is_the_best_that_was_timed(run):
    """Within 5 %, forward and backward together, since a call has one plan for both."""
    _, ranks, name = run
    chosen = plan_name("auto", on_cards(name, ranks), None)
    both = defaultdict(float)
    for of in MEASURED[run].values():
        for plan, ms in of.items():
            both[plan] += ms
    assert both[chosen] <= 1.05 * min(both.values()), (chosen, dict(both))


@pytest.mark.parametrize("name", ["ranks-causal-32-32-16k", "ranks-causal-64-64-16k"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_as_many_key_heads(name, ranks):
    """The plan of heads runs in a few steps, not in one for every key/value head."""
    assert plan_name("auto", on_cards(name, ranks), None) in ("heads", "gather")


def test_chunks_are_asked(monkeypatch):
    """What the model says of a plan is what it says of the chunks that the plan runs in."""
    from headway.distributed.exchange import cost

    s = on_cards("ranks-causal-32-32-16k", 2)
    usual = costs(s, None)["heads"].seconds
    monkeypatch.setattr(cost, "chunk_heads", lambda s, back, link: [1] * s.sizes.hk)
    assert costs(s, None)["heads"].seconds > 1.5 * usual
