"""The file that a trace of calls is written to: `embforge.record` writes it, `embforge tune` reads it."""
