"""Caches of keys and values: one stretch of memory for every row, or pages.

A step has two halves. The host says how many tokens come: `reserve` finds room for them, and moves
`lengths` (and the page table) on the device, in place, so that a captured CUDA graph sees it. Then
every layer writes its keys and values to the last positions of the rows, `append`, and attends:
both are work of the device alone, and no number comes back to the host. On the host, `Reservation`
keeps count of what is reserved and which layers have appended; on the device, `written` does.

    cache.reserve([0, 3], 1)                    # rows 0 and 3 get a token
    for n, layer in enumerate(model.layers):
        ...
        cache[n].append(k, v)
        out = inference.attention(q, *cache[n].kv, mask=headway.causal(), **cache[n].options)
"""

from collections.abc import Iterable, Sequence
from typing import Any, Never

import torch
from torch import Tensor

from ..arguments import DTYPES, check_scale, count_of, shown
from ..backends.slots import write_slots
from ..errors import ArgumentError, CacheFull
from ..surroundings import host_can_read
from ..types import FLOAT8, as_int, named_under_compile
from .slots import check_mapped
from .step import Reservation, check_offsets, may_be_replayed


class Layer:
    """One layer of a cache, `cache[n]`."""

    def __init__(self, cache: "_Cache", n: int) -> None:
        self.cache, self.n = cache, n
        self.turn = cache.step.turns[n]

    @property
    def k(self) -> Tensor:
        """The keys, as `attention` takes them."""
        return self.cache.keys[self.n]

    @property
    def v(self) -> Tensor:
        """The values, as `attention` takes them."""
        return self.cache.values[self.n]

    @property
    def kv(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.k, self.v

    @property
    @named_under_compile
    def options(self) -> dict[str, Any]:
        """Return the other arguments of `attention`: lengths, page_table and scales.

        **Raises:** `ArgumentError` where this layer has not appended the reserved tokens: attention
        would read uninitialized keys.
        """
        cache = self.cache
        cache.step.check_read(self.n, self.turn)
        k_scale, v_scale = self._scales
        return {
            "lengths": cache.lengths, "page_table": cache.page_table, "k_scale": k_scale,
            "v_scale": v_scale,
        }  # fmt: skip

    def positions(self, length: int) -> Tensor:
        """Return the positions of the last `length` tokens of every row, int64 `(rows, length)`."""
        steps = torch.arange(-count_of("length", length), 0, device=self.cache.lengths.device)
        return self.cache.lengths[:, None] + steps

    @named_under_compile
    def append(self, k: Tensor, v: Tensor | None = None, *, cu_q: Tensor | None = None) -> None:
        """Write the keys and values of the reserved tokens. Call it once per layer and `reserve`.

        - `k`, `v`: `(rows, hk, tokens, d)` and `(rows, hk, tokens, dv)`. If a row reserved fewer
          tokens, its last ones are written. Or packed, `(1, hk, tokens, ·)`, with `cu_q`. Leave
          `v` out if the cache has no values (`dv=0`).
        - `cu_q`: int32 `(rows + 1,)`, as in `attention`.

        Numbers are converted to the cache's dtype; for float8 they are first divided by its scales.
        The host waits for nothing, and no gradient is recorded.

        **Raises:** `ArgumentError`, before anything is written, if nothing was reserved since the
        layer's last append, or if more was reserved than you pass. On the CPU the counts in `cu_q`
        are compared, too; on a GPU they are not read.
        """
        cache = self.cache
        of_k, of_v = (x[self.n] for x in cache.stored)
        pairs: list[tuple] = [("k", k, of_k)]
        if v is not None or of_v.shape[-1]:
            pairs.append(("v", v, of_v))
        tokens = cache.check_new(pairs, cu_q)
        check_mapped("append", (of_k, of_v), (k, k if v is None else v))
        replayed = may_be_replayed(cache.lengths)
        if replayed:
            cache.step.replayed = True
        else:
            cache.step.check_append(self.n, self.turn, tokens, cu_q)
        with torch.no_grad():
            v = k[..., :0] if v is None else v
            k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
            write_slots(k, v, of_k, of_v, cache.slots(self.n, tokens, cu_q), *self._scales)
            cache.written[self.n].copy_(cache.lengths)
        if not replayed:  # a capture writes nothing yet
            self.turn.due = False

    @property
    def _scales(self) -> tuple[Tensor | None, Tensor | None]:
        """The scales of this layer's keys and values."""
        of_layer = lambda scale: scale if scale is None or scale.dim() == 0 else scale[self.n]
        return of_layer(self.cache.k_scale), of_layer(self.cache.v_scale)


class _Cache:
    """A base of both caches: the `stored` keys and values, `(layers, ...)`, and on the device
    `lengths`, and `written`, how many keys of every row each layer has, `(layers, rows)`."""

    stored: tuple[Tensor, Tensor]
    lengths: Tensor
    written: Tensor
    page_table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    row_lengths: list[int]
    step: Reservation

    def _set_scales(self, layers: int, hk: int, k_scale: Any, v_scale: Any) -> None:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                check_scale(name, scale, f"() or (layers, hk) = {(layers, hk)}", (layers, hk))
                divides = scale.isfinite() & (scale != 0)
                if scale.is_cpu and host_can_read(scale) and not bool(divides.all()):
                    raise ArgumentError(
                        f"{name} has {float(scale[~divides][0])}, but what is written is divided "
                        "by it; pass finite numbers other than 0"
                    )
        device = self.stored[0].device
        self.k_scale, self.v_scale = (s if s is None else s.to(device) for s in (k_scale, v_scale))

    def _counters(self, layers: int, rows: int, device: Any) -> None:
        with torch.inference_mode(False):
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
            self.written = torch.zeros(layers, rows, dtype=torch.int32, device=device)
        self.row_lengths, self.step = [0] * rows, Reservation(layers, rows)

    @property
    def keys(self) -> Tensor:
        """Return the keys of all layers, `(layers, ...)`."""
        return self.stored[0]

    @property
    def values(self) -> Tensor:
        """Return the values of all layers, `(layers, ...)`."""
        return self.stored[1]

    def __copy__(self) -> Never:
        raise ArgumentError(
            "copy.copy(cache): both would write to the same memory, and each would count for "
            "itself; write copy.deepcopy(cache)"
        )

    def __len__(self) -> int:
        return len(self.stored[0])

    def __getitem__(self, n: int) -> Layer:
        number = as_int(n)
        if number is None:
            raise ArgumentError(f"cache[{n!r}]: a layer is an integer, 0 to {len(self) - 1}")
        if not 0 <= number < len(self):  # an IndexError, since it ends `for layer in cache`
            raise IndexError(f"cache[{n!r}]: a layer is an integer, 0 to {len(self) - 1}")
        return Layer(self, number)

    def check_new(self, pairs: list, cu_q: Tensor | None) -> int:
        """New keys and values fit; how many tokens there are to a row, or in all."""
        if cu_q is not None:
            check_offsets(cu_q, len(self.lengths), self.lengths.device)
        rows = len(self.lengths) if cu_q is None else 1
        tokens = None
        for name, new, stored in pairs:
            hk, width = stored.shape[1], stored.shape[3]
            if not isinstance(new, Tensor) or new.dim() != 4 or not new.is_floating_point():
                raise ArgumentError(
                    f"{name} must be floats (rows, hk, tokens, width), got {shown(new)}"
                )
            tokens = new.shape[2] if tokens is None else tokens
            if tuple(new.shape) != (rows, hk, tokens, width):
                raise ArgumentError(
                    f"{name} must be (rows, hk, tokens, width) = {(rows, hk, tokens, width)}, got "
                    f"{shown(new)}"
                )
            if new.device != stored.device:
                raise ArgumentError(f"{name} is on {new.device}, the cache on {stored.device}")
        return tokens or 0

    def slots(self, n: int, tokens: int, cu_q: Tensor | None) -> Tensor:
        """Return the slots of the tokens of layer n, `(rows · tokens,)` or `(tokens,)`. It is -1
        for tokens that a row has already, and for tokens of no row."""
        device, written = self.lengths.device, self.written[n]
        if cu_q is None:
            row = torch.arange(len(self.lengths), device=device)[:, None]
            position = self.lengths[:, None] + torch.arange(-tokens, 0, device=device)
            is_new = position >= written[:, None]
        else:
            token, last_row = torch.arange(tokens, device=device), len(self.lengths) - 1
            packed_row = torch.searchsorted(cu_q, token.to(cu_q.dtype), right=True)[None] - 1
            row = packed_row.clamp(0, last_row)
            position = self.lengths[row] - cu_q[row + 1] + token
            is_new = (position >= written[row]) & (packed_row == row)
        return torch.where(is_new, self._slots(row, position * is_new), -1).flatten()

    def _slots(self, row: Tensor, position: Tensor) -> Tensor:
        """Return the slots of positions, int64."""
        raise NotImplementedError

    def _rows(self, call: str, rows: Any) -> list[int]:
        """One row or several, as Python's integers."""
        one = as_int(rows)
        items = [rows] if one is not None else _listed(call, "rows", rows)
        numbers = [as_int(row) for row in items]
        row_count = len(self.row_lengths)
        for row, number in zip(items, numbers, strict=True):
            if number is None or not 0 <= number < row_count:
                raise ArgumentError(
                    f"{call}: row {row!r} of a cache of {row_count} rows; rows are integers, 0 to "
                    f"{row_count - 1}"
                )
        return numbers

    def _counts(self, rows: Any, tokens: Any) -> dict[int, int]:
        """Tokens by row."""
        row_numbers = self._rows("reserve", rows)
        one = as_int(tokens)
        token_counts = (
            [tokens] * len(row_numbers) if one is not None else _listed("reserve", "tokens", tokens)
        )
        if len(token_counts) != len(row_numbers) or len(set(row_numbers)) != len(row_numbers):
            raise ArgumentError(
                f"reserve: rows={rows} must be different, with one number of tokens each, "
                f"got {tokens!r}"
            )
        return dict(zip(row_numbers, (count_of("tokens", n) for n in token_counts), strict=True))

    def _tell_lengths(self, shorter: bool = False) -> None:
        """The device's lengths, in place, from the host's; layers have written no more."""
        self.lengths.copy_(torch.tensor(self.row_lengths, dtype=torch.int32, device="cpu"))
        if shorter:
            self.written.copy_(torch.minimum(self.written, self.lengths))

    def _shorten(self, row: int, length: int) -> int:
        """Forget the keys of a row from `length` on; the row."""
        (row,) = self._rows("truncate", [row])
        before, length = self.row_lengths[row], count_of("length", length)
        if length > before:
            raise ArgumentError(f"truncate: row {row} has {before} keys, not {length}")
        self.step.shorten(row, before - length)
        self.row_lengths[row] = length
        return row


def _listed(call: str, name: str, items: Any) -> list:
    if isinstance(items, Tensor | str) or not isinstance(items, Iterable):
        raise ArgumentError(
            f"{call}: {name} must be an integer or a sequence of integers, got {shown(items)}"
        )
    return list(items)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (*DTYPES, *FLOAT8):
        raise ArgumentError(
            f"dtype={dtype}: a cache is of float32, bfloat16, float16, float64, float8_e4m3fn or "
            "float8_e5m2"
        )


class Cache(_Cache):
    """A KV cache in contiguous memory, which doubles when it is full.

    ```python
    import torch
    import headway as hw

    cache = hw.inference.Cache(layers=1, b=2, hk=2, d=64, capacity=16)
    q, k, v = torch.randn(2, 8, 1, 64), *torch.randn(2, 2, 2, 1, 64)  # one new token in 2 rows
    cache.reserve([0, 1], 1)
    cache[0].append(k, v)  # of layer 0
    out = hw.inference.attention(q, *cache[0].kv, mask=hw.causal(), **cache[0].options)
    ```

    **Arguments:**

    - `layers`, `b`, `hk`, `d`, `dv`: layers, rows, key heads, head dimension of keys and of values
      (default: d; 0 if values are columns of the keys).
    - `capacity`: keys that a row has room for at first. `max_capacity`: the largest capacity, None
      for no limit. With `max_capacity=capacity` the memory never moves, as CUDA graphs require.
    - `k_scale`, `v_scale`: scales of float8, `()` or `(layers, hk)`. Written keys and values are
      divided by them, and `attention` multiplies by them.

    `lengths` is `(b,)` int32 on the device. `row_lengths` is the same on the host.
    """

    page_table = None

    def __init__(
        self, layers: int, b: int, hk: int, d: int, dv: int | None = None, *, capacity: int,
        max_capacity: int | None = None, k_scale: Tensor | None = None,
        v_scale: Tensor | None = None, dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        _check_dtype(dtype)
        capacity = count_of("capacity", capacity, 1)
        self.max_capacity = max_capacity
        if max_capacity is not None and count_of("max_capacity", max_capacity) < capacity:
            raise ArgumentError(f"max_capacity={max_capacity} is less than capacity={capacity}")
        self._shape = count_of("layers", layers, 1), count_of("b", b), count_of("hk", hk, 1)
        self._widths = count_of("d", d), d if dv is None else count_of("dv", dv)
        self.stored = self._made(capacity, dtype, device)
        self._set_scales(layers, hk, k_scale, v_scale)
        self._counters(layers, b, device)

    def _made(self, capacity: int, dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            k, v = (
                torch.zeros(*self._shape, capacity, width, dtype=dtype, device=device)
                for width in self._widths
            )
        return k, v

    @property
    def capacity(self) -> int:
        """Keys that a row has room for."""
        return self.stored[0].shape[3]

    def reserve(self, rows: int | Sequence[int], tokens: int | Sequence[int]) -> None:
        """Make room for the next tokens of these rows (one number for all, or one for each), and
        count them. Calls add up until the layers append.

        **Raises:** `CacheFull` where a row would be longer than `max_capacity`, `ArgumentError`
        while some layers have appended and others have not; then nothing has changed.
        """
        counts = self._counts(rows, tokens)
        self.step.check_reserve()
        after = [n + counts.get(row, 0) for row, n in enumerate(self.row_lengths)]
        longest = max(after, default=0)
        if self.max_capacity is not None and longest > self.max_capacity:
            raise CacheFull(
                f"row {after.index(longest)} would have {longest} keys, more than "
                f"max_capacity={self.max_capacity}; clear() rows that have ended"
            )
        if longest > self.capacity:
            room = max(longest, 2 * self.capacity)
            room = room if self.max_capacity is None else min(room, self.max_capacity)
            old = self.keys, self.values
            self.stored = self._made(room, old[0].dtype, old[0].device)
            for x, before in zip(self.stored, old, strict=True):
                x[:, :, :, : before.shape[3]].copy_(before)
        self.row_lengths = after
        self.step.reserve(counts)
        self._tell_lengths()

    def clear(self, rows: int | Sequence[int] | None = None) -> None:
        """Forget these rows, or all."""
        row_numbers = (
            list(range(len(self.row_lengths))) if rows is None else self._rows("clear", rows)
        )
        for row in row_numbers:
            self.row_lengths[row] = 0
        self.step.forget(row_numbers)
        self._tell_lengths(shorter=True)

    def truncate(self, row: int, length: int) -> None:
        """Forget the keys of a row from `length` on, such as drafts that were not accepted."""
        self._shorten(row, length)
        self._tell_lengths(shorter=True)

    def _slots(self, row: Tensor, position: Tensor) -> Tensor:
        return row * self.capacity + position


class PagedCache(_Cache):
    """A KV cache in pages. All layers share one page table and one `lengths`.

    ```python
    import torch
    import headway as hw

    cache = hw.inference.PagedCache(layers=1, pages=8, page=16, hk=2, d=64, rows=2)
    q, k, v = torch.randn(2, 8, 1, 64), *torch.randn(2, 2, 2, 1, 64)  # one new token in 2 rows
    cache.reserve([0, 1], 1)
    cache[0].append(k, v)  # of layer 0
    out = hw.inference.attention(q, *cache[0].kv, mask=hw.causal(), **cache[0].options)
    cache.free(0)  # row 0 is finished; its pages serve another sequence
    ```

    **Arguments:**

    - `layers`, `pages`, `page`: layers, pages per layer, and keys per page.
    - `hk`, `d`, `dv`: key heads, head dimension of keys and of values (default: d; 0 if values are
      columns of the keys).
    - `rows`: number of sequences at a time. `max_pages`: most pages of one row (default: all).
    - `k_scale`, `v_scale`: as in `Cache`.

    `lengths` is `(rows,)` and `page_table` `(rows, max_pages)`, int32 on the device, always in the
    same memory. `row_lengths` is `lengths` on the host. There is one unused page beyond `pages`.

    (Kwon et al. 2023, PagedAttention, arXiv 2309.06180)
    """

    page_table: Tensor  # type: ignore[bad-override-mutable-attribute]

    def __init__(
        self, layers: int, pages: int, page: int, hk: int, d: int, dv: int | None = None, *,
        rows: int, max_pages: int | None = None, k_scale: Tensor | None = None,
        v_scale: Tensor | None = None, dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        _check_dtype(dtype)
        layers, pages = count_of("layers", layers, 1), count_of("pages", pages, 1)
        rows, self.page = count_of("rows", rows, 1), count_of("page", page, 1)
        self.max_pages = pages if max_pages is None else count_of("max_pages", max_pages, 1)
        shape = layers, pages + 1, count_of("hk", hk, 1), self.page
        widths = count_of("d", d), d if dv is None else count_of("dv", dv)
        with torch.inference_mode(False):
            k, v = (torch.zeros(*shape, n, dtype=dtype, device=device) for n in widths)
            self.page_table = torch.full(
                (rows, self.max_pages), pages, dtype=torch.int32, device=device
            )
        self.stored = k, v
        self._set_scales(layers, hk, k_scale, v_scale)
        self._counters(layers, rows, device)
        self._pages: list[list[int]] = [[] for _ in range(rows)]
        self._in_use = [False] * rows
        self._users = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Return how many pages are free."""
        return len(self._free)

    def reserve(self, rows: int | Sequence[int], tokens: int | Sequence[int]) -> None:
        """Find pages for the next tokens of these rows (one number for all, or one for each), and
        count them. Calls add up until the layers append. A page that rows share is copied for the
        one that writes to it.

        **Raises:** `CacheFull` where there are too few pages, `ArgumentError` while some layers
        have appended and others have not; then nothing has changed.
        """
        counts = self._counts(rows, tokens)
        self.step.check_reserve()
        new_pages, copies = {}, {}
        users: dict[int, int] = {}  # of pages that are copied: who still needs them
        for row, count in counts.items():
            length, row_pages = self.row_lengths[row], self._pages[row]
            total = -(-(length + count) // self.page)
            if total > self.max_pages:
                raise CacheFull(
                    f"row {row} would have {length + count} keys, more than max_pages="
                    f"{self.max_pages} pages of {self.page} hold; create the cache with more pages "
                    "per row, or truncate or free the row"
                )
            new_pages[row] = total - len(row_pages)
            shared_page = row_pages[length // self.page] if count and length % self.page else None
            if shared_page is not None and users.get(shared_page, self._users[shared_page]) > 1:
                copies[row] = shared_page
                users[shared_page] = users.get(shared_page, self._users[shared_page]) - 1
        pages_needed = sum(new_pages.values()) + len(copies)
        if pages_needed > len(self._free):
            raise CacheFull(
                f"{pages_needed} pages are needed for {sum(counts.values())} tokens, "
                f"{len(self._free)} of {len(self._users)} are free; free() rows that have ended, "
                "or wait"
            )
        for row, shared_page in copies.items():
            row_pages = self._pages[row]
            row_pages[row_pages.index(shared_page)] = self._take()
            self._release(shared_page)
        for row, page_count in new_pages.items():
            self._pages[row] += [self._take() for _ in range(page_count)]
        for row, count in counts.items():
            self.row_lengths[row] += count
            self._in_use[row] |= count > 0
        if copies:
            source = torch.tensor(list(copies.values()), device="cpu").to(self.keys.device)
            new = [self._pages[row][(self.row_lengths[row] - counts[row]) // self.page]
                   for row in copies]  # fmt: skip
            destination = torch.tensor(new, device="cpu").to(self.keys.device)
            for x in (self.keys, self.values):
                bits = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
                bits[:, destination] = bits[:, source]
        self._tell([row for row in counts if new_pages[row] or row in copies])
        self.step.reserve(counts)
        self._tell_lengths()

    def fork(self, row: int) -> int:
        """Return the number of a row that shares the pages of this one, and is in use until
        `free`. Pages are copied when one of the two writes to them.

        **Raises:** `CacheFull` where no row is free, `ArgumentError` where tokens of this one are
        reserved that not every layer has appended.
        """
        (row,) = self._rows("fork", [row])
        unused = [n for n, in_use in enumerate(self._in_use) if not in_use and n != row]
        if not unused:
            raise CacheFull(f"all {len(self._pages)} rows are in use; free() one that has ended")
        self.step.check_fork(row)
        fork_row = unused[0]
        self._in_use[row] = self._in_use[fork_row] = True
        self._pages[fork_row] = list(self._pages[row])
        self.row_lengths[fork_row] = self.row_lengths[row]
        for page in self._pages[fork_row]:
            self._users[page] += 1
        self._tell([fork_row])
        self.written[:, fork_row] = self.written[:, row]
        self._tell_lengths()
        return fork_row

    def free(self, rows: int | Sequence[int]) -> None:
        """Give the pages of these rows back, and the rows themselves."""
        row_numbers = self._rows("free", rows)
        for row in row_numbers:
            for page in self._pages[row]:
                self._release(page)
            self._pages[row], self.row_lengths[row], self._in_use[row] = [], 0, False
        self.step.forget(row_numbers)
        self._tell(row_numbers)
        self._tell_lengths(shorter=True)

    def truncate(self, row: int, length: int) -> None:
        """Forget the keys of a row from `length` on, such as drafts that were not accepted."""
        row = self._shorten(row, length)
        page_count = -(-self.row_lengths[row] // self.page)
        for page in self._pages[row][page_count:]:
            self._release(page)
        del self._pages[row][page_count:]
        self._tell([row])
        self._tell_lengths(shorter=True)

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)

    def _tell(self, rows: list[int]) -> None:
        """The device's table of these rows, in place, from the host's."""
        if not rows:
            return
        unused_page = len(self._users)
        table = [self._pages[row] + [unused_page] * (self.max_pages - len(self._pages[row]))
                 for row in rows]  # fmt: skip
        device = self.page_table.device
        row_index = torch.tensor(rows, device="cpu").to(device)
        self.page_table[row_index] = torch.tensor(table, dtype=torch.int32, device="cpu").to(device)

    def _slots(self, row: Tensor, position: Tensor) -> Tensor:
        page = self.page_table[row, position // self.page].long()
        return page * self.page + position % self.page
