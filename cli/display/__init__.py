"""Tables and panels in which commands show their results."""
