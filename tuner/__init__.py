"""Searches, measures and compares kernels on this machine. It calls codegen and the runtime; neither calls it."""
