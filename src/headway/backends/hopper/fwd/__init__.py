"""The forward: one kernel for out and lse, and the host code that launches it."""
