"""Cases where keys repeat: their rule, and kernels in Triton's interpreter. On a GPU: test_repeated_keys_gpu.py."""

import os
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

import pytest
import torch

import flash_delta
from flash_delta.problem import Inputs
from flash_delta.testing import CASES, HARD, MEMBERS, Standard, make_inputs, relative_error, run
from flash_delta.testing.accuracy import infer, truth
from flash_delta.testing.rule import run_wide, sizes_of_terms

BY_NAME = {case.name: case for case in (*CASES, *HARD)}
INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
SHORT = {("gdn", "one-key-1.999"), ("gdn", "direction-1.999"), ("kda", "signs-1.999")}  # the others take minutes
ROWS = [
    pytest.param(name, case.name, marks=() if (name, case.name) in SHORT else pytest.mark.long)
    for name, member in MEMBERS.items()
    for case in HARD
    if case.applies(member)
]


def case_of(name, case, **changes):
    """The case on two heads, and inputs."""
    case = replace(BY_NAME[case], **({"H": 2, "HV": 2} | changes))
    return case, MEMBERS[name], make_inputs(case, MEMBERS[name], torch.bfloat16)


@lru_cache
def standard_of(name, case, T):
    return Standard(*case_of(name, case, T=T))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("name", "case"), ROWS)
def test_kernels_are_as_exact_as_rounding_allows(name, case, backend):
    if backend == "triton" and not INTERPRETED:
        pytest.skip("Triton is not installed, or there is a GPU")
    T = 128 if name == "kda" else 256
    standard, (case, member, x) = standard_of(name, case, T), case_of(name, case, T=T)
    got = infer(member, x, backend) if case.forward_only else run(member, x, backend)
    assert got.keys() == standard.want.keys()
    assert not standard.wrong(got)


@pytest.mark.parametrize(("name", "case"), [row.values for row in ROWS])
def test_the_torch_backend_in_float64_is_the_recurrence(name, case):
    """So it can be the truth where the recurrence is too slow."""
    case, member, x = case_of(name, case, H=1, HV=2, T=140, K=24, V=16)
    want, got = truth(member, x), run_wide(case, member, x)
    for tensor, value in got.items():
        assert relative_error(value, want[tensor]) < 1e-10, tensor


@pytest.mark.parametrize(("keys", "count"), [("one", 1), ("signs", 2), ("two", 2), ("16", 16), ("turning", 300)])
def test_equal_keys_have_equal_bits(keys, count):
    case = next(case for case in HARD if case.keys == keys)
    _, _, x = case_of("gdn", case.name, T=300)
    assert len(x["k"][0, :, 0].unique(dim=0)) == count
    lengths = x["k"].norm(dim=-1)
    assert 0.49 < lengths.min() < lengths.max() < 2.01
    assert not torch.equal(x["k"][0, 0, 0], x["k"][0, 0, 1])  # heads have keys of their own


def test_sizes_of_the_terms_of_gates():
    """With one key and beta 0.9 what tokens read and what they erase cancels in dg, to 1/300 of its terms. The terms'
    sum is dg."""
    case, member, x = case_of("gdn", "one-key-0.9", T=512)
    dg, sizes = run_wide(case, member, x)["dg"], run_wide(case, member, x, sizes_of_terms())["dg"]
    assert (dg.abs() <= sizes).all()
    assert 1e-3 < dg.norm() / sizes.norm() < 1e-2
    assert torch.equal(run_wide(case, member, x)["dg"], dg)  # nothing is left behind


@pytest.mark.parametrize("name", ["gdn", "kda", "comba"])
def test_gates_are_allowed_no_more_than_their_terms_explain(name):
    """Whatever the torch backend with rounded products is off by."""
    case, member, x = case_of(name, "in-kernel", T=70, HV=4)
    standard = Standard(case, member, x)
    for gradient in ("dg", "dA_log", "ddt_bias"):
        assert standard.scales[gradient] >= standard.want[gradient].norm()
        assert standard.allowed[gradient] <= 2**-7
    plain = Standard(case, member, x, kernels=False)
    for gradient in ("dg", "dA_log", "ddt_bias"):  # of the torch backend's own results: as before
        part = float(plain.want[gradient].norm()) / plain.scales[gradient]
        assert plain.allowed[gradient] == pytest.approx(2**-8 * part)


