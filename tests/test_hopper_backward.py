"""The Hopper backward pass on a CPU: Triton's interpreter runs kernels in Triton, and those in Gluon are emulated."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper import backend
from flash_delta.kernels.hopper.plans.tiles import NARROW, SAVING, SLIM, WIDE, LoopTile
from flash_delta.kernels.hopper.scalar.backward import run as scalar_backward
from flash_delta.kernels.hopper.scalar.backward import scan_gradients
from flash_delta.kernels.hopper.scalar.forward import loop
from flash_delta.kernels.hopper.scalar.forward.rates import new_rates, run_rates
from flash_delta.kernels.hopper.scalar.segments import factor, maps, scan
from flash_delta.kernels.hopper.scalar.segments.memory import new_maps, new_segmented_scan
from flash_delta.kernels.hopper.scalar.segments.run import run_segmented_scan
from flash_delta.kernels.runtime.calls import make_call
from flash_delta.kernels.triton.backward.results import gradients_of
from flash_delta.ops import _backend, _function
from flash_delta.problem import Outputs
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, run, truth
from tests.gluon_emulator import Kernel, emulated
from tests.repeated import repeated
from tests.test_hopper_segments import PACKED, RAW, ROW, ROWS
from workshop.tune.stages_hopper import STAGES

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
GROUPED = replace(ROWS, H=2, HV=6, T=130, B=1)
CELLS = {  # member, case, and how it runs forward: in segments of so many tokens, or by the loop with a tile
    "packed": ("gdn", PACKED, None),
    "packed-segments": ("gdn", PACKED, 64),
    "raw": ("gdn", replace(PACKED, options=RAW), 64),
    "raw-64": ("gdn", replace(PACKED, K=64, V=64, options=RAW), None),
    "rows-64": ("delta-rule", replace(ROWS, K=64, V=64, options={"state_v_first": True}), 64),
    "two-chunks": ("gdn", replace(ROW, T=330), 128),
    "grouped": ("gdn", GROUPED, None),
    "no-initial-state": ("gdn", replace(ROW, initial_state=False, T=129), 64),
    "v-first": ("gdn", replace(ROW, T=129, options={"state_v_first": True}), None),
    "faded": ("gdn", replace(PACKED, T=850, lengths=(1, 400, 0, 449), decay="extreme"), 192),
    "rising": ("gdn", replace(ROW, T=129, decay="rising"), 64),
    "correlated-keys": ("gdn", replace(ROW, keys="correlated", beta="one"), None),
    "negative-eigenvalues": ("gdn", replace(GROUPED, options=RAW | {"allow_neg_eigval": True}), None),
    "left-by-forward": ("gdn", replace(PACKED, options=RAW | {"disable_recompute": True}), 64),
    "maps-left-by-forward": ("gdn", replace(PACKED, options=RAW), 64),
    "loop-wide": ("gdn", PACKED, WIDE),
    "loop-narrow": ("gdn", replace(PACKED, options=RAW), NARROW),
    "loop-64": ("gdn", replace(PACKED, K=64, V=64), SLIM),
    "loop-saving": ("gdn", replace(PACKED, options={"disable_recompute": True}), SAVING[128]),
    "loop-saving-64": ("gdn", replace(PACKED, K=64, V=64, options={"disable_recompute": True}), SAVING[64]),
}
KERNELS = (
    (loop, "scalar.forward.loop", "forward_loop"),
    (factor, "scalar.segments.factor", "factor_chunks"),
    (maps, "scalar.segments.maps", "find_maps"),
    (scan, "scalar.segments.scan", "scan_segments"),
    (scan_gradients, "scalar.backward.scan_gradients", "scan_gradients"),
)


@pytest.fixture
def by_hand_in(monkeypatch):
    """Every call runs by hand, in segments of so many tokens. With a tile the loop runs forward, and nothing is split.
    Segments' maps are found again, unless they are left."""

    def chosen(how, leave_maps=False):
        length = None if isinstance(how, LoopTile) else how
        for module, path, kernel in KERNELS:
            made = getattr(emulated("flash_delta.kernels.hopper", path), kernel)
            monkeypatch.setattr(module, kernel, Kernel(made))

        monkeypatch.setattr(scalar_backward, "new_tapes", lambda p, chip: scalar_backward.NO_TAPES)
        if leave_maps:
            monkeypatch.setattr(scalar_backward, "run_find_maps", lambda *given: pytest.fail("the maps are there"))

        def forward(p, x, known):
            out = forward_by_hand(p, x, how)
            return out if leave_maps else out._replace(planned=())

        def backward(p, x, saved, do, dfinal, known):
            return gradients_of(x, scalar_backward.run_backward(p, x, saved, do.contiguous(), dfinal, None, length, ()))

        taken = SimpleNamespace(
            forward=forward, backward=backward, unsupported=lambda p: None, preference=lambda p: (0, None)
        )
        monkeypatch.setattr(_function, "load_backend", lambda name: taken)
        monkeypatch.setattr(_backend, "_find", lambda name, on_cpu, load: taken)

    return chosen


