"""Embedding tables in memory: what every table offers, and one file per kind of table."""
