"""Attention by other means, made of the calls of `api`."""
