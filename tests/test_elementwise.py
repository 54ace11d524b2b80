"""The kernels of short convolution, RMS norms and gates against the torch code in float64: outputs and all gradients.

Without a GPU in Triton's interpreter, on a few numbers; on a GPU also on sizes that models have.
"""

import os

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flash_delta import fused_gdn_gate, fused_kda_gate
from flash_delta.modules import (
    GatedRMSNorm,
    RMSNorm,
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_update,
    gated_rms_norm,
    rms_norm,
)
from flash_delta.ops._elementwise import convolve_column
from flash_delta.ops._operators import elementwise as operators
from flash_delta.problem import (
    ENVIRONMENT,
    ConvolutionProblem,
    Convolved,
    Gate,
    Gated,
    GateProblem,
    Normalized,
    NormProblem,
)
from flash_delta.testing import assert_accurate

pytest.importorskip("triton")

from flash_delta.kernels.runtime import fastcall
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.triton.elementwise import backend as kernels
from flash_delta.kernels.triton.elementwise import convolution as around
from flash_delta.ops import _known_calls

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LENGTHS = [0, 3, 0, 1, 6, 131, 0]  # empty ones, some shorter than a window, one longer than a program's scans
TAIL = 3


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def results(function, tensors, dtype):
    """Outputs of ``function`` and the gradients of all its tensors, each of them in ``dtype``."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    outputs = [y for y in function(*leaves) if y is not None]
    gradients = [random(*y.shape, dtype=tensors[0].dtype, seed=9 + i).to(dtype) for i, y in enumerate(outputs)]
    found = torch.autograd.grad(outputs, [t for t in leaves if t is not None], gradients)
    return [y.detach() for y in outputs], list(found)


def assert_right(function, tensors, dtype):
    """``function(backend, *tensors)`` of the kernels; on a GPU bitwise the same when it is called again."""
    want = results(lambda *x: function("torch", *x), tensors, torch.float64)
    got = results(lambda *x: function("triton", *x), tensors, dtype)
    again = results(lambda *x: function("triton", *x), tensors, dtype) if GPU else got
    for a, b, c in zip(*((*ys, *grads) for ys, grads in (got, want, again)), strict=True):
        assert a.dtype == dtype
        assert_accurate("result", a, b, dtype)
        assert torch.equal(a, c)
    return got


def convolution(D, W, lengths, T=None, bias=True, state=True, activation="silu", dtype=torch.float32, tail=0):
    """Packed sequences, or with ``T`` two batch rows of it. Returns the results."""
    B, rows, N = (2, T, 2) if T is not None else (1, sum(lengths) + tail, len(lengths))
    x = random(B, rows, D + 3, dtype=dtype)[..., 3:]  # a slice, as of a fused projection
    if tail:
        x[:, -tail:] = torch.nan
    bounds = None if T is not None else torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    tensors = [x, random(D, W, dtype=dtype, seed=1)]
    tensors += [
        random(D, dtype=dtype, seed=2) if bias else None,
        random(N, D, W, dtype=dtype, seed=3) if state else None,
    ]

    def run(backend, x, weight, bias, state):
        return causal_conv1d(x, weight, bias, activation, state, True, bounds, backend=backend)

    (y, final), (dx, *others) = assert_right(run, tensors, dtype)
    assert not tail or ((y[:, -tail:] == 0).all() and (dx[:, -tail:] == 0).all())
    return y, final, dx, *others


def test_packed_sequences():
    convolution(3, 4, LENGTHS, tail=TAIL)


def test_a_programs_tokens_change_no_output(monkeypatch):
    """Nor a gradient of inputs. Those of parameters are sums over programs."""
    few = convolution(3, 4, [3, 0, 40])
    _known_calls.calls.clear()
    monkeypatch.setattr(around, "PROGRAMS", 0)  # so that programs get as many tokens as they can
    many = convolution(3, 4, [3, 0, 40])
    names = ("y", "final", "dx", "dweight", "dbias", "dstate")
    changed = {name for name, a, b in zip(names, few, many, strict=True) if not torch.equal(a, b)}
    assert {"dweight"} <= changed <= {"dweight", "dbias"}


# Tokens of a program that were the fastest on an H200, in the backward pass (docs/notes/2026-11-26-short-inputs.md).
FASTEST = {
    (1, 512, 2048): 16, (1, 1024, 2048): 16, (1, 1024, 4096): 16, (1, 2048, 4096): 32, (1, 8192, 2048): 64,
    (8, 1024, 2048): 64, (1, 8192, 4096): 128, (1, 32768, 4096): 128,
}  # fmt: skip


@pytest.mark.parametrize(("B", "T", "D"), FASTEST)
def test_tokens_of_a_program(B, T, D):
    p = ConvolutionProblem("a test", B, T, D, 4, B, torch.bfloat16, torch.device("cuda", 0), False, "silu")
    given = p, Chip("sm_90", 132), p.dtype
    found = around.cut_of("convolve_backward", *given).BT, around.cut_of("convolve", *given).BT
    assert found == (FASTEST[B, T, D], min(32, FASTEST[B, T, D]))


def test_packed_sequences_up_to_the_end_of_memory():
    """Forward and backward one slot of the second's tokens is too many, and lies behind it."""
    convolution(3, 4, [100, 60], bias=False, state=False)


