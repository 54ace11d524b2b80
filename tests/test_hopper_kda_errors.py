"""How near Kimi Delta Attention on the Hopper backend is to float64, on a CPU as in test_hopper_kda.py.

The limits are between the errors that kernels have and those with the roundings that are said to be gone
(docs/notes/2026-11-26-kda-roundings.md)."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.runtime.arguments import state_unit
from flash_delta.testing import MEMBERS, relative_error
from flash_delta.testing.accuracy import recurrence, run, truth
from flash_delta.testing.workload import Workload, make_tensors, options
from tests.gluon_emulator import Value, emulated
from tests.repeated import repeated
from tests.test_hopper_kda import on_cpu  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
KDA = MEMBERS["kda"]


def row(kind, T, **changes):
    """Tensors and options of a benchmark's row with two heads."""
    w = Workload("", kind, "kda", 2, 2, 1, T, **changes)
    x = make_tensors(w, "cpu")
    wide = {n: t.double() for n, t in x.items() if t.is_floating_point()}
    return x | options(w), wide


@pytest.mark.parametrize(
    ("how", "gates", "most"),
    [
        ("loop", "dt_bias = 0", 2.55e-3),
        ("loop", "", 2.7e-3),
        ("scan_channels", "dt_bias = 0", 2.3e-3),
        ("scan_channels", "", 2.95e-3),
    ],
)
@torch.no_grad()
def test_final_states(on_cpu, how, gates, most):  # noqa: F811
    """What a token writes is rounded once before it is multiplied by the key."""
    x, wide = row("forward", 512, l2norm=True, raw=True, gates=gates)
    wanted = recurrence(KDA, wide, x)[1]
    on_cpu(how)
    assert relative_error(KDA.op(**x)[1], wanted) <= most


def test_gradients(on_cpu):  # noqa: F811
    """On the way back a gradient is rounded once for A, and that of o is not rounded for the scale."""
    x, wide = row("training", 512, states=False)
    limits = {"k": 4.2e-3, "v": 3.65e-3, "g": 3.8e-3, "beta": 3.8e-3}
    do = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    on_cpu("loop")
    found = []
    for leaves, op in ((wide, lambda: recurrence(KDA, wide, x)), (x, lambda: KDA.op(**x))):
        given = [leaves[name].requires_grad_() for name in limits]
        o, _ = op()
        found.append(torch.autograd.grad(o, given, do.to(o.dtype)))
    errors = [relative_error(got, want) for want, got in zip(*found, strict=True)]
    assert all(error <= most for error, most in zip(errors, limits.values(), strict=True)), errors


@pytest.mark.parametrize(
    ("scale", "dtype", "unit"),
    [
        (-0.3, torch.bfloat16, 0.3),
        (-0.3, torch.float16, 1.0),
        (0.0, torch.bfloat16, 1.0),
        (2.0**-40, torch.bfloat16, 1.0),
    ],
)
def test_unit_of_gradients_of_states(scale, dtype, unit):
    class problem:
        pass

    problem.scale, problem.dtype = scale, dtype
    assert state_unit(problem) == unit


@pytest.mark.parametrize(
    ("how", "beta", "decay", "limits"),
    [
        ("loop", 1.999, 0.0, {"o": 0.06, "final_state": 0.07}),
        ("half", 1.999, 0.0, {"o": 0.06, "final_state": 0.07}),
        (
            "scan_channels",
            1.999,
            0.0,
            {"o": 0.06, "final_state": 0.07, "dq": 0.07, "dk": 0.05, "dv": 0.06, "dg": 0.07, "dbeta": 0.15},
        ),
        ("scan_channels", 0.9, -1e-3, {"o": 0.032, "final_state": 0.043, "dv": 0.04, "dbeta": 0.08}),
    ],
)
def test_repeated_keys(on_cpu, how, beta, decay, limits):  # noqa: F811
    """A is float16 when it is stored. With A in bfloat16 the first three cases diverge: states grow that should
    shrink. In the last one most of what is left is the rounding of decayed keys."""
    x = repeated(beta, decay, "kda")
    on_cpu(how)
    got, want = run(KDA, x), truth(KDA, x)
    for name, limit in limits.items():
        assert relative_error(got[name], want[name]) <= limit, name


def test_units():
    """A row in its unit is within the range of float16, and no row gives an infinity or NaN."""
    made = emulated("flash_delta.kernels.hopper", "device.units")
    tops = torch.tensor([0.0, 1e-45, 2.0**-126, 1e-20, 1.0, 1.999, 65504.0, 3.4e38])
    x = tops[:, None] * torch.tensor([0.25, -1.0, 0.0, 1e-3])
    unit, inverse = (t.t for t in made.units(Value(x)))
    assert torch.equal(unit * inverse, torch.ones(8, 1))
    assert torch.equal(unit.log2(), unit.log2().round())
    counted = x * inverse
    assert torch.equal(counted * unit, x)
    assert counted.half().isfinite().all()
    assert (counted[3:].abs().amax(1) >= 2**14).all()
    assert made.to_half(Value(torch.tensor([1e9, -1e9, 0.5]))).t.tolist() == [65504.0, -65504.0, 0.5]
