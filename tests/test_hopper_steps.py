"""Gated DeltaProduct on the Hopper backend on a CPU: chunks of updates that read q and g once per token."""

import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta import chunk_gated_delta_product, chunk_gated_delta_rule, naive_gdn_gate
from flash_delta.kernels.hopper import backend
from flash_delta.kernels.hopper.plans.tiles import NARROW, SAVING, SLIM, WIDE
from flash_delta.kernels.hopper.scalar import plan
from flash_delta.kernels.hopper.scalar.segments import factor, scan
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.ops._function import run
from flash_delta.problem import Inputs, Outputs
from flash_delta.testing import allowed, relative_error
from flash_delta.testing.accuracy import products_in
from tests.gluon_emulator import emulate, launch, take_every_call
from tests.test_gated_delta_product import draw, equation, unit
from tests.test_gdn2 import with_gradients
from tests.test_hopper_backward import by_hand_in  # noqa: F401
from tests.test_hopper_pool import cut_prompts_at, launched  # noqa: F401

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
BY_TWO, BY_FOUR = (0, 1, 100, 0, 32, 33, 0, 17), (0, 1, 50, 0, 16, 17, 0)  # tokens
# n, sizes of `draw`, options, and how it runs: in segments of so many rows, or by the loop with a tile.
CELLS = {
    "one": (1, {"T": 130}, {}, WIDE),
    "loop": (2, {"T": 70}, {}, WIDE),
    "loop-narrow": (2, {"T": 70, "HV": 2}, {}, NARROW),
    "loop-64": (4, {"T": 37, "K": 64, "V": 64}, {}, SLIM),
    "no-gate": (2, {"T": 65, "decay": None}, {}, WIDE),
    "norms": (2, {"T": 70, "lengths": BY_TWO}, {"l2norm": True}, NARROW),
    "packed": (2, {"lengths": BY_TWO}, {}, WIDE),
    "packed-four": (4, {"lengths": BY_FOUR, "K": 64, "V": 64}, {"l2norm": True}, SLIM),
    "segments": (2, {"lengths": BY_TWO}, {"l2norm": True}, 64),
    "segments-64": (4, {"T": 70, "K": 64, "V": 64, "B": 2}, {}, 128),
    "strong-decay": (2, {"lengths": BY_TWO, "decay": 30.0}, {}, WIDE),
    "faded": (2, {"lengths": (1, 200, 0, 230), "decay": 300.0}, {}, 192),
    "saving": (2, {"lengths": BY_TWO}, {"disable_recompute": True}, SAVING[128]),
    "left-by-forward": (2, {"T": 100}, {"disable_recompute": True, "l2norm": True}, 64),
    "v-first": (2, {"T": 33}, {"state_v_first": True}, NARROW),
    "logits": (2, {"T": 33}, {"raw_beta": True}, NARROW),
    "raw": (2, {"lengths": BY_TWO}, {"raw": True, "l2norm": True, "raw_beta": True}, 64),
    "sixty-four": (64, {"T": 3, "K": 64, "V": 64}, {}, SLIM),
    "three": (3, {"T": 43}, {}, NARROW),
}
SMALL = {"B": 1, "H": 1, "HV": 2, "K": 128, "V": 128, "dtype": torch.bfloat16}


def inputs_of(cell):
    """Inputs by name, and the bounds of packed sequences."""
    n, sizes, options, _ = cell
    x = draw(n, **(SMALL | sizes))
    if options.get("raw"):
        x |= {"g": 3 * x["g"], "A_log": torch.rand(x["g"].shape[2]), "dt_bias": torch.randn(x["g"].shape[2])}
    return x, torch.tensor([0, *sizes["lengths"]]).cumsum(0) if "lengths" in sizes else None


def call(n, options, bounds, backend=None, g=None, **x):
    """The op, with states [N, HV, K, V] whatever it takes. It has no raw gate, which backends take."""
    v_first, state = options.get("state_v_first", False), x.pop("initial_state")
    rows = None if bounds is None else n * bounds
    inputs = Inputs(**x, g=g, initial_state=state.mT if v_first else state, cu_seqlens=rows)
    gate = ("none" if g is None else "scalar", options.get("raw", False), None)
    given = {"op": "updates", "gate": gate, "erase": "decayed", "steps": n}
    given |= {name: value for name, value in options.items() if name != "raw"}
    o, S = run(inputs, given, None, output_final_state=True, backend=backend)
    return o, S.mT if v_first else S


