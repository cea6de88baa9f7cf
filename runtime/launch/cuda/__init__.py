"""Launches CUDA kernels on torch's current stream, by cuda.core."""
