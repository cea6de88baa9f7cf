"""Moves bytes between ranks: the collectives, their buffers, number formats on the wire, and how ranks wait."""
