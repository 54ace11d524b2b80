"""`install` puts this library's modules under fla's names, if fla is not installed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from email.message import Message
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from flash_delta.integrations._fla_mirror import describe, names_at
from flash_delta.integrations._fla_names import FLA, PATHS
from flash_delta.ops._elementwise import Elementwise
from flash_delta.ops._function import DeltaRule

ORIGIN = "flash_delta"
VERSION = "0.6.0"  # the version of fla whose names and arguments these are
DISTRIBUTIONS = ("flash-linear-attention", "fla-core")
ALIASES = {  # older paths of fla
    "modules.conv": "modules.causal_conv1d",
    "modules.conv.causal_conv1d": "modules.causal_conv1d.ops",
    "modules.conv.short_conv": "modules.causal_conv1d.ops",
    "modules.conv.triton": "modules.causal_conv1d.ops",
    "modules.conv.triton.ops": "modules.causal_conv1d.ops",
}
FUNCTIONS = {  # classes that trainers register with frameworks: the classes that compute here
    "modules.causal_conv1d.ops": {"CausalConv1dFunction": Elementwise},
    "modules.norm.fused_norm_gate": {"LayerNormGatedFunction": Elementwise},
    "ops.gated_delta_product.chunk": {"ChunkGatedDeltaProductFunction": DeltaRule},
    "ops.gated_delta_rule.chunk": {"ChunkGatedDeltaRuleFunction": DeltaRule},
    "ops.gated_delta_rule.fused_recurrent": {"FusedRecurrentFunction": DeltaRule},
    "ops.gdn2.chunk": {"ChunkGDN2Function": DeltaRule},
    "ops.kda.chunk": {"ChunkKDAFunction": DeltaRule},
}

_lock = threading.RLock()


def install() -> None:
    """Makes ``import fla`` give this library's modules, if fla is not installed.

    Call it before anything looks for fla, because libraries look only once, during their import. The modules have the
    names and arguments of fla 0.6.0 that docs/fla.md lists, also under older paths (``fla.modules.conv``).
    ``fla.__version__`` and the metadata of ``flash-linear-attention`` and ``fla-core`` say 0.6.0. If code uses
    something that fla has and this library lacks, the error says so: ModuleNotFoundError for an import, AttributeError
    for an attribute. A second ``install()`` changes nothing.

    The autograd functions there (``ChunkGatedDeltaRuleFunction`` and its like) are the classes that compute here. A
    trainer may register them with a framework. Their ``apply`` does not take fla's arguments.

    Raises:
        RuntimeError: if fla is installed. Call :class:`register` then.

    Example:
        >>> from flash_delta.integrations.fla import install, uninstall
        >>> install()  # doctest: +SKIP
        >>> from fla.layers import GatedDeltaNet  # doctest: +SKIP
        >>> uninstall()  # doctest: +SKIP
    """
    with _lock:
        if _finder in sys.meta_path:
            return
        installed = sys.modules.get("fla") or find_spec("fla")
        if installed is not None:
            place = getattr(installed, "origin", None) or getattr(installed, "__file__", None) or installed
            raise RuntimeError(f"install: expected no fla, got {place}: register() makes it run on this library")
        _put("", "layers", sys.modules[FLA].__doc__)
        for path, ours in ({path: path for path in sorted(PATHS)} | ALIASES).items():
            _put(path, ours, describe(ours))
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Removes the modules of :func:`install`. Code that has imported names from them keeps these names.

    Example:
        >>> from flash_delta.integrations.fla import uninstall
        >>> uninstall()  # there was nothing to take away
    """
    with _lock:
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, StandIn):
                del sys.modules[name]


class StandIn(ModuleType):
    """A module under fla's name. If an attribute is missing, the error says what to do."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_absent(f"{self.__name__}.{name}"), name=name, obj=self)


class _Finder(MetaPathFinder):
    """Refuses the import of fla's other modules, and gives the version."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> None:
        if fullname.startswith("fla."):
            raise ModuleNotFoundError(_absent(fullname), name="fla")

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        context = context or DistributionFinder.Context()
        wanted = None if context.name is None else context.name.lower().replace("_", "-")
        if "path" not in vars(context):
            yield from (_Distribution(name) for name in DISTRIBUTIONS if wanted in (None, name))


class _Distribution(Distribution):
    """The metadata that importlib.metadata returns."""

    def __init__(self, name: str):
        self.given = name

    @property
    def metadata(self) -> Message:
        message = Message()
        message["Metadata-Version"], message["Name"], message["Version"] = "2.1", self.given, VERSION
        message["Summary"] = "names of fla over flash_delta"
        return message

    def read_text(self, filename: str) -> str | None:
        return "fla\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> NoReturn:
        raise FileNotFoundError(f"{self.given}: expected no file, since flash_delta stands in for it, got {path}")


def _absent(name: str) -> str:
    return (
        f"{name}: flash_delta stands in for fla {VERSION} here and does not have it; docs/fla.md lists what it has. "
        "Install flash-linear-attention, and call flash_delta.integrations.fla.register() in place of install()"
    )


def _put(path: str, ours: str, doc: str | None) -> None:
    name = f"fla.{path}" if path else "fla"
    module = StandIn(name, doc)
    module.__spec__ = ModuleSpec(name, None, origin=ORIGIN, is_package=True)
    module.__package__, module.__version__ = name, VERSION
    module.__path__ = []  # so that the finder gets requests for missing modules
    vars(module).update(names_at(ours) | FUNCTIONS.get(ours, {}))
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent and last not in vars(sys.modules[parent]):
        setattr(sys.modules[parent], last, module)


_finder = _Finder()
