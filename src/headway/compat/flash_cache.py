"""FlashAttention's calls for inference: over a cache, and the sum of partial results."""

from typing import Any

import torch
from torch import Tensor

from .. import inference
from ..errors import ArgumentError
from ..mods import Mask
from ..mods import causal as lower_right
from ..mods.base import intersection, value
from ..nn.rotary import Angles, Rotary
from ..packed import ArgumentNames, Side
from ..surroundings import host_can_read
from ..types import as_int
from .errors import CallError, NotSupported, as_call_error
from .flash_attend import Results, in_dtype_of, same_chunk, scale_of, side_of, widened
from .flash_parts import (
    FLASH_2,
    FlashOptions,
    Window,
    check_axes,
    check_dense,
    check_tuning,
    count,
    flag,
    options_of,
    score_of,
    shown,
)  # fmt: skip


@value
class within(Mask):
    """`i - left <= j <= i + right`; -1 is no limit."""

    left: int
    right: int
    _limits: tuple[bool, bool]

    def __init__(self, left: int | None, right: int | None) -> None:
        fields = left or 0, right or 0, (left is not None, right is not None)
        for name, item in zip(self.fields, fields, strict=True):
            object.__setattr__(self, name, item)

    def __call__(self, b, h, q_idx, kv_idx):
        if not self._limits[0]:
            return kv_idx - q_idx <= self.right
        near = q_idx - kv_idx <= self.left
        return near & (kv_idx - q_idx <= self.right) if self._limits[1] else near


