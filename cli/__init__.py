"""The `embforge` command, one file per command. Modules import only click; commands import the rest when they run."""
