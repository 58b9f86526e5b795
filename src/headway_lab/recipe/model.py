"""A byte-level transformer whose every attention is a module of `headway.nn`.

Pre-norm residual blocks, RMSNorm without gains, rotary positions, grouped-query or multi-head
latent attention, a GELU MLP. Axes: B batch, L length, C width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway
from headway.distributed import Layout
from headway.inference import Layer, PagedCache
from headway.nn import MLA, Angles, Attention, Past, Rotary
from headway.nn.past import positions_of

from .corpus import VOCAB

Mask = headway.Mask | headway.BlockMask
Kind = Literal["gqa", "mla"]
MaskKind = Literal["documents", "causal"]
Implementation = Literal["headway", "sdpa"]
Scaling = Literal["logits", "query", "init", "none"]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the network: all that is needed to build it again around saved weights."""

    depth: int
    width: int
    heads: int
    kv_heads: int
    context: int
    vocab: int = VOCAB
    attention: Kind = "gqa"
    scaling: Scaling = "logits"
    qk_norm: bool = False
    mask: MaskKind = "documents"
    softcap: float | None = None
    implementation: Implementation = "headway"


class PlainAttention(Attention):
    """The baseline: the same module with PyTorch's causal kernel, which knows no largest logit."""

    def trained(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any, start: int = 0,
        layout: Any = None,
    ) -> Tensor:  # fmt: skip
        if start:
            return super().trained(q, k, v, mask, score, start, layout)
        q, options = self._scaled(q)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options["scale"], enable_gqa=k.shape[1] < q.shape[1]
        )


def attention(config: ModelConfig, rotary: Rotary) -> Attention | MLA:
    """Make the attention of a layer; its output starts at zero. MLA's query and key are as wide as
    a head, half of it rotary, and its latent is half as wide as the model."""
    options: dict[str, Any] = {"rotary": rotary, "init": _keep_size}
    options |= {"scale": 1.0} if config.scaling == "none" else {"scaling": config.scaling}
    head = config.width // config.heads
    if config.attention == "mla":
        layer = MLA(
            config.width, config.heads, kv_lora_rank=_latent(config),
            nope_width=head - rotary.width, rope_width=rotary.width, value_width=head, **options,
        )  # fmt: skip
    else:
        module = PlainAttention if config.implementation == "sdpa" else Attention
        layer = module(
            config.width, config.heads, config.kv_heads, qk_norm=config.qk_norm, **options
        )
    nn.init.zeros_(layer.o_proj.weight)
    return layer


def _latent(config: ModelConfig) -> int:
    """Return the width of MLA's latents."""
    return max(1, config.width // 2)


class MLP(nn.Module):
    """gelu(x W) W': one pass over the wide activations, where relu² and SwiGLU take several. On a
    CPU those passes cost as much as the matrices, and GELU learns more in the same time."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = linear(config.width, 4 * config.width)
        self.down = linear(4 * config.width, config.width, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP, (..., C) -> (..., C)"""
        return self.down(F.gelu(self.up(x)))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, rotary: Rotary):
        super().__init__()
        self.attention = attention(config, rotary)
        self.score = None if config.softcap is None else headway.softcap(config.softcap)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, mask: Mask, angles: Angles, past: Past | Layer | None,
        layout: Layout | None = None,
    ) -> Tensor:  # fmt: skip
        """Apply the block, x (B, L, C) -> (B, L, C)"""
        x = x + self.attention(norm(x), mask, self.score, angles=angles, past=past, layout=layout)
        return x + self.mlp(norm(x))


class Transformer(nn.Module):
    """Bytes in, the logits of the next byte out. Embedding and head have weights of their own.

    At the start every block is the identity and every byte equally likely: the matrices that write
    to the residual stream, and the head, are zero. The first loss is log(vocab).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        head = config.width // config.heads
        self.rotary = Rotary(head // 4 * 2 if config.attention == "mla" else head)
        self.blocks = nn.ModuleList(
            TransformerBlock(config, self.rotary) for _ in range(config.depth)
        )
        self.head = linear(config.width, config.vocab, zero=True)

    def forward(self, tokens: Tensor, ids: Tensor, layout: Layout | None = None) -> Tensor:
        """Return logits (B, L, vocab) from tokens, ids (B, L) int64, L at most the context. A
        position sees the positions before it, and itself, that have its id: no byte reaches another
        file (unless the mask is causal alone). With a layout, tokens are those that this rank has
        of sequences whose ids these are."""
        length = ids.shape[1]
        mask: Mask = headway.causal()
        if self.config.mask == "documents":
            same_file = headway.causal() & headway.document(ids)
            # Tiles are decided once for all layers and heads.
            mask = headway.block_mask(same_file, len(ids), 1, length, length, device=ids.device)
        positions = positions_of(None, length, tokens.device)
        if layout is not None:
            positions = layout.positions
        return self._run(tokens, mask, positions, [None] * len(self.blocks), layout)

    def decode(self, tokens: Tensor, pasts: Sequence[Past | Layer]) -> Tensor:
        """Return logits of positions that follow those in `pasts`, one Past per layer, which grow
        by them, or the layers of a cache that has reserved them. Past and tokens together may be as
        long as the context, and are one file."""
        positions = positions_of(pasts[0], tokens.shape[1], tokens.device)
        return self._run(tokens, headway.causal(), positions, pasts)

    def cache(self, rows: int, pages: int | None = None, page: int = 32) -> PagedCache:
        """Make a paged cache for `rows` files at once, by default with room for a context each."""
        c = self.config
        pages = rows * -(-c.context // page) if pages is None else pages
        heads, width, of_values = c.kv_heads, c.width // c.heads, None
        if c.attention == "mla":
            heads, width, of_values = 1, _latent(c) + self.rotary.width, 0
        weight = self.head.weight
        return PagedCache(
            c.depth, pages, page, heads, width, of_values, rows=rows,
            max_pages=-(-c.context // page), dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def _run(
        self, tokens: Tensor, mask: Mask, positions: Tensor, pasts: Sequence[Past | Layer | None],
        layout: Layout | None = None,
    ) -> Tensor:  # fmt: skip
        # Rotary positions run through the sequence, whatever files it holds: only differences of
        # positions enter a logit, and within a file they are the same wherever the file begins.
        angles = self.rotary.angles(positions)
        x = F.rms_norm(self.embedding(tokens), (self.config.width,))
        for block, past in zip(self.blocks, pasts, strict=True):
            x = block(x, mask, angles, past, layout)
        return self.head(norm(x))


def _keep_size(weight: Tensor) -> None:
    """Draw a matrix that keeps the size of what it reads."""
    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def linear(inputs: int, outputs: int, zero: bool = False) -> nn.Linear:
    """Make a matrix without bias, that keeps the size of what it reads, or starts at zero."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.0 if zero else inputs**-0.5)
    return layer


def norm(x: Tensor) -> Tensor:
    """Apply RMSNorm over the width (Zhang & Sennrich 2019), no gain: the next matrix can hold one.
    Under autocast in the dtype of the products that read it, once for all of them."""
    x = F.rms_norm(x, (x.shape[-1],))
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return x
