"""How kernels are called: one folder per backend, and the table of all of them."""
