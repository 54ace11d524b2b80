"""The recurrent ops on the Triton backend: forward by the kernel of decoding, backward by chunks."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import flash_delta
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.kernels.triton.serving.rows import plan_step
from flash_delta.problem import Inputs
from flash_delta.testing import CASES, MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, run, truth

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
BY_NAME = {case.name: case for case in CASES}
# As small as shows what a case is there for: the interpreter takes seconds for a head's chunk.
CELLS = [
    ("gdn", "ragged", {"T": 70}),
    ("gdn", "one-token", {}),
    ("gdn", "packed", {"H": 1, "HV": 2, "T": 136, "lengths": (0, 1, 0, 64, 65, 0)}),
    ("gdn", "all-empty", {}),
    ("gdn", "no-tokens", {}),
    ("gdn", "no-sequences", {}),
    ("gdn", "state-v-first", {"B": 1, "H": 1, "HV": 2, "T": 66}),
    ("gdn", "no-initial-state", {"B": 1, "H": 1, "HV": 2, "T": 66}),
    ("gdn", "grouped-by-3", {"B": 1, "T": 24}),
    ("gdn", "extreme-decay", {"B": 1, "H": 1, "HV": 2, "T": 80}),
    ("gdn", "odd-widths", {"H": 1, "HV": 1, "T": 20}),
    ("gdn", "widest-values", {"HV": 1, "T": 7, "K": 12}),
    ("kda", "short", {"B": 1}),
    ("kda", "packed", {"H": 1, "HV": 1, "T": 72, "lengths": (0, 1, 0, 65, 0)}),
    ("kda", "in-kernel-packed", {"H": 1, "HV": 2, "T": 16, "lengths": (0, 5, 9)}),
]


@pytest.mark.parametrize(("name", "case", "changes"), CELLS)
def test_against_the_recurrence(name, case, changes):
    """Outputs and all gradients, in float32."""
    member, case = MEMBERS[f"{name}-recurrent"], replace(BY_NAME[case], **changes)
    x = make_inputs(case, member, torch.float32, DEVICE)
    want, got = truth(member, x), run(member, x, "triton")
    with products_in(torch.float32):
        reference = run(member, make_inputs(case, member, torch.float32), "torch")
    for tensor, value in want.items():
        limit = allowed(relative_error(reference[tensor], value), torch.float32)
        assert relative_error(got[tensor].cpu(), value) <= limit, tensor


MIXES = {  # of q, k and v
    "half-values": (torch.float32, torch.float32, torch.bfloat16),
    "half-keys": (torch.float16, torch.float16, torch.float32),
    "three": (torch.bfloat16, torch.float32, torch.float16),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("name", "mix"), [("gdn", "half-values"), ("kda", "half-keys"), ("gdn", "three")])
def test_mixed_dtypes(name, mix, backend):
    """Computed in float32 and rounded once: each result to its tensor's dtype."""
    member = MEMBERS[f"{name}-recurrent"]
    x = make_inputs(replace(BY_NAME["short"], B=1, T=5), member, torch.float32, DEVICE)
    for n, dtype in zip(("q", "k", "v"), MIXES[mix], strict=True):
        x[n] = x[n].detach().to(dtype).requires_grad_()
    want, got = truth(member, x), run(member, x, backend)
    dtypes = {f"d{n}": t.dtype for n, t in x.items() if torch.is_tensor(t)}
    dtypes |= {"o": x["v"].dtype, "final_state": torch.float32}
    for tensor, value in want.items():
        dtype = dtypes[tensor]
        assert got[tensor].dtype == dtype, tensor
        assert relative_error(got[tensor].cpu(), value) <= max(1e-5, 2 * torch.finfo(dtype).eps), tensor


@pytest.mark.parametrize("name", ["gdn", "kda"])
@torch.no_grad()
def test_tokens_in_one_call_are_tokens_in_calls(name):
    """Bitwise; more of them than fit a serving call; and the caller's state is not written."""
    member = MEMBERS[f"{name}-recurrent"]
    x = make_inputs(BY_NAME["in-kernel"], member, torch.float32, DEVICE)
    x |= {n: x[n][:, :20] for n in ("q", "k", "v", "g", "beta")}
    before = x["initial_state"].clone()
    o, final = member.op(**x, backend="triton")
    assert torch.equal(x["initial_state"], before)
    state, rows = x["initial_state"], []
    for t in range(x["q"].shape[1]):
        now = {n: x[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta")}
        row, state = member.op(**(x | now | {"initial_state": state}), backend="triton")
        rows.append(row)
    assert torch.equal(torch.cat(rows, 1), o)
    assert torch.equal(state, final)


@torch.no_grad()
def test_a_beta_of_one_need_not_be_given():
    x = make_inputs(BY_NAME["short"], MEMBERS["gdn-recurrent"], torch.float32, DEVICE)
    op = flash_delta.fused_recurrent_gated_delta_rule
    one = x | {"beta": torch.ones_like(x["beta"])}
    for a, b in zip(op(**one, backend="triton"), op(**(x | {"beta": None}), backend="triton"), strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_a_packed_token_counts_by_its_own_stride():
    """Tokens 16 numbers apart are counted otherwise than tokens 5 apart, also where there is only one token. Results do
    not depend on it: what multiplies the stride is 0 then. So a call that torch takes for contiguous may launch what an
    earlier one launched, and on a GPU it does."""
    x = make_inputs(BY_NAME["one-token"], MEMBERS["gdn-recurrent"], torch.float32, DEVICE)
    x = {n: x[n][:1] for n in ("q", "k", "v", "g", "beta")} | {"cu_seqlens": torch.tensor([0, 1], device=DEVICE)}
    op, steps = flash_delta.fused_recurrent_gated_delta_rule, []
    want, _ = op(**x, backend="triton")
    for token in (64, 5):
        q = torch.empty_strided(x["q"].shape, (4096, token, 16, 1), device=DEVICE).copy_(x["q"])
        call = x | {"q": q}
        assert torch.equal(op(**call, backend="triton")[0], want)
        layouts = layouts_of(Inputs(**call))
        steps += plan_step(flash_delta.explain(op, **call).problem, Chip("sm_90", 132), layouts).steps
    assert steps[0].arguments != steps[1].arguments