def test_what_is_off_is_named():
    case, member, x = case_of("gdn", "16-keys-1.9", H=1, HV=1, T=128)
    standard, got = Standard(case, member, x), run(member, x)
    assert not standard.wrong(got)
    for tensor, value in got.items():
        for off in (value * (1.01 + standard.allowed[tensor]), torch.full_like(value, torch.nan)):
            if tensor != "dg":  # which is judged against its terms
                assert standard.wrong(got | {tensor: off}).keys() == {tensor}
    part = standard.want["dg"].norm() / standard.scales["dg"]
    assert standard.wrong(got | {"dg": got["dg"] * (1 + 1.01 * standard.allowed["dg"] / part)}).keys() == {"dg"}


def test_keys_rounded_to_float16_are_eight_times_as_exact():
    coarse, fine = (
        Standard(case, MEMBERS["gdn"], make_inputs(case, MEMBERS["gdn"], dtype))
        for case in [replace(BY_NAME["direction-1.9"], H=2, HV=2, T=128)]
        for dtype in (torch.bfloat16, torch.float16)
    )
    for tensor in ("o", "final_state", "dq", "dv", "dbeta"):
        assert 4 < coarse.reference[tensor] / fine.reference[tensor] < 16, tensor


def factored(x):
    """What `solve` and `factor` write for a call of Gated DeltaNet: A, X and the rates."""
    from workshop.gate.cases.rule import Kernels

    p = flash_delta.explain(MEMBERS["gdn"].op, **x, backend="triton").problem
    kernels = Kernels(p, Inputs(*(x[n].detach() for n in ("q", "k", "v", "g", "beta"))))
    kernels.chunks()
    written = kernels.launch(kernels.solved, kernels.factors)
    return written["A"], written["X"], written["rates"]


@pytest.mark.skipif(not INTERPRETED, reason="Triton is not installed, or there is a GPU")
def test_no_chunk_grows_with_any_beta():
    """With one key a chunk multiplies the state along it by 1 - sum_ij A_ij b_j, which is (1 - b)^64. With the kernel's
    own A, as it is stored, the factor stays within 1 for every beta below 2."""
    betas = torch.cat([torch.linspace(0.5, 1.9, 32), torch.linspace(1.9, 1.9995, 32)])
    case = replace(BY_NAME["one-key-1.999"], H=1, HV=len(betas), T=64, K=16, V=16)
    x = make_inputs(case, MEMBERS["gdn"], torch.bfloat16)
    x["beta"] = betas.expand(1, 64, -1).contiguous()
    A = factored(x)[0].double().reshape(-1, 64, 64)
    factor = 1 - (A * betas.double()[:, None, None]).sum((1, 2))
    assert A.shape[0] == len(betas)
    assert factor.abs().max() <= 1, betas[factor.abs() > 1]


@pytest.mark.skipif(not INTERPRETED, reason="Triton is not installed, or there is a GPU")
@pytest.mark.parametrize(("beta", "differ"), [(1.999, True), (1.9, False)])
def test_errors_of_equal_chunks_do_not_add_up(beta, differ):
    """With one key all chunks have the same X. Where the state stays as large, they are not rounded alike: the mean of
    their errors is far smaller than each of them. Elsewhere X is what it is."""
    case = replace(BY_NAME["one-key-1.999"], H=1, HV=1, T=64 * 12, K=16, V=16, beta=beta)
    A, X, rates = factored(x := make_inputs(case, MEMBERS["gdn"], torch.bfloat16))
    units = rates[:, 0, 3, 1:2].double()
    assert units.eq(1).all() == (not differ)
    torch.testing.assert_close(rates[:, 0, 2].double() * units, torch.full((12, 64), beta).double())
    k = x["k"].detach()[0, :64, 0].double()
    exact = A[:, 0].double().mT @ torch.nn.functional.normalize(k, dim=-1)
    errors = X[:, 0].double() / units[:, None] - exact
    assert (errors.mean(0).norm() < 0.5 * errors.square().sum((1, 2)).mean().sqrt()) == differ
