"""Peers: what a user would pick instead. Each prepares its tensors and returns a call to time.

FlashAttention-4's tensors are (b, length, heads, width), or (tokens, heads, width) where documents
are packed. Those over several GPUs are in ranks_process.py.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

from headway.api import attention
from headway.mods import alibi, causal, document, sliding_window, softcap
from headway.mods.base import Both, Either, MaskFn

from . import cute_mods
from .case import Case, CaseInputs, Unavailable, tilted


def _flash4(case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    """Return the call, compiled; `x` should lie in memory as `CaseInputs.by_rows` returns it."""
    options = flash4_options(inputs)
    if "cu_seqlens_q" not in options:
        return _flash4_call(inputs, options)

    def call(flash: Any) -> Tensor:
        tokens = (t.transpose(1, 2).flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v))
        out, _ = flash.flash_attn_varlen_func(*tokens, **options)
        return out.unflatten(0, (inputs.q.shape[0], -1)).transpose(1, 2)

    return _compiled("flash_attn.cute.interface", call)


def _flash4_call(inputs: CaseInputs, options: dict[str, Any]) -> Callable[[], Tensor]:
    """Return a call of `flash_attn_func`, compiled."""

    def call(flash: Any) -> Tensor:
        tensors = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        out, _ = flash.flash_attn_func(*tensors, **options)
        return out.transpose(1, 2)

    return _compiled("flash_attn.cute.interface", call)


def _compiled(module: str, call: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    """Return a call of a module that may be missing, after a first one, or raise `Unavailable`."""
    try:
        bound = partial(call, importlib.import_module(module))
        bound()
    except Exception as error:  # of its compiler too
        raise Unavailable.because(error) from error
    return bound


def flash4_options(inputs: CaseInputs) -> dict[str, Any]:
    """Return the arguments of FlashAttention-4 for a mask and score, or raise `Unavailable`."""
    options: dict[str, Any] = {}
    if isinstance(inputs.score, softcap):
        options["softcap"] = inputs.score.cap
    elif inputs.score is not None:
        raise Unavailable("of the scores it has softcap only")
    for part in _conjuncts(inputs.mask):
        if part == causal():
            options["causal"] = True
        elif isinstance(part, sliding_window) and "window_size" not in options:
            options["window_size"] = (part.window - 1, part.window - 1)
        elif isinstance(part, document) and "cu_seqlens_q" not in options:
            options |= _cu_seqlens(part, inputs.q.shape[0])
        else:
            raise Unavailable("of the masks it has causal, windows, documents and their &")
    if options.get("causal") and "window_size" in options:
        options["window_size"] = (options["window_size"][0], 0)
    return options


def _flash4_scored(case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    """Return a call with the case's score in FlashAttention-4's own language, and with identity
    where the case has none: what a score function costs by itself."""
    if inputs.mask not in (None, causal()):
        raise Unavailable("its score functions are timed with a causal mask or none")
    options: dict[str, Any] = {"causal": inputs.mask is not None}
    if inputs.score is None:
        score = cute_mods.IDENTITY
    elif isinstance(inputs.score, tilted):
        score = cute_mods.TILTED
    elif isinstance(inputs.score, alibi) and inputs.mask is not None and not inputs.learned:
        score, options["aux_tensors"] = cute_mods.ALIBI, [inputs.score.slopes.float()]
    else:
        raise Unavailable("of the scores it has here causal ALiBi, the user's, and identity")
    options |= {"score_mod": score.forward, "score_mod_bwd": score.backward}
    return _flash4_call(inputs, options)


def _flash4_sparse(case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    """Return a call with the case's mask in FlashAttention-4's own language, and lists of blocks
    that PyTorch's `create_block_mask` makes before, as its users do."""
    others = [part for part in _conjuncts(inputs.mask) if part != causal()]
    if inputs.score is not None or not isinstance(inputs.mask, Both) or len(others) != 1:
        raise Unavailable("its lists of blocks are timed with causal windows and documents")
    options: dict[str, Any] = {}
    if isinstance(others[0], sliding_window):
        options["mask_mod"] = cute_mods.causal_window(others[0].window)
    elif isinstance(others[0], document) and others[0].kv_ids is None and others[0].ids.dim() == 1:
        options |= {"mask_mod": cute_mods.causal_documents, "aux_tensors": [others[0].ids.int()]}
    else:
        raise Unavailable("its lists of blocks are timed with causal windows and documents")
    n, blocks = case.length, (128, 128)  # its backward on Hopper takes no others
    lists = flex.create_block_mask(
        mask_mod(inputs.mask), None, None, n, n, device=inputs.q.device, BLOCK_SIZE=blocks
    )
    kinds = ("num_blocks", "indices")
    try:
        sparsity: Any = importlib.import_module("flash_attn.cute.block_sparsity")
        for argument, side in (("", "kv"), ("_bwd", "q")):
            partial_blocks = (getattr(lists, f"{side}_{kind}") for kind in kinds)
            full_blocks = (getattr(lists, f"full_{side}_{kind}") for kind in kinds)
            options[f"block_sparse_tensors{argument}"] = sparsity.BlockSparseTensorsTorch(
                *partial_blocks, *full_blocks, block_size=blocks
            )
    except Exception as error:
        raise Unavailable.because(error) from error
    return _flash4_call(inputs, options)


