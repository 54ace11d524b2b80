"""The `flash-delta` command: thin over the library; a command imports what it needs when it runs."""
