"""Kernels touch no memory but their own, as compute-sanitizer sees it: serving with good indices and with hostile ones,
and what layers call."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
if not torch.cuda.is_available() or SANITIZER is None:
    pytest.skip("there is no GPU, or no compute-sanitizer", allow_module_level=True)

TESTS = Path(__file__).parent
ROLES_ARE_READ = 0x300  # before this address of a kernel, and nothing else of shared memory


def sanitized(tool, calls):
    """How `sanitized_calls.py` ends under the tool, and what is said. A call that CUDA refuses, as on probing for what
    a driver has, is no error here."""
    options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "1000"]
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    out = subprocess.run(
        [SANITIZER, *options, sys.executable, TESTS / "sanitized_calls.py", calls],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if "Device not supported" in out.stdout:
        pytest.skip("compute-sanitizer cannot look into this GPU")
    return out.returncode, out.stdout


@pytest.mark.parametrize("calls", ["decode", "prefill", "layers", "bounds"])
def test_no_foreign_memory_is_touched(calls):
    status, said = sanitized("memcheck", calls)
    assert f"{calls}: all calls returned" in said, said
    assert "SUMMARY: 0 " in said, said
    assert status == 0, said


@pytest.mark.parametrize("calls", ["decode", "prefill", "layers", "bounds"])
def test_nothing_races(calls):
    """In kernels with roles Triton's first warps write which role is whose, and the others read it between two barriers
    of all warps. The tool sees a race there, since warps reach these barriers in different instructions."""
    _, said = sanitized("racecheck", calls)
    assert f"{calls}: all calls returned" in said, said
    hazards = re.findall(r"Race reported between \w+ access at \w+\+0x(\w+)", said)
    assert f"SUMMARY: {len(hazards)} " in said, said
    assert all(int(place, 16) < ROLES_ARE_READ for place in hazards), said


def test_a_store_behind_a_tensor_is_found():
    status, said = sanitized("memcheck", "out-of-bounds")
    assert "Invalid __global__ write" in said, said
    assert "SUMMARY: 0 " not in said, said
    assert status != 0
