"""`register` makes code for an installed fla run on this library."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from types import ModuleType
from typing import Any

from flash_delta.integrations._report import Refused, Replaced
from flash_delta.integrations.fla.takeover.door import SWITCH, Door, Taken, stand_in
from flash_delta.integrations.fla.takeover.layers import leave_layers, take_layers
from flash_delta.integrations.fla.takeover.table import TABLE
from flash_delta.layers._plain import Project
from flash_delta.ops._elementwise import Elementwise
from flash_delta.ops._function import DeltaRule
from flash_delta.ops._mixing.function import Mix

OLDEST = (0, 5, 2)
NAME = "flash_delta"  # in fla's registry
PRIORITY = 2  # before FlashQLA and FlashKDA, which have 3

_lock = threading.RLock()
_doors: list[Door] = []
_registries: list[Any] = []  # fla's registries that have our backend
_replaced: list[Replaced] = []
_layers: list[Replaced] = []
_refused: list[Refused] = []


class register:
    """From now on, in all threads, code that is written for fla runs on this library where this is possible.

    It needs fla 0.5.2 or 0.6.0 and imports it. For functions in fla's own registry, this library becomes a backend
    there, named "flash_delta", which comes before FlashQLA and FlashKDA. Other functions are replaced by ours in every
    module that has them. A call that our function does not take runs in fla as before, for instance if it has an
    argument that we lack, or would run in PyTorch on a GPU. Layers of fla whose source we know run as one op between
    their projections (:func:`flash_delta.ops.mix`), where there is no cache and no padding.

    ``register()`` lasts until :func:`unregister`, ``with register():`` until the end of the block. A second
    ``register()`` changes nothing. The environment variable ``FLA_FLASH_DELTA=0`` leaves all calls to fla. With fla's
    own ``FLA_DISABLE_BACKEND_DISPATCH=1`` nothing is registered. To see what happened so far, print the object.

    Attributes:
        registered: names of functions for which fla's registry has this library.
        replaced: for every other name its module or class, the name, the old function and the new one.
        refused: functions that fla does not have, and functions that are not replaced, each with the reason.
        left: for calls that fla ran, the function's name and the reason, once each.
        functions: the autograd functions that compute now, for frameworks that need to know them by class.

    Raises:
        ImportError: if there is no fla >= 0.5.2, or it cannot be imported.

    Example:
        >>> from flash_delta.integrations.fla import register, unregister
        >>> report = register()  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        flash_delta in fla 0.6.0: ...
    """

    functions = (DeltaRule, Elementwise, Mix, Project)

    def __init__(self) -> None:
        self.version = _version()
        with _lock:
            self.before = bool(_doors or _refused)
            if not self.before:
                try:
                    _take_all()
                except BaseException:
                    unregister()
                    raise

    @property
    def registered(self) -> tuple[str, ...]:
        in_place = {entry.name for entry in _replaced}
        return tuple(door.name for door in _doors if door.name not in in_place)

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        return (*_replaced, *_layers)

    @property
    def refused(self) -> tuple[Refused, ...]:
        return tuple(_refused)

    @property
    def left(self) -> tuple[tuple[str, str], ...]:
        return tuple((door.name, why) for door in _doors for why in door.left)

    def __enter__(self) -> register:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.before:
            unregister()

    def __str__(self) -> str:
        names = dict.fromkeys(entry.name for entry in _replaced)
        lines = [f"flash_delta in fla {self.version}: {len(_doors)} functions"]
        lines += [f"  by fla's registry: {', '.join(self.registered)}"] if self.registered else []
        lines += [f"  in place: {', '.join(names)}"] if names else []
        lines += [f"  layers: {', '.join(entry.owner.__name__ for entry in _layers)}"] if _layers else []
        lines += [f"  refused: {entry}" for entry in _refused]
        return "\n".join([*lines, *(f"  left to fla: {name}: {why}" for name, why in self.left)])


def unregister() -> None:
    """Restores fla to its state before :class:`register`. If other code has bound a name since then, that name stays.

    Example:
        >>> from flash_delta.integrations.fla import unregister
        >>> unregister()  # there was nothing to undo
    """
    with _lock:
        for registry in _registries:
            registry._backends.pop(NAME, None)
        _bind({id(entry.new): entry.old for entry in _replaced})
        leave_layers(_layers)
        for found in (_doors, _registries, _replaced, _layers, _refused):
            found.clear()


def _version() -> str:
    """The version of the installed fla. Imports fla."""
    if "fla" not in sys.modules and find_spec("fla") is None:
        raise ImportError(
            "register: expected an installed fla (pip install flash-linear-attention), got none; then install() helps"
        )
    fla = import_module("fla")
    if getattr(fla.__spec__, "origin", None) == NAME:
        raise ImportError("register: expected an installed fla, got what install() put in its place")
    version = getattr(fla, "__version__", "none")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        raise ImportError(f"fla: expected version >= {'.'.join(map(str, OLDEST))}, got {version}")
    return version


def _take_all() -> None:
    import_module("fla.ops")
    import_module("fla.modules")
    backends = import_module("fla.backends" if find_spec("fla.backends") else "fla.ops.backends")
    if backends._DISPATCH_DISABLED:
        _refused.append(Refused("fla", "every function", "FLA_DISABLE_BACKEND_DISPATCH=1"))
        return
    in_place, by_registry = {}, {}
    for taken in TABLE:
        name = taken.ours.__name__
        module = _first(taken.paths)
        theirs = None if module is None else getattr(module, name, None)
        if theirs is None:
            _refused.append(Refused(f"fla.{taken.paths[0]}", name, "this fla does not have it"))
            continue
        door = Door(taken, theirs)
        _doors.append(door)
        registry = _registry(backends, theirs, taken)
        if registry is None:
            in_place[id(theirs)] = stand_in(door, theirs)
        else:
            by_registry.setdefault(id(registry), (registry, []))[1].append(door)
    for registry, doors in by_registry.values():
        registry.register(_backend(backends.BaseBackend, doors))
        _registries.append(registry)
    _replaced.extend(_bind(in_place))
    _layers.extend(take_layers())


def _first(paths: tuple[str, ...]) -> ModuleType | None:
    for path in paths:
        try:
            return import_module(f"fla.{path}")
        except ModuleNotFoundError:
            continue
    return None


def _registry(backends: ModuleType, theirs: Callable[..., Any], taken: Taken) -> Any:
    """The registry in which fla looks up a function, or None if it has none."""
    own = getattr(backends, "_function_registries", {}).get(unwrap(theirs))
    if own is not None or taken.operation is None:
        return own
    if hasattr(backends, "_operation_registries"):
        return backends._operation_registries.get(taken.operation)
    backends.BackendRegistry.ensure_initialized(taken.operation)
    return backends.BackendRegistry._registries.get(taken.operation)


def _backend(base: type, doors: list[Door]) -> Any:
    """A backend object of fla's class, with a method and a verifier for each function."""
    members: dict[str, Any] = {"backend_type": NAME, "env_var": SWITCH, "priority": PRIORITY}
    for door in doors:
        members[door.name] = staticmethod(door.run)
        members[f"{door.name}_verifier"] = staticmethod(_verifier(door))
    return type("FlashDeltaBackend", (base,), members)()


def _verifier(door: Door) -> Callable[..., tuple[bool, str | None]]:
    def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        why = door.refusal(args, kwargs)
        return why is None, why

    return verify


def _bind(new: dict[int, Callable[..., Any]]) -> list[Replaced]:
    """Replaces functions with these ids under all their names, in every module except this library's own."""
    found = []
    modules = {id(m): m for name, m in list(sys.modules.items()) if name.split(".")[0] != NAME}
    for module in modules.values() if new else ():
        for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if id(value) in new:
                found.append(Replaced(module, name, value, new[id(value)]))
                setattr(module, name, new[id(value)])
    return found
