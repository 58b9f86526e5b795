"""The gallery: one list of masks and scores, from which its page and its pictures are made.

Each entry's formula is shown on the page and evaluated by tests/docs/test_gallery.py, in float64 and
over all pairs: the entry's code must give the same output and the same gradients.
"""

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import headway as hw
import results
import svg

LENGTH = 64  # positions of the page's tensors; as an image, 8 x 8 points
SETUP = """\
import torch
import torch.nn.functional as F
import headway as hw

q, k, v = (torch.randn(1, 4, 64, 16, requires_grad=True) for _ in range(3))
"""


@dataclass(frozen=True)
class Entry:
    """A mask or a score, and all that the page says of it.

    - `code`: defines `mask` or `score`, and `out`; runs after `SETUP`.
    - `kept`, `score`, `weight`: formulas, in Python, of b, h, i, j, the scaled logit s and what
      `code` defines: which pairs are kept, what becomes of a logit, or, for attention without a
      softmax, the weight itself.
    - `names`: what else the formulas call; their meaning is told by `where`.
    - `case`: of `headway bench`, whose committed times the page quotes.
    - `head`: the head that the picture shows; `shown`: how many positions of a score; `plain`: none.
    """

    key: str
    title: str
    about: str
    code: str
    paper: str = ""
    kept: str = ""
    score: str = ""
    weight: str = ""
    where: str = ""
    names: dict[str, Callable[..., Any]] = field(default_factory=dict)
    case: str = ""
    head: int = 0
    shown: int = LENGTH
    plain: bool = False


def near(x: Tensor, y: Tensor) -> Tensor:
    first = (x - 1).clamp(0, 5)
    return (y >= first) & (y < first + 3)


def bucket(distance: Tensor) -> Tensor:
    def of_one(n: int) -> int:
        side, n = (16 if n > 0 else 0), abs(n)
        far = 8 + int(math.log(max(n, 1) / 8) / math.log(128 / 8) * 8)
        return side + (n if n < 8 else min(far, 15))

    return torch.tensor([of_one(n) for n in distance.flatten().tolist()]).view(distance.shape)


