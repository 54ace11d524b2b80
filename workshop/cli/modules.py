"""Checks of modules that a command gets by name."""

import os
import sys
from importlib.util import find_spec


def require_modules(names: list[str]) -> None:
    """Checks that Triton is installed, and that these modules can be imported from here, as with ``python -m``."""
    if find_spec("triton") is None:
        raise ValueError("triton: expected an installed package, got none (pip install triton)")
    if os.getcwd() not in sys.path:  # a console script searches its own folder instead
        sys.path.append(os.getcwd())
    for name in names:
        try:
            found = find_spec(name)
        except (ImportError, ValueError):  # the package is missing, or the name is no module's
            found = None
        if found is None:
            raise ValueError(f"modules: expected a module that can be imported from {os.getcwd()}, got {name!r}")
