"""Numbers of the kernels' float32 arithmetic. Without PyTorch: processes that compile have none."""

# Kernels keep scores in units of log 2: the hardware has exp2, and the factor log2(e) costs nothing
# where it joins the scale.
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
LOG_0 = -1e4  # in units of log 2: finite, and its exponential is 0
MAX_LSE = float(1 << 22)  # beyond it, rounding lse in units of log 2 changes P by up to half
