"""A report of a machine, which anyone can send in: what ``flash-delta-dev machine`` writes."""
