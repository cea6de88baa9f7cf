"""Constants of the semantics: part of what a result is, never tunable."""

CHUNK = 64
"""Ids of a bag that are summed in order; chunk sums are combined by the same rule, recursively."""
