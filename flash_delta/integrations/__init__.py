"""Other libraries' code on this library's ops."""
