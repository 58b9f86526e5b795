"""Training steps of Hugging Face models with random weights: headway against what they bring.

One model takes turns: a step with headway, a step with the other, and so on; forward, backward and
AdamW. Before that the two must agree in loss and gradients.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .case import Case
from .results import NOT_RUN, WRONG, Result
from .timing import Timing, seconds

STEPS = 10
TRAINING = "training step"
# Of the gradients, float32 against float32, relative to the norm of all: rounding, not a mistake.
LIMIT = 1e-4


class Model(NamedTuple):
    """What is built for a case, and what it is measured against."""

    make: Callable[[Any, Case], nn.Module]  # of the module `transformers`
    other: str  # a name of transformers' own attention
    times: float  # at least so much of its speed


def _llama(hf: Any, case: Case) -> nn.Module:
    """12 layers of width 768: 101 million parameters."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=32000, hidden_size=case.hq * case.d, intermediate_size=2048,
            num_hidden_layers=12, num_attention_heads=case.hq, num_key_value_heads=case.hk,
            max_position_embeddings=case.length, tie_word_embeddings=True,
        )
    )  # fmt: skip


def _gemma2(hf: Any, case: Case) -> nn.Module:
    """2 layers of width 768, one with a window of 1024; softcap 50 as in Gemma 2."""
    return hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            vocab_size=8192, hidden_size=case.hq * case.d, intermediate_size=3072,
            num_hidden_layers=2, num_attention_heads=case.hq, num_key_value_heads=case.hk,
            head_dim=case.d, query_pre_attn_scalar=case.d, sliding_window=1024,
            max_position_embeddings=case.length,
        )
    )  # fmt: skip


MODELS = {
    "hf-llama-100m": Model(_llama, "sdpa", 0.95),
    "hf-gemma2-2k": Model(_gemma2, "eager", 1.3),
}


def training(case: Case, device: str, repeats: int, tick: Callable[[], object]) -> list[Result]:
    """Median seconds of a step, `STEPS` of each in turns; `repeats` is for what takes less long."""
    try:
        import transformers as hf

        from headway.integrations.transformers import register

        register()
    except ImportError as error:
        return [Result(case.name, TRAINING, "headway", verdict=NOT_RUN, note=str(error))]
    model = MODELS[case.name]
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    net: Any = model.make(hf, case).to(device, getattr(torch, case.dtype)).train()
    tokens = torch.randint(0, net.config.vocab_size, (case.b, case.length), device=device)
    names = ("headway", model.other)
    error = _error([_gradients(net, name, tokens) for name in names])
    ours = Result(case.name, TRAINING, "headway", error=error, limit=LIMIT)
    if not error <= LIMIT:
        return [replace(ours, verdict=WRONG, note=f"gradients differ from {model.other}'s")]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(STEPS):
        for name in names:
            step = partial(_step, net, name, tokens, optimizer)
            samples[name].append(seconds(step, device))
        names = names[::-1]
        tick()
    times = {name: Timing.of(taken) for name, taken in samples.items()}
    ratio = times[model.other].median / times["headway"].median
    note = f"{sum(p.numel() for p in net.parameters()) / 1e6:.0f}M parameters"
    other = Result(case.name, TRAINING, model.other, ratio=round(ratio, 4), note=note)
    return [
        ours.timed(times["headway"]),
        other.timed(times[model.other]).asked(f">= {model.times:g}x", ratio >= model.times),
    ]


def _gradients(net: Any, name: str, tokens: Tensor) -> list[Tensor]:
    net.set_attn_implementation(name)
    loss = net(input_ids=tokens, labels=tokens, use_cache=False).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


def _error(results: list[list[Tensor]]) -> float:
    """Of the loss and of every gradient, the largest |a - b| / |b|; NaN stays NaN."""
    distances = [(a - b).norm() / b.norm() for a, b in zip(*results, strict=True)]
    return float(torch.stack(distances).amax())


def _step(net: Any, name: str, tokens: Tensor, optimizer: torch.optim.Optimizer) -> None:
    net.set_attn_implementation(name)
    net(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
