"""What max logits and QK-Clip cost in a training step.

Eight pre-norm layers of `headway.nn.Attention` and MLPs, causal, AdamW. They cost a hundredth of a
step, and a processor's steps differ by more than that. So what they change is timed by itself,
inside of whole steps: the forward and the backward of every attention, and the clip (which takes
the same time whatever is above tau; on a GPU it is queued behind the step, as in training). In one
step every second attention records, in the next the others do: what is compared lies a tenth of a
second apart, and each layer is once on either side.
"""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.mods import causal
from headway.nn import Attention, Rotary
from headway.stability import QKClip

from .case import Case
from .results import Result
from .timing import Mark, Timing, between, mark

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
    """The time of a step with nothing recorded, and by how many percent recording in all layers,
    and both together, make it longer."""
    steps = Steps(case, device)
    for n in range(2):
        steps.step(n, clip=n == 1)
    plain, added, clipping = [], [], []
    for _ in range(2 * repeats):
        even, odd = steps.step(0), steps.step(1, clip=True)
        with_it = sum(even.attentions[0::2]) + sum(odd.attentions[1::2])
        without = sum(even.attentions[1::2]) + sum(odd.attentions[0::2])
        added.append(with_it - without)
        plain.append((even.whole + odd.whole - added[-1]) / 2)
        clipping.append(odd.clip)
        tick()
    base = median(plain)
    results = [Result(case.name, STEP, "headway").timed(Timing.of(plain))]
    both = [a + b for a, b in zip(added, clipping, strict=True)]
    for name, samples in ((RECORDING, added), (CLIPPING, both)):
        share = Timing.of([more / base for more in samples])
        results.append(Result(case.name, name, "headway").timed(share, "%"))
    most = case.most
    if most is not None:
        results[-1] = results[-1].asked(f"<= {most:g} %", (results[-1].median or 0) <= most)
    return results


class Times(NamedTuple):
    """Seconds of one step."""

    whole: float  # without the clip
    attentions: list[float]  # of each layer's: forward and backward
    clip: float


class Steps:
    """Training steps of one model, of which every second attention records."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, case.dtype)
        self.device = device
        self.autocast = torch.device(device).type, dtype, dtype != torch.float32
        self.model = Model(case).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        self.clip = QKClip(self.model, tau=1.0)
        # Like an embedding's output it wants a gradient: then all layers do the same work.
        self.x = torch.randn(
            case.b, case.length, case.hq * case.d, device=device, requires_grad=True
        )
        self.marks: dict[nn.Module, list[Mark]] = {}
        for attention in self.model.attentions:
            attention.register_forward_pre_hook(self._mark)
            attention.register_forward_hook(self._mark)
            attention.register_full_backward_pre_hook(self._mark)
            attention.register_full_backward_hook(self._mark)

    def _mark(self, attention: nn.Module, *_: object) -> None:
        self.marks.setdefault(attention, []).append(mark(self.device))

    def step(self, first: int, *, clip: bool = False) -> Times:
        """One step, in which the attentions `first`, `first + 2`, ... record; and a clip."""
        for n, layer in enumerate(self.clip.layers):
            layer.record.train(n % 2 == first)
        self.marks.clear()
        start = mark(self.device)
        device, dtype, enabled = self.autocast
        with torch.autocast(device, dtype, enabled=enabled):
            out = self.model(self.x)
        out.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None
        end = mark(self.device)
        if clip:
            self.clip.step()
        clipped = mark(self.device)
        parts = [self.marks[attention] for attention in self.model.attentions]
        return Times(
            between(start, end), [between(a, b) + between(c, d) for a, b, c, d in parts],
            between(end, clipped),
        )  # fmt: skip
