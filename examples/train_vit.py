"""Train a vision transformer in which every patch sees its neighbours only.

Small pictures of disks, squares, diamonds and crosses, in noise; a class for each shape. Attention
keeps a window of patches around each patch (NATTEN), decided once for all layers; tiles of pairs
that no window touches cost nothing.

    python examples/train_vit.py            # about a minute on a laptop's CPU
    python examples/train_vit.py --help
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw
from headway.nn import Attention

SHAPES = ["disk", "square", "diamond", "cross"]


def pictures(count: int, side: int, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """(count, 1, side, side) pictures, and the number of the shape in each."""
    label = torch.randint(len(SHAPES), (count,))
    radius = torch.randint(side // 6, side // 4 + 1, (count, 1, 1))
    centre = radius + (torch.rand(2, count, 1, 1) * (side - 2 * radius)).long()
    dy = (torch.arange(side)[:, None] - centre[0]).abs()
    dx = (torch.arange(side) - centre[1]).abs()
    drawn = torch.stack([
        dy.square() + dx.square() <= radius.square(),
        (dy <= radius) & (dx <= radius),
        dy + dx <= radius,
        (dy <= radius) & (dx <= radius) & ((dy <= radius // 3) | (dx <= radius // 3)),
    ])  # fmt: skip
    image = drawn[label, torch.arange(count)].float()
    return (image + noise * torch.randn_like(image))[:, None], label


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = Attention(width, heads)
        wide = 2 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: hw.BlockMask) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, blocks of neighbourhood attention, the mean over patches, a class."""

    def __init__(self, side: int, patch: int, window: int, width: int, depth: int, heads: int):
        super().__init__()
        grid = side // patch
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.position = nn.Parameter(torch.randn(grid * grid, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(SHAPES))
        around = hw.neighborhood((grid, grid), (window, window))
        self.mask = hw.block_mask(around, None, None, grid * grid, grid * grid, tile=16)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x).mean(1))


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Train, print, and return the loss of every step and the accuracy on new pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--side", type=int, default=32, help="pixels of a picture's side")
    parser.add_argument("--patch", type=int, default=4, help="pixels of a patch's side")
    parser.add_argument("--window", type=int, default=3, help="patches of a neighbourhood's side")
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64, help="pictures in a step")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = ViT(args.side, args.patch, args.window, args.width, args.depth, args.heads)
    patches = (args.side // args.patch) ** 2
    print(f"{patches} patches, each sees {args.window**2}: {args.window**2 / patches:.0%} of pairs")
    print(model.mask.summary())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, args.steps + 1, pct_start=0.1)

    losses, start = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        images, labels = pictures(args.rows, args.side)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(1, args.steps // 10) == 0:
            right = (logits.argmax(1) == labels).float().mean()
            done = f"step {step:4}/{args.steps}   loss {losses[-1]:.3f}   right {right:4.0%}"
            print(f"{done}   {time.perf_counter() - start:.0f} s")

    model.eval()
    with torch.no_grad():
        images, labels = pictures(400, args.side)
        guesses = model(images).argmax(1)
    print("\non 400 new pictures:")
    for n, name in enumerate(SHAPES):
        print(f"  {name:8} {(guesses[labels == n] == n).float().mean():4.0%} right")
    return losses, (guesses == labels).float().mean().item()


if __name__ == "__main__":
    main()
