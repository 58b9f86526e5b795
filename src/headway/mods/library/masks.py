"""The library's masks, which say which query may attend to which key.

Each is a formula over `q_idx` (i) and `kv_idx` (j); True keeps the pair. Combine them:
`causal() & sliding_window(1024) | prefix(64)`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...surroundings import host_can_read
from ...types import as_int, surely
from ..base import Mask, MaskFn, Score, check_broadcasts, check_shape, value
from ..suggest import suggestion
from .checks import (
    check_ids_tensor,
    check_on_grid,
    check_parents,
    grid_sizes,
    set_int,
)
from .packing import document_ids, ends_of


@value
class causal(Mask):
    """`j <= i + offset`: a query attends to itself and to earlier keys.

    `offset` moves the diagonal: `causal(kv_len - q_len)` aligns the last query with the last key,
    as decoding against a cache of keys needs. A bare `causal(offset)` of several queries that masks
    nothing out is an `ArgumentError`: the number is no length. (Vaswani et al. 2017, arXiv
    1706.03762, section 3.2.3)
    """

    offset: int = 0

    def __post_init__(self) -> None:
        set_int(self, "offset", minimum=None)

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + self.offset


@value
class sliding_window(Mask):
    """`|i - j| < window`: a query attends to the nearest positions on both sides, and itself.

    With `causal()`: the last `window` keys. (Beltagy et al. 2020, Longformer, arXiv 2004.05150;
    Jiang et al. 2023, Mistral 7B, arXiv 2310.06825)
    """

    window: int

    def __post_init__(self) -> None:
        set_int(self, "window", minimum=1)

    def __call__(self, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance < self.window) & (distance > -self.window)


@value
class dilated(Mask):
    """`|i - j| < window * step and (i - j) % step == 0`: a window with gaps.

    The nearest `window` of every `step`-th position on either side, itself included; a step of 1 is
    `sliding_window(window)`. (Beltagy et al. 2020, Longformer, arXiv 2004.05150, section 3.1)
    """

    window: int
    step: int

    def __post_init__(self) -> None:
        set_int(self, "window", minimum=1)
        set_int(self, "step", minimum=1)

    def __call__(self, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance.abs() < self.window * self.step) & (distance % self.step == 0)


@value
class strided(Mask):
    """`|i - j| < stride or (i - j) % stride == 0`: the near ones, and every `stride`-th far one.

    With `causal()` the two heads of the strided Sparse Transformer in one; a stride near the square
    root of the length balances them. (Child et al. 2019, arXiv 1904.10509, section 4.3)
    """

    stride: int

    def __post_init__(self) -> None:
        set_int(self, "stride", minimum=1)

    def __call__(self, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance.abs() < self.stride) | (distance % self.stride == 0)


@value
class chunked(Mask):
    """`i // size == j // size`: attention stays inside chunks of `size` positions.

    With `causal()`, a query attends to its own chunk up to itself. (Qiu et al. 2020, Blockwise
    Self-Attention, arXiv 1911.02972; the local layers of Llama 4, Meta 2025, in chunks of 8192)
    """

    size: int

    def __post_init__(self) -> None:
        set_int(self, "size", minimum=1)

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx // self.size == kv_idx // self.size


@value
class block_causal(Mask):
    """`j // size <= i // size`: a query sees its own block of `size` positions whole, and all
    blocks before it.

    Blocks that are generated one after the other, each at once. A size of 1 is `causal()`. The
    training of block diffusion puts noised copies of n tokens before the clean ones. Of positions i
    and j of these 2n, with x = i % n and y = j % n, a noised query sees its noised block and the
    clean blocks before it, and a clean query the clean part as here:

        def block_diffusion(b, h, i, j):
            mine, theirs = i % n // size, j % n // size
            noised = torch.where(j < n, mine == theirs, theirs < mine)
            return torch.where(i < n, noised, (j >= n) & (theirs <= mine))

    (Arriola et al. 2025, Block Diffusion, arXiv 2503.09573, section 3.2)
    """

    size: int

    def __post_init__(self) -> None:
        set_int(self, "size", minimum=1)

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx // self.size <= q_idx // self.size


@value
class prefix(Mask):
    """`j < length`: every query attends to the first `length` keys.

    `length` is a number, or an int tensor `(batch,)`. `causal() | prefix(n)` is the prefix-LM mask
    (Raffel et al. 2020, T5, arXiv 1910.10683, figure 4).
    """

    length: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.length, Tensor):
            check_ids_tensor("prefix", "length", self.length, "(batch,)", (1,))
        else:
            set_int(self, "length", minimum=0)

    def check_sizes(self, b, h, q_len, kv_len):
        if isinstance(self.length, Tensor):
            check_shape("prefix", "length", self.length, b=b)

    def __call__(self, b, h, q_idx, kv_idx):
        length = self.length  # a number is a symbol, a 0-d tensor, during tracing
        per_batch = isinstance(length, Tensor) and length.dim() > 0
        return kv_idx < (length[b] if per_batch else length)


@value
class document(Mask):
    """`ids[i] == kv_ids[j]`: packed documents do not attend to each other.

    `ids` is an int tensor `(q_len,)` or `(batch, q_len)`; `kv_ids`, where keys differ from queries,
    likewise over keys. int32, which a GPU compares faster than int64, is enough. From lengths or
    cumulative lengths: `document.from_lengths([5, 3, 8])`, `document.from_cu_seqlens(cu_seqlens)`.
    (Krell et al. 2021, Efficient sequence packing, arXiv 2107.02027)
    """

    ids: Tensor
    kv_ids: Tensor | None = None

    def __post_init__(self) -> None:
        expected = "(q_len,) or (batch, q_len)"
        if not isinstance(self.ids, Tensor):
            expected += ", the document of every token; from lengths, document.from_lengths(...)"
        check_ids_tensor("document", "ids", self.ids, expected, (1, 2))
        if self.kv_ids is not None:
            check_ids_tensor(
                "document", "kv_ids", self.kv_ids, "(kv_len,) or (batch, kv_len)", (1, 2)
            )

    def check_sizes(self, b, h, q_len, kv_len):
        try:
            _check_ids("document", self.ids, self.kv_ids, b, q_len, kv_len)
        except ArgumentError as error:
            raise ArgumentError(
                f"{error}; ids name the document of every token: from offsets, write "
                "document.from_cu_seqlens(cu_seqlens), from lengths document.from_lengths(lengths)"
            ) from None

    def __call__(self, b, h, q_idx, kv_idx):
        mine, theirs = _pair_of_ids(self.ids, self.kv_ids, b, q_idx, kv_idx)
        return mine == theirs

    @staticmethod
    def from_lengths(
        lengths: Any,
        kv_lengths: Any = None,
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
        device: torch.device | str | None = None,
    ) -> "document":
        """Return the mask of packed documents of these lengths, one after the other.

        **Arguments:**

        - `lengths`: a list of numbers or an int tensor `(documents,)`; for a batch, one such list
          per row (ragged: each row its own number) or a tensor `(batch, documents)`.
        - `kv_lengths`: of the keys, where they differ from the queries: as many documents.
        - `q_len`, `kv_len`: padded lengths; the longest row if None. Padding sees nothing and is
          seen by nothing.
        - `device`: of the ids; that of the lengths if they are tensors, or the CPU, if None.
        """
        ends = ends_of("lengths", lengths, device, cumulative=False)
        kv_ends = None
        if kv_lengths is not None:
            kv_ends = ends_of("kv_lengths", kv_lengths, device, cumulative=False)
        return document(*document_ids(ends, kv_ends, q_len, kv_len))

    @staticmethod
    def from_cu_seqlens(
        cu_seqlens: Any,
        cu_seqlens_k: Any = None,
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> "document":
        """Return the mask of packed documents from cumulative lengths `[0, n0, n0 + n1, ...]`.

        These are an int tensor `(documents + 1,)` as variable-length attention takes it. For a
        batch: one such tensor per row, or `(batch, documents + 1)`. The other arguments are as in
        `from_lengths`.
        """
        ends = ends_of("cu_seqlens", cu_seqlens, None, cumulative=True)
        kv_ends = None
        if cu_seqlens_k is not None:
            kv_ends = ends_of("cu_seqlens_k", cu_seqlens_k, None, cumulative=True)
        return document(*document_ids(ends, kv_ends, q_len, kv_len))


@value
class spans(Mask):
    """`ids[i] >= 0 and ids[i] == kv_ids[j]`: the positions of a span attend to each other.

    `ids` is an int tensor `(q_len,)` or `(batch, q_len)`: the number of the span that a position
    is in, and -1, or any negative number, where it is in none. `kv_ids`, where keys differ from
    queries, likewise over keys. Images among text that are seen whole: `causal() | spans(ids)`;
    packed with other documents: `(causal() | spans(ids)) & document(documents)`.
    (Gemma Team 2025, Gemma 3, arXiv 2503.19786; Beyer et al. 2024, PaliGemma, arXiv 2407.07726,
    figure 2)
    """

    ids: Tensor
    kv_ids: Tensor | None = None

    def __post_init__(self) -> None:
        check_ids_tensor("spans", "ids", self.ids, "(q_len,) or (batch, q_len)", (1, 2))
        if self.kv_ids is not None:
            check_ids_tensor("spans", "kv_ids", self.kv_ids, "(kv_len,) or (batch, kv_len)", (1, 2))

    def check_sizes(self, b, h, q_len, kv_len):
        _check_ids("spans", self.ids, self.kv_ids, b, q_len, kv_len)

    def __call__(self, b, h, q_idx, kv_idx):
        mine, theirs = _pair_of_ids(self.ids, self.kv_ids, b, q_idx, kv_idx)
        return (mine >= 0) & (mine == theirs)


@value
class padding(Mask):
    """`j < lengths[b]`: keys after the end of a row's sequence are masked out.

    `lengths` is an int tensor `(batch,)`. It may also be a bool tensor `(batch, kv_len)` that is
    False at padding, anywhere in a row.
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.lengths, Tensor) and self.lengths.dim() == 2:
            if self.lengths.dtype != torch.bool:
                raise ArgumentError(
                    f"padding: lengths is {self.lengths.dtype} of shape "
                    f"{tuple(self.lengths.shape)}; a mask m of (batch, kv_len), 1 at tokens and 0 "
                    "at padding, is padding(m.bool())"
                )
            return
        check_ids_tensor("padding", "lengths", self.lengths, "(batch,)", (1,))

    def check_sizes(self, b, h, q_len, kv_len):
        keys = {"kv_len": kv_len} if self.lengths.dim() == 2 else {}
        check_shape("padding", "lengths", self.lengths, b=b, **keys)

    def __call__(self, b, h, q_idx, kv_idx):
        if self.lengths.dim() == 2:
            return self.lengths[b, kv_idx]
        return kv_idx < self.lengths[b]


