"""The masks and scores of attention-gym's library, from their definitions: what people bring.

Masks are built for (Q_LEN, KV_LEN) squares; each entry makes one from nothing, with tensors of its
own.
"""

import math

import torch

N = 48  # positions, unless a mask says otherwise


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(window):
    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    return mask


def dilated_window(window, dilation):
    def mask(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        near = torch.abs(distance) <= window
        return near & (distance % dilation == 0) & (kv_idx <= q_idx)

    return mask


def global_window(window, is_global):
    def mask(b, h, q_idx, kv_idx):
        near = torch.abs(q_idx - kv_idx) <= window
        return near | is_global[q_idx] | is_global[kv_idx]

    return mask


def prefix_lm(length):
    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < length) | (q_idx >= kv_idx)

    return mask


def ids_of(offsets):
    lengths = offsets[1:] - offsets[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def documents(inner, offsets):
    """Any mask inside every document, counted from the document's start."""
    ids = ids_of(offsets)

    def mask(b, h, q_idx, kv_idx):
        same = ids[q_idx] == ids[kv_idx]
        q_in = q_idx - offsets[ids[q_idx]]
        kv_in = kv_idx - offsets[ids[kv_idx]]
        return same & inner(b, h, q_in, kv_in)

    return mask


def packed_causal(offsets):
    """In interval form: every query knows where its document starts."""
    start = offsets[ids_of(offsets)]

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx >= start[q_idx]) & (kv_idx <= q_idx)

    return mask


def shared_prefix(offsets, prefix_document):
    """Several answers share one question, packed in a row."""
    ids = ids_of(offsets)

    def mask(b, h, q_idx, kv_idx):
        mine, theirs = ids[q_idx], ids[kv_idx]
        return ((mine == theirs) | (theirs == prefix_document)) & (q_idx >= kv_idx)

    return mask


