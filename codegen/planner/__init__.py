"""What a sharding costs, predicted: its memory, its traffic and its time, and the search for the cheapest."""
