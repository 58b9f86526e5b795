"""Training steps: how much faster attention makes them, and what recording and clipping add.

`recording`: eight pre-norm layers of `headway.nn.Attention` and MLPs, causal, AdamW. Max logits and
QK-Clip cost a hundredth of a step, and a processor's steps differ by more than that. So what they
change is timed by itself, inside of whole steps: the forward and the backward of every attention,
and the clip (which takes the same time whatever is above tau; on a GPU it is queued behind the
step, as in training). In one step every second attention records, in the next the others do: what
is compared lies a tenth of a second apart, and each layer is once on either side.

`training`: models of Hugging Face with random weights, headway against what they bring, step after
step in turns. Before that the two must agree in loss and gradients.

`train`: one compiled transformer with each attention.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.mods import causal
from headway.nn import Attention, Rotary
from headway.stability import QKClip

from .case import Case, make_inputs
from .overhead import causal_functions
from .results import WRONG, Result
from .timing import Mark, Tick, Timing, between, compare, mark, repeat

LAYERS = 8
STEP, RECORDING, CLIPPING = "training step", "recording", "recording + clipping"


class AttentionStack(nn.Module):
    """Pre-norm layers of width `case.hq * case.d`, without embedding and head."""

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
        """Apply all layers, (b, L, C) -> (b, L, C)."""
        norm = lambda x: F.rms_norm(x, (x.shape[-1],))
        angles = self.rotary.angles(torch.arange(x.shape[1], device=x.device))
        for attention, up, down in zip(self.attentions, self.ups, self.downs, strict=True):
            x = x + attention(norm(x), causal(), angles=angles)
            x = x + down(F.gelu(up(norm(x))))
        return x


def recording(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """Time a step, and the percentages that recording, and recording with clipping, add to it."""
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
        share = Timing.of([extra / base for extra in samples])
        results.append(Result(case.name, name, "headway").timed(share, "%"))
    return [*results[:-1], results[-1].at_most(case.most)]


class StepTimes(NamedTuple):
    """The seconds of one step."""

    whole: float  # without the clip
    attentions: list[float]  # of each layer's: forward and backward
    clip: float


class Steps:
    """Training steps of one model in which every second attention records."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, case.dtype)
        self.device = device
        self.autocast = torch.device(device).type, dtype, dtype != torch.float32
        self.model = AttentionStack(case).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        self.clip = QKClip(self.model, tau=1.0)
        # Like an embedding's output it wants a gradient: then all layers do the same work.
        self.x = torch.randn(
            case.b, case.length, case.hq * case.d, device=device, requires_grad=True
        )
        self.marks: dict[nn.Module, list[Mark]] = {}
        for layer in self.model.attentions:
            for where in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
                getattr(layer, f"register_{where}_hook")(self._mark)

    def _mark(self, attention: nn.Module, *_: object) -> None:
        self.marks.setdefault(attention, []).append(mark(self.device))

    def step(self, parity: int, *, clip: bool = False) -> StepTimes:
        """Run a step in which every second attention, from `parity` on, records; then clip."""
        for n, layer in enumerate(self.clip.layers):
            layer.record.train(n % 2 == parity)
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
        return StepTimes(
            between(start, end), [between(a, b) + between(c, d) for a, b, c, d in parts],
            between(end, clipped),
        )  # fmt: skip


STEPS = 10
# Of the gradients, float32 against float32, relative to the norm of all: rounding, not a mistake.
LIMIT = 1e-4


class PeerModel(NamedTuple):
    """A model of Hugging Face, the attention that it is compared with, and the target."""

    make: Callable[[Any, Case], nn.Module]  # of the module `transformers`
    other: str  # a name of transformers' own attention
    times: float  # at least so much of its speed


def _config(case: Case) -> dict[str, Any]:
    return {
        "hidden_size": case.hq * case.d, "max_position_embeddings": case.length,
        "num_attention_heads": case.hq, "num_key_value_heads": case.hk,
    }  # fmt: skip


