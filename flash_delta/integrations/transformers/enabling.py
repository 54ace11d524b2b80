"""Binds the names by which modelling code finds its ops, convolutions and norms, and gives them back."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from inspect import Parameter, isclass, signature
from types import ModuleType
from typing import Any

from torch import nn

from flash_delta.integrations._context import register_attention
from flash_delta.integrations._imports import AfterImport
from flash_delta.integrations._report import Refused, Replaced
from flash_delta.integrations.transformers.documents import separating, walks_layers
from flash_delta.integrations.transformers.functions import CONVOLUTIONS, RULES, RULES_OF_SIGMOID, SIGMOID, gated_norm
from flash_delta.integrations.transformers.layers import form_of, mixing
from flash_delta.integrations.transformers.rollback import of_caches, of_models

MODELLING = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
NORM = re.compile(r"\w+RMSNormGated")
OLDEST = (5, 17)


_lock = threading.RLock()
_replaced: list[Replaced] = []
_refused: list[Refused] = []


class enable:
    """From now on, in all threads, models of transformers run on this library. The module's docstring lists the models.

    ``enable()`` lasts until :func:`disable`, ``with enable():`` until the end of the block. A second ``enable()``
    changes nothing. To see what has been replaced so far, and what will be, print the object.

    Args:
        model: a model that has to run on this library; otherwise there is an error. Its classes may also be defined
            outside of transformers, in a module that has transformers' names for the ops. Default None: no model is
            checked.

    Attributes:
        replaced: for every name its module, the name, the old object and the new one.
        refused: modules whose functions are not those that we know, each with a name and the reason. They run as
            before. There was a RuntimeWarning for each.

    Raises:
        ImportError: if there is no transformers >= 5.17.
        ValueError: if something of ``model`` would not run on this library, naming it and the reason.

    Example:
        >>> from flash_delta.integrations import transformers as integration
        >>> with integration.enable() as report:  # without ``with`` it stays until `disable()`
        ...     print(str(report).splitlines()[0])
        flash_delta in transformers ...
    """

    def __init__(self, model: nn.Module | None = None):
        self.version = _version()
        with _lock:
            self.before = _finder in sys.meta_path
            if not self.before:
                sys.meta_path.insert(0, _finder)
            for name, module in list(sys.modules.items()):
                if MODELLING.fullmatch(name):
                    _replace(module)
            if model is not None:
                try:
                    _check_model(model)
                except ValueError:
                    self.__exit__()
                    raise

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        return tuple(_replaced)

    @property
    def refused(self) -> tuple[Refused, ...]:
        return tuple(_refused)

    def __enter__(self) -> enable:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.before:
            disable()

    def __str__(self) -> str:
        modules = dict.fromkeys(entry.module for entry in _replaced)
        what = f"{len(_replaced)} names in {len(modules)} modules" if modules else "nothing is replaced so far"
        lines = [f"flash_delta in transformers {self.version}: {what}"]
        for module in modules:
            lines += [f"  {module}", *(f"    {entry}" for entry in _replaced if entry.module == module)]
        lines += [f"  refused: {entry}" for entry in _refused]
        later = "modelling code that is not imported yet is changed when it is"
        return "\n".join([*lines, f"  {later if _finder in sys.meta_path else 'disabled'}"])


def disable() -> None:
    """Restore every name. If other code has bound a name since then, that name stays as it is.

    Example:
        >>> from flash_delta.integrations import transformers as integration
        >>> report = integration.enable()
        >>> integration.disable()
        >>> report.replaced
        ()
    """
    with _lock:
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        for entry in reversed(_replaced):
            if vars(entry.owner).get(entry.name) is entry.new:
                setattr(entry.owner, entry.name, entry.old)
        _replaced.clear()
        _refused.clear()


def _version() -> str:
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        message = "this integration needs transformers: pip install 'flash-delta[transformers]'"
        raise ImportError(message) from error
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(f"transformers: expected version >= {'.'.join(map(str, OLDEST))}, got {version}")
    return version


def _names(module: ModuleType) -> Iterator[tuple[ModuleType | type, str, Callable[..., Any]]]:
    """Yields everything to replace in a module: where, which name, by what. Nothing in modules without our rules."""
    if RULES.keys().isdisjoint(vars(module)):
        return
    family = module.__name__.rpartition("modeling_")[2]
    rules = RULES_OF_SIGMOID if family in SIGMOID else RULES
    for name, new in (rules | CONVOLUTIONS).items():
        if name in vars(module):
            yield module, name, new
    for cls in list(vars(module).values()):
        if _is_norm(cls, module.__name__) and "forward" in vars(cls):
            yield cls, "forward", gated_norm
        if walks_layers(cls, module.__name__):
            yield cls, "forward", separating(cls.forward)
        if (form := form_of(cls, module)) is not None:
            yield cls, "forward", mixing(cls.forward, form)
    if any(form_of(cls, module) is not None for cls in vars(module).values()):
        yield from of_models(module)
    yield from of_caches()


def _replace(module: ModuleType) -> None:
    """Replaces all of a module's names, or none if one is refused."""
    with _lock:
        found = [entry for entry in _names(module) if vars(entry[0]).get(entry[1]) is not entry[2]]
        refused = [
            Refused(module.__name__, name, why) for owner, name, new in found if (why := _unlike(owner, name, new))
        ]
        if refused:
            for entry in refused:
                if entry not in _refused:
                    _refused.append(entry)
                    warnings.warn(f"flash_delta.integrations: not replaced: {entry}", RuntimeWarning, stacklevel=2)
            return
        if found:
            register_attention()
        for owner, name, new in found:
            _replaced.append(Replaced(owner, name, vars(owner).get(name), new))
            setattr(owner, name, new)


