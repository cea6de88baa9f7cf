"""Where tables live. One file a kind of storage."""
