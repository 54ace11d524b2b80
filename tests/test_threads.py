"""First calls from several threads at once."""

import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from flash_delta import backend

GPU = torch.cuda.is_available()
SCRIPT = Path(__file__).with_name("first_calls.py")
SLOW = "import time; time.sleep(0.2); forward = 1"
THREADS = 8


def together(call):
    """What ``call`` returns in threads that begin at the same time."""
    start = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(lambda number: (start.wait(), call(number))[1], range(THREADS)))


def test_a_backend_is_given_when_it_is_complete(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    backend.register("slow", "slow_to_import", "slow_to_import")

    def load(number):
        while number and "slow_to_import" not in sys.modules:  # the first thread imports it
            time.sleep(0.001)
        return (backend.load, backend.load_elementwise)[number % 2]("slow").forward

    try:
        assert together(load) == [1] * THREADS
    finally:
        backend.unregister("slow")
        del sys.modules["slow_to_import"]


@pytest.mark.parametrize("device", ["cuda" if GPU else "cpu"])
def test_the_first_calls_of_a_process(tmp_path, device):
    """Ops, layers, decoding, on a GPU with nothing compiled."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, SCRIPT, device], check=True, env=environment)


def compilations(place):
    """How often something is compiled while threads call first, of which every other one makes the same call."""
    import flash_delta
    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.kernels.runtime import launch, run

    def call(number):
        rows = [torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(3)]
        g, dtype = torch.zeros(1, 64, 2), (torch.bfloat16, torch.float32)[number % 2]
        return flash_delta.chunk_gated_delta_rule(*rows, g.to(dtype), g.to(dtype), backend="triton")

    compiled, compile_ = [], launch.compile_together

    def noting(wanted, beside):
        compiled.append(len(wanted))
        time.sleep(0.1)
        return compile_(wanted, beside)

    with (
        pretended_gpu(place),
        patch.object(run, "compiled", {}),
        patch.object(launch, "compile_together", noting),
    ):
        together(call)
    return compiled


@pytest.mark.skipif(GPU, reason="a driver is there, and cannot be pretended")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_threads_wait_for_the_one_that_compiles(process, place):
    assert len(process.submit(compilations, place).result()) == 2