def batchified(inner, length):
    """A batch of sequences of one length, flattened into one."""

    def mask(b, h, q_idx, kv_idx):
        same = q_idx // length == kv_idx // length
        return same & inner(q_idx // length, h, q_idx % length, kv_idx % length)

    return mask


def natten(w, h_, kernel_w, kernel_h):
    """2-D neighbourhoods, moved inwards at the border."""

    def x_y(idx):
        return idx // w, idx % w

    def mask(b, h, q_idx, kv_idx):
        q_x, q_y = x_y(q_idx)
        kv_x, kv_y = x_y(kv_idx)
        centre_x = q_x.clamp(kernel_h // 2, (h_ - 1) - kernel_h // 2)
        centre_y = q_y.clamp(kernel_w // 2, (w - 1) - kernel_w // 2)
        near_x = (centre_x - kv_x).abs() <= kernel_h // 2
        near_y = (centre_y - kv_y).abs() <= kernel_w // 2
        return near_x & near_y

    return mask


def tiled_natten(w, h_, kernel_w, kernel_h, tile_w, tile_h):
    """The same with positions laid out tile by tile."""

    def x_y(idx):
        tile, inside = idx // (tile_w * tile_h), idx % (tile_w * tile_h)
        per_row = w // tile_w
        return (
            tile // per_row * tile_h + inside // tile_w,
            tile % per_row * tile_w + inside % tile_w,
        )

    def mask(b, h, q_idx, kv_idx):
        q_x, q_y = x_y(q_idx)
        kv_x, kv_y = x_y(kv_idx)
        centre_x = torch.clamp(q_x, kernel_h // 2, (h_ - 1) - kernel_h // 2)
        centre_y = torch.clamp(q_y, kernel_w // 2, (w - 1) - kernel_w // 2)
        return (torch.abs(centre_x - kv_x) <= kernel_h // 2) & (
            torch.abs(centre_y - kv_y) <= kernel_w // 2
        )

    return mask


def morton_natten(kernel_w, kernel_h, bits=3):
    """Positions along a Z-order curve over a 2^bits square: bits of x and y interleaved."""

    def x_y(idx):
        x = y = 0
        for k in range(bits):
            y = y | ((idx >> (2 * k)) & 1) << k
            x = x | ((idx >> (2 * k + 1)) & 1) << k
        return x, y

    def mask(b, h, q_idx, kv_idx):
        q_x, q_y = x_y(q_idx)
        kv_x, kv_y = x_y(kv_idx)
        return ((q_x - kv_x).abs() <= kernel_h // 2) & ((q_y - kv_y).abs() <= kernel_w // 2)

    return mask


def sliding_tiles(canvas, kernel, tile, text=0):
    """Whole tiles see whole tiles; the text at the end sees and is seen by everything."""
    pixels = math.prod(canvas)
    tiles = [c // t for c, t in zip(canvas, tile, strict=True)]
    size = math.prod(tile)

    def at(idx):
        n, place = idx // size, []
        for count in reversed(tiles):
            place.append(n % count)
            n = n // count
        return place[::-1]

    def mask(b, h, q_idx, kv_idx):
        near = q_idx >= 0
        for q_at, kv_at, count, k in zip(at(q_idx), at(kv_idx), tiles, kernel, strict=True):
            centre = q_at.clamp(k // 2, count - 1 - k // 2)
            near = near & (torch.abs(centre - kv_at) <= k // 2)
        return torch.where((q_idx < pixels) & (kv_idx < pixels), near, True)

    return mask if text else lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx)


def spatial_heads(prompt, frames, frame_tokens, width):
    """A query sees the prompt and the frames near its own."""

    def mask(b, h, q_idx, kv_idx):
        near = torch.abs(q_idx - kv_idx) <= frame_tokens * width
        return near | (kv_idx < prompt) | (q_idx < prompt)

    return mask


def temporal_heads(prompt, frames, width):
    """The same place of every frame."""

    def mask(b, h, q_idx, kv_idx):
        there = torch.abs((q_idx - prompt) % frames - (kv_idx - prompt) % frames) <= width
        return (kv_idx < prompt) | ((q_idx >= prompt) & there) | (q_idx == kv_idx)

    return mask


def image_intervals(intervals, image_tokens):
    """A text token sees the image whose interval it is in: rows of images are (start, end)."""

    def mask(b, h, q_idx, kv_idx):
        image = kv_idx // image_tokens
        start, end = intervals[image, 0], intervals[image, 1]
        return (q_idx >= start) & (q_idx < end)

    return mask


def block_diffusion(n, block):
    """Noisy tokens, then clean ones: noisy see their own block and clean blocks before it."""

    def mask(b, h, q_idx, kv_idx):
        q_clean, kv_clean = q_idx >= n, kv_idx >= n
        q_block = torch.where(q_clean, q_idx - n, q_idx) // block
        kv_block = torch.where(kv_clean, kv_idx - n, kv_idx) // block
        own = (q_block == kv_block) & (q_clean == kv_clean)
        before = (q_block > kv_block) & kv_clean & ~q_clean
        clean = (q_block >= kv_block) & kv_clean & q_clean
        return own | before | clean

    return mask


def tree(ancestors, prompt):
    """Speculative decoding: a draft token sees the prompt, itself and its ancestors."""

    def mask(b, h, q_idx, kv_idx):
        q_node = torch.clamp(q_idx - prompt, min=0)
        kv_node = torch.clamp(kv_idx - prompt, min=0)
        drafts = (q_idx >= prompt) & (kv_idx >= prompt)
        return torch.where(
            drafts, ancestors[q_node, kv_node], (kv_idx < prompt) & (kv_idx <= q_idx)
        )

    return mask


def block_map(kept, tile):
    """Video sparse attention: a table of tiles per batch and head."""

    def mask(b, h, q_idx, kv_idx):
        return kept[b, h, q_idx // tile, kv_idx // tile]

    return mask


def padding(valid):
    def mask(b, h, q_idx, kv_idx):
        return valid[b, q_idx] & valid[b, kv_idx]

    return mask


def _ancestors(n):
    parents = [-1] + [int(torch.randint(k, ())) for k in range(1, n)]
    table = torch.eye(n, dtype=torch.bool)
    for node in range(1, n):
        table[node] |= table[parents[node]]
    return table


_OFFSETS = torch.tensor([0, 7, 20, 21, 40, N])

MASKS = {
    "causal": (lambda: causal, N, N),
    "sliding_window": (lambda: sliding_window(9), N, N),
    "dilated_window": (lambda: dilated_window(12, 3), N, N),
    "global_window": (lambda: global_window(5, torch.rand(N) < 0.1), N, N),
    "prefix_lm": (lambda: prefix_lm(11), N, N),
    "documents": (lambda: documents(causal, _OFFSETS), N, N),
    "documents_window": (lambda: documents(sliding_window(4), _OFFSETS), N, N),
    "packed_causal": (lambda: packed_causal(_OFFSETS), N, N),
    "shared_prefix": (lambda: shared_prefix(_OFFSETS, 0), N, N),
    "batchified": (lambda: batchified(causal, 12), N, N),
    "natten": (lambda: natten(8, 6, 5, 3), N, N),
    "tiled_natten": (lambda: tiled_natten(8, 6, 5, 3, 4, 2), N, N),
    "morton_natten": (lambda: morton_natten(3, 3), 64, 64),
    "sliding_tiles_2d": (lambda: sliding_tiles((8, 6), (3, 1), (2, 2)), N, N),
    "sliding_tiles_3d": (lambda: sliding_tiles((4, 4, 4), (1, 3, 1), (2, 1, 2), text=6), 70, 70),
    "spatial_heads": (lambda: spatial_heads(5, 6, 7, 1), 47, 47),
    "temporal_heads": (lambda: temporal_heads(5, 6, 1), 47, 47),
    "image_intervals": (
        lambda: image_intervals(torch.tensor([[0, 9], [9, 30], [9, 48]]), 10), N, 30,
    ),
    "block_diffusion": (lambda: block_diffusion(24, 4), N, N),
    "tree": (lambda: tree(_ancestors(18), 30), N, N),
    "block_map": (lambda: block_map(torch.rand(2, 4, 6, 6) < 0.5, 8), N, N),
    "padding": (lambda: padding(torch.rand(2, N) < 0.8), N, N),
}  # fmt: skip


# -- scores: (score function, tensors that it learns) ---------------------------------------------


def alibi(heads):
    def score(score, b, h, q_idx, kv_idx):
        return score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / heads))

    return score, []


def tanh_softcap(cap):
    def score(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return score, []


def sandwich(heads, length, d_bar=16):
    """A table of sums of cosines over distances, scaled per head."""
    distance = torch.arange(length)[:, None]
    wave = distance / 10000 ** (2 * torch.arange(1, d_bar // 2 + 1) / d_bar)
    table = wave.cos().sum(1) - d_bar / 2
    rate = 8 / torch.arange(1, heads + 1)

    def score(score, b, h, q_idx, kv_idx):
        return score + table[(q_idx - kv_idx).abs()] * rate[h]

    return score, []


def graph_distance(heads, length):
    """Graphormer: a learned number per head and shortest path length, of every graph."""
    distances = torch.randint(0, 6, (2, length, length))
    table = torch.randn(heads, 6, requires_grad=True)

    def score(score, b, h, q_idx, kv_idx):
        return score + table[h, distances[b, q_idx, kv_idx]]

    return score, [table]


def graph_edges(heads, length):
    """Graphormer: the mean of learned numbers along the edges of a path of at most three."""
    edges = torch.randint(0, 5, (2, length, length, 3))
    count = torch.randint(1, 4, (2, length, length))
    table = torch.randn(3, 5, heads, requires_grad=True)

    def score(score, b, h, q_idx, kv_idx):
        total = 0.0
        for step in range(3):
            weight = table[step, edges[b, q_idx, kv_idx, step], h]
            total = total + torch.where(step < count[b, q_idx, kv_idx], weight, 0.0)
        return score + total / count[b, q_idx, kv_idx]

    return score, [table]


def activation(act, offset):
    """Any activation in place of the exponential: the softmax of log(act(score) + offset)."""

    def score(score, b, h, q_idx, kv_idx):
        return torch.log(act(score) + offset)

    return score, []


def relative(heads, length):
    table = torch.randn(heads, 2 * length - 1, requires_grad=True)

    def score(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx - kv_idx + length - 1]

    return score, [table]


def learned_temperature(heads, length):
    """A learned 0-d number and one table read twice."""
    log_scale = torch.tensor(0.3, requires_grad=True)
    place = torch.randn(length, requires_grad=True)

    def score(score, b, h, q_idx, kv_idx):
        return score * log_scale.exp() + place[q_idx] - place[kv_idx]

    return score, [log_scale, place]


SCORES = {
    "alibi": lambda: alibi(4),
    "tanh_softcap": lambda: tanh_softcap(3.0),
    "sandwich": lambda: sandwich(4, N),
    "graph_distance": lambda: graph_distance(4, N),
    "graph_edges": lambda: graph_edges(4, N),
    "gelu": lambda: activation(torch.nn.functional.gelu, 1.0),
    "relu": lambda: activation(torch.relu, 0.5),
    "silu": lambda: activation(torch.nn.functional.silu, 1.0),
    "relative": lambda: relative(4, N),
    "learned_temperature": lambda: learned_temperature(4, N),
}
