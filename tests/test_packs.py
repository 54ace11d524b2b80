"""Packs of kernels: made without a GPU, taken instead of compiling, and refused if anything about them is not right."""

import json
import logging
import os
import re
import shutil
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is there, and cannot be pretended"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]
KERNELS = {"convolve", "normalize"}


def calls():
    """A few small kernels, for any sizes."""
    from flash_delta.modules import causal_conv1d, gated_rms_norm

    x = torch.zeros(2, 50, 64, dtype=torch.bfloat16)
    causal_conv1d(x, torch.zeros(64, 4), activation="silu")
    gated_rms_norm(x, x, torch.ones(64), 1e-6, "silu")


def pack_of_calls(folder):
    from flash_delta.compiler.packing import make_pack

    return make_pack(Path(folder), "sm_90a", "test", [calls])


@pytest.fixture(scope="module")
def made(process, tmp_path_factory):
    """The folder with a pack, and the pack."""
    folder = tmp_path_factory.mktemp("packs")
    path, count = process.submit(pack_of_calls, folder).result()
    assert count >= len(KERNELS)
    return folder, path


@contextmanager
def server(folder, place):
    """A process that starts, and what it says: the names of kernels that it compiles, and warnings."""
    from triton.runtime.jit import JITFunction

    from flash_delta.compiler import pretended_gpu
    from flash_delta.kernels.runtime import fastcall, pack, run
    from flash_delta.ops import _known_calls

    names, said = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())

    def warm_up(kernel, *values, **options):
        names.append(kernel.__name__)
        return pretended_gpu.compiled(kernel, *values, **options)

    pack.log.addHandler(handler)
    pack.packs.cache_clear()
    try:
        with (
            patch.dict(os.environ, FLASH_DELTA_KERNELS=str(folder)),
            pretended_gpu.pretended_gpu(Path(place)),
            patch.object(JITFunction, "warmup", warm_up),
            patch.multiple(fastcall, loaded=None, key=fastcall.look),
            patch.object(run, "compiled", {}),
            patch.object(_known_calls, "calls", _known_calls.Remembered()),
        ):
            yield names, said
    finally:
        pack.log.removeHandler(handler)
        pack.packs.cache_clear()


def served(folder, place):
    from flash_delta.kernels.runtime import fastcall, pack, run

    with server(folder, place) as (names, said):
        with patch("triton.runtime.build.compile_module_from_src", side_effect=AssertionError("there is no compiler")):
            calls()
            calls()
        kinds = {type(kernel).__name__ for kernel in run.compiled.values()}
        return names, said, kinds, fastcall.loaded.__file__, [len(p.kernels) for p in pack.packs("sm_90")]


def test_nothing_is_compiled_where_a_pack_is(process, place, made):
    names, said, kinds, module, (count,) = process.submit(served, made[0], place).result()
    assert (names, said, kinds) == ([], [], {"Kernel"})
    assert Path(module).parent == made[0]
    assert count >= len(KERNELS)


def test_the_module_loads_where_the_wheel_says(made):
    (module,) = made[0].glob("*.so")
    needed = {int(number) for number in re.findall(rb"\0GLIBC_2\.(\d+)", module.read_bytes())}
    assert needed
    assert max(needed) <= 17, "wheel/platform_tag.py promises glibc 2.17"


def changed(path, **contents):
    """Changes what a pack says."""
    with zipfile.ZipFile(path) as file:
        files = {name: file.read(name) for name in file.namelist()}
    said = json.loads(files["pack.json"])
    for name, value in contents.items():
        if name == "code":
            files = {name: value(code) if name != "pack.json" else code for name, code in files.items()}
        else:
            said["identity"][name] = value
    files["pack.json"] = json.dumps(said).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, data in files.items():
            file.writestr(name, data)


def refused_by_the_driver(path):
    """Other code under its own name."""
    from flash_delta.kernels.runtime.pack import hash_of

    with zipfile.ZipFile(path) as file:
        said = json.loads(file.read("pack.json"))
    code = b"?"
    for row in said["kernels"].values():
        row[-1] = "1", 0, len(code), hash_of(code)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("pack.json", json.dumps(said))
        file.writestr("1", code)


