"""Readers of what users write: JSON documents, the lines of TOML files, numbers, and suggestions for misspelt names."""
