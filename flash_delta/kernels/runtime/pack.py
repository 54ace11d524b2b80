"""Kernels that are compiled already. A pack is a zip file of kernels for one chip and one version of Triton, and it is
made without a GPU (compiler/packing.py).

A kernel is found by everything that its compiled code depends on (`run.name_of`). A pack is used only if it was made
from these very sources of the package, and under the same settings of Triton. Otherwise, and for a kernel that is not
in it, Triton compiles.
"""

import hashlib
import json
import logging
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars

from flash_delta.kernels.runtime.cuda_driver import Kernel, load_code
from flash_delta.kernels.runtime.fastcall.built import folders
from flash_delta.kernels.runtime.plan import Descriptor, Step
from flash_delta.problem import PACKAGE

FORMAT = 2
HARMLESS = {"TRITON_DISABLE_LINE_INFO"}  # a setting that changes no instruction
log = logging.getLogger(PACKAGE)


class Pack:
    """A file, its kernels by their keys, and why it is not used."""

    def __init__(self, path: Path):
        self.path, self.kernels, self.unused = path, {}, None
        try:
            self.file = zipfile.ZipFile(path)
            contents = json.loads(self.file.read("pack.json"))
            found, wanted = contents["identity"], identity()
            unlike = [name for name in wanted if found.get(name) != wanted[name]]
            if unlike:
                self.refuse(f"it was made with other {' and '.join(unlike)}")
            else:
                self.kernels = contents["kernels"]
        except Exception as error:  # whatever a damaged file causes
            self.refuse(f"it is damaged ({type(error).__name__}: {error})")

    def refuse(self, why: str) -> None:
        """Lets Triton compile everything from now on."""
        self.kernels, self.unused = {}, why
        log.warning("%s is not used, so kernels are compiled: %s", self.path, why)

    def _read(self, file: str, size: int) -> bytes:
        """The first bytes of a file in the pack. Only these are unpacked, since small pieces are asked for."""
        with self.file.open(file) as unpacked:
            return b"".join(unpacked.read(min(4096, size - start)) for start in range(0, size, 4096))

    def load(self, key: str) -> Kernel | None:
        """A kernel, loaded on the current device; None if its code is damaged or the driver refuses it."""
        *facts, letters, tiles, (file, start, size, digest) = self.kernels[key]
        try:
            code = self._read(file, start + size)[start:]
            if hash_of(code) != digest:
                raise ValueError("its code is another")
        except Exception as error:  # whatever a damaged file causes
            self.refuse(f"{facts[0]} is damaged ({type(error).__name__}: {error})")
            return None
        kernel = Kernel(*facts, letters.encode(), bytes.fromhex(tiles))
        try:
            return kernel._replace(function=load_code(kernel, code))
        except RuntimeError as error:
            self.refuse(str(error))
            return None


def hash_of(code: bytes) -> str:
    """What tells one code from another, and from a damaged one."""
    return hashlib.sha256(code).hexdigest()[:32]


def row_of(kernel: Kernel, place: tuple[str, int, int, str]) -> list[Any]:
    """What a pack says about a kernel. ``place``: a file in it, where the code begins there, its size and hash."""
    *facts, letters, tiles = kernel
    return [*facts, letters.decode(), tiles.hex(), place]


@cache
def identity() -> dict[str, Any]:
    """What packs must have been made with."""
    return {"format": FORMAT, "sources": _hash_of_sources(), "Triton": triton.__version__, "settings": settings()}


def settings() -> dict[str, str]:
    """The settings of Triton that change code."""
    found = {name: value for name, value in get_cache_invalidating_env_vars().items() if name not in HARMLESS}
    return found | ({"debug": "1"} if knobs.runtime.debug else {})


def _hash_of_sources() -> str:
    root, found = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def file_name(target: str, more: str = "") -> str:
    """The name of a pack's file. ``target``: as of `chip_of`. ``more``: what distinguishes it from other packs."""
    return f"{target}-triton-{triton.__version__}{more}.zip"


@cache
def packs(target: str) -> tuple[Pack, ...]:
    """The packs for a chip and the installed Triton. If there are only others, a warning says so."""
    wanted, places = file_name(target, "*"), folders()
    found = tuple([Pack(path) for folder in places for path in sorted(folder.glob(wanted))])
    if places and not found:
        log.warning("no pack of kernels %s is in %s, so kernels are compiled", wanted, ", ".join(map(str, places)))
    return found


def has(target: str, step: Step, name: tuple) -> bool:
    """Whether a pack has the step's kernel, with this ``name`` (`run.name_of`)."""
    usable = packs(target)
    return bool(usable) and any(key_of(step, name) in pack.kernels for pack in usable)


def load(target: str, step: Step, name: tuple) -> Kernel | None:
    """The step's kernel from a pack, loaded on the current device. None if no pack has it."""
    for pack in packs(target):
        key = key_of(step, name)
        kernel = pack.load(key) if key in pack.kernels else None
        if kernel is not None:
            return kernel
    return None


def key_of(step: Step, name: tuple) -> str:
    """The key of a step's kernel, the same in every process."""
    layouts = dict(_layouts(step.arguments))
    facts = [layouts.get(fact, fact) if type(fact) is int else fact for fact in name[1:]]
    function = step.kernel.fn
    text = f"{function.__module__.removeprefix(PACKAGE)}.{function.__qualname__}{facts}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _layouts(values: tuple[Any, ...]) -> Iterator[tuple[int, str]]:
    """The layouts in shared memory of descriptors, by identity."""
    for value in values:
        if type(value) is Descriptor:
            yield id(value.layout), repr(value.layout)
