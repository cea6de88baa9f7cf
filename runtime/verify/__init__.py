"""What `embforge verify` runs: comparisons of kernels with the reference, and of the reference with plain torch."""
