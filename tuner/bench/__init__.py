"""Benchmarks that compare our lookups and training steps with other libraries and with the limits of the machine."""
