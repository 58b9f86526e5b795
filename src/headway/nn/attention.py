"""Multi-head, grouped-query and multi-query attention as a module."""

import math
from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor, nn

from ..arguments import count_of, flag_of, number_of
from ..blocks import BlockMask
from ..distributed.layout import Layout
from ..errors import ArgumentError
from ..inference import Layer
from ..keywords import unknown_keywords
from ..mods.base import MaskFn, ScoreFn
from .past import Past
from .rotary import Angles, Rotary, check_rotary
from .scaling import ScaledAttention, Scaling


class Attention(ScaledAttention):
    """Self-attention over `(b, length, width)`: MHA, GQA (fewer `kv_heads`), MQA (one).

    (Vaswani et al. 2017, arXiv 1706.03762; Ainslie et al. 2023, GQA, arXiv 2305.13245)

    **Arguments:**

    - `width`: the width of the input and output.
    - `heads`, `kv_heads`: query head h reads key head `h // (heads // kv_heads)`. None: `heads`.
    - `head_width`: the width of a head of q, k and v. None: `width / heads`.
    - `fused`: use one `qkv_proj` with rows q, k, v instead of `q_proj`, `k_proj`, `v_proj`.
    - `bias`: whether q, k and v have a bias. `out_bias`: whether the output projection has one.
    - `qk_norm`: RMSNorm with gains on every query and key head, before the rotation (Dehghani et
      al. 2023, arXiv 2302.05442; Qwen3's names).
    - `rotary`: a `Rotary`. Positions are 0, 1, ..., or continue those of a past. To choose them
      yourself, pass `angles` to `forward`.
    - `scaling`: where the scale is applied, see `headway.nn.scaling`. With `qk_norm`, "init" scales
      the gains of the query norm, since the norm cancels the size of the query weights.
    - `scale`: the factor of q kᵀ. None: `1/sqrt(head_width)`.
    - `sink`: whether each head has a learned logit that joins the softmax and has no value.
    - `dropout`: the probability of dropping an attention weight, in training mode.
    - `init`: a function that fills a projection's weight in place. None: as `nn.Linear`.
    - `backend`: as in `headway.attention`.

    Parameters are named as in Hugging Face's Llama and Qwen3, whose weights load.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_width: int | None = None,
        *,
        fused: bool = False,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rotary: Rotary | None = None,
        scaling: Scaling = "logits",
        scale: float | None = None,
        sink: bool = False,
        dropout: float = 0.0,
        init: Callable[[Tensor], Any] | None = None,
        backend: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        width, heads = count_of("width", width, 1), count_of("heads", heads, 1)
        kv_heads = heads if kv_heads is None else count_of("kv_heads", kv_heads, 1)
        if heads % kv_heads:
            raise ArgumentError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
        if head_width is None:
            if width % heads:
                raise ArgumentError(
                    f"width={width} must be a multiple of heads={heads}; or give head_width"
                )
            head_width = width // heads
        head_width = count_of("head_width", head_width, 1)
        norm_eps = number_of("norm_eps", norm_eps)
        fused, bias = flag_of("fused", fused), flag_of("bias", bias)
        out_bias, qk_norm = flag_of("out_bias", out_bias), flag_of("qk_norm", qk_norm)
        check_rotary(rotary)
        if rotary is not None and rotary.width > head_width:
            raise ArgumentError(
                f"rotary rotates {rotary.width} channels, but a head has {head_width}; pass "
                f"Rotary({head_width - head_width % 2}) or less"
            )
        scale = 1 / math.sqrt(head_width) if scale is None else scale
        super().__init__(width, heads, scale, scaling, sink, dropout, backend, init, device, dtype)
        self.kv_heads, self.head_width, self.rotary = kv_heads, head_width, rotary
        where = {"device": device, "dtype": dtype}
        q_rows, kv_rows = heads * head_width, kv_heads * head_width
        self.qkv_proj = nn.Linear(width, q_rows + 2 * kv_rows, bias, **where) if fused else None
        self.q_proj = None if fused else nn.Linear(width, q_rows, bias, **where)
        self.k_proj = None if fused else nn.Linear(width, kv_rows, bias, **where)
        self.v_proj = None if fused else nn.Linear(width, kv_rows, bias, **where)
        self.o_proj = nn.Linear(q_rows, width, out_bias, **where)
        self.q_norm = nn.RMSNorm(head_width, norm_eps, **where) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_width, norm_eps, **where) if qk_norm else None
        self.reset_parameters()

    def forward(
        self,
        x: Tensor,  # (b, length, width)
        mask: MaskFn | BlockMask | None = None,
        score: ScoreFn | None = None,
        *,
        angles: Angles | None = None,
        past: Past | Layer | None = None,
        layout: Layout | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Return the attention of `x`, `(b, length, width)`, in the same shape.

        - `mask`, `score`: as in `headway.attention`.
        - `angles`: `rotary.angles(positions)`, which a model computes once for all its layers.
        - `past`: the keys and values of earlier positions, which grow by these: a `Past`, or a
          layer of a cache of `headway.inference` after `reserve`. Positions are then global, so
          the score and mask of training apply unchanged, such as `causal()`.
        - `layout`: which tokens of the sequence this rank holds (`headway.distributed.Layout`).
          Score and mask are those of the whole sequence, and the rotation uses its positions.
        """
        if unknown:
            raise unknown_keywords(type(self).forward, unknown)
        self.check_input(x)
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            if angles is None:
                angles = self.angles_of(self.rotary, x, past, layout)
            q, k = self.rotary.rotate(q, angles), self.rotary.rotate(k, angles)
        elif angles is not None:
            raise ArgumentError("angles were given, but this attention has no rotary")
        return self.o_proj(self.attend(q, k, v, mask, score, past, layout))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(b, heads, length, head_width) each. The heads on a tensor-parallel rank are its own."""
        if self.qkv_proj is None:
            parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # type: ignore[misc]
        else:
            rows = [n * self.head_width for n in (self.heads, self.kv_heads, self.kv_heads)]
            qkv = self.qkv_proj(x)
            if qkv.shape[-1] != sum(rows):
                raise ArgumentError(
                    f"qkv_proj gave {qkv.shape[-1]} channels instead of {sum(rows)}: cut over "
                    "ranks, the rows of fused weights do not keep a head's q, k and v together; "
                    "use fused=False"
                )
            parts = qkv.split(rows, dim=-1)
        return tuple(p.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for p in parts)

    def query_side(self) -> list[tuple[Tensor, int]]:
        rows = self.heads * self.head_width
        if self.q_norm is not None:
            return [(self.q_norm.weight, self.head_width)]
        linear = self.q_proj if self.qkv_proj is None else self.qkv_proj
        assert linear is not None
        return [(p, rows) for p in (linear.weight, linear.bias) if p is not None]

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, head_width={self.head_width}, "
            f"scaling={self.scaling!r}, scale={self.scale:.6g}"
        )
