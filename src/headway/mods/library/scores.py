"""The library's scores, which change a logit before the softmax.

Each is a formula over the scaled logit `score` and the positions; `first >> second` composes:
`alibi(8) >> softcap(30.0)`.
"""

import math

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...types import as_int, as_real
from ..base import Score, check_broadcasts, check_shape, value
from .constants import constant
from .masks import by_axes


@value
class alibi(Score):
    """`score - slopes[h] * |i - j|`: a penalty that grows with distance.

    Given a number of heads, the slopes are the paper's geometric sequence; given a tensor
    `(heads,)`, they are learned if it requires grad. (Press et al. 2022, Train short, test long,
    arXiv 2108.12409, section 3)
    """

    slopes: Tensor

    def __init__(self, slopes: int | Tensor) -> None:
        heads = as_int(slopes)
        if heads is not None and heads > 0:
            slopes = constant(alibi_slopes(heads))
        _check_floats(
            "alibi", "slopes", slopes, "a number of heads or a float tensor (heads,)", (1,)
        )
        self._set(slopes=slopes)

    def check_sizes(self, b, h, q_len, kv_len):
        check_shape("alibi", "slopes", self.slopes, h=h)

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes[h] * (q_idx - kv_idx).abs()


def alibi_slopes(n_heads: int) -> Tensor:
    """Return ALiBi's slopes, `(n_heads,)` float32: 2^(-8/n), 2^(-16/n), ...

    Where n is not a power of two: those of the next lower power, then every other one of twice
    that power.
    """
    lower_power = 2 ** math.floor(math.log2(n_heads))
    exponents = [-8 * (k + 1) / lower_power for k in range(lower_power)]
    exponents += [-4 * (2 * k + 1) / lower_power for k in range(n_heads - lower_power)]
    return torch.tensor(
        [2.0**exponent for exponent in exponents], dtype=torch.float32, device="cpu"
    )


@value
class softcap(Score):
    """`cap * tanh(score / cap)`: no logit leaves (-cap, cap).

    (Bello et al. 2017, arXiv 1611.09940; Gemma Team 2024, Gemma 2, arXiv 2408.00118, section 2)
    """

    cap: float

    def __post_init__(self) -> None:
        cap = as_real(self.cap)
        if cap is None or not cap > 0:
            raise ArgumentError(f"softcap(cap={self.cap!r}): cap must be a number above 0")
        self._set(cap=float(cap))

    def __call__(self, score, b, h, q_idx, kv_idx):
        return self.cap * torch.tanh(score / self.cap)


