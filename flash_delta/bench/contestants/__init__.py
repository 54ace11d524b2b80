"""Who is timed: one small module per library, this one among them.

Each exports

* ``PACKAGE``: the name of the distribution whose version is reported;
* ``CACHES``: the environment variables that say where it keeps what it compiles;
* ``unsupported(workload, device) -> str | None``: why it cannot run a row;
* ``prepare(workload, x) -> Call``: converts the tensors that :func:`~flash_delta.testing.make_tensors` made
  into the library's own layouts, outside of what is timed;
* where that saves it work that the others do within their time, ``ready_made(workload) -> str | None``: what it saves.

Nothing is imported before ``prepare``, so that a missing package is an answer, not an error.
"""

import importlib
from importlib import metadata
from types import ModuleType

from flash_delta import __version__  # the name flash_delta is that of a module in here
from flash_delta.testing import Workload

OURS, PLAIN = "flash_delta", "plain"
NAMES = (OURS, "fla", "flash_qla", "flashinfer", "cudnn", "cudnn_bfloat16", "flash_kda", "cula", "transformers")
OF_KDA = ("cudnn_bfloat16", "flash_kda", "cula")  # nothing of theirs is compared in other groups


def load(name: str) -> ModuleType:
    if name not in (*NAMES, PLAIN):
        raise ValueError(f"contestant: expected one of {', '.join(NAMES)}, got {name!r}")
    return importlib.import_module(f"flash_delta.bench.contestants.{name}")


def ready_made(name: str, workload: Workload) -> str | None:
    """What a contestant is given in another form than the others, converted before its time starts."""
    module = load(name)
    return module.ready_made(workload) if hasattr(module, "ready_made") else None


def versions(names: str | None = None) -> dict[str, str]:
    """The installed contestants with their versions; of the comma-separated ``names``, each must be installed."""
    installed = {name: version for name in NAMES if (version := _version(name)) is not None}
    if names is None:
        return installed
    for name in names.split(","):
        load(name)
        if name not in installed:
            raise ValueError(f"contestants: expected installed ones ({', '.join(installed)}), got {name!r}")
    return {name: installed[name] for name in names.split(",")}


def taking_part(group: str, installed: dict[str, str]) -> dict[str, str]:
    """Of the contestants. What serving is compared with is this library, called otherwise; of layers, those of
    transformers, on whosever ops, or those of fla, on this library's or its own; with what is around the rule, those
    who pack sequences, and who decode on a pool. Who has Kimi Delta Attention alone has no row in other groups."""
    if group.startswith("fla-"):
        return {name: installed[name] for name in installed if name in (OURS, "fla")}
    if group == "layer":
        return {name: installed[name] for name in installed if name in (OURS, "fla", "transformers")}
    if group in ("prompts", "steps", "kda-steps"):
        rules = {name: installed[name] for name in installed if name in (OURS, "fla", "flashinfer")}
        return rules | {PLAIN: __version__}
    if group == "serving":
        return dict.fromkeys((OURS, PLAIN), __version__)
    return {name: installed[name] for name in installed if group.startswith("kda-") or name not in OF_KDA}


def _version(name: str) -> str | None:
    if name == OURS:  # may run from a checkout, which has no metadata
        return __version__
    try:
        return metadata.version(load(name).PACKAGE)
    except metadata.PackageNotFoundError:
        return None
