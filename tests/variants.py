"""Scores and masks by name, each written twice: as a user hands it to Headway, and as a formula.

The formula of a library value is written out here, from its definition; a user's function is its
own formula. Captured tensors are made from the case, so that the same name works for any lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import headway as hw

Make = Callable[[Any, Any], Callable]  # (case, captured tensors by name) -> score or mask


@dataclass(frozen=True)
class Variant:
    make: Make
    plain: Make
    tensors: dict[str, Callable] = field(default_factory=dict)  # case -> float64 or int64 values
    frozen: tuple[str, ...] = ()  # float tensors that are not learned


def library(make: Make, plain: Make, **tensors: Callable) -> Variant:
    return Variant(make, plain, tensors)


def user(make: Make, frozen: tuple[str, ...] = (), **tensors: Callable) -> Variant:
    return Variant(make, make, tensors, frozen)


def table(*size: str | int) -> Callable:
    """Random numbers of a shape made of numbers and attributes of the case."""
    shape = lambda c: [n if isinstance(n, int) else getattr(c, n) for n in size]
    return lambda c: torch.randn(shape(c)).double()


# -- masks ----------------------------------------------------------------------------------------


def _documents(c: Any, length: int) -> torch.Tensor:
    """(b, length): runs of about a fifth of the sequence, cut elsewhere in every row."""
    step = max(length // 5, 2)
    return (torch.arange(length) + 3 * torch.arange(c.b)[:, None]) // step


def _images(c: Any) -> torch.Tensor:
    """(b, q_len): in every fourth stretch of seven an image; the first and the third are one."""
    stretch = (torch.arange(c.q_len) + 5 * torch.arange(c.b)[:, None]) // 7
    return torch.where(stretch % 4 == 1, torch.where(stretch == 9, 0, stretch // 4), -1)


def _outside(b, h, i, j):  # a nested function: an operand of the library's `&`
    return (i + j) % 3 != 0


class EveryNth:
    """A mask may be an object."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % self.n == 0


