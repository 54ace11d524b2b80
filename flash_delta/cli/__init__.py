"""The `flash-delta` command, a thin layer over the library. A command imports what it needs only when it runs."""
