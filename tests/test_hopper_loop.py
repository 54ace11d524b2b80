"""The Hopper backend's loop on a CPU, its roles and indices: `rates` by Triton's interpreter, the rest emulated."""

import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper import launch
from flash_delta.kernels.hopper.tiles import NARROW, WIDE
from flash_delta.kernels.triton.launcher import make_call
from flash_delta.kernels.triton.tiles import Chip
from flash_delta.ops import _backend, _execute
from flash_delta.problem import Outputs
from flash_delta.testing import CASES, MEMBERS, Case, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence
from tests.gluon_emulator import emulated
from tests.gluon_emulator import launch as emulate

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
BY_NAME = {case.name: case for case in CASES}
SMALL = {"K": 128, "V": 128, "H": 1, "HV": 2}
NAMES = ("ragged", "packed", "all-empty", "no-initial-state", "correlated-keys", "in-kernel", "in-kernel-packed")


@pytest.fixture
def on_cpu(monkeypatch):
    """The backend with its loop emulated, as the choice of every call."""
    kernel = emulated("flash_delta.kernels.hopper", "loop").forward_loop

    class Loop:
        def __getitem__(self, grid):
            options = ("num_warps", "enable_fp_fusion", "launch_pdl")
            return lambda *a, **c: emulate(kernel, grid, *a, **{n: v for n, v in c.items() if n not in options})

    monkeypatch.setattr(launch, "forward_loop", Loop())

    def chosen(tile, processors):
        def forward(p, x):
            o, final, rates = torch.empty_like(x.v), torch.empty(p.state_shape), launch.new_rates(p)
            c = make_call(p, x, ("test",))
            c = c._replace(shape=c.shape._replace(chip=Chip("interpreter", processors)))
            launch.run_rates(c, o, rates)
            launch.run_loop(c, o, final, rates, tile)
            return Outputs(o, final)

        module = SimpleNamespace(forward=forward, unsupported=lambda p: None)
        for place in (_backend, _execute):
            monkeypatch.setattr(place, "load_backend", lambda name: module)
        monkeypatch.setattr(_backend, "refusal", lambda name, p, load=None: None)

    return chosen


@pytest.mark.parametrize("tile", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_against_the_recurrence(on_cpu, monkeypatch, name, tile):
    """Three programs, so that some walk several states and some none."""
    member, dtype = MEMBERS["gdn"], torch.bfloat16
    case = Case(**(vars(BY_NAME[name]) | SMALL))
    x = make_inputs(case, member, dtype)
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    wanted = recurrence(member, wide, x)
    with products_in(dtype):
        reference = member.op(**x, backend="torch")
    on_cpu(tile, 3)
    for got, want, rounded in zip(member.op(**x), wanted, reference, strict=True):
        assert relative_error(got, want) <= allowed(relative_error(rounded, want), dtype)
