"""What max logits and QK-Clip cost in a training step.

Eight pre-norm layers of `headway.nn.Attention` and MLPs, causal, AdamW. Three kinds of step take
turns on one model: nothing recorded, recorded, recorded and clipped. The first is the measure; each
of the others is compared with the first of the same turn, so that slow drifts cancel.
"""

from collections.abc import Callable
from itertools import permutations
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..mods import causal
from ..nn import Attention, Rotary
from ..stability import QKClip
from .cases import Case
from .results import Result
from .timing import Timing, seconds

LAYERS = 8
STEP, RECORDING, CLIPPING = "training step", "recording", "recording + clipping"


class Model(nn.Module):
    """Of width `case.hq * case.d`; no embedding and no head, which would only dilute the cost."""

    def __init__(self, case: Case):
        super().__init__()
        width = case.hq * case.d
        self.rotary = Rotary(case.d)
        self.attentions = nn.ModuleList(
            Attention(width, case.hq, case.hk, case.d, rotary=self.rotary) for _ in range(LAYERS)
        )
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """(b, L, C) -> (b, L, C)"""
        norm = lambda x: F.rms_norm(x, (x.shape[-1],))
        angles = self.rotary.angles(torch.arange(x.shape[1], device=x.device))
        for attention, up, down in zip(self.attentions, self.ups, self.downs, strict=True):
            x = x + attention(norm(x), causal(), angles=angles)
            x = x + down(F.gelu(up(norm(x))))
        return x


def recording(case: Case, device: str, repeats: int, tick: Callable[[], object]) -> list[Result]:
    """A step's time, and by how many percent recording, and both together, make it longer."""
    steps = kinds_of_step(case, device)
    for step in steps.values():
        for _ in range(2):
            step()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    orders = list(permutations(steps))
    for n in range(2 * repeats):
        for name in orders[n % len(orders)]:
            samples[name].append(seconds(steps[name], device))
        tick()
    base = median(samples[STEP])
    results = [Result(case.name, STEP, "headway").timed(Timing.of(samples[STEP]))]
    for name in (RECORDING, CLIPPING):
        pairs = zip(samples[name], samples[STEP], strict=True)
        more = Timing.of([(longer - plain) / base for longer, plain in pairs])
        results.append(Result(case.name, name, "headway").timed(more, "%"))
    most = case.most
    if most is not None:
        results[-1] = results[-1].asked(f"<= {most:g} %", (results[-1].median or 0) <= most)
    return results


def kinds_of_step(case: Case, device: str) -> dict[str, Callable[[], None]]:
    """The three kinds of step, of one model."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    model = Model(case).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    clip = QKClip(model, tau=1.0)  # low enough to have something to do
    x = torch.randn(case.b, case.length, case.hq * case.d, device=device)

    def step(kind: str) -> None:
        for layer in clip.layers:
            layer.record.train(kind != STEP)
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
            out = model(x)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == CLIPPING:
            clip.step()

    return {kind: lambda kind=kind: step(kind) for kind in (STEP, RECORDING, CLIPPING)}
