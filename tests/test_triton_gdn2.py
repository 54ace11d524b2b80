"""GDN-2 on the Triton backend, in Triton's interpreter; on a GPU: `flash-delta check`."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: `flash-delta check --device cuda` runs the compiled kernels", allow_module_level=True)

from prefill_truth import check as check_prefill
from prefill_truth import make_prefill
from serving_truth import slots

import flash_delta
from flash_delta.testing import CASES, MEMBERS, Standard, make_inputs, relative_error
from flash_delta.testing.accuracy import run

GDN2, KDA = MEMBERS["gdn2"], MEMBERS["kda"]
BY_NAME = {case.name: case for case in CASES}
CELLS = [
    ("packed", "bfloat16", {"T": 76, "lengths": (0, 1, 0, 65, 7, 0)}),
    ("packed", "float32", {"T": 76, "lengths": (0, 1, 0, 65, 7, 0)}),
    ("ragged", "bfloat16", {"T": 70, "HV": 2}),
    ("no-initial-state", "float32", {"T": 66}),
    ("in-kernel", "float32", {"HV": 2, "T": 30}),
    ("in-kernel-packed", "bfloat16", {"HV": 4, "T": 76, "lengths": (0, 5, 66)}),
    ("lower-bound", "float16", {"HV": 4, "T": 66}),  # the error of the two numbers in dA_log of two heads is chance
    ("promised-bound", "bfloat16", {"T": 40}),
    ("zero-decay", "bfloat16", {"T": 66}),
    ("strong-decay", "bfloat16", {"HV": 2, "T": 40}),
    ("extreme-decay", "float32", {"T": 40}),
    ("rising", "bfloat16", {"T": 66}),
    ("zero-beta", "float32", {"T": 20}),
    ("correlated-keys", "float32", {"T": 66}),
    ("zero-keys", "float32", {"HV": 2, "T": 20}),
    ("negative-eigenvalues", "float32", {"HV": 2, "T": 7}),
    ("negative-eigenvalues", "bfloat16", {"HV": 4, "T": 66}),
    ("growing", "bfloat16", {"HV": 2}),
    ("growing-to-2", "bfloat16", {}),
    ("state-v-first", "bfloat16", {"HV": 2, "T": 7}),
    ("odd-widths", "bfloat16", {"HV": 2, "T": 20}),
    ("widest-values", "float32", {"T": 7, "K": 12}),
    ("wide-keys", "bfloat16", {"T": 20}),
    ("float32-gates", "bfloat16", {"T": 20, "K": 32, "V": 32}),
    ("gaps", "bfloat16", {"T": 20, "K": 24, "V": 16}),
    ("saved", "bfloat16", {"HV": 3, "T": 66}),
    ("saved-packed", "float32", {"T": 76, "lengths": (66, 0, 8)}),
    ("no-tokens", "float32", {}),
    ("no-sequences", "float32", {}),
]


@pytest.mark.parametrize(("case", "dtype", "changes"), CELLS)
def test_against_the_recurrence(case, dtype, changes):
    """Every output and gradient is as near as a kernel's may be."""
    case, dtype = replace(BY_NAME[case], **{"B": 1, "H": 1, "HV": 1} | changes), getattr(torch, dtype)
    x = make_inputs(case, GDN2, dtype)
    standard, got = Standard(case, GDN2, x), run(GDN2, x, "triton")
    assert got.keys() == standard.want.keys()
    assert not standard.wrong(got)


@pytest.mark.parametrize("case", ["ragged", "in-kernel", "strong-decay", "negative-eigenvalues"])
def test_token_by_token(case):
    member = MEMBERS["gdn2-recurrent"]
    case = replace(BY_NAME[case], B=1, H=1, HV=2, T=9)
    x = {name: t.detach() if torch.is_tensor(t) else t for name, t in make_inputs(case, member, torch.float32).items()}
    wide = {name: t.double() if torch.is_tensor(t) else t for name, t in x.items()}
    for got, want in zip(member.op(**x, backend="triton"), member.op(**wide, backend="torch"), strict=True):
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("most", [1.0, 2.0])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 0.012)])
def test_gates_of_all_sizes_and_keys_that_repeat(dtype, near, group, most):
    """Four keys in random order, b and w from 0 to 1 or 2, and some tokens of which a gate is exactly 0 or ``most``."""
    gen, (T, K, V, HV) = torch.Generator().manual_seed(0), (70, 16, 24, 2 * group)

    def rand(*shape):
        return torch.rand(*shape, generator=gen)

    keys = torch.nn.functional.normalize(torch.randn(1, 4, 2, K, generator=gen), dim=-1)
    x = {"q": rand(1, T, 2, K) - 0.5, "k": keys[:, torch.randint(4, (T,), generator=gen)], "v": rand(1, T, HV, V) - 0.5}
    x |= {"g": -0.2 * rand(1, T, HV, K), "b": most * rand(1, T, HV, K), "w": most * rand(1, T, HV, V)}
    x["b"][:, 3::7], x["b"][:, 4::7], x["w"][:, 5::7] = 0.0, most, 0.0
    x |= {"initial_state": torch.randn(1, HV, K, V, generator=gen)}
    x = {name: t.to(dtype).float() for name, t in x.items()}
    found = (gradients(x, *way) for way in ((dtype, "triton"), (torch.float64, "torch")))
    for name, a, b in zip(("o", "state", *x), *found, strict=True):
        assert relative_error(a, b) <= near, name


