"""Kimi Delta Attention on the Triton backend, in Triton's interpreter; on a GPU: `flash-delta check`."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: `flash-delta check --device cuda` runs the compiled kernels", allow_module_level=True)

from test_triton_kernels import scanned

import flash_delta
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.triton import backend
from flash_delta.kernels.triton.backward.halved_gradients import needs_halving
from flash_delta.problem import Inputs
from flash_delta.testing import CASES, MEMBERS, Standard, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, run

KDA = MEMBERS["kda"]
BY_NAME = {case.name: case for case in CASES}
CELLS = [
    ("packed", "bfloat16", {"HV": 1, "T": 72, "lengths": (0, 1, 0, 65, 0)}),
    ("in-kernel", "float32", {"HV": 2, "T": 30}),
    ("in-kernel-packed", "float32", {"HV": 2, "T": 16, "lengths": (0, 5, 9)}),
    ("in-kernel-strong", "bfloat16", {"HV": 3, "T": 24}),  # dA_log of one head is one number, which scatters
    ("lower-bound", "bfloat16", {"HV": 1, "T": 66}),
    ("lower-bound", "float16", {"HV": 3, "T": 24}),
    ("lower-bound", "float16", {"HV": 2, "T": 66}),  # not one head, as above
    ("promised-bound", "float32", {"HV": 1, "T": 40}),
    ("promised-bound", "bfloat16", {"HV": 1, "T": 40}),
    ("strong-decay", "float16", {"HV": 2, "T": 24}),
    ("extreme-decay", "float32", {"HV": 1, "T": 40}),
    ("rising", "bfloat16", {"HV": 1, "T": 66}),
    ("rising", "float32", {"HV": 1, "T": 40}),
    ("negative-eigenvalues", "float32", {"HV": 2, "T": 7}),
    ("grouped-by-3", "float32", {"HV": 3, "T": 7}),
    ("state-v-first", "bfloat16", {"HV": 2, "T": 7}),
    ("odd-widths", "bfloat16", {"HV": 3, "T": 7}),
    ("widest-values", "float32", {"HV": 1, "T": 7, "K": 12}),
    ("wide-keys", "float32", {"HV": 1, "T": 7}),
    ("wide-keys", "bfloat16", {"HV": 1, "T": 20}),
    ("saved", "bfloat16", {"HV": 1, "T": 66}),
    ("no-tokens", "float32", {}),
    ("no-sequences", "float32", {}),
]


@pytest.mark.parametrize(("case", "dtype", "changes"), CELLS)
def test_against_the_recurrence(case, dtype, changes):
    """Every output and gradient is as near as a kernel's may be."""
    case, dtype = replace(BY_NAME[case], **{"B": 1, "H": 1} | changes), getattr(torch, dtype)
    x = make_inputs(case, KDA, dtype)
    standard, got = Standard(case, KDA, x), run(KDA, x, "triton")
    assert got.keys() == standard.want.keys()
    assert not standard.wrong(got)


@pytest.mark.parametrize(
    ("case", "dtype", "changes", "gradients"),
    [
        ("packed", "bfloat16", {"T": 76, "lengths": (0, 3, 66, 0, 2)}, False),
        ("ragged", "float32", {"T": 66}, True),
        ("saved", "float16", {"B": 1, "T": 66}, True),
        ("odd-widths", "bfloat16", {"T": 66, "options": {"state_v_first": True}}, False),
        ("all-empty", "float32", {}, False),
        ("no-tokens", "float32", {}, True),
        ("no-sequences", "float32", {}, False),
    ],
)
def test_states_of_chunks(case, dtype, changes, gradients):
    """States of chunks are those of the torch backend. With them gradients are as without them."""
    case, dtype = replace(BY_NAME[case], **{"H": 1, "HV": 1} | changes), getattr(torch, dtype)

    def states(dtype, backend):
        x = make_inputs(case, KDA, dtype)
        with torch.set_grad_enabled(gradients):
            return x, KDA.op(**x, return_intermediate_states=True, backend=backend)

    _, (*_, want) = states(torch.float64, "torch")
    with products_in(dtype):
        _, (*_, reference) = states(dtype, "torch")
    x, (o, final, got) = states(dtype, "triton")
    assert got.shape == want.shape
    assert (got.dtype, got.is_contiguous(), got.requires_grad) == (dtype, True, False)
    assert relative_error(got, want) <= allowed(relative_error(reference, want), dtype)
    plain = KDA.op(**x, backend="triton")
    assert torch.equal(o.nan_to_num(), plain[0].nan_to_num())
    if gradients:
        leaves = [t for t in x.values() if torch.is_tensor(t) and t.requires_grad]
        for a, b in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (final, plain[1])), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_states_of_chunks_are_refused_where_they_cannot_be_counted():
    p = problem_of(mixed(7))._replace(keep_states=True)
    assert backend.unsupported(p) is None
    assert "chunks of 64 tokens, chunk_size is 32" in backend.unsupported(p._replace(chunk_size=32))
    assert "give cu_seqlens_cpu" in backend.unsupported(p._replace(packed=True, lengths=None))


