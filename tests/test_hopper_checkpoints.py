"""Checkpoints of a prompt that the Hopper backend scans in parts: on a GPU of that kind, or emulated."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hostile_bounds import HOSTILE, T, hostile, leave_unread
from prefill_truth import OPS, TOKENS, bounds, check, make_prefill, run, sequence
from prompt_truth import check_prompts, check_resumed, make_prompts
from serving_truth import slots
from test_hopper_pool import DEVICE, TINY, cut_prompts_at, launched, runs

import flash_delta

pytestmark = runs
IN_PARTS = [None, None, 1]  # the forms of what is launched for heads of 64
__all__ = ["launched"]


@pytest.fixture
def split(launched, monkeypatch):
    """Prompts are scanned in parts of so many chunks, or one more."""
    return lambda chunks: cut_prompts_at(monkeypatch, 2, chunks, 16)


def prompt(length=330, every=64, **changes):
    """A prompt. NaN comes after its tokens, and its table has a slot more than it needs."""
    x = make_prefill("gdn-raw", (length,), behind=9, slots=16, **(TINY | changes))
    for name in TOKENS:
        x[name][:, length:] = float("nan")
    columns = min(length // every + 1, 12)
    return x | {"checkpoint_indices": slots([range(3, 3 + columns)], x), "checkpoint_every": every}


def at_offset(x, offset, dtype=torch.int64):
    return x | {
        "checkpoint_indices": x["checkpoint_indices"][:, 0],
        "checkpoint_offsets": slots([offset], x, dtype),
        "checkpoint_every": None,
    }


def without(x):
    return x | {"checkpoint_indices": None, "checkpoint_offsets": None, "checkpoint_every": None}


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("every", [64, 128, 192])
def test_parts_and_strides(split, launched, chunks, every):
    """Parts and strides need not be multiples of each other. Checkpoints change no other bit."""
    x = prompt(every=every)
    split(chunks)
    o, pool = check("gdn-raw", x, "hopper")
    assert launched() in (None, IN_PARTS)
    bare, after = run("gdn-raw", without(x), "hopper")
    assert torch.equal(o, bare)
    assert torch.equal(pool[:3], after[:3])


@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(1, 2, 64), (2, 2, 64), (1, 3, 128)], ids=str)
def test_pools_and_heads(split, heads, pool, v_first):
    H, HV, width = heads
    split(2)
    check("gdn-raw", prompt(200, pool=pool, v_first=v_first, H=H, HV=HV, K=width, V=width), "hopper")


@pytest.mark.parametrize("length", [0, 1, 16, 17, 63, 64, 65, 127, 128, 129, 192])
def test_lengths(split, length):
    """Without tokens, in one chunk, with and without a tail; `decode` runs up to 16, and leaves no checkpoint."""
    split(1)
    check("gdn-raw", prompt(length), "hopper")


@pytest.mark.parametrize(
    ("pool", "v_first", "dtype"), [(torch.float32, True, torch.int64), (torch.bfloat16, False, torch.int32)]
)
def test_offsets(split, launched, pool, v_first, dtype):
    """A stride's bits at multiples of 64, and the final state's at the end; outputs are those without a checkpoint."""
    x = prompt(200, pool=pool, v_first=v_first)
    split(2)
    o, strided = run("gdn-raw", x, "hopper")
    for offset in (0, 1, 63, 64, 65, 128, 191, 192, 199, 200, 201, -1, 2**31 - 1):
        launched()
        same, found = check("gdn-raw", at_offset(x, offset, dtype), "hopper")
        assert launched() in (None, IN_PARTS)
        assert torch.equal(same, o)
        if offset % 64 == 0 and 0 < offset < 200:
            assert torch.equal(found[3], strided[2 + offset // 64])
        elif offset == 200:
            assert torch.equal(found[3], strided[1])


@pytest.mark.parametrize("offset", [0, 40, 64, 100])
def test_a_checkpoint_may_take_the_slot_that_is_read(split, offset):
    split(1)
    x = at_offset(prompt(130), offset)
    _, apart = run("gdn-raw", x, "hopper")
    _, after = check("gdn-raw", x | {"checkpoint_indices": x["read_indices"]}, "hopper")
    assert torch.equal(after[0], apart[3])


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_indices": [[-1, 16, -(2**40), 2**33 + 4, 5]]},
        {"checkpoint_indices": [[4, 5, 6, 7, 8]], "null_slot": 5},
        {"read_indices": [-1]},
        {"write_indices": [16]},
        {"write_indices": [1], "null_slot": 1},
        {"write_indices": None},
        {"read_indices": [-1], "has_initial_state": [0]},
    ],
)
def test_what_is_no_slot_is_padding(split, changes):
    """A prompt that lacks a slot leaves no checkpoint; one that starts from zeros needs none."""
    split(1)
    x = prompt(330)
    for name, value in changes.items():
        x[name] = value if name == "null_slot" or value is None else slots(value, x)
    if "has_initial_state" in changes:
        x["has_initial_state"] = x["has_initial_state"].bool()
    check("gdn-raw", x, "hopper")
    for indices in x["checkpoint_indices"].split(1, 1)[:2]:
        check("gdn-raw", at_offset(x, 200) | {"checkpoint_indices": indices[:, 0]}, "hopper")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", ["stride", "offset"])
def test_wrong_bounds_write_to_no_other_slot(split, monkeypatch, name, kind):
    """Only the final state's slot and those of checkpoints may change."""
    leave_unread(monkeypatch)
    split(1)
    x = prompt(T, HV=1)
    x = x if kind == "stride" else at_offset(x, 130)
    pools = run("gdn-raw", x | {"cu_seqlens": hostile(name, DEVICE)[:2] + 64}, "hopper")[1], x["state_pool"]
    named = {1, *x["checkpoint_indices"].flatten().tolist()}
    others = [slot for slot in range(16) if slot not in named]
    assert torch.equal(*(pool[others] for pool in pools))


