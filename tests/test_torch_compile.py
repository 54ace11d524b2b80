"""Under torch.compile every op is one operator: same numbers, no graph break, no compilation for another length."""

import os
import re
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from tiny_layers import DELTA_LAYERS, D, random
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import flash_delta
from flash_delta import backend as backends
from flash_delta.ops import _function
from flash_delta.ops._operators import rule
from flash_delta.ops._operators.define import take
from flash_delta.problem import Inputs
from flash_delta.reference import backend
from flash_delta.testing import CASES, MEMBERS, make_inputs, run
from flash_delta.testing.accuracy import with_gradients

BY_NAME = {case.name: case for case in CASES}
MEMBER = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def compiled(op, backend="aot_eager"):
    """``op`` in one graph for all sizes; the counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(op, fullgraph=True, dynamic=True, backend=counter), counter


def inputs_of(name, case, dtype=torch.float32):
    return make_inputs(BY_NAME[case], MEMBERS[name], dtype)


def assert_same(want, got):
    assert want.keys() == got.keys()
    different = [n for n in want if not torch.equal(want[n], got[n])]
    assert not different


def operator_arguments(member, x, needs_grad):
    """What ``call_operator`` hands to the operator."""
    problem = flash_delta.explain(member.op, **x).problem._replace(needs_grad=needs_grad)
    tensors = (x.get(name) for name in (*Inputs._fields, "cu_seqlens_cpu"))
    return (*tensors, *take(problem, rule.Fields), None)


@pytest.mark.parametrize("case", ["ragged", "no-initial-state", "in-kernel-packed"])
@MEMBER
def test_compiled_is_eager(member, case):
    x = make_inputs(BY_NAME[case], member, torch.float32)
    op, counter = compiled(member.op)
    assert_same(run(member, x), with_gradients(*op(**x), x, torch.float32))
    assert counter.frame_count == 1


@pytest.mark.parametrize("options", [{"state_v_first": True}, {"scale": 0.3}, {"disable_recompute": True}], ids=str)
def test_options_reach_the_backend(options):
    x = inputs_of("kda", "lower-bound") | options
    if "state_v_first" in options:
        x["initial_state"] = x["initial_state"].detach().mT.contiguous().requires_grad_()
    op, _ = compiled(flash_delta.chunk_kda)
    assert_same(run(MEMBERS["kda"], x), with_gradients(*op(**x), x, torch.float32))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("case", ["in-kernel-packed", "saved"])
def test_kernels_are_not_traced(case):
    """A tracer learns from ``empty_saved`` what they save."""
    x = make_inputs(replace(BY_NAME[case], B=1, H=1, HV=2), MEMBERS["gdn"], torch.float32)
    op, counter = compiled(partial(flash_delta.chunk_gated_delta_rule, backend="triton"))
    assert_same(run(MEMBERS["gdn"], x, "triton"), with_gradients(*op(**x), x, torch.float32))
    assert counter.frame_count == 1


def test_without_gradients():
    x = {n: t.detach() if torch.is_tensor(t) else t for n, t in inputs_of("gdn-recurrent", "one-token").items()}
    op, counter = compiled(flash_delta.fused_recurrent_gated_delta_rule)
    for _ in range(3):  # a decoding loop
        (want, _), (got, x["initial_state"]) = flash_delta.fused_recurrent_gated_delta_rule(**x), op(**x)
        assert torch.equal(want, got)
    assert counter.frame_count == 1
    assert op(**(x | {"output_final_state": False}))[1] is None


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_lengths_compile_twice_at_most(packed):
    """Once more when two sizes that were equal no longer are; then never."""
    op, counter = compiled(flash_delta.chunk_gated_delta_rule)
    for lengths in ((70, 70), (64,) * 3, (129,) * 4, (20,) * 5, (33, 33), (128,) * 6):
        N, T = len(lengths), lengths[0]
        B, T, bounds = (1, N * T + 1, torch.arange(N + 1) * T) if packed else (N, T, None)
        q, v, g = torch.randn(B, T, 2, 16), torch.randn(B, T, 4, 8, requires_grad=True), -torch.rand(B, T, 4)
        host = {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds} if packed else {}
        x = {"q": q, "k": q, "v": v, "g": g, "beta": g.exp(), "use_qk_l2norm_in_kernel": True} | host
        (want,), (got,) = (torch.autograd.grad(f(**x)[0].sum(), v) for f in (flash_delta.chunk_gated_delta_rule, op))
        assert torch.equal(want, got)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("case", ["ragged", "packed", "state-v-first"])
def test_chunk_states(case):
    """How many a packed row has is known only when it runs."""
    x = inputs_of("kda", case) | {"return_intermediate_states": True}
    op, _ = compiled(flash_delta.chunk_kda)
    want, got = flash_delta.chunk_kda(**x), op(**x)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert not got[2].requires_grad
    gradients = (torch.autograd.grad(y[0].sum(), x["q"])[0] for y in (want, got))
    assert torch.equal(*gradients)


def test_a_layer_has_no_graph_break():
    torch.manual_seed(0)
    layer = DELTA_LAYERS["gdn-grouped"]().double()
    x = random(2, 20, D).requires_grad_()
    gradients = []
    for f in (layer, compiled(layer)[0]):
        y = f(x)
        gradients.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for want, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gdn-grouped", "kda"])
def test_a_layer_may_be_compiled_before_it_ever_ran(name, monkeypatch):
    """Backends are loaded when they are asked for, and a tracer follows no import."""
    for module in backends._entries["torch"][:2]:
        monkeypatch.delitem(sys.modules, module, raising=False)
    layer, x = DELTA_LAYERS[name]().double(), random(2, 9, D)
    assert torch.equal(compiled(layer)[0](x), layer(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, on importing its compiler
def test_inductor():
    """What stands around the op is fused; the op's strides are what the compiler was told."""
    x = inputs_of("gdn", "in-kernel")

    def layer(q, **others):
        o, final_state = flash_delta.chunk_gated_delta_rule(q=q * 2, **others)
        return o.mT * 2, final_state

    op, _ = compiled(layer, "inductor")
    with torch._functorch.config.patch(enable_autograd_cache=False):  # on disk, it outlives a change of our operators
        want, got = (with_gradients(*f(**x), x, torch.float32) for f in (layer, op))
    for name in want:
        torch.testing.assert_close(got[name], want[name])