def truth(n, options, bounds, q, k, beta, g=None, A_log=None, dt_bias=None, **x):
    q, k = (unit(q), unit(k)) if options.get("l2norm") else (q, k)
    beta = beta.sigmoid() if options.get("raw_beta") else beta
    g = naive_gdn_gate(g, A_log, dt_bias) if options.get("raw") else g
    return equation(n, q, k, beta=beta, g=g, bounds=None if bounds is None else bounds.tolist(), **x)


def expected(cell, dtype):
    """Outputs and all gradients of the equation in float64, and how far each may be off: as rounded products are."""
    (n, _, options, _), (x, bounds) = cell, inputs_of(cell)
    wanted = with_gradients(partial(truth, n, options, bounds), {name: t.double() for name, t in x.items()})
    given = {name: value for name, value in options.items() if name != "raw"}

    def rounded(A_log=None, dt_bias=None, g=None, **x):
        g = naive_gdn_gate(g, A_log, dt_bias) if "raw" in options else g
        return call(n, given, bounds, "torch", g, **x)

    with products_in(dtype):
        reference = with_gradients(rounded, x)
    return {name: (t, allowed(relative_error(reference[name], t), dtype)) for name, t in wanted.items()}


def check(got, wanted):
    assert got.keys() == wanted.keys()
    for name, (want, most) in wanted.items():
        assert got[name].shape == want.shape
        error = relative_error(got[name], want)
        assert error <= most, (name, error, most)


@pytest.mark.parametrize("cell", CELLS)
def test_against_the_equation(by_hand_in, cell):  # noqa: F811
    n, _, options, how = CELLS[cell]
    (x, bounds), wanted = inputs_of(CELLS[cell]), expected(CELLS[cell], torch.bfloat16)
    plans = by_hand_in(how)
    check(with_gradients(partial(call, n, options, bounds), x), wanted)
    ((plan, _),) = plans
    steps = {step.constants["STEPS"] for step in plan.steps if "STEPS" in step.constants}
    assert steps == {n if 64 % n == 0 else 1}


@pytest.mark.parametrize("how", [WIDE, 64], ids=["loop", "segments"])
def test_one_update_is_the_gated_delta_rule_bit_by_bit(by_hand_in, how):  # noqa: F811
    x, options = draw(1, **SMALL, T=130), {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    by_hand_in(how)
    got = with_gradients(partial(chunk_gated_delta_product, num_householder=1, **options), x)
    for name, t in with_gradients(partial(chunk_gated_delta_rule, **options), x).items():
        assert torch.equal(got[name], t), name


@torch.no_grad()
def test_wide_heads(monkeypatch):
    """Their forward pass is the scan without segments."""
    x = draw(2, **(SMALL | {"T": 70, "K": 256, "V": 256}))
    want = equation(2, **{name: t.double() for name, t in x.items()})
    emulate(monkeypatch, (factor, "factor_chunks"), (scan, "scan_segments"))

    def forward(p, x):
        made = plan.plan_forward(p, chip_of(p.device), layouts_of(x), choice=plan.Scan(None, None, taped=False))
        return Outputs(*launch(made, x)[0][:2])

    take_every_call(monkeypatch, forward)
    for got, exact in zip(call(2, {}, None, **x), want, strict=True):
        assert got.shape == exact.shape
        assert relative_error(got, exact) < 0.01


@torch.no_grad()
def test_lengths_that_only_the_device_knows(launched, monkeypatch):  # noqa: F811
    """It lists the sequences, and cuts the long one. Outputs after the last sequence are zeros."""
    cut_prompts_at(monkeypatch, 2, 1, 3)
    x = draw(2, **SMALL, T=260) | {"initial_state": torch.randn(4, 2, 128, 128)}
    bounds = torch.tensor([0, 1, 200, 200, 245])
    want, states = equation(2, **{name: t.double() for name, t in x.items()}, bounds=bounds.tolist())
    take_every_call(monkeypatch, backend.forward)
    monkeypatch.setattr(plan, "choose_forward", lambda p, chip: None)  # a host knows bounds in its own memory
    o, S = call(2, {}, bounds, **x)
    assert launched() == [None, None, 2]
    assert not o[:, 245:].any()
    assert relative_error(o[:, :245], want) < 0.01
    assert relative_error(S, states) < 0.01
