"""What a user would pick instead: each peer prepares what it needs, and gives a call to time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

from headway.api import attention
from headway.mods import causal
from headway.mods.base import Both, Either, MaskFn

from . import flash4
from .case import Case, Inputs, Unavailable

MOST_BIAS = 1 << 30  # bytes of an explicit mask that a user might still afford


@dataclass(frozen=True)
class Peer:
    """`prepare(case, inputs)` gives the call, forward or build, or raises `Unavailable`.

    - `same`: it computes what Headway computes; its results are checked as well.
    - `backward`: on these device types it has one.
    - `per_tile`: compared by the time per live tile (of causal for the peer), not per call.
    - `by_rows`: it computes on copies that lie in memory as `Inputs.by_rows` says.
    - `package`: where it comes from, if not with PyTorch; a peer that is not installed is left out.
    """

    prepare: Callable[[Case, Inputs], Callable[[], Any]]
    note: str
    same: bool = True
    backward: tuple[str, ...] = ("cpu", "cuda")
    per_tile: bool = False
    by_rows: bool = False
    package: str = ""

    @property
    def installed(self) -> str | None:
        """The package and its version; "" if it needs none, None if it is not there."""
        try:
            return self.package and f"{self.package} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            return None


def _sdpa(case: Case, x: Inputs) -> Callable[[], Tensor]:
    gqa = case.hk != case.hq
    if x.score is None and (x.mask is None or x.mask == causal()):
        is_causal = x.mask is not None
        return partial(
            F.scaled_dot_product_attention, x.q, x.k, x.v, is_causal=is_causal, enable_gqa=gqa
        )
    return partial(
        F.scaled_dot_product_attention, x.q, x.k, x.v, attn_mask=_bias(case, x), enable_gqa=gqa
    )


def _bias(case: Case, x: Inputs) -> Tensor:
    """Mask, and score if it only adds a term, as one tensor (1 or b, 1 or hq, length, length)."""
    n, device, dtype = case.length, x.q.device, x.q.dtype
    heads = 1 if x.score is None else case.hq
    size = heads * n * n * dtype.itemsize
    if size > MOST_BIAS:
        raise Unavailable(f"its mask would take {size / 2**30:.0f} GiB")
    at = torch.arange(n, device=device)
    index = (torch.zeros(1, 1, 1, 1, device=device, dtype=torch.int64),
             torch.arange(heads, device=device)[:, None, None], at[:, None], at)  # fmt: skip
    with torch.no_grad():
        bias = torch.zeros(1, heads, n, n, device=device, dtype=dtype)
        if x.score is not None:
            bias.copy_(x.score(bias, *index))
        if x.mask is not None:
            bias.masked_fill_(~x.mask(*index), -torch.inf)
    return bias


def _sdpa_causal(case: Case, x: Inputs) -> Callable[[], Tensor]:
    return partial(
        F.scaled_dot_product_attention, x.q, x.k, x.v, is_causal=True,
        enable_gqa=case.hk != case.hq,
    )  # fmt: skip


def _flex(case: Case, x: Inputs) -> Callable[[], Tensor]:
    score, mask, n = x.score, x.mask, case.length
    blocks = score_mod = None
    if mask is not None:
        blocks = flex.create_block_mask(mask_mod(mask), None, None, n, n, device=x.q.device)
    if score is not None:
        of_score = score.__call__
        score_mod = lambda s, b, h, i, j: of_score(s, b, h, i, j)
    # A fresh start: past eight mods the compiler gives up on a function, and shapes become dynamic.
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)
    tensors = (x.q, x.k, x.v)
    if x.q.device.type == "cpu":
        tensors = tuple(t.detach() for t in tensors)
    call = partial(
        compiled, *tensors, score_mod=score_mod, block_mask=blocks, enable_gqa=case.hk != case.hq
    )
    try:
        with torch.set_grad_enabled(x.q.device.type != "cpu"):
            call()
    except Exception as error:
        raise Unavailable.because(error) from error
    return call


def mask_mod(mask: MaskFn) -> Callable[..., Tensor]:
    """A mask as FlexAttention's users write it: it inspects functions, and torch 2.11 asks a value
    that it calls whether it is true."""
    if isinstance(mask, Both | Either):
        of_parts = [mask_mod(part) for part in (mask.first, mask.second)]
        join = flex.and_masks if isinstance(mask, Both) else flex.or_masks
        return join(*of_parts)
    of_mask = mask.__call__
    return lambda b, h, i, j: of_mask(b, h, i, j)


def _create_block_mask(case: Case, x: Inputs) -> Callable[[], Any]:
    assert x.mask is not None
    return partial(
        flex.create_block_mask, x.mask, None, None, case.length, case.length, x.q.device,
        BLOCK_SIZE=128,
    )  # fmt: skip


def _cudnn(case: Case, x: Inputs) -> Callable[[], Tensor]:
    if x.score is not None or x.mask not in (None, causal()):
        raise Unavailable("it takes a causal mask or none")
    call = _sdpa(case, x)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call()

    try:
        cudnn()
    except RuntimeError as error:
        raise Unavailable(str(error).splitlines()[0][:200]) from error
    return cudnn


def _plain(case: Case, x: Inputs) -> Callable[[], Tensor]:
    return lambda: attention(x.q, x.k, x.v, mask=x.mask)


def _triton(case: Case, x: Inputs) -> Callable[[], Tensor]:
    if case.stats:
        raise Unavailable("without statistics only")
    return lambda: attention(x.q, x.k, x.v, x.score, x.mask, backend="triton")


def _causal_per_tile(case: Case, x: Inputs) -> Callable[[], Tensor]:
    return partial(x.headway, mask=causal())


PEERS = {
    "sdpa": Peer(
        _sdpa,
        "F.scaled_dot_product_attention: is_causal where that is the mask, else a float mask",
    ),
    "sdpa causal": Peer(
        _sdpa_causal,
        "F.scaled_dot_product_attention(is_causal=True), without this case's score and window",
        same=False,
    ),
    "cudnn": Peer(
        _cudnn,
        "F.scaled_dot_product_attention by cuDNN, on a GPU",
        backward=("cuda",),
    ),
    "flash-attention-4": Peer(
        flash4.prepare,
        "flash_attn.cute, on a GPU: causal, window, documents, softcap",
        backward=("cuda",),
        by_rows=True,
        package="flash-attn-4",
    ),
    "headway plain": Peer(
        _plain, "Headway on the same tensors and mask, without the score", same=False
    ),
    "headway triton": Peer(
        _triton,
        "Headway's portable GPU backend, where another one is the default",
        backward=("cuda",),
    ),
    "flex": Peer(
        _flex,
        "flex_attention under torch.compile, block mask prepared; forward only on CPU",
        backward=("cuda",),
    ),
    "create_block_mask": Peer(
        _create_block_mask, "FlexAttention's block masks: create_block_mask as it is called there"
    ),
    "causal, per tile": Peer(
        _causal_per_tile,
        "Headway with causal() on the same tensors; times per live tile of 128 x 128",
        same=False,
        per_tile=True,
    ),
}
