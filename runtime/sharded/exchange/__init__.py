"""Moving bytes between ranks: the collectives, their buffers, their formats on the wire, and waiting for them."""
