"""Folders with code that is compiled already: packs of kernels (pack.py), and the C module."""

import hashlib
import importlib.util
import os
import platform
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

VARIABLE = "FLASH_DELTA_KERNELS"  # folders, separated as in PATH
PACKS = "flash_delta_kernels"  # a package that has such files, if it is installed
SUFFIX = ".abi3.so"  # for all versions of Python from 3.10 on


def folders() -> list[Path]:
    """The folders that the environment names, and the installed package."""
    named = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    installed = importlib.util.find_spec(PACKS)
    return named + [Path(path) for path in (installed and installed.submodule_search_locations) or ()]


def file_of(name: str, source: str) -> str:
    """The name of the file that has a module made from ``source``."""
    return f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:16]}-{platform.machine()}{SUFFIX}"


def load_built(name: str, source: str) -> ModuleType | None:
    """The C module made from ``source``, or None if no folder has it or this Python cannot load it."""
    paths = [folder / file_of(name, source) for folder in folders()] if SUFFIX in EXTENSION_SUFFIXES else []
    for path in filter(Path.exists, paths):
        spec = importlib.util.spec_from_file_location(name, path)
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError:  # for another C library
            continue
        return module
    return None