def above(m: Tensor, n: Tensor) -> Tensor:
    """Whether token m of a binary tree of 16 is n, or above it."""
    found = m == n
    for _ in range(4):
        n = torch.where(n > 0, (n - 1) // 2, -1)
        found = found | ((m == n) & (n >= 0))
    return found


MASKS = [
    Entry(
        "causal", "Causal",
        "Each query attends to itself and to earlier keys, as in language models.",
        "mask = hw.causal()\nout = hw.attention(q, k, v, mask=mask)",
        "Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3",
        kept="j <= i", case="8k-128-causal",
    ),
    Entry(
        "causal-offset", "Causal, with a past",
        "16 queries at the end of 64 keys, as in decoding with a cache. `offset` is the number of keys "
        "before the first query.",
        "mask = hw.causal(48)\nout = hw.attention(q[:, :, 48:], k, v, mask=mask)",
        kept="j <= i + 48",
    ),
    Entry(
        "sliding-window", "Sliding window",
        "The last 16 keys. Work grows with length × window: keys outside are never read.",
        "mask = hw.causal() & hw.sliding_window(16)\nout = hw.attention(q, k, v, mask=mask)",
        "Beltagy et al. 2020, arXiv 2004.05150; Jiang et al. 2023, arXiv 2310.06825",
        kept="(j <= i) & (i - j < 16)", case="window-1024",
    ),
    Entry(
        "streaming", "Window with sink tokens",
        "A window, and always the first 4 keys, for models that generate without end.",
        "mask = hw.causal() & (hw.sliding_window(16) | hw.prefix(4))\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Xiao et al. 2023, StreamingLLM, arXiv 2309.17453",
        kept="(j <= i) & ((i - j < 16) | (j < 4))",
    ),
    Entry(
        "prefix", "Prefix",
        "Every query attends to the whole prompt. The rest is causal.",
        "mask = hw.causal() | hw.prefix(20)  # or a length per row: (batch,)\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Raffel et al. 2020, T5, arXiv 1910.10683, figure 4",
        kept="(j <= i) | (j < 20)", case="prefix-2048",
    ),
    Entry(
        "document", "Packed documents",
        "Several documents in one row that do not attend to each other. Tiles between documents cost nothing.",
        "mask = hw.causal() & hw.document.from_lengths([20, 13, 31])\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Krell et al. 2021, arXiv 2107.02027",
        kept="(j <= i) & ((i < 20) == (j < 20)) & ((i < 33) == (j < 33))", case="documents-causal",
    ),
    Entry(
        "padding", "Padding",
        "Keys after the end of a row's sequence are masked out.",
        "lengths = torch.tensor([45])  # one number for each row of the batch\n"
        "mask = hw.padding(lengths)\nout = hw.attention(q, k, v, mask=mask)",
        kept="j < lengths[b]",
    ),
    Entry(
        "global-tokens", "Window and global tokens",
        "The first 4 positions attend to all keys, and all queries attend to them.",
        "mask = hw.sliding_window(8) | hw.global_tokens(4)\nout = hw.attention(q, k, v, mask=mask)",
        "Beltagy et al. 2020, Longformer, arXiv 2004.05150, section 3.1",
        kept="(abs(i - j) < 8) | (i < 4) | (j < 4)",
    ),
    Entry(
        "big-bird", "Window, global and random blocks",
        "Big Bird: a window, global tokens, and blocks of 8 × 8 that a random table selects.",
        "picked = torch.rand(8, 8) < 0.2\n"
        "mask = hw.sliding_window(8) | hw.global_tokens(4) | hw.block_table(picked, 8)\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Zaheer et al. 2020, arXiv 2007.14062",
        kept="(abs(i - j) < 8) | (i < 4) | (j < 4) | picked[i // 8, j // 8]",
    ),
    Entry(
        "dilated", "Dilated window",
        "A window with gaps: every third position, so 8 keys cover 24 positions.",
        "mask = hw.causal() & hw.dilated(8, 3)\nout = hw.attention(q, k, v, mask=mask)",
        "Beltagy et al. 2020, arXiv 2004.05150, section 3.1",
        kept="(j <= i) & (i - j < 24) & ((i - j) % 3 == 0)",
    ),
    Entry(
        "strided", "Strided",
        "All near keys, and every 8th of the others.",
        "mask = hw.causal() & hw.strided(8)\nout = hw.attention(q, k, v, mask=mask)",
        "Child et al. 2019, Sparse Transformer, arXiv 1904.10509, section 4.3",
        kept="(j <= i) & ((i - j < 8) | ((i - j) % 8 == 0))",
    ),
    Entry(
        "widths", "A window for each head",
        "A mask function can capture any tensor, here a width for each head.",
        "width = torch.tensor([4, 8, 16, 64])\n"
        "mask = hw.causal() & (lambda b, h, i, j: i - j < width[h])\n"
        "out = hw.attention(q, k, v, mask=mask)",
        kept="(j <= i) & (i - j < width[h])", head=1,
    ),
    Entry(
        "images", "Causal text with images",
        "Text is causal. The tokens of one image attend to each other in both directions.",
        "image = torch.tensor([-1] * 10 + [0] * 16 + [-1] * 8 + [1] * 16 + [-1] * 14)\n"
        "mask = hw.causal() | hw.spans(image)\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Gemma Team 2025, Gemma 3, arXiv 2503.19786",
        kept="(j <= i) | ((image[i] == image[j]) & (image[i] >= 0))",
    ),
    Entry(
        "answers", "Many answers to one prompt",
        "A prompt of 24 tokens is computed once. The answers after it do not attend to each other.",
        "answer = torch.tensor([0] * 24 + [1] * 12 + [2] * 14 + [3] * 14)\n"
        "mask = hw.causal() & (lambda b, h, i, j: (j < 24) | (answer[i] == answer[j]))\n"
        "out = hw.attention(q, k, v, mask=mask)",
        kept="(j <= i) & ((j < 24) | (answer[i] == answer[j]))",
    ),
    Entry(
        "tree", "A tree of drafts",
        "Speculative decoding: 16 draft tokens after 48 keys. A token attends to its ancestors. Its "
        "parent is token (i − 1) // 2.",
        "parents = (torch.arange(16) - 1) // 2  # -1: the first has none\n"
        "mask = hw.tree(parents, start=48)\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Miao et al. 2023, SpecInfer, arXiv 2305.09781; Cai et al. 2024, Medusa, arXiv 2401.10774",
        kept="(j <= i) & ((j < 48) | above(j - 48, i - 48))",
        where="`above(m, n)`: m is n or an ancestor of n; the parent of n is (n − 1) // 2",
        names={"above": above},
    ),
    Entry(
        "block-diffusion", "Block diffusion",
        "A row holds a noised text and the clean text, 32 tokens each, in blocks of 8. A noised block "
        "attends to itself and to the clean blocks before it. A clean block attends to itself and to "
        "earlier clean blocks.",
        "def mask(b, h, i, j):\n"
        "    of_i, of_j = i % 32 // 8, j % 32 // 8\n"
        "    clean_i, clean_j = i >= 32, j >= 32\n"
        "    before = clean_j & (of_j < of_i)\n"
        "    return before | (clean_i == clean_j) & (of_i == of_j)\n\n\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Arriola et al. 2025, arXiv 2503.09573",
        kept="((j >= 32) & (j % 32 // 8 < i % 32 // 8)) | (i // 8 == j // 8)",
    ),
    Entry(
        "top-k", "The best blocks of each head",
        "Blocks of 8 × 8 that a model selects for each head at run time. The table changes, the kernel "
        "stays the same.",
        "best = torch.randn(1, 4, 8, 8).topk(3).indices  # of each row of blocks, three\n"
        "mask = hw.top_k_blocks(best, 8, mask=hw.causal())\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Lu et al. 2025, MoBA, arXiv 2502.13189; Yuan et al. 2025, NSA, arXiv 2502.11089",
        kept="(j <= i) & (j // 8 == best[b, h, i // 8].movedim(-1, 0)).any(0)",
    ),
    Entry(
        "neighborhood", "Neighbourhood of a point",
        "The 3 × 3 points around each point of an image, shifted inwards at the border.",
        "mask = hw.neighborhood((8, 8), (3, 3))\nout = hw.attention(q, k, v, mask=mask)",
        "Hassani et al. 2023, arXiv 2204.07143, equations 1 and 2",
        kept="near(i // 8, j // 8) & near(i % 8, j % 8)",
        where="`near(x, y)`: y is one of three neighbours, the first of which is x − 1, clipped to 0 … 5",
        names={"near": near},
    ),
    Entry(
        "tiled", "Neighbourhood, in tiles",
        "The same, for an image whose points are ordered tile by tile. Neighbours are close in the "
        "sequence, so the kernel visits fewer tiles.",
        "mask = hw.tiled(hw.neighborhood((8, 8), (3, 3)), (8, 8), (4, 4))\n"
        "order = mask.order()\n"
        "moved = [x[:, :, order] for x in (q, k, v)]\n"
        "out = hw.attention(*moved, mask=mask)[:, :, order.argsort()]",
        "Zhang et al. 2025, Sliding Tile Attention, arXiv 2502.04507, section 3.2",
        kept="near(i // 8, j // 8) & near(i % 8, j % 8)",
        where="here i and j count in rows, as above; the picture is in the order of tiles",
        names={"near": near},
    ),
    Entry(
        "windows", "Windows of an image",
        "Swin: an image is divided into windows of 4 × 4. You copy no window and roll no image.",
        "window = lambda n: n // 8 // 4 * 2 + n % 8 // 4\n"
        "mask = lambda b, h, i, j: window(i) == window(j)\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Liu et al. 2021, arXiv 2103.14030",
        kept="(i // 32 == j // 32) & (i % 8 // 4 == j % 8 // 4)",
    ),
    Entry(
        "axial", "Rows and columns",
        "A point of an image attends to its row and its column.",
        "mask = lambda b, h, i, j: (i // 8 == j // 8) | (i % 8 == j % 8)\n"
        "out = hw.attention(q, k, v, mask=mask)",
        "Huang et al. 2019, CCNet, arXiv 1811.11721",
        kept="(i // 8 == j // 8) | (i % 8 == j % 8)",
    ),
    Entry(
        "chunked", "Chunks",
        "Attention stays inside chunks of 16 positions: the local layers of Llama 4.",
        "mask = hw.causal() & hw.chunked(16)\nout = hw.attention(q, k, v, mask=mask)",
        "Qiu et al. 2020, arXiv 1911.02972",
        kept="(j <= i) & (i // 16 == j // 16)",
    ),
    Entry(
        "frames", "Causal frames",
        "A video of 4 frames: a frame attends to itself and to earlier frames.",
        "mask = hw.block_causal(16)\nout = hw.attention(q, k, v, mask=mask)",
        kept="j // 16 <= i // 16",
    ),
    Entry(
        "dense", "A mask that is a tensor",
        "For masks without a formula. A formula needs less memory and time.",
        "tensor = torch.rand(64, 64) < 0.3  # broadcasts to (batch, heads, q_len, kv_len)\n"
        "mask = hw.dense(tensor)\nout = hw.attention(q, k, v, mask=mask)",
        kept="tensor[i, j]",
    ),
]  # fmt: skip

SCORES = [
    Entry(
        "softcap", "Softcap",
        "Keep every logit inside (−cap, cap). Gemma 2 has a cap of 50.",
        "score = hw.softcap(5.0)\nout = hw.attention(q, k, v, score, hw.causal())",
        "Bello et al. 2017, arXiv 1611.09940; Gemma Team 2024, arXiv 2408.00118, section 2",
        kept="j <= i", score="5 * torch.tanh(s / 5)", case="softcap-causal",
    ),
    Entry(
        "alibi", "ALiBi",
        "A penalty that grows with distance, with a slope for each head. Slopes are trained if they are a "
        "tensor that requires grad.",
        "score = hw.alibi(4)\nout = hw.attention(q, k, v, score, hw.causal())",
        "Press et al. 2022, arXiv 2108.12409, section 3",
        kept="j <= i", score="s - 2.0 ** (-2 * (h + 1)) * abs(i - j)", case="alibi-causal",
    ),
    Entry(
        "relative-bias", "Learned relative bias",
        "A learned number per head and distance.",
        "table = torch.randn(4, 33, requires_grad=True)\n"
        "score = hw.relative_bias(table)\nout = hw.attention(q, k, v, score)",
        "Shaw et al. 2018, arXiv 1803.02155",
        score="s + table[h, (j - i).clamp(-16, 16) + 16]", shown=32, case="relative-bias-learned-full",
    ),
    Entry(
        "t5-bias", "T5's bias",
        "Distances fall into 32 buckets: one for each small distance, then ever wider ones. T5 does not "
        "scale its logits.",
        "table = torch.randn(32, 4, requires_grad=True)\n"
        "score = hw.t5_bias(table)\nout = hw.attention(q, k, v, score, scale=1.0)",
        "Raffel et al. 2020, arXiv 1910.10683, section 2.1",
        score="4 * s + table[bucket(j - i), h]",
        where="`bucket` as in the paper; the factor 4 undoes the scale 1/√16 in s",
        names={"bucket": bucket}, shown=32,
    ),
    Entry(
        "bias", "A bias that is a tensor",
        "An additive bias that broadcasts to (batch, heads, q_len, kv_len) and can be trained, as in "
        "Evoformer's pair bias.",
        "tensor = torch.randn(4, 64, 64, requires_grad=True)\n"
        "score = hw.bias(tensor)\nout = hw.attention(q, k, v, score)",
        "Jumper et al. 2021, AlphaFold",
        score="s + tensor[h, i, j]", plain=True,
    ),
    Entry(
        "temperature", "A temperature for each head",
        "A learned factor: captured numbers can be trained wherever they are in a formula.",
        "log_t = torch.zeros(4, requires_grad=True)\n"
        "score = lambda s, b, h, i, j: s * log_t[h].exp()\n"
        "out = hw.attention(q, k, v, score, hw.causal())",
        kept="j <= i", score="s * log_t[h].exp()", plain=True,
    ),
    Entry(
        "composed", "One after the other",
        "`first >> second`: the second sees what the first made of the logit.",
        "score = hw.alibi(4) >> hw.softcap(5.0)\nout = hw.attention(q, k, v, score, hw.causal())",
        kept="j <= i", score="5 * torch.tanh((s - 2.0 ** (-2 * (h + 1)) * abs(i - j)) / 5)",
    ),
    Entry(
        "forgetting", "Forgetting Transformer",
        "Each token has a gate. All gates between a key and a query lower their logit. You compute the "
        "cumulative sum once, outside the call, and gradients flow back through it.",
        "gates = torch.randn(1, 4, 64, requires_grad=True)\n"
        "c = F.logsigmoid(gates).cumsum(-1)\n"
        "score = lambda s, b, h, i, j: s + c[b, h, i] - c[b, h, j]\n"
        "out = hw.attention(q, k, v, score, hw.causal())",
        "Lin et al. 2025, arXiv 2503.02130",
        kept="j <= i", score="s + c[b, h, i] - c[b, h, j]",
    ),
    Entry(
        "adaptive-span", "Adaptive span",
        "A soft window. Each head learns its width. Where the factor is 0, its logarithm is −∞, which "
        "masks the pair out.",
        "span = torch.tensor([4.5, 8.5, 16.5, 32.5], requires_grad=True)\n"
        "soft = lambda h, i, j: ((8 + span[h] - (i - j)) / 8).clamp(0, 1)\n"
        "score = lambda s, b, h, i, j: s + soft(h, i, j).log()\n"
        "out = hw.attention(q, k, v, score, hw.causal())",
        "Sukhbaatar et al. 2019, arXiv 1905.07799, section 2.2",
        kept="j <= i", score="s + ((8 + span[h] - (i - j)) / 8).clamp(0, 1).log()", head=2,
    ),
    Entry(
        "merged-tokens", "Keys that stand for several",
        "Token merging: a key that stands for n tokens counts n times.",
        "size = torch.randint(1, 5, (64,)).float()\n"
        "score = lambda s, b, h, i, j: s + size[j].log()\n"
        "out = hw.attention(q, k, v, score)",
        "Bolya et al. 2023, arXiv 2210.09461, section 3",
        score="s + size[j].log()",
    ),
    Entry(
        "two-axes", "A bias for rows and one for columns",
        "Segment Anything's relative positions: two small tensors instead of their large sum.",
        "down, across = (torch.randn(1, 4, 64, 8, requires_grad=True) for _ in range(2))\n"
        "score = lambda s, b, h, i, j: s + down[b, h, i, j // 8] + across[b, h, i, j % 8]\n"
        "out = hw.attention(q, k, v, score)",
        "Kirillov et al. 2023, arXiv 2304.02643; Li et al. 2022, MViTv2, arXiv 2112.01526",
        score="s + down[b, h, i, j // 8] + across[b, h, i, j % 8]", plain=True,
    ),
    Entry(
        "swin-bias", "A table by distance in a window",
        "Swin learns one number for each difference of rows and columns inside a window of 4 × 4. The "
        "sequence holds four windows.",
        "# (2 · 4 − 1)² differences, 4 heads:\n"
        "table = torch.randn(49, 4, requires_grad=True)\n"
        "score, mask = hw.window_bias(table, (4, 4)), hw.chunked(16)\n"
        "out = hw.attention(q, k, v, score, mask)",
        "Liu et al. 2021, arXiv 2103.14030, equation 4",
        kept="i // 16 == j // 16",
        score="s + table[(i % 16 // 4 - j % 16 // 4 + 3) * 7 + i % 4 - j % 4 + 3, h]",
    ),
    Entry(
        "sigmoid", "Sigmoid attention",
        "The weights do not sum to 1. Headway computes the softmax of `hw.log_sigmoid(bias)` and undoes "
        "its division with the log-sum-exp. Output and gradients are exact.",
        "out = hw.sigmoid_attention(q, k, v, mask=hw.causal(), bias=-2.0)",
        "Ramapuram et al. 2024, arXiv 2409.04431",
        kept="j <= i", weight="torch.sigmoid(s - 2)",
    ),
    Entry(
        "sink", "A sink for each head",
        "GPT-OSS: a learned logit that joins the softmax and has no value, so that a head may attend to "
        "nothing.",
        "sink = torch.zeros(4, requires_grad=True)\n"
        "out = hw.attention(q, k, v, mask=hw.causal() & hw.sliding_window(16), sink=sink)",
        "OpenAI 2025, arXiv 2508.10925", plain=True,
        kept="(j <= i) & (i - j < 16)",
        weight="s.exp() / (sink[h].exp() + torch.where((j <= i) & (i - j < 16), s.exp(), 0)"
        ".sum(-1, keepdim=True))",
    ),
]  # fmt: skip


def run(entry: Entry, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What the code of an entry defines, on inputs with some spread."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        exec(SETUP, names)
        for name, spread in (("q", 3.0), ("k", 1.0), ("v", 1.0)):
            names[name] = (names[name].detach() * spread).to(dtype).requires_grad_()
        exec(entry.code, names)
    return names


def picture(entry: Entry) -> str:
    """The picture of an entry, drawn from the library's values and never from the formula."""
    names = run(entry)
    q_len = 16 if "q[:, :, 48:]" in entry.code else LENGTH
    mask = names.get("mask")
    if entry in MASKS:
        mask = mask.mask if isinstance(mask, hw.BlockMask) else mask
        blocks = hw.block_mask(mask, 1, 4, q_len, LENGTH, tile=1)
        dense = blocks[0, entry.head % blocks.shape[1]].to_dense()[0, 0]
        return svg.pairs((dense > 0).int().tolist(), f"{entry.title}: which keys a query sees")
    i, j = torch.arange(q_len)[:, None], torch.arange(LENGTH)
    b, h = torch.tensor(0), torch.tensor(entry.head)
    score = names.get("score", hw.log_sigmoid(-2.0))
    if entry.key in ("softcap", "sigmoid"):
        s = torch.linspace(-12, 12, 97)
        of_s = score(s, b, h, torch.tensor(0), torch.tensor(0))  # type: ignore[misc]
        points = list(zip(s.tolist(), of_s.detach().tolist(), strict=True))
        return svg.curve(points, f"{entry.title}: what becomes of a logit")
    kept = torch.ones(q_len, LENGTH, dtype=torch.bool)
    if entry.kept:
        mask = names.get("mask", hw.causal())
        kept = hw.block_mask(mask, 1, 4, q_len, LENGTH, tile=1)[0, 0].to_dense()[0, 0] > 0
    change = score(torch.zeros(q_len, LENGTH), b, h, i, j)
    change = torch.where(kept, change, -math.inf)[: entry.shown, : entry.shown]
    return svg.heat(change.tolist(), f"{entry.title}: what is added to a logit of 0")


def page() -> str:
    """docs/gallery.md."""
    parts = [INTRO, "## Masks\n", *map(section, MASKS), "## Scores\n", *map(section, SCORES)]
    return "\n".join(parts)


def section(entry: Entry) -> str:
    lines = [f"### {entry.title}", ""]
    if not entry.plain:
        alt = f"{entry.title}, as a picture of queries and keys"
        lines += [f"![{alt}](pictures/{entry.key}.svg)", ""]
    lines += [entry.about, ""]
    formulas = (("Mask", entry.kept), ("Score", entry.score), ("Weight", entry.weight))
    said = [f"**{name}:** `{formula}`" for name, formula in formulas if formula]
    said[-1] += f", {entry.where}" if entry.where and "near" not in entry.names else ""
    if entry.where and "near" in entry.names:
        said[-1] += f"; {entry.where}"
    lines += ["  \n".join(said), ""]
    if entry.paper:
        lines += [f"{entry.paper}.", ""]
    lines += ["```python", entry.code, "```", ""]
    if entry.case and (speed := results.speed_line(entry.case)):
        lines += [f"*{speed}*", ""]
    return "\n".join(lines)


INTRO = textwrap.dedent("""\
    <!-- Written by scripts/docs/draw.py from scripts/docs/gallery.py: change that. -->

    # Gallery

    Each entry shows a mask or a score: its picture, its formula, its source, and code that you can run. A mask says
    which keys j a query i attends to. A score changes a logit s, which is already scaled.
    The tests evaluate the same formulas over all pairs, in float64, and compare outputs and gradients.

    In pictures of masks, a query attends to the blue keys. In pictures of scores, blue is added and orange is subtracted. The
    pictures are drawn from the library's own values.

    You can train with all of them, on CPU and GPU. Combine masks with `&`, `|` and `~`, scores with `>>`, and any mask
    with any score. Every entry continues this code:

    ```python
    {setup}```

    Times come from committed results. All libraries of an entry took turns in one run, after each result was checked
    against float64 ([performance](performance.md)).
    """).replace("{setup}", SETUP)  # fmt: skip
