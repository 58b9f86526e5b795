"""Multi-head latent attention, as in DeepSeek-V2, DeepSeek-V3 and Kimi K2."""

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
from .past import Past, check_past, length_of
from .rotary import Angles, Rotary, YaRN, check_rotary
from .scaling import ScaledAttention, Scaling

_EXPANDED = 2 << 30  # bytes of the keys and values that a rank expands for itself
_ROPE_KEYS = "rope_type type rope_theta".split()
_YARN_KEYS = (
    "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim".split()
)


class MLA(ScaledAttention):
    """Keys and values from one small latent per token, and one rotary key shared by all heads.

    (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv 2412.19437, section 2.1.1)

        q_h = [q_nope_h | rotate(q_rope_h)]    from W_qb norm(W_qa x), or W_q x without q_lora_rank
        k_h = [k_nope_h | rotate(k_rope)]      [c | k_rope] = W_kva x
                                               [k_nope_h | v_h] = W_kvb norm(c)

    Query and key are `nope_width + rope_width` wide, the value `value_width`; they go to the kernel
    as they are. Parameters have Hugging Face's names and shapes (`DeepseekV3Attention`).

    **Arguments:**

    - `width`: the width of the input and output. `heads`: heads of query, key and value alike.
    - `q_lora_rank`: the width of the query's latent. None: no latent (DeepSeek-V2-Lite, Moonlight).
    - `kv_lora_rank`: the width of the latent c.
    - `rotary`: a `Rotary` of `rope_width`. None: interleaved, with base 10 000. Its YaRN enters the
      scale.
    - `bias`: whether the down projections and the output have a bias (`attention_bias` in Hugging
      Face).
    - `norm_eps`: the epsilon of the two latent norms.
    - `scale`: the factor of q kᵀ. None: `m² / sqrt(nope_width + rope_width)`, where m² is
      `YaRN.softmax_factor`.
    - `scaling`, `dropout`, `init`, `backend`: as in `Attention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = 512,
        nope_width: int = 128,
        rope_width: int = 64,
        value_width: int = 128,
        rotary: Rotary | None = None,
        bias: bool = False,
        norm_eps: float = 1e-6,
        scaling: Scaling = "logits",
        scale: float | None = None,
        dropout: float = 0.0,
        init: Callable[[Tensor], Any] | None = None,
        backend: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        bias = flag_of("bias", bias)
        width, heads = count_of("width", width, 1), count_of("heads", heads, 1)
        q_lora_rank = None if q_lora_rank is None else count_of("q_lora_rank", q_lora_rank, 1)
        kv_lora_rank = count_of("kv_lora_rank", kv_lora_rank, 1)
        nope_width = count_of("nope_width", nope_width)
        rope_width = count_of("rope_width", rope_width)
        value_width = count_of("value_width", value_width)
        norm_eps = number_of("norm_eps", norm_eps)
        rotary = Rotary(rope_width, interleaved=True) if rotary is None else rotary
        check_rotary(rotary)
        if rotary.width != rope_width:
            raise ArgumentError(f"{rotary} must turn all rope_width={rope_width} channels")
        if scale is None:
            scale = 1.0 if rotary.yarn is None else rotary.yarn.softmax_factor
            scale /= math.sqrt(nope_width + rope_width)
        super().__init__(width, heads, scale, scaling, False, dropout, backend, init, device, dtype)
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.nope_width, self.rope_width, self.value_width = nope_width, rope_width, value_width
        self.rotary = rotary
        where = {"device": device, "dtype": dtype}
        q_rows = heads * (nope_width + rope_width)
        lora = q_lora_rank is not None
        self.q_proj = None if lora else nn.Linear(width, q_rows, bias=False, **where)
        self.q_a_proj = nn.Linear(width, q_lora_rank, bias, **where) if lora else None
        self.q_a_layernorm = nn.RMSNorm(q_lora_rank, norm_eps, **where) if lora else None
        self.q_b_proj = nn.Linear(q_lora_rank, q_rows, bias=False, **where) if lora else None
        self.kv_a_proj_with_mqa = nn.Linear(width, kv_lora_rank + rope_width, bias, **where)
        self.kv_a_layernorm = nn.RMSNorm(kv_lora_rank, norm_eps, **where)
        kv_rows = heads * (nope_width + value_width)
        self.kv_b_proj = nn.Linear(kv_lora_rank, kv_rows, bias=False, **where)
        self.o_proj = nn.Linear(heads * value_width, width, bias, **where)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> "MLA":
        """The module of a Hugging Face configuration (`DeepseekV3Config` and its like): load its
        attention weights with `load_state_dict`. `options` are those of the constructor.

        **Raises:** `ArgumentError` for a kind of rotary scaling other than YaRN.
        """
        rope = (
            getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        )
        kind = rope.get("rope_type", rope.get("type", "default"))
        known_keys = {*_ROPE_KEYS, *(_YARN_KEYS if kind == "yarn" else ())}
        if unknown := {key for key, value in rope.items() if value is not None} - known_keys:
            raise ArgumentError(
                f"MLA does not know {sorted(unknown)} of the configuration's {rope}"
            )
        yarn = None
        if kind == "yarn":
            original = rope["original_max_position_embeddings"]
            yarn = YaRN(
                factor=rope.get("factor") or config.max_position_embeddings / original,
                original_length=original,
                beta_fast=rope.get("beta_fast") or 32.0,
                beta_slow=rope.get("beta_slow") or 1.0,
                mscale=rope.get("mscale") or 0.0,
                mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
            )
        elif kind != "default":
            raise ArgumentError(
                f"rope_type={kind!r} of the configuration: MLA knows default and yarn"
            )
        theta = rope.get("rope_theta") or config.rope_theta
        interleaved = bool(getattr(config, "rope_interleave", True))
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            nope_width=config.qk_nope_head_dim,
            rope_width=config.qk_rope_head_dim,
            value_width=config.v_head_dim,
            rotary=Rotary(config.qk_rope_head_dim, theta, interleaved, yarn),
            bias=config.attention_bias,
            **{"dropout": config.attention_dropout, **options},
        )

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
        """Return `(b, length, width)`, as `Attention.forward` does.

        `past` holds a latent and a rotary key per token, `(b, 1, length, kv_lora_rank +
        rope_width)`. A cache for it has one key head of that width, and `dv=0`.

        With a `layout`, ranks exchange latents if the keys and values of all heads and tokens take
        at most 2 GiB. Otherwise they exchange keys and values, head by head.
        """
        if unknown:
            raise unknown_keywords(type(self).forward, unknown)
        self.check_input(x)
        if angles is None:
            angles = self.angles_of(self.rotary, x, past, layout)
        if self.q_proj is not None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))  # type: ignore[misc]
        q = q.unflatten(-1, (-1, self.nope_width + self.rope_width)).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope_width, self.rope_width], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.rope_width], -1)
        latent, k_rope = self.kv_a_layernorm(latent), self.rotary.rotate(k_rope[:, None], angles)
        q = torch.cat((q_nope, self.rotary.rotate(q_rope, angles)), dim=-1)
        if past is not None:
            if layout is not None:
                raise ArgumentError(
                    "a past and a layout do not go together: decode without a layout"
                )
            latents = torch.cat((latent[:, None], k_rope), dim=-1)
            return self.o_proj(self._attend_latents(q, latents, mask, score, past))
        where: Any = layout
        if layout is not None and self._latents_travel(layout, latent):
            rows = layout.unshard(torch.cat((latent, k_rope[:, 0]), dim=-1), 1)
            latent, k_rope = rows.split([self.kv_lora_rank, self.rope_width], dim=-1)
            k_rope, where = k_rope[:, None], (layout, None)
        return self.o_proj(
            self.attend(q, *self._expanded(latent, k_rope), mask, score, None, where)
        )

    def _latents_travel(self, layout: Layout, latent: Tensor) -> bool:
        """Return whether ranks exchange latents and expand them locally, instead of exchanging keys
        and values. Latents are smaller (1.2 kB a token for 82 kB in DeepSeek-V3), but every rank
        then needs room for the keys and values of all tokens."""
        expanded = self.heads * (self.nope_width + self.rope_width + self.value_width)
        expanded_bytes = len(latent) * layout.length * expanded * latent.element_size()
        return self.kv_lora_rank + self.rope_width < expanded and expanded_bytes <= _EXPANDED

    def _expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head from latents `(b, length, rank)` and the shared rotary keys
        `(b, 1, length, rope_width)`."""
        kv = self.kv_b_proj(latent)
        kv = kv.unflatten(-1, (-1, self.nope_width + self.value_width)).transpose(1, 2)
        k_nope, v = kv.split([self.nope_width, self.value_width], dim=-1)
        return torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1), v

    def _attend_latents(
        self, q: Tensor, new: Tensor, mask: Any, score: Any, past: Past | Layer
    ) -> Tensor:
        """Attention over what `past` keeps, and these `(b, 1, length, rank + rope_width)`. A
        prompt, and what is trained, by keys and values of every head; what follows by the latents
        themselves, of which there is one for all heads.

        W_kvb is taken to the other side of both products (DeepSeek-V2, section 2.1.2):
        q_nope · (W_k c) = (W_kᵀ q_nope) · c, and Σ p (W_v c) = W_v Σ p c.
        """
        check_past(mask, past)
        rank = self.kv_lora_rank
        if isinstance(past, Layer):
            past.append(new)
            return self._absorbed(q, past.k, mask, score, past.options)
        before, total = length_of(past), past.length + new.shape[2]
        kept, nothing = past.extended(new, new[..., :0])
        if before and not torch.is_grad_enabled() and not (self.training and self.dropout):
            lengths = torch.full((len(q),), total, dtype=torch.int32, device=q.device)
            out = self._absorbed(q, kept, mask, score, {"lengths": lengths})
        else:
            latent, k_rope = kept[:, :, :total].split([rank, self.rope_width], dim=-1)
            k, v = self._expanded(latent[:, 0], k_rope)
            out = self.trained(q, k, v, mask, score, before).transpose(1, 2).flatten(2)
        past.keep(kept, nothing, total)
        return out

    def _absorbed(
        self, q: Tensor, latents: Tensor, mask: Any, score: Any, options: dict[str, Any]
    ) -> Tensor:
        weight = self.kv_b_proj.weight.unflatten(0, (-1, self.nope_width + self.value_width))
        of_k, of_v = weight.split([self.nope_width, self.value_width], dim=1)
        q_nope, q_rope = q.split([self.nope_width, self.rope_width], dim=-1)
        q = torch.cat((q_nope @ of_k, q_rope), dim=-1)  # (b, h, length, rank + rope_width)
        out = self.inferred(q, latents, latents[..., : self.kv_lora_rank], mask, score, options)
        return (out @ of_v.mT).transpose(1, 2).flatten(2)

    def query_side(self) -> list[tuple[Tensor, int]]:
        linear = self.q_proj if self.q_b_proj is None else self.q_b_proj
        assert linear is not None
        return [(linear.weight, linear.weight.shape[0])]

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, nope_width={self.nope_width}, rope_width={self.rope_width}, "
            f"value_width={self.value_width}, scaling={self.scaling!r}, scale={self.scale:.6g}"
        )
