"""What the ops promise beyond their numbers: exact equalities, causality, packing, layouts, strides, dtypes."""

import warnings

import pytest
import torch

import flash_delta
from flash_delta.testing import CASES, MEMBERS, assert_accurate, make_inputs, run
from flash_delta.testing.cases import OF_UPDATES

BY_NAME = {case.name: case for case in CASES}
MEMBER = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
GATED = pytest.mark.parametrize("name", ["gdn", "kda", "gdn2"])
TOKENS = ("q", "k", "v", "g", "beta", "p", "b", "w")


def rows_of(member, name, start, stop=None):
    """The rows of these tokens in an input, its gradient or o. Gradients are named "dk" and so on."""
    n = member.updates if name.removeprefix("d") in OF_UPDATES else 1
    return slice(n * start, None if stop is None else n * stop)


@MEMBER
def test_identical_inputs_give_bitwise_identical_results(member):
    inputs = make_inputs(BY_NAME["in-kernel"], member, torch.float32)
    first, second = run(member, inputs), run(member, inputs)
    assert all(torch.equal(first[n], second[n]) for n in first)


@MEMBER
def test_packed_sequences_do_not_see_each_other(member):
    """One sequence's tokens are replaced: nothing of the others moves, bitwise, forward and backward."""
    case = BY_NAME["packed"]
    inputs = make_inputs(case, member, torch.float32)
    start = sum(case.lengths[:5])  # the sequence of 64 tokens
    other = {n: t.detach().clone() if torch.is_tensor(t) else t for n, t in inputs.items()}
    for n in ("q", "v"):
        rows = rows_of(member, n, start, start + 64)
        other[n][:, rows] = torch.randn_like(other[n][:, rows])
    other = {n: t.requires_grad_(inputs[n].requires_grad) if torch.is_tensor(t) else t for n, t in other.items()}
    a, b = run(member, inputs), run(member, other)
    for n in ("o", "dq", "dk", "dv"):
        rows = rows_of(member, n, start, start + 64)
        assert not torch.equal(a[n][:, rows], b[n][:, rows])
        a[n][:, rows] = b[n][:, rows] = 0
        assert torch.equal(a[n], b[n]), n
    keep = torch.arange(len(case.lengths)) != 5
    assert torch.equal(a["final_state"][keep], b["final_state"][keep])


@MEMBER
def test_rows_behind_the_last_sequence_are_zeros(member):
    case = BY_NAME["packed"]
    got = run(member, make_inputs(case, member, torch.float32))
    for n in got.keys() & {"o", *(f"d{name}" for name in TOKENS)}:
        assert not got[n][:, rows_of(member, n, sum(case.lengths))].any(), n


@MEMBER
def test_the_future_moves_nothing_of_the_past(member):
    """Perturb all inputs from token P on: o before P stays, bitwise; so do gradients of a loss before P (R13)."""
    case = BY_NAME["ragged"]
    inputs = make_inputs(case, member, torch.float32)
    for P in (1, 17, 64, 100):
        other = {n: t.detach().clone() if torch.is_tensor(t) else t for n, t in inputs.items()}
        tokens = [n for n in TOKENS if other.get(n) is not None]
        for n in tokens:
            other[n][:, rows_of(member, n, P)] *= 1.37
            other[n].requires_grad_()
        results = []
        for x in (inputs, other):
            o, _ = member.op(**x)
            gradients = torch.autograd.grad(o[:, :P].sum(), [x[n] for n in tokens])
            parts = (d[:, rows_of(member, n, 0, P)] for n, d in zip(tokens, gradients, strict=True))
            results.append([o[:, :P], *parts])
        for name, a, b in zip(["o", *tokens], *results, strict=True):
            assert torch.equal(a, b), (P, name)