@pytest.mark.parametrize(("W", "T"), [(1, 2), (2, 5), (3, 1), (8, 9)])
def test_taps(W, T):
    convolution(5, W, None, T, bias=W == 2, state=W != 3, activation=None if W == 2 else "silu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    convolution(4, 4, [5, 4], bias=False, state=False, dtype=dtype)


def test_no_tokens():
    convolution(3, 4, [0, 0])
    convolution(3, 4, None, 0, state=False)


@pytest.mark.parametrize(("W", "dtype"), [(1, torch.float32), (4, torch.bfloat16), (7, torch.float32)])
def test_a_token_moves_the_state_in_place(W, dtype):
    x, weight, bias = random(3, 5, dtype=dtype), random(5, W, dtype=dtype, seed=1), random(5, dtype=dtype, seed=2)
    state = random(3, 5, W, dtype=dtype, seed=3)
    wide = state.double()
    want = causal_conv1d_update(x.double(), wide, weight.double(), bias.double(), "silu")
    got = causal_conv1d_update(x, state, weight, bias, "silu", backend="triton")
    assert_accurate("y", got, want, dtype)
    assert torch.equal(state.double(), wide)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_column_is_a_token(backend, gradients, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, backend)
    weight, bias = random(5, 4, seed=1).requires_grad_(gradients), random(5, seed=2)
    for x in (random(3, 5, 1), random(3, 1, 5).mT, random(3, 5, 2)[..., 1:]):
        state = random(3, 5, 4, seed=3)
        kept = state.clone()
        y = convolve_column(Convolved(x, weight, bias, state), "silu")
        assert torch.equal(y, causal_conv1d_update(x[..., 0], kept, weight, bias, "silu")[..., None])
        assert torch.equal(state, kept)
        assert y.requires_grad == gradients


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_token_with_gradients(backend):
    x, weight, state = random(3, 5).requires_grad_(), random(5, 4, seed=1).requires_grad_(), random(3, 5, 4, seed=3)
    kept, x0 = state.clone(), x.detach()
    y = causal_conv1d_update(x, state, weight, None, "silu", backend=backend)
    got = torch.autograd.grad(y.square().sum(), (x, weight))
    y0, final = causal_conv1d(x[:, None], weight, None, "silu", kept, True, backend="torch")
    want = torch.autograd.grad(y0.square().sum(), (x, weight))
    assert torch.equal(state, final)
    assert torch.equal(state[..., -1], x0)
    for name, a, b in zip(("dx", "dweight"), got, want, strict=True):
        assert_accurate(name, a, b, torch.float32)


@pytest.mark.parametrize(
    ("shape", "activation", "dtype"),
    [
        ((2, 35, 3, 24), "silu", torch.float32),
        ((35, 16), "sigmoid", torch.bfloat16),
        ((9, 5), None, torch.float32),
        ((3, 300), None, torch.float16),
        ((0, 8), "silu", torch.float32),
    ],
)
def test_norms(shape, activation, dtype):
    def run(backend, x, weight, gate):
        if gate is None:
            return (rms_norm(x, weight, 1e-3, backend),)
        return (gated_rms_norm(x, gate, weight, 1e-3, activation, backend),)

    gate = None if activation is None else random(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]]
    assert_right(run, [random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1), gate], dtype)


@pytest.mark.parametrize("eps", [0, 0.0, 1e-46])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_norms_without_an_eps(gated, eps):
    """Rows that fill no program's tile: those that are not there add nothing to the weight's gradient."""

    def run(backend, x, weight, gate=None):
        y = rms_norm(x, weight, eps, backend) if gate is None else gated_rms_norm(x, gate, weight, eps, "silu", backend)
        return (y,)

    gate = [random(5, 16, seed=2)] if gated else []
    assert_right(run, [random(5, 16), random(16, seed=1), *gate], torch.float32)


