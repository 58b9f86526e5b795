"""The pictures of docs/concepts.md, made of results of the library."""

import torch

import headway as hw
from svg import BLUE, GREEN, GREY, ORANGE, axes, box, heat_parts, largest, shape, svg, text


def pictures() -> dict[str, str]:
    return {
        "pictures/concept-tiles.svg": tiles(),
        "pictures/concept-statistics.svg": statistics(),
        "pictures/concept-merge.svg": merge(),
    }


def tiles() -> str:
    """The pairs of a mask, and beside them what is kept of it: empty, partial and full tiles."""
    mask, length, tile, cell = hw.causal() & hw.sliding_window(24) | hw.prefix(8), 64, 8, 4
    side = length * cell
    pairs = hw.block_mask(mask, 1, 1, length, length, tile=1).to_dense()[0, 0]
    states = hw.block_mask(mask, 1, 1, length, length, tile=tile).to_dense()[0, 0].tolist()
    parts, right = [], 17 + side + 40
    for x in (17, right):
        parts += [box(x, 17, side, side, f'fill="{GREY}" fill-opacity="0.12"')]
        parts += axes(x, 17, side, side)
    kept = (pairs > 0).int().tolist()
    parts.append(f'<path fill="{BLUE}" d="{shape(17, 17, cell, kept, 1)}"/>')
    large = tile * cell
    for state, colour in ((1, ORANGE), (2, BLUE)):
        parts.append(f'<path fill="{colour}" d="{shape(right, 17, large, states, state)}"/>')
    lines = "".join(
        f"M{right + n * large} 17v{side}M{right} {17 + n * large}h{side}"
        for n in range(length // tile + 1)
    )
    parts.append(f'<path d="{lines}" stroke="{GREY}" stroke-opacity="0.6"/>')
    y, x = 17 + side + 20, right
    for name, look in (
        ("full", f'fill="{BLUE}"'), ("partial", f'fill="{ORANGE}"'),
        ("empty", f'fill="{GREY}" fill-opacity="0.2"'),
    ):  # fmt: skip
        parts += [box(x, y - 9, 10, 10, look), text(x + 14, y, name)]
        x += 60
    parts.append(text(17, y, f"{pairs.gt(0).sum():,} of {length * length:,} pairs are kept"))
    title = "Left, the pairs that a mask keeps; right, its tiles: full, partial and empty"
    return svg(right + side + 2, y + 6, parts, title)


def statistics() -> str:
    """The scores of one head with what comes out beside them."""
    torch.manual_seed(3)
    n, cell, head = 12, 18, 0
    q, k, v = (torch.randn(1, 1, n, 8) * 1.5 for _ in range(3))
    _, lse, max_logit = hw.attention_with_stats(q, k, v, mask=hw.causal())
    logits = (q @ k.mT / 8**0.5)[0, 0]
    logits = logits.masked_fill(~torch.ones(n, n).bool().tril(), float("-inf"))
    side, most = n * cell, largest(logits.tolist())
    parts = [*axes(17, 17, side, side), *heat_parts(17, 17, cell, logits.tolist(), most)]
    at = divmod(int(logits.argmax()), n)
    assert abs(logits[at] - max_logit[0, head]) < 1e-4
    x, y = 17 + at[1] * cell, 17 + at[0] * cell
    parts.append(box(x, y, cell, cell, f'fill="none" stroke="{GREEN}" stroke-width="3"'))
    right = 17 + side + 16
    parts.append(text(right, 12, "lse, for each query"))
    for row, number in enumerate(lse[0, 0].tolist()):
        y = 17 + row * cell
        long = 12 * max(number, 0)
        look = f'fill="{BLUE}" fill-opacity="0.75"'
        parts.append(box(right, y + 3, long, cell - 6, look))
        parts.append(text(right + long + 5, y + 13, f"{number:.1f}".replace("-", "−")))
    y = 17 + side + 20
    parts.append(box(17, y - 10, 11, 11, f'fill="none" stroke="{GREEN}" stroke-width="3"'))
    parts.append(text(34, y, f"max_logit, for each head: {max_logit[0, 0]:.1f}"))
    title = "Logits of one head under a causal mask; the log-sum-exp of each row; the largest logit"
    return svg(right + 140, y + 6, parts, title)


def merge() -> str:
    """How much of each query's output comes from the first part of the keys, and from the rest."""
    torch.manual_seed(0)
    n, cut, cell = 24, 10, 10
    q, k, v = (torch.randn(1, 1, n, 8) for _ in range(3))
    mask = hw.causal()
    first = hw.attention_with_stats(q, k[:, :, :cut], v[:, :, :cut], mask=mask)
    rest = hw.attention_with_stats(q, k[:, :, cut:], v[:, :, cut:], mask=hw.causal(-cut))
    out, lse = hw.merge((first.out, first.lse), (rest.out, rest.lse))
    assert torch.allclose(out, hw.attention(q, k, v, mask=mask), atol=1e-5)
    side = n * cell
    kept = [[int(j <= i) * (1 if j < cut else 2) for j in range(n)] for i in range(n)]
    parts = [
        box(17, 17, side, side, f'fill="{GREY}" fill-opacity="0.12"'),
        *axes(17, 17, side, side),
    ]
    for state, colour in ((1, BLUE), (2, ORANGE)):
        parts.append(f'<path fill="{colour}" d="{shape(17, 17, cell, kept, state)}"/>')
    right, wide = 17 + side + 24, 160
    parts.append(text(right, 12, "weight of each part"))
    for row, (a, whole) in enumerate(zip(first.lse[0, 0], lse[0, 0], strict=True)):
        y, share = 17 + row * cell, round(wide * float((a - whole).exp()), 1)
        parts.append(box(right, y, share, cell - 1, f'fill="{BLUE}"'))
        if share < wide:
            parts.append(box(right + share, y, wide - share, cell - 1, f'fill="{ORANGE}"'))
    y, x = 17 + side + 18, 17
    for name, colour in (("first keys: (out, lse)", BLUE), ("the rest: (out, lse)", ORANGE)):
        parts += [box(x, y - 9, 10, 10, f'fill="{colour}"'), text(x + 14, y, name)]
        x += 160
    title = "Keys in two parts; the weight that each part's output has in the merged one, by query"
    return svg(right + wide + 2, y + 6, parts, title)
