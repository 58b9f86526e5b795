"""Stream-K: the last work tiles of a forward, shared out so that all CTAs end at the same time.

2,048 work tiles of the same length keep 132 CTAs busy for 16 waves, in the last of which 64 CTAs
are idle. So the tiles that do not fill a wave are cut, at any KV block, into one share for each CTA
(Osama et al. 2023, Stream-K, arXiv 2301.03598). A part of a tile is a partial result like any
other, and is combined by its maximum and its sum (fwd/combine.py).

A share is a part of one tile or of two. Its CTA computes the part of the later tile first and
writes it to memory. Then it computes the part of the earlier tile, up to the last block, and
combines it with the parts of that tile from the shares before its own. It waits for tickets that
were fetched before its own, by CTAs that wait for nobody before they write: so there is no
deadlock. Parts are combined in the order of their numbers: the same bits in every run.
"""

from math import isqrt
from typing import NamedTuple

from ..config import FLAGS, FwdTileShape

MIN_SAVED_BLOCKS = 8  # by a CTA: to begin a part and to combine it takes as long as three blocks


class StreamKShares(NamedTuple):
    """The tickets that CTAs fetch: work tiles, then shares."""

    tickets: int
    whole_tiles: int  # work tiles that one CTA computes alone
    share_blocks: int  # KV blocks of a share; 0 where nothing is shared
    shared_blocks: int  # KV blocks of all shares

    @staticmethod
    def of(tiles: int, blocks: int, ctas: int, shape: FwdTileShape) -> "StreamKShares":
        """Share out `tiles` work tiles of `blocks` KV blocks each. With 0 blocks, tiles have any
        number of them, and are not shared out."""
        last_tiles = tiles % ctas
        shared_blocks = last_tiles * blocks
        # Combining parts takes about as long as computing them, block for part.
        share = max(-(-shared_blocks // ctas), isqrt(blocks), 1)
        tickets = -(-shared_blocks // share)
        min_saved = max(MIN_SAVED_BLOCKS, shape.stream_k_gain * -(-tiles // ctas) * blocks)
        if not last_tiles or blocks - share < min_saved or tickets * shape.consumers > FLAGS:
            return StreamKShares(tiles, tiles, 0, 0)
        return StreamKShares(tiles - last_tiles + tickets, tiles - last_tiles, share, shared_blocks)
