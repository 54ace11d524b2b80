"""Kernel backends: a folder each, with ``unsupported``, ``forward``, ``backward`` and ``step``."""
