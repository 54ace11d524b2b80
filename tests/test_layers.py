"""Packing, padding and caching leave every mixer's mathematics alone; `test_layer_equations` has the mathematics."""

import pytest
import torch
from tiny_layers import DELTA_LAYERS, LAYERS, D, random

from flash_delta.layers import Attention, AttentionState, MixerState
from flash_delta.layers.packing import Packing

LENGTHS = [5, 0, 1, 18]


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param]().double()


@pytest.fixture(params=DELTA_LAYERS)
def delta_layer(request):
    torch.manual_seed(0)
    return DELTA_LAYERS[request.param]().double()


def fresh_state(layer):
    return AttentionState() if isinstance(layer, Attention) else MixerState()


def padded(rows, side, filler=torch.nan):
    """Rows [T_n, D] of different lengths -> one batch [N, T, D] with its mask [N, T]."""
    T = max(map(len, rows))
    x, mask = torch.full((len(rows), T, D), filler, dtype=torch.float64), torch.zeros(len(rows), T, dtype=torch.long)
    for n, row in enumerate(rows):
        span = slice(T - len(row), T) if side == "left" else slice(0, len(row))
        x[n, span], mask[n, span] = row, 1
    return x, mask


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_packed_equals_alone(layer):
    rows = random(sum(LENGTHS), D).split(LENGTHS)
    guard = torch.full((3, D), torch.nan, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    y = layer(torch.cat([*rows, guard])[None], cu_seqlens=cu_seqlens)
    assert_close(y[0, :-3], torch.cat([layer(row[None])[0] for row in rows if len(row)]))
    assert (y[0, -3:] == 0).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_alone_with_gradients(layer, side):
    rows = random(sum(LENGTHS), D).split(LENGTHS)
    x, mask = padded(rows, side)
    y = layer(x, attention_mask=mask)
    alone = torch.cat([layer(row[None])[0] for row in rows if len(row)])
    assert_close(y[mask.bool()], alone)
    assert (y[~mask.bool()] == 0).all()

    grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
    expected = torch.autograd.grad(alone.square().sum(), list(layer.parameters()))
    for grad, expected_grad in zip(grads, expected, strict=True):
        assert_close(grad, expected_grad)


@pytest.mark.parametrize("T", [20, 70])
@torch.no_grad()
def test_prefill_and_decode_equal_one_call(layer, T):
    x, state, whole_state = random(2, T, D), fresh_state(layer), fresh_state(layer)
    expected = layer(x, state=whole_state)
    spans = [(0, T - 5), (T - 5, T - 3), *((t, t + 1) for t in range(T - 3, T))]
    y = torch.cat([layer(x[:, start:end], state=state) for start, end in spans], dim=1)
    assert_close(y, expected)
    assert_close(layer(x), expected)
    for name in ("recurrent", "keys", "values"):
        if hasattr(state, name):
            torch.testing.assert_close(getattr(state, name), getattr(whole_state, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("full_mask", [False, True])
@torch.no_grad()
def test_padded_prefill_then_decode_equals_alone(layer, full_mask, side):
    prompts, tokens = random(sum(LENGTHS), D).split(LENGTHS), random(len(LENGTHS), 2, D, seed=1)
    x, mask = padded(prompts, side)
    state = fresh_state(layer)
    layer(x, attention_mask=mask, state=state)
    ones = torch.ones(len(LENGTHS), 2, dtype=torch.long)
    decoded = []
    for t in range(2):
        step_mask = torch.cat([mask, ones[:, : t + 1]], dim=1) if full_mask else None
        decoded.append(layer(tokens[:, t : t + 1], attention_mask=step_mask, state=state))
    decoded = torch.cat(decoded, dim=1)
    for n, prompt in enumerate(prompts):
        assert_close(decoded[n], layer(torch.cat([prompt, tokens[n]])[None])[0, -2:])


@torch.no_grad()
def test_state_of_a_padded_batch_is_each_prompts_own(delta_layer):
    rows = random(sum(LENGTHS), D).split(LENGTHS)
    x, mask = padded(rows, "right")
    state = MixerState()
    delta_layer(x, attention_mask=mask, state=state)
    for n, row in enumerate(rows):
        own = MixerState()
        delta_layer(row[None], state=own)
        torch.testing.assert_close(state.recurrent[n], own.recurrent[0], rtol=1e-6, atol=1e-6)
        for conv, own_conv in zip(state.conv or (), own.conv or (), strict=True):
            assert_close(conv[n], own_conv[0])


def test_future_does_not_reach_the_past(layer):
    x = random(1, 20, D)
    changed = torch.cat([x[:, :13], random(1, 7, D, seed=1)], dim=1)
    assert torch.equal(layer(x)[:, :13], layer(changed)[:, :13])


def test_no_tokens(layer):
    assert layer(random(2, 0, D)).shape == (2, 0, D)


def test_half_precision_keeps_its_dtype(layer):
    layer, x = layer.bfloat16(), random(2, 20, D).bfloat16()
    state = fresh_state(layer)
    y = layer(x, state=state)
    assert y.dtype == torch.bfloat16
    assert isinstance(state, AttentionState) or state.recurrent.dtype == torch.float32


def test_autocast_runs_in_half(layer):
    layer, state = layer.float(), fresh_state(layer)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(random(2, 20, D).float(), state=state)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(random(2, 20, D).float()), rtol=0.1, atol=0.02)


def test_shapes_can_be_asked_for_without_values(delta_layer):
    """Tools that plan a model, by stages or by memory, run it on meta tensors."""
    layer, x = delta_layer.to("meta"), torch.empty(2, 20, D, device="meta", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.is_meta
    assert y.shape == x.grad.shape == x.shape


def test_select_keeps_the_chosen_sequences(layer):
    state = fresh_state(layer)
    layer(random(3, 4, D), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]), state)
    before = [tensor.clone() for tensor in tensors_of(state)]
    state.select(torch.tensor([2, 0, 0]))
    for tensor, old in zip(tensors_of(state), before, strict=True):
        assert torch.equal(tensor, old[[2, 0, 0]])


def tensors_of(state):
    if isinstance(state, AttentionState):
        return [state.keys, state.values, state.mask]
    return [*(state.conv or ()), state.recurrent]


def test_padding_is_packed_without_reading_a_value():
    """Meta tensors have no values: an `.item()` in disguise would raise."""
    x = torch.empty(2, 9, D, device="meta")
    packing = Packing.of(x, torch.ones(2, 9, dtype=torch.bool, device="meta"), None)
    assert packing.pack(x).shape == (1, 18, D)
    assert packing.unpack(packing.pack(x)).shape == (2, 9, D)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_states": random(9, D)}, r"hidden_states: expected shape \[B, T, D\], got \[9, 12\]"),
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, r"attention_mask: expected shape \[B, T\] = \[2, 9\]"),
        ({"attention_mask": torch.ones(2, 8)}, r"attention_mask: .* got \[2, 8\]"),
        (  # an additive one, which was read the wrong way round
            {"attention_mask": torch.zeros(2, 9)},
            r"attention_mask: expected bool or integers, .* got torch.float32: give `attention_mask != 0` if .* `atten"
            "tion_mask == 0` if the mask is additive",
        ),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens: expected B = 1 .* got B = 2"),
        ({"cu_seqlens": [0, 9]}, r"cu_seqlens: expected a tensor \[N \+ 1\], got a list"),
        ({"cu_seqlens": torch.tensor([0, 9]), "attention_mask": torch.ones(2, 9)}, "attention_mask: expected None"),
    ],
)
def test_forward_refuses(layer, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**{"hidden_states": random(2, 9, D), **arguments})


def test_attention_refuses_a_state_for_packed_rows():
    with pytest.raises(ValueError, match="state: expected None together with cu_seqlens"):
        LAYERS["attention"]()(torch.zeros(1, 9, D), state=AttentionState(), cu_seqlens=torch.tensor([0, 9]))
