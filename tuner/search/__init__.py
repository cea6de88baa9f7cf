"""The spaces that are searched: the parameters of every target, and what a target allows of them."""
