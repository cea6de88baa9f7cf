"""The stages of a sharded lookup, in the order of a step: send ids to the owners of rows, look up, send vectors back,
and combine them."""
