"""Makes the code of other libraries run on this library's ops."""
