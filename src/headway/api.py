"""The public calls: check the arguments once, say what to compute, run the pair."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import ops
from .backends import choose
from .backends.base import Call
from .blocks import BlockMask, build
from .errors import ArgumentError, ModError
from .mods import Captured, captured_of, describe, lower, lower_mod
from .mods.base import Lowered, MaskFn, ScoreFn
from .mods.graph import DTYPE_NAMES
from .types import AttentionOutput, Coords, Forward, Spec, constant_under_compile

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attention(
    q: Float[Tensor, "b hq q_len d"],
    k: Float[Tensor, "b hk kv_len d"],
    v: Float[Tensor, "b hk kv_len dv"],
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Float[Tensor, " hq"] | None = None,
    dropout: float = 0.0,
    seed: int | Int[Tensor, ""] | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Float[Tensor, "b hq q_len dv"]:
    """softmax(score(scale · q kᵀ) where mask) v: exact attention for any score and mask.

    Differentiable in q, k, v, `sink`, and every tensor that `score` captures and that requires
    grad. Query head h reads key head `h // (hq // hk)`. A query that may see no key gets 0.

    **Arguments:**

    - `q`, `k`, `v`: float64, float32, bfloat16 or float16, of one dtype and device; any lengths
      and widths, `dv` may differ from `d`, and `hq` must be a multiple of `hk`. Computed in
      float32 (float64 for float64).
    - `score`: `(score, b, h, q_idx, kv_idx) -> score`, plain PyTorch on numbers that broadcast, or
      a value of the library such as `alibi(8) >> softcap(30.0)`. It sees the scaled logit.
    - `mask`: `(b, h, q_idx, kv_idx) -> bool`, True keeps the pair; a value of the library such as
      `causal() & sliding_window(1024)`; or a `BlockMask` built by `block_mask`.
    - `scale`: multiplies `q kᵀ`, once; `1/sqrt(d)` if None. 0.0 is honoured.
    - `sink`: a logit per query head that joins the softmax but has no value (GPT-OSS).
    - `dropout`: the probability to drop a pair after the softmax; the rest is scaled by 1/(1-p).
    - `seed`: of the dropout, a number or a 0-d int64 tensor; PyTorch's generator draws it if None.
    - `deterministic`: bit-equal gradients run after run.
    - `backend`: "auto", or a name from `headway.backends.NAMES`, which then never falls back.

    **Returns:** `(b, hq, q_len, dv)`, the dtype of q.

    **Raises:** `ArgumentError`, `ModError` (naming the line of the function), `CapturedIndexError`,
    `BackendRefused`.

    (Vaswani et al. 2017, arXiv 1706.03762; computed as in Dao et al. 2022, arXiv 2205.14135)
    """
    return _run(q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend, False).out


def attention_with_stats(
    q: Float[Tensor, "b hq q_len d"],
    k: Float[Tensor, "b hk kv_len d"],
    v: Float[Tensor, "b hk kv_len dv"],
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Float[Tensor, " hq"] | None = None,
    dropout: float = 0.0,
    seed: int | Int[Tensor, ""] | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> AttentionOutput:
    """`attention`, and what training needs besides: the differentiable log-sum-exp of every query
    and the largest logit of every head (see `AttentionOutput`).

    The same arguments and errors as `attention`.
    """
    out, lse, max_logit, _ = _run(
        q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend, True
    )
    return AttentionOutput(out, lse, max_logit)


def block_mask(
    mask: MaskFn,
    b: int,
    h: int,
    q_len: int,
    kv_len: int,
    *,
    device: torch.device | str | None = None,
    tile: tuple[int, int] = (128, 128),
) -> BlockMask:
    """Decide once which tiles of a mask are empty, full or partial, to use it in many calls.

    **Arguments:**

    - `mask`: a function or a value of the library, as for `attention`.
    - `b`, `h`: batch and query heads; 1 broadcasts, for a mask that ignores them.
    - `q_len`, `kv_len`: lengths; no multiple of the tile is needed.
    - `device`: of the result; that of the tensors that the mask captures, or the CPU, if None.
    - `tile`: queries and keys in a tile.

    **Returns:** a `BlockMask`; its size follows the runs of live tiles, not `q_len * kv_len`.
    """
    for name, number in (("b", b), ("h", h), ("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ArgumentError(f"{name}={number!r} must be a whole number, 0 or more")
    if len(tile) != 2 or any(not isinstance(t, int) or t < 1 for t in tile):
        raise ArgumentError(f"tile={tile!r} must be two whole numbers of at least 1")
    _check_function("mask", mask)
    graph, captured = lower_mod("mask", mask, torch.float32)
    if device is None:
        device = captured.tensors[0].device if captured.tensors else "cpu"
    device = torch.device(device)
    _check_captured("mask", captured, device)
    tiles, mask_b, mask_h = build(graph, captured, (b, h, q_len, kv_len), tuple(tile), device)
    return BlockMask(mask, (mask_b, mask_h, q_len, kv_len), tuple(tile), tiles)


def _run(
    q: Any, k: Any, v: Any, score: Any, mask: Any, scale: Any, sink: Any, dropout: Any, seed: Any,
    deterministic: bool, backend: str, stats: bool,
) -> Forward:  # fmt: skip
    spec, call = prepare(
        q, k, v, score, mask, scale=scale, sink=sink, dropout=dropout, seed=seed,
        deterministic=deterministic, backend=backend, max_logit=stats,
    )  # fmt: skip
    return ops.attention(spec, call)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    max_logit: bool = False,
    row_max: bool = False,
    partial: bool = False,
    coords: Coords | None = None,
) -> tuple[Spec, Call]:
    """Check a call and say what to compute: the arguments of the pair of pure functions.

    Beyond `attention`'s arguments: which statistics to compute, `partial` for results in the
    accumulation dtype, and `coords`, where these tensors stand in the whole (shards, decoding).
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v)
    hq, d = q.shape[1], q.shape[3]
    if scale is None:
        scale = 1 / math.sqrt(d) if d else 1.0
    elif isinstance(scale, Tensor):
        raise ArgumentError(
            "scale is a tensor; pass a number, or multiply q by the tensor and pass scale=1.0, "
            "which lets it learn"
        )
    if sink is not None and (not isinstance(sink, Tensor) or sink.shape != (hq,)):
        raise ArgumentError(f"sink must be a tensor (hq,) = ({hq},), got {_shown(sink)}")
    if sink is not None and sink.device != q.device:
        raise ArgumentError(f"sink is on {sink.device}, q on {q.device}; move it with .to()")
    if not 0.0 <= dropout <= 1.0:
        raise ArgumentError(f"dropout={dropout!r} must be a probability, from 0 to 1")
    accumulate = (
        torch.float64 if backend == "reference" or q.dtype == torch.float64 else torch.float32
    )
    texts, parts, tiles, shape = [], [], None, None
    if isinstance(mask, BlockMask):
        tiles, shape = mask.tiles, (*mask.shape[:2], *mask.tile)
        _check_block_mask(mask, q, k)
        mask = mask.mask
    for kind, mod in (("score", score), ("mask", mask)):
        if mod is None:
            texts.append(None)
            parts.append(Captured([], [], []))
            continue
        _check_function(kind, mod)
        pieces = describe(mod)
        if torch.compiler.is_compiling():
            _check_made_outside(kind, pieces.functions)
        lowered = _lower(kind, pieces.structure, DTYPE_NAMES[accumulate], *pieces.functions)
        texts.append(lowered[0])
        parts.append(captured_of(pieces, lowered))
        _check_captured(kind, parts[-1], q.device)
    captured = Captured(*(a + b for a, b in zip(*parts, strict=True)))
    coords = Coords() if coords is None else coords
    call = Call(q, k, v, sink, _seed(seed, dropout, q.device), captured, tiles, coords)
    fields: dict[str, Any] = {
        "scale": float(scale),
        "score": texts[0],
        "mask": texts[1],
        "dropout": float(dropout),
        "sink": sink is not None,
        "max_logit": max_logit,
        "row_max": row_max,
        "partial": partial,
        "deterministic": deterministic,
        "tiles": shape,
        "score_tensors": len(parts[0].tensors),
        "score_ints": len(parts[0].ints),
        "score_floats": len(parts[0].floats),
    }
    chosen = choose(backend, Spec(backend=backend, **fields), call)
    return Spec(backend=chosen, **fields), call


