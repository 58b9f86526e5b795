"""Scores and masks: the library's own, and the tracing of the user's."""

from ..types import Captured as Captured
from .base import Mask as Mask
from .base import Score as Score
from .lowering import captured_under_compile as captured_under_compile
from .lowering import describe as describe
from .lowering import lower as lower
from .lowering import lower_guarded as lower_guarded
from .lowering import lower_mod as lower_mod
from .lowering import retraced as retraced
from .lowering import take_apart as take_apart
from .masks import causal as causal
from .masks import dense as dense
from .masks import dilated as dilated
from .masks import document as document
from .masks import global_tokens as global_tokens
from .masks import neighborhood as neighborhood
from .masks import padding as padding
from .masks import prefix as prefix
from .masks import sliding_window as sliding_window
from .masks import strided as strided
from .masks import tiled as tiled
from .scores import alibi as alibi
from .scores import bias as bias
from .scores import relative_bias as relative_bias
from .scores import softcap as softcap
from .scores import t5_bias as t5_bias
