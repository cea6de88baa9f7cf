"""Example topologies, shipped as `embforge.topologies`: `embforge plan` takes their names (`--topology h100x8`)."""
