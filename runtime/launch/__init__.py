"""One file a backend: how a plan's kernel is called."""
