"""Serve what was trained: attention over caches of keys and values, with the same score and mask.

- `attention`, `attention_with_stats`: decoding, chunked prefill and ragged batches.
- `Cache`, `PagedCache`: keys and values in one stretch of memory for every row, or in pages.
- `write`: keys and values to the slots of an engine's own cache.
- `cascade`, `cascade_with_stats`: keys that many rows share, read once.
"""

from .attend import attention as attention
from .attend import attention_with_stats as attention_with_stats
from .cache import Cache as Cache
from .cache import Layer as Layer
from .cache import PagedCache as PagedCache
from .cascade import Level as Level
from .cascade import cascade as cascade
from .cascade import cascade_with_stats as cascade_with_stats
from .slots import write as write
