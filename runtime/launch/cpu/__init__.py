"""Calls of CPU kernels by pointer, on threads of torch."""
