"""Makes the modules of `_fla_names.py` when they are imported, or read as attributes of their package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flash_delta.integrations._fla_names import ABOUT, FLA, PATHS, SECOND_PATHS

MARK = "names of "  # begins the entry of a package's __path__ that leads `pkgutil` here


class Mirror(Loader):
    """Finds and fills the modules of a package.

    Its file is beside the package of the names. So Python knows it before another thread sees a part of the package.
    """

    def __init__(self, entry: str) -> None:
        if not entry.startswith(MARK):
            raise ImportError(f"entry: expected {MARK!r} and a package, got {entry!r}")
        self.package = entry.removeprefix(MARK)

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Imports nothing, since Python holds the lock of all imports."""
        package, _, name = fullname.rpartition(".")
        is_package = submodules(package).get(name) if package.startswith(FLA) else None
        if is_package is None:
            return None
        spec = ModuleSpec(fullname, self, origin=__file__, is_package=is_package)
        if is_package:
            spec.submodule_search_locations = [MARK + fullname]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__.removeprefix(f"{FLA}.")
        found = names_at(path)
        vars(module).update(found, __all__=[*found], __doc__=describe(path))
        module.__getattr__ = partial(submodule, module.__name__)

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Yields what `pkgutil` asks for."""
        for name, is_package in submodules(self.package).items():
            yield prefix + name, is_package


@cache
def submodules(package: str) -> dict[str, bool]:
    """The names of a package's modules, and whether each of them is a package."""
    above = f"{package}.".removeprefix(f"{FLA}.")
    below = [path.removeprefix(above) for path in PATHS if path.startswith(above)]
    return {name: any(path.startswith(f"{name}.") for path in below) for name in below if "." not in name}


def submodule(package: str, name: str) -> ModuleType:
    """A package's attribute ``name``, if this is a module that nobody has imported yet."""
    if name not in submodules(package):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(f"{package}.{name}")


def names_at(path: str) -> dict[str, Any]:
    """The functions and classes of a path."""
    return {name: getattr(import_module(home), name) for name, home in homes(path).items()}


def homes(path: str) -> dict[str, str]:
    """The names of a path, and the modules that define them."""
    by_home = PATHS[path].items()
    return {name: home if "." in home else f"{FLA}.{home}" for home, names in by_home for name in names.split()}


def describe(path: str) -> str:
    """A path's docstring."""
    if path in SECOND_PATHS:
        return f"fla.{path}, another path of fla.{SECOND_PATHS[path]}."
    return f"fla.{path}: {ABOUT[path]}." if path in ABOUT else f"fla.{path}."


sys.meta_path.insert(0, Mirror(MARK + FLA))  # before the finder of files, for which folders of stubs are packages
sys.path_hooks.append(Mirror)
