"""Example specs, shipped as `embforge.specs`: every command takes their bare names (`embforge gen dlrm`)."""
