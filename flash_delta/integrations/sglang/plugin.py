"""A plugin that runs SGLang's Gated DeltaNet and Kimi Delta Attention on the serving ops. SGLang finds it by itself.

Every process of SGLang calls `register` (entry point ``sglang.srt.plugins``). It puts hooks around the methods
``packed_decode``, ``decode``, ``extend`` and ``target_verify`` of SGLang's dispatchers, by which linear attention calls
kernels. The ops use SGLang's own tensors: its pool of states, its slots, its buffer for drafts. Prompts leave the
states that the radix cache keeps in the pool (tracked.py). With ``--enable-linear-replayssm-spec`` drafts leave records
in SGLang's rings (replay.py). SGLang still runs the convolution and the output norm.

``FLASH_DELTA_SGLANG=1`` switches the plugin on. It is off by default because it has run only on CPUs. If SGLang was
told to run another kernel than its Triton kernel, that kernel runs. SGLang's own code runs calls that these ops do not
take, and all calls if a version of SGLang has other methods. The log says why.
"""

import inspect
import logging
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from typing import Any

import flash_delta
from flash_delta.integrations._refusal import refusal
from flash_delta.integrations.sglang import replay, tracked
from flash_delta.integrations.sglang.calls import (
    Call,
    Refused,
    decode,
    extend,
    fill_tracked,
    packed_decode,
    target_verify,
)
from flash_delta.integrations.sglang.tracked import BACKENDS, find_tracked

VARIABLE = "FLASH_DELTA_SGLANG"
TESTED = ("0.5.23",)
DISPATCHERS = {  # for each, our rule, the kernel that our ops replace, and the class that has a dispatcher
    f"{BACKENDS}.gdn_backend.GDNKernelDispatcher": ("gated_delta_rule", "TritonGDNKernel", "GDNAttnBackend"),
    f"{BACKENDS}.kda_backend.KDAKernelDispatcher": ("kda", "TritonKDAKernel", "KDAAttnBackend"),
}
METHODS = {  # the function that makes our call, and the dispatcher's attribute with SGLang's kernel
    "packed_decode": (packed_decode, "decode_kernel"),
    "decode": (decode, "decode_kernel"),
    "extend": (extend, "extend_kernel"),
    "target_verify": (target_verify, "verify_kernel"),
}
TRACKED = "prompts whose states the radix cache keeps"
REPLAY = "drafts with --enable-linear-replayssm-spec"
FEATURES = {TRACKED: tracked, REPLAY: replay}  # modules that hook more than a dispatcher

logger = logging.getLogger("sglang.flash_delta")
_active: list[str] = []  # dispatchers that have hooks, and features


def register() -> None:
    """SGLang calls this in each of its processes. A second call changes nothing. Without SGLang nothing happens.

    Example:
        >>> from flash_delta.integrations.sglang import register
        >>> register()  # SGLang does this itself
    """
    if os.environ.get(VARIABLE) != "1" or _version() is None:
        return
    for path, (rule, kernel, backend) in DISPATCHERS.items():
        if path not in _active and _fits(path, partial(_unlike, path, kernel, backend)):
            _hook(path, rule, kernel, backend)
            _active.append(path)
    for name, feature in FEATURES.items() if _active else ():
        if name not in _active and _fits(name, feature.unlike):
            for path, ours in feature.hooks():
                _around(path, ours)
            _active.append(name)


def _fits(name: str, unlike: Callable[[], str | None]) -> bool:
    try:
        reason = unlike()
    except (ImportError, AttributeError) as error:
        reason = str(error)
    if reason is not None:
        logger.warning("%s: SGLang's own code runs %s: %s", VARIABLE, name, reason)
    return reason is None


def _version() -> str | None:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def _unlike(path: str, kernel: str, backend: str) -> str | None:
    """Why our hooks do not fit SGLang's dispatcher, or None."""
    module, _, name = path.rpartition(".")
    module = import_module(module)
    if not hasattr(module, backend):
        return f"there is no {backend}"
    if not hasattr(getattr(module, kernel), "supports_track_state_snapshot"):
        return f"{kernel} says nothing of states that the radix cache keeps"
    for method, (ours, _) in METHODS.items():
        got, known = (inspect.signature(of).parameters for of in (getattr(getattr(module, name), method), ours))
        if _ordered(got)[1:] != _ordered(known)[1:] or not _named(got) <= _named(known):  # after self; after rule
            return f"{method} takes {', '.join(got)}"
    return None


