"""Which rank holds which rows and columns, and what ranks therefore send to each other. Pure data, no torch."""
