"""Train a small T5: learned relative biases, and cross-attention over padded sources.

The task is to sort letters: "qkzab" -> "abkqz". Sources have many lengths and are padded; `padding`
keeps what is not there out of the encoder and out of cross-attention. Encoder and decoder have a
table of biases each. At the end a few new words are sorted.

    python examples/train_t5.py             # half a minute on a laptop's CPU
    python examples/train_t5.py --help
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway as hw

LETTERS = 26
PAD, START, END = LETTERS, LETTERS + 1, LETTERS + 2


class Attention(nn.Module):
    """T5's attention: no 1/sqrt(d), which the initial weights hold instead, and no biases."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        nn.init.normal_(self.q.weight, std=(width * (width // heads)) ** -0.5)

    def forward(self, x: Tensor, source: Tensor, score=None, mask=None) -> Tensor:
        """x (b, n, width) reads source (b, m, width)."""
        q, k, v = self.q(x), self.k(source), self.v(source)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        out = hw.attention(q, k, v, score, mask, scale=1.0)
        return self.o(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, cross-attention in the decoder, and an MLP; each normalised before it."""

    def __init__(self, width: int, heads: int, cross: bool):
        super().__init__()
        self.self_attention = Attention(width, heads)
        self.cross_attention = Attention(width, heads) if cross else None
        wide = 2 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, width))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))

    def forward(self, x: Tensor, score, mask, source: Tensor | None = None, seen=None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.self_attention(y, y, score, mask)
        if self.cross_attention is not None:
            x = x + self.cross_attention(self.norms[1](x), source, None, seen)
        return x + self.mlp(self.norms[2](x))


class T5(nn.Module):
    """One bias table for all layers of the encoder and one for the decoder, as in the paper."""

    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS + 3, width)
        self.encoder = nn.ModuleList(Layer(width, heads, cross=False) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(width, heads, cross=True) for _ in range(depth))
        self.encoder_bias = nn.Parameter(torch.zeros(32, heads))
        self.decoder_bias = nn.Parameter(torch.zeros(32, heads))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, LETTERS + 3)

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x, score = self.embedding(tokens), hw.t5_bias(self.encoder_bias)
        for layer in self.encoder:
            x = layer(x, score, hw.padding(lengths))
        return x

    def decode(self, tokens: Tensor, source: Tensor, lengths: Tensor) -> Tensor:
        x, score = self.embedding(tokens), hw.t5_bias(self.decoder_bias, bidirectional=False)
        for layer in self.decoder:
            x = layer(x, score, hw.causal(), source, hw.padding(lengths))
        return self.head(self.norm(x))

    @torch.no_grad()
    def sort(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The likeliest letters, one after the other; END where a word is over."""
        source = self.encode(tokens, lengths)
        written = torch.full((len(tokens), 1), START)
        for _ in range(tokens.shape[1] + 1):
            following = self.decode(written, source, lengths)[:, -1:].argmax(-1)
            written = torch.cat((written, following), 1)
        return written[:, 1:]


def words(rows: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Different letters in any order, padded; their number; the same sorted, then END."""
    lengths = torch.randint(2, longest + 1, (rows,))
    letters = torch.rand(rows, LETTERS).argsort(1)[:, :longest]
    padding = torch.arange(longest) >= lengths[:, None]
    letters = letters.masked_fill(padding, PAD)  # PAD is past every letter, and sorts last
    answer = torch.cat((letters.sort(1).values, torch.full((rows, 1), PAD)), 1)
    answer[torch.arange(rows), lengths] = END
    return letters, lengths, answer


def spell(tokens: Tensor) -> str:
    """Up to the first token that is no letter."""
    text = "".join(chr(97 + t) if t < LETTERS else " " for t in tokens.tolist())
    return text.split(" ")[0]


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Train, print, and return the loss of every step and the share of new words sorted right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--longest", type=int, default=10, help="letters of a word")
    parser.add_argument("--rows", type=int, default=64, help="words in a step")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = T5(args.width, args.depth, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, start = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        letters, lengths, answer = words(args.rows, args.longest)
        given = torch.cat((torch.full((args.rows, 1), START), answer[:, :-1]), 1)
        logits = model.decode(given, model.encode(letters, lengths), lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, args.steps // 10) == 0:
            seconds = time.perf_counter() - start
            print(f"step {step:4}/{args.steps}   loss {losses[-1]:.3f}   {seconds:.0f} s")

    letters, lengths, answer = words(100, args.longest)
    written, right = [spell(x) for x in model.sort(letters, lengths)], [spell(x) for x in answer]
    print()
    for word, ours, truth in list(zip(letters, written, right, strict=True))[:5]:
        print(f"  {spell(word):12} -> {ours:12} {'right' if ours == truth else 'wrong: ' + truth}")
    share = sum(map(str.__eq__, written, right)) / len(right)
    print(f"{share:.0%} of 100 new words are right")
    return losses, share


if __name__ == "__main__":
    main()