def _in_tree(parents, i, j, start: int):
    """A node, and what leads to it from the root; before the tree, causal."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for n, parent in enumerate(parents.tolist()):
        if parent >= 0:
            sees[n] |= sees[parent]
    last = start + len(parents) - 1
    at = (i - start).clamp(0, last - start), (j - start).clamp(0, last - start)
    return (j < start) & (j <= i) | (i >= start) & (j >= start) & (j <= last) & sees[at]


def _window_of(width: int, b, h, i, j):
    return (i - j).abs() < width


def _near(x, y, n: int, k: int):
    """Of a dimension of n points: y among the k around x, shifted at the border."""
    first = (x - k // 2).clamp(0, n - k)
    return (y >= first) & (y < first + k)


def _in_rows(p):
    """The row-after-row place of place p in tiles of 2 x 4 of a grid of width 12."""
    tile, within = p // 8, p % 8
    return (tile // 3 * 2 + within // 4) * 12 + tile % 3 * 4 + within % 4


def _neighborhood_in_tiles(b, h, i, j):
    i, j = _in_rows(i), _in_rows(j)
    return _near(i // 12, j // 12, 4, 3) & _near(i % 12, j % 12, 12, 5)


MASKS: dict[str, Variant] = {
    "causal": library(lambda c, t: hw.causal(), lambda c, t: lambda b, h, i, j: j <= i),
    "causal_end": library(
        lambda c, t: hw.causal(c.kv_len - c.q_len),
        lambda c, t: lambda b, h, i, j: j - c.kv_len <= i - c.q_len,
    ),
    "causal_late": library(  # the first rows see no key
        lambda c, t: hw.causal(-7), lambda c, t: lambda b, h, i, j: j + 7 <= i
    ),
    "window": library(
        lambda c, t: hw.sliding_window(9), lambda c, t: lambda b, h, i, j: (i - j).abs() <= 8
    ),
    "causal_window": library(
        lambda c, t: hw.causal() & hw.sliding_window(c.kv_len // 7 + 1),
        lambda c, t: lambda b, h, i, j: (j <= i) & (i - j <= c.kv_len // 7),
    ),
    "chunked": library(
        lambda c, t: hw.causal() & hw.chunked(9),
        lambda c, t: lambda b, h, i, j: (j <= i) & (j >= i - i % 9),
    ),
    "block_causal": library(
        lambda c, t: hw.block_causal(10), lambda c, t: lambda b, h, i, j: j < (i // 10 + 1) * 10
    ),
    "prefix": library(
        lambda c, t: hw.prefix(c.kv_len // 3), lambda c, t: lambda b, h, i, j: j < c.kv_len // 3
    ),
    "prefix_lm": library(  # of another length in every row of the batch, 0 in the first
        lambda c, t: hw.causal() | hw.prefix(t.n),
        lambda c, t: lambda b, h, i, j: (j <= i) | (j < t.n[b]),
        n=lambda c: torch.arange(c.b) * (c.kv_len // 3),
    ),
    "document": library(
        lambda c, t: hw.document(t.ids),
        lambda c, t: lambda b, h, i, j: t.ids[i] == t.ids[j],
        ids=lambda c: _documents(c, c.q_len)[0],
    ),
    "causal_document": library(
        lambda c, t: hw.causal() & hw.document(t.ids),
        lambda c, t: lambda b, h, i, j: (j <= i) & (t.ids[b, i] == t.ids[b, j]),
        ids=lambda c: _documents(c, c.q_len),
    ),
    "document_cross": library(  # keys of other documents than any query's, and the reverse
        lambda c, t: hw.document(t.ids, t.kv_ids),
        lambda c, t: lambda b, h, i, j: t.ids[b, i] == t.kv_ids[j],
        ids=lambda c: _documents(c, c.q_len),
        kv_ids=lambda c: torch.arange(c.kv_len) // (c.kv_len // 4 + 1) + 1,
    ),
    "spans": library(  # of other positions in every row of the batch; one span in two pieces
        lambda c, t: hw.causal() | hw.spans(t.ids),
        lambda c, t: (
            lambda b, h, i, j: (j <= i) | (t.ids[b, i] >= 0) & (t.ids[b, i] == t.ids[b, j])
        ),
        ids=_images,
    ),
    "tree": library(  # the last positions that queries have
        lambda c, t: hw.tree(t.parents, c.q_len - 7),
        lambda c, t: lambda b, h, i, j: _in_tree(t.parents, i, j, c.q_len - 7),
        parents=lambda c: torch.tensor([-1, 0, 0, 1, 1, 2, 5]),
    ),
    "padding": library(  # no key at all in the first row of the batch
        lambda c, t: hw.padding(t.lengths),
        lambda c, t: lambda b, h, i, j: j < t.lengths[b],
        lengths=lambda c: torch.arange(c.b) * c.kv_len // c.b,
    ),
    "padding by key": library(
        lambda c, t: hw.padding(t.tokens),
        lambda c, t: lambda b, h, i, j: t.tokens[b, j],
        tokens=lambda c: torch.rand(c.b, c.kv_len) < 0.7,
    ),
    "global": library(
        lambda c, t: hw.sliding_window(5) | hw.global_tokens(3),
        lambda c, t: lambda b, h, i, j: ((i - j).abs() < 5) | (i < 3) | (j < 3),
    ),
    "dilated": library(
        lambda c, t: hw.dilated(4, 3),
        lambda c, t: lambda b, h, i, j: ((i - j).abs() <= 11) & ((i - j) % 3 == 0),
    ),
    "strided": library(
        lambda c, t: hw.causal() & hw.strided(5),
        lambda c, t: lambda b, h, i, j: (j <= i) & ((i - j < 5) | ((i - j) % 5 == 0)),
    ),
    "dense_value": library(
        lambda c, t: hw.dense(t.m),
        lambda c, t: lambda b, h, i, j: t.m[0 * b, h, i, j],
        m=lambda c: torch.rand(1, c.hq, c.q_len, c.kv_len) < 0.4,
    ),
    "block_table": library(
        lambda c, t: hw.causal() | hw.block_table(t.m, (8, 5)),
        lambda c, t: lambda b, h, i, j: (j <= i) | t.m[b, h, i // 8, j // 5],
        m=lambda c: torch.rand(c.b, c.hq, -(-c.q_len // 8), -(-c.kv_len // 5)) < 0.3,
    ),
    "neighborhood": library(
        lambda c, t: hw.neighborhood(c.q_len, 7),
        lambda c, t: lambda b, h, i, j: _near(i, j, c.q_len, 7),
    ),
    "tiled": library(
        lambda c, t: hw.tiled(hw.neighborhood((4, 12), (3, 5)), (4, 12), (2, 4)),
        lambda c, t: _neighborhood_in_tiles,
    ),
    "not": library(
        lambda c, t: ~(hw.causal() | hw.sliding_window(4)),
        lambda c, t: lambda b, h, i, j: (j > i) & (j - i >= 4),
    ),
    "mixed": library(
        lambda c, t: hw.causal() & _outside | hw.prefix(2),
        lambda c, t: lambda b, h, i, j: (j <= i) & ((i + j) % 3 != 0) | (j < 2),
    ),
    "nothing": user(lambda c, t: lambda b, h, i, j: j < 0),
    "no_row": user(lambda c, t: lambda b, h, i, j: i != c.q_len // 2),
    "no_key": user(lambda c, t: lambda b, h, i, j: j != c.kv_len // 2),
    "by_head": user(lambda c, t: lambda b, h, i, j: (i >= j) & (i - j < 11 * (h + 1))),
    "by_batch": user(lambda c, t: lambda b, h, i, j: torch.where(b == 0, i >= j, i <= j)),
    "floor": user(lambda c, t: lambda b, h, i, j: (i - j) // 7 % 3 == (h - 2) // 2 % 2),
    "dense": user(
        lambda c, t: lambda b, h, i, j: t.m[b, i, j],
        m=lambda c: torch.rand(c.b, c.q_len, c.kv_len) < 0.3,
    ),
    "sparse": user(  # mostly rows that see nothing
        lambda c, t: lambda b, h, i, j: t.m[h, i, j],
        m=lambda c: torch.rand(c.hq, c.q_len, c.kv_len) < 0.5 / c.kv_len,
    ),
    "object": user(lambda c, t: EveryNth(5)),
    "partial": user(lambda c, t: partial(_window_of, 6)),
    "checker": user(lambda c, t: lambda b, h, i, j: (i // 128 + j // 128) % 2 == 0),
    "corner": user(lambda c, t: lambda b, h, i, j: (i >= c.q_len - 3) & (j >= c.kv_len - 2)),
}

# -- scores ---------------------------------------------------------------------------------------


def _slopes(c: Any) -> list[float]:
    """The slopes of ALiBi's paper for 1, 2, 4 or 8 heads, and its rule for 3 and 6."""
    n = {3: 2, 6: 4}.get(c.hq, c.hq)
    slopes = [2 ** (-8 * (k + 1) / n) for k in range(n)]
    return slopes + [2 ** (-4 * (2 * k + 1) / n) for k in range(c.hq - n)]