@value
class tree(Mask):
    """A tree of draft tokens: each attends to its ancestors, itself and everything before the tree.

    `parents` is an int tensor `(nodes,)` or `(batch, nodes)`: the number of each node's parent, or
    -1 if it has none. A parent comes before its children. Node n is at position `start + n`. The
    tree begins at `start`, a number, a 0-d int tensor or `(batch,)`: `lengths - nodes` for drafts
    at the end of a cache. Positions before the tree are causal, positions after it attend to
    nothing. `parents` is read when you create the mask, `start` at every call. On a GPU nothing
    waits for the device: create the mask inside of a CUDA graph, and you may write other drafts to
    `parents` before a replay. A parent that comes later then counts as none.

    ```python
    import torch
    import headway as hw

    parents = torch.tensor([-1, 0, 0, 1])  # 4 drafts after 10 cached tokens
    q, k, v = torch.randn(1, 8, 4, 64), *torch.randn(2, 1, 8, 14, 64)
    lengths = torch.tensor([14], dtype=torch.int32)
    out = hw.inference.attention(q, k, v, mask=hw.tree(parents, 10), lengths=lengths)
    ```

    Raises `ArgumentError` for a parent that is its own child or comes later, and, in a call without
    a cache, where the tree begins after the last query.
    (Miao et al. 2023, SpecInfer, arXiv 2305.09781, section 4.2; Cai et al. 2024, Medusa,
    arXiv 2401.10774)
    """

    start: int | Tensor
    _ancestors: Tensor  # bool (nodes, nodes), or of every batch: which node sees which
    _nodes: int

    def __init__(self, parents: Tensor, start: int | Tensor = 0) -> None:
        check_ids_tensor("tree", "parents", parents, "(nodes,) or (batch, nodes)", (1, 2))
        self._set(start=start)
        if isinstance(start, Tensor):
            check_ids_tensor("tree", "start", start, "() or (batch,)", (0, 1))
        else:
            set_int(self, "start", minimum=0)
        nodes = parents.shape[-1]
        node = torch.arange(nodes, device=parents.device)
        check_parents(parents, node)
        # One more node, above all roots, is above itself and seen by nobody.
        has_parent = (parents >= 0) & (parents < node)
        above = torch.where(has_parent, parents.long(), nodes)
        above = torch.cat((above, torch.full_like(above[..., :1], nodes)), -1)
        is_ancestor = torch.eye(nodes + 1, nodes, dtype=torch.bool, device=parents.device)
        is_ancestor = is_ancestor.expand(*above.shape, nodes)  # every node sees itself
        for _ in range((nodes - 1).bit_length()):  # twice as far up every time
            of_above = is_ancestor.gather(-2, above[..., None].expand_as(is_ancestor))
            is_ancestor, above = is_ancestor | of_above, above.gather(-1, above)
        is_ancestor = is_ancestor[..., :nodes, :]
        self._set(_ancestors=is_ancestor.contiguous(), _nodes=nodes)

    def check_sizes(self, b, h, q_len, kv_len):
        if self._ancestors.dim() == 3:
            check_shape("tree", "parents", self._ancestors[..., 0], b=b, nodes=None)
        if isinstance(self.start, Tensor) and self.start.dim():
            check_shape("tree", "start", self.start, b=b)
        if q_len is None:  # over a cache
            return
        start = self.start
        start = self._smallest_start(start) if isinstance(start, Tensor) else start
        if start is not None and surely(q_len > 0) and surely(start >= q_len):
            raise ArgumentError(
                f"tree(start={start}): no query is in the tree, since the {q_len} queries of this "
                f"call are at positions 0 to {q_len - 1}, and the mask would be causal(); give the "
                "queries from position 0 on, or the keys as a cache to "
                "headway.inference.attention, where the queries come last"
            )

    def _smallest_start(self, start: Tensor) -> int | None:
        """Return the smallest start of all rows, or None where the host cannot read it.

        Cached until the tensor is modified.
        """
        if not host_can_read(start) or not start.numel():
            return None
        version = None if start.is_inference() else start._version
        if version is None or self.__dict__.get("_cached_start", (None,))[0] != version:
            self.__dict__["_cached_start"] = version, int(start.min())
        return self.__dict__["_cached_start"][1]

    def __call__(self, b, h, q_idx, kv_idx):
        start = self.start  # a number is a symbol, a 0-d tensor, during tracing
        if isinstance(start, Tensor) and start.dim() > 0:
            start = start[b]
        nodes = self._nodes
        n, m = q_idx - start, kv_idx - start
        inside = (n >= 0) & (n < nodes) & (m >= 0) & (m < nodes)
        at = [x.clamp(max=nodes - 1).clamp(min=0) for x in (n, m)]
        sees = self._ancestors[(b, *at) if self._ancestors.dim() == 3 else tuple(at)]
        before = (m < 0) & (n < nodes) & (kv_idx <= q_idx)
        return before | (inside & sees)


