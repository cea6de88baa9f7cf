"""CUDA C++: the facts of each op's source, what its launches need, and NVRTC."""
