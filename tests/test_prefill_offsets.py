"""Checkpoints at one offset per sequence: both backends against float64, and what is promised of bits."""

import pytest
import torch
from prefill_truth import OPS, TOKENS, bounds, check, make_prefill, run, sequence, truth
from serving_truth import DEVICES, KINDS, needs_triton, slots

from flash_delta.testing import assert_accurate

backends = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
TINY = {"H": 1, "HV": 1, "K": 16, "V": 16}
AT = [  # (length, offset)
    (17, 0), (17, 1), (17, 16), (17, 17), (40, 17), (65, 63), (65, 64), (70, 65), (130, 128), (130, 129), (130, 130),
    (70, 70), (70, 69), (5, 5), (16, 16), (16, 7), (0, 0), (0, 1), (20, 21), (70, -1), (70, 2**31 - 1), (20, -(2**31)),
]  # fmt: skip
NO_CHECKPOINTS = {"checkpoint_indices": None, "checkpoint_offsets": None, "checkpoint_every": None}


def with_offsets(x, offsets, dtype=torch.int64):
    """Returns the call with checkpoints at ``offsets``, which go to the last slots but one."""
    N, count = len(offsets), len(x["state_pool"])
    indices = torch.arange(count - N - 1, count - 1, device=x["q"].device)
    return x | {"checkpoint_indices": indices, "checkpoint_offsets": slots(offsets, x, dtype)}


@backends
@pytest.mark.parametrize(
    ("kind", "pool", "v_first", "batch_invariant"),
    [
        ("gdn-raw", torch.float32, True, False),
        ("gdn", torch.bfloat16, False, True),
        ("kda-raw", torch.float32, False, True),
        ("kda", torch.bfloat16, True, False),
    ],
)
def test_against_the_recurrence(kind, pool, v_first, batch_invariant, backend):
    """Half of the sequences go on in their own slots, every fifth starts from zeros, and three are padding."""
    N = len(AT)
    shape = TINY | {"pool": pool, "v_first": v_first, "device": DEVICES[backend]}
    x = make_prefill(kind, [length for length, _ in AT], 2, 3 * N + 2, **shape)
    x = with_offsets(x, [offset for _, offset in AT], torch.int32) | {"batch_invariant": batch_invariant}
    x["write_indices"][::2] = x["read_indices"][::2]
    x["has_initial_state"] = torch.arange(N, device=x["q"].device) % 5 != 4
    x["read_indices"][6] = x["write_indices"][7] = x["checkpoint_indices"][8] = -1
    check(kind, x, backend)


BITS = [("gdn-raw", torch.float32), ("kda", torch.float32), ("gdn", torch.bfloat16)]


