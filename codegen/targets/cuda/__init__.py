"""CUDA C++: what the sources of each op say, what their launches need, and NVRTC."""
