"""Tools that only developers of flash_delta need. They are not in its wheel, and it imports none of them."""
