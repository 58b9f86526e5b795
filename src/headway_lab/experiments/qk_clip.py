"""Logits that grow until training breaks, and QK-Clip (Kimi K2, arXiv 2507.20534, section 2.1).

High learning rates, no weight decay, no QK-norm: what makes logits explode in small models
(Wortsman et al. 2023, arXiv 2309.14322).
"""

from collections.abc import Callable
from typing import Any

import torch

from headway.optim import MuonClip
from headway.optim.muonclip import parameter_groups
from headway.stability import QKClip

from .report import Check, Experiment
from .train import Model, TrainingCurves, gqa, mla, train

TAU = 30.0
# Learning rates: of the matrices under Muon and AdamW, high enough to explode within 200 steps; of
# everything else.
MUON, ADAMW, REST = 0.05, 0.012, 1e-3
Optimizer = Callable[[Model], torch.optim.Optimizer]


def muon(lr: float, tau: float | None) -> Optimizer:
    """Return MuonClip, with AdamW's parameters at their own, ordinary learning rate."""

    def make(model: Model) -> torch.optim.Optimizer:
        optimizer = MuonClip(model, lr, weight_decay=0.0, tau=tau)
        for group in optimizer.param_groups[1:]:
            group["lr"] = REST
        return optimizer

    return make


def adamw(lr: float, tau: float | None) -> Optimizer:
    """Return AdamW for the same matrices, and the clip after it."""

    def make(model: Model) -> torch.optim.Optimizer:
        matrices, *rest = parameter_groups(model)
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "lr": lr}, {"params": [*rest[0], *rest[1]]}],
            lr=REST, betas=(0.9, 0.95), weight_decay=0.0,
        )  # fmt: skip
        if tau is not None:
            clip = QKClip(model, tau)

            def after(*_: object) -> None:
                clip.step()

            optimizer.register_step_post_hook(after)
        return optimizer

    return make


def run(steps: int = 200, log: Callable[[str], None] = lambda text: None) -> Experiment:
    """Train MHA and MLA, Muon and AdamW, with and without clip; QK-norm; and a quiet run."""

    def one(name: str, optimizer: Optimizer, module: Any = gqa, **options: Any) -> TrainingCurves:
        log(name)
        if module is gqa:
            options["heads"] = 4
        return train(lambda: Model(module, **options), optimizer, steps, warmup=20)

    with_clip, without = f"QK-Clip, tau {TAU:g}", "no clip"
    exploding = {
        "MHA, Muon": {
            without: one("MHA, Muon", muon(MUON, None)),
            with_clip: one("MHA, Muon, QK-Clip", muon(MUON, TAU)),
            "QK-norm": one("MHA, Muon, QK-norm", muon(MUON, None), qk_norm=True),
        },
        "MLA, Muon": {
            without: one("MLA, Muon", muon(MUON, None), mla),
            with_clip: one("MLA, Muon, QK-Clip", muon(MUON, TAU), mla),
        },
        "MHA, AdamW": {
            without: one("MHA, AdamW", adamw(ADAMW, None)),
            with_clip: one("MHA, AdamW, QK-Clip", adamw(ADAMW, TAU)),
        },
    }
    quiet = one("MHA, Muon at a low learning rate", muon(0.002, None))
    idle = one("the same with tau above its logits", muon(0.002, 1e4))
    rows, checks = [], []
    for name, runs in exploding.items():
        rows += [_row(f"{name}, {label}", r) for label, r in runs.items()]
        free, clipped = runs[without], runs[with_clip]
        checks += [
            Check(f"{name}: without the clip, logits pass 10 tau", free.peak > 10 * TAU),
            Check(f"{name}: with it, they stay below 2 tau", clipped.peak < 2 * TAU),
            Check(f"{name}: the loss is no worse", clipped.loss <= free.loss),
        ]
    rows += [_row("MHA, Muon 0.002, no clip", quiet), _row("MHA, Muon 0.002, tau 10000", idle)]
    checks.append(
        Check(
            "tau above the natural maximum: the same losses and logits, to the last bit",
            quiet == idle,
        )
    )
    return Experiment(
        "QK-Clip", ("run", "loss", "peak max logit", "last max logit"), rows, exploding, checks,
        _reading(exploding["MHA, Muon"], exploding["MHA, AdamW"], quiet, checks),
        (f"tau {TAU:g}", TAU),
    )  # fmt: skip


def _reading(
    muon: dict[str, TrainingCurves],
    adamw: dict[str, TrainingCurves],
    quiet: TrainingCurves,
    checks: list[Check],
) -> str:
    """Describe what the runs show; of a claim that failed, only that it failed."""
    free, clipped, normed = muon.values()
    failed = sum(not check.passed for check in checks)
    if failed:
        text = (
            f"The claim does not hold in these runs: {failed} of {len(checks)} checks fail. They "
            "are made for the default number of steps; in fewer, logits may not explode yet. "
        )
    else:
        text = "The clip holds the logits to within a step's growth, and the loss is no worse. "
    if next(iter(adamw.values())).peak > 10 * TAU:
        text += (
            "But at this scale AdamW explodes as well: 'Muon explodes where Adam does not' is not "
            "shown. "
        )
    return text + (
        f"In MHA under Muon no clip ends at a loss of {free.loss:.2f}, the clip at "
        f"{clipped.loss:.2f}, and QK-norm, the alternative, at {normed.loss:.2f}; a low learning "
        f"rate, with no logit above {quiet.peak:.0f}, at {quiet.loss:.2f}."
    )


def _row(name: str, run: TrainingCurves) -> tuple[str, ...]:
    return name, f"{run.loss:.4f}", f"{run.peak:.0f}", f"{run.max_logits[-1]:.0f}"
