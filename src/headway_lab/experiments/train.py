"""The small language model of the experiments, and one training run of it.

Bytes of Python's standard library; two pre-norm layers of width 128, sequences of 64, batches of
16, float32. Equal seeds give equal weights and equal batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.mods import causal
from headway.nn import MLA, Attention, rescale
from headway.stability import logit_stats, reset_logit_stats

from ..recipe.corpus import load_corpus

WIDTH, LAYERS, LENGTH, BATCH = 128, 2, 64, 16
VOCAB = 256


class Model(nn.Module):
    """`attention` makes the attention of a layer from its keyword arguments."""

    def __init__(self, attention: Callable[..., nn.Module], **options: Any):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.attentions = nn.ModuleList(attention(**options) for _ in range(LAYERS))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, L, 256) of tokens (b, L) int64."""
        x = self.embedding(tokens)
        for attention, up, down in zip(self.attentions, self.ups, self.downs, strict=True):
            x = x + attention(_norm(x), causal())
            x = x + down(F.gelu(up(_norm(x))))
        return self.head(_norm(x))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,))


def gqa(heads: int, **options: Any) -> Attention:
    """Return `Attention` of the model's width."""
    return Attention(WIDTH, heads, **options)


def mla(**options: Any) -> MLA:
    """Return a small `MLA`: 4 heads of 24 + 8, a latent of 64."""
    return MLA(
        WIDTH, 4, q_lora_rank=96, kv_lora_rank=64, nope_width=24, rope_width=8, value_width=32,
        **options,
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingCurves:
    """One training run: the loss in nats and the largest max logit of any head, at every step."""

    losses: list[float]
    max_logits: list[float]

    @property
    def loss(self) -> float:
        """Mean of the last tenth."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)

    @property
    def peak(self) -> float:
        return max(self.max_logits)

    def distance(self, other: "TrainingCurves") -> float:
        """Return the largest difference of the losses at any step; 0.0 is bit-equal."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


def train(
    make: Callable[[], Model], optimizer: Callable[[Model], torch.optim.Optimizer], steps: int,
    seed: int = 0, warmup: int = 0, clip_norm: float | None = None,
) -> TrainingCurves:  # fmt: skip
    """Train one model. `warmup`: steps over which the learning rates rise; `clip_norm`: bound on
    the norm of all gradients together."""
    torch.manual_seed(seed)
    model = make()
    optimiser = optimizer(model)
    rates = [group["lr"] for group in optimiser.param_groups]
    draw = torch.Generator().manual_seed(seed)
    text = _text()
    losses, max_logits = [], []
    for step in range(steps):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / warmup) if warmup else rate
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=draw)
        tokens = text[starts + torch.arange(LENGTH + 1)].long()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        max_logits.append(max(float(s.max()) for s in logit_stats(model).values()))
        optimiser.step()
        optimiser.zero_grad()
        reset_logit_stats(model)
        losses.append(loss.item())
    return TrainingCurves(losses, max_logits)


def started_as(make: Callable[[], Model], scaling: Any) -> Callable[[], Model]:
    """Return `make` followed by `rescale`: the same weights, with the scale moved."""

    def made() -> Model:
        model = make()
        rescale(model, scaling)
        return model

    return made


@lru_cache(maxsize=1)
def _text(size: int = 3_000_000) -> Tensor:
    """Return the first bytes of the training files, in a fixed order."""
    joined = b"".join(load_corpus().train_texts)[:size]
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)
