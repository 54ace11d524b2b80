"""Prefill on a pool of states: both backends against float64; without a GPU, kernels in Triton's interpreter."""

from itertools import product

import pytest
import torch
from prefill_truth import OPS, TOKENS, bounds, check, make_prefill, run, sequence, truth
from serving_truth import DEVICES, GPU, KINDS, coarser, needs_triton, slots

import flash_delta
from flash_delta.testing import assert_accurate
from tests.changed import changed

BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
backends = pytest.mark.parametrize("backend", BACKENDS)
POOLS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TINY = {"H": 1, "HV": 1, "K": 16, "V": 16}


PAIRS = [
    pytest.param(kind, pool, (i + j) % 2 == 0, id=f"{kind}-{pool}-{'kv'[(i + j) % 2 == 0]}-first")
    for (i, kind), (j, pool) in product(enumerate(KINDS), enumerate(POOLS))
]


@backends
@pytest.mark.parametrize(("kind", "pool", "v_first"), PAIRS)
def test_against_the_recurrence(kind, pool, v_first, backend):
    """Long, short and no sequences, and rows behind them; one goes on in its own slot, and one starts from zeros."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float32}[pool]
    if kind == "kda-bounded":  # in float32 Triton's interpreter does not get through the bound's division
        dtype = torch.float16
    x = make_prefill(
        kind, (70, 1, 0, 20), behind=2, dtype=dtype, pool=POOLS[pool], v_first=v_first, device=DEVICES[backend]
    )
    x["write_indices"][0] = 0
    x |= {"has_initial_state": slots([1, 1, 1, 0], x).bool(), "scale": 0.3}
    for name in TOKENS:
        x[name][:, -2:] = float("nan")
    check(kind, x, backend)


@backends
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", ["gdn-raw", "kda"])
def test_lengths(kind, batch_invariant, backend):
    """All that decoding runs, and those around one, two and three chunks."""
    lengths = (*range(18), 63, 64, 65, 128, 190)
    x = make_prefill(kind, lengths, device=DEVICES[backend], **TINY) | {"batch_invariant": batch_invariant}
    check(kind, x, backend)


@needs_triton
def test_launches_for_the_prompts_that_there_may_be():
    """By tile: how many sequences have programs, and for how many there is a launch."""
    from flash_delta.kernels.runtime.chip import Chip
    from flash_delta.kernels.runtime.pool_launches import ANY
    from flash_delta.kernels.triton.forward.scan_launches import pool_scans

    p = flash_delta.explain(flash_delta.prefill_gated_delta_rule, **make_prefill("gdn", (70,), **TINY)).problem
    p = p._replace(N=65, T=64 + 2048, H=16, HV=32, K=128, V=128, dtype=torch.bfloat16)

    def launches(chip=("sm_90", 132), **changes):
        return [(w.tile.BV, *w[1:]) for w in pool_scans(changed(p, **changes), Chip(*chip), every=False)]

    assert launches() == [(32, 1, 0, 1, False), (64, 2, 2, 2, False), (128, 17, 3, 17, True)]
    assert launches(max_prompts=1) == [(32, 1, 0, 1, True)]
    assert launches(max_prompts=2) == [(64, 2, 0, 2, True)]
    assert launches(max_prompts=40) == [(128, 40, 0, 40, True)]
    assert launches(N=1) == [(32, 1, 0, 1, True)]
    assert launches(T=16) == launches(max_prompts=0) == [(16, 1, 0, 0, True)], "the tokens behind the last sequence"
    assert launches(HV=256) == [(128, 3, 0, 3, True)]
    for changes in ({"max_prompts": 1}, {"T": 65}):
        assert launches(batch_invariant=True, **changes) == launches(), "short sequences are walked, too"
    assert launches(chip=("sm_80", 108)) == [(32, 65, 0, 65, True)]
    assert launches(chip=("sm_80", 108), N=70_000, T=2**21) == [(32, 65_534, 0, 65_534, True)], "others take turns"
    every = pool_scans(p, Chip("sm_90", 132), every=True)
    assert [(w.tile.BV, w.most) for w in every] == [(BV, ANY) for BV in (16, 32, 64, 128)]


@backends
@pytest.mark.parametrize("kind", ["gdn-raw", "kda"])
def test_how_many_prompts_there_are_changes_no_result(kind, backend):
    """Five, whatever was promised."""
    x = make_prefill(kind, (70, 1, 0, 20, 65, 16, 17, 2, 18), behind=3, device=DEVICES[backend], **TINY)
    o, pool = check(kind, x, backend)
    for most in (0, 2, 5, 9):
        same, same_pool = run(kind, x | {"max_prompts": most}, backend)
        assert torch.equal(same, o)
        assert torch.equal(same_pool, pool)


@backends
@pytest.mark.parametrize(("lengths", "slots"), [((), None), ((0, 0), None), ((5, 70), 1), ((3, 0), 1)])
def test_nothing_to_do(lengths, slots, backend):
    """No sequences; none with a token; no slots but one, which both write to if anyone does."""
    x = make_prefill("gdn", lengths, behind=3, slots=slots, device=DEVICES[backend], **TINY)
    x["write_indices"] = None if slots else x["write_indices"]
    check("gdn", x, backend)


@backends
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_null_slot_and_out(batch_invariant, backend):
    """Prompts, decoding rows and checkpoints may have the null slot. Outputs go where the caller says, and those of
    padding are zeros."""
    x = make_prefill("gdn", (70, 3, 20, 66), behind=2, slots=14, device=DEVICES[backend], **TINY)
    x |= {"read_indices": slots([0, 5, 2, 3], x), "write_indices": slots([4, 6, 5, 7], x), "null_slot": 5}
    x |= {"checkpoint_indices": slots([[5], [9], [10], [11]], x), "checkpoint_every": 64}
    x |= {"batch_invariant": batch_invariant, "has_initial_state": slots([1, 1, 0, 1], x).bool()}
    o, pool = check("gdn", x, backend)
    memory = torch.full((1, 2 + o.shape[1], *o.shape[2:]), float("nan"), device=o.device)
    out = memory[:, 1:-1]
    same, same_pool = run("gdn", x | {"out": out}, backend)
    assert same.data_ptr() == out.data_ptr()
    assert torch.equal(out, o)
    assert torch.equal(same_pool, pool)
    assert memory[:, [0, -1]].isnan().all()


@backends
def test_sequences_without_a_slot_to_write(backend):
    """Nothing is written, and nothing but an index that is needed makes a sequence padding."""
    x = make_prefill("gdn", (20, 66, 2, 5), device=DEVICES[backend], **TINY) | {"write_indices": None}
    x |= {"read_indices": slots([-1, 1, -1, 2], x), "has_initial_state": slots([0, 1, 0, 1], x).bool()}
    o, pool = check("gdn", x, backend)
    assert o.any(-1).all()
    assert torch.equal(pool, x["state_pool"])


@backends
@pytest.mark.parametrize(("kind", "v_first"), [("gdn", True), ("kda-raw", False)])
def test_checkpoints(kind, v_first, backend):
    """A sequence writes checkpoints as far as it reaches, where there is a slot. Going on from one gives the same
    bits."""
    x = make_prefill(kind, (192, 130, 16, 127, 200), slots=20, device=DEVICES[backend], v_first=v_first, **TINY)
    table = [[10, 11, 12, 13], [14, -1, 0, 1], [0, 1, 2, 3], [2**40, 15, 3, 4], [20, 16, 17, 18]]
    x |= {"checkpoint_indices": slots(table, x), "checkpoint_every": 64}
    o, pool = check(kind, x, backend)
    bare, without = run(kind, x | {"checkpoint_indices": None, "checkpoint_every": None}, backend)
    assert torch.equal(bare, o)  # they change nothing else
    assert torch.equal(without[5:10], pool[5:10])
    twice = {"checkpoint_indices": slots([[10, 11], [14, 15], [16, 17], [18, 19], [12, -1]], x)}
    _, half = check(kind, x | twice | {"checkpoint_every": 128}, backend)
    assert torch.equal(half[[10, 14, 12]], torch.stack([pool[11], half[14], pool[16]]))
    rest = {name: x[name][:, 64:192] for name in TOKENS} | {"cu_seqlens": bounds([128], x)}
    rest |= {"read_indices": slots([10], x), "write_indices": slots([19], x), "state_pool": pool}
    tail, after = run(kind, x | rest | {"checkpoint_indices": None, "checkpoint_every": None}, backend)
    assert torch.equal(tail, o[:, 64:192])
    assert torch.equal(after[19], pool[5])


@backends
@pytest.mark.parametrize("kind", ["gdn-raw", "kda"])
def test_batch_invariance(kind, backend):
    """Bitwise: each sequence alone, and in pieces cut at multiples of 64, is what it is among others."""
    lengths = (150, 1, 70, 12, 64)
    x = make_prefill(kind, lengths, device=DEVICES[backend], **TINY) | {"batch_invariant": True}
    o, pool = run(kind, x, backend)
    start = 0
    for n, length in enumerate(lengths):
        alone, alone_pool = run(kind, sequence(x, n), backend)
        assert torch.equal(alone, o[:, start : start + length])
        assert torch.equal(alone_pool[5 + n], pool[5 + n])
        start += length
    first, half = run(
        kind, x | {n: x[n][:, :64] for n in TOKENS} | {"cu_seqlens": bounds([64, 0, 0, 0, 0], x)}, backend
    )
    rest = sequence(x, 0) | {n: x[n][:, 64:150] for n in TOKENS} | {"cu_seqlens": bounds([86], x)}
    second, whole = run(kind, rest | {"state_pool": half, "read_indices": slots([5], x)}, backend)
    assert torch.equal(torch.cat([first, second], 1), o[:, :150])
    assert torch.equal(whole[5], pool[5])


@backends
@pytest.mark.parametrize(("kind", "pool"), [("gdn-raw", torch.float32), ("kda", torch.bfloat16)])
def test_short_sequences_are_what_decoding_makes_of_them(kind, pool, backend):
    """Beside a prompt, whose results they do not change."""
    x = make_prefill(kind, (16, 16, 90, 16), pool=pool, device=DEVICES[backend], **TINY)
    o, after = check(kind, x, backend)
    decoded = {name: torch.cat([x[name][:, :32], x[name][:, -16:]], 1).unflatten(1, (3, 16))[0] for name in TOKENS}
    decoded |= {name: x[name][[0, 1, 3]] for name in ("read_indices", "write_indices")}
    decoded = {name: t for name, t in (x | decoded).items() if name != "cu_seqlens"}
    again = x["state_pool"].clone()
    rows = KINDS[kind][0](**(decoded | {"state_pool": again}), backend=backend)
    assert_accurate("o", torch.cat([o[:, :32], o[:, -16:]], 1).unflatten(1, (3, 16))[0], rows, coarser(pool))
    assert_accurate("state_pool", after[[4, 5, 7]], again[[4, 5, 7]], pool)
    alone, _ = run(kind, sequence(x, 2), backend)
    assert_accurate("o", o[:, 32:-16], alone, torch.float32)


BAD = [-1, 10, -(2**31), 2**31 - 1]
BAD_64 = [2**32, 2**32 + 1, 2**62, -(2**63), 2**63 - 1]


@backends
@pytest.mark.parametrize("length", [0, 3, 66])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("where", ["read_indices", "write_indices", "checkpoint_indices"])
def test_what_is_no_slot_is_padding(where, dtype, length, backend):
    """Zeros, and no canary changed: between slots, around them, in those of others. NaN in such rows harms none."""
    bad = BAD + (BAD_64 if dtype == torch.int64 else [])
    others, checkpoints = len(bad), where == "checkpoint_indices"
    x = make_prefill("gdn", (70, *[length] * others), slots=10, device=DEVICES[backend], **TINY)
    indices = {"read_indices": [0] + [7] * others, "write_indices": [1] + [8] * others}
    indices["checkpoint_indices"] = [[2]] + [[9]] * others
    indices[where][1:] = [[b] for b in bad] if checkpoints else bad
    if checkpoints:  # these sequences are well, but for what they would leave on their way
        indices["read_indices"][1:] = indices["write_indices"][1:] = [-1] * others
        indices["read_indices"][1], indices["write_indices"][1] = 3, 4
    else:
        x["v"][:, 70:] = float("nan")
    x |= {name: slots(values, x, dtype) for name, values in indices.items()} | {"checkpoint_every": 64}
    memory = torch.full((14, 1, 17, 18), float("nan"), device=x["q"].device)
    pool = memory[2:12, :, 1:, 2:]
    pool.copy_(x["state_pool"])
    before = memory.clone()
    o = OPS["gdn"](**(x | {"state_pool": pool}), backend=backend)
    want_o, want_pool = truth("gdn", x)
    last = 70 + (length if checkpoints else 0)
    assert_accurate("o", o[:, :last], want_o[:, :last], torch.float32)
    assert not o[:, last:].any()
    assert_accurate("state_pool", pool, want_pool, torch.float32)
    own = [3, 4, 6] if checkpoints else [3, 4]  # in memory: the slots that are written
    before[own, :, 1:, 2:] = memory[own, :, 1:, 2:]
    assert torch.equal(before.view(torch.int32), memory.view(torch.int32))


@backends
def test_strides_are_taken_as_they_are(backend):
    """Slices of one projection, padded slots, indices and flags out of tables: the same bits, no copy. Compiled kernels
    fetch tiles in another way and may round another way."""
    x = make_prefill("gdn-raw", (70, 4, 20), slots=12, device=DEVICES[backend])
    x |= {"checkpoint_indices": slots([[8], [9], [10]], x), "checkpoint_every": 64}
    x["has_initial_state"] = slots([1, 0, 1], x).bool()
    o, pool = run("gdn-raw", x, backend)
    device, views = x["q"].device, {}
    projection = torch.randn(1, 94, 16 + 16 + 48 + 5, device=device)
    gates, table = torch.randn(1, 94, 2, 2, device=device), torch.zeros(3, 7, dtype=torch.long, device=device)
    views["q"], views["k"] = projection[..., :16].unflatten(2, (1, 16)), projection[..., 16:32].unflatten(2, (1, 16))
    views["v"] = projection[..., 32:80].unflatten(2, (2, 24))
    views["g"], views["beta"] = gates[..., 0], gates[..., 1]
    views["state_pool"] = torch.randn(12, 2 * 24 * 16 + 80, device=device)[:, 80:].view(12, 2, 24, 16)
    views["read_indices"], views["write_indices"], views["checkpoint_indices"] = table[:, 1], table[:, 2], table[:, 4:5]
    views["has_initial_state"] = torch.zeros(3, 2, dtype=torch.bool, device=device)[:, 1]
    for name, view in views.items():
        view.copy_(x[name])
        assert not view.is_contiguous()
    again, pool_again = run("gdn-raw", x | views, backend)
    if GPU and backend == "triton":
        assert_accurate("o", again, o, o.dtype)
        assert_accurate("state_pool", pool_again, pool, o.dtype)
    else:
        assert torch.equal(again, o)
        assert torch.equal(pool_again, pool)


@backends
def test_a_prompt_in_pieces_is_a_prompt(backend):
    """Wherever it is cut, within the accuracy rule."""
    x = make_prefill("kda-raw", (180,), device=DEVICES[backend], **TINY)
    want, pool = x | {"read_indices": slots([1], x), "write_indices": slots([1], x)}, x["state_pool"].clone()
    want_o, want_pool = truth("kda-raw", want)
    pieces = []
    for start, stop in ((0, 5), (5, 104), (104, 105), (105, 180)):
        piece = {name: x[name][:, start:stop] for name in TOKENS} | {"cu_seqlens": bounds([stop - start], x)}
        pieces.append(OPS["kda-raw"](**(want | piece | {"state_pool": pool}), backend=backend))
    assert_accurate("o", torch.cat(pieces, 1), want_o, torch.float32)
    assert_accurate("state_pool", pool[1], want_pool[1], torch.float32)


@backends
def test_nothing_carries_a_gradient(backend):
    x = make_prefill("gdn", (20, 3), device=DEVICES[backend], **TINY)
    x["q"].requires_grad_()
    with pytest.raises(ValueError, match="prefill_gated_delta_rule: q: expected a tensor without gradient"):
        run("gdn", x, backend)
    with torch.no_grad():
        o, pool = run("gdn", x, backend)
    assert not o.requires_grad
    assert not pool.requires_grad


def test_autocast_changes_nothing():
    x = make_prefill("gdn", (70, 3))
    o, pool = run("gdn", x, "torch")
    with torch.autocast("cpu"):
        again, pool_again = run("gdn", x, "torch")
    assert torch.equal(again, o)
    assert torch.equal(pool_again, pool)


def test_the_pool_in_float64():
    x = make_prefill("kda-bounded", (70, 9, 0), dtype=torch.float64, pool=torch.float64)
    check("kda-bounded", x, "torch")
