"""Jinja templates of CUDA and C++ source, found by package path."""
