"""The `embforge` command, one file per command. A command imports what takes time to load when it runs."""