def _lower(kind: str, structure: str, dtype: str, *functions: Callable) -> Lowered:
    return lower(kind, structure, dtype, *functions)


constant_under_compile(_lower)  # tracing is Python about Python: it runs once, at compile time


def _seed(seed: int | Tensor | None, dropout: float, device: torch.device) -> Tensor | None:
    if dropout == 0:
        return None
    if seed is None:
        return torch.randint(2**62, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype != torch.int64:
            raise ArgumentError(f"seed must be a number or a 0-d int64 tensor, got {_shown(seed)}")
        return seed
    return torch.tensor(seed, dtype=torch.int64, device=device)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, attention runs in the autocast dtype, as PyTorch's own does."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return tuple(
            t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t
            for t in tensors
        )
    return tensors


# -- checks: which argument, what was seen, the way out -------------------------------------------


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value)


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ArgumentError(
                f"{name} must be (batch, heads, length, width), got {_shown(x)}; "
                "add missing dimensions with .unsqueeze(), move heads with .transpose(1, 2)"
            )
        if x.dtype not in DTYPES:
            raise ArgumentError(f"{name} is {x.dtype}; use float32, bfloat16, float16 or float64")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentError(
            f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; "
            "convert with .to()"
        )
    if not q.device == k.device == v.device:
        raise ArgumentError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}; "
            "move with .to()"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ArgumentError(f"batch sizes differ: {shapes}; expand the smaller one with .expand()")
    if k.shape[1] != v.shape[1]:
        raise ArgumentError(f"k and v must have the same heads: {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError(
            f"query heads must be a multiple of key heads: hq = {q.shape[1]}, hk = {k.shape[1]}"
        )
    if k.shape[2] != v.shape[2]:
        raise ArgumentError(f"k and v must have the same length: {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"q and k must have the same width: {shapes}")


def _check_function(kind: str, mod: Any) -> None:
    if isinstance(mod, Tensor):
        way = "bias(tensor)" if kind == "score" else "lambda b, h, q_idx, kv_idx: m[q_idx, kv_idx]"
        raise ArgumentError(f"{kind} is a tensor {_shown(mod)}; make it a function: {way}")
    if not callable(mod):
        raise ArgumentError(f"{kind} must be a function or a value of the library, got {mod!r}")


def _check_made_outside(kind: str, functions: list[Callable]) -> None:
    """`torch.compile` cannot look inside a closure that is created while it traces."""
    for fn in functions:
        try:
            fn.__closure__  # noqa: B018
        except AttributeError:
            if fn.__code__.co_freevars:
                raise ModError(
                    f"the {kind} is a closure created inside the compiled function; create it "
                    "outside and pass it in, or write functools.partial(function, tensor=tensor) "
                    "with a function of the module, or combine values such as headway.bias(tensor)"
                ) from None


def _check_captured(kind: str, captured: Captured, device: torch.device) -> None:
    for t in captured.tensors:
        if t.device != device and t.dim():
            raise ArgumentError(
                f"the {kind} captures a tensor {_shown(t)} on {t.device}, but q is on {device}; "
                "move it with .to()"
            )
        if kind == "mask" and t.requires_grad and t.is_floating_point():
            raise ArgumentError(
                f"the mask captures a tensor {_shown(t)} that requires grad, but a mask has no "
                "gradient; put it in the score, or capture tensor.detach()"
            )


def _check_block_mask(mask: BlockMask, q: Tensor, k: Tensor) -> None:
    b, h, q_len, kv_len = mask.shape
    if (q_len, kv_len) != (q.shape[2], k.shape[2]):
        raise ArgumentError(
            f"the block mask is for lengths {(q_len, kv_len)}, but q and k have "
            f"{(q.shape[2], k.shape[2])}; build one with block_mask(mask, b, h, q_len, kv_len)"
        )
    if b not in (1, q.shape[0]) or h not in (1, q.shape[1]):
        raise ArgumentError(
            f"the block mask is for batch {b} and heads {h}, but q has {tuple(q.shape[:2])}; "
            "each must be equal or 1"
        )
    if mask.device != q.device:
        raise ArgumentError(f"the block mask is on {mask.device}, q on {q.device}; build it there")