def _unlike(owner: ModuleType | type, name: str, new: Callable[..., Any]) -> str | None:
    """Why ``new`` cannot replace the present object: its arguments differ, so a call might mean something else."""
    old = getattr(owner, name)
    if not callable(new):  # an attribute
        return None
    old = old.forward if isinstance(old, nn.Module) else old  # hub kernels are modules
    theirs, ours = (
        [n for n, p in signature(f).parameters.items() if p.kind is not Parameter.VAR_KEYWORD] for f in (old, new)
    )
    if theirs == [name for name in ours if name in theirs]:
        return None
    return f"expected arguments among {', '.join(ours)}, in this order, got {', '.join(theirs)}"


def _check_model(model: nn.Module) -> None:
    modules = {cls.__module__ for layer in model.modules() for cls in type(layer).__mro__}
    modules = {name for name in modules if name in sys.modules and any(_names(sys.modules[name]))}
    if not modules:
        raise ValueError(f"model: expected layers that call {', '.join(RULES)}, got a {type(model).__name__} without")
    for name in sorted(modules):
        _replace(sys.modules[name])
    for entry in _refused:
        if entry.module in modules:
            raise ValueError(f"model: {entry}")
    for path, layer in model.named_modules():
        if any(_is_norm(cls, cls.__module__) and cls.__module__ in modules for cls in type(layer).__mro__):
            parent = path.rpartition(".")[0]
            _check_forward(parent, model.get_submodule(parent), None)
            _check_forward(path, layer, gated_norm)
        if hasattr(type(layer).forward, "without_documents"):
            _check_forward(path, layer, type(layer).forward)


def _is_norm(cls: Any, module: str) -> bool:
    return isclass(cls) and cls.__module__ == module and NORM.fullmatch(cls.__name__) is not None


def _check_forward(path: str, layer: nn.Module, ours: Callable[..., Any] | None) -> None:
    """Refuse a layer whose instance has another forward than its class, from hub kernels or from before `enable`."""
    hooked = vars(layer).get("_old_forward")  # set by accelerate, which calls this forward
    if hooked is None and "forward" in vars(layer):
        raise ValueError(f"model: {path}: expected the forward of its class, got {layer.forward}")
    forward = layer.forward if hooked is None else hooked
    if ours is not None and getattr(forward, "__func__", None) is not ours:
        raise ValueError(f"model: {path}: expected {ours}, got {forward}: call enable() before the model is made")


_finder = AfterImport(MODELLING, _replace)
