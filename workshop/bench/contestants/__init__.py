"""The contestants that are timed: one small module per library, including this library.

Each exports

* ``PACKAGE``: the name of the distribution whose version is reported;
* ``CACHES``: the environment variables that name the folders of its compile caches;
* ``unsupported(workload, device) -> str | None``: why it cannot run a row;
* ``prepare(workload, x) -> Call``: converts the tensors that :func:`~flash_delta.testing.make_tensors` made
  into the library's own layouts, before the time starts;
* ``ready_made(workload) -> str | None``, if ``prepare`` does work that others do in each call: names this work.

The libraries are imported by ``prepare`` and not before, so a missing package is a result and not an error.
"""

import importlib
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING

from flash_delta import __version__  # a module in this folder is also called flash_delta
from flash_delta.testing import Workload

if TYPE_CHECKING:
    from workshop.bench.contestants.by_name import ByName, Records, Registered

OURS, PLAIN = "flash_delta", "plain"
BY_NAME = ("hopper", "triton")  # this library on one of its backends
REGISTERED = "registered"  # this library as the ops of fla's layer
RECORDS = "records"  # this library, with drafts that leave records
AGAIN = (PLAIN, RECORDS, *BY_NAME, REGISTERED)  # this library, called in other ways
NAMES = (OURS, "fla", "flash_qla", "flashinfer", "cudnn", "cudnn_bfloat16", "flash_kda", "cula", "transformers")
OF_KDA = ("cudnn_bfloat16", "flash_kda", "cula")  # they take part only in groups of KDA


def load(name: str) -> "ModuleType | ByName | Records | Registered":
    if name in BY_NAME:
        return importlib.import_module("workshop.bench.contestants.by_name").ByName(name)
    if name in (REGISTERED, RECORDS):
        module = importlib.import_module("workshop.bench.contestants.by_name")
        return module.Registered() if name == REGISTERED else module.Records()
    if name not in (*NAMES, PLAIN):
        raise ValueError(f"contestant: expected one of {', '.join(NAMES)}, got {name!r}")
    return importlib.import_module(f"workshop.bench.contestants.{name}")


def ready_made(name: str, workload: Workload) -> str | None:
    """What is converted for this contestant before its time starts. Other contestants convert it in every call."""
    module = load(name)
    return module.ready_made(workload) if hasattr(module, "ready_made") else None


def versions(names: str | None = None) -> dict[str, str]:
    """The installed contestants with their versions, or the comma-separated ``names``, which must be installed."""
    installed = {name: version for name in NAMES if (version := _version(name)) is not None}
    if names is None:
        return installed
    for name in names.split(","):
        load(name)
        if name not in installed:
            raise ValueError(f"contestants: expected installed ones ({', '.join(installed)}), got {name!r}")
    return {name: installed[name] for name in names.split(",")}


def taking_part(group: str, installed: dict[str, str]) -> dict[str, str]:
    """The contestants of a group.

    * "fla-...": a layer of fla, on this library's ops or on fla's.
    * "step": this library's layer, fla's on fla's ops, and fla's on this library's.
    * "layer", "step-transformers": a layer of transformers, on this library's ops, on fla's, or on transformers' own
      code.
    * "prompts", "steps", "kda-steps": rules with convolution and norm around them, by libraries that pack sequences or
      decode on a pool, and by plain calls of this library.
    * "comba", "delta-rule", "simple-gla": this library and fla.
    * "serving": this library, and plain calls of it.
    * "drafts", "kda-drafts": this library, with a state for each token and with records, fla and FlashInfer.
    * "family-...": this library, also on Triton, and fla.
    * "gdn-pools", "kda-pools": all, and this library on each of its backends by name.
    * Other groups: all, but those that have only Kimi Delta Attention only in its groups.
    """
    if group.startswith("fla-") or group in ("comba", "delta-rule", "simple-gla"):
        return {name: installed[name] for name in installed if name in (OURS, "fla")}
    if group.startswith("family-"):
        own = {name: installed[name] for name in installed if name in (OURS, "fla")}
        return own | ({"triton": __version__} if OURS in own else {})
    if group == "step":
        own = {name: installed[name] for name in installed if name in (OURS, "fla")}
        return own | ({REGISTERED: __version__} if "fla" in own else {})
    if group in ("layer", "step-transformers"):
        return {name: installed[name] for name in installed if name in (OURS, "fla", "transformers")}
    if group in ("prompts", "steps", "kda-steps"):
        rules = {name: installed[name] for name in installed if name in (OURS, "fla", "flashinfer")}
        return rules | {PLAIN: __version__}
    if group.endswith("drafts"):
        own = {name: installed[name] for name in installed if name in (OURS, "fla", "flashinfer")}
        return own | {RECORDS: __version__}
    if group == "serving":
        return dict.fromkeys((OURS, PLAIN), __version__)
    chosen = {name: installed[name] for name in installed if group.startswith("kda-") or name not in OF_KDA}
    return chosen | (dict.fromkeys(BY_NAME, __version__) if group.endswith("-pools") and OURS in chosen else {})


def _version(name: str) -> str | None:
    if name == OURS:  # a checkout has no metadata
        return __version__
    try:
        return metadata.version(load(name).PACKAGE)
    except metadata.PackageNotFoundError:
        return None
