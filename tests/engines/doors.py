"""How a trainer comes to this library: by `install`, and where fla is installed by `register`."""

import importlib
import warnings
from importlib.util import find_spec

from flash_delta.integrations.fla import install, register, uninstall, unregister

FLA = find_spec("fla") is not None


def enter() -> register | None:
    """Call it before the trainer is imported. What stays with fla is run by Triton's interpreter."""
    if not FLA:
        install()
        return None
    from fla_interpreter import prepare, repair

    prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing GPU
        importlib.import_module("fla.layers")
    repair()
    return register()


def leave() -> None:
    uninstall()
    unregister()