@value
class relative_bias(Score):
    """`score + table[h, clip(j - i, -m, m) + m]`: one learned number per head and distance.

    `table` is `(heads, 2m + 1)`; column m is distance 0. (Shaw et al. 2018, arXiv 1803.02155,
    equation 5's clipping; Raffel et al. 2020, T5, arXiv 1910.10683, section 2.1)
    """

    table: Tensor
    _most: int

    def __init__(self, table: Tensor) -> None:
        _check_floats("relative_bias", "table", table, "a float tensor (heads, 2m + 1)", (2,))
        if table.shape[1] % 2 == 0:
            raise ArgumentError(
                f"relative_bias: table must be (heads, 2m + 1), one column per distance from -m "
                f"to m, got {tuple(table.shape)}"
            )
        self._set(table=table, _most=table.shape[1] // 2)

    def check_sizes(self, b, h, q_len, kv_len):
        check_shape("relative_bias", "table", self.table, h=h, columns=self.table.shape[1])

    def __call__(self, score, b, h, q_idx, kv_idx):
        distance = (kv_idx - q_idx).clamp(-self._most, self._most)
        return score + self.table[h, distance + self._most]


@value
class t5_bias(Score):
    """`score + table[bucket(j - i), h]`: T5's relative position bias.

    Distances fall into `table.shape[0]` buckets: one for each small distance, then ever wider ones
    (logarithmic) up to `max_distance`, beyond which all share the last. `bidirectional` (encoders)
    gives half of the buckets to keys after the query; otherwise (decoders) all keys after it share
    the bucket of distance 0. `table` is `(buckets, heads)`, the layout of T5's weights, learned if
    it requires grad. T5 does not scale its logits: pass `scale=1.0`.
    (Raffel et al. 2020, T5, arXiv 1910.10683, section 2.1)
    """

    table: Tensor
    _buckets: Tensor  # of distances -max_distance to max_distance
    _most: int

    def __init__(self, table: Tensor, max_distance: int = 128, bidirectional: bool = True) -> None:
        _check_floats("t5_bias", "table", table, "a float tensor (buckets, heads)", (2,))
        buckets, max_distance = _t5_buckets(table.shape[0], max_distance, bidirectional)
        self._set(table=table, _buckets=buckets.to(table.device), _most=max_distance)

    def check_sizes(self, b, h, q_len, kv_len):
        _check_columns("t5_bias", self.table, h)

    def __call__(self, score, b, h, q_idx, kv_idx):
        distance = (kv_idx - q_idx).clamp(-self._most, self._most)
        return score + self.table[self._buckets[distance + self._most], h]


def _t5_buckets(n_buckets: int, max_distance: int, bidirectional: bool) -> tuple[Tensor, int]:
    """Return the bucket of every distance j - i up to `max_distance`, int64; and that, as an int.

    Computed in float32 in the order of T5's own code. It is a table because a kernel's logarithm
    may fall on the other side of a bucket's edge.
    """
    side = n_buckets // 2 if bidirectional else n_buckets
    exact = side // 2  # distances below it have a bucket each
    if exact < 1 or n_buckets % (2 if bidirectional else 1):
        raise ArgumentError(
            f"t5_bias: table has {n_buckets} rows; it needs an even number, at least "
            f"{4 if bidirectional else 2}, one per bucket"
        )
    argument, max_distance = max_distance, as_int(max_distance)
    if max_distance is None or max_distance <= exact:
        raise ArgumentError(
            f"t5_bias(max_distance={argument!r}): max_distance must be an integer above "
            f"{exact}, the distances that have a bucket each"
        )
    distance = torch.arange(-max_distance, max_distance + 1, device="cpu")
    offset = (distance > 0) * side if bidirectional else 0
    distance = distance.abs() if bidirectional else (-distance).clamp(min=0)
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    log_bucket = (exact + (ratio * (side - exact)).long()).clamp(max=side - 1)
    return offset + torch.where(distance < exact, distance, log_bucket), max_distance


@value
class window_bias(Score):
    """`score + table[(y_i - y_j + h - 1) * (2w - 1) + x_i - x_j + w - 1, head]`: one learned number
    per head and 2-D offset, for windows of `(h, w)` points of an image, row after row.

    `table` is `((2h - 1) * (2w - 1), heads)`, the layout of Swin's weights, learned if it requires
    grad. Windows are rows of the batch, or follow each other in a sequence, kept apart by
    `chunked(h * w)`. Shifted windows are a mask. Where the image of `(H, W)` points was rolled by
    -s along both, only what lay together before may meet in a window; of all windows in a sequence:

        wrapped = lambda n: (torch.arange(n) >= n - s).long()      # came from the other side
        part = wrapped(H)[:, None] * 2 + wrapped(W)                # (H, W): 0 to 3
        window = torch.arange(H)[:, None] // h * (W // w) + torch.arange(W) // w
        order = tiled(causal(), (H, W), (h, w)).order()            # windows one after the other
        mask = document((window * 4 + part).flatten()[order])

    With three rows more, BEiT's layout: position 0 is a class token before the points of one
    window, and the last three rows are of it to a point, of a point to it, and of it to itself.
    (Liu et al. 2021, Swin Transformer, arXiv 2103.14030, equation 4; Bao et al. 2022, BEiT,
    arXiv 2106.08254)
    """

    table: Tensor
    window: tuple[int, int]
    _token: bool

    def __init__(self, table: Tensor, window: tuple[int, int]) -> None:
        sizes = tuple([as_int(n) for n in window]) if isinstance(window, tuple | list) else ()
        if len(sizes) != 2 or any(n is None or n < 1 for n in sizes):
            raise ArgumentError(
                f"window_bias(window={window!r}): window must be two integers of at least 1, "
                "(height, width)"
            )
        height, width = sizes
        offsets = (2 * height - 1) * (2 * width - 1)
        expected = (
            f"({offsets}, heads), one row per offset in a window of {sizes}, or "
            f"({offsets + 3}, heads) with a class token"
        )
        _check_floats("window_bias", "table", table, f"a float tensor {expected}", (2,))
        if table.shape[0] not in (offsets, offsets + 3):
            transposed = table.shape[1] in (offsets, offsets + 3)
            raise ArgumentError(
                f"window_bias: the table has shape {tuple(table.shape)}, but must be {expected}"
                f"{'; pass table.T' if transposed else ''}"
            )
        self._set(table=table, window=sizes, _token=table.shape[0] != offsets)

    def check_sizes(self, b, h, q_len, kv_len):
        _check_columns("window_bias", self.table, h)
        points = self.window[0] * self.window[1] + self._token
        for name, length in (("q_len", q_len), ("kv_len", kv_len)):
            if length is not None and length > points and (self._token or length % points):
                limit = "with the class token" if self._token else "or a multiple of it"
                raise ArgumentError(
                    f"window_bias: window={self.window} is for at most {points} positions, "
                    f"{limit}, but this call has {name}={length}"
                )

    def __call__(self, score, b, h, q_idx, kv_idx):
        height, width = self.window
        first = 1 if self._token else 0
        i, j = ((at - first) % (height * width) for at in (q_idx, kv_idx))
        down, right = i // width - j // width, i % width - j % width
        at = (down + (height - 1)) * (2 * width - 1) + right + (width - 1)
        if self._token:
            offsets = (2 * height - 1) * (2 * width - 1)
            of_query = torch.where(kv_idx == 0, offsets + 2, offsets)
            at = torch.where(q_idx == 0, of_query, torch.where(kv_idx == 0, offsets + 1, at))
        return score + self.table[at, h]


@value
class log_sigmoid(Score):
    """`log(sigmoid(score + bias))`, bias a number, or a tensor `()` or `(heads,)` that may learn.

    Under a softmax that is divided out, by the log-sum-exp, this is sigmoid attention: see
    `headway.sigmoid_attention`. (Ramapuram et al. 2024, arXiv 2409.04431)
    """

    bias: float | Tensor = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.bias, Tensor):
            expected = "a number or a float tensor () or (heads,)"
            _check_floats("log_sigmoid", "bias", self.bias, expected, (0, 1))
            return
        number = as_real(self.bias)
        if number is None or not -math.inf < number < math.inf:
            raise ArgumentError(
                f"log_sigmoid(bias={self.bias!r}): bias must be a finite number or a float tensor "
                "() or (heads,)"
            )
        self._set(bias=float(number))

    def check_sizes(self, b, h, q_len, kv_len):
        if isinstance(self.bias, Tensor) and self.bias.dim():
            check_shape("log_sigmoid", "bias", self.bias, h=h)

    def __call__(self, score, b, h, q_idx, kv_idx):
        bias = self.bias  # a number is a symbol, a 0-d tensor, during tracing
        x = score + (bias[h] if isinstance(bias, Tensor) and bias.dim() else bias)
        # Below -104 a float32 sigmoid is 0, and its logarithm would be -inf.
        return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-x.abs()))


