"""Workloads, paired measurements and the peers to beat. Calls codegen and the runtime; neither calls it."""
