"""With ``batch_invariant`` of the chunk ops a sequence gets the same bits whatever else is in the call."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from serving_truth import DEVICES, GPU, needs_triton

import flash_delta
from flash_delta.reference import chunked
from flash_delta.testing import MEMBERS, make_inputs
from flash_delta.testing.cases import Case

HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)] + ["hopper"] * HOPPER
TOKENS = ("q", "k", "v", "g", "beta", "p", "b", "w")
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
SMALL = Case("", "", B=1, T=140, H=1, HV=1, K=16, V=16, lengths=(66, 0, 1, 64))
# On a GPU many sequences choose wider tiles than one, and the first one alone would be scanned in segments.
LARGE = Case("", "", B=1, T=33_500, H=4, HV=8, K=128, V=128, lengths=(32_000, 0, 64, 1, 130, *[70] * 18))


def results(member, x, backend, do, dstate):
    o, state = member.op(**x, batch_invariant=True, backend=backend)
    leaves = {name: t for name, t in x.items() if torch.is_tensor(t) and t.requires_grad}
    gradients = torch.autograd.grad((o, state), list(leaves.values()), (do, dstate))
    return {"o": o, "final_state": state} | dict(zip(leaves, gradients, strict=True))


def alone(x, n, start, stop):
    """Sequence n as a call of its own."""
    one = {name: x[name][:, start:stop].detach().requires_grad_() for name in TOKENS if name in x}
    one["initial_state"] = x["initial_state"][n : n + 1].detach().requires_grad_()
    return {name: t for name, t in (x | one).items() if not name.startswith("cu_seqlens")}


@pytest.mark.parametrize("raw", [False, True], ids=["given", "raw"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gdn", "kda", "comba", "delta-rule", "simple-gla", "gdn2"])
def test_other_sequences_change_no_bit(name, backend, raw):
    member, device = MEMBERS[name], DEVICES.get(backend, "cuda")
    if (raw and not RAW.keys() <= member.options) or (backend == "hopper" and name not in ("gdn", "delta-rule")):
        pytest.skip("not of this member")
    if raw and name in ("kda", "gdn2") and (backend, device) == ("triton", "cpu"):
        pytest.skip("takes the interpreter 20 seconds, and the other cells have it all")
    case, dtype = (LARGE, torch.bfloat16) if device == "cuda" else (SMALL, torch.float32)
    x = make_inputs(replace(case, options=RAW if raw else {}), member, dtype, device)
    gen = torch.Generator(device).manual_seed(1)
    do, dstate = (
        torch.randn(t.shape, generator=gen, device=device, dtype=t.dtype) for t in (x["v"], x["initial_state"])
    )
    packed = results(member, x, backend, do, dstate)
    for n, (start, stop) in enumerate(pairwise(x["cu_seqlens"].tolist())):
        one = results(member, alone(x, n, start, stop), backend, do[:, start:stop], dstate[n : n + 1])
        for key, t in packed.items():
            if key in ("o", *TOKENS):
                assert torch.equal(t[:, start:stop], one[key]), (key, n)
            elif key in ("final_state", "initial_state"):
                assert torch.equal(t[n : n + 1], one[key]), (key, n)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_one_by_one_is_what_all_at_once_is(name, monkeypatch):
    """On the torch backend: parameters' gradients, states of chunks, rows instead of packed sequences, no sequences."""
    whole, numbers = chunked.forward, []
    monkeypatch.setattr(chunked, "forward", lambda p, x, *known: numbers.append(p.N) or whole(p, x, *known))
    member = MEMBERS[name]
    for case in (SMALL, replace(SMALL, lengths=None, B=2, T=70), replace(SMALL, lengths=(), T=3)):
        x = make_inputs(replace(case, options=RAW), member, torch.float64)
        do, dstate = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
        numbers.clear()
        one_by_one = results(member, x, "torch", do, dstate)
        assert max(numbers) <= 1
        o, state = member.op(**x, backend="torch")
        torch.testing.assert_close(one_by_one["o"], o)
        leaves = [t for t in x.values() if torch.is_tensor(t) and t.requires_grad]
        for found, wanted in zip(
            list(one_by_one.values())[2:], torch.autograd.grad((o, state), leaves, (do, dstate)), strict=True
        ):
            torch.testing.assert_close(found, wanted)
    if name == "kda":
        for case in (SMALL, replace(SMALL, lengths=None, B=2, T=70)):
            x = make_inputs(case, member, torch.float64)
            kept = [
                member.op(**x, return_intermediate_states=True, batch_invariant=invariant, backend="torch")[2]
                for invariant in (False, True)
            ]
            torch.testing.assert_close(*kept)


def test_a_row_over_ranks_is_refused():
    x = make_inputs(replace(SMALL, lengths=None), MEMBERS["gdn"], torch.float32)

    class Context:
        tokens, bounds = 140, (0, 140)

        def local_bounds(self, device):
            return torch.tensor(self.bounds, device=device)

        def times(self, n):
            return self

        def delta_rule(self, run, x):
            return run(x, self.bounds)

    flash_delta.chunk_gated_delta_rule(**x, cp_context=Context())
    with pytest.raises(ValueError, match="batch_invariant: expected False with cp_context"):
        flash_delta.chunk_gated_delta_rule(**x, cp_context=Context(), batch_invariant=True)