@GATED
def test_decoding_token_by_token_is_bitwise_one_call(name):
    member = MEMBERS[f"{name}-recurrent"]
    x = make_inputs(BY_NAME["in-kernel"], member, torch.float32)
    x = {n: t.detach() if torch.is_tensor(t) else t for n, t in x.items()}
    o, _ = member.op(**x)
    state, rows = x["initial_state"], []
    for t in range(20):
        now = {n: x[n][:, t : t + 1] for n in TOKENS if n in x}
        row, state = member.op(**(x | now | {"initial_state": state}))
        rows.append(row)
    assert torch.equal(torch.cat(rows, dim=1), o[:, :20])
    x = {n: t[:, :20] if n in TOKENS else t for n, t in x.items()}
    assert torch.equal(member.op(**x)[1], state)


@GATED
def test_chunked_prefill_continues_bitwise_at_chunk_boundaries(name):
    member = MEMBERS[name]
    x = make_inputs(BY_NAME["ragged"], member, torch.float32)
    x = {n: t.detach() if torch.is_tensor(t) else t for n, t in x.items()}
    o, final_state = member.op(**x)
    tokens = [n for n in TOKENS if n in x]
    head, state = member.op(**(x | {n: x[n][:, :64] for n in tokens}))
    tail, state = member.op(**(x | {n: x[n][:, 64:] for n in tokens} | {"initial_state": state}))
    assert torch.equal(torch.cat([head, tail], 1), o)
    assert torch.equal(state, final_state)


@MEMBER
def test_strided_inputs_and_gradients_are_not_misread(member):
    inputs = make_inputs(BY_NAME["in-kernel"], member, torch.float64)
    strided = {}
    for n, t in inputs.items():
        if torch.is_tensor(t) and t.dim() > 2:  # every second row of a transposed, padded buffer
            buffer = torch.full((t.shape[1] * 2, t.shape[0], *t.shape[2:]), float("nan"), dtype=t.dtype)
            view = buffer.transpose(0, 1)[:, ::2]
            view.copy_(t.detach())
            t = view.detach().requires_grad_()
        strided[n] = t
    want, got = run(member, inputs), run(member, strided)
    assert all(torch.equal(want[n], got[n]) for n in want)


@pytest.mark.parametrize("disable_recompute", [False, True])
@MEMBER
def test_a_retained_graph_is_walked_twice(member, disable_recompute):
    """Two losses on one call: the second backward pass finds what the first one found, to the bit."""
    inputs = make_inputs(BY_NAME["in-kernel"], member, torch.float32)
    if "disable_recompute" in member.options:
        inputs["disable_recompute"] = disable_recompute
    o, final_state = member.op(**inputs)
    wanted = [t for t in inputs.values() if torch.is_tensor(t) and t.requires_grad]
    loss = o.square().sum() + final_state.sum()
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, wanted)))


@pytest.mark.parametrize("case", ["in-kernel", "in-kernel-packed", "state-v-first"])
@MEMBER
def test_results_may_be_written_to(member, case):
    """Training with resets does so to the states that it hands on."""
    inputs = make_inputs(BY_NAME[case], member, torch.float32)
    wanted = [t for t in inputs.values() if torch.is_tensor(t) and t.requires_grad]
    gradients = []
    for double in (lambda x: x * 2, lambda x: x.mul_(2)):
        o, final_state = map(double, member.op(**inputs))
        gradients.append(torch.autograd.grad(o.square().sum() + final_state.square().sum(), wanted))
    assert all(map(torch.equal, *gradients))


@GATED
def test_state_layouts_are_transposes_of_each_other(name):
    x = make_inputs(BY_NAME["ragged"], MEMBERS[name], torch.float32)
    v_first = x | {"initial_state": x["initial_state"].mT, "state_v_first": True}
    (o, state), (o2, state2) = MEMBERS[name].op(**x), MEMBERS[name].op(**v_first)
    assert torch.equal(o, o2)
    assert torch.equal(state, state2.mT)
    old_name = {n: t for n, t in v_first.items() if n != "state_v_first"} | {"transpose_state_layout": True}
    with pytest.warns(DeprecationWarning, match="is the old name of state_v_first") as said:
        assert torch.equal(MEMBERS[name].op(**old_name)[1], state2)
    assert [warning.filename for warning in said] == [__file__]


