"""The forward kernel: its warps, its work tiles, and the plan that launches it."""
