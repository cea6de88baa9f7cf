"""Turns a spec of tables and features into kernel sources and binaries. Never imports torch."""
