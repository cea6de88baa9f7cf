"""Tuned parameters: what they are known by, where they lie, and which of them a plan takes. Reads; the tuner writes."""
