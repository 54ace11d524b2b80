"""The reference: the recurrence token by token, and the chunkwise algorithm that is derived from it."""