def mixed(T, K=16, seed=0, least=-1000.0):
    """Log decays from 0 to -1000, mixed over channels and tokens: blocks that are split, and others."""
    gen = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, 1, K, generator=gen), dim=-1) for _ in range(2))
    kinds = torch.tensor([0.0, 0.0, -0.1, -0.1, -0.1, -5.0, -5.0, -40.0, -100.0, -1000.0]).clamp(min=least)
    g = kinds[torch.randint(len(kinds), (1, T, 1, K), generator=gen)]
    g[:, 16:32] = -0.1
    x = {"q": q, "k": k, "v": torch.randn(1, T, 1, 16, generator=gen), "g": g}
    return x | {"beta": torch.rand(1, T, 1, generator=gen)}


def changed(x, dtype):
    return {name: t.to(dtype).requires_grad_() for name, t in x.items()}


def gradients(x, backend, until=None, op=KDA.op):
    """Returns the gradients of a loss: the sum of the first ``until`` outputs, or of all outputs and the final
    state."""
    o, state = op(**x, output_final_state=True, backend=backend)
    loss = o.sum() + state.sum() if until is None else o[:, :until].sum()
    return torch.autograd.grad(loss, list(x.values()))


def test_decays_of_all_sizes_side_by_side():
    x = mixed(70, K=24) | {"initial_state": torch.randn(1, 1, 24, 16)}
    got, want = gradients(changed(x, torch.float32), "triton"), gradients(changed(x, torch.float64), "torch")
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_token_changes_what_comes_before_it(dtype):
    """Bitwise, also where what comes after makes a block of mild decays one with unsafe rows."""
    x, other = changed(mixed(40, least=-5.0), dtype), changed(mixed(40, seed=1), dtype)
    with torch.no_grad():
        o, _ = KDA.op(**x, backend="triton")
        for t in (21, 32):
            y = {name: torch.cat([x[name][:, :t], other[name][:, t:]], 1) for name in x}
            o_changed, _ = KDA.op(**y, backend="triton")
            assert torch.equal(o[:, :t], o_changed[:, :t])
            assert not torch.equal(o[:, t:], o_changed[:, t:])


@pytest.mark.parametrize(("dtype", "least", "t"), [(torch.float32, -1000.0, 21), (torch.bfloat16, -5.0, 37)])
def test_no_token_changes_gradients_of_what_comes_before_it(dtype, least, t):
    """Bitwise, of a loss on the past; in bfloat16, which kernel computes a channel depends on all its decays."""
    x, other = changed(mixed(40, least=-5.0), dtype), changed(mixed(40, seed=1, least=least), dtype)
    y = {name: torch.cat([x[name][:, :t], other[name][:, t:]], 1).detach().requires_grad_() for name in x}
    for a, b in zip(gradients(x, "triton", t), gradients(y, "triton", t), strict=True):
        assert torch.equal(a[:, :t], b[:, :t])
        assert a[:, :t].any()
        assert not a[:, t:].any()


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 0.0), (torch.bfloat16, 2**-8)])
def test_a_promise_that_holds_changes_nothing(dtype, near):
    """In bfloat16 keys are decayed to a chunk's end in another order, and `halved_gradients` is not launched."""
    x, promise = changed(mixed(66, least=-5.0), dtype), {"safe_gate": True, "lower_bound": -5.0}
    promising = partial(KDA.op, **promise)
    assert needs_halving(problem_of(x))
    assert needs_halving(problem_of(x | promise)) == (near == 0.0)
    assert all(problem_of(x | other) == problem_of(x | promise) for other in ({"safe_gate": True}, {"lower_bound": -5}))
    for a, b in zip(gradients(x, "triton", op=promising), gradients(x, "triton"), strict=True):
        assert torch.equal(a, b) if near == 0.0 else relative_error(a, b) <= near


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_broken_promise_is_bounded(backend, dtype):
    """What is below the bound counts as the bound, and has no gradient."""
    x = mixed(40)
    x["g"][:, 5], x["g"][0, 7, 0, ::2] = -torch.inf, -torch.finfo(torch.float32).max
    x, kept = changed(x, dtype), changed(x | {"g": x["g"].clamp(min=-5.0)}, dtype)
    promising = partial(KDA.op, safe_gate=True, lower_bound=-5.0)
    got, want = (gradients(y, backend, op=promising) for y in (x, kept))
    for name, a, b in zip(x, got, want, strict=True):
        assert torch.equal(a, b.masked_fill(x["g"] < -5.0, 0) if name == "g" else b), name
        assert b.isfinite().all()


def test_one_gate_for_all_channels_is_gated_delta_net():
    x = mixed(66)
    g = -torch.rand(1, 66, 1)
    got = gradients(changed(x | {"g": g[..., None].expand(-1, -1, -1, 16)}, torch.float32), "triton")
    want = gradients(changed(x | {"g": g}, torch.float32), "triton", op=flash_delta.chunk_gated_delta_rule)
    for name, a, b in zip(x, got, want, strict=True):
        assert relative_error(a.sum(-1) if name == "g" else a, b) < 1e-6, name


def problem_of(x):
    return flash_delta.explain(KDA.op, **x, backend="triton").problem


def test_descriptors_and_pointers_load_what_channel_wrote():
    """Both ways load the same numbers. The interpreter has descriptors, but a CPU does not choose them (as in
    test_triton_kernels.py)."""
    x = changed(mixed(70), torch.bfloat16)
    p, given = problem_of(x), (x[name].detach() for name in ("q", "k", "v", "g", "beta"))
    inputs = Inputs(*given, initial_state=torch.randn(p.state_shape))
    for a, b in zip(*(scanned(p, inputs, Tile(4, 1, 16, tma=tma)) for tma in (False, True)), strict=True):
        assert torch.equal(a, b)
