"""Which rank holds which rows and columns, and what that makes the ranks send to each other. Pure data, no torch."""
