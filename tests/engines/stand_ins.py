"""One module of a trainer: `stand_in` is for packages that it imports and that the tests never call, `bare` for its own
packages, whose ``__init__`` would import the whole trainer."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec


class _Any(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=_Any):
    def __init__(self, *args, **kwargs):
        pass


class _Finder(MetaPathFinder, Loader):
    """Finds every module of some packages, and in these modules every name."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, fullname, path=None, target=None):
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self.packages else None

    def exec_module(self, module):
        module.__version__, module.__path__ = "0", []
        module.__getattr__ = lambda name: getattr(Nothing, name)


def stand_in(*packages: str) -> None:
    """For those of them that are not installed."""
    sys.meta_path.append(_Finder({name for name in packages if find_spec(name) is None}))


def bare(*packages: str) -> None:
    """Packages without what their ``__init__`` does, parents first."""
    for name in packages:
        parent, _, last = name.rpartition(".")
        found = PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else None)
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = found.submodule_search_locations
        sys.modules[name] = module_from_spec(spec)
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])
