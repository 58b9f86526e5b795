"""Offsets in the int32 zeros of `runtime/tile_counter.py`. The ticket counter has a cache line of
its own. The flags of stream-K and of inference follow."""

FIRST_FLAG, FLAGS = 32, 480
