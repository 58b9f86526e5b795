"""Optimizers for models with this library's attention."""

from .muonclip import MuonClip as MuonClip
