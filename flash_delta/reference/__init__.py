"""The truth: the recurrence token by token, and the chunkwise algorithm derived from it."""