@value
class global_tokens(Mask):
    """`i < count or j < count`: the first `count` positions attend to all, and all to them.

    With a window: `sliding_window(w) | global_tokens(n)`. (Beltagy et al. 2020, Longformer,
    arXiv 2004.05150, section 3.1; Zaheer et al. 2020, Big Bird, arXiv 2007.14062)
    """

    count: int

    def __post_init__(self) -> None:
        set_int(self, "count", minimum=0)

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx < self.count) | (kv_idx < self.count)


@value
class dense(Mask):
    """`tensor[b, h, i, j]`: a mask from a bool tensor, False where a pair is masked out.

    `tensor` broadcasts to `(batch, heads, q_len, kv_len)`: any of its dimensions may be 1, and
    leading ones may be missing. If your mask has a formula, write it: it needs less memory.
    """

    tensor: Tensor
    _varies: str

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool or tensor.dim() > 4:
            got = type(tensor).__name__
            if isinstance(tensor, Tensor):
                got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise ArgumentError(
                f"dense: tensor must be a bool tensor of at most 4 dimensions, got {got}; "
                "an additive mask is a score: bias(tensor)"
            )
        tensor, varies = by_axes(tensor)
        self._set(tensor=tensor, _varies=varies)

    def check_sizes(self, b, h, q_len, kv_len):
        check_broadcasts("dense", self.tensor, b, h, q_len, kv_len)

    def __call__(self, b, h, q_idx, kv_idx):
        at = {"b": b, "h": h, "q": q_idx, "k": kv_idx, "1": 0}
        return self.tensor[tuple([at[name] for name in self._varies])]


