"""Workloads: how many ids, distributed how, drawn from a law or taken from a trace."""
