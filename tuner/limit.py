"""The machine's gather limit: how fast the rows of a batch can be read at all (`templates/cpu/gather_limit.cpp.j2`)."""
