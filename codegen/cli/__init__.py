"""The `embforge` command: a file a command. Their modules import only click; what a command needs, it loads when it runs."""
