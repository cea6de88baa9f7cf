"""C++ for the host: the facts of each op's source, and the machine's own compiler."""
