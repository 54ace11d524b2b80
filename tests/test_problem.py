# ruff: noqa: E501  (one row per mistake)
"""The door: bad input is a ValueError that names the argument, what was expected and what came."""

import re
from types import SimpleNamespace

import pytest
import torch

import flash_delta
from flash_delta import backend as backends
from flash_delta.modules import causal_conv1d
from flash_delta.ops import _backend, _function, _known_calls
from flash_delta.ops._backend import ENVIRONMENT
from flash_delta.ops._check import rule
from flash_delta.ops._check.options import Options
from flash_delta.problem import Inputs
from flash_delta.reference import backend
from flash_delta.testing import CASES, MEMBERS, make_inputs

BY_NAME = {case.name: case for case in CASES}


def arguments(member: str, case: str = "ragged") -> dict:
    x = make_inputs(BY_NAME[case], MEMBERS[member], torch.float32)
    return {n: t.detach() if torch.is_tensor(t) else t for n, t in x.items()}


z = torch.zeros
RAW = {"use_gate_in_kernel": True}
BAD = [  # member, case, changed arguments, what the message must contain
    ("gdn", "ragged", {"q": z(2, 150, 16)}, "q: expected a tensor [B, T, H, K], got shape [2, 150, 16]"),
    ("gdn", "ragged", {"q": None}, "q: expected a tensor [B, T, H, K], got None"),
    ("gdn", "ragged", {"k": z(2, 150, 2, 8)}, "k: expected a tensor [2, 150, 2, 16], got shape [2, 150, 2, 8]"),
    ("gdn", "ragged", {"v": z(2, 149, 4, 24)}, "v: expected a tensor [2, 150, HV, V], got shape [2, 149, 4, 24]"),
    ("gdn", "ragged", {"v": z(2, 150, 3, 24)}, "v: expected a number of heads (axis 2) that is a multiple of q's 2 heads, got 3"),
    ("gdn", "ragged", {"v": z(2, 150, 1, 24)}, "v: expected a number of heads (axis 2) that is a multiple of q's 2 heads, got 1"),
    ("gdn", "ragged", {"g": z(2, 150, 2)}, "g: expected a tensor [2, 150, 4], got shape [2, 150, 2]"),
    ("gdn", "ragged", {"g": None}, "g: expected a tensor [2, 150, 4], got None"),
    ("gdn", "ragged", {"beta": z(2, 150)}, "beta: expected a tensor [2, 150, 4], got shape [2, 150]"),
    ("gdn", "ragged", {"beta": None}, "beta: expected a tensor [2, 150, 4], got None"),
    ("delta-rule", "ragged", {"beta": None}, "beta: expected a tensor [2, 150, 4], got None"),
    ("kda", "ragged", {"g": z(2, 150, 4)}, "g: expected a tensor [2, 150, 4, 16], got shape [2, 150, 4]"),
    ("gdn2", "ragged", {"b": z(2, 150, 4)}, "b: expected a tensor [2, 150, 4, 16], got shape [2, 150, 4]"),
    ("gdn2", "ragged", {"b": z(2, 150, 2, 16)}, "b: expected a tensor [2, 150, 4, 16], got shape [2, 150, 2, 16]"),
    ("gdn2", "ragged", {"w": z(2, 150, 4, 16)}, "w: expected a tensor [2, 150, 4, 24], got shape [2, 150, 4, 16]"),
    ("gdn2", "ragged", {"w": None}, "w: expected a tensor [2, 150, 4, 24], got None"),
    ("gdn2", "ragged", {"g": z(2, 150, 2, 16)}, "g: expected a tensor [2, 150, 4, 16], got shape [2, 150, 2, 16]"),
    ("gdn2-recurrent", "ragged", {"b": None}, "b: expected a tensor [2, 150, 4, 16], got None"),
    ("gdn2", "ragged", {"b": z(2, 150, 4, 16, dtype=torch.long)}, "b: expected a dtype among"),
    ("gdn2", "ragged", {"w": z(2, 150, 4, 24, device="meta")}, "w: expected a tensor on cpu like q, got one on meta"),
    ("gdn2", "ragged", RAW | {"A_log": z(2)}, "A_log: expected a tensor of 4 elements, got shape [2]"),
    ("gdn2", "ragged", {"cp_context": 1, "return_intermediate_states": True}, "cp_context: expected a flash_delta.parallel"),
    ("comba", "ragged", {"p": z(2, 150, 4, 16)}, "p: expected a tensor [2, 150, 2, 16], got shape [2, 150, 4, 16]"),
    ("simple-gla", "ragged", {"g_gamma": z(2)}, "g_gamma: expected a tensor [4], got shape [2]"),
    ("gdn-recurrent", "ragged", {"gk": z(2, 150, 4)}, "gk: expected a tensor [B, T, HV, K], got shape [2, 150, 4]"),
    ("gdn-recurrent", "ragged", {"gv": z(2, 150, 4, 24)}, "gv: expected None"),
    ("gdn", "ragged", {"q": z(2, 150, 2, 16, dtype=torch.int32)}, "q: expected a dtype among"),
    ("gdn", "ragged", {"v": z(2, 150, 4, 24, dtype=torch.bfloat16)}, "v: expected torch.float32 like q, got torch.bfloat16"),
    ("kda", "ragged", {"k": z(2, 150, 2, 16, dtype=torch.float16)}, "k: expected torch.float32 like q, got torch.float16"),
    ("gdn-recurrent", "ragged", {"k": z(2, 150, 2, 16, dtype=torch.int32)}, "k: expected a dtype among"),
    ("gdn", "ragged", {"beta": z(2, 150, 4, dtype=torch.long)}, "beta: expected a dtype among"),
    ("gdn", "ragged", {"k": z(2, 150, 2, 16, device="meta")}, "k: expected a tensor on cpu like q, got one on meta"),
    ("gdn", "ragged", {"initial_state": z(3, 4, 16, 24)}, "initial_state: expected a tensor [2, 4, 16, 24], got shape [3,"),
    ("gdn", "ragged", {"state_v_first": True}, "initial_state: expected a tensor [2, 4, 24, 16], got shape [2, 4, 16, 24]"),
    ("gdn", "packed", {"initial_state": z(1, 4, 16, 24)}, "initial_state: expected a tensor [9, 4, 16, 24], got shape [1,"),
    ("gdn", "ragged", {"chunk_size": 128}, "chunk_size: expected one of 16, 32, 64, got 128"),
    ("gdn-recurrent", "ragged", {"beta": None, "allow_neg_eigval": True}, "allow_neg_eigval: expected None or False without beta, which is then 1, got True"),
    ("gdn", "ragged", RAW, "A_log: expected a tensor of 4 elements with use_gate_in_kernel=True, got None"),
    ("gdn", "ragged", RAW | {"A_log": z(3)}, "A_log: expected a tensor of 4 elements, got shape [3]"),
    ("gdn", "ragged", RAW | {"A_log": z(4), "dt_bias": z(64)}, "dt_bias: expected a tensor of 4 elements, got shape [64]"),
    ("kda", "ragged", RAW | {"A_log": z(4), "dt_bias": z(4)}, "dt_bias: expected a tensor of 64 elements, got shape [4]"),
    ("kda", "ragged", RAW | {"lower_bound": -5.5}, "lower_bound: expected a number in [-5, 0), got -5.5"),
    ("kda", "ragged", RAW | {"lower_bound": 0.0}, "lower_bound: expected a number in [-5, 0), got 0.0"),
    ("kda", "ragged", RAW | {"A_log": z(4), "safe_gate": True}, "lower_bound: expected a number in [-5, 0) with safe_gate"),
    ("gdn", "ragged", {"cp_context": 1}, "cp_context: expected a flash_delta.parallel.ContextParallel, got int"),
    ("gdn", "ragged", {"state_v_first": True, "transpose_state_layout": True}, "transpose_state_layout: expected None"),
    ("gdn", "ragged", {"cu_seqlens": torch.tensor([0, 150])}, "q: expected batch size 1 with cu_seqlens"),
    ("gdn", "ragged", {"cu_seqlens_cpu": torch.tensor([0, 150])}, "cu_seqlens_cpu: expected None (there is no cu_seqlens)"),
    ("gdn", "packed", {"cu_seqlens": z(10)}, "cu_seqlens: expected dtype torch.int32 or torch.int64, got torch.float32"),
    ("gdn", "packed", {"cu_seqlens": z(2, 5, dtype=torch.long)}, "cu_seqlens: expected a tensor [N + 1], got shape [2, 5]"),
    ("gdn", "packed", {"cu_seqlens": z(0, dtype=torch.long)}, "cu_seqlens: expected at least one bound, which is 0, got an empty tensor"),
    ("gdn", "packed", {"cu_seqlens": torch.tensor([1, 205])}, "cu_seqlens: expected 0 as the first bound, got 1"),
    ("gdn", "packed", {"cu_seqlens": torch.tensor([0, 9, 8])}, "cu_seqlens: expected bounds that do not decrease, got [0, 9, 8]"),
    ("gdn", "packed", {"cu_seqlens": torch.tensor([0, 206])}, "cu_seqlens: expected bounds up to T = 205, got 206"),
    ("gdn", "packed", {"cu_seqlens_cpu": [0, 5]}, "cu_seqlens_cpu: expected 10 bounds, got 2"),
    ("gdn", "all-empty", {"cu_seqlens_cpu": [0, 0, 0, 1]}, "cu_seqlens_cpu: expected the values of cu_seqlens, [0, 0, 0, 0]"),
    ("gdn", "packed", {"cu_seqlens": [0, 205]}, "cu_seqlens: expected a tensor or None, got list"),
    ("gdn", "ragged", RAW | {"A_log": 0.0}, "A_log: expected a tensor or None, got float"),
    ("gdn", "ragged", {"scale": "a"}, "scale: expected a number or None, got 'a'"),
    ("kda", "ragged", RAW | {"lower_bound": "a"}, "lower_bound: expected a number in [-5, 0), got 'a'"),
    ("gdn", "ragged", {"v": z(2, 150, 4, 0)}, "v: expected at least one head and one channel (axes 2 and 3), got shape"),
    ("gdn", "ragged", {"q": z(2, 150, 0, 16), "k": z(2, 150, 0, 16)}, "q: expected at least one head and one channel (axes"),
    ("gdn", "ragged", {"scale": torch.tensor(0.5)}, "scale: expected a number or None (o is proportional to it: multiply"),
    ("gdn", "ragged", {"q": z(2, 150, 2, 0), "k": z(2, 150, 2, 0)}, "q: expected at least one head and one channel (axes 2"),
    ("gdn-recurrent", "ragged", {"beta": None, "use_beta_sigmoid_in_kernel": True}, "beta: expected a tensor [2, 150, 4] with use_b"),
    ("gdn", "ragged", {"backend": "cuda"}, "backend: expected one of triton, hopper, torch, got 'cuda'"),
]  # fmt: skip


