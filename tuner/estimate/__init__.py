"""What a kernel should take, from its source and its workload, without running it."""