@value
class begins(Mask):
    """`j >= first[b]`: the keys of a row before its first are padding."""

    first: Tensor

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx >= self.first[b]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Append new keys and values to a cache, if any, and return the attention of q over the cache.

    The arguments are flash-attn 2's, in its order. The further ones of flash-attn 3 are keywords,
    so calls that name them work.

    **Arguments:**

    - `q`: `(b, q_len, hq, d)`, or `(tokens, hq, d)` with `cu_seqlens_q` and `max_seqlen_q`.
    - `k_cache`, `v_cache`: `(rows, capacity, hk, ·)`. With `block_table` (`page_table` in
      flash-attn 3), int32 `(b, max_pages)`, they are pages of any size, `(pages, page, hk, ·)`. New
      keys and values are written to them in place.
    - `k`, `v`: `(b, new, hk, ·)`, written from position `cache_seqlens[b]` on before attention.
      With `cu_seqlens_k_new` they are packed, too; tokens after its last offset are skipped.
    - `cache_seqlens`: int32 `(b,)` or one number, the keys in each row. None: the capacity.
    - `cache_batch_idx`: int32 `(b,)`, the row of the cache, or of `page_table`, for each row of q.
    - `cache_leftpad`: int32 `(b,)`, the first valid key of each row.
    - `rotary_cos`, `rotary_sin`: `(positions, rotary / 2)`. They rotate q and the new keys by their
      positions in the cache, which start at `cache_seqlens`, or at `rotary_seqlens`, `(b,)`, for
      any `cache_leftpad`. Without `causal` and a window, all queries have the first position.
    - `causal`, `window_size`: aligned bottom-right.
    - `softcap`, `alibi_slopes`, `learnable_sink`: as in `flash_attn_func`.
    - `attention_chunk`: a query attends inside of its chunk of this many keys. 0 is off.
    - `q_descale`, `k_descale`, `v_descale`: `(b, hk)`, factors of q, k and v.
    - `num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata`: accepted without effect. Headway
      chooses how to cut the work.

    **Returns:** `(b, q_len, hq, dv)` or `(tokens, hq, dv)`, in bfloat16 if q is float8. With
    `return_softmax_lse` also the log-sum-exp, `(b, hq, q_len)` or `(hq, tokens)`. No gradient.

    **Raises:** a `RuntimeError` that is also an `ArgumentError`; `NotImplementedError` for `qv`.
    """
    if qv is not None:
        raise NotSupported(
            "qv: give q and qv as one, torch.cat((qv, q), -1), over one cache of (latent, rotary) "
            "whose first columns are the values: headway.inference.attention"
        )
    check_tuning(FLASH_2, num_splits, pack_gqa, sm_margin)
    chunk = count("attention_chunk", attention_chunk)
    check_dense(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    _check_places(rotary_cos, rotary_sin, cache_batch_idx)
    for name, x, others, other in (
        ("cu_seqlens_k_new", cu_seqlens_k_new, "k and v", k),
        ("rotary_seqlens", rotary_seqlens, "rotary_cos and rotary_sin", rotary_cos),
    ):
        if x is not None and other is None:
            raise CallError(f"{name} goes with {others}: give them, or leave it out")
    options = options_of(
        FLASH_2, softmax_scale, causal, window_size, softcap, False, chunk=chunk,
        slopes=alibi_slopes, sink=learnable_sink,
    )  # fmt: skip
    want_lse = flag("return_softmax_lse", return_softmax_lse)
    packed = cu_seqlens_q is not None
    axes = "(tokens, heads, width)" if packed else "(b, length, heads, width)"
    check_axes("q", q, axes)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_axes(name, x, "(rows, length, heads, width)")
    if packed and max_seqlen_q is None:
        max_seqlen_q = q.shape[0]
    given_q, q = q, widened(q)
    k, v = (None if x is None else widened(x) for x in (k, v))
    q_side = _side("q", q, cu_seqlens_q)
    b, hk = q_side.sequences, k_cache.shape[2]
    _check_integers(q, b, 1, cache_leftpad=cache_leftpad, rotary_seqlens=rotary_seqlens)
    _check_scales((b, hk), k_descale=k_descale, v_descale=v_descale)
    pages = _table(block_table, page_table, cache_batch_idx, q, b)
    lengths = _lengths(cache_seqlens, q, b, k_cache, pages)
    base = lengths if rotary_seqlens is None else rotary_seqlens
    capacity = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
    turn = _turn_of(
        rotary_cos, rotary_sin, flag("rotary_interleaved", rotary_interleaved), capacity
    )
    if turn is not None:
        q = turn(q, base, q_side, options.limits != (None, None))
    if k is not None and v is not None:
        new_keys = _side("k", k, cu_seqlens_k_new)
        if new_keys.sequences != b:
            raise CallError(f"k {tuple(k.shape)} has {new_keys.sequences} sequences, but q has {b}")
        k = k if turn is None else turn(k, base, new_keys, True)
        lengths = _append(k_cache, v_cache, k, v, lengths, pages, new_keys)
    elif k is not None or v is not None:
        raise CallError("k and v go together: new keys without values, or values without keys")
    if q_descale is not None:
        q = (q * scale_of("q", q, q_descale, k_cache.shape[-2], cu_seqlens_q)).to(q.dtype)
    out, lse, _ = attend_cache(
        q, k_cache, v_cache, options, lengths, pages, cu_seqlens_q, max_seqlen_q, cache_leftpad,
        k_descale, v_descale,
    )  # fmt: skip
    out = in_dtype_of(given_q, out)
    return (out, lse) if want_lse else out


def attend_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, options: FlashOptions, lengths: Tensor,
    pages: Tensor | None, cu_q: Tensor | None, max_q: int | None, leftpad: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Results:  # fmt: skip
    """Attend over a cache: the queries are the last positions of their rows. Without a gradient,
    and without dropout and functions of the caller."""
    limits, mask = options.limits, None
    if limits != (None, None):
        mask = lower_right() if limits == (None, 0) else within(*limits)
    if options.chunk:
        mask = intersection(mask, same_chunk(options.chunk, 0))
    if leftpad is not None:
        mask = intersection(mask, begins(leftpad))
    score = score_of(options.softcap, options.slopes, 0, lengths.shape[0], q.shape[-2])
    heads_first = (q if cu_q is None else q[None]).transpose(1, 2)
    try:
        out, lse, max_logit = inference.attention_with_stats(
            heads_first, k_cache.transpose(1, 2), v_cache.transpose(1, 2), score, mask,
            lengths=lengths, page_table=pages, cu_q=cu_q, max_q=max_q, scale=options.scale,
            sink=options.sink, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    except ArgumentError as error:
        raise CallError(str(error)) from error
    out = out.transpose(1, 2).contiguous()
    return Results(out, lse, max_logit) if cu_q is None else Results(out[0], lse[0], max_logit)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention over all keys from partial results over disjoint sets of keys.

    **Arguments:**

    - `out_partial`: `(splits, b, length, heads, dv)` or `(splits, tokens, heads, dv)`.
    - `lse_partial`: the same without the last dimension, in natural logarithms. -inf: no keys.
    - `out`: a tensor to write to. `out_dtype`: the dtype of the result. None: `out_partial`'s.
    - `cu_seqlens`, `seqused`: which tokens are valid, as in `flash_attn_varlen_func`. Other tokens
      get 0 and a log-sum-exp of -inf. In `out` they stay unchanged.
    - `virtual_batch_idx`: `(b,)`, the order in which a kernel takes the rows. It changes no result.

    **Returns:** `(out, lse)`. lse is None unless `return_lse`.

    **Raises:** a `RuntimeError` that is also an `ArgumentError`.
    """
    axes = "(splits, b, length, heads, width)", "(splits, tokens, heads, width)"
    check_axes("out_partial", out_partial, *axes)
    check_axes("lse_partial", lse_partial, *[text.replace(", width", "") for text in axes])
    if out_partial.shape[:-1] != lse_partial.shape:
        raise CallError(
            f"lse_partial must be {tuple(out_partial.shape[:-1])}, got {tuple(lse_partial.shape)}"
        )
    if out is not None and out.shape != out_partial.shape[1:]:
        raise CallError(f"out must be {tuple(out_partial.shape[1:])}, got {tuple(out.shape)}")
    lse = torch.logsumexp(lse_partial.float(), 0)
    weights = (lse_partial - lse.masked_fill(lse == -torch.inf, 0)).exp()
    # A weight of 0 hides what lies there: a kernel may not have written it.
    parts = out_partial.float().masked_fill(weights[..., None] == 0, 0)
    merged = (weights[..., None] * parts).sum(0)
    if virtual_batch_idx is not None:
        _check_order(virtual_batch_idx, cu_seqlens, lse)
    if cu_seqlens is not None or seqused is not None:
        exists = _tokens_there(lse, cu_seqlens, seqused)[..., None]
        lse = torch.where(exists, lse, -torch.inf)
        absent = 0.0 if out is None else out.float()
        merged = torch.where(exists[..., None], merged, absent)
    dtype = out_dtype or (out_partial.dtype if out is None else out.dtype)
    merged = merged.to(dtype) if out is None else out.copy_(merged)
    return merged, lse if flag("return_lse", return_lse) else None