def _cap(s, c: float):
    return c * torch.tanh(s / c)


def _t5_edges(distance, exact: int, edges: list[int]):
    """Bucket of a distance: its own below `exact`, then one more from each further edge on."""
    bucket = distance.clamp(0, exact - 1)
    for edge in edges:
        bucket = bucket + (distance >= edge)
    return bucket


def _t5_bucket(distance):
    """10 buckets, to distance 20: 0, 1, 2-4, 5-9, 10 and above on either side. The edges are 2
    times 10 to the powers 0, 1/3, 2/3 of the paper's logarithmic spacing."""
    return (distance > 0) * 5 + _t5_edges(distance.abs(), 2, [2, 5, 10])


def _with_token(i, j, height: int, width: int):
    """The row of a table of 2-D offsets; position 0 is the class token."""
    x, y = (i - 1) % (height * width), (j - 1) % (height * width)
    down, right = x // width - y // width, x % width - y % width
    at = (down + height - 1) * (2 * width - 1) + right + width - 1
    rows = (2 * height - 1) * (2 * width - 1)
    at = torch.where(j == 0, rows + 1, at)
    return torch.where(i == 0, torch.where(j == 0, rows + 2, rows), at)


def _in_place(c, t):
    def score(s, b, h, i, j):
        s *= t.gain[h]
        s.add_(t.table[h, (i + j) % 5])
        distance = i - j
        distance.abs_()
        return s.sub_(distance * 0.01)

    return score


