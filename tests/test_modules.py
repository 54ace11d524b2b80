"""Short convolution and norms against loops and formulas written out here."""

import pytest
import torch
from torch.nn import functional as F

from flash_delta.modules import GatedRMSNorm, RMSNorm, ShortConvolution, causal_conv1d, causal_conv1d_update, rms_norm

D = 3
# Empty sequences lead, follow each other and end; one is shorter than a convolution's window; three rows are left over.
LENGTHS, TAIL = [0, 3, 0, 0, 1, 6, 0], 3


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(x, weight, bias, state):
    """One sequence, token by token: x [T, D], state [D, W] -> y [T, D], final state [D, W]."""
    window, rows = state, []
    for token in x:
        window = torch.cat([window[:, 1:], token[:, None]], dim=1)
        rows.append(F.silu((window * weight).sum(1) + bias))
    return torch.stack(rows) if rows else x, window


def boundaries(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def packed_inputs(W):
    total, N = sum(LENGTHS) + TAIL, len(LENGTHS)
    inputs = [random(1, total, D), random(D, W, seed=1), random(D, seed=2), random(N, D, W, seed=3)]
    inputs[0][:, -TAIL:] = torch.nan
    return [tensor.requires_grad_() for tensor in inputs]


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [0, 1, 2, 9])
def test_batch_equals_loop(T, W):
    x, weight, bias, state = random(2, T, D), random(D, W, seed=1), random(D, seed=2), random(2, D, W, seed=3)
    y, final = causal_conv1d(x, weight, bias, "silu", state, output_final_state=True)
    for b in range(2):
        expected_y, expected_final = loop(x[b], weight, bias, state[b])
        torch.testing.assert_close(y[b], expected_y)
        torch.testing.assert_close(final[b], expected_final)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("W", [1, 2, 4])
def test_packed_equals_loop_with_gradients(W, dtype):
    inputs, reference = packed_inputs(W), packed_inputs(W)
    cu_seqlens = boundaries(LENGTHS, dtype)
    x, weight, bias, state = inputs
    y, final = causal_conv1d(x, weight, bias, "silu", state, output_final_state=True, cu_seqlens=cu_seqlens)

    x0, weight0, bias0, state0 = reference
    rows = x0[0, :-TAIL].split(LENGTHS)
    ys, finals = zip(*(loop(row, weight0, bias0, s) for row, s in zip(rows, state0, strict=True)), strict=True)
    expected_y, expected_final = torch.cat([*ys, torch.zeros(TAIL, D, dtype=torch.float64)])[None], torch.stack(finals)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(final, expected_final)
    assert (y[:, -TAIL:] == 0).all()

    dy, dfinal = random(*y.shape, seed=4), random(*final.shape, seed=5)
    grads = torch.autograd.grad((y * dy).sum() + (final * dfinal).sum(), inputs)
    expected = torch.autograd.grad((expected_y * dy).sum() + (expected_final * dfinal).sum(), reference)
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad)
    assert (grads[0][:, -TAIL:] == 0).all()


def test_empty_sequences_keep_their_state():
    state = random(2, D, 4)
    y, final = causal_conv1d(
        random(1, 0, D), random(D, 4), initial_state=state, output_final_state=True, cu_seqlens=boundaries([0, 0])
    )
    assert y.shape == (1, 0, D)
    assert torch.equal(final, state)


def test_no_sequences_give_zeros():
    y, final = causal_conv1d(random(1, 2, D), random(D, 4), output_final_state=True, cu_seqlens=boundaries([]))
    assert torch.equal(y, torch.zeros(1, 2, D, dtype=torch.float64))
    assert final.shape == (0, D, 4)


def test_final_state_continues_a_sequence():
    x, weight = random(2, 7, D), random(D, 4, seed=1)
    whole, _ = causal_conv1d(x, weight)
    first, state = causal_conv1d(x[:, :2], weight, output_final_state=True)
    second, _ = causal_conv1d(x[:, 2:], weight, initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)


@pytest.mark.parametrize("bias", [None, random(D, seed=2)])
def test_update_is_one_step_in_place(bias):
    x, weight, state = random(2, 5, D), random(D, 4, seed=1), random(2, D, 4, seed=3)
    y, final = causal_conv1d(x, weight, bias, "silu", state, output_final_state=True)
    steps = [causal_conv1d_update(x[:, t], state, weight, bias, "silu") for t in range(5)]
    torch.testing.assert_close(torch.stack(steps, dim=1), y)
    torch.testing.assert_close(state, final)


def test_half_precision_is_accumulated_in_fp32():
    x, weight = random(2, 9, D).bfloat16(), random(D, 4, seed=1).bfloat16()
    y, final = causal_conv1d(x, weight, activation="silu", output_final_state=True)
    assert y.dtype == final.dtype == torch.bfloat16
    assert torch.equal(y, causal_conv1d(x.float(), weight.float(), activation="silu")[0].bfloat16())


def test_packed_convolution_reads_no_value_from_the_device():
    """Meta tensors have no values: an `.item()` in disguise would raise."""
    x, weight, cu_seqlens = (t.to("meta") for t in (random(1, 13, D), random(D, 4), boundaries(LENGTHS)))
    y, final = causal_conv1d(x, weight, output_final_state=True, cu_seqlens=cu_seqlens)
    assert y.shape == (1, 13, D)
    assert final.shape == (len(LENGTHS), D, 4)