def _tokens_there(lse: Tensor, cu: Tensor | None, used: Tensor | None) -> Tensor:
    """Return which tokens sequences have, in the shape of lse without heads."""
    side = side_of("q", lse[..., None], cu, used)
    as_call_error(side.check_numbers)
    ids, _ = side.places_of_tokens(outside=-1)
    return (ids >= 0).view(lse.shape[:-1])


def _check_order(order: Tensor, cu: Tensor | None, lse: Tensor) -> None:
    """Check that every row of a batch is taken once, where the host can read it."""
    rows = lse.shape[0] if cu is None else cu.shape[0] - 1
    fits = isinstance(order, Tensor) and tuple(order.shape) == (rows,)
    if fits and order.is_cpu and not torch.compiler.is_compiling():
        fits = sorted(order.tolist()) == list(range(rows))
    if not fits:
        raise CallError(
            f"virtual_batch_idx must hold every row, 0 to {rows - 1}, once, got {shown(order)}"
        )


def _turn_of(cos: Any, sin: Any, interleaved: bool, capacity: int) -> "_Turn | None":
    """Return the rotation by a table, if there is one."""
    if cos is None:
        return None
    if cos.shape[0] < capacity or sin.shape != cos.shape:
        raise CallError(
            "rotary_cos and rotary_sin must be (positions, rotary / 2) with at least the "
            f"{capacity} positions of the cache, got {shown(cos)} and {shown(sin)}"
        )
    return _Turn(cos, sin, interleaved)