@value
class bias(Score):
    """`score + tensor[b, h, i, j]`: an additive bias, learned if it requires grad.

    `tensor` broadcasts to `(batch, heads, q_len, kv_len)`: any of its dimensions may be 1, and
    leading ones may be missing.
    """

    tensor: Tensor
    _varies: str

    def __init__(self, tensor: Tensor) -> None:
        _check_floats(
            "bias", "tensor", tensor, "a float tensor of at most 4 dimensions", (0, 1, 2, 3, 4)
        )
        tensor, varies = by_axes(tensor)
        self._set(tensor=tensor, _varies=varies)

    def check_sizes(self, b, h, q_len, kv_len):
        check_broadcasts("bias", self.tensor, b, h, q_len, kv_len)

    def __call__(self, score, b, h, q_idx, kv_idx):
        at = {"b": b, "h": h, "q": q_idx, "k": kv_idx, "1": 0}
        if not self._varies:
            return score + self.tensor
        return score + self.tensor[tuple(at[name] for name in self._varies)]


def _check_columns(score: str, table: Tensor, heads: int) -> None:
    """Refuse a table that has not one column per head."""
    rows, columns = table.shape
    if columns != heads:
        wanted, way = (columns, "; pass table.T") if rows == heads else (rows, "")
        raise ArgumentError(
            f"{score}: table has shape {(rows, columns)}, but this call has {heads} heads and "
            f"needs ({wanted}, {heads}), one column per head{way}"
        )


def _check_floats(
    score: str, name: str, tensor: object, expected: str, dims: tuple[int, ...]
) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{score}({name}={tensor!r}): {name} must be {expected}")
    if tensor.dim() not in dims or not tensor.dtype.is_floating_point:
        raise ArgumentError(
            f"{score}: {name} must be {expected}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
