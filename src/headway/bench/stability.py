"""What max logits and QK-Clip cost in a training step: `python -m headway.bench.stability`.

Eight layers of `headway.nn.Attention` with MLPs, sequences of 512, causal, AdamW. Three steps take
turns: nothing recorded, recorded, recorded and clipped. Prints a table; the exit status is 1 if
recording and clipping together cost more than asked for.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..mods import causal
from ..nn import Attention, Rotary
from ..stability import QKClip
from .machine import here
from .timing import Timing, compare

LAYERS, LENGTH = 8, 512
MOST = {"cpu": 0.03, "cuda": 0.01}  # of a step
PLAIN, RECORDED, CLIPPED = "plain", "recorded", "recorded and clipped"


class Size(NamedTuple):
    """Of the model and its batch."""

    width: int
    heads: int
    batch: int
    dtype: torch.dtype


SIZES = {
    "cpu": Size(768, 12, 2, torch.float32),
    "cuda": Size(1024, 8, 64, torch.bfloat16),
}


class Model(nn.Module):
    """Pre-norm layers of attention and MLP."""

    def __init__(self, size: Size):
        super().__init__()
        self.attentions = nn.ModuleList(
            Attention(size.width, size.heads, rotary=Rotary(size.width // size.heads))
            for _ in range(LAYERS)
        )
        self.ups = nn.ModuleList(nn.Linear(size.width, 4 * size.width) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(4 * size.width, size.width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """(b, L, C) -> (b, L, C)"""
        norm = lambda x: F.rms_norm(x, (x.shape[-1],))
        angles = self.attentions[0].rotary.angles(torch.arange(LENGTH, device=x.device))  # type: ignore[union-attr,operator]
        for attention, up, down in zip(self.attentions, self.ups, self.downs, strict=True):
            x = x + attention(norm(x), causal(), angles=angles)
            x = x + down(F.gelu(up(norm(x))))
        return x


def overhead(device: str = "cpu", repeats: int = 20, compiled: bool = False) -> dict[str, Timing]:
    """Seconds of a training step, by what it does besides."""
    size = SIZES[device]
    calls: dict[str, Callable[[], Any]] = {}
    for name in (PLAIN, RECORDED, CLIPPED):
        torch.manual_seed(0)
        model = Model(size).to(device)
        for attention in model.attentions:
            attention.max_logit.train(name != PLAIN)  # type: ignore[union-attr,operator]
        calls[name] = _step(model, size, device, name == CLIPPED, compiled)
        for _ in range(3):
            calls[name]()
    return compare(calls, repeats, device)


def _step(
    model: Model, size: Size, device: str, clipped: bool, compiled: bool
) -> Callable[[], None]:
    forward = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    clip = QKClip(model, tau=1.0) if clipped else None
    x = torch.randn(size.batch, LENGTH, size.width, device=device)

    def step() -> None:
        with torch.autocast(device, size.dtype, enabled=size.dtype != torch.float32):
            out = forward(x)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if clip is not None:
            clip.step()

    return step


def main(arguments: list[str]) -> int:
    """Exit status 0 if the cost is what is asked for. Arguments: a device, "compile", both or
    none."""
    device = "cuda" if "cuda" in arguments else "cpu"
    timings = overhead(device, compiled="compile" in arguments)
    base = timings[PLAIN].median
    machine = here(device)
    write = lambda line: sys.stdout.write(line + "\n")
    write(f"{machine.device}, {machine.threads} threads, torch {machine.torch}")
    write(f"{LAYERS} layers, length {LENGTH}, {SIZES[device]}")
    for name, t in timings.items():
        write(
            f"{name:22} {t.median * 1e3:9.2f} ms ({t.low * 1e3:.2f} to {t.high * 1e3:.2f}, "
            f"{t.runs} runs) {100 * (t.median / base - 1):+6.2f} %"
        )
    cost = timings[CLIPPED].median / base - 1
    write(f"asked for: at most {100 * MOST[device]:g} %: {'yes' if cost <= MOST[device] else 'NO'}")
    return 0 if cost <= MOST[device] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
