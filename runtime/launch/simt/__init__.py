"""Runs CUDA kernels on the emulated GPU: launches, guarded memory, and reports of bugs."""