def gates(g, K=None, bound=None, dtype=torch.float32, output_dtype=torch.float32, A=True, bias=True):
    """g [..., HV] or, with K, [..., HV, K]; parameters are float32 beside half gates, as in layers."""
    HV = g.shape[-1] if K is None else g.shape[-2]
    A_log = random(HV, seed=1) if A else None
    dt_bias = 3 * random(HV * (K or 1), seed=2) if bias else None

    def run(backend, g, A_log, dt_bias):
        to = torch.float64 if g.dtype == torch.float64 else output_dtype
        if K is None:
            return (fused_gdn_gate(g, A_log, dt_bias, to, backend=backend),)
        return (fused_kda_gate(g, A_log, dt_bias, bound, to, backend=backend),)

    assert_right(run, [g, A_log, dt_bias], dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # a sigmoid that is 0
@pytest.mark.parametrize("factor", [1.0, 300.0], ids=["usual", "strong"])
@pytest.mark.parametrize(("K", "bound"), [(None, None), (24, None), (24, -5.0)])
def test_gates(K, bound, factor):
    """Log decays far below those that kernels of the rule clamp are as the definition has them."""
    gates(factor * (random(2, 700, 3) if K is None else random(2, 35, 3, K)), K, bound)


def test_gates_of_any_strides():
    wide = random(35, 2, 3, 40)
    gates(wide.transpose(0, 1)[..., ::2], 20)  # rows that no view can have
    gates(wide[0].transpose(0, 1)[..., 3:], 37, -5.0)
    gates(random(1, 35, 8)[..., 5:])


@pytest.mark.parametrize(("K", "bound"), [(None, None), (100, -2.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_in_half_precision(K, bound, dtype):
    shape = (9, 6) if K is None else (9, 2, K)
    gates(random(*shape, dtype=dtype), K, bound, dtype, output_dtype=dtype, bias=K is None)


def test_gates_without_parameters_or_tokens():
    gates(random(5, 2, 8), 8, -5.0, A=False, bias=False)
    gates(random(5, 2, 8), 8, bias=False)
    gates(random(0, 3))
    gates(random(2, 0, 3, 8), 8, -1.0)


def test_sums_of_parameters_gradients_are_the_same_for_every_slice_of_programs():
    """More rows than programs hold at a time."""
    from flash_delta.kernels.triton.elementwise import gate

    rows = 2 * 1024 + 5
    with pytest.MonkeyPatch.context() as m:
        m.setattr(gate, "PROGRAMS", 2)
        m.setattr(gate, "BACKWARD_NUMBERS", 512)
        gates(random(rows, 2))


AROUND = {
    "convolution": lambda x, w: causal_conv1d(x, w[:, None], backend="triton")[0],
    "norm": lambda x, w: rms_norm(x, w, 1e-5, "triton"),
    "gate": lambda x, w: fused_gdn_gate(x, w, backend="triton"),
}


@pytest.mark.parametrize("name", AROUND)
def test_gradients_with_any_strides(name):
    """Kernels get them, or copies of them. On a GPU the first call is looked at, and later ones may be known."""
    x, w = random(2, 5, 4).requires_grad_(), random(4, seed=1).requires_grad_()
    wide = random(2, 5, 8, seed=2)
    for dy in (wide[..., 3:7], wide[..., ::2], wide[:, :1, :4].expand(2, 5, 4), wide[0, 0, 0].expand(2, 5, 4)):
        want, *others = (
            torch.autograd.grad(AROUND[name](x, w), (x, w), d) for d in (dy.contiguous(), *[dy] * (3 if GPU else 1))
        )
        assert all(torch.equal(a, b) for found in others for a, b in zip(found, want, strict=True))


def test_a_backward_pass_is_known_by_its_layouts():
    """Those of its gradients, and of its inputs, which hooks may have moved. Values make no difference."""
    wide, weight = random(2, 5, 8), random(4)
    layouts = {
        "plain": random(2, 5, 4), "gaps": wide[..., :4], "shifted": wide[..., 1:5], "spread": wide[..., ::2],
        "expanded": wide[:, :1, :4].expand(2, 5, 4), "bfloat16": random(2, 5, 4).bfloat16(), "longer": random(3, 5, 4),
    }  # fmt: skip

    def name(x, dy):
        return fastcall.key(False, Normalized(layouts[x], weight), (dy,))

    pairs = [("plain", dy) for dy in layouts] + [(x, "plain") for x in layouts if x != "plain"]
    assert len({name(x, layouts[dy]) for x, dy in pairs}) == len(pairs)
    assert name("plain", layouts["gaps"]) == name("plain", random(2, 5, 8, seed=1)[..., 4:])


def test_gradients_of_a_gate_have_no_other_memory():
    """The kernel leaves parts of the gradients of A_log and dt_bias, which PyTorch sums."""
    made = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty):
                made.append(tuple(args[-1]))
            return op(*args, **(kwargs or {}))

    x = Gated(random(2, 5, 3), random(3), random(3))
    problem = GateProblem("fused_gdn_gate", 3, 1, torch.float32, x.g.device, Gate("scalar", True), torch.float32)
    with Mode():
        kernels.gate_backward(problem, x, random(2, 5, 3))
    assert (2, 5, 3) in made
    assert (3,) not in made


def layer(x, weight, state, bounds, gate, scale):
    y, final = causal_conv1d(x, weight, None, "silu", state, True, bounds, backend="triton")
    other, _ = causal_conv1d(x, weight, backend="triton")
    y = gated_rms_norm(y, gate, scale, 1e-5, "sigmoid", "triton") + rms_norm(other, scale, 1e-5, "triton")
    return y + fused_gdn_gate(gate, scale, weight[:, 0], backend="triton"), final


def test_compiled_is_eager():
    """One graph for all lengths."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for T, N in ((9, 2), (12, 3)):
        x, gate, state = (random(*shape).requires_grad_() for shape in ((1, T, 4), (1, T, 4), (N, 4, 4)))
        weight, scale = random(4, 4, seed=1).requires_grad_(), random(4, seed=2).requires_grad_()
        bounds, found = torch.arange(N + 1, device=DEVICE) * 4, []
        for function in (layer, compiled):
            y, final = function(x, weight, state, bounds, gate, scale)
            loss = y.square().sum() + final.square().sum()
            found.append([y, final, *torch.autograd.grad(loss, (x, gate, state, weight, scale))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert counter.frame_count == 1


def test_a_compiled_token_moves_the_state():
    x, weight, state = random(2, 4), random(4, 4, seed=1), random(2, 4, 4, seed=2)
    kept = state.clone()

    def step(x, state):
        return causal_conv1d_update(2 * x, state, weight, None, "silu", "triton") + 1

    y = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")(x, state)
    assert torch.equal(y, step(x, kept))
    assert torch.equal(state, kept)


def test_checkpointing_and_autocast():
    convolution = ShortConvolution(4, 4, backend="triton").to(DEVICE)
    x = random(2, 5, 4, dtype=torch.bfloat16).requires_grad_()
    plain = convolution(x)[0]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        again = checkpoint(lambda x: convolution(x)[0], x, use_reentrant=False)
    assert torch.equal(plain, again)
    leaves = (x, convolution.weight)
    gradients = (torch.autograd.grad(y.square().sum(), leaves) for y in (plain, again))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_norm_under_autocast(gated, backend):
    """It gives what a projection after it would take, and the gradients of that."""
    norm = (GatedRMSNorm if gated else RMSNorm)(24, backend=backend).to(DEVICE)
    given = [random(5, 24, seed=seed).requires_grad_() for seed in range(1 + gated)]
    leaves = *given, norm.weight
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = norm(*given)
    plain = norm(*given)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, plain.bfloat16())
    dy = random(5, 24, seed=3).bfloat16()
    for found, want in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(plain, leaves, dy.float()), strict=True
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def test_a_second_derivative_is_refused():
    x = random(1, 3, 4).requires_grad_()
    y, _ = causal_conv1d(x, random(4, 4), backend="triton")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative is asked for"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: causal_conv1d(random(1, 2, 3), random(3, 9), backend="triton"), "it has up to 8 taps, here are 9"),
        (lambda: rms_norm(random(1, 9000), random(9000), 1e-5, "triton"), "rows of up to 8192 numbers"),
        (lambda: rms_norm(random(1, 8).double(), random(8), 1e-5, "triton"), "it computes in float32"),
        (lambda: fused_gdn_gate(random(1, 8).double(), random(8), backend="triton"), "it computes in float32"),
        (
            lambda: fused_gdn_gate(*2 * [random(2**23)], backend="triton"),
            "up to 8,388,480 gates per token, here are 8,",
        ),
        (lambda: rms_norm(random(1, 8), random(8), 1e-5, "nonsense"), "backend: expected one of triton, hopper, torch"),
    ],
)
def test_a_wish_is_obeyed_or_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


CUDA = torch.device("cuda")
LARGEST = [  # a problem of the largest size that kernels take, and that size
    (NormProblem("rms_norm", 8192, torch.float32, CUDA, None, 1e-5), "D"),
    (ConvolutionProblem("causal_conv1d", 1, 9, 4, 8, 1, torch.float32, CUDA, False, None), "W"),
    (GateProblem("fused_kda_gate", 8_388_480, 1, torch.float32, CUDA, Gate("channel", True), torch.float32), "HV"),
]


@pytest.mark.parametrize(("problem", "size"), LARGEST, ids=lambda x: getattr(x, "op", x))
def test_a_tracer_and_the_backend_agree_on_what_is_too_large(problem, size):
    """What kernels refuse does not become an operator, since no kernel could run it."""
    operation = {"D": operators.NORM, "W": operators.CONVOLUTION, "HV": operators.GATE}[size]
    for p in (problem, problem._replace(**{size: getattr(problem, size) + 1})):
        taken = operators.takes(operation, p, Gated(torch.ones(1)), None)
        assert taken == (kernels.unsupported(p) is None) == (p is problem)


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("FLASH_DELTA_BACKEND", "triton")
    with pytest.raises(ValueError, match="rms_norm: backend 'triton' cannot run this"):
        rms_norm(random(1, 8).double(), random(8), 1e-5)
    rms_norm(random(1, 8).double(), random(8), 1e-5, "torch")


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_of_models(dtype):
    convolution(8192, 4, [3000, 1, 0, 1095], dtype=dtype, tail=100)
    convolution(2048, 4, None, 1000, bias=False, state=False, dtype=dtype)
    convolution(100, 3, [57, 0, 200], dtype=dtype)
    assert_right(
        lambda backend, x, w, z: (gated_rms_norm(x, z, w, 1e-6, "silu", backend),),
        [random(8192, 32, 128, dtype=dtype), random(128, dtype=dtype), random(8192, 32, 128, dtype=dtype, seed=4)],
        dtype,
    )
    gates(random(8192, 32, dtype=dtype), dtype=dtype, output_dtype=dtype)
    gates(random(2, 4096, 32, 128, dtype=dtype), 128, -5.0, dtype, output_dtype=dtype)
    gates(random(3, 1000, 6, 100, dtype=dtype), 100, None, dtype, output_dtype=dtype)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches otherwise")
def test_lengths_compile_nothing():
    from flash_delta.ops import forbid_compilation

    weight, scale = random(64, 4), random(64)
    for forbidding in (False, True):
        for T in (16, 100, 4096, 2**17):
            x = random(1, T, 64).requires_grad_()
            bounds = torch.tensor([0, T // 2, T], device=DEVICE)
            with forbid_compilation() if forbidding else torch.enable_grad():
                y, _ = causal_conv1d(x, weight, cu_seqlens=bounds)
                y = gated_rms_norm(y, x, scale, 1e-5, "silu")
                (y + fused_gdn_gate(x, scale)).sum().backward()


def test_operators_are_what_they_say():
    x, weight, state = random(1, 3, 4).requires_grad_(), random(4, 2, seed=1).requires_grad_(), random(2, 4, 2, seed=2)
    bounds, ops = torch.tensor([0, 2, 3], device=DEVICE), torch.ops.flash_delta
    arguments = (x, weight, None, state, bounds, "causal_conv1d", "silu", True, "triton")
    torch.library.opcheck(ops.causal_conv1d.default, arguments)
    scale, gate = random(4, seed=3).requires_grad_(), random(1, 3, 4, seed=4).requires_grad_()
    torch.library.opcheck(ops.rms_norm.default, (x, scale, gate, "gated_rms_norm", "silu", 1e-5, torch.half, "triton"))
    x, form = x.detach().requires_grad_(), ("scalar", True, None)
    arguments = (x, scale, None, "fused_gdn_gate", *form, torch.bfloat16, "triton")
    torch.library.opcheck(ops.log_decay.default, arguments)
    token = (x.detach()[0, :2], state, weight.detach(), None, "causal_conv1d_update", None, "triton")
    torch.library.opcheck(ops.causal_conv1d_update.default, token)
