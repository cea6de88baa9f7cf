"""C++ for the host: what the sources of each op say, and the machine's own compiler."""
