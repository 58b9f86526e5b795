"""What float32 holds of a large score."""

FAR = float(1 << 22)  # of lse, where its rounding in units of log 2 is half of P