@pytest.mark.parametrize(("member", "case", "changes", "message"), BAD, ids=[f"{r[0]}-{'-'.join(r[2])}" for r in BAD])
def test_bad_input(member, case, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        MEMBERS[member].op(**(arguments(member, case) | changes))
    if "backend" not in changes:
        assert str(error.value).startswith(MEMBERS[member].name + ": ")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_good_bounds(dtype):
    x = arguments("gdn", "packed")
    bounds = x["cu_seqlens"]
    o, _ = flash_delta.chunk_gated_delta_rule(**x)
    for cu_seqlens_cpu in (bounds, bounds.tolist(), None):
        x |= {"cu_seqlens": bounds.to(dtype), "cu_seqlens_cpu": cu_seqlens_cpu}
        assert torch.equal(flash_delta.chunk_gated_delta_rule(**x)[0], o)


def test_gates_refuse_wrong_sizes():
    g = z(2, 5, 4, 8)
    with pytest.raises(ValueError, match=re.escape("fused_gdn_gate: A_log: expected a tensor of 4 elements")):
        flash_delta.fused_gdn_gate(z(2, 5, 4), z(3))
    with pytest.raises(ValueError, match=re.escape("fused_kda_gate: dt_bias: expected a tensor of 32 elements")):
        flash_delta.fused_kda_gate(g, z(4), z(8))
    with pytest.raises(ValueError, match=re.escape("fused_kda_gate: A_log: expected a tensor of 4 elements without")):
        flash_delta.fused_kda_gate(g)
    with pytest.raises(ValueError, match=re.escape("fused_kda_gate: lower_bound: expected a negative number")):
        flash_delta.fused_kda_gate(g, lower_bound=1.0)
    for call, message in (
        (lambda: flash_delta.fused_gdn_gate(g.numpy(), z(8)), "g: expected a tensor [..., HV], got ndarray"),
        (lambda: flash_delta.fused_gdn_gate(g.int(), z(8)), "g: expected a dtype among"),
        (lambda: flash_delta.fused_gdn_gate(g, 0.0), "A_log: expected a tensor of 8 elements, got float"),
        (lambda: flash_delta.fused_gdn_gate(g, None), "A_log: expected a tensor of 8 elements, got None"),
        (lambda: flash_delta.fused_gdn_gate(g, z(8).to("meta")), "A_log: expected a tensor on cpu like g, got one on"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"fused_gdn_gate: {message}")):
            call()


def test_gate_formulas():
    g, A_log, bias = torch.randn(3, 5, 4, 8), torch.randn(4), torch.randn(32)
    x = (g + bias.view(4, 8)).double()
    rate = A_log.double().exp()[:, None]
    softplus = -rate * torch.log1p(x.exp())
    assert torch.allclose(flash_delta.naive_kda_gate(g, A_log, bias).double(), softplus)
    assert torch.allclose(flash_delta.fused_kda_gate(g, A_log, bias).double(), softplus)
    bounded = -5 / (1 + (-rate * x).exp())
    assert torch.allclose(flash_delta.fused_kda_gate(g, A_log, bias, lower_bound=-5.0).double(), bounded)
    bounded = -2 / (1 + (-x).exp())
    assert torch.allclose(flash_delta.naive_kda_lowerbound_gate(g, None, bias, -2.0).double(), bounded)
    scalar = -A_log.double().exp() * torch.log1p((g[..., 0].double() + bias[:4]).exp())
    assert torch.allclose(flash_delta.fused_gdn_gate(g[..., 0], A_log, bias[:4]).double(), scalar)
    assert flash_delta.fused_gdn_gate(g[..., 0], A_log, output_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_backend_wish_is_obeyed_or_refused(monkeypatch):
    x = arguments("kda")
    assert torch.equal(flash_delta.chunk_kda(**x, backend="torch")[0], flash_delta.chunk_kda(**x)[0])
    monkeypatch.setenv(ENVIRONMENT, "nonsense")
    with pytest.raises(ValueError, match="FLASH_DELTA_BACKEND: expected one of triton, hopper, torch, got 'nonsense'"):
        flash_delta.chunk_kda(**x)
    flash_delta.chunk_kda(**x, backend="torch")  # the argument goes before the environment


def test_explain():
    x = arguments("kda") | {"return_intermediate_states": True, "chunk_size": 32}
    explanation = flash_delta.explain(flash_delta.chunk_kda, **x)
    assert explanation.backend == "torch"
    first, second, third, fourth = str(explanation).split("\n")
    assert (first, second) == ("chunk_kda would run on backend 'torch'", "  torch: chosen, the first that can")
    assert third.startswith("  triton: cannot: it ")
    assert fourth == "  hopper: cannot: it needs a GPU, the tensors are on the CPU"
    assert "as asked for" in str(flash_delta.explain(flash_delta.chunk_kda, **x, backend="torch"))
    with pytest.raises(ValueError, match="chunk_kda: beta: expected"):
        flash_delta.explain(flash_delta.chunk_kda, **(x | {"beta": None}))
    for op in (flash_delta.fused_kda_gate, causal_conv1d, "chunk_kda"):
        with pytest.raises(ValueError, match="explain: op: expected one of the delta rule ops of flash_delta, got"):
            flash_delta.explain(op, **x)


def test_a_backend_that_is_not_installed_is_explained(monkeypatch):
    """On "meta", where nothing is said without asking the backend."""
    x = {n: t.to("meta") if torch.is_tensor(t) else t for n, t in arguments("kda").items()}
    nowhere = backends._entries["triton"]._replace(rule="flash_delta.kernels.nowhere")
    monkeypatch.setitem(backends._entries, "triton", nowhere)
    explanation = flash_delta.explain(flash_delta.chunk_kda, **x, backend="triton")
    assert explanation.backend is None
    assert explanation.reasons["triton"] == "cannot: flash_delta.kernels.nowhere is not installed"


def test_choice_among_backends(monkeypatch):
    """The first that can; a wish goes before, and every other backend's reason is told."""
    refusals, remarks = {"first": None, "second": None}, {}
    monkeypatch.setattr(backends, "_entries", dict.fromkeys(refusals, backends.Entry("", None, lambda: True)))
    monkeypatch.setattr(
        _backend,
        "load_backend",
        lambda name: SimpleNamespace(
            unsupported=lambda _: refusals[name], remark=remarks.get, preference=lambda _: (0, None)
        ),
    )
    x = arguments("kda")

    def explain(wish=None):
        return flash_delta.explain(flash_delta.chunk_kda, **x, backend=wish)

    problem = explain().problem
    assert _backend.choose_backend(problem, None) == explain().backend == "first"
    assert explain().reasons == {"first": "chosen, the first that can", "second": "can, but 'first' is preferred"}
    assert _backend.choose_backend(problem, "second") == explain("second").backend == "second"
    assert explain("second").reasons["first"] == "can, but 'second' was asked for"
    remarks[problem] = "in haste"
    assert explain().reasons["first"] == "chosen, the first that can; in haste"
    refusals["first"] = "K is odd"
    assert _backend.choose_backend(problem, None) == explain().backend == "second"
    assert explain().reasons["first"] == "cannot: K is odd"
    with pytest.raises(ValueError, match="backend 'first' cannot run this: K is odd"):
        _backend.choose_backend(problem, "first")
    assert explain("first").backend is None


def test_bounds_that_only_a_device_knows_are_refused_not_synchronised():
    x = {n: t.to("meta") if torch.is_tensor(t) else t for n, t in arguments("gdn", "packed").items()}
    explanation = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **x)
    assert explanation.backend is None
    assert "give cu_seqlens_cpu" in str(explanation)
    with pytest.raises(ValueError, match=r"no backend can run this. .*'torch': .* give cu_seqlens_cpu"):
        flash_delta.chunk_gated_delta_rule(**x)
    with pytest.raises(ValueError, match=r"backend 'torch' cannot run this: .* give cu_seqlens_cpu"):
        flash_delta.chunk_gated_delta_rule(**x, backend="torch")
    host = [0, *torch.tensor(BY_NAME["packed"].lengths).cumsum(0).tolist()]
    assert flash_delta.explain(flash_delta.chunk_gated_delta_rule, **x, cu_seqlens_cpu=host).backend == "torch"


@pytest.mark.parametrize("recurrent", [False, True])
def test_in_float64_the_host_waits_once_for_bounds_on_a_device(recurrent, monkeypatch):
    """On a CPU, whose bounds the checks no longer read."""
    x = make_inputs(BY_NAME["packed"], MEMBERS["gdn"], torch.float64)
    op = flash_delta.fused_recurrent_gated_delta_rule if recurrent else flash_delta.chunk_gated_delta_rule

    def gradients():
        o, state = op(**x)
        return o, state, *torch.autograd.grad(o.nansum() + state.sum(), [x["q"], x["initial_state"]])

    want, waits, read = gradients(), [], rule.read_lengths

    def read_lengths(op, x, bounds, wait=False):
        waits.append(wait)
        return read(op, x, bounds, wait) if wait else None

    monkeypatch.setattr(rule, "read_lengths", read_lengths)
    monkeypatch.setattr(_function, "read_lengths", read_lengths)
    assert "it waits for the device once" in flash_delta.explain(op, **x).reasons["torch"]
    waits.clear()
    assert all(torch.equal(a, b) for a, b in zip(want, gradients(), strict=True))
    assert waits == [False, True], "the backward pass has the lengths of the forward pass"
    wrong = x | {"cu_seqlens": x["cu_seqlens"] + 300}
    with pytest.raises(ValueError, match="cu_seqlens: expected 0 as the first bound, got 300"):
        op(**wrong)
    x = {n: t.float() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in x.items()}
    with pytest.raises(ValueError, match="give cu_seqlens_cpu"):
        op(**x, backend="torch")


class OnGPU(torch.Tensor):
    """Says of itself what an op asks before it remembers a call."""

    is_cuda = True


@pytest.fixture
def ran(monkeypatch):
    """What reaches the torch backend, as the choice of every call."""
    found = []

    def forward(problem, x, known):
        found.append((problem, known))
        return backend.forward(problem._replace(lengths=problem.lengths or (problem.T,)), x)

    module = SimpleNamespace(forward=forward, backward=backend.backward)
    monkeypatch.setattr(_function, "choose_backend", lambda problem, wish: "torch")
    monkeypatch.setattr(_function, "load_backend", lambda name: module)
    monkeypatch.setattr(_known_calls, "calls", _known_calls.Remembered())
    return found


def call(found, x, cu_seqlens_cpu=None, **options):
    options = Options("chunk_gated_delta_rule", ("scalar", False, None), "decayed", **options)._asdict()
    _function.run(x, options, cu_seqlens_cpu, output_final_state=False, backend=None)
    return found[-1]


def inputs_on_gpu(T=6, **changes):
    q, v, g = torch.randn(1, T, 2, 8), torch.randn(1, T, 4, 8), -torch.rand(1, T, 4)
    x = Inputs(q, q.clone(), v, g, torch.rand(1, T, 4), cu_seqlens=torch.tensor([0, 2, T], dtype=torch.int32))
    return x._replace(q=q.as_subclass(OnGPU), **changes)


def test_calls_that_differ_in_values_only_are_one_known_call(ran):
    x = inputs_on_gpu()
    _, known = call(ran, x)
    assert call(ran, inputs_on_gpu())[1] is known
    wide = torch.randn(1, 6, 4, 16)[..., :8]
    others = [
        call(ran, inputs_on_gpu(T=7)),
        call(ran, x._replace(v=wide)),
        call(ran, x._replace(v=x.v.half(), k=x.k.half(), q=x.q.half())),
        call(ran, x._replace(g=x.g.clone().requires_grad_())),
        call(ran, x, scale=0.5),
        call(ran, x, disable_recompute=True),
        call(ran, x, [0, 2, 6]),
    ]
    assert len({id(other) for _, other in others} | {id(known)}) == 8
    with torch.no_grad():
        assert call(ran, x._replace(g=x.g.clone().requires_grad_()))[1] is known, "nobody asks for its gradient"
    assert [p.needs_grad for p, _ in others[3:5]] == [True, False]


def test_what_values_decide_is_not_remembered(ran):
    x = inputs_on_gpu()
    assert call(ran, x, [0, 2, 6])[0].lengths == (2, 4)
    moved = x._replace(cu_seqlens=torch.tensor([0, 5, 6], dtype=torch.int32))
    assert call(ran, moved, [0, 5, 6])[0].lengths == (5, 1)
    assert ran[0][1] is ran[1][1]
    for _ in range(2):
        with pytest.raises(ValueError, match="k: expected a tensor"):
            call(ran, x._replace(k=[1.0]))
        with pytest.raises(ValueError, match="chunk_size: expected one of"):
            call(ran, x, chunk_size=[64])
