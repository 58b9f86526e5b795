"""Serve what was trained: attention over caches of keys and values, with the same score and mask.

- `attention`, `attention_with_stats`: decoding, chunked prefill and ragged batches, over contiguous
  caches and over pages.
"""

from .attend import attention as attention
from .attend import attention_with_stats as attention_with_stats