def test_equal_channels_are_the_scalar_gate():
    x = make_inputs(BY_NAME["ragged"], MEMBERS["gdn"], torch.float64)
    o, state = flash_delta.chunk_gated_delta_rule(**x)
    per_channel = x | {"g": x["g"].unsqueeze(-1).expand(*x["g"].shape, x["q"].shape[-1])}
    o2, state2 = flash_delta.chunk_kda(**per_channel)
    assert_accurate("o", o2, o, torch.float64)
    assert_accurate("state", state2, state, torch.float64)


def test_recurrent_gate_forms():
    x = make_inputs(BY_NAME["ragged"], MEMBERS["gdn-recurrent"], torch.float64)
    g = x.pop("g")
    K = x["q"].shape[-1]
    op = flash_delta.fused_recurrent_gated_delta_rule
    o = op(**x, g=g)[0]
    assert_accurate("gk", op(**x, gk=g.unsqueeze(-1).expand(*g.shape, K))[0], o, torch.float64)
    assert_accurate("g + gk", op(**x, g=g / 2, gk=(g / 2).unsqueeze(-1).expand(*g.shape, K))[0], o, torch.float64)
    assert_accurate("no gate", op(**x)[0], op(**x, g=torch.zeros_like(g))[0], torch.float64)
    del x["beta"]
    assert_accurate("no beta", op(**x)[0], op(**x, beta=torch.ones_like(g))[0], torch.float64)


def test_simple_gla_gate_forms():
    x = make_inputs(BY_NAME["ragged"], MEMBERS["simple-gla"], torch.float64)
    g = x.pop("g")
    gamma = -torch.rand(g.shape[-1], dtype=g.dtype)
    op = flash_delta.chunk_simple_gla
    assert_accurate("gamma", op(**x, g_gamma=gamma)[0], op(**x, g=gamma.expand(g.shape))[0], torch.float64)
    assert_accurate("both", op(**x, g=g, g_gamma=gamma)[0], op(**x, g=g + gamma)[0], torch.float64)
    assert_accurate("none", op(**x)[0], op(**x, g=torch.zeros_like(g))[0], torch.float64)


def test_comba_without_erase_keys_erases_with_k():
    x = make_inputs(BY_NAME["ragged"], MEMBERS["comba"], torch.float64)
    own = run(MEMBERS["comba"], x | {"p": x["k"].detach().clone().requires_grad_()})
    o, _ = flash_delta.chunk_comba(**(x | {"p": x["k"]}))
    shared, _ = flash_delta.chunk_comba(**(x | {"p": None}))
    assert torch.equal(shared, own["o"])
    (want,), (got,) = (torch.autograd.grad(y.sum(), x["k"]) for y in (o, shared))
    assert_accurate("dk", got, want, torch.float64)


def test_intermediate_states_are_those_of_shorter_calls():
    x = make_inputs(BY_NAME["ragged"], MEMBERS["kda"], torch.float32)
    _, _, states = flash_delta.chunk_kda(**x, return_intermediate_states=True)
    assert states.shape == (2, 3, 4, 16, 24)
    assert torch.equal(states[:, 0], x["initial_state"])
    turned = x | {"initial_state": x["initial_state"].mT, "state_v_first": True}
    turned = flash_delta.chunk_kda(**turned, return_intermediate_states=True)[2]
    assert turned.is_contiguous()
    assert torch.equal(turned, states.mT)
    part = x | {n: x[n][:, :128] for n in ("q", "k", "v", "g", "beta")}
    assert torch.equal(states[:, 2], flash_delta.chunk_kda(**part)[1])
    packed = make_inputs(BY_NAME["packed"], MEMBERS["kda"], torch.bfloat16)
    states = flash_delta.chunk_kda(**packed, return_intermediate_states=True)[2]
    assert states.shape == (1, 6, 4, 16, 24)  # 1, 1, 1, 2 and 1 chunks; empty sequences have none
    assert states.dtype == torch.bfloat16
    assert torch.equal(states[0, 0], packed["initial_state"][1].to(torch.bfloat16))