def _llama(hf: Any, case: Case) -> nn.Module:
    """Return 12 layers of width 768: 101 million parameters."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=32000, intermediate_size=2048, num_hidden_layers=12, tie_word_embeddings=True,
        **_config(case),
    ))  # fmt: skip


def _gemma2(hf: Any, case: Case) -> nn.Module:
    """Return 2 layers of width 768, one with a window of 1024; softcap 50 as in Gemma 2."""
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(
        vocab_size=8192, intermediate_size=3072, num_hidden_layers=2, head_dim=case.d,
        query_pre_attn_scalar=case.d, sliding_window=1024, **_config(case),
    ))  # fmt: skip


MODELS = {
    "hf-llama-100m": PeerModel(_llama, "sdpa", 0.95),
    "hf-gemma2-2k": PeerModel(_gemma2, "eager", 1.3),
}


def training(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """Time `STEPS` steps of each in turns; `repeats` is for shorter measurements."""
    try:
        import transformers as hf

        from headway.integrations.transformers import register

        register()
    except ImportError as error:
        return [Result(case.name, STEP, "headway").not_run(error)]
    model = MODELS[case.name]
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    net: Any = model.make(hf, case).to(device, getattr(torch, case.dtype)).train()
    tokens = torch.randint(0, net.config.vocab_size, (case.b, case.length), device=device)
    names = ("headway", model.other)
    error = _error([_gradients(net, name, tokens) for name in names])
    ours = Result(case.name, STEP, "headway", error=error, limit=LIMIT)
    if not error <= LIMIT:
        return [replace(ours, verdict=WRONG, note=f"gradients differ from {model.other}'s")]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    steps = {name: partial(_step, net, name, tokens, optimizer) for name in names}
    times = compare(steps, STEPS, device, tick, patience=math.inf)
    ratio = times[model.other].median / times["headway"].median
    note = f"{sum(p.numel() for p in net.parameters()) / 1e6:.0f}M parameters"
    peer_result = Result(case.name, STEP, model.other, ratio=round(ratio, 4), note=note)
    return [
        ours.timed(times["headway"]),
        peer_result.timed(times[model.other]).asked(
            f">= {model.times:g}x", times[model.other].takes(model.times, times["headway"])
        ),
    ]


def _gradients(net: Any, name: str, tokens: Tensor) -> list[Tensor]:
    net.set_attn_implementation(name)
    loss = net(input_ids=tokens, labels=tokens, use_cache=False).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


def _error(results: list[list[Tensor]]) -> float:
    """Return the largest |a - b| / |b| of loss and gradients; NaN stays NaN."""
    distances = [(a - b).norm() / b.norm() for a, b in zip(*results, strict=True)]
    return float(torch.stack(distances).amax())


def _step(net: Any, name: str, tokens: Tensor, optimizer: torch.optim.Optimizer) -> None:
    net.set_attn_implementation(name)
    net(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """Measure tokens per second of the same compiled transformer with each attention."""
    inputs = make_inputs(case, device)
    results, speeds = [], {}
    for name, function in causal_functions(inputs).items():
        torch.manual_seed(0)
        model = nn.Sequential(*[_TrainBlock(case.hq, case.d, function) for _ in range(8)])
        model = model.to(device, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model = torch.compile(model)
        tokens = torch.randn(case.b, case.length, case.hq * case.d, device=device).bfloat16()

        def step(model=model, optimizer=optimizer, tokens=tokens) -> None:
            model(tokens).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        timing = repeat(step, device, max(3, repeats))
        speeds[name] = case.b * case.length / timing.median
        result = Result(case.name, "step", name).timed(timing)
        results.append(replace(result, note=f"{speeds[name]:,.0f} tokens/s"))
        del model, optimizer, tokens
    return [replace(r, ratio=round(speeds["headway"] / speeds[r.contestant], 4)) for r in results]


class _TrainBlock(nn.Module):
    """A pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, heads: int, d: int, function: Callable) -> None:
        super().__init__()
        width = heads * d
        self.heads, self.function = heads, function
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up, self.down = (
            nn.Linear(a * width, b * width, bias=False) for a, b in ((1, 4), (4, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        norm = lambda x: F.rms_norm(x, (x.shape[-1],))
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(norm(x)).chunk(3, -1)
        )
        x = x + self.out(self.function(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(norm(x))))
