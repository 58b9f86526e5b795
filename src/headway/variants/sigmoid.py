"""Sigmoid attention, by the softmax and its log-sum-exp."""

from typing import Never

from torch import Tensor

from ..api import attention_with_stats
from ..arguments import check_function, check_tensors
from ..blocks import BlockMask
from ..keywords import unknown_keywords
from ..mods import log_sigmoid
from ..mods.base import MaskFn, ScoreFn


def sigmoid_attention(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    v: Tensor,  # (b, hk, kv_len, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    bias: float | Tensor,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    **unknown: Never,
) -> Tensor:
    """Return the sum of sigmoid(score(scale · q kᵀ) + bias) v over the keys that `mask` keeps.

    There is no softmax: each key has its own weight, between 0 and 1. Forward and backward are
    exact on every backend and cost as much as `attention`. A query that attends to no key gets 0.

    It is computed from the softmax of T = log(sigmoid(score + bias)) and its log-sum-exp:
    sum_j exp(T_j) v_j = exp(lse) · (sum_j exp(T_j) v_j / exp(lse)).

    **Arguments:** as `attention`, without `sink`, which only a softmax has, and

    - `bias`: a number, or a float tensor `()` or `(hq,)`, which can be trained. It has no default,
      since nothing keeps the sum small: with a bias of 0, the output grows with the number of keys
      n. The paper uses `-math.log(n)`: the output then starts about as large as a softmax's.

    **Returns:** `(b, hq, q_len, dv)`, in the dtype of q. In bfloat16 and float16 it is rounded
    twice: before and after the multiplication by exp(lse), which is computed in float32 and lies
    between 0 and the number of keys. (float16 has no number above 65504.)

    **Raises:** as `attention`.

        bias = -math.log(k.shape[2])
        out = headway.sigmoid_attention(q, k, v, mask=headway.causal(), bias=bias)

    (Ramapuram et al. 2024, Theory, Analysis, and Best Practices for Sigmoid Self-Attention,
    arXiv 2409.04431, equation 3)
    """
    if unknown:
        raise unknown_keywords(sigmoid_attention, unknown)
    sigmoid_score = log_sigmoid(bias)
    check_tensors(q, k, v)
    if score is not None:
        check_function("score", score, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
        sigmoid_score = score >> sigmoid_score
    out, lse, _ = attention_with_stats(
        q, k, v, sigmoid_score, mask, scale=scale, dropout=dropout, seed=seed,
        deterministic=deterministic, backend=backend,
    )  # fmt: skip
    return (out * lse.exp()[..., None]).to(out.dtype)