def forward_by_hand(p, x, how):
    o, final, rates = torch.empty_like(x.v), torch.empty(p.state_shape), new_rates(p)
    length = None if isinstance(how, LoopTile) else how
    saved, left = scalar_backward.for_backward(p), None if length is None else new_maps(p, length)
    tensors, *kept = saved.views()
    c = make_call(p, x, ("test",))
    run_rates(c, o, rates, tensors)
    if isinstance(how, LoopTile):
        loop.run_loop(c, o, final, rates, tensors.A, how, trace=kept[0] if kept else None)
    else:
        run_segmented_scan(c, o, final, rates, new_segmented_scan(p, length, tensors.A, left), *kept)
    return Outputs(o, final, (saved.buffer,), planned=() if left is None else (left,))


@pytest.mark.parametrize("cell", CELLS)
def test_against_the_recurrence(by_hand_in, cell):
    name, case, how = CELLS[cell]
    member = MEMBERS[name]
    x = make_inputs(case, member, torch.bfloat16)
    wanted = truth(member, x)
    with products_in(torch.bfloat16):
        reference = run(member, x, backend="torch")
    by_hand_in(how, leave_maps=cell.startswith("maps"))
    results = run(member, x)
    assert results.keys() == wanted.keys()
    for tensor, got in results.items():
        error, rounded = (relative_error(t, wanted[tensor]) for t in (got, reference[tensor]))
        assert error <= allowed(rounded, torch.bfloat16), tensor


@pytest.mark.parametrize(("width", "how"), [(128, None), (64, 64), (128, NARROW)], ids=["whole", "segments", "loop"])
def test_repeated_keys(by_hand_in, width, how):
    """A chunk with a beta above 1 keeps what A loses by rounding, forward and back."""
    member, x = MEMBERS["gdn"], repeated(1.999, K=width)
    wanted = truth(member, x)
    by_hand_in(how)
    got = run(member, x)
    assert all(relative_error(got[name], wanted[name]) < 0.12 for name in wanted if name != "dg")


def test_stage_of_the_tuner(by_hand_in, monkeypatch):
    monkeypatch.setattr(backend, "forward", lambda p, x: forward_by_hand(p, x, None))
    by_hand_in(None)
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
    by_hand_in(None)
    got = run(member, x)
    assert relative_error(got["dk"], wanted["dk"]) < 6e-3
    for rows in (slice(0, None, 2), slice(1, None, 2)):  # those with b = 0 and the others
        assert relative_error(got["dbeta"][:, rows], wanted["dbeta"][:, rows]) < 6e-3


def test_what_it_leaves_to_triton():
    def reason(dtype, K, V):
        return scalar_backward.unsupported(SimpleNamespace(dtype=dtype, K=K, V=V))

    assert reason(torch.bfloat16, 128, 128) is None
    assert "exponents" in reason(torch.float16, 64, 64)
    assert reason(torch.bfloat16, 256, 256) == "K and V have to be 64 or 128, both; they are 256 and 256"
