"""Estimates of what a kernel costs, from its source, its machine code and its workload, without a GPU to run it on."""
