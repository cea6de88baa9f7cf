"""Compares kernels with the reference, and the reference with plain torch: what `embforge verify` runs."""