def _buckets(c, t):  # T5: a captured int table says which learned number to take
    return lambda s, b, h, i, j: s + t.table[h, t.bucket[(i - j).abs()]]


def _holes(c, t):
    return lambda s, b, h, i, j: torch.where((i + 2 * j) % 4 == 0, float("-inf"), s * t.gain[h])


def _walls(c, t):
    """-inf, of a number and of a table, times what is learned: where it falls, nothing is."""
    return lambda s, b, h, i, j: (
        (torch.where((i + 2 * j) % 4 == 0, float("-inf"), s) + t.wall[j % 5]) * t.heat[h]
    )


def _within_walls(c, t):
    low = t.wall.masked_fill(t.wall == -torch.inf, 0)
    return lambda s, b, h, i, j: torch.where(
        ((i + 2 * j) % 4 == 0) | (j % 5 == 3), float("-inf"), (s + low[j % 5]) * t.heat[h]
    )


def _all_sorts(c, t):
    def score(s, b, h, i, j):
        far = (i - j).abs().float()
        gate = torch.sigmoid(t.gain[h] * torch.sin(far / 3))
        return torch.clamp(s, -4.0, 4.0) * gate + torch.maximum(s, -s) * 0.1 - far.sqrt() * 0.05

    return score


def _bias(*size: str | int) -> Variant:
    """An additive bias that broadcasts to the square."""
    dims = (*["1"] * (4 - len(size)), *map(str, size))

    def plain(c, t):
        full = t.bias.reshape([1] * (4 - t.bias.dim()) + list(t.bias.shape))

        def score(s, *at):
            at = [0 * x if dim == "1" else x for x, dim in zip(at, dims, strict=True)]
            return s + full[tuple(at)]

        return score

    return library(lambda c, t: hw.bias(t.bias), plain, bias=table(*size))


