"""Where things lie among the int32 zeros that `runtime/tile_counter.py` hands out: the counter of
tickets has a cache line of its own; flags follow, of stream-K and of inference."""

FIRST_FLAG, FLAGS = 32, 480
