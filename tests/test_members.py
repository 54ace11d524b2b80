"""Every gate with every erase, with erase keys of its own or without: a backend agrees with the recurrence, or refuses.

Public ops reach some of these calls only. What a backend takes without knowing it, another op would get wrong.
"""

import os
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from flash_delta.ops._backend import load_backend
from flash_delta.ops._check.options import Options
from flash_delta.ops._check.rule import describe
from flash_delta.ops._execute import backward, forward
from flash_delta.problem import Inputs, KnownCall, Pools, Problem
from flash_delta.reference.recurrent import recurrent
from flash_delta.testing import assert_accurate

T, H, HV, K, V = 70, 1, 2, 8, 16
CALLS = list(product(("none", "scalar", "channel"), ("decayed", "undecayed", None), (False, True), (False, True)))
IDS = [f"{g}-{e}-{'own' if p else 'k'}-{'recurrent' if r else 'chunks'}" for g, e, p, r in CALLS]
CALL = pytest.mark.parametrize(("gate", "erase", "own", "steps"), CALLS, ids=IDS)


def inputs(gate: str, erase: str | None, own: bool) -> Inputs:
    torch.manual_seed(0)
    q, k, p = (torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1) for _ in range(3))
    g = None if gate == "none" else -torch.rand(1, T, HV, *((K,) if gate == "channel" else ()))
    beta = None if erase is None else torch.rand(1, T, HV)
    return Inputs(q, k, torch.randn(1, T, HV, V), g, beta, p if own else None, torch.randn(1, HV, K, V))


def problem(x: Inputs, gate: str, erase: str | None, steps: bool) -> Problem:
    return describe(x, Options("a call", (gate, False, None), erase, optional_beta=True, recurrent=steps), None)


def check(name: str, gate: str, erase: str | None, own: bool, steps: bool) -> bool:
    """Whether the backend runs this; if it does, outputs and gradients are compared."""
    x = inputs(gate, erase, own)
    p = problem(x, gate, erase, steps)._replace(needs_grad=True)
    if load_backend(name).unsupported(p) is not None:
        return False
    known = KnownCall(p, load_backend(name), needs_grad=True)
    out = forward(p, known, x)
    do, dfinal = torch.randn_like(out.o), torch.randn_like(out.final_state)
    got = {"o": out.o, "state": out.final_state} | backward(p, known, x, out.saved, do, dfinal)._asdict()
    wide = Inputs(*(None if t is None else t.double().requires_grad_() for t in x))
    o, state = recurrent(*wide[:6], erase=erase, initial_state=wide.initial_state)
    leaves = {n: t for n, t in wide._asdict().items() if t is not None}
    gradients = torch.autograd.grad([o, state], leaves.values(), [do.double(), dfinal.double()], allow_unused=True)
    want = {"o": o, "state": state} | dict(zip(leaves, gradients, strict=True))
    for tensor, value in want.items():
        value = torch.zeros_like(leaves[tensor]) if value is None else value  # erase keys that nothing reads
        assert_accurate(tensor, got[tensor], value, torch.float32)
    return True


@CALL
def test_torch_is_right_or_refuses(gate, erase, own, steps):
    refused = (gate == "channel" and erase == "undecayed") or (erase is None and own)
    assert check("torch", gate, erase, own, steps) != refused


@CALL
def test_a_strength_per_channel_runs_in_torch_with_a_decay_per_channel(gate, erase, own, steps):
    p = problem(inputs(gate, erase, own), gate, erase, steps)._replace(channel_strength=True)
    takes = gate == "channel" and erase == "decayed" and not own
    assert (load_backend("torch").unsupported(p) is None) == takes


@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_which_kernels_take_a_strength_per_channel(name, monkeypatch):
    """Also on a pool, as without the strength."""
    pytest.importorskip("triton", reason="Triton is not installed")
    backend, chip = load_backend(name), SimpleNamespace(target="sm_90")
    monkeypatch.setattr(backend, "chip_of", lambda device: chip)
    p = problem(inputs("channel", "decayed", False), "channel", "decayed", False)
    p = p._replace(device=torch.device("cuda", 0), dtype=torch.bfloat16, K=128, V=128)
    for call in (p, p._replace(pools=Pools())):
        assert backend.unsupported(call) is None
        assert backend.unsupported(call._replace(channel_strength=True)) is None
        wide = backend.unsupported(call._replace(channel_strength=True, strength_dtype=torch.float32))
        assert name == "triton" or "have to be torch.bfloat16, one of them is torch.float32" in wide
    scalar = p._replace(gate=p.gate._replace(kind="scalar"), channel_strength=True)
    assert "comes with a decay per channel" in backend.unsupported(scalar)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@CALL
def test_triton_is_right_or_refuses(gate, erase, own, steps):
    """What it takes is what it took before the refusals, less what it got wrong."""
    decodable = gate != "none" and erase == "decayed" and not own
    assert check("triton", gate, erase, own, steps) == (decodable or (gate != "channel" and not steps))


@CALL
def test_hopper_takes_what_its_kernels_know(gate, erase, own, steps, monkeypatch):
    """Which tests/test_hopper_loop.py, test_hopper_kda.py and, on a GPU, test_hopper_gpu.py and test_hopper_kda_gpu.py
    compare: keys that erase what they write."""
    backend = pytest.importorskip("flash_delta.kernels.hopper.backend", reason="Triton is not installed")
    monkeypatch.setattr(backend, "chip_of", lambda device: SimpleNamespace(target="sm_90"))
    p = problem(inputs(gate, erase, own), gate, erase, steps)
    p = p._replace(device=torch.device("cuda", 0), dtype=torch.bfloat16, K=128, V=128)
    takes = erase == "decayed" and not own and not steps
    assert (backend.unsupported(p) is None) == takes
    assert (backend.unsupported(p._replace(pools=Pools())) is None) == (takes and gate != "none")


@pytest.mark.parametrize("name", ["torch", "triton"])
@CALL
def test_serving_knows_two_members(gate, erase, own, steps, name):
    """Its ops pass no others on, and its loops read neither erase keys nor an absent gate."""
    if name == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    p = problem(inputs(gate, erase, own), gate, erase, steps)._replace(pools=Pools())
    assert (load_backend(name).unsupported(p) is None) == (gate != "none" and erase == "decayed" and not own)
