"""Plans as values: what they launch, on any machine, for any chip."""

import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from flash_delta.compiler.offline import offline
from flash_delta.kernels.runtime import run as runner
from flash_delta.kernels.runtime.chip import Chip, Tile
from flash_delta.kernels.runtime.forbid import PlannedCall, difference_of
from flash_delta.kernels.runtime.plan import (
    Layout,
    Making,
    Memory,
    Plan,
    Step,
    contiguous,
    layout_of,
    layouts_of,
    row_stride,
)
from flash_delta.kernels.runtime.run import name_of, run
from flash_delta.kernels.triton.backward.plan import plan_backward
from flash_delta.kernels.triton.backward.results import OutputGradients, Saved
from flash_delta.kernels.triton.elementwise.convolution_plans import (
    ConvolutionGradients,
    plan_convolve,
    plan_convolve_backward,
)
from flash_delta.kernels.triton.elementwise.norm import NormGradient, plan_norm, plan_norm_backward
from flash_delta.kernels.triton.forward.plan import plan_forward
from flash_delta.kernels.triton.serving.rows import plan_step
from flash_delta.kernels.triton.tiles import plan_back, plan_segments
from flash_delta.problem import ConvolutionProblem, Convolved, Gate, Inputs, KnownCall, Normalized, NormProblem, Problem

H200 = Chip("sm_90", 132)


def laid_out(shape, dtype):
    """The layout of a contiguous tensor."""
    return Layout(tuple(shape), contiguous(shape), dtype)


def tensors_of(step):
    """The names of the tensors that a step reads or writes."""
    return [a.name for a in step.arguments if isinstance(a, Layout)]


def names(plan):
    """The names of a plan's compiled kernels."""
    return [name_of(step) for step in plan.steps]


def convolutions():
    """The programs of convolutions forward and backward, and how many kernels are compiled for them all."""
    found, compiled = [], set()
    for B, T in ((1, 1024), (2, 2048), (8, 1024), (4, 4096)):
        tokens = laid_out((B, T, 2048), torch.bfloat16)
        x, dy = Convolved(tokens, laid_out((2048, 4), torch.bfloat16)), ConvolutionGradients(tokens, None)
        p = ConvolutionProblem("a test", B, T, 2048, 4, B, torch.bfloat16, torch.device("cuda", 0), False, "silu")
        forward, backward = plan_convolve(p, H200, x), plan_convolve_backward(p, H200, x, dy)
        found.append((forward.steps[0].grid[0], backward.steps[0].grid[0]))
        compiled |= {*names(forward), *names(backward)}
    return found, len(compiled)


