"""Attention modules for models: `Attention` (MHA, GQA, MQA) and `MLA`."""

from .attention import Attention as Attention
from .mla import MLA as MLA
from .past import Past as Past
from .rotary import Angles as Angles
from .rotary import Rotary as Rotary
from .rotary import YaRN as YaRN
from .scaling import rescale as rescale
