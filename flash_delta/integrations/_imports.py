"""Calls a function with modules as soon as they have been imported."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Calls ``look`` with every module whose name matches, once it has been executed. It stands in
    ``sys.meta_path``."""

    def __init__(self, names: re.Pattern[str], look: Callable[[ModuleType], None]):
        self.names = names
        self.look = look

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if self.names.fullmatch(fullname) else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Looking(spec.loader, self.look)
        return spec


class _Looking(Loader):
    """Wraps a loader and calls ``look`` with the module that it loads. The module sees only the original loader."""

    def __init__(self, loader: Loader, look: Callable[[ModuleType], None]):
        self.loader = loader
        self.look = look

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.look(module)
