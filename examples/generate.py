"""Train a byte-level model on packed Python functions, and let it write some, with a cache.

Functions of many lengths are packed into rows; a document mask keeps each to itself and costs what
they cost. Sampling keeps the keys and values of what is written (`headway.nn.Past`), so that each
byte costs one position; that this gives the same logits as reading everything again is checked at
the end.

    python examples/generate.py             # about a minute on a laptop's CPU
    python examples/generate.py --prompt "def read"
"""

import argparse
import ast
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw
from headway.nn import Attention, Past, Rotary

BEGIN = 256  # opens every function, and so ends the one before it


class Block(nn.Module):
    def __init__(self, width: int, heads: int, rotary: Rotary):
        super().__init__()
        self.attention = Attention(width, heads, kv_heads=heads // 2, rotary=rotary, qk_norm=True)
        wide = 3 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, mask, past: Past | None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask, past=past)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(257, width)
        rotary = Rotary(width // heads)
        self.blocks = nn.ModuleList(Block(width, heads, rotary) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 257)

    def forward(self, tokens: Tensor, mask, pasts: list[Past] | None = None) -> Tensor:
        """Logits of the next byte; `pasts`, one for each block, hold what comes before and grow."""
        x = self.embedding(tokens)
        for block, past in zip(self.blocks, pasts or [None] * len(self.blocks), strict=True):
            x = block(x, mask, past)
        return self.head(self.norm(x))


def functions() -> list[bytes]:
    """The top-level functions of modules of Python's standard library."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        for node in ast.parse("".join(lines)).body:
            if isinstance(node, ast.FunctionDef):
                found.append("".join(lines[node.lineno - 1 : node.end_lineno]).encode())
    return found


def pack(texts: list[bytes], length: int) -> Tensor:
    """Rows of `length` + 1 tokens with the functions end to end, each behind its BEGIN."""
    tokens = [token for text in texts for token in (BEGIN, *text)]
    whole = len(tokens) // (length + 1) * (length + 1)
    return torch.tensor(tokens[:whole]).view(-1, length + 1)


@torch.no_grad()
def write(model: Model, prompt: str, length: int, temperature: float = 0.6) -> Iterator[int]:
    """Bytes that follow the prompt, until the function ends."""
    pasts = [Past() for _ in model.blocks]
    new = [BEGIN, *prompt.encode()]
    for _ in range(length):
        # Positions follow those of the past, so the mask is that of training.
        logits = model(torch.tensor([new]), hw.causal(), pasts)[0, -1]
        byte = int(torch.multinomial((logits / temperature).softmax(0), 1))
        if byte == BEGIN:
            return
        yield byte
        new = [byte]


def main(argv: list[str] | None = None) -> tuple[list[float], str]:
    """Train, write, and return the loss of every step and what was written."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=256, help="bytes in a row")
    parser.add_argument("--rows", type=int, default=12, help="rows in a step")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--length", type=int, default=300, help="bytes to write at most")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    texts = functions()
    rows = pack(texts, args.context)
    model = Model(args.width, args.depth, args.heads)
    print(f"{len(texts)} functions in {len(rows)} rows of {args.context} bytes")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, args.steps + 1, pct_start=0.1)

    losses, start = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        batch = rows[torch.randint(len(rows), (args.rows,))]
        tokens, targets = batch[:, :-1], batch[:, 1:]
        mask = hw.causal() & hw.document((tokens == BEGIN).cumsum(1))
        loss = F.cross_entropy(model(tokens, mask).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(1, args.steps // 10) == 0:
            seconds = time.perf_counter() - start
            print(f"step {step:4}/{args.steps}   loss {losses[-1]:.3f}   {seconds:.0f} s")

    model.eval()
    start = time.perf_counter()
    written = bytes(write(model, args.prompt, args.length))
    rate = len(written) / (time.perf_counter() - start)
    text = args.prompt + written.decode(errors="replace")
    print(f"\n{text}\n\n{rate:.0f} bytes per second")

    # The cache changes nothing: all at once, and one position at a time.
    seen, pasts = torch.tensor([[BEGIN, *text.encode()]]), [Past() for _ in model.blocks]
    with torch.no_grad():
        steps = [model(seen[:, n : n + 1], hw.causal(), pasts) for n in range(seen.shape[1])]
        off = (torch.cat(steps, 1) - model(seen, hw.causal())).abs().max().item()
    print(f"largest difference between logits with the cache and without: {off:.1e}")
    assert off < 1e-3
    return losses, text


if __name__ == "__main__":
    main()
