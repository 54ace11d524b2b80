"""The Hopper backward pass on a CPU: Triton's interpreter runs kernels in Triton, and those in Gluon are emulated."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper.plans.tiles import NARROW, SAVING, SLIM, WIDE, LoopTile
from flash_delta.kernels.hopper.scalar.backward import scan_gradients
from flash_delta.kernels.hopper.scalar.backward.memory import NO_TAPES
from flash_delta.kernels.hopper.scalar.backward.plan import Kept, ScanBack, plan_backward
from flash_delta.kernels.hopper.scalar.choices import unsupported_back
from flash_delta.kernels.hopper.scalar.forward import loop
from flash_delta.kernels.hopper.scalar.plan import Scan, plan_forward
from flash_delta.kernels.hopper.scalar.segments import factor, maps, scan
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.kernels.triton.backward.results import OutputGradients, gradients_of
from flash_delta.problem import Outputs
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, run, truth
from tests.gluon_emulator import emulate, launch, take_every_call
from tests.repeated import repeated
from tests.test_hopper_segments import PACKED, RAW, ROW, ROWS
from workshop.tune.stages_hopper import STAGES

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
GROUPED = replace(ROWS, H=2, HV=6, T=130, B=1)
CELLS = {  # member, case, and how it runs forward: in segments of so many tokens, or by the loop with a tile
    "packed": ("gdn", PACKED, NARROW),
    "packed-segments": ("gdn", PACKED, 64),
    "raw": ("gdn", replace(PACKED, options=RAW), 64),
    "raw-64": ("gdn", replace(PACKED, K=64, V=64, options=RAW), SLIM),
    "rows-64": ("delta-rule", replace(ROWS, K=64, V=64, options={"state_v_first": True}), 64),
    "two-chunks": ("gdn", replace(ROW, T=330), 128),
    "grouped": ("gdn", GROUPED, WIDE),
    "no-initial-state": ("gdn", replace(ROW, initial_state=False, T=129), 64),
    "v-first": ("gdn", replace(ROW, T=129, options={"state_v_first": True}), NARROW),
    "faded": ("gdn", replace(PACKED, T=850, lengths=(1, 400, 0, 449), decay="extreme"), 192),
    "rising": ("gdn", replace(ROW, T=129, decay="rising"), 64),
    "correlated-keys": ("gdn", replace(ROW, keys="correlated", beta="one"), WIDE),
    "negative-eigenvalues": ("gdn", replace(GROUPED, options=RAW | {"allow_neg_eigval": True}), NARROW),
    "left-by-forward": ("gdn", replace(PACKED, options=RAW | {"disable_recompute": True}), 64),
    "maps-left-by-forward": ("gdn", replace(PACKED, options=RAW), 64),
    "loop-wide": ("gdn", PACKED, WIDE),
    "loop-narrow": ("gdn", replace(PACKED, options=RAW), NARROW),
    "loop-64": ("gdn", replace(PACKED, K=64, V=64), SLIM),
    "loop-saving": ("gdn", replace(PACKED, options={"disable_recompute": True}), SAVING[128]),
    "loop-saving-64": ("gdn", replace(PACKED, K=64, V=64, options={"disable_recompute": True}), SAVING[64]),
}
KERNELS = (
    (loop, "forward_loop"),
    (factor, "factor_chunks"),
    (maps, "find_maps"),
    (scan, "scan_segments"),
    (scan_gradients, "scan_gradients"),
)


@pytest.fixture
def by_hand_in(monkeypatch):
    """Every call runs by hand, in segments of so many tokens, or with a tile by the loop and then back through whole
    sequences. Segments' maps are found again, unless they are left. Returns the plans of backward passes, with the
    memory that each has made."""

    def chosen(how, leave_maps=False, taped=NO_TAPES, processors=1):
        chip, plans, looped = Chip("interpreter", processors), [], isinstance(how, LoopTile)
        emulate(monkeypatch, *KERNELS)

        def forward(p, x):
            choice = Scan(None, how, taped=False) if looped else Scan(how, None, taped=False)
            (o, final, saved, maps), _ = launch(plan_forward(p, chip, layouts_of(x), choice=choice), x)
            return Outputs(o, final, (saved,), planned=(maps,) if leave_maps else ())

        def backward(p, x, saved, do, dfinal, known):
            groups = x, OutputGradients(do, dfinal), Kept(*(*saved, None)[:2])
            choice = ScanBack(None if looped else how, taped)
            plan = plan_backward(p, chip, *map(layouts_of, groups), choice=choice)
            made, memory = launch(plan, *groups)
            plans.append((plan, memory))
            return gradients_of(x, (*made, None))

        take_every_call(monkeypatch, forward, backward)
        return plans

    return chosen


@pytest.mark.parametrize("cell", CELLS)
def test_against_the_recurrence(by_hand_in, cell):
    name, case, how = CELLS[cell]
    member = MEMBERS[name]
    x = make_inputs(case, member, torch.bfloat16)
    wanted = truth(member, x)
    with products_in(torch.bfloat16):
        reference = run(member, x, backend="torch")
    left = cell.startswith("maps")
    plans = by_hand_in(how, leave_maps=left)
    results = run(member, x)
    ((plan, _),) = plans
    assert (maps.find_maps in [step.kernel for step in plan.steps]) == (isinstance(how, int) and not left)
    assert results.keys() == wanted.keys()
    for tensor, got in results.items():
        error, rounded = (relative_error(t, wanted[tensor]) for t in (got, reference[tensor]))
        assert error <= allowed(rounded, torch.bfloat16), tensor


@pytest.mark.parametrize(("width", "how"), [(128, WIDE), (64, 64), (128, NARROW)], ids=["wide", "segments", "narrow"])
def test_repeated_keys(by_hand_in, width, how):
    """A chunk with a beta above 1 keeps what A loses by rounding, forward and back."""
    member, x = MEMBERS["gdn"], repeated(1.999, K=width)
    wanted = truth(member, x)
    by_hand_in(how)
    got = run(member, x)
    assert all(relative_error(got[name], wanted[name]) < 0.12 for name in wanted if name != "dg")


def test_stage_of_the_tuner(monkeypatch):
    emulate(monkeypatch, *KERNELS)
    stage = STAGES["scan_gradients"]
    made = stage.make("cpu", B=1, T=100, H=1, HV=2)
    got, want = stage.launch(made, stage.tiles("sm_90a")[0]), stage.truth(made)
    assert all(relative_error(got[name], want[name]) < 1e-2 for name in ("q", "k", "v", "g", "beta"))


def test_b_of_zero_has_a_gradient(by_hand_in):
    """U is zero where b is zero, and dbeta is a quotient of products with U."""
    member = MEMBERS["gdn"]
    x = make_inputs(replace(ROW, T=100), member, torch.bfloat16)
    x["beta"] = x["beta"].detach().clone()
    x["beta"][:, ::2] = 0.0
    x["beta"].requires_grad_()
    wanted = truth(member, x)
    by_hand_in(WIDE)
    got = run(member, x)
    assert relative_error(got["dk"], wanted["dk"]) < 6e-3
    for rows in (slice(0, None, 2), slice(1, None, 2)):  # those with b = 0 and the others
        assert relative_error(got["dbeta"][:, rows], wanted["dbeta"][:, rows]) < 6e-3


def test_what_it_leaves_to_triton():
    def reason(dtype, K, V):
        return unsupported_back(SimpleNamespace(dtype=dtype, K=K, V=V))

    assert reason(torch.bfloat16, 128, 128) is None
    assert "exponents" in reason(torch.float16, 64, 64)
    assert reason(torch.bfloat16, 256, 256) == "K and V have to be 64 or 128, both; they are 256 and 256"
