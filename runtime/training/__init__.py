"""Training: everything between torch's autograd and the kernels that reduce gradients and update rows."""