def test_tokens_of_a_convolutions_programs(process):
    """They follow the number of tokens: 16 and 32 forward, 16 to 128 backward. A new number compiles nothing."""
    found, compiled = process.submit(convolutions).result()
    tokens = zip((1024, 4096, 8192, 16384), (16, 32, 32, 32), (16, 32, 64, 128), strict=True)
    assert found == [(8 * T // forward, 8 * T // backward) for T, forward, backward in tokens]
    assert compiled == 3, "with the sum over programs"


@pytest.mark.parametrize("strided", [False, True])
def test_copies_are_memory_that_is_filled(strided):
    """An input with gaps between channels is copied in every call: no step reads the input itself."""
    x = laid_out((5, 7, 64), torch.bfloat16) if not strided else Layout((5, 7, 64), (896, 128, 2), torch.bfloat16)
    p = NormProblem("a test", 64, torch.bfloat16, torch.device("cuda", 0), None, 1e-6)
    given, after = layouts_of(Normalized(x, laid_out((64,), torch.bfloat16))), layouts_of(NormGradient(x, None))
    forward, backward = plan_norm(p, H200, given), plan_norm_backward(p, H200, given, after)
    copied = {m.name: m.filled.name for plan in (forward, backward) for m in plan.memory if m.filled is not None}
    assert copied == ({"x without gaps": "x", "dy without gaps": "dy"} if strided else {})
    used = {name for plan in (forward, backward) for step in plan.steps for name in tensors_of(step)}
    assert used.isdisjoint({"x", "dy"}) == strided
    assert used >= set(copied)
    assert forward.workspace_bytes == 5 * 7 * 64 * 2 * strided


@triton.jit(do_not_specialize=["n", "strides"], do_not_specialize_on_alignment=["m"])  # Triton does so for no tuple
def example(x, y, n, m, stride, strides, real, ROWS: tl.constexpr):
    tl.store(x, tl.load(x) + n + m + stride + strides[0] + strides[1] + real)
    if y is not None:
        tl.store(y, 0.0)


NUMBERS = 1, 8, 16, 2**31, 2**35  # 1, others, multiples of 16, of 32 and of 64 bits
POINTERS = [Layout((64,), (1,), torch.float32), Layout((64,), (1,), torch.float32, 4), Layout((64,), (1,), torch.int64)]


def calls_of_example():
    """Arguments that differ one at a time, and some that differ in what does not matter."""
    usual = {"x": 0, "y": 0, "n": 8, "m": 8, "stride": 8, "strides": (8, 8), "real": 0.5, "ROWS": 4}
    changes = [{name: value} for name, value in product(("n", "m", "stride"), (*NUMBERS, 24, 32))]
    changes += [{"strides": pair} for pair in product(NUMBERS, NUMBERS)]
    changes += [{"x": 1}, {"x": 2}, {"y": 1}, {"y": None}, {"real": 0.25}, {"ROWS": 8}]
    return [usual | change for change in changes]


def in_python(step):
    """The name where C is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.fastcall, "API", None)
        return name_of(step)


def keys_and_names():
    keys, found = [], []

    class Same:
        def __init__(self, layout):
            self.dtype, self.offset = layout.dtype, layout.offset

        def data_ptr(self):
            return self.offset

    with offline("sm_90a"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", lambda kernel, key, *_: keys.append(str(key)) or Same(POINTERS[0]))
        for call in calls_of_example():
            layouts = {name: None if call[name] is None else POINTERS[call[name]] for name in "xy"}
            numbers = call["n"], call["m"], call["stride"], call["strides"], call["real"]
            step = Step(example, (1, 1, 1), Tile(4, 1), (*layouts.values(), *numbers), {"ROWS": call["ROWS"]})
            found.append(name_of(step))
            assert name_of(step) == in_python(step)
            example.device_caches.clear()
            pointers = (None if t is None else Same(t) for t in layouts.values())
            example.warmup(*pointers, *numbers, ROWS=call["ROWS"], grid=(1,))
    return keys, found


def test_names_say_what_triton_compiles_for(process):
    """Two launches have one name where Triton has one key for them, and only there."""
    keys, found = process.submit(keys_and_names).result()
    assert len(keys) == len(found)
    assert len(set(zip(keys, found, strict=True))) == len(set(keys)) == len(set(found)) > 20


def test_layouts_are_those_of_tensors():
    for t in (torch.empty(3, 4), torch.empty(3, 4).t(), torch.empty(6, 4)[::2], torch.empty(3, 1, 4)[:, :, :2]):
        layout = layout_of(t)
        assert (layout.stride(), layout.dim(), layout.whole) == (t.stride(), t.dim(), t.is_contiguous())
        assert contiguous(t.shape) == t.contiguous().stride()
        with pytest.raises(TypeError):
            len(layout)  # of a tensor it is the first size, so nothing may ask for it
    assert layout_of(torch.empty(9)[1:]).offset == 4


@pytest.mark.parametrize("t", [
    torch.empty(2, 3, 4), torch.empty(2, 6, 4)[:, ::2], torch.empty(2, 6, 4)[:, :3], torch.empty(1, 6, 4)[:, ::2],
    torch.empty(3, 2, 4).transpose(0, 1), torch.empty(2, 1, 8)[..., :4], torch.empty(1, 1, 4),
])  # fmt: skip
def test_axes_are_one_where_pytorch_can_view_them_so(t):
    row = row_stride(t.shape[:-1], t.stride()[:-1])
    try:
        rows = t.view(-1, 4)
    except RuntimeError:
        rows = None
    assert (row is None) == (rows is None)
    assert rows is None or len(rows) == 1 or row == rows.stride(0)
    made = Making()
    given = layout_of(t, "t")
    copied = Memory(tuple(t.shape), contiguous(t.shape), t.dtype, name="t without gaps", filled=given)
    found, strides = made.rows(given, 1)
    assert (found, strides, made) == ((given, (row, 1), []) if row is not None else (copied, (4, 1), [copied]))


def test_a_name_means_one_tensor():
    problem = NormProblem("a test", 8, torch.float32, torch.device("cpu"), None, 1e-6)
    x = Normalized(torch.zeros(2, 8), torch.zeros(8))
    again = Plan((), (Memory((8,), (1,), torch.float32, name="x"),), ())
    with pytest.raises(ValueError, match="plan: expected a different name for each tensor, got x, weight, gate, x"):
        run(lambda p, chip, x: again, problem, x)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Launches that Triton's launcher would make on a GPU that is none, each with the tensors that its steps name."""
    launched = []

    def launch(by_triton, device, groups):
        named = {name: t for group in groups for name, t in zip(group._fields, group, strict=True)}
        launched.append([named.get(name) for step in by_triton.plan.steps for name in tensors_of(step)])
        return launched[-1]

    monkeypatch.setattr(runner, "on", lambda device: nullcontext())
    monkeypatch.setattr(runner, "several_devices", lambda: False)
    monkeypatch.setattr(runner, "chip_of", lambda device: H200)
    monkeypatch.setattr(runner, "is_direct", lambda device: False)
    monkeypatch.setattr(runner, "name_of", lambda step: (step.kernel.__name__,))
    monkeypatch.setattr(runner, "compile_all", dict.fromkeys)
    monkeypatch.setattr(runner, "compiled", {})
    monkeypatch.setattr(runner.ByTriton, "__call__", launch)
    return launched


def test_a_known_call_is_planned_once(on_a_gpu):
    """Also where Triton launches: on AMD's GPUs and with an older torch."""
    planned = []
    p = NormProblem("a test", 8, torch.float32, torch.device("cuda", 0), "silu", 1e-6)
    known = KnownCall(p, None, False)
    x, gate, weight = torch.zeros(4, 8), torch.ones(4, 8), torch.zeros(8)

    def planner(*given):
        planned.append(given)
        return plan_norm(*given)

    for given in (Normalized(x, weight, x), Normalized(x, weight, gate)):
        run(planner, p, given, known=known)
    assert len(planned) == 1
    assert [[t is given for t in tensors[:2]] for tensors, given in zip(on_a_gpu, (x, gate), strict=True)] == [
        [True, True], [False, True],
    ], "one tensor is x and the gate in the first call only"  # fmt: skip


def test_tokens_that_lie_far_apart_are_copied_for_a_recurrent_op():
    """Its kernel counts numbers of a token's tensors in 32 bits, and states in 64."""
    N, gate = 2**17, Gate("scalar", False)
    p = Problem("a test", N, 1, 1, 1, 128, 128, N, torch.float32, torch.device("cuda", 0), gate, "decayed", 1.0)
    p, tokens, gates = p._replace(recurrent=True), laid_out((N, 1, 1, 128), p.dtype), laid_out((N, 1, 1), p.dtype)
    x = layouts_of(Inputs(tokens, tokens, tokens, gates, gates, initial_state=laid_out(p.state_shape, p.dtype)))
    assert [m.name for m in plan_step(p, H200, x).memory] == ["o", "states"]
    far = Layout(x.q.shape, (2**15, 128, 128, 1), torch.float32)
    gaps = Layout(p.state_shape, (2 * 128 * 128, 128 * 128, 128, 1), torch.float32)
    x = layouts_of(x._replace(q=far, initial_state=gaps, beta=None))
    plan = plan_step(p, H200, x)
    assert {m.name: m.filled for m in plan.memory if m.filled is not None} == {
        "ones": 1.0, "q without gaps": x.q, "initial states": x.initial_state,
    }  # fmt: skip
    (step,) = plan.steps
    assert tensors_of(step)[:7] == ["q without gaps", "k", "v", "g", "ones", "initial states", "states"]


def test_a_refused_call_is_told_by_its_sizes_if_nothing_else_differs():
    """Decoding one token is compiled separately, with strides of the same kinds."""
    problem = NormProblem("a test", 16, torch.float32, torch.device("cuda", 0), None, 1e-6)

    def call(*shape):
        return PlannedCall(problem, plan_norm, (Normalized(laid_out(shape, torch.float32), None),))

    known = [call(4, 1, 16), call(4, 16)._replace(planner=plan_norm_backward)]
    was = "x has shape [4, 2, 16] and strides [32, 16, 1], compiled was [4, 1, 16] and [16, 16, 1]"
    assert difference_of(call(4, 2, 16), known) == was
    assert difference_of(call(4, 2, 16), known[1:]) == "nothing of its kind was compiled before"
    other = call(4, 2, 16)._replace(problem=problem._replace(D=32))
    assert difference_of(other, known) == "D is 32, compiled was 16"


def packed(kind, count, long, training, K=16):
    """A problem of ``count`` packed sequences, of which the last has ``long`` tokens, and the layouts of its inputs."""
    T, gate = count - 1 + long, Gate(kind, False)
    tokens = laid_out((1, T, 1, K), torch.bfloat16)
    g, beta = laid_out((1, T, 1, *(K,) * (kind == "channel")), torch.bfloat16), laid_out((1, T, 1), torch.bfloat16)
    p = Problem("a test", 1, T, 1, 1, K, K, count, torch.bfloat16, torch.device("cuda", 0), gate, "decayed", 1.0)
    p = p._replace(packed=True, lengths=(1,) * (count - 1) + (long,), needs_grad=training)
    return p, layouts_of(Inputs(tokens, tokens, tokens, g, beta, cu_seqlens=laid_out((count + 1,), torch.int32)))


def planned(p, x):
    """The plans of its forward and backward pass."""
    forward = plan_forward(p, H200, x, choice=plan_segments(p, H200))
    saved, gradient = forward.results[2], layouts_of(OutputGradients(x.v, None))
    if saved is None:
        return forward, None
    return forward, plan_backward(p, H200, x, gradient, layouts_of(Saved(saved)), choice=plan_back(p, H200))


@pytest.mark.parametrize(("kind", "count", "training", "longest"), [
    ("scalar", 65_534, False, 65_535), ("scalar", 32_767, True, 65_534), ("channel", 32_767, True, 65_534),
])  # fmt: skip
@pytest.mark.parametrize("long", [1, 2**17])
def test_grids_have_room_for_all_sequences(kind, count, training, longest, long):
    """A grid has room for as many as the backend takes, also if one of them is long enough to be split."""
    plans = planned(*packed(kind, count, long, training))
    steps = [step for plan in plans if plan is not None for step in plan.steps]
    assert max(max(step.grid[1:]) for step in steps) == longest


def test_plans_of_one_choice_do_not_know_lengths():
    """So a known call with other lengths launches as before, if these choose the same."""
    (p, x), chosen = packed("scalar", 4, 2**17, True), []
    for lengths in (p.lengths, (2, 3, 5, sum(p.lengths) - 10)):
        other = p._replace(lengths=lengths)
        chosen.append((plan_segments(other, H200), plan_back(other, H200), planned(other, x)))
    assert chosen[0] == chosen[1]
    assert None not in chosen[0]
    whole = plan_forward(p._replace(lengths=(2**15,) * 4), H200, x)
    assert whole.steps != chosen[0][2][0].steps


def test_what_is_saved_is_one_tensor():
    """The backward pass reads parts of it, and makes memory for the rest."""
    p, x = packed("scalar", 2, 64, True)
    forward, backward = planned(p, x)
    kept, backward_kept = planned(p._replace(disable_recompute=True), x)
    parts = [[a.start for s in plan.steps for a in s.arguments if isinstance(a, Layout) and a.name == "saved"]
             for plan in (forward, backward, kept, backward_kept)]  # fmt: skip
    assert [len(set(starts)) for starts in parts] == [2, 2, 8, 8]  # A and vectors; besides X, Y, rates, states, R, U
    assert None not in set().union(*parts)
    assert {m.name.split(".")[0] for m in backward_kept.memory} == {
        *(f"d{name}" for name in ("q", "k", "v", "g", "beta")), "StateGradients", "Scores",
    }  # fmt: skip
    size = sum(m.nbytes for m in forward.memory if m.name == "saved")
    assert size == max(
        a.start + math.prod(a.shape) * a.dtype.itemsize
        for s in forward.steps
        for a in s.arguments
        if isinstance(a, Layout) and a.name == "saved"
    )


@pytest.mark.parametrize("name", ["nothing", "A_log", "dt_bias", "cu_seqlens", "q", "initial_state"])
def test_parameters_and_bounds_with_gaps_are_copied_for_the_rule(name):
    """Kernels take no strides of these. Of all other inputs they take strides."""
    p, x = packed("scalar", 2, 64, True)
    vector, states = laid_out((1,), torch.float32), laid_out(p.state_shape, torch.float32)
    x = x._replace(A_log=vector, dt_bias=vector, initial_state=states)
    if name != "nothing":
        t = getattr(x, name)
        shape = (*t.shape[:-1], max(2, t.shape[-1]))
        gaps = Layout(shape, tuple(2 * stride for stride in contiguous(shape)), t.dtype)
        x = x._replace(**{name: gaps})
    copied = {"A_log", "dt_bias", "cu_seqlens"} & {name}
    for plan in planned(p, layouts_of(x)):
        used = {found for step in plan.steps for found in tensors_of(step)}
        assert {m.filled.name for m in plan.memory if m.filled is not None} == copied
        assert used.isdisjoint(copied)
        assert used >= {f"{name} without gaps" for name in copied}