def _varlen(case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    """Return a call of PyTorch's `varlen_attn`; rows are documents where the mask names none."""
    options = flash4_options(inputs)
    if "softcap" in options:
        raise Unavailable("it has no score")
    b, _, n, _ = inputs.q.shape
    left, right = options.get("window_size", (-1, -1))
    window = (left, 0 if options.get("causal") else right)
    rows = n * torch.arange(b + 1, dtype=torch.int32, device=inputs.q.device)
    ends = options.get("cu_seqlens_q", rows)
    longest = options.get("max_seqlen_q", n)
    gqa = {"enable_gqa": True} if case.hq != case.hk else {}

    def call(varlen: Any) -> Tensor:
        tokens = (t.transpose(1, 2).flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v))
        lengths = ends, ends, longest, longest
        out = varlen.varlen_attn(*tokens, *lengths, window_size=window, **gqa)
        return out.unflatten(0, (b, n)).transpose(1, 2)

    return _compiled("torch.nn.attention.varlen", call)


def _cudnn_flex(case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    """Return a call of cuDNN's `flex_attn_func`, whose plan of the mask is made before."""
    if inputs.score is not None:
        raise Unavailable("it has no score")
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    try:
        cudnn: Any = importlib.import_module("cudnn")
        table = interval_ends(inputs.mask, case.length, q.device).repeat(1, 1, case.b)
        plan = cudnn.create_mask_plan(table, q, k, v, build_backward=True)
        call = lambda: cudnn.flex_attn_func(q, k, v, mask_plan=plan).transpose(1, 2)
        call()
    except Exception as error:  # of its compiler too
        raise Unavailable.because(error) from error
    return call


def interval_ends(mask: MaskFn | None, n: int, device: torch.device) -> Tensor:
    """Return int32 `(1, ends, n)`, a mask as cuDNN takes it: query i attends to the keys
    [0, e0), [e1, e2), [e3, e4), ... of its column. It is the same for every batch and head."""
    zero, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(n, device=device)
    rows: list[Tensor] = []  # where runs of keys start and end, of every query
    for i in keys[:, None].split(256):
        kept = torch.ones(len(i), n, dtype=torch.bool, device=device)
        if mask is not None:
            kept = mask(zero, zero, i, keys).expand_as(kept)
        rows += [edges.nonzero()[:, 0] for edges in F.pad(kept, (1, 0)) ^ F.pad(kept, (0, 1))]
    if not all(len(row) and row[0] == 0 for row in rows):
        rows = [F.pad(row, (2, 0)) for row in rows]  # an empty first interval, [0, 0)
    most = max(map(len, rows))
    padded = [F.pad(row, (0, most - len(row)), value=n)[1:] for row in rows]
    return torch.stack(padded, 1).int()[None].contiguous()


def _conjuncts(mask: object) -> list[object]:
    """Return the masks that a chain of `&` joins."""
    if isinstance(mask, Both):
        return _conjuncts(mask.first) + _conjuncts(mask.second)
    return [] if mask is None else [mask]


def _cu_seqlens(documents: document, b: int) -> dict[str, Any]:
    """Return cumulative lengths and the longest document, over concatenated rows."""
    ids = documents.ids
    if ids.dim() != 1 or documents.kv_ids is not None:
        raise Unavailable("its documents here are those of one row, the same for queries and keys")
    of_runs, lengths = torch.unique_consecutive(ids, return_counts=True)
    if len(of_runs) != len(ids.unique()):
        raise Unavailable("a document of its is in one piece")
    ends = torch.nn.functional.pad(lengths.repeat(b).cumsum(0), (1, 0)).int()
    names = {"cu_seqlens": ends, "max_seqlen": int(lengths.max())}
    return {f"{name}_{side}": value for name, value in names.items() for side in "qk"}


MOST_BIAS = 1 << 30  # bytes of an explicit mask that a user might still afford


@dataclass(frozen=True)
class Peer:
    """`prepare(case, inputs)` gives the call, forward or build, or raises `Unavailable`.

    - `same`: it computes what Headway computes; its results are checked as well.
    - `backward`: on these device types it has one.
    - `per_tile`: compared by the time per live tile (of causal for the peer), not per call.
    - `by_rows`: it computes on copies that lie in memory as `CaseInputs.by_rows` says.
    - `package`: where it comes from, if not with PyTorch; a peer that is not installed is left out.
    """

    prepare: Callable[[Case, CaseInputs], Callable[[], Any]]
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


def _sdpa(case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    if inputs.score is None and (inputs.mask is None or inputs.mask == causal()):
        return sdpa_call(inputs, is_causal=inputs.mask is not None)
    return sdpa_call(inputs, attn_mask=_bias(case, inputs))


def sdpa_call(inputs: CaseInputs, **options: Any) -> Callable[[], Tensor]:
    """Return a call of `F.scaled_dot_product_attention`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    gqa = q.shape[1] != k.shape[1]
    return partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=gqa, **options)


def _bias(case: Case, inputs: CaseInputs) -> Tensor:
    """Return mask and additive score as one tensor, (1 or b, 1 or hq, length, length)."""
    n, device, dtype = case.length, inputs.q.device, inputs.q.dtype
    heads = 1 if inputs.score is None else case.hq
    size = heads * n * n * dtype.itemsize
    if size > MOST_BIAS:
        raise Unavailable(f"its mask would take {size / 2**30:.0f} GiB")
    positions = torch.arange(n, device=device)
    index = (
        torch.zeros(1, 1, 1, 1, device=device, dtype=torch.int64),
        torch.arange(heads, device=device)[:, None, None],
        positions[:, None],
        positions,
    )
    with torch.no_grad():
        bias = torch.zeros(1, heads, n, n, device=device, dtype=dtype)
        if inputs.score is not None:
            bias.copy_(inputs.score(bias, *index))
        if inputs.mask is not None:
            bias.masked_fill_(~inputs.mask(*index), -torch.inf)
    return bias


def _flex(case: Case, inputs: CaseInputs, **kernel: Any) -> Callable[[], Tensor]:
    """Return the compiled call. `kernel`: its `kernel_options`."""
    score, mask, n = inputs.score, inputs.mask, case.length
    blocks = score_mod = None
    if mask is not None:
        blocks = flex.create_block_mask(mask_mod(mask), None, None, n, n, device=inputs.q.device)
    if score is not None:
        of_score = score.__call__
        score_mod = lambda s, b, h, i, j: of_score(s, b, h, i, j)
    # A fresh start: past eight mods the compiler gives up on a function, and shapes become dynamic.
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)
    tensors = (inputs.q, inputs.k, inputs.v)
    if inputs.q.device.type == "cpu":
        tensors = tuple(t.detach() for t in tensors)
    call = partial(
        compiled,
        *tensors,
        score_mod=score_mod,
        block_mask=blocks,
        enable_gqa=case.hk != case.hq,
        kernel_options=kernel or None,
    )
    try:
        with torch.set_grad_enabled(inputs.q.device.type != "cpu"):
            call()
    except Exception as error:
        raise Unavailable.because(error) from error
    return call


def mask_mod(mask: MaskFn) -> Callable[..., Tensor]:
    """Return a mask as a plain function: torch 2.11 takes the truth of a value that it calls."""
    if isinstance(mask, Both | Either):
        of_parts = [mask_mod(part) for part in (mask.first, mask.second)]
        join = flex.and_masks if isinstance(mask, Both) else flex.or_masks
        return join(*of_parts)
    of_mask = mask.__call__
    return lambda b, h, i, j: of_mask(b, h, i, j)


def _create_block_mask(case: Case, inputs: CaseInputs) -> Callable[[], Any]:
    assert inputs.mask is not None
    n, device = case.length, inputs.q.device
    return partial(flex.create_block_mask, inputs.mask, None, None, n, n, device, BLOCK_SIZE=128)


def _cudnn(case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    if inputs.score is not None or inputs.mask not in (None, causal()):
        raise Unavailable("it takes a causal mask or none")
    call = with_kernel(SDPBackend.CUDNN_ATTENTION, _sdpa(case, inputs))
    try:
        call()
    except RuntimeError as error:
        raise Unavailable(str(error).splitlines()[0][:200]) from error
    return call


def with_kernel(kernel: SDPBackend, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a call of `F.scaled_dot_product_attention` that runs one of its kernels."""

    def run() -> Tensor:
        with sdpa_kernel(kernel):
            return call()

    return run


def _triton(case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    if case.stats:
        raise Unavailable("without statistics only")
    return partial(inputs.headway, backend="triton")


def _deterministic(backend: str, case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    return partial(inputs.headway, backend=backend, deterministic=True)


def _sdpa_dropout(
    kernel: SDPBackend | None, case: Case, inputs: CaseInputs
) -> Callable[[], Tensor]:
    """Return a call of F.sdpa with dropout, by one kernel or the one that PyTorch chooses."""
    if inputs.score is not None or inputs.mask not in (None, causal()):
        raise Unavailable("it takes a causal mask or none")
    is_causal = inputs.mask is not None
    call = sdpa_call(inputs, is_causal=is_causal, dropout_p=case.dropout)
    if kernel is not None:
        call = with_kernel(kernel, call)
    try:
        call()
    except RuntimeError as error:
        raise Unavailable.because(error) from error
    return call


def _primal(case: Case, inputs: CaseInputs) -> Callable[[], Tensor]:
    q, k, v = (forward_ad.unpack_dual(x).primal for x in (inputs.q, inputs.k, inputs.v))
    return inputs._replace(q=q, k=k, v=v).headway


PEERS = {
    "sdpa": Peer(
        _sdpa,
        "F.scaled_dot_product_attention: is_causal where that is the mask, else a float mask",
    ),
    "sdpa causal": Peer(
        lambda case, inputs: sdpa_call(inputs, is_causal=True),
        "F.scaled_dot_product_attention(is_causal=True), without this case's score and window",
        same=False,
    ),
    "cudnn": Peer(_cudnn, "F.scaled_dot_product_attention by cuDNN, on a GPU", backward=("cuda",)),
    "flash-attention-4": Peer(
        _flash4, "flash_attn.cute, on a GPU: causal, window, documents, softcap",
        backward=("cuda",), by_rows=True, package="flash-attn-4",
    ),
    "headway plain": Peer(
        lambda case, inputs: partial(attention, inputs.q, inputs.k, inputs.v, mask=inputs.mask),
        "Headway on the same tensors and mask, without the score", same=False,
    ),
    "headway deterministic": Peer(
        partial(_deterministic, "auto"), "Headway with deterministic=True", backward=("cuda",)
    ),
    "headway triton deterministic": Peer(
        partial(_deterministic, "triton"), "Headway's portable GPU backend, deterministic=True",
        backward=("cuda",),
    ),
    "headway triton": Peer(
        _triton, "Headway's portable GPU backend, where another one is the default",
        backward=("cuda",),
    ),
    "headway without dropout": Peer(
        lambda case, inputs: partial(inputs.headway, dropout=0.0),
        "Headway on the same tensors, score and mask, without dropout", same=False,
    ),
    "sdpa dropout": Peer(
        partial(_sdpa_dropout, None),
        "F.scaled_dot_product_attention(dropout_p=...), which drops other pairs", same=False,
    ),
    "cudnn dropout": Peer(
        partial(_sdpa_dropout, SDPBackend.CUDNN_ATTENTION),
        "F.scaled_dot_product_attention(dropout_p=...) by cuDNN, on a GPU", same=False,
        backward=("cuda",),
    ),
    "headway out alone": Peer(
        lambda case, inputs: inputs.headway,
        "Headway's out on the same tensors, score and mask, without statistics", same=False,
    ),
    "headway without tangents": Peer(
        _primal, "Headway on the same tensors, score and mask, out alone", same=False
    ),
    "sdpa math": Peer(
        lambda case, inputs: with_kernel(SDPBackend.MATH, _sdpa(case, inputs)),
        "F.scaled_dot_product_attention by plain operations, which have forward-mode derivatives",
    ),
    "flex": Peer(
        _flex, "flex_attention under torch.compile, block mask prepared; forward only on CPU",
        backward=("cuda",),
    ),
    "flex flash": Peer(
        partial(_flex, BACKEND="FLASH"), 'flex_attention with BACKEND="FLASH", on a GPU',
        backward=("cuda",), package="flash-attn-4",
    ),
    "flash-attention-4 scored": Peer(
        _flash4_scored, "flash_attn.cute with a score function in CuTe DSL, on a GPU",
        backward=("cuda",), by_rows=True, package="flash-attn-4",
    ),
    "flash-attention-4 blocks": Peer(
        _flash4_sparse, "flash_attn.cute with a mask in CuTe DSL and lists of blocks, on a GPU",
        backward=("cuda",), by_rows=True, package="flash-attn-4",
    ),
    "cudnn flex": Peer(
        _cudnn_flex, "cudnn.flex_attention, on a GPU: masks as intervals of keys",
        backward=("cuda",), by_rows=True, package="nvidia-cudnn-frontend",
    ),
    "varlen": Peer(
        _varlen, "PyTorch's varlen_attn, on a GPU: causal, window, documents",
        backward=("cuda",), by_rows=True,
    ),
    "create_block_mask": Peer(
        _create_block_mask, "FlexAttention's block masks: create_block_mask as it is called there"
    ),
    "causal, per tile": Peer(
        lambda case, inputs: partial(inputs.headway, mask=causal()),
        "Headway with causal() on the same tensors; times per live tile of 128 x 128",
        same=False, per_tile=True,
    ),
}  # fmt: skip
