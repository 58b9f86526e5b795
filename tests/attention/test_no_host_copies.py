"""Calls that serve and calls over packed sequences wait for no device: nothing is read by the host.

The tensors are on "meta" and have no numbers, so the kernels do not run; what is around them does.
"""

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headway as hw
from headway import inference
from headway.compat import flash3, flash4
from headway.compat.flash import flash_attn_varlen_func
from headway.compat.torch_varlen import varlen_attn_with_stats

_READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero"}


class NoHostCopies(TorchDispatchMode):
    """A mode that fails on an operator which waits for the GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        on = lambda items: {x.device.type for x in tree_leaves(items) if isinstance(x, Tensor)}
        if "meta" in on((args, kwargs)) and (name in _READS or "cpu" in on(made)):
            raise AssertionError(f"{func} copies to the host")
        return made


@pytest.fixture(autouse=True)
def readable_as_on_a_gpu(monkeypatch):
    """Of a GPU's tensors the host may read numbers, if it waits; of those on "meta" it may not."""
    for name, module in list(sys.modules.items()):
        if name.startswith("headway.") and hasattr(module, "host_can_read"):
            monkeypatch.setattr(module, "host_can_read", lambda x: True)


def test_the_mode_finds_copies():
    x = torch.ones(3, device="meta")
    for read in (x.cpu, x.tolist, x.nonzero, lambda: bool(x[0]), lambda: torch.zeros(3).copy_(x)):
        with NoHostCopies(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            read()


def packed(tokens: int = 20):
    q = torch.randn(tokens, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(tokens, 2, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    return (
        q,
        k,
        k.detach().requires_grad_(),
        *(torch.zeros(4, dtype=torch.int32, device="meta") for _ in range(2)),
    )


def varlen(**options):
    q, k, v, cu_q, cu_k = packed()
    stats = hw.varlen_attention_with_stats(
        q, k, v, hw.softcap(3.0), hw.causal(), cu_q=cu_q, cu_k=cu_k, max_q=9, max_k=9, **options
    )
    (stats.out.sum() + stats.lse.sum()).backward()
    hw.varlen_attention(q, k, v, None, hw.causal(), cu_q=cu_q, max_q=9).sum().backward()


def flash():
    q, k, v, cu_q, cu_k = packed()
    slopes = torch.rand(4, device="meta")
    flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 9, 9, causal=True, window_size=(5, 0), alibi_slopes=slopes
    ).sum().backward()


def torch_varlen():
    q, k, v, cu_q, cu_k = packed()
    used = torch.ones(3, dtype=torch.int32, device="meta")
    varlen_attn_with_stats(
        q, k, v, cu_q, cu_k, 9, 9, seqused_k=used, enable_gqa=True
    ).lse.sum().backward()


def jagged():
    q, k, v, cu_q, cu_k = packed()
    rows = [
        torch.nested.nested_tensor_from_jagged(x.transpose(0, 1), cu, jagged_dim=2)
        for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))
    ]
    stats = hw.attention_with_stats(*rows, hw.softcap(3.0), hw.causal())
    (stats.out.values().sum() + stats.lse.values().sum()).backward()


def flash_3_and_4():
    """Packed, in padded rows and in pages, used in part, with functions of a sequence's places."""
    q, k, v, cu_q, cu_k = packed()
    padded = [x.unflatten(0, (4, 5)) for x in (q, k, v)]
    scale = torch.ones(3, 2, device="meta")
    flash3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 9, 9, ints(3), ints(3), causal=True, attention_chunk=4,
        q_descale=scale,
    ).sum().backward()  # fmt: skip
    flash4.flash_attn_varlen_func(
        *padded, seqused_k=ints(4), score_mod=lambda s, b, h, i, j: s + b - i,
        mask_mod=lambda b, h, i, j: (i + j + b) % 3 != 0,
    )[0].sum().backward()  # fmt: skip
    for trained in (True, False):
        options = {"cu_seqlens_q": cu_q, "page_table": ints(3, 2), "seqused_k": ints(3)}
        with torch.set_grad_enabled(trained):
            flash4.flash_attn_varlen_func(q, *padded[1:], **options, causal=True)
    lse = torch.zeros(2, 20, 4, device="meta")
    flash4.flash_attn_combine(torch.stack([q, q]), lse, cu_seqlens=cu_q, seqused=ints(3))


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="meta")


def decode():
    k, v = (torch.zeros(5, 2, 8, 16, device="meta", dtype=torch.bfloat16) for _ in range(2))
    q = torch.zeros(1, 4, 7, 16, device="meta", dtype=torch.bfloat16)
    new = torch.zeros(7, 2, 16, device="meta")
    inference.write(new, new, k, v, ints(7))
    options = {"lengths": ints(3), "page_table": ints(3, 2), "cu_q": ints(4), "max_q": 4}
    window = hw.causal() & hw.sliding_window(4)
    inference.attention(q, k, v, hw.softcap(3.0), window, out=torch.empty_like(q), **options)
    inference.attention_with_stats(q, k, v, mask=hw.tree(ints(3, 4), ints(3)), **options)
    levels = [(k, v, ints(1), ints(1, 2), ints(3)), (k, v, ints(3), ints(3, 2))]
    inference.cascade_with_stats(q, levels, None, hw.causal(), cu_q=ints(4), max_q=4)


@pytest.mark.parametrize("mode", [NoHostCopies, nullcontext])
@pytest.mark.parametrize("call", [varlen, jagged, flash, flash_3_and_4, torch_varlen, decode])
def test_nothing_is_copied_to_the_host(call, mode):
    """A mode makes every call one of operators, and no mode those that are found in caches."""
    with mode():
        call()
