"""Attention over more than one piece."""

from .merge import merge as merge
