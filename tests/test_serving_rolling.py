"""Rolling windows, one slot for a draft: the bits of a window for each of its tokens, and the inputs that are kept."""

import random

import pytest
import torch
from serving_truth import DEVICES, KINDS, bits, needs_triton, slots
from test_serving_packed import packed
from test_serving_step import make_step, run_step

from flash_delta.ops.serving import Convolution

backends = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])


def inputs_of(x):
    """Returns the convolution's inputs, [B, T, D]."""
    return torch.cat([x[name].flatten(2) for name in ("q", "k", "v")], 2)


def run_rolling(kind, x, conv, backend):
    """Runs a call with rolling windows. Returns what `run_step` returns."""
    pools = {name: x[name].clone() for name in ("state_pool", "write_pool") if name in x}
    windows = conv[0].clone()
    convolution = Convolution(windows, *conv[1:], rolling=True)
    return KINDS[kind][0](**(x | pools), convolution=convolution, backend=backend), [*pools.values()][-1], windows


@backends
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("kind", "W", "pool"), [("gdn-raw", 4, torch.bfloat16), ("kda-bounded", 2, torch.float32)])
def test_steps_of_drafts(kind, W, pool, ragged, backend):
    """Bitwise, for any counts; and the next window of a row is where the count of the next call says."""
    chance, T, windows, before = random.Random(W), 3, None, [1] * 3
    for step in range(4):
        x, conv = make_step(
            kind, W=W, L=W - 1, B=3, T=T, H=1, HV=2, V=8, slots=10, pool=pool, seed=step, device=DEVICES[backend]
        )
        if windows is None:
            state, windows = x["state_pool"], conv[0]
            rolling = torch.randn_like(windows[:, :, :1]).repeat(1, 1, W + T)
            rolling[0::3][:3, :, : W - 1] = windows[:9].view(3, 3, *windows.shape[1:])[:, 0]
        lengths = [chance.randint(1, T) for _ in range(3)] if ragged else [T] * 3
        counts = [chance.randint(1, length) for length in before]
        table = slots([[0, 1, 2], [3, 4, 5], [6, 7, 8]], x)
        x |= {"state_pool": state, "read_indices": table, "write_indices": table}
        x["num_accepted_tokens"] = slots(counts, x)
        x = packed(x, lengths, behind=1) if ragged else x
        old = rolling.clone()
        o, state, windows = run_step(kind, x, (windows, *conv[1:]), backend)
        again, same, rolling = run_rolling(kind, x, (rolling, *conv[1:]), backend)
        if not ragged:  # all inputs are kept, also if only the last state is
            last = x | {"write_indices": table[:, -1].contiguous()}
            assert torch.equal(run_rolling(kind, last, (old, *conv[1:]), backend)[2], rolling)
        assert torch.equal(again, o)
        assert torch.equal(same, state)
        tokens = inputs_of(x)
        rows = tokens[0].split([*lengths, 1])[:3] if ragged else tokens
        for b, (row, a) in enumerate(zip(rows, counts, strict=True)):
            kept = torch.cat([old[3 * b, :, a : a + W - 2], row.mT], 1)
            assert torch.equal(rolling[3 * b], torch.cat([kept, old[3 * b, :, kept.shape[1] :]], 1))
        others = [slot for slot in range(10) if slot not in (0, 3, 6)]
        assert torch.equal(rolling[others], old[others])
        before = lengths


@backends
def test_one_token_shifts_the_window(backend):
    """Also with states in a pool of their own; without a write nothing moves."""
    x, conv = make_step("gdn-raw", W=4, L=3, B=2, T=1, V=8, device=DEVICES[backend])
    wide = torch.cat([conv[0], torch.randn_like(conv[0])], 2)
    want, states, windows = run_step("gdn-raw", x | {"write_indices": x["read_indices"]}, conv, backend)
    target = {"write_pool": torch.zeros_like(states), "write_indices": x["read_indices"]}
    for changes in ({}, {"write_indices": x["read_indices"]}, target):
        o, pool, rolled = run_rolling("gdn-raw", x | changes, (wide, *conv[1:]), backend)
        assert torch.equal(o, want)
        assert torch.equal(pool[:2], states[:2] if changes else x["state_pool"][:2])
        assert torch.equal(rolled, torch.cat([windows if changes else conv[0], wide[..., 3:]], 2))


@backends
def test_what_is_no_slot_and_no_count(backend):
    """Row 0 is well, and its draft ends after two tokens. Nothing of any other slot changes, nor between slots."""
    x, conv = make_step("gdn-raw", B=6, T=3, H=1, HV=1, V=8, slots=9, device=DEVICES[backend])
    memory = torch.full((13, conv[0].shape[1] + 1, 7), float("nan"), device=conv[0].device)
    windows = memory[2:11, 1:, 1:]
    windows.copy_(torch.randn(windows.shape))
    x["read_indices"] = slots([[3, 8], [-1, 4], [9, 4], [4, 2**40], [5, 4], [5, 4]], x)
    x["num_accepted_tokens"] = slots([2, 2, 2, 2, 3, 0], x)
    x["write_indices"] = slots([[1, 2, -1], *[[5, 6, 7]] * 5], x)
    before, pool = memory.clone(), x["state_pool"].clone()
    o = KINDS["gdn-raw"][0](**x, convolution=Convolution(windows, *conv[1:], rolling=True), backend=backend)
    assert o[0, :2].all(-1).all()
    assert not o[0, 2].any()
    assert not o[1:].any()
    tokens = inputs_of(x)[0]
    before[5, 1:, 1:5] = torch.cat([before[5, 1:, 3:5], tokens[:2].mT], 1)
    assert torch.equal(bits(memory), bits(before))
    changed = (x["state_pool"] != pool).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2]


@pytest.mark.parametrize("ragged", [False, True])
def test_rows_that_share_a_window_are_refused(ragged):
    """On a CPU. Their states lie in slots of their own. Windows that are only read may be shared."""
    x, conv = make_step("gdn-raw", W=4, L=18, B=2, T=2, H=1, HV=1, V=8)
    x |= {"read_indices": slots([[0, 1], [0, 2]], x), "num_accepted_tokens": slots([2, 2], x)}
    x = packed(x, [2, 1]) if ragged else x
    run_rolling("gdn-raw", x, conv, "torch")
    writing = {"write_indices": slots([[3, 4], [5, 6]], x), "out": torch.ones_like(x["v"])}
    with pytest.raises(ValueError, match="rule: read_indices: expected different slots, got slot 0 twice"):
        run_rolling("gdn-raw", x | writing, conv, "torch")
    assert (writing["out"] == 1).all()  # a refused call writes nothing
    x["read_indices"] = slots([[0, 1], [7, 2]], x)
    run_rolling("gdn-raw", x | writing, conv, "torch")
