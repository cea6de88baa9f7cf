"""Launches of CUDA kernels on the current stream of torch, by cuda.core."""