@GATED
def test_dtypes_of_results(name):
    x = make_inputs(BY_NAME["in-kernel"], MEMBERS[name], torch.bfloat16)
    x = {n: t.detach().to(torch.bfloat16).requires_grad_() if torch.is_tensor(t) else t for n, t in x.items()}
    o, state = MEMBERS[name].op(**x)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    (o.float().sum() + state.sum()).backward()
    for n, t in x.items():
        if torch.is_tensor(t):
            assert t.grad.dtype == t.dtype, n
            assert t.grad.shape == t.shape, n
    assert MEMBERS[name].op(**(x | {"output_final_state": False}))[1] is None


def test_parameter_gradients_are_summed_before_the_cast():
    """16,384 equal contributions in bfloat16 would stall at 256."""
    T = 16384
    one = torch.ones(1, T, 1, 8, dtype=torch.bfloat16)
    dt_bias = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    g = torch.full((1, T, 1), -2.0, dtype=torch.bfloat16)
    for gate in (flash_delta.fused_gdn_gate, flash_delta.naive_gdn_gate):
        dt_bias.grad = None
        gate(g, torch.zeros(1), dt_bias).sum().backward()
        assert dt_bias.grad.item() == pytest.approx(-T * torch.sigmoid(torch.tensor(-2.0)).item(), rel=2**-8)
    beta = torch.zeros(1, T, 1, dtype=torch.bfloat16)
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        bias = torch.zeros(1, dtype=dtype, requires_grad=True)
        x = (t.to(dtype) for t in (one, one, one, g, beta + 0.5))
        kwargs = {"use_gate_in_kernel": True, "A_log": torch.zeros(1, dtype=dtype), "dt_bias": bias}
        o, _ = flash_delta.chunk_gated_delta_rule(*x, **kwargs, use_qk_l2norm_in_kernel=True)
        o.sum().backward()
        grads.append(bias.grad)
    assert_accurate("ddt_bias", *grads, torch.bfloat16)


def test_autocast_does_not_lower_the_precision():
    x = make_inputs(BY_NAME["ragged"], MEMBERS["gdn"], torch.float32)
    want = run(MEMBERS["gdn"], x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(MEMBERS["gdn"], x)
    assert all(torch.equal(want[n], got[n]) for n in want)


@GATED
def test_saved_memory(name):
    """The backward pass keeps the inputs and, with disable_recompute, A and one state per chunk; no more."""
    member, T, H, HV, D = MEMBERS[name], 1024, 2, 4, 64
    shape = (1, T, HV, D) if member.gate == "channel" else (1, T, HV)
    x = {"q": torch.randn(1, T, H, D), "k": torch.randn(1, T, H, D), "v": torch.randn(1, T, HV, D)}
    widths = {"b": (D,), "w": (D,)} if member.channel_strength else {"beta": ()}
    x |= {"g": -torch.rand(shape)} | {n: torch.rand(1, T, HV, *width) for n, width in widths.items()}
    inputs = sum(t.numel() for t in x.values())
    per_chunk = T // 64 * HV * (64 * 64 + D * D)  # A and one state
    for disable_recompute, bound in ((False, inputs + per_chunk // 4), (True, inputs + per_chunk)):
        saved: list[torch.Tensor] = []

        def keep(t: torch.Tensor, kept: list[torch.Tensor] = saved) -> torch.Tensor:
            kept.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            member.op(**{n: t.requires_grad_() for n, t in x.items()}, disable_recompute=disable_recompute)
        assert saved
        assert sum(t.numel() for t in saved) <= bound


def test_a_loss_on_the_state_alone():
    x = make_inputs(BY_NAME["ragged"], MEMBERS["gdn"], torch.float64)
    _, state = flash_delta.chunk_gated_delta_rule(**x)
    (dq, dk) = torch.autograd.grad(state.sum(), [x["q"], x["k"]])
    assert torch.equal(dq, torch.zeros_like(dq))
    assert dk.norm() > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["ragged", "packed", "in-kernel-packed"])
@MEMBER
def test_no_op_waits_for_the_gpu(member, case):
    torch.use_deterministic_algorithms(False)  # a cumulative sum on a GPU is refused under it
    inputs = make_inputs(BY_NAME[case], member, torch.float32, "cuda")
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        o, final_state = member.op(**inputs)
        (o.sum() + final_state.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
