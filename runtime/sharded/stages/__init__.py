"""The stages of a sharded lookup, in the order of a step: ids to owners, rows to vectors, vectors to bags."""