def test_autocast_does_not_lower_the_precision():
    x = inputs_of("gdn", "ragged")
    op, _ = compiled(flash_delta.chunk_gated_delta_rule)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = with_gradients(*op(**x), x, torch.float32)
    assert_same(run(MEMBERS["gdn"], x), got)


def test_what_a_backend_can_foresee_is_saved(monkeypatch):
    """The torch backend saves nothing while compiling; one with ``empty_saved`` gets its tensors back."""
    x = inputs_of("gdn", "ragged")
    want, saved = run(MEMBERS["gdn"], x), []
    keep = backend.backward

    def backward(problem, x, tensors, do, dfinal, known):
        saved.append(tensors)
        return keep(problem, x, tensors, do, dfinal, known)

    def empty_saved(p, x):  # T = 150 is one segment: the state at its start
        return (x.v.new_empty(p.B, p.H, p.HV // p.H, p.K, p.V),)

    monkeypatch.setattr(backend, "backward", backward)
    assert_same(want, with_gradients(*compiled(flash_delta.chunk_gated_delta_rule)[0](**x), x, torch.float32))
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "empty_saved", empty_saved, raising=False)
    assert_same(want, with_gradients(*compiled(flash_delta.chunk_gated_delta_rule)[0](**x), x, torch.float32))
    assert [len(tensors) for tensors in saved] == [0, 1]


@pytest.mark.parametrize(("name", "case"), [("gdn", "in-kernel"), ("comba", "packed"), ("kda-recurrent", "ragged")])
def test_operators_are_what_they_say(name, case):
    member, x = MEMBERS[name], inputs_of(name, case)
    for n in ("q", "k", "v", "p", "g", "beta"):  # rows behind the sequences: opcheck compares with ==
        x = x | ({n: x[n].detach().nan_to_num().requires_grad_()} if n in x else {})
    arguments = operator_arguments(member, x, needs_grad=True)
    torch.library.opcheck(torch.ops.flash_delta.delta_rule.default, arguments)
    count = len(Inputs._fields) + 1
    tensors = [t if t is None else t.detach() for t in arguments[:count]]
    behind = ([], torch.randn(x["v"].shape), None, *arguments[count:])
    torch.library.opcheck(torch.ops.flash_delta.delta_rule_backward.default, (*tensors, *behind))


def targets_of(graph_module):
    return [str(node.target) for node in graph_module.graph.nodes if "flash_delta" in str(node.target)]


def test_a_compiled_graph_has_only_operators_without_a_derivative():
    """One each way. Such a call enters Python once."""
    found, x = [], inputs_of("gdn", "ragged")

    def compiler(graph_module, _):
        found.append(targets_of(graph_module))
        return make_boxed_func(graph_module.forward)

    both = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    op = torch.compile(flash_delta.chunk_gated_delta_rule, fullgraph=True, backend=both)
    assert_same(run(MEMBERS["gdn"], x), with_gradients(*op(**x), x, torch.float32))
    assert found == [["flash_delta.delta_rule_forward.default"], ["flash_delta.delta_rule_backward.default"]]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, where it exports
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs(strict):
    """A program has a derivative, and takes other lengths. A decomposed one has the same results, and no derivative."""
    layer, x = DELTA_LAYERS["gdn-grouped"]().double(), random(2, 40, D)
    sizes = ({1: torch.export.Dim("T", min=20, max=4096)},)
    program = torch.export.export(layer, (x,), dynamic_shapes=sizes, strict=strict)
    assert targets_of(program) == ["flash_delta.delta_rule.default"]
    module, longer = program.module(), random(2, 55, D).requires_grad_()
    want, got = layer(longer), module(longer)
    torch.testing.assert_close(got, want)
    for d, e in zip(*(torch.autograd.grad(y.square().sum(), longer) for y in (want, got)), strict=True):
        torch.testing.assert_close(d, e)
    low = program.run_decompositions()
    assert targets_of(low) == ["flash_delta.delta_rule_forward.default"]
    with torch.no_grad():
        torch.testing.assert_close(low.module()(longer), want)


BAD = [  # member, changed arguments, what the message must contain
    ("kda", {"beta": torch.zeros(2, 150)}, "chunk_kda: beta: expected a tensor [2, 150, 4]"),
    ("kda", {"k": torch.zeros(2, 149, 2, 16)}, "chunk_kda: k: expected a tensor [2, 150, 2, 16]"),
    (
        "gdn",
        {"v": torch.zeros(2, 150, 3, 24)},
        "v: expected a number of heads (axis 2) that is a multiple of q's 2 heads",
    ),
    ("gdn", {"g": None}, "chunk_gated_delta_rule: g: expected a tensor [2, 150, 4]"),
    ("gdn", {"backend": "nonsense"}, "backend: expected one of"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD, ids=[f"{row[0]}-{'-'.join(row[1])}" for row in BAD])
def test_bad_input(name, changes, message):
    x = inputs_of(name, "ragged") | changes
    with pytest.raises((RuntimeError, ValueError)) as error:  # the compiler wraps what is raised in its one graph
        compiled(MEMBERS[name].op)[0](**x)
    assert message in str(error.value).replace("\\", "")
    if "backend" not in changes:
        with pytest.raises(ValueError, match=re.escape(message)):
            torch.compile(MEMBERS[name].op, dynamic=True, backend="aot_eager")(**x)


def test_bounds_are_checked_when_they_are_read():
    x = {n: t for n, t in inputs_of("gdn", "packed").items() if n != "initial_state"}
    op, _ = compiled(flash_delta.chunk_gated_delta_rule)
    with pytest.raises(ValueError, match="cu_seqlens: expected bounds up to T = 205, got 206"):
        op(**(x | {"cu_seqlens": torch.tensor([0, 5, 206])}))


def test_bounds_that_only_a_device_knows():
    q, beta, bounds = (torch.zeros(shape, device="meta") for shape in ((1, 9, 2, 16), (1, 9, 2), (3,)))
    x = {"q": q, "k": q, "v": q, "beta": beta, "cu_seqlens": bounds.long(), "backend": "torch"}
    op, _ = compiled(flash_delta.chunk_delta_rule)
    with pytest.raises(RuntimeError, match=r"backend 'torch' cannot run this: .* give cu_seqlens_cpu"):
        op(**x)
    for host in (torch.tensor([0, 5, 9]), [0, 5, 9]):
        assert op(**x, cu_seqlens_cpu=host)[0].shape == q.shape


def test_a_second_derivative_is_refused():
    x = inputs_of("gdn", "ragged")
    arguments = operator_arguments(MEMBERS["gdn"], x, needs_grad=True)
    for o in (rule.delta_rule(*arguments)[0], compiled(flash_delta.chunk_gated_delta_rule)[0](**x)[0]):
        with pytest.raises(RuntimeError, match=r"a second derivative is asked for|does not .* support double backward"):
            torch.autograd.grad(torch.autograd.grad(o.sum(), x["q"], create_graph=True)[0].sum(), x["k"])


def test_eager_calls_do_not_pay_for_the_operator(monkeypatch):
    monkeypatch.setattr(_function, "call_operator", None)
    flash_delta.chunk_gated_delta_rule(**inputs_of("gdn", "ragged"))[0].sum().backward()
