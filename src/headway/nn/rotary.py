"""Rotary positions (RoPE) and YaRN: frequencies, angles, rotation."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import count_of, flag_of, number_of
from ..errors import ArgumentError


class Angles(NamedTuple):
    """The cosine and sine of every position and pair, float32, `(length, width/2)` or
    `(b, length, width/2)`. One table serves all layers of a model."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class YaRN:
    """YaRN: extend a context by slowing down the slow frequencies of a `Rotary`.

    (Peng et al. 2023, arXiv 2309.00071)

    **Arguments:** in brackets are names of Hugging Face and DeepSeek configurations.

    - `factor`: how many times longer than `original_length` the new context is.
    - `original_length`: the length before the extension (`original_max_position_embeddings`).
    - `beta_fast`, `beta_slow`: turns over the original length. Pairs with more turns than
      `beta_fast` keep their frequency. Pairs with fewer than `beta_slow` are slowed by `factor`.
    - `mscale`, `mscale_all_dim`: as DeepSeek defines them; 0 is off.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            object.__setattr__(self, name, number_of(name, getattr(self, name)))
        length = count_of("original_length", self.original_length, 1)
        object.__setattr__(self, "original_length", length)
        if not self.factor >= 1:
            raise ArgumentError(f"YaRN(factor={self.factor!r}): factor must be at least 1")

    @property
    def rotation_factor(self) -> float:
        """Return the factor of cos and sin; 1 in DeepSeek-V2, V3 and Kimi K2."""
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    @property
    def softmax_factor(self) -> float:
        """Return the factor of MLA's softmax scale: m², m = 0.1 mscale_all_dim ln(factor) + 1."""
        return self._m(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _m(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (RoPE): turn pairs of channels by angles proportional to the position.

    Logits then depend on the distance of query and key. (Su et al. 2021, RoFormer, arXiv
    2104.09864)

    **Arguments:**

    - `width`: how many channels turn, an even number. In a wider head the first ones turn (partial
      rotary).
    - `base`: theta. Pair n turns by `position * base^(-2n/width)` radians.
    - `interleaved`: True pairs channels (2n, 2n+1), as the paper and DeepSeek's weights do. False
      pairs (n, n + width/2), as Llama and most of Hugging Face do.
    - `yarn`: a `YaRN` for longer contexts.
    - `axes`: 2 for images and 3 for videos, whose positions are points. The pairs are cut into that
      many equal parts, one for each coordinate. Pair m of a part turns by
      `coordinate * base^(-2m axes/width)`. (Heo et al. 2024, Rotary Position Embedding for Vision
      Transformer, arXiv 2403.13298, axial)
    - `sections`: M-RoPE, for text with images and videos. A position is (time, row, column), or any
      coordinates. The first `sections[0]` pairs turn by the first coordinate, the next
      `sections[1]` by the second, and so on, at the frequencies of text. If all coordinates are
      equal, as in text, sections change nothing. Heads of 128 have `(16, 24, 24)`. (Wang et al.
      2024, Qwen2-VL, arXiv 2409.12191, section 2.1)

    The points of an image of (H, W), row after row, are `torch.cartesian_prod(torch.arange(H),
    torch.arange(W)).T`, `(2, H * W)`.
    """

    width: int
    base: float = 10_000.0
    interleaved: bool = False
    yarn: YaRN | None = None
    axes: int = 1
    sections: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", count_of("width", self.width))
        object.__setattr__(self, "base", number_of("base", self.base))
        object.__setattr__(self, "axes", count_of("axes", self.axes, 1))
        object.__setattr__(self, "interleaved", flag_of("interleaved", self.interleaved))
        if self.width < 2 or self.width % 2:
            raise ArgumentError(f"Rotary(width={self.width!r}): width must be even and positive")
        if self.width % (2 * self.axes):
            raise ArgumentError(
                f"Rotary(width={self.width}, axes={self.axes}): width must be a multiple of "
                f"{2 * self.axes}, a pair for each axis"
            )
        if self.axes > 1 and self.yarn is not None:
            raise ArgumentError(
                f"Rotary(axes={self.axes}, yarn=...): YaRN extends the positions of text, not of "
                "several axes; leave one out"
            )
        if self.sections is not None:
            self._check_sections()

    def _check_sections(self) -> None:
        given = self.sections
        sections = given if isinstance(given, tuple | list) else ()
        sections = tuple([count_of("sections", n) for n in sections])
        if not sections or sum(sections) != self.width // 2:
            raise ArgumentError(
                f"Rotary(width={self.width}, sections={given!r}): sections must be numbers of "
                f"pairs, in all {self.width // 2}, one for each coordinate"
            )
        if self.axes > 1:
            raise ArgumentError(
                f"Rotary(axes={self.axes}, sections={given!r}): both say which coordinate turns "
                "which pairs; give one"
            )
        object.__setattr__(self, "sections", sections)

    @property
    def coordinates(self) -> int:
        """Return how many numbers a position is made of."""
        return self.axes if self.sections is None else len(self.sections)

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """Return the radians per position of every pair, float32 `(pairs,)`, as in models."""
        width = self.width // self.axes
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        frequencies = (1.0 / self.base**exponents).repeat(self.axes)
        if self.yarn is None:
            return frequencies
        low = max(math.floor(self._pair(self.yarn.beta_fast)), 0)
        high = min(math.ceil(self._pair(self.yarn.beta_slow)), self.width - 1)
        pairs = torch.arange(self.width // 2, dtype=torch.float32, device=device)
        slowed = ((pairs - low) / (high - low if high != low else 1e-3)).clamp(0, 1)
        return frequencies / self.yarn.factor * slowed + frequencies * (1 - slowed)

    def _pair(self, turns: float) -> float:
        """The pair of channels that turns `turns` times over the original length (the inverse of
        YaRN's equation 13)."""
        assert self.yarn is not None
        length = self.yarn.original_length / (turns * 2 * math.pi)
        return self.width * math.log(length) / (2 * math.log(self.base))

    def angles(self, positions: Tensor) -> Angles:
        """The table for these positions, `(length,)` or `(b, length)`; where a position is made of
        several coordinates, `(coordinates, length)` or `(coordinates, b, length)`. `(length,)` are
        then, with `sections`, positions of text, whose coordinates are all equal."""
        frequencies = self.frequencies(positions.device)
        if self.sections is None and self.axes == 1:
            angles = positions[..., None].float() * frequencies
        else:
            angles = self._of_pairs(positions).float() * frequencies
        factor = 1.0 if self.yarn is None else self.yarn.rotation_factor
        return Angles(angles.cos() * factor, angles.sin() * factor)

    def _of_pairs(self, positions: Tensor) -> Tensor:
        """The coordinate that every pair turns by, `(*b, length, pairs)`."""
        if self.sections is not None and positions.dim() == 1:
            return positions[:, None]
        if positions.dim() not in (2, 3) or positions.shape[0] != self.coordinates:
            way = ""
            if self.sections is None:
                way = "; of an image, torch.cartesian_prod(torch.arange(H), torch.arange(W)).T"
            raise ArgumentError(
                f"positions have shape {tuple(positions.shape)}, but {self} takes "
                f"({self.coordinates}, length) or ({self.coordinates}, b, length){way}"
            )
        parts = self.sections or [self.width // 2 // self.axes] * self.axes
        of_pair = [n for n, pairs in enumerate(parts) for _ in range(pairs)]
        return positions[of_pair].movedim(0, -1)

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """x, `(b, h, length, d)`, with its first `width` channels turned; computed in float32 or
        wider."""
        cos, sin = (t if t.dim() == 2 else t[:, None] for t in angles)
        turned, rest = x[..., : self.width], x[..., self.width :]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        halves = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(halves, -1).flatten(-2) if self.interleaved else torch.cat(halves, -1)
        turned = turned.to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def check_rotary(rotary: object) -> None:
    """A `Rotary`, or what does what one does, or None."""
    if rotary is not None and not (hasattr(rotary, "angles") and hasattr(rotary, "rotate")):
        raise ArgumentError(f"rotary={rotary!r} must be a Rotary, such as Rotary(head_width)")
