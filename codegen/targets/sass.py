def kernel_resources(plan, binary): return []
