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

    - `width`: of the input and output.
    - `heads`, `kv_heads`: query head h reads key head `h // (heads // kv_heads)`; `kv_heads` is
      `heads` if None.
    - `head_width`: of q, k and v; `width / heads` if None.
    - `fused`: one `qkv_proj` with rows q, k, v instead of `q_proj`, `k_proj`, `v_proj`.
    - `bias`: of q, k and v; `out_bias`: of the output projection.
    - `qk_norm`: RMSNorm with gains on every query and key head, before the rotation (Dehghani et
      al. 2023, arXiv 2302.05442; Qwen3's names).
    - `rotary`: a `Rotary`; positions are 0, 1, ..., or follow those of a past, unless `forward` is
      given `angles`.
    - `scaling`: where the scale lives, see `headway.nn.scaling`; with `qk_norm`, which erases the
      size of the query weights, "init" is in the gains of the query norm.
    - `scale`: `1/sqrt(head_width)` if None.
    - `sink`: a learned logit per head that joins the softmax but has no value.
    - `dropout`: of attention weights, in training.
    - `init`: fills a projection's weight in place, instead of `nn.Linear`'s own initialisation.
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
        head_width, norm_eps = (
            count_of("head_width", head_width, 1),
            number_of("norm_eps", norm_eps),
        )
        fused, bias = flag_of("fused", fused), flag_of("bias", bias)
        out_bias, qk_norm = flag_of("out_bias", out_bias), flag_of("qk_norm", qk_norm)
        check_rotary(rotary)
        if rotary is not None and rotary.width > head_width:
            raise ArgumentError(f"{rotary} turns more channels than a head has, {head_width}")
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
        """`x` and the result: `(b, length, width)`.

        `mask` and `score` as in `headway.attention`; `angles` from `rotary.angles(positions)`,
        which a model makes once for all its layers; `past` holds the positions before these and
        grows by them: a `Past`, or a layer of a cache of `headway.inference`, whose `reserve` was
        told of these tokens. Positions are then global, so mask and score are those of training:
        `causal()`. `layout` says which tokens of a sequence `x` holds that is cut over ranks
        (`headway.distributed.Layout`): mask and score are those of the whole, and the rotation
        takes the layout's positions.
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
