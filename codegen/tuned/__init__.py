"""Tuned parameters: their keys, their stores, and which of them a plan takes. Only reads; the tuner writes."""
