"""Train a one-step generator of small sets (MeanFlow), which needs the jvp of its attention.

Every set is a regular polygon with 3 to 6 corners, somewhere in the plane. Sets of all sizes are
packed into one row: a document mask keeps them apart. The network learns the average velocity from
noise to data, so one call turns noise into a set. Its target has the derivative of the network
along the path, which torch.func.jvp computes in the same pass; the backward is the usual one.

    python examples/meanflow.py             # about two minutes on a laptop's CPU
    python examples/meanflow.py --compile   # the step compiled (inductor): the same curve
    python examples/meanflow.py --help

(Geng et al. 2025, Mean Flows for One-step Generative Modeling, arXiv 2505.13447)
"""

import argparse
import math
import time

import torch
from torch import Tensor, nn

import headway as hw
from headway.nn import Attention

CORNERS = (3, 4, 5, 6)


def polygons(sets: int) -> tuple[Tensor, Tensor]:
    """Corners of `sets` polygons of each kind, shuffled and packed, (1, points, 2); and the number
    of the polygon of every corner."""
    corners = torch.tensor(CORNERS).repeat(sets)[torch.randperm(sets * len(CORNERS))]
    polygon = torch.repeat_interleave(torch.arange(len(corners)), corners)
    first = (corners.cumsum(0) - corners)[polygon]
    turn = (torch.arange(len(polygon)) - first) / corners[polygon] + torch.rand(len(corners))[
        polygon
    ]
    around = torch.stack([torch.cos(2 * math.pi * turn), torch.sin(2 * math.pi * turn)], -1)
    radius, centre = 0.5 + torch.rand(len(corners), 1), 0.5 * torch.randn(len(corners), 2)
    return (centre[polygon] + radius[polygon] * around)[None], polygon


class Block(nn.Module):
    """Attention within a set, with QK-norm, a sink and a learned bias per distance; and an MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = Attention(width, heads, qk_norm=True, sink=True)
        self.bias = nn.Parameter(torch.zeros(heads, 2 * max(CORNERS) - 1))
        self.score = hw.relative_bias(self.bias)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, mask: hw.Mask) -> Tensor:
        x = x + self.attention(self.norm1(x), mask, score=self.score)
        return x + self.mlp(self.norm2(x))


class Velocity(nn.Module):
    """u(z, r, t): the average velocity from time t to time r of points z, (1, points, 2)."""

    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        self.points = nn.Linear(2, width)
        self.times = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 2)
        self.register_buffer("waves", math.pi * 2.0 ** torch.arange(-1, 3))

    def forward(self, z: Tensor, r: Tensor, t: Tensor, polygon: Tensor) -> Tensor:
        angles = torch.cat([t * self.waves, (t - r) * self.waves], -1)
        x = self.points(z) + self.times(torch.cat([angles.sin(), angles.cos()], -1))
        for block in self.blocks:
            x = block(x, hw.document(polygon))
        return self.head(self.norm(x))


def loss_of(
    model: Velocity, x: Tensor, noise: Tensor, r: Tensor, t: Tensor, polygon: Tensor
) -> Tensor:
    """The MeanFlow loss of points x: u + (t - r) du/dt must be the velocity noise - x. du/dt is
    taken along the path and not differentiated."""
    z, velocity = (1 - t) * x + t * noise, noise - x
    network = lambda z, r, t: model(z, r, t, polygon)
    tangents = velocity, torch.zeros_like(r), torch.ones_like(t)
    u, du = torch.func.jvp(network, (z, r, t), tangents)
    error = (u - (velocity - (t - r) * du).detach()).square().sum(-1)
    return (error / (error.detach() + 0.01).sqrt()).mean()  # adaptive weights, as in the paper


def times(polygon: Tensor) -> tuple[Tensor, Tensor]:
    """Times r <= t of every set, by point; equal for half of the sets."""
    pair = torch.rand(2, int(polygon.max()) + 1).sort(0).values
    pair[0] = torch.where(torch.rand(pair.shape[1]) < 0.5, pair[1], pair[0])
    r, t = pair[:, polygon][:, None, :, None]
    return r, t


def roughness(points: Tensor, polygon: Tensor) -> float:
    """How uneven a set's corners lie around their middle: the spread of their distances over the
    mean distance. 0 of a polygon."""
    spread = []
    for n in range(int(polygon.max()) + 1):
        corners = points[0, polygon == n]
        distance = (corners - corners.mean(0)).norm(dim=-1)
        spread.append((distance.std() / distance.mean()).item())
    return sum(spread) / len(spread)


def main(argv: list[str] | None = None) -> tuple[list[float], float, float]:
    """Train, print, and return the loss of every step, and the roughness of noise and of what one
    step makes of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--sets", type=int, default=8, help="polygons of each kind in a step")
    parser.add_argument("--compile", nargs="?", const="inductor", help="compile, by this backend")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Velocity(args.width, args.depth, args.heads)
    step_loss = loss_of
    if args.compile:
        step_loss = torch.compile(loss_of, fullgraph=True, backend=args.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, args.steps + 1, pct_start=0.1)

    losses, start = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        x, polygon = polygons(args.sets)
        loss = step_loss(model, x, torch.randn_like(x), *times(polygon), polygon)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(1, args.steps // 10) == 0:
            recent = losses[-max(1, args.steps // 10) :]
            shown = f"step {step:4}/{args.steps}   loss {sum(recent) / len(recent):.3f}"
            print(f"{shown}   {time.perf_counter() - start:.0f} s")

    with torch.no_grad():
        _, polygon = polygons(40)
        noise = torch.randn(1, len(polygon), 2)
        zeros = torch.zeros(1, len(polygon), 1)
        made = noise - model(noise, zeros, zeros + 1, polygon)
    rough = roughness(noise, polygon), roughness(made, polygon)
    print(f"\nunevenness of 160 sets: {rough[0]:.2f} of noise, {rough[1]:.2f} after one step")
    return losses, *rough


if __name__ == "__main__":
    main()
