"""What PyTorch has for one sequence over many cards."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex_module

from headway.distributed import Layout

from .case import Inputs, Unavailable
from .peers import mask_mod

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def context_parallel() -> Any:
    """PyTorch's. While it is entered, `F.scaled_dot_product_attention` is over ranks, in the order
    in which its load balancing deals: that of `Layout.zigzag`."""
    from torch.distributed.tensor import experimental

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
    # It cuts buffers up. The bench's are cut already; this one is of no use.
    dummy = torch.empty(1, 2 * ranks, device="cuda")
    return experimental.context_parallel(mesh, buffers=[dummy], buffer_seq_dims=[1])


def sdpa(mine: Inputs, kernel: str) -> Callable[[], Tensor]:
    """A causal `F.scaled_dot_product_attention` of one kernel, inside of `context_parallel`."""
    grouped = mine.q.shape[1] != mine.k.shape[1]

    def run() -> Tensor:
        with sdpa_kernel(KERNELS[kernel]):
            return F.scaled_dot_product_attention(
                mine.q, mine.k, mine.v, is_causal=True, enable_gqa=grouped
            )

    return run


def flex(mine: Inputs, layout: Layout) -> Callable[[], Tensor]:
    """FlexAttention, compiled, over keys that all ranks gather first."""
    try:
        from torch.distributed.tensor.experimental._context_parallel._attention import (
            flex_cp_allgather as gather,
        )
    except ImportError:
        raise Unavailable("this PyTorch has no context parallel of FlexAttention") from None
    if mine.mask is None:
        raise Unavailable("timed with masks only")
    mask, name = mask_mod(mine.mask), dist.group.WORLD.group_name  # type: ignore[union-attr]
    sizes = torch.tensor(layout.sizes)
    if bool((sizes != sizes[0]).any()):
        raise Unavailable("its ranks hold as many tokens each")
    at = layout.positions.to("cuda")
    places = [torch.empty_like(at) for _ in sizes]
    dist.all_gather(places, at)
    there = torch.cat(places)

    def kept(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask(b, h, at[i], there[j])

    blocks = torch.compile(flex_module.create_block_mask)(
        kept, None, None, len(at), len(there), device="cuda"
    )
    # A backward is timed many times on one forward.
    torch._functorch.config.donated_buffer = False  # type: ignore[bad-assignment]
    attend = torch.compile(flex_module.flex_attention)

    def run() -> Tensor:
        k, v = gather(mine.k, mine.v, 2, name)
        return attend(
            mine.q, k, v, block_mask=blocks, enable_gqa=mine.q.shape[1] != mine.k.shape[1]
        )

    return run
