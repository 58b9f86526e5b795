"""Headway: attention that trains, whatever the variant."""

from . import backends as backends
from . import inference as inference
from . import mods as mods
from .api import attention as attention
from .api import attention_with_stats as attention_with_stats
from .api import block_mask as block_mask
from .autograd import save_ops as save_ops
from .blocks import BlockMask as BlockMask
from .blocks import clear_block_cache as clear_block_cache
from .distributed import merge as merge
from .explain import explain as explain
from .mods import Mask as Mask
from .mods import Score as Score
from .mods import alibi as alibi
from .mods import bias as bias
from .mods import block_causal as block_causal
from .mods import block_table as block_table
from .mods import causal as causal
from .mods import chunked as chunked
from .mods import dense as dense
from .mods import dilated as dilated
from .mods import document as document
from .mods import global_tokens as global_tokens
from .mods import log_sigmoid as log_sigmoid
from .mods import neighborhood as neighborhood
from .mods import padding as padding
from .mods import prefix as prefix
from .mods import relative_bias as relative_bias
from .mods import sliding_window as sliding_window
from .mods import softcap as softcap
from .mods import spans as spans
from .mods import strided as strided
from .mods import t5_bias as t5_bias
from .mods import tiled as tiled
from .mods import tree as tree
from .mods import window_bias as window_bias
from .packed import varlen_attention as varlen_attention
from .packed import varlen_attention_with_stats as varlen_attention_with_stats
from .types import AttentionOutput as AttentionOutput
from .variants.sigmoid import sigmoid_attention as sigmoid_attention
from .variants.top_k import top_k_blocks as top_k_blocks
from .variants.weights import attention_weights as attention_weights
from .warm import warm as warm

__version__ = "0.2.0"
