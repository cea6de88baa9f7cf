"""A CUDA driver for machines without one, for tests: see driver.h. Nothing here is part of the package.

The launchers run against it as they are, through the real cuda.core. It can be reached only in a process that
`run` started: the library is built under a name that no loader looks for, is loaded only on request, and refuses to
start without the variable EMBFORGE_EMULATED_DRIVER or on a machine with a real driver.
"""