@backends
@pytest.mark.parametrize(("kind", "pool"), BITS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_promised_of_bits(kind, pool, batch_invariant, backend):
    """A stride's at multiples of 64, the final state at the end, and else what decoding makes of the rest."""
    x = make_prefill(kind, (129, 65, 16, 70, 70, 20), slots=40, pool=pool, device=DEVICES[backend], **TINY)
    x |= {"batch_invariant": batch_invariant}
    x["write_indices"][5] = x["read_indices"][5]
    table = torch.arange(12, 24, device=x["q"].device).view(6, 2)
    o_bare, bare = run(kind, x, backend)
    _, strided = run(kind, x | {"checkpoint_indices": table, "checkpoint_every": 64}, backend)
    o, after = run(kind, with_offsets(x, (128, 65, 16, 70, 69, 17)), backend)
    assert torch.equal(o, o_bare)
    assert torch.equal(after[:12], bare[:12])
    found = after[33:39]
    assert torch.equal(found[0], strided[table[0, 1]])
    assert torch.equal(found[1:4], after[[7, 8, 9]])
    firsts = x["cu_seqlens"].tolist()
    for n, state, first, last in ((4, strided[table[4, 0]], 64, 69), (5, x["state_pool"][5], 0, 17)):
        decoded = state.float().unsqueeze(0).clone()  # states in between are float32, whatever the pool
        for at in range(first, last, 16):
            tokens = {name: x[name][:, firsts[n] + at : firsts[n] + min(at + 16, last)] for name in TOKENS}
            others = {name: value for name, value in x.items() if name not in ("cu_seqlens", "batch_invariant")}
            here = {"state_pool": decoded, "read_indices": slots([0], x), "write_indices": slots([0], x)}
            KINDS[kind][0](**(others | tokens | here), backend=backend)
        assert torch.equal(found[n], decoded[0].to(pool))


@backends
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_checkpoint_may_take_the_slot_that_is_read(batch_invariant, backend):
    """Or that of which nothing is read, since the sequence starts from zeros."""
    lengths, offsets = (20, 70, 20, 5, 5, 40), (5, 69, 0, 3, 5, 30)
    x = make_prefill("gdn-raw", lengths, slots=24, device=DEVICES[backend], **TINY)
    x |= {"batch_invariant": batch_invariant, "has_initial_state": slots([1, 1, 1, 1, 1, 0], x).bool()}
    x = with_offsets(x, offsets)
    o, apart = run("gdn-raw", x, backend)
    same, after = check("gdn-raw", x | {"checkpoint_indices": x["read_indices"]}, backend)
    assert torch.equal(same, o)
    assert torch.equal(after[:12], torch.cat([apart[x["checkpoint_indices"]], apart[6:12]]))


@backends
@pytest.mark.parametrize("kind", ["gdn-raw", "kda"])
def test_a_sequence_alone_leaves_the_same_checkpoint(kind, backend):
    x = make_prefill(kind, (70, 5, 70, 40), slots=20, device=DEVICES[backend], **TINY) | {"batch_invariant": True}
    x = with_offsets(x, (66, 3, 70, 30))
    _, pool = run(kind, x, backend)
    for n, slot in enumerate(x["checkpoint_indices"].tolist()):
        assert torch.equal(run(kind, sequence(x, n), backend)[1][slot], pool[slot])


@backends
@pytest.mark.parametrize("cut", [64, 70])
def test_a_prompt_goes_on_from_its_checkpoint(cut, backend):
    """At 64 with the bits of the run that was not cut; elsewhere it has other chunks."""
    x = make_prefill("gdn-raw", (150,), slots=6, device=DEVICES[backend], **TINY) | {"batch_invariant": True}
    o, pool = run("gdn-raw", with_offsets(x, (cut,)), backend)
    rest = {name: x[name][:, cut:] for name in TOKENS} | {"cu_seqlens": bounds([150 - cut], x), "state_pool": pool}
    tail, after = run("gdn-raw", x | rest | NO_CHECKPOINTS | {"read_indices": slots([4], x)}, backend)
    want_o, want = truth("gdn-raw", x)
    assert_accurate("o", tail, want_o[:, cut:], torch.float32)
    assert_accurate("state_pool", after[1], want[1], torch.float32)
    assert torch.equal(tail, o[:, cut:]) == (cut == 64)
    assert torch.equal(after[1], pool[1]) == (cut == 64)


@backends
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_whatever_offsets_are(dtype, backend):
    """No canary changes: between slots, around them, in those of others. Tables are columns of larger ones."""
    bad = [-1, 67, -(2**31), 2**31 - 1]
    if dtype == torch.int64:
        bad += [2**32, 2**32 + 65, 2**62, -(2**63), 2**63 - 1]
    N = len(bad) + 1
    x = make_prefill("gdn", [66] * N, slots=3 * N + 2, device=DEVICES[backend], **TINY)
    x = with_offsets(x, [65, *bad], dtype)
    for name in ("checkpoint_indices", "checkpoint_offsets"):
        x[name] = torch.stack([torch.full_like(x[name], 3), x[name]], 1)[:, 1]
    memory = torch.full((3 * N + 6, 1, 17, 18), float("nan"), device=x["q"].device)
    pool = memory[2:-2, :, 1:, 2:]
    pool.copy_(x["state_pool"])
    before = memory.clone()
    o, _ = check("gdn", x, backend)
    again = OPS["gdn"](**(x | {"state_pool": pool}), backend=backend)
    assert torch.equal(again, o)
    written = [*x["write_indices"].tolist(), int(x["checkpoint_indices"][0])]
    before[2:-2, :, 1:, 2:][written] = pool[written]
    assert torch.equal(memory.view(torch.int32), before.view(torch.int32))