def _ordered(parameters: Any) -> list[str]:
    return [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


def _named(parameters: Any) -> set[str]:
    return {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _hook(path: str, rule: str, kernel: str, backend: str) -> None:
    _around(f"{path}.__init__", partial(_make, kernel))
    _around(f"{path.rpartition('.')[0]}.{backend}.__init__", partial(_make_backend, rule, kernel))
    for method in METHODS:
        _around(f"{path}.{method}", partial(_serve, method, rule, kernel))


def _around(path: str, ours: Callable) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(path, ours, HookType.AROUND)


def _make(kernel: str, theirs: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Makes a dispatcher. SGLang asks its kernels what they support. The log says which kernels our ops replace."""
    theirs(self, *args, **kwargs)
    ours = []
    for name in ("decode_kernel", "extend_kernel", "verify_kernel"):
        found = getattr(self, name)
        if type(found).__name__ == kernel:
            found.supports_track_state_snapshot = True
            found.supports_fused_chain_verify = False  # this launch of SGLang bypasses the dispatcher
            ours.append(name.removesuffix("_kernel"))
        else:
            logger.warning("%s: SGLang was told to run %s as %s", VARIABLE, type(found).__name__, name)
    version = _version()
    tested = "tested" if version in TESTED else f"not tested; {', '.join(TESTED)} is"
    replaced = ", ".join(ours) or "nothing"
    name = type(self).__name__
    logger.info("flash_delta %s in SGLang %s (%s): %s: %s", flash_delta.__version__, version, tested, name, replaced)


def _make_backend(rule: str, kernel: str, theirs: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the class that has a dispatcher, which then knows it."""
    theirs(self, *args, **kwargs)
    if TRACKED in _active:
        tracked.introduce(self)
    if REPLAY in _active and (reason := replay.adopt(self, rule, kernel)) is not None:
        logger.warning("%s: SGLang's own code runs %s: %s", VARIABLE, REPLAY, reason)


def _serve(method: str, rule: str, kernel: str, theirs: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a call of a dispatcher's method, or lets SGLang's own code do it."""
    make, attribute = METHODS[method]
    if kwargs.get("retrieve_parent_token") is not None and hasattr(self, "tree_verify_kernel"):
        attribute = "tree_verify_kernel"
    if type(getattr(self, attribute)).__name__ != kernel:
        return theirs(self, *args, **kwargs)
    given = replay.with_ring(kwargs)
    if kwargs.get("track_state") is not None:
        given = kwargs | {"tracked": find_tracked(self, kwargs["cache_indices"], kwargs["track_chunk_idx"])}
    try:
        call = make(rule, *args, **given)
        reason = None if "ring" in given else _reason(self, call)
    except Refused as refused:
        if "ring" in given:  # SGLang's own code does not know our records
            raise
        reason = str(refused)
    if reason is None:
        return call.result(call.op(**call.arguments))
    seen = self.__dict__.setdefault("_flash_delta_reasons", set())
    if reason not in seen:
        seen.add(reason)
        logger.warning("%s: SGLang's own code runs this call of %s: %s", VARIABLE, method, reason)
    result = theirs(self, *args, **kwargs)
    if rule == "gated_delta_rule" and kwargs.get("track_state") is not None:  # SGLang's kernel does not have it
        fill_tracked(result[2], kwargs["query_start_loc"], kwargs["track_state"], kwargs["track_chunk_idx"])
    return result


def _reason(dispatcher: Any, call: Call) -> str | None:
    """Why the op does not take a call of this form, or None. It runs once for each form."""
    seen = dispatcher.__dict__.setdefault("_flash_delta_forms", {})
    form = call.op.__name__, *(name for name, value in call.arguments.items() if value is not None)
    if form not in seen:
        seen[form] = refusal(call.op, call.arguments)
    return seen[form]
