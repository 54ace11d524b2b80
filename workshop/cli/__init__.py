"""The `flash-delta-dev` command. A command imports what it needs only when it runs."""