@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution_is_a_depthwise_conv1d(bias):
    ours = ShortConvolution(D, 4, bias=bias, activation=None).double()
    theirs = torch.nn.Conv1d(D, D, 4, groups=D, padding=3, bias=bias).double()
    ours.load_state_dict(theirs.state_dict())
    x = random(2, 9, D)
    torch.testing.assert_close(ours(x)[0], theirs(x.transpose(1, 2))[..., :9].transpose(1, 2))
    assert all(p.abs().max() <= 0.5 for p in ShortConvolution(512, 4, bias=bias).parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": random(9, D)}, r"x: expected a tensor \[B, T, D\], got shape \[9, 3\]"),
        ({"x": random(2, 9, D).long()}, "x: expected a dtype among .*, got torch.int64"),
        ({"x": [1.0]}, r"x: expected a tensor \[B, T, D\], got list"),
        ({"weight": random(D, 1, 4)}, r"weight: expected a tensor \[3, W\], got shape \[3, 1, 4\]"),
        ({"weight": random(D, 0)}, r"weight: expected at least one tap \(axis 1\), got 0"),
        ({"weight": random(D, 4).to("meta")}, "weight: expected a tensor on cpu like x, got one on meta"),
        ({"bias": random(D + 1)}, r"bias: expected a tensor \[3\], got shape \[4\]"),
        ({"activation": "relu"}, "activation: expected 'silu' or None, got 'relu'"),
        ({"initial_state": random(2, D, 3)}, r"initial_state: expected a tensor \[2, 3, 4\], got shape \[2, 3, 3\]"),
        ({"cu_seqlens": boundaries([9])}, "x: expected batch size 1 with cu_seqlens: .*, got batch size 2"),
        ({"cu_seqlens": random(2)}, "cu_seqlens: expected dtype torch.int32 or torch.int64, got torch.float64"),
        ({"cu_seqlens": [0, 9]}, r"cu_seqlens: expected a tensor \[N \+ 1\], got list"),
        ({"cu_seqlens": boundaries([9]).to("meta")}, "cu_seqlens: expected a tensor on cpu like x, got one on meta"),
    ],
)
def test_convolution_refuses(change, message):
    with pytest.raises(ValueError, match=f"^causal_conv1d: {message}$"):
        causal_conv1d(**{"x": random(2, 9, D), "weight": random(D, 4), **change})


def test_convolution_refuses_bounds_that_are_none_however_often_it_was_called():
    x, weight = random(1, 9, D), random(D, 4)
    causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 4, 9]))
    for bounds, message in (
        ([0, 4, 10], "expected bounds up to T = 9, got 10"),
        ([0, 6, 4], r"expected bounds that do not decrease, got \[0, 6, 4\]"),
        ([1, 4, 9], "expected 0 as the first bound, got 1"),
    ):
        with pytest.raises(ValueError, match=f"^causal_conv1d: cu_seqlens: {message}$"):
            causal_conv1d(x, weight, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize(("argument", "value"), [("kernel_size", 0), ("activation", "gelu")])
def test_a_convolution_that_could_never_run_is_not_made(argument, value):
    with pytest.raises(ValueError, match=f"^ShortConvolution: {argument}: expected .*, got {value!r}$"):
        ShortConvolution(**{"hidden_size": D, "kernel_size": 4, argument: value})


def test_update_refuses_a_state_of_another_width():
    with pytest.raises(ValueError, match=r"update: state: expected a tensor \[2, 3, 4\], got shape \[2, 3, 3\]"):
        causal_conv1d_update(random(2, D), random(2, D, 3), random(D, 4))


@pytest.mark.parametrize(
    ("activation", "function"), [("silu", lambda z: z * torch.sigmoid(z)), ("sigmoid", torch.sigmoid)]
)
def test_gated_norm_equals_its_formula(activation, function):
    norm = GatedRMSNorm(8, eps=1e-3, activation=activation).double()
    norm.weight.data = random(8, seed=1)
    x, gate = random(2, 5, 8, seed=2), random(2, 5, 8, seed=3)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight * function(gate)
    torch.testing.assert_close(norm(x, gate), expected)


def test_norms_compute_halves_in_fp32():
    norm, gated = RMSNorm(8), GatedRMSNorm(8)
    x, gate = (100 * random(5, 8)).half(), random(5, 8, seed=1).half()
    assert torch.equal(norm(x), norm(x.float()).half())
    assert torch.equal(gated(x, gate), gated(x.float(), gate.float()).half())


def test_gated_norm_refuses():
    with pytest.raises(ValueError, match=r"GatedRMSNorm: activation: expected one of .* got 'relu'"):
        GatedRMSNorm(8, activation="relu")
    with pytest.raises(ValueError, match=r"gated_rms_norm: gate: expected a tensor \[5, 8\], got shape \[5, 4\]"):
        GatedRMSNorm(8)(random(5, 8), random(5, 4))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (random(5, 7), random(8), r"x: expected a tensor \[..., 8\], as wide as weight, got shape \[5, 7\]"),
        (random(5, 8).int(), random(8), "x: expected a dtype among .*, got torch.int32"),
        (random(5, 8), [1.0] * 8, r"weight: expected a tensor \[D\], got list"),
        (random(5, 8), random(8).to("meta"), "weight: expected a tensor on cpu like x, got one on meta"),
    ],
)
def test_norm_refuses(x, weight, message):
    with pytest.raises(ValueError, match=f"^rms_norm: {message}$"):
        rms_norm(x, weight, 1e-5)
