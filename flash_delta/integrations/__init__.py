"""Makes the code of other libraries run on this library's ops."""

from flash_delta.integrations import _fla_mirror  # noqa: F401 (so that every thread finds fla's names)
