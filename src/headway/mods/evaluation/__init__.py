"""Evaluation of graphs with torch, and their derivatives."""
