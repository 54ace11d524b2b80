"""SGLang on a CPU: `put_stubs` before it is imported, `repair` after.

The stubs are for what SGLang imports and its linear attention does not call: modules of which every name is a class.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FunctionType, ModuleType

import triton.language as tl
from triton.language.extra import libdevice

NAMES = {
    "torchvision": ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"),
    "torchcodec": ("", ".decoders"),
}


class _Any(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=_Any):
    pass


def put_stubs() -> None:
    for package, modules in NAMES.items():
        if find_spec(package) is None:
            for name in modules:
                _put(package + name)


def _put(name: str) -> None:
    module = ModuleType(name)
    module.__spec__, module.__path__, module.__version__ = ModuleSpec(name, None, is_package=True), [], "0"
    module.__getattr__ = lambda attribute: getattr(Nothing, attribute)
    sys.modules[name] = module


def repair() -> None:
    """Triton's interpreter replaces the functions of `triton.language`, but not other modules' names for them, and it
    has no device library."""
    libdevice.exp = _late("exp")
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.kernels."):
            for alias, found in list(vars(module).items()):
                if isinstance(found, FunctionType) and getattr(tl, found.__name__, None) is found:
                    setattr(module, alias, _late(found.__name__))


def _late(name: str):
    return lambda *args, **kwargs: getattr(tl, name)(*args, **kwargs)
