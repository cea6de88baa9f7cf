"""Runs of CUDA kernels on the emulated GPU: launches, guarded memory, and reports of what is wrong."""