@value
class block_table(Mask):
    """`table[b, h, i // block_q, j // block_kv]`: a bool tensor, False for blocks masked out.

    `table` broadcasts to `(batch, heads, rows, columns)` of blocks. Any of its dimensions may be 1,
    and the first two may be missing. `block` is a number, or `(block_q, block_kv)`. If you have a
    list of blocks per row, or want tiles of exactly these blocks, use `headway.top_k_blocks`.
    """

    table: Tensor
    block: tuple[int, int]
    _varies: str

    def __init__(self, table: Tensor, block: int | tuple[int, int]) -> None:
        if (
            not isinstance(table, Tensor)
            or table.dtype != torch.bool
            or table.dim() not in (2, 3, 4)
        ):
            got = type(table).__name__
            if isinstance(table, Tensor):
                got = f"{table.dtype} of shape {tuple(table.shape)}"
            raise ArgumentError(
                "block_table: table must be a bool tensor (batch, heads, rows, columns), of which "
                f"the first two dimensions may be missing, got {got}"
            )
        sizes = tuple(
            [as_int(n) for n in (block if isinstance(block, tuple | list) else (block,) * 2)]
        )
        if len(sizes) != 2 or any(n is None or n < 1 for n in sizes):
            raise ArgumentError(
                f"block_table(block={block!r}): block must be one or two integers >= 1"
            )
        table, varies = by_axes(table)
        self._set(table=table, block=sizes, _varies=varies)

    def check_sizes(self, b, h, q_len, kv_len):
        if not self._varies:
            return
        rows, columns = (
            None if n is None else -(-n // size)
            for n, size in zip((q_len, kv_len), self.block, strict=True)
        )
        for table_size, name, n in zip(
            reversed(self.table.shape), ("columns", "rows", "heads", "batch"),
            (columns, rows, h, b), strict=False,
        ):  # fmt: skip
            if table_size not in (1, n) and n is not None:
                raise ArgumentError(
                    f"block_table: the table has shape {tuple(self.table.shape)}, but b, h, q_len, "
                    f"kv_len = {(b, h, q_len, kv_len)} in blocks of {self.block} have {n} {name}"
                )

    def __call__(self, b, h, q_idx, kv_idx):
        block_q, block_kv = self.block
        at = {"b": b, "h": h, "q": q_idx // block_q, "k": kv_idx // block_kv, "1": 0}
        return self.table[tuple([at[name] for name in self._varies])]


@value
class neighborhood(Mask):
    """Key positions in a window around the query's, on a line, an image or a video.

    Positions are points x of a grid of `shape`, row after row. Of every dimension a query sees the
    `kernel` points from `clip(x - kernel // 2, 0, shape - kernel)` on: the window is shifted, not
    cut, at the border, so that every query sees equally many. `neighborhood((H, W), (7, 7))`.
    (Hassani et al. 2023, Neighborhood Attention Transformer, arXiv 2204.07143, equations 1 and 2)
    """

    shape: tuple[int, ...]
    kernel: tuple[int, ...]

    def __init__(self, shape: int | Sequence[int], kernel: int | Sequence[int]) -> None:
        shape, kernel = grid_sizes("neighborhood", shape=shape, kernel=kernel)
        if any(k > n for k, n in zip(kernel, shape, strict=True)):
            raise ArgumentError(f"neighborhood: kernel={kernel} is larger than shape={shape}")
        self._set(shape=shape, kernel=kernel)

    def check_sizes(self, b, h, q_len, kv_len):
        check_on_grid("neighborhood", self.shape, q_len, kv_len)

    def __call__(self, b, h, q_idx, kv_idx):
        kept = None
        at = zip(_point(q_idx, self.shape), _point(kv_idx, self.shape), strict=True)
        for (x, y), n, k in zip(at, self.shape, self.kernel, strict=True):
            first = (x - k // 2).clamp(max=n - k).clamp(min=0)
            inside = (y >= first) & (y < first + k)
            kept = inside if kept is None else kept & inside
        return kept


@value
class tiled(Mask):
    """`mask` for tokens of an image or a video that are ordered tile by tile.

    Near points of a grid lie far apart in rows; in tiles they lie together, and a window covers few
    tiles of pairs. The mask still sees row-after-row positions; the tensors are reordered once:

        layout = tiled(neighborhood((128, 128), (13, 13)), (128, 128), (8, 16))
        order = layout.order()                      # (16384,): q[:, :, order], k[:, :, order], ...
        out = headway.attention(q, k, v, mask=layout)[:, :, order.argsort()]

    `tile` divides `shape`; tiles follow each other row after row, and so do points within a tile.
    (Zhang et al. 2025, Sliding Tile Attention, arXiv 2502.04507, section 3.2)
    """

    mask: MaskFn
    shape: tuple[int, ...]
    tile: tuple[int, ...]

    def __init__(self, mask: MaskFn, shape: int | Sequence[int], tile: int | Sequence[int]) -> None:
        shape, tile = grid_sizes("tiled", shape=shape, tile=tile)
        if any(n % t for n, t in zip(shape, tile, strict=True)):
            raise ArgumentError(f"tiled: tile={tile} must divide shape={shape}")
        if not callable(mask) or isinstance(mask, Score | type):
            raise ArgumentError(f"tiled: {suggestion('mask', mask)}")
        self._set(mask=mask, shape=shape, tile=tile)

    def check_sizes(self, b, h, q_len, kv_len):
        super().check_sizes(b, h, q_len, kv_len)
        check_on_grid("tiled", self.shape, q_len, kv_len)

    def __call__(self, b, h, q_idx, kv_idx):
        return self.mask(b, h, self._row_major(q_idx), self._row_major(kv_idx))

    def _row_major(self, index: Tensor) -> Tensor:
        """Return the row-major index of an index in tile order."""
        size = math.prod(self.tile)
        grid = [n // t for n, t in zip(self.shape, self.tile, strict=True)]
        place: Any = 0
        points = zip(_point(index // size, grid), _point(index % size, self.tile), strict=True)
        for (of_tile, within), n, t in zip(points, self.shape, self.tile, strict=True):
            place = place * n + of_tile * t + within
        return place

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """Return the row-major index of every point in tile order, int64 `(points,)`."""
        return self._row_major(torch.arange(math.prod(self.shape), device=device))


def _check_ids(
    mask: str, ids: Tensor, kv_ids: Tensor | None, b: int, q_len: int | None, kv_len: int | None
) -> None:
    """Refuse ids that do not cover every query and key of a call."""
    batch = {"b": b} if ids.dim() == 2 else {}
    check_shape(mask, "ids", ids, **batch, q_len=q_len)
    name = "kv_ids"
    if kv_ids is None:
        kv_ids, name = ids, "ids, which is of the keys too without kv_ids,"
    batch = {"b": b} if kv_ids.dim() == 2 else {}
    check_shape(mask, name, kv_ids, **batch, kv_len=kv_len)


def _pair_of_ids(
    ids: Tensor, kv_ids: Tensor | None, b: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the ids of a query and of a key."""
    kv_ids = ids if kv_ids is None else kv_ids
    mine = ids[b, q_idx] if ids.dim() == 2 else ids[q_idx]
    theirs = kv_ids[b, kv_idx] if kv_ids.dim() == 2 else kv_ids[kv_idx]
    return mine, theirs


def _point(index: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the coordinates of the index-th point of a grid, row after row."""
    point = []
    for n in reversed(shape[1:]):
        point.append(index % n)
        index = index // n
    return [index, *reversed(point)]


def by_axes(tensor: Tensor) -> tuple[Tensor, str]:
    """Return a tensor that broadcasts to (b, h, q, k), and its axes: "1hqk", "qk", ...

    A tensor of one number is returned without dimensions, and "".
    """
    names = "bhqk"[4 - tensor.dim() :]
    varies = "".join([n if s != 1 else "1" for n, s in zip(names, tensor.shape, strict=True)])
    return (tensor, varies) if varies.strip("1") else (tensor.reshape(()), "")
