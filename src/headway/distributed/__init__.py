"""Attention over more than one piece, and over more than one process."""

from .layout import Layout as Layout
from .merge import merge as merge
