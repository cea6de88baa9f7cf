"""The `embforge` command, a file a command. Modules import only click; what a command needs, it loads when it runs."""