FAULTS = {
    "made with other sources": partial(changed, sources="0"),
    "made with other Triton": partial(changed, Triton="3.0.0"),
    "made with other format": partial(changed, format=0),
    "made with other settings": partial(changed, settings={"TRITON_F32_DEFAULT": "ieee"}),
    "is damaged (ValueError": partial(changed, code=lambda code: bytes(byte ^ 1 for byte in code)),
    "is damaged (BadZipFile": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "File is not a zip file": lambda path: path.write_bytes(b""),
    "CUDA could not load": refused_by_the_driver,
    "no pack of kernels sm_90": lambda path: path.rename(path.with_name("sm_80-triton-3.0.0.zip")),
}


@pytest.mark.parametrize("why", FAULTS)
def test_triton_compiles_what_a_pack_does_not_give(process, place, made, tmp_path, why):
    """With one warning, and without an error."""
    FAULTS[why](Path(shutil.copy(made[1], tmp_path)))
    names, said, kinds = process.submit(compiled_by_triton, tmp_path, place).result()
    assert set(names) >= KERNELS
    assert len(said) == 1
    assert why in said[0]
    assert "Kernel" not in kinds


def compiled_by_triton(folder, place):
    from flash_delta.kernels.runtime import run

    with server(folder, place) as (names, said):
        calls()
        return names, said, {type(kernel).__name__ for kernel in run.compiled.values()}


def without_a_compiler(folder, place):
    """``folder`` has nothing."""
    from flash_delta.kernels.runtime import fastcall, launch, run

    started = []
    with (
        server(folder, place) as (names, said),
        patch.object(fastcall, "API", fastcall.API),
        patch("triton.runtime.build.compile_module_from_src", side_effect=RuntimeError("no C compiler")),
        patch.object(run, "launch_by_triton", lambda step, values: started.append(step.kernel.__name__)),
    ):
        calls()
        return names, said, started, launch.is_direct(torch.device("cuda", 0))


def test_triton_launches_if_c_cannot_be_compiled(process, place):
    names, (said,), started, direct = process.submit(without_a_compiler, "", place).result()
    assert set(started) == KERNELS <= set(names)
    assert "no C compiler" in said
    assert not direct


def keys_of(model, tokens=None, processors=132, rooms=None):
    """The keys of a model's kernels."""
    from flash_delta.compiler import packing
    from flash_delta.packs import engines, models

    with (
        patch.object(models, "TOKENS", tokens or models.TOKENS),
        patch.object(engines, "ROOMS", rooms or engines.ROOMS),
        patch.dict(packing.GPUS, sm_90a=processors),
        packing.recorded("sm_90a") as steps,
    ):
        for call in models.calls_of_model(model, models.MODELS[model].parts[-1:]):
            call()
    return set(steps)


MODELS = (
    "Qwen3-Next", "Qwen3.5", "Kimi-Linear", "OLMo-hybrid", "fla-GatedDeltaNet", "fla-KimiDeltaAttention",
    "fla-DeltaNet",
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_no_call_of_a_model_misses(process, model):
    """A pack has the kernels of other lengths, of chips with other numbers of multiprocessors, and of other numbers of
    records."""
    pack = process.submit(keys_of, model).result()
    for tokens, processors, rooms in ((33, 114, (1, 5)), (64, 132, (2, 6)), (1000, 78, (4, 16))):
        found = process.submit(keys_of, model, tokens, processors, rooms).result()
        assert found <= pack, f"{len(found - pack)} of {len(found)} are missing"


def test_every_process_finds_the_same_keys(process):
    """Where objects are, and the seed of hashes, change none."""
    from flash_delta.compiler.pool import clean_processes

    with clean_processes(1) as (pool, _):
        other = pool.submit(keys_of, "fla-DeltaNet").result()
    assert process.submit(keys_of, "fla-DeltaNet").result() == other
