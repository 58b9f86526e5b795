"""Where 1/sqrt(d) lives: in the logits, or in the initial query weights?

Let W' = W/sqrt(d) be the query weights that hold the scale. Then the loss is the same and the
gradient is g' = sqrt(d) g. An optimizer whose step is proportional to the weights (Adafactor with
parameter scaling, arXiv 1804.04235) keeps W' = W/sqrt(d) for ever; with d = 64 every rounding
is the same as well. Adam's step knows nothing of the weights: relative to W' it is sqrt(d) times
larger, so that "init" means sqrt(d) times the learning rate for the queries.
"""

from collections.abc import Callable
from typing import Any

import torch

from .report import Check, Experiment
from .train import Model, TrainingCurves, gqa, started_as, train

ROOT = 8.0  # sqrt(head width 64)
Optimizer = Callable[[Model], torch.optim.Optimizer]


def adafactor(floor: float = 1e-3) -> Optimizer:
    """Return Adafactor with parameter scaling; `floor` bounds the weights' RMS. PyTorch squares the
    first epsilon: 1e-30 would give 0/0 for embeddings that got no gradient."""
    return lambda model: torch.optim.Adafactor(
        model.parameters(), lr=1e-2, eps=(1e-16, floor), weight_decay=0.0
    )


def adamw(query: float = 1.0) -> Optimizer:
    """Return AdamW, with the queries at `query` times the learning rate, epsilon, decay divided."""

    def make(model: Model) -> torch.optim.Optimizer:
        queries = [a.q_proj.weight for a in model.attentions]  # type: ignore[union-attr]
        query_set = set(queries)
        rest = [p for p in model.parameters() if p not in query_set]
        lr, eps, decay = 1e-3, 1e-8, 0.1
        return torch.optim.AdamW(
            [
                {"params": rest},
                {
                    "params": queries,
                    "lr": lr * query,
                    "eps": eps / query,
                    "weight_decay": decay / query,
                },
            ],
            lr=lr, eps=eps, weight_decay=decay,
        )  # fmt: skip

    return make


def run(steps: int = 120, log: Callable[[str], None] = lambda text: None) -> Experiment:
    """Compare the two seven times, from the same weights on the same batches."""

    def pair(
        name: str, optimizer: Optimizer, fused: bool = False, **options: Any
    ) -> tuple[TrainingCurves, TrainingCurves]:
        make = lambda: Model(gqa, heads=2, fused=fused)
        log(name)
        logits, init = (
            train(started_as(make, scaling), optimizer, steps, **options)
            for scaling in ("logits", "init")
        )
        return logits, init

    pairs: dict[str, tuple[TrainingCurves, TrainingCurves]] = {
        "Adafactor": pair("Adafactor", adafactor()),
        "Adafactor, fused QKV": pair("Adafactor, fused QKV", adafactor(), fused=True),
        "Adafactor, global clipping": pair(
            "Adafactor, global clipping", adafactor(), clip_norm=0.25
        ),
        "Adafactor, epsilon floor": pair("Adafactor, epsilon floor", adafactor(0.1)),
        "AdamW": pair("AdamW", adamw()),
    }
    log("AdamW, queries at 8 lr, eps/8, wd/8")
    faster = train(lambda: Model(gqa, heads=2), adamw(ROOT), steps)
    pairs["AdamW, queries × 8"] = faster, pairs["AdamW"][1]
    rows, checks = _compare(pairs)
    panels = {
        name: {"logits": a, "init": b}
        for name, (a, b) in pairs.items()
        if name in ("Adafactor", "Adafactor, fused QKV", "AdamW")
    }
    panels["AdamW"]["logits, queries × 8"] = faster
    return Experiment(
        "Where 1/sqrt(d) lives",
        ("optimizer", "loss: logits", "init", "max logit: logits", "init", "|Δ loss|"),
        rows,
        panels,
        checks,
        "Folding the scale into the initial query weights is the same as scaling logits under "
        "Adafactor with parameter scaling, to the last bit, until something sees the size of the "
        "query's weights or gradients next to others'. Under Adam it is sqrt(d) times the learning "
        "rate for the queries, no more and no less: with theirs, and epsilon and decay divided by "
        "it (the row of × 8), the two are bit-equal. Which of the two learns better is not shown: "
        "one small model, one seed.",
    )


def _compare(pairs: dict[str, tuple[TrainingCurves, TrainingCurves]]) -> tuple[list, list[Check]]:
    """Return a row and a check for every pair of runs."""
    expected = {
        "Adafactor": "equal",
        "AdamW, queries × 8": "equal",
        "Adafactor, global clipping": "differ by 1e-3",
    }
    checks, rows = [], []
    for name, (logits, init) in pairs.items():
        distance = logits.distance(init)
        claim = expected.get(name, "differ by 1e-2")
        passed = distance == 0 if claim == "equal" else distance > float(claim.split()[-1])
        checks.append(
            Check(f"{name}: the two {'are bit-equal' if claim == 'equal' else claim}", passed)
        )
        rows.append(
            (
                name, f"{logits.loss:.4f}", f"{init.loss:.4f}",
                f"{logits.peak:.1f}", f"{init.peak:.1f}",
                "bit-equal" if distance == 0 else f"{distance:.1e}",
            )
        )  # fmt: skip
    return rows, checks