class _Turn:
    """Rotary angles from a table `(positions, rotary / 2)`."""

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        self.cos, self.sin = cos, sin
        self.rotary = Rotary(2 * cos.shape[-1], interleaved=interleaved)

    def __call__(self, x: Tensor, base: Tensor, side: Side, moving: bool) -> Tensor:
        """Rotate x `(b, length, heads, d)`, or packed, from positions `base` on."""
        row, position = side.places_of_tokens(outside=-1)
        at = torch.where(row < 0, 0, position * moving + base[row])
        if at.is_cpu and host_can_read(at):
            self._check(at)
        at = at.clamp(0, self.cos.shape[0] - 1).long()
        angles = Angles(self.cos[at].float(), self.sin[at].float())
        tokens = x.reshape(1, side.tokens, *x.shape[-2:]).transpose(1, 2)
        return self.rotary.rotate(tokens, angles).transpose(1, 2).reshape(x.shape)

    def _check(self, at: Tensor) -> None:
        """Check, where the host can read positions, that they have angles."""
        wrong = at[(at < 0) | (at >= self.cos.shape[0])]
        if wrong.numel():
            raise CallError(
                f"rotary_cos and rotary_sin have {self.cos.shape[0]} positions, but a query or new "
                f"key is at {int(wrong[0])}; give a longer table, or other rotary_seqlens"
            )


_NEW_NAMES = {"q": ArgumentNames("cu_seqlens_q"), "k": ArgumentNames("cu_seqlens_k_new")}


def _side(name: str, x: Tensor, cu: Tensor | None) -> Side:
    """Return where the tokens of q, or the new keys, lie."""
    side = side_of(name, x, cu, None, names=_NEW_NAMES[name])
    as_call_error(side.check_numbers)
    return side


@torch.no_grad()
def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor,
    pages: Tensor | None, new: Side,
) -> Tensor:  # fmt: skip
    """Write new keys and values after those that are there; return the lengths with them."""
    row, position = new.places_of_tokens(outside=-1)
    position, page = position + lengths[row], k_cache.shape[1]
    capacity = page * (1 if pages is None else pages.shape[1])
    would = f"would be its number {{}}, but {_NO_ROOM} {capacity} keys a row"
    fits = _that_fit(position, capacity, row >= 0, row, would)
    slots = position + row.long() * page
    if pages is not None:
        of_cache = pages[row, position // page * fits]
        belongs = f"belongs to page (or row of the cache) {{}}, which is none of the {len(k_cache)}"
        fits = _that_fit(of_cache, len(k_cache), fits, row, belongs)
        slots = of_cache.long() * page + position % page
    slots = torch.where(fits, slots, -1)
    k, v = (x.flatten(0, -3) for x in (k, v))
    as_call_error(inference.write, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2), slots)
    count = new.row if new.rows is not None else new.starts.diff()
    return (lengths + count).to(torch.int32)


_NO_ROOM = "the cache, or the pages that block_table names, has room for"


def _that_fit(places: Tensor, room: int, asked: Tensor, row: Tensor, fault: str) -> Tensor:
    """Return which of the asked tokens have a place below `room`: where the host can read them,
    all, or it is an error."""
    fits = asked & (places >= 0) & (places < room)
    if places.is_cpu and host_can_read(places) and bool((fits != asked).any()):
        n = int((fits != asked).nonzero()[0, 0])
        fault = fault.format(int(places[n]))
        raise CallError(f"a new key of row {int(row[n])} {fault}; nothing was written")
    return fits


