"""Calls of CPU kernels: C functions, called by pointer, on torch's threads."""
