"""A split whose bounds are on the device: its marks, what it refuses, and that nothing reads a bound on the host.

`test_parallel` compares its results with float64, on two and four ranks.
"""

import random as python_random
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hostile_bounds import HOSTILE, T, hostile
from tiny_layers import DELTA_LAYERS, LAYERS, random
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flash_delta.layers import MixerState
from flash_delta.parallel import ContextParallel, DeviceContextParallel
from flash_delta.parallel.cut import cut_row
from flash_delta.parallel.part import Part, runs
from flash_delta.parallel.split import Split


@pytest.mark.parametrize("seed", range(40))
def test_every_cut_is_the_planned_split(seed):
    draw = python_random.Random(seed)
    bounds = (0, *accumulate(draw.choice((0, 0, 1, 2, 5, 17)) for _ in range(draw.randint(1, 6))))
    total, ranks = max(bounds[-1] + draw.randint(0, 3), 1), draw.randint(1, 4)
    starts = [0, *sorted(draw.choices(range(total + 1), k=ranks - 1)), total]
    tokens = [stop - start for start, stop in pairwise(starts)]
    plan = Split(bounds, runs(tokens))
    for rank in range(ranks):
        cut, rows = cut_row(torch.tensor(bounds), torch.tensor(starts), rank), plan.rows[rank]
        assert cut.row.tolist() == list(bounds)
        assert cut.padded.tolist() == [*bounds, total]
        assert cut.bounds.tolist() == [min(max(bound - starts[rank], 0), tokens[rank]) for bound in bounds]
        marked = {name: getattr(cut, name).nonzero()[:, 0].tolist() for name in ("continued", "continues")}
        assert marked["continued"] == [p.sequence for p in rows if p.continued]
        assert marked["continues"] == [p.sequence for p in rows if plan.continues(p)]
        filled = [p for p in rows if p.tokens]
        assert cut.begins.nonzero()[:, 0].tolist() == [p.sequence for p in rows if not p.continued]
        assert cut.ends.nonzero()[:, 0].tolist() == [p.sequence for p in rows if not plan.continues(p)]
        assert cut.crossed[rank] == any(p.continued for p in rows)
        if filled and filled[-1].stop == tokens[rank]:
            assert (cut.first[rank], cut.last[rank]) == (filled[0].sequence, filled[-1].sequence)
            assert cut.spans[rank] == (filled[0].continued and len(filled) == 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_bounds_stay_in_the_row(name):
    """Kernels get only these bounds and rows."""
    starts = torch.tensor([0, 70, 70, T])
    for rank in range(3):
        cut = cut_row(hostile(name, "cpu"), starts, rank)
        for bounds, total in ((cut.row, T), (cut.padded, T), (cut.bounds, starts[rank + 1] - starts[rank])):
            assert bounds[0] >= 0
            assert bounds[-1] <= total
            assert (bounds.diff() >= 0).all()
        for rows in (cut.first, cut.last):
            assert ((rows >= 0) & (rows < len(cut.begins))).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 9], [9]), r"cu_seqlens: expected a tensor \[N \+ 1\] of at least one sequence, got list"),
        ((torch.tensor([0]), [9]), r"cu_seqlens: expected a tensor .* got shape \[1\]"),
        ((torch.tensor([0.0, 9.0]), [9]), r"cu_seqlens: expected int32 or int64 bounds \[2\], got torch.float32 \[2\]"),
        ((torch.tensor([1, 9]), [9]), r"cu_seqlens: expected bounds .* from 0 on that do not decrease, got \[1, 9\]"),
        ((torch.tensor([0, 10]), [9]), "cu_seqlens: expected bounds up to 9, the tokens of all ranks, got 10"),
        ((torch.tensor([0, 9]), [4, 5]), r"tokens_per_rank: expected 1 numbers .* at least 1, got \[4, 5\]"),
        ((torch.tensor([0, 0]), [0]), r"tokens_per_rank: .* got \[0\]"),
    ],
)
def test_context_refuses(alone, arguments, message):
    with pytest.raises(ValueError, match=message):
        DeviceContextParallel(alone, *arguments)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 4, 9], r"cu_seqlens: expected a tensor \[3\], got a list"),
        (torch.tensor([0, 9]), r"cu_seqlens: expected int32 or int64 bounds \[3\], got torch.int64 \[2\]"),
        (torch.tensor([0, 9, 4]), r"cu_seqlens: .* got \[0, 9, 4\]"),
        (torch.empty(3, dtype=torch.int64, device="meta"), "cu_seqlens: expected bounds on cpu or .* some on meta"),
    ],
)
def test_write_refuses(alone, bounds, message):
    with pytest.raises(ValueError, match=message):
        DeviceContextParallel(alone, torch.tensor([0, 4, 9]), [9]).write(bounds)


@pytest.mark.parametrize("name", ["gdn", "attention"])
def test_tokens_on_another_device_are_refused(alone, name):
    layer = LAYERS[name]().to("meta")
    x = torch.empty(1, 9, layer.hidden_size, dtype=torch.float64, device="meta")
    with pytest.raises(ValueError, match="cp_context: expected bounds on meta like the tokens, got some on cpu"):
        layer(x, cp_context=DeviceContextParallel(alone, torch.tensor([0, 9]), [9]))


