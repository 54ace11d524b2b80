"""Makes packs of compiled kernels (kernels/runtime/pack.py) without a GPU.

Calls run on a pretended GPU, which notes what they would compile. Triton compiles it for the target then.
"""

import json
import os
import shutil
import subprocess
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime.driver import driver

from flash_delta.compiler.offline import Driver
from flash_delta.compiler.pretended_gpu import pretended_gpu
from flash_delta.kernels.runtime import cuda_driver, fastcall, pack, run
from flash_delta.kernels.runtime.fastcall.built import file_of
from flash_delta.kernels.runtime.launch import compile_all
from flash_delta.kernels.runtime.plan import Layout, Step
from flash_delta.ops import _known_calls

BESIDE = 16  # kernels in a file of a pack
# Multiprocessors of a usual GPU of each target. Another number changes plans, and no kernel (tested for sm_90a).
GPUS = {"sm_80": 108, "sm_89": 142, "sm_90a": 132, "sm_100": 148, "sm_120": 188}


class Here(TorchFunctionMode):
    """Tensors stay where they are, whatever device a function is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        args = tuple([a for a in args if not isinstance(a, torch.device)])
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "device"}
        if func is torch.Tensor.to and len(args) == 1 and not kwargs:
            return args[0]
        return func(*args, **kwargs)


@contextmanager
def recorded(target: str) -> Iterator[dict[str, Step]]:
    """A context of a pretended GPU that notes the steps which calls would compile, by their keys in packs."""
    found: dict[str, Step] = {}
    compile_them = run._compile

    def note(plans: Iterable[Any], *how: Any) -> bool:
        found.update({pack.key_of(step, run.name_of(step)): step for plan in plans for step in plan.steps})
        return compile_them(plans, *how)

    major, minor = divmod(int(target.removeprefix("sm_").removesuffix("a")), 10)
    gpu = SimpleNamespace(major=major, minor=minor, multi_processor_count=GPUS[target])
    with (
        TemporaryDirectory() as place,
        pretended_gpu(Path(place), gpu),
        patch.object(run, "compiled", {}),
        patch.object(run, "_compile", note),
        patch.object(pack, "packs", lambda target: ()),
        patch.object(_known_calls, "calls", _known_calls.Remembered()),
        torch.autograd.set_multithreading_enabled(False),
        Here(),
    ):
        yield found


def compile_for(target: str, steps: dict[str, Step]) -> dict[str, Any]:
    """Compiles steps without line information, which is most of a kernel's bytes and changes no instruction."""

    def pointer(t: Layout) -> run.Pointer:
        return run.Pointer(t, None)

    with knobs.compilation.scope(), patch.object(driver, "_active", Driver(target)):
        knobs.compilation.disable_line_info = True
        return compile_all({key: run._compilation(step, pointer) for key, step in steps.items()})


def write_pack(folder: Path, target: str, label: str, compiled: dict[str, Any]) -> Path:
    """Writes a pack of kernels that Triton has compiled.

    Code compresses to half the size beside code of the same function. To get a kernel, a process unpacks the file up to
    its end. So a file has up to `BESIDE` kernels of a function, those of similar size. The table, which every process
    reads, is compressed for fast reading.
    """
    path, files, places = folder / pack.file_name(target.removesuffix("a"), f"-{label}"), [], {}
    facts = {key: cuda_driver.facts_of(kernel) for key, kernel in compiled.items()}
    codes = sorted({(facts[key].name, len(kernel.kernel), kernel.kernel) for key, kernel in compiled.items()})
    for _, of_function in groupby(codes, key=lambda code: code[0]):
        group = list(of_function)
        for first in range(0, len(group), BESIDE):
            files.append(b"")
            for _, size, code in group[first : first + BESIDE]:
                places[code] = str(len(files)), len(files[-1]), size, pack.hash_of(code)
                files[-1] += code
    kernels = {key: pack.row_of(facts[key], places[kernel.kernel]) for key, kernel in compiled.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        said = json.dumps({"identity": pack.identity(), "kernels": kernels}, separators=(",", ":"))
        file.writestr("pack.json", said, zipfile.ZIP_DEFLATED, 9)
        for number, contents in enumerate(files, 1):
            file.writestr(str(number), contents)
    return path


def build_module(folder: Path) -> Path:
    """Builds the C module, for every Python on machines like this one."""
    source = fastcall.source_of_module()
    path = folder / file_of(fastcall.NAME, source)
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ValueError("CC: expected a C compiler, or gcc or clang in PATH, got neither")
    with TemporaryDirectory() as place:
        code = Path(place) / f"{fastcall.NAME}.c"
        code.write_text(source)
        options = ["-O3", "-shared", "-fPIC", "-Wno-psabi", f"-I{sysconfig.get_paths()['include']}"]
        subprocess.run([compiler, *options, code, "-o", path], check=True)
    return path


def make_pack(folder: Path, target: str, label: str, calls: Iterable[Callable[[], Any]]) -> tuple[Path, int]:
    """Makes a pack of all that ``calls`` can need, and the C module beside it. Returns its path and how many kernels it
    has."""
    folder.mkdir(parents=True, exist_ok=True)
    build_module(folder)
    with recorded(target) as steps:
        for call in calls:
            call()
    return write_pack(folder, target, label, compile_for(target, steps)), len(steps)
