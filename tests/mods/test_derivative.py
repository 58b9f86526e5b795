"""A score and its derivative are computed of the same T: P = exp(T - lse) is that of the forward."""

import random

import pytest
import torch

import headway as hw
from fuzz.functions import score as random_score
from headway.mods.evaluation.derivative import joint
from headway.mods.evaluation.evaluate import evaluate
from headway.mods.graph import parse
from headway.resolve import prepare

LENGTH, HEADS = 37, 3
SIZES = {"b": 1, "h": HEADS, "p": LENGTH, "q": LENGTH, "k": LENGTH, "r": 13}


@pytest.mark.parametrize("seed", range(60))
def test_the_score_of_a_derivative_is_the_score_bit_by_bit(seed):
    """Numbers of half precision among them, which it computes in float32 and rounds."""
    fn = random_score(random.Random(seed), "bfloat16", [-1e9])
    draw = torch.Generator().manual_seed(seed)
    tables = {
        t.name: torch.randn([SIZES[a] for a in t.axes], generator=draw)
        .mul(2)
        .to(getattr(torch, t.dtype))
        for t in fn.tables
    }
    *steps, last = fn.text.split("\n")
    body = "".join(f"    s = {step}\n" for step in steps) + f"    return {last}\n"
    space = {"torch": torch, "LOW": fn.low, **tables}
    exec(f"def score(s, b, h, i, j):\n{body}", space)

    q = torch.zeros(1, HEADS, LENGTH, 8)
    spec, call = prepare(
        q, q, q, eval(fn.library, {"hw": hw, **tables}) if fn.library else space["score"]
    )
    s = torch.randn(1, HEADS, LENGTH, LENGTH, generator=draw) * 3
    values = {
        "score": s, "b": torch.zeros(1, 1, 1, 1, dtype=torch.long), "h": torch.arange(HEADS)[:, None, None],
        "q_idx": torch.arange(LENGTH)[:, None], "kv_idx": torch.arange(LENGTH),
    } | {f"t{n}": t.detach() for n, t in enumerate(call.captured.tensors)}  # fmt: skip
    numbers = {f"n{n}": x for n, x in enumerate((*call.captured.ints, *call.captured.floats))}

    def gather(n, table, indices):
        inside = (
            x.clamp(0, size - 1) if isinstance(x, torch.Tensor) else min(max(x, 0), size - 1)
            for x, size in zip(indices, table.shape, strict=True)
        )
        return table[tuple(inside)]

    graph = parse(spec.score)
    (t,) = evaluate(graph, values | numbers, gather)
    again, *_ = evaluate(joint(spec.score), values | numbers, gather)
    assert torch.equal(torch.as_tensor(t).expand_as(s), torch.as_tensor(again).expand_as(s))
