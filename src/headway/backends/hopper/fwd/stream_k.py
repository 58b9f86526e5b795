"""Stream-K: the last ranks of a forward, shared out so that all CTAs end at the same time.

2,048 ranks of the same length keep 132 CTAs busy for 16 rounds, in the last of which 64 have
nothing to do. So the ranks that do not fill a round are cut, at any block of keys, into a share for
each CTA (Osama et al. 2023, arXiv 2301.03598); a part of a rank is a partial result like any other,
and joined by its maximum and its sum (fwd/combine.py).

A CTA computes the part of the later rank first, and writes it down; then that of the earlier rank,
up to its last block, with which it joins the parts of the shares before its own. It waits for
tickets that were taken before its own, by CTAs that wait for nobody before they write: so nobody
waits for ever. Parts are joined in the order of their numbers: the same bits in every run.
"""

from math import isqrt
from typing import NamedTuple

from ..config import Forward

LEAST = 8  # blocks that a CTA must save: to begin a part and to join it takes as long as three
MOST = 480  # parts: there are as many flags behind a counter (tile_counter.py)


class Shares(NamedTuple):
    """- `tickets`: that CTAs take; `whole`: of these, ranks that a CTA computes alone.
    - `share`: blocks of a share, of `several` blocks in all; 0 where nothing is shared.
    """

    tickets: int
    whole: int
    share: int
    several: int

    @staticmethod
    def of(ranks: int, blocks: int, ctas: int, how: Forward) -> "Shares":
        """For ranks of so many blocks each; 0: of any number, which nobody shares."""
        last = ranks % ctas
        several = last * blocks
        # Joining parts takes about as long as computing them, block for part.
        share = max(-(-several // ctas), isqrt(blocks), 1)
        tickets = -(-several // share)
        least = max(LEAST, how.stream_k_gain * -(-ranks // ctas) * blocks)
        if not last or blocks - share < least or tickets * how.consumers > MOST:
            return Shares(ranks, ranks, 0, 0)
        return Shares(ranks - last + tickets, ranks - last, share, several)
