"""What the backends that compile kernels share: text for scores and masks, and what it calls.

Importing it loads no Triton.
"""