SCORES: dict[str, Variant] = {
    "alibi": library(
        lambda c, t: hw.alibi(c.hq),
        lambda c, t: (
            lambda s, b, h, i, j: s - torch.tensor(_slopes(c), dtype=s.dtype)[h] * (i - j).abs()
        ),
    ),
    "alibi_learned": library(
        lambda c, t: hw.alibi(t.slopes),
        lambda c, t: lambda s, b, h, i, j: s - t.slopes[h] * (i - j).abs(),
        slopes=lambda c: torch.rand(c.hq).double(),
    ),
    "softcap": library(
        lambda c, t: hw.softcap(3.0), lambda c, t: lambda s, b, h, i, j: 3 * torch.tanh(s / 3)
    ),
    "relative": library(
        lambda c, t: hw.relative_bias(t.table),
        lambda c, t: lambda s, b, h, i, j: s + t.table[h, (j - i).clamp(-6, 6) + 6],
        table=table("hq", 13),
    ),
    "t5": library(
        lambda c, t: hw.t5_bias(t.table, max_distance=20),
        lambda c, t: lambda s, b, h, i, j: s + t.table[_t5_bucket(j - i), h],
        table=table(10, "hq"),
    ),
    "t5_decoder": library(
        lambda c, t: hw.t5_bias(t.table, max_distance=30, bidirectional=False),
        lambda c, t: lambda s, b, h, i, j: s + t.table[_t5_edges(i - j, 3, [3, 7, 14]), h],
        table=table(6, "hq"),
    ),
    "window": library(  # windows of 3 x 5 points, one after the other
        lambda c, t: hw.window_bias(t.table, (3, 5)),
        lambda c, t: lambda s, b, h, i, j: (
            s + t.table[(i % 15 // 5 - j % 15 // 5 + 2) * 9 + i % 5 - j % 5 + 4, h]
        ),
        table=table(45, "hq"),
    ),
    "window_token": library(  # a window of 4 x 10 points behind a class token
        lambda c, t: hw.window_bias(t.table, (4, 10)),
        lambda c, t: lambda s, b, h, i, j: s + t.table[_with_token(i, j, 4, 10), h],
        table=table(7 * 19 + 3, "hq"),
    ),
    "log_sigmoid": library(
        lambda c, t: hw.log_sigmoid(-2.5),
        lambda c, t: lambda s, b, h, i, j: -torch.log(1 + torch.exp(2.5 - s)),
    ),
    "log_sigmoid_learned": library(
        lambda c, t: hw.alibi(t.slopes) >> hw.log_sigmoid(t.shift),
        lambda c, t: lambda s, b, h, i, j: -torch.log(
            1 + torch.exp(t.slopes[h] * (i - j).abs() - s - t.shift[h])
        ),
        slopes=lambda c: torch.rand(c.hq).double() * 0.1,
        shift=table("hq"),
    ),
    "alibi_softcap": library(
        lambda c, t: hw.alibi(t.slopes) >> hw.softcap(5.0),
        lambda c, t: lambda s, b, h, i, j: _cap(s - t.slopes[h] * (i - j).abs(), 5),
        slopes=lambda c: torch.rand(c.hq).double(),
    ),
    "chain": library(
        lambda c, t: hw.relative_bias(t.table) >> hw.softcap(4) >> hw.bias(t.bias),
        lambda c, t: lambda s, b, h, i, j: (
            _cap(s + t.table[h, (j - i).clamp(-2, 2) + 2], 4) + t.bias[h, 0 * i, j]
        ),
        table=table("hq", 5),
        bias=table("hq", 1, "kv_len"),
    ),
    "then_user": library(
        lambda c, t: hw.softcap(2.0) >> (lambda s, b, h, i, j: s * t.gain[h]),
        lambda c, t: lambda s, b, h, i, j: _cap(s, 2) * t.gain[h],
        gain=table("hq"),
    ),
    "bias_number": _bias(),
    "bias_keys": _bias("kv_len"),
    "bias_rows": _bias("q_len", 1),
    "bias_heads": _bias("hq", 1, 1),
    "bias_square": _bias("q_len", "kv_len"),
    "bias_batch": _bias("b", 1, "q_len", "kv_len"),
    "bias_all": _bias("b", "hq", "q_len", "kv_len"),
    "twice": user(  # one tensor indexed twice, and a learned number
        lambda c, t: lambda s, b, h, i, j: (
            s * t.log_scale.exp()
            + t.table[h, (j - i).clamp(-3, 3) + 3] * t.table[0, (i + j) % 7]
        ),
        table=table("hq", 7),
        log_scale=table(),
    ),
    "stepwise": user(  # table[h][rel]
        lambda c, t: (
            lambda s, b, h, i, j: s + t.table[h][(j - i).clamp(-3, 3) + 3] * t.table[-1][2]
        ),
        table=table("hq", 7),
    ),
    "cancelled": user(  # positions that cancel: indices depend on less than they read
        lambda c, t: (
            lambda s, b, h, i, j: s * t.gain[i * 0] + t.shift[h, (i - j) * 0] + t.keys[i + j - i]
        ),
        gain=table(1),
        shift=table("hq", 1),
        keys=table("kv_len"),
    ),
    "in_place": user(_in_place, gain=table("hq"), table=table("hq", 5)),
    "holes": user(_holes, gain=table("hq")),
    "walls": Variant(
        _walls,
        _within_walls,
        {
            "heat": lambda c: torch.rand(c.hq).double() + 0.5,
            "wall": lambda c: torch.tensor([0.25, -0.5, 0.0, -torch.inf, 1.0]).double(),
        },
        frozen=("wall",),
    ),
    "all_sorts": user(_all_sorts, gain=table("hq")),
    "buckets": user(
        _buckets,
        table=table("hq", 6),
        bucket=lambda c: (torch.arange(max(c.q_len, c.kv_len)) + 1).log2().long().clamp(max=5),
    ),
    "floor": user(
        lambda c, t: lambda s, b, h, i, j: s + t.table[(i - j) // 5 % 3, (j - i) % 4],
        table=table(3, 4),
    ),
    "outside": user(  # reads far outside wherever the mask (causal_window) does not keep the pair
        lambda c, t: lambda s, b, h, i, j: s + t.table[h, i - j],
        table=lambda c: torch.randn(c.hq, c.kv_len // 7 + 1).double(),
    ),
    "negative": user(  # Python's negative indices: from 0 back to -(window - 1)
        lambda c, t: lambda s, b, h, i, j: s + t.table[h, j - i],
        table=lambda c: torch.randn(c.hq, c.kv_len // 7 + 1).double(),
    ),
    "undefined": user(  # NaN, and an infinite derivative, at pairs that a causal mask does not keep
        lambda c, t: lambda s, b, h, i, j: s - t.gain[h] * (1.0 * (i - j) + 0.5).sqrt(),
        gain=table("hq"),
    ),
    "ends": user(  # NaN past the last query and past the last key, as its derivatives are
        lambda c, t: lambda s, b, h, i, j: s * ((c.q_len - i - 0.5) / c.q_len).sqrt()
        - t.gain[h] * ((c.q_len - i - 0.5) / c.q_len).log()
        + ((c.kv_len - j - 0.5) / c.kv_len).log()
        + t.unfinished[i],
        gain=table("hq"),
        frozen=("unfinished",),
        unfinished=lambda c: F.pad(torch.randn(c.q_len).double(), (0, 70), value=torch.nan),
    ),
    "added": user(  # neither branch is more than a number
        lambda c, t: lambda s, b, h, i, j: s * t.gain[h]
        + torch.where((i + 2 * j) % 4 == 0, float("-inf"), 0.0),
        gain=table("hq"),
    ),
    "constant": user(  # does not see the logit: dq = dk = 0
        lambda c, t: lambda s, b, h, i, j: t.table[h, (i * j) % 5], table=table("hq", 5)
    ),
    "number": user(lambda c, t: lambda s, b, h, i, j: 0.25),
    "frozen": user(
        lambda c, t: lambda s, b, h, i, j: s + t.still[h] * t.moved[(i + j) % 3],
        frozen=("still",),
        still=table("hq"),
        moved=table(3),
    ),
    "polynomial": user(lambda c, t: lambda s, b, h, i, j: s - 0.02 * s**3 + 0.1 * s * s),
    "by_batch": user(
        lambda c, t: lambda s, b, h, i, j: s * t.gain[b, h] + t.shift[b], gain=table("b", "hq"),
        shift=table("b"),
    ),
    "distance": user(  # a wave per head, its frequency learned; log of a distance
        lambda c, t: lambda s, b, h, i, j: (
            s + t.amp[h] * torch.cos(t.freq[h] * (i - j)) - torch.log1p((i - j).abs().float()) * 0.1
        ),
        amp=table("hq"),
        freq=table("hq"),
    ),
}  # fmt: skip
