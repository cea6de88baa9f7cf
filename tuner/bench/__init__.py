"""Kernels beside their peers and beside the limit of the machine: lookups and training steps."""
