"""Bounds of a graph's values over whole boxes of pairs, by interval arithmetic."""