def gradients(x, dtype, backend, op=flash_delta.chunk_gdn2):
    """o, the final state, and the gradients of a loss."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in x.items()}
    o, state = op(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True, backend=backend)
    gen = torch.Generator().manual_seed(1)
    loss = sum((y.double() * torch.randn(y.shape, generator=gen).double()).sum() for y in (o, state))
    return o, state, *torch.autograd.grad(loss, leaves.values())


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 0.015)])
def test_one_number_for_both_gates_is_kda(dtype, near):
    x = make_inputs(replace(BY_NAME["ragged"], B=1, H=1, HV=2, T=70), KDA, torch.float32)
    x = {name: t.detach().to(dtype).float() for name, t in x.items() if torch.is_tensor(t)}

    def both(beta, backend, g, v, **x):
        b, w = beta[..., None].expand(g.shape), beta[..., None].expand(v.shape)
        return flash_delta.chunk_gdn2(**x, g=g, v=v, b=b, w=w, backend=backend)

    found = gradients(x, dtype, "triton", both), gradients(x, dtype, "triton", flash_delta.chunk_kda)
    for name, a, b in zip(("o", "state", *x), *found, strict=True):
        assert relative_error(a, b) <= near, name


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_keys_in_turn_that_let_the_state_grow(dtype, norm):
    """The inverse of a chunk has entries of 1e6 there, which float16 cannot hold. Nothing becomes NaN or infinite."""
    turn = torch.tensor((116, 26)).deg2rad()
    k = torch.stack([turn.cos(), turn.sin()], 1).repeat(32, 1).view(1, 64, 1, 2)
    b = torch.tensor([[0.0, 2.0], [2.0, 0.0]]).repeat(32, 1).view(1, 64, 1, 2)
    k, b = (torch.nn.functional.pad(t, (0, 6)) for t in (k, b))
    one = torch.ones(1, 64, 1, 8)
    x = {"q": k, "k": k, "v": one, "g": 0 * one, "b": b, "w": one}
    x = {name: t.to(dtype).requires_grad_() for name, t in x.items()}
    op = partial(flash_delta.chunk_gdn2, use_qk_l2norm_in_kernel=norm, backend="triton")
    o, _ = op(**x, initial_state=torch.eye(8)[None, None] * 1e-3)
    assert o.isfinite().all()
    assert all(t.isfinite().all() for t in torch.autograd.grad(o.sum(), x.values()))


@pytest.mark.parametrize("kind", ["gdn2", "gdn2-raw"])
def test_checkpoints_at_offsets(kind):
    x = make_prefill(kind, (70, 0, 3, 130))
    at = {"checkpoint_offsets": slots([67, -1, 2, 128], x), "checkpoint_indices": slots([9, -1, 8, 10], x)}
    check_prefill(kind, x | at, "triton")


@pytest.mark.parametrize("seed", [0, 1])  # the second call is known, and has other tensors
def test_expanded_gates(seed):
    """Results and gradients have the bits that copies give."""
    x = make_inputs(replace(BY_NAME["ragged"], B=2, H=1, HV=2, T=17), GDN2, torch.bfloat16, seed=seed)
    x = {name: t.detach() for name, t in x.items() if torch.is_tensor(t)}
    shapes = {"b": x["b"].shape, "w": x["w"].shape, "g": x["g"].shape}
    x |= {"b": x["b"][..., :1], "w": x["w"][:1, :1], "g": x["g"][:, :, :1]}

    def both(copied, backend, **x):
        gates = {name: x.pop(name).expand(shape) for name, shape in shapes.items()}
        gates = {name: t.contiguous() for name, t in gates.items()} if copied else gates
        return flash_delta.chunk_gdn2(**x, **gates, backend=backend)

    found = (gradients(x, torch.bfloat16, "triton", partial(both, copied)) for copied in (False, True))
    for name, a, b in zip(("o", "state", *x), *found, strict=True):
        assert torch.equal(a, b), name