@pytest.mark.parametrize("name", ["gdn", "gdp", "attention"])
def test_one_rank_is_the_planned_one(alone, name):
    """To the bit, also after bounds were written, and with padding. Attention computes with a mask."""
    layer = LAYERS[name]().double()
    x, device = random(1, 12, layer.hidden_size), DeviceContextParallel(alone, torch.tensor([0, 4, 10]), [12])
    layer(x, cp_context=device)
    device.write(torch.tensor([0, 7, 9], dtype=torch.int32))
    planned = ContextParallel(alone, [0, 7, 9], tokens_per_rank=[12])
    y, want = layer(x, cp_context=device), layer(x, cp_context=planned)
    limit = 1e-13 if name == "attention" else 0
    torch.testing.assert_close(y, want, rtol=limit, atol=limit)
    assert torch.equal(device.positions(x.device), planned.positions(x.device))


def test_updates_have_the_bounds_that_tokens_have(alone, monkeypatch):
    """Wrong bounds are moved into the row before they are multiplied. The product of these would wrap around."""
    context = DeviceContextParallel(alone, torch.tensor([0, 9, 9], dtype=torch.int32), [9])
    updates = context.times(2)
    monkeypatch.setattr(DeviceContextParallel, "_checked", lambda context, cu_seqlens: cu_seqlens)  # as on a GPU
    context.write(torch.tensor([0, 2**30 + 5, 9], dtype=torch.int32))
    assert context.cut.row.tolist() == [0, 9, 9]
    assert updates.cut.row.tolist() == [0, 18, 18]


def of_three(monkeypatch, received=0.0):
    """Lets this process be the second of three, which gets this number from others. Returns a list of what it sends."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    sent = []

    def gather(part, x):
        sent.append(x)
        return x.new_full((3, *x.shape), received), SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(Part, "gather", gather)
    return sent


def test_bounds_that_change_before_the_backward_pass_are_an_error(alone, monkeypatch):
    of_three(monkeypatch)
    context = DeviceContextParallel(alone, torch.tensor([0, 20, 30]), [10, 10, 10])
    layer = DELTA_LAYERS["gdn"]().float()
    y = layer(random(1, 10, layer.hidden_size).float(), cp_context=context)
    context.write(torch.tensor([0, 15, 30]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def results(layer, x, **split):
    x = x.clone().requires_grad_()
    y = layer(x, **split)
    return y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("name", ["gdn", "kda", "gdp"])
def test_others_change_nothing_where_no_sequence_crosses(alone, monkeypatch, name):
    of_three(monkeypatch, received=torch.nan)
    layer = DELTA_LAYERS[name]().double()
    context = DeviceContextParallel(alone, torch.tensor([0, 3, 10, 18, 30, 40]), [10, 20, 10])
    x = random(1, 20, layer.hidden_size)
    want = results(layer, x, cu_seqlens=torch.tensor([0, 8, 20]))
    for got, t in zip(results(layer, x, cp_context=context), want, strict=True):
        torch.testing.assert_close(got, t, rtol=1e-13, atol=1e-13)


def test_rows_without_tokens_hold_zeros(alone, monkeypatch):
    of_three(monkeypatch, received=torch.nan)
    layer = DELTA_LAYERS["gdn"]().double()
    context = DeviceContextParallel(alone, torch.tensor([0, 3, 10, 10, 30, 40]), [10, 20, 10])
    conv = tuple(random(5, c.hidden_size, 4) for c in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d))
    state = MixerState(conv, random(5, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim))
    given = state.recurrent
    layer(random(1, 20, layer.hidden_size), state=state, cp_context=context)
    for found in (*state.conv, state.recurrent):
        assert not found[[0, 1, 4]].any()
        assert found[3].any()
    assert torch.equal(state.recurrent[2], given[2])


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_a_document_of_nan_stays_alone(alone, monkeypatch, name):
    """What this rank sends to the left is of the sequence that came from there, and to the right of the one that goes
    on."""
    sent = of_three(monkeypatch)
    layer = DELTA_LAYERS[name]().double()
    context = DeviceContextParallel(alone, torch.tensor([0, 15, 25, 40]), [10, 20, 10])
    x = random(1, 20, layer.hidden_size)
    x[:, 5:15] = torch.nan
    y, dx, *_ = results(layer, x, cp_context=context)
    assert len(sent) == 4
    for t in (y[:, :5], y[:, 15:], dx[:, :5], dx[:, 15:], *sent):
        assert t.isfinite().all()


@pytest.mark.parametrize("name", ["gdn", "kda", "gdp", "attention"])
def test_nothing_reads_a_bound(alone, monkeypatch, name):
    """Tensors without values take the way of those on a GPU. Reading a value of one is an error."""
    of_three(monkeypatch)
    layer = LAYERS[name]().float()
    context = DeviceContextParallel(alone, torch.tensor([0, 15, 30, 36]), [10, 20, 10])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        context.cut = cut_row(mode.from_tensor(torch.tensor([0, 15, 30, 36])), torch.tensor([0, 10, 30, 40]), 1)
        with pytest.raises(DataDependentOutputException):
            context.cut.begins.any().item()
        x = torch.randn(1, 20, layer.hidden_size, requires_grad=True)
        state = None if name == "attention" else MixerState()
        y = layer(x, state=state, cp_context=context)
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == dx.shape == x.shape