def test_slots_with_gaps_and_a_table_with_strides(split):
    """What lies between slots keeps its bits."""
    split(2)
    x, size = prompt(200), 2 * 64 * 64
    store = torch.randn(16, size + 8, device=DEVICE)
    before = store.clone()
    x["state_pool"] = store[:, :size].view(16, 2, 64, 64)
    x["checkpoint_indices"] = x["checkpoint_indices"].int().repeat_interleave(3, 1)[:, ::3]
    check("gdn-raw", x, "hopper")
    OPS["gdn-raw"](**x, backend="hopper")
    assert torch.equal(store[:, size:], before[:, size:])
    assert not torch.equal(store, before)


@pytest.mark.parametrize("kind", ["stride", "offset"])
def test_windows_are_kept_with_checkpoints(split, launched, kind):
    """The slots of a convolution's windows are the states'."""
    split(1)
    x = make_prompts("gdn-raw", (140,), behind=3, slots=20, **TINY)
    x |= {"checkpoint_indices": slots([[5, 7]], x), "checkpoint_every": 64}
    check_prompts("gdn-raw", x if kind == "stride" else at_offset(x, 70), "hopper")
    assert launched() in (None, IN_PARTS)


@pytest.mark.parametrize("chunks", [None, 1, 2])
def test_a_prompt_goes_on_from_any_checkpoint(split, chunks):
    """With its window; scanned whole, or in parts."""
    if chunks is not None:
        split(chunks)
    x = make_prompts("gdn-raw", (200,), behind=3, slots=6, **TINY)
    for cut in (0, 1, 64, 70, 128, 199, 200):
        whole, rest = check_resumed("gdn-raw", x | {"batch_invariant": chunks is None}, cut, "hopper")
        if chunks is None and cut % 64 == 0:
            assert torch.equal(rest[0], whole[0][:, cut:])
            assert torch.equal(rest[1][1], whole[1][1])


def test_batch_invariance_cuts_as_well(split, launched):
    """With the same bits. A prompt that was not cut goes on from its checkpoint with its own bits."""
    x = prompt(200) | {"batch_invariant": True}
    o, pool = check("gdn-raw", x, "hopper")
    assert launched() in (None, [1])
    rest = {name: x[name][:, 128:] for name in TOKENS} | {"cu_seqlens": bounds([72], x), "state_pool": pool}
    again, after = run("gdn-raw", without(x) | rest | {"read_indices": slots([4], x)}, "hopper")
    assert torch.equal(again[:, :72], o[:, 128:200])
    assert torch.equal(after[1], pool[1])
    launched()
    split(1)
    o, pool = check("gdn-raw", x, "hopper")
    assert launched() in (None, IN_PARTS)
    same, pools = run("gdn-raw", x | {"batch_invariant": False}, "hopper")
    assert torch.equal(same, o)
    assert torch.equal(pools, pool)


@pytest.mark.skipif(DEVICE == "cpu", reason="asks a GPU: long prompts, as the plan cuts them")
@pytest.mark.parametrize(("H", "HV"), [(2, 4), (2, 8), (4, 16)])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
def test_long_prompts_as_planned(H, HV, pool):
    """Neither checkpoints, nor ``batch_invariant``, nor other sequences change a bit. Every checkpoint is within what
    rounding allows of the state of one scan, and a second call gives the same bits."""
    lengths = (300, 10300, 1, 64, 20000, 1)
    x = make_prefill(
        "gdn-raw", lengths, slots=24, H=H, HV=HV, K=128, V=128, dtype=torch.bfloat16, device=DEVICE, pool=pool
    )
    kept = slots([[-1] * 10, range(12, 22), *[[-1] * 10] * 4], x)
    x |= {"checkpoint_indices": kept, "checkpoint_every": 1024}
    assert "in up to" in flash_delta.explain(OPS["gdn-raw"], **x, backend="hopper").reasons["hopper"]
    o, found = run("gdn-raw", x, "hopper")
    for other in (x, without(x), x | {"batch_invariant": True}):
        again, after = run("gdn-raw", other, "hopper")
        for n in (0, 1, 3, 4):
            start, stop = x["cu_seqlens"][n : n + 2].tolist()
            assert torch.equal(again[:, start:stop], o[:, start:stop])
            assert torch.equal(after[6 + n], found[6 + n])
        assert torch.equal(after[12:22], found[12:22]) or other["checkpoint_every"] is None
    for n in (1, 4):
        start, stop = x["cu_seqlens"][n : n + 2].tolist()
        alone, after = run("gdn-raw", sequence(x, n), "hopper")
        assert torch.equal(alone, o[:, start:stop])
        assert torch.equal(after[6 + n], found[6 + n])
    _, whole = run("gdn-raw", x, "triton")
    for slot in (7, 10, *range(12, 22)):
        got, want = found[slot].double(), whole[slot].double()
        assert (got - want).norm() / want.norm() < 1e-2, slot
