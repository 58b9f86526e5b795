"""Tracing of users' functions: from Python to a graph, and what the function read meanwhile."""