def _check_scales(shape: tuple[int, int], **scales: Any) -> None:
    for name, scale in scales.items():
        if scale is not None and (not isinstance(scale, Tensor) or scale.shape != shape):
            raise CallError(f"{name} must be {shape}, got {shown(scale)}")


def _check_integers(q: Tensor, b: int | None, dims: int, **tensors: Any) -> None:
    """Check that tensors, or None, hold integers for each of b rows (None: of any number), on q's
    device."""
    for name, x in tensors.items():
        if x is None:
            continue
        fits = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64) and x.dim() == dims
        if not fits or b not in (None, len(x)):
            rows = "rows" if b is None else b
            axes = f"(b,) = ({rows},)" if dims == 1 else f"({rows}, max_pages)"
            raise CallError(f"{name} must be int32 {axes}, got {shown(x)}")
        if x.device != q.device:
            raise CallError(f"{name} is on {x.device}, q on {q.device}; keep it there")


def _table(
    block_table: Any, page_table: Any, rows: Tensor | None, q: Tensor, b: int
) -> Tensor | None:
    """Return the pages of every row of q. Without pages, a row of the cache is one."""
    if block_table is not None and page_table is not None:
        raise CallError("block_table and page_table are two names of one argument; give one")
    of_rows = b if rows is None else None
    _check_integers(q, of_rows, 2, block_table=block_table, page_table=page_table)
    if rows is None:
        return block_table if page_table is None else page_table
    if block_table is not None:
        raise CallError(
            "block_table with cache_batch_idx: flash-attn 2 has no such call; in flash-attn 3 "
            "cache_batch_idx says which rows of page_table belong to q: name it page_table"
        )
    _check_integers(q, b, 1, cache_batch_idx=rows)
    if page_table is None:
        return rows.to(torch.int32)[:, None]
    row_count = page_table.shape[0]
    exists = (rows >= 0) & (rows < row_count)
    if rows.is_cpu and host_can_read(rows) and not bool(exists.all()):
        n = int((~exists).nonzero()[0, 0])
        raise CallError(
            f"cache_batch_idx[{n}] = {int(rows[n])} is no row of page_table, which has {row_count}"
        )
    return torch.where(exists[:, None], page_table[rows.clamp(0, row_count - 1)], -1)


def _lengths(lengths: Any, q: Tensor, b: int, k_cache: Tensor, pages: Tensor | None) -> Tensor:
    capacity = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
    if not isinstance(lengths, Tensor):
        length = capacity if lengths is None else as_int(lengths)
        if length is None:
            raise CallError(f"cache_seqlens must be an integer or int32 (b,), got {lengths!r}")
        return torch.full((b,), length, dtype=torch.int32, device=k_cache.device)
    _check_integers(q, b, 1, cache_seqlens=lengths)
    if lengths.is_cpu and host_can_read(lengths) and lengths.numel():
        low, high = (int(n) for n in lengths.aminmax())
        if low < 0 or high > capacity:
            wrong = low if low < 0 else high
            raise CallError(
                f"cache_seqlens has {wrong}, but {_NO_ROOM} {capacity} keys a row, from 0 on"
            )
    return lengths.to(torch.int32)


def _check_places(cos: Any, sin: Any, idx: Any) -> None:
    """Refuse what flash-attn 3 has in these places."""
    for name, x, dims in (("rotary_cos", cos, 2), ("rotary_sin", sin, 2),
                          ("cache_batch_idx", idx, 1)):  # fmt: skip
        if x is not None and (not isinstance(x, Tensor) or x.dim() != dims):
            raise CallError(
                f"{name} must be a tensor of {dims} dimensions, got {shown(x)}. Positional "
                "arguments follow flash-attn 2: pass those after v by name"
            )
    if (cos is None) != (sin is None):
        raise CallError("rotary_cos and rotary_sin go together")
