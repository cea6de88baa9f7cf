"""Benchmarks of lookups, training steps, sharding, builds and the tuner. They are not part of the wheel."""
