"""Train a small GPT on Python's own source, with a score function of its own.

The model has no position embeddings. What it knows of order it learns in the score: a bias for
every head and distance, and a temperature for every head, both trained through attention like any
weight. At the end it prints where each head has learned to look.

    python examples/train_gpt.py            # about a minute on a laptop's CPU
    python examples/train_gpt.py --help
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw

REACH = 64  # distances beyond this share one bias


class SelfAttention(nn.Module):
    """Causal attention whose score is `score * temperature + bias of the distance`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, REACH + 1))
        self.log_temperature = nn.Parameter(torch.zeros(heads))

    def score(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (q_idx - kv_idx).clamp(0, REACH)
        return score * self.log_temperature[h].exp() + self.bias[h, distance]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = hw.attention(q, k, v, self.score, hw.causal())
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = SelfAttention(width, heads)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def source() -> Tensor:
    """The top level of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(text: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Random pieces, and the bytes that follow each of theirs."""
    starts = torch.randint(len(text) - length - 1, (rows, 1))
    piece = text[starts + torch.arange(length + 1)].long()
    return piece[:, :-1], piece[:, 1:]


def main(argv: list[str] | None = None) -> list[float]:
    """Train, print, and return the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes in a row")
    parser.add_argument("--rows", type=int, default=16, help="rows in a step")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    text = source()
    model = GPT(args.width, args.depth, args.heads).to(args.device)
    print(f"{len(text):,} bytes, {sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, args.steps + 1, pct_start=0.1)

    losses, start = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        tokens, targets = (x.to(args.device) for x in batch(text, args.rows, args.context))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(1, args.steps // 10) == 0:
            seconds = time.perf_counter() - start
            print(f"step {step:4}/{args.steps}   loss {losses[-1]:.3f}   {seconds:.0f} s")

    print("\nwhat the scores have learned: distances that a head favours, and its temperature")
    for n, block in enumerate(model.blocks):
        for head, bias in enumerate(block.attention.bias.detach()):
            best = ", ".join(str(d) for d in bias.topk(4).indices.sort().values.tolist())
            temperature = block.attention.log_temperature[head].exp().item()
            print(f"  layer {n} head {head}   nearest to {best:16} x{temperature:.2f}")
    return losses


if __name__ == "__main__":
    main()
