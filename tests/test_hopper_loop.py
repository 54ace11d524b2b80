"""The Hopper backend's loop on a CPU, its roles and indices: `rates` by Triton's interpreter, the rest emulated."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper.plans.tiles import NARROW, SLIM, WIDE
from flash_delta.kernels.hopper.scalar.forward import loop
from flash_delta.kernels.hopper.scalar.plan import Scan, plan_forward
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.problem import Outputs
from flash_delta.testing import CASES, MEMBERS, Case, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence, truth
from tests.gluon_emulator import emulate, launch, take_every_call
from tests.hostile_bounds import T, hostile, leave_unread
from tests.repeated import repeated

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
BY_NAME = {case.name: case for case in CASES}
SMALL = {"H": 1, "HV": 2}
FORMS = [(128, WIDE), (128, NARROW), (64, SLIM)]
NAMES = (
    "ragged",
    "packed",
    "all-empty",
    "no-initial-state",
    "correlated-keys",
    "in-kernel",
    "in-kernel-packed",
    "rising",
)


def small(name: str, width: int) -> Case:
    return Case(**(vars(BY_NAME[name]) | SMALL | {"K": width, "V": width}))


@pytest.fixture
def on_cpu(monkeypatch):
    """The backend with its loop emulated, as the choice of every call. Returns the memory of each call's plan."""
    emulate(monkeypatch, (loop, "forward_loop"))

    def chosen(tile, processors, taped=False):
        made = []

        def forward(p, x):
            choice = Scan(None, tile, taped)
            plan = plan_forward(p, Chip("interpreter", processors), layouts_of(x), choice=choice)
            (o, final, *_), memory = launch(plan, x)
            made.append(memory)
            return Outputs(o, final)

        take_every_call(monkeypatch, forward)
        return made

    return chosen


@pytest.mark.parametrize(("width", "tile"), FORMS, ids=["wide", "narrow", "slim"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_against_the_recurrence(on_cpu, name, width, tile):
    """Three programs, so that some scan several states and some none."""
    member, dtype = MEMBERS["gdn"], torch.bfloat16
    x = make_inputs(small(name, width), member, dtype)
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    wanted = recurrence(member, wide, x)
    with products_in(dtype):
        reference = member.op(**x, backend="torch")
    on_cpu(tile, 3)
    for got, want, rounded in zip(member.op(**x), wanted, reference, strict=True):
        assert relative_error(got, want) <= allowed(relative_error(rounded, want), dtype)


@pytest.mark.parametrize("name", ["gdn", "delta-rule"])
@torch.no_grad()
def test_behind_the_last_sequence_are_zeros(on_cpu, name):
    """The role that makes the rates writes them, in every other program's tokens, too."""
    member = MEMBERS[name]
    x = make_inputs(small("packed", 64), member, torch.bfloat16)
    x["cu_seqlens"] = torch.tensor([0, 70, 70, 131])
    x["initial_state"] = x["initial_state"][:3]
    on_cpu(SLIM, 3)
    o, state = member.op(**x)
    with products_in(torch.bfloat16):
        want, last = member.op(**x, backend="torch")
    assert not o[:, 131:].any()
    assert relative_error(o, want) < 0.01
    assert relative_error(state, last) < 0.01


@pytest.mark.parametrize("name", ["first-above-0", "down-and-up", "all"])
@torch.no_grad()
def test_wrong_bounds_leave_no_tensor(on_cpu, monkeypatch, name):
    """An address that is beyond a tensor is an error of the emulator or of the bounds' watch."""
    leave_unread(monkeypatch)
    bounds = hostile(name, "cpu")
    case = replace(small("packed", 64), T=T, HV=1, lengths=(T, *(0 for _ in bounds[2:])))
    x = make_inputs(case, MEMBERS["gdn"], torch.bfloat16)
    on_cpu(SLIM, 3)
    MEMBERS["gdn"].op(**(x | {"cu_seqlens": bounds}))


@pytest.mark.parametrize(("width", "tile"), FORMS, ids=["wide", "narrow", "slim"])
@torch.no_grad()
def test_repeated_keys(on_cpu, width, tile):
    """A chunk with a beta above 1 keeps what A loses by rounding. Without it o is off by more than 0.8."""
    member, x = MEMBERS["gdn"], repeated(1.999, K=width)
    on_cpu(tile, 3)
    (o, _), want = member.op(**x), truth(member, x)
    assert relative_error(o, want["o"]) < 0.07
