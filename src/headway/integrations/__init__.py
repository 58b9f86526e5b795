"""Headway inside other libraries. Nothing here is imported until it is asked for."""
