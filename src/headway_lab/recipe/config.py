"""Every setting of a training run, and the one dial that sets most of them."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from headway.cli.options import default_words
from headway.errors import ArgumentError

from .corpus import Text
from .model import Implementation, Kind, MaskKind, ModelConfig, Scaling

HEAD_WIDTH = 32
# Learning rates by depth: deeper runs are longer. Kimi K2's Muon multiplies steps by the root of
# the width, which grows with depth.
RATES = {
    "muon": lambda depth: 0.04 / math.sqrt(depth),
    "muonclip": lambda depth: 0.03 / depth,
    "adamw": lambda depth: 0.01 / math.sqrt(depth),
    "adafactor": lambda depth: 0.06 / math.sqrt(depth),
}
SHORTEST = 8  # bytes of context: below, there is next to nothing to attend to, at any cost
HIGHEST_RATE = 1e6  # nothing learns there; float32 overflows far above


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a run; `headway train --help` is made from it.

    A setting that is None follows from `depth` or from the machine: `resolved` says how.
    """

    depth: int = 4
    """Number of layers. It sets width, heads, learning rate and steps (4: two minutes)."""
    name: Annotated[
        str | None, default_words("run-1, run-2, ...; with --resume, the last saved", "NAME")
    ] = None
    """Folder of the run under --runs. If it exists, you must pass --resume."""
    steps: Annotated[int | None, default_words("18 * depth²")] = None
    """Training steps."""
    width: Annotated[int | None, default_words("32 * depth")] = None
    """Width of the residual stream."""
    heads: Annotated[int | None, default_words("width / 32")] = None
    """Query heads."""
    kv_heads: Annotated[int | None, default_words("half of heads, or the next divisor below")] = (
        None
    )
    """Key and value heads, for --attention gqa: each serves heads / kv-heads query heads."""
    attention: Kind = "gqa"
    """Grouped-query attention, or multi-head latent attention (DeepSeek)."""
    qk_norm: tyro.conf.FlagCreatePairsOff[bool] = False
    """Normalise queries and keys in every head, for --attention gqa."""
    softcap: Annotated[float | None, default_words("none", "FLOAT")] = None
    """Bound on the logits: cap * tanh(logit / cap), as in Gemma 2."""
    mask: MaskKind = "documents"
    """What a byte attends to: earlier bytes of its own file, or of the whole sequence."""
    implementation: Implementation = "headway"
    """Library that computes attention. sdpa is PyTorch's F.scaled_dot_product_attention."""
    scaling: Scaling = "logits"
    """Where 1/sqrt(d) is applied: to the logits, the queries, their initial weights, or nowhere."""
    optimizer: Literal["muon", "adamw", "muonclip", "adafactor"] = "muon"
    """Optimizer of the matrices inside the blocks. muonclip is Kimi K2's Muon with QK-Clip."""
    qk_clip_tau: Annotated[
        float | None, default_words("100 for muonclip, else no clip", "FLOAT")
    ] = None
    """QK-Clip: after each step, scale down the heads whose largest logit exceeds this."""
    context: int = 256
    """Bytes in a sequence."""
    batch: int = 8
    """Sequences in a step."""
    lr: Annotated[
        float | None,
        default_words(
            "muon: 0.04 / sqrt(depth), muonclip: 0.03 / depth, adamw: 0.01 / sqrt(depth), "
            "adafactor: 0.06 / sqrt(depth)",
            "FLOAT",
        ),
    ] = None
    """Learning rate of the matrices inside the blocks."""
    embedding_lr: float = 0.05
    """Learning rate of the byte embedding (AdamW)."""
    head_lr: float = 0.01
    """Learning rate of the output head (AdamW)."""
    weight_decay: float = 0.1
    """Weight decay of the matrices inside the blocks: a step shrinks them by this times --lr."""
    warmup: float = 0.02
    """Part of the steps in which the learning rates rise from zero, for example 0.02."""
    cooldown: float = 0.7
    """Part of the steps in which the learning rates fall to zero at the end."""
    eval_every: int = 50
    """Steps between evaluations on a part of the held-out files. The last step uses all."""
    stats_every: Annotated[
        int | None, default_words("50, or 0 with sdpa and where devices split a sequence")
    ] = None
    """Steps between measurements of the entropy and sink mass of every head. 0: none."""
    save_every: int = 100
    """Steps between checkpoints. The end of the run, Ctrl-C and SIGTERM also write one."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    text: Text = "library"
    """Text: the .py files of Python's standard library, or those of installed packages."""
    corpus: Annotated[Path | None, default_words("where this Python has them", "FOLDER")] = None
    """Folder to read the text from."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to train."""
    devices: int = 1
    """GPUs, or processes on the CPU, that train together. torchrun can start them, too."""
    context_parallel: Annotated[int | None, default_words("all devices")] = None
    """Devices that split one sequence. The groups of this size divide the batch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and matrix products. Use bfloat16 (autocast) where it is fast."""
    threads: Annotated[int | None, default_words("this device's share; 4 at most beside a GPU")] = (
        None
    )
    """CPU threads of each process."""
    sample_bytes: int = 240
    """Bytes that the trained model generates after each of three prompts. 0: none."""
    runs: Path = Path("runs")
    """Folder that holds the runs."""

    def resolved(self) -> "Settings":
        """Check this configuration, and return it with nothing left open.

        From `depth` d: width 32 d, one head per 32 of width, half as many key heads, 18 d² steps
        (so the text read grows almost as fast as the weights), and a learning rate that falls as
        1 / sqrt(d) because deeper runs are longer. Raises ArgumentError.
        """
        _at_least("depth", self.depth, 1)
        width = HEAD_WIDTH * self.depth if self.width is None else self.width
        _at_least("width", width, 1)
        heads = max(1, width // HEAD_WIDTH) if self.heads is None else self.heads
        _at_least("heads", heads, 1)
        default_kv_heads = heads if self.attention == "mla" else _kv_heads(heads)
        defaults: dict[str, Any] = {
            "width": width, "heads": heads, "kv_heads": default_kv_heads,
            "steps": 18 * self.depth**2, "lr": RATES[self.optimizer](self.depth),
            "qk_clip_tau": 100.0 if self.optimizer == "muonclip" else None,
            "threads": self._share_of_threads(),
            "stats_every": 0 if self.why_no_statistics() else 50,
        }  # fmt: skip
        open_settings = {n: x for n, x in defaults.items() if getattr(self, n) is None}
        settings = Settings(**vars(self) | open_settings)
        settings.check()
        return settings

    def _share_of_threads(self) -> int:
        # Beside a GPU the CPU has small work, where threads wait for each other. A step of the 60m
        # preset on two H200: 170 ms with one thread in each process, 132 with 4; on another host
        # 400 with all 32 (docs/lab/ranks.md).
        share = max(1, torch.get_num_threads() // max(1, self.devices))
        return share if self.device == "cpu" else min(share, 4)

    @property
    def ranks_of_sequence(self) -> int:
        """Return how many devices split one sequence."""
        return self.devices if self.context_parallel is None else self.context_parallel

    def why_no_statistics(self) -> str:
        """Return the setting with which entropies cannot be measured; empty if they can."""
        if self.implementation == "sdpa":
            return "--implementation sdpa"
        over = self.ranks_of_sequence
        return f"{over} devices that split one sequence (--context-parallel)" * (over > 1)


@dataclass(frozen=True, kw_only=True)
class Settings(TrainConfig):
    """A `TrainConfig` with nothing left open: what a run is made from, and its config.json."""

    width: int
    heads: int
    kv_heads: int
    steps: int
    lr: float
    threads: int
    stats_every: int

    def model(self) -> ModelConfig:
        """Return the sizes of the network."""
        return ModelConfig(
            self.depth, self.width, self.heads, self.kv_heads, self.context,
            attention=self.attention, scaling=self.scaling, qk_norm=self.qk_norm,
            mask=self.mask, softcap=self.softcap, implementation=self.implementation,
        )  # fmt: skip

    def check(self) -> None:
        """Raise ArgumentError for the first invalid setting."""
        for name in "kv_heads steps batch eval_every save_every threads devices".split():
            _at_least(name, getattr(self, name), 1)
        _at_least("context", self.context, SHORTEST)
        _at_least("sample_bytes", self.sample_bytes, 0)
        _at_least("stats_every", self.stats_every, 0)
        if self.stats_every and (why := self.why_no_statistics()):
            raise ArgumentError(
                f"--stats-every {self.stats_every} with {why}: pass --stats-every 0"
            )
        over = self.ranks_of_sequence
        if over < 1 or self.devices % over or self.batch % (self.devices // over):
            raise ArgumentError(
                f"--context-parallel {over} must divide --devices {self.devices}, and --batch "
                f"{self.batch} must be a multiple of the quotient, the number of groups of devices"
            )
        if not 0 <= self.seed < 2**32:
            raise ArgumentError(f"--seed {self.seed} must be from 0 to 2³² - 1")
        self._check_attention()
        if self.implementation == "sdpa":
            self._check_sdpa()
        for name in ("lr", "embedding_lr", "head_lr"):
            if not 0 < (value := getattr(self, name)) <= HIGHEST_RATE:
                raise ArgumentError(f"{_flag(name)} {value} must be above 0, to {HIGHEST_RATE:g}")
        if not 0 <= self.weight_decay < math.inf:
            raise ArgumentError(f"--weight-decay {self.weight_decay} must be zero or more")
        for name in ("warmup", "cooldown"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ArgumentError(f"{_flag(name)} {value} must be a share, from 0 to 1")

    def _check_attention(self) -> None:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ArgumentError(
                f"--width {self.width} with --heads {self.heads}: the width of a head, "
                f"{self.width / self.heads:g}, must be whole and even (rotary positions turn pairs)"
                f"; for example --width {self.heads * HEAD_WIDTH}"
            )
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}"
            )
        if self.attention == "mla" and self.kv_heads != self.heads:
            raise ArgumentError(
                f"--kv-heads {self.kv_heads} is for --attention gqa: in MLA every one of the "
                f"{self.heads} heads has keys of its own; leave it out"
            )
        if self.attention == "mla" and self.qk_norm:
            raise ArgumentError("--qk-norm is for --attention gqa: MLA normalises its latents")
        if self.attention == "mla" and self.width // self.heads < 4:
            raise ArgumentError(
                f"--attention mla with heads of {self.width // self.heads}: 4 at least, half of "
                "them rotary"
            )
        if self.qk_clip_tau is not None:
            if not 0 < self.qk_clip_tau < math.inf:
                raise ArgumentError(f"--qk-clip-tau {self.qk_clip_tau} must be above 0")
            if self.qk_norm:
                raise ArgumentError(
                    "--qk-norm bounds logits whatever the size of the weights that QK-Clip scales; "
                    "leave out --qk-clip-tau, and choose --optimizer muon or adamw"
                )
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ArgumentError(f"--softcap {self.softcap} must be above 0")

    def _check_sdpa(self) -> None:
        for flag, is_set in {
            "--mask documents": self.mask == "documents",
            "--softcap": self.softcap is not None,
            "--attention mla": self.attention == "mla",
            "--qk-clip-tau or --optimizer muonclip": self.qk_clip_tau is not None,
            "--devices above 1": self.devices > 1,
        }.items():
            if is_set:
                raise ArgumentError(
                    f"--implementation sdpa with {flag}: PyTorch's F.sdpa is the baseline of "
                    "--mask causal alone; leave one of the two out"
                )


def learning_rate(config: Settings, step: int) -> float:
    """Return the factor on every learning rate at step 0, 1, ...: up, level, and down to zero.

    It depends on the step alone, so that a resumed run follows the same curve.
    """
    up = min(1.0, (step + 1) / max(1, round(config.warmup * config.steps)))
    down = min(1.0, (config.steps - step) / max(1, round(config.cooldown * config.steps)))
    return up * down


def to_json(config: Settings) -> dict[str, Any]:
    """Return plain JSON values; `from_json` is the way back."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}


def from_json(values: dict[str, Any]) -> Settings:
    """Read settings, or raise TypeError if one is unknown or missing."""
    # Runs from before there were these have none: they had what is the default now.
    later = (
        "devices", "context_parallel", "softcap", "mask", "implementation", "text", "sample_bytes",
    )  # fmt: skip
    values = {"stats_every": 0, **{n: getattr(TrainConfig, n) for n in later}, **values}
    if absent := {field.name for field in fields(Settings)} - set(values):
        raise TypeError(f"settings missing: {', '.join(sorted(absent))}")
    paths: dict[str, Any] = {k: values[k] and Path(values[k]) for k in ("corpus", "runs")}
    return Settings(**values | paths)


def changed(config: Settings, saved: Settings) -> str:
    """Return the settings that differ, as a user writes them; empty if none does."""
    pairs = [(f.name, getattr(config, f.name), getattr(saved, f.name)) for f in fields(TrainConfig)]
    return ", ".join(
        f"{_flag(name)} {value} (the run has {saved_value})"
        for name, value, saved_value in pairs
        if value != saved_value
    )


def _kv_heads(heads: int) -> int:
    return max((m for m in range(1, heads // 2 + 1) if heads % m == 0), default=1)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _at_least(name: str, number: int, minimum: int) -> None:
    if number < minimum:
        raise ArgumentError(f"{_flag(name)} {number} must be an integer, {minimum} or more")
