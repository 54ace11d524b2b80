"""What of prefill only a GPU can show: graphs, no synchronisation, pools of more than 2^31 numbers, launches."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import triton
from prefill_truth import OPS, TOKENS, bounds, make_prefill, run, sequence
from serving_truth import KINDS, slots

import flash_delta
from flash_delta.kernels.hopper.channel import prefill as channel
from flash_delta.kernels.hopper.plans.tiles import CHANNEL_HALF, CHANNEL_WHOLE, NARROW, WIDE
from flash_delta.kernels.hopper.scalar.forward import loop
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.pool_launches import PoolLaunch
from flash_delta.kernels.triton.forward import scan
from flash_delta.kernels.triton.forward.scan_launches import pool_scans
from flash_delta.kernels.triton.tiles import scan_tiles
from flash_delta.ops import _known_calls

HOPPER = torch.cuda.get_device_capability()[0] == 9
BY_HAND = [kind for kind in KINDS if kind.startswith("gdn") or kind == "kda-bounded"] if HOPPER else []
CALLS = [(kind, "triton") for kind in KINDS] + [(kind, "hopper") for kind in BY_HAND]
HOPPERS = [(kind, "hopper") for kind in ("gdn-raw", "kda-bounded") if HOPPER]
TWO = [("gdn-raw", "triton"), ("kda", "triton"), *HOPPERS]
HEADS = {"H": 2, "HV": 4, "K": 128, "V": 128, "dtype": torch.bfloat16, "device": "cuda"}


def mixed(kind, lengths=(700, 1, 0, 130, 16, 64, 0, 0), **changes):
    """Prompts beside decoding rows and rows that are none, with checkpoints, and NaN behind all."""
    x = make_prefill(kind, lengths, behind=1300 - sum(lengths), slots=40, **(HEADS | changes))
    table = [[16 + 3 * n, 17 + 3 * n, 18 + 3 * n] for n in range(8)]
    x |= {"checkpoint_indices": slots(table, x, torch.int32), "checkpoint_every": 128}
    x["has_initial_state"] = slots([1, 1, 0, 0, 1, 0, 1, 1], x).bool()
    x["read_indices"][-2:] = x["write_indices"][-2:] = -1
    for name in TOKENS:
        x[name][:, sum(lengths) :] = float("nan")
    return x


def at_offsets(x, offsets):
    """Returns the call with one checkpoint of each sequence."""
    x = x | {"checkpoint_indices": x["checkpoint_indices"][:, 0].clone(), "checkpoint_every": None}
    return x | {"checkpoint_offsets": slots(offsets, x)}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("kind", "backend"), CALLS)
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", [False, True])
def test_graph(kind, backend, pool, batch_invariant, offsets):
    """Captured once, replayed with other lengths, indices and values; nothing waits, and what a call allocates is its
    output, its workspace and, for each scan with tiles by the copy engine, their descriptors."""
    x, other = mixed(kind, pool=pool), mixed(kind, (3, 0, 900, 70, 17, 200, 2, 65), pool=pool, seed=1)
    other["checkpoint_indices"] = other["checkpoint_indices"].flip(0)
    other["read_indices"] = slots([0, 1, 2, -1, 4, 5, 99, 7], x)
    other["write_indices"] = slots([8, 9, 10, 11, -1, 12, 13, 7], x)
    x, other = x | {"batch_invariant": batch_invariant}, other | {"batch_invariant": batch_invariant}
    if offsets:
        x, other = at_offsets(x, (699, 1, 0, 65, 3, 64, 0, 1)), at_offsets(other, (3, 0, 333, 64, -1, 200, 1, 10))
    want, want_pool = run(kind, other, backend)
    static = {name: t.clone() if torch.is_tensor(t) else t for name, t in x.items()} | {"backend": backend}
    OPS[kind](**static)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = OPS[kind](**static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before in (2, 3, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = OPS[kind](**static)
    for name, t in other.items():
        if torch.is_tensor(t):
            static[name].copy_(t)
    graph.replay()
    assert torch.equal(o, want)
    assert torch.equal(static["state_pool"], want_pool)
    assert not want.isnan().any()


@pytest.mark.parametrize(("kind", "backend"), TWO)
def test_batch_invariance(kind, backend):
    """Where other numbers of sequences choose other tiles; cut at 64, too."""
    heads = {"H": 16, "HV": 32} if backend == "hopper" else {}  # of which it scans three prompts otherwise than one
    x = mixed(kind, (700, 1, 5, 130, 16, 64, 0, 77), **heads) | {"batch_invariant": True}
    x |= {"read_indices": torch.arange(8, device="cuda"), "write_indices": torch.arange(8, 16, device="cuda")}
    o, pool = run(kind, x, backend)
    for n, (start, stop) in enumerate(zip(x["cu_seqlens"].tolist(), x["cu_seqlens"].tolist()[1:], strict=False)):
        alone, alone_pool = run(kind, sequence(x, n), backend)
        assert torch.equal(alone, o[:, start:stop])
        assert torch.equal(alone_pool[8 + n], pool[8 + n])
    rest = sequence(x, 0) | {name: x[name][:, 128:700] for name in TOKENS} | {"cu_seqlens": bounds([572], x)}
    rest |= {"state_pool": pool, "read_indices": slots([16], x), "has_initial_state": None}
    rest |= {"checkpoint_indices": None, "checkpoint_every": None}
    o_rest, after = run(kind, rest, backend)
    assert torch.equal(o_rest, o[:, 128:700])
    assert torch.equal(after[8], pool[8])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("kind", "backend"), TWO)
def test_checkpoints_at_offsets(kind, backend, batch_invariant):
    """A sequence may go on in its own slot. A stride's bits at multiples of 64, the final state's at the end, and else
    those of decoding from the multiple before."""
    x = mixed(kind) | {"batch_invariant": batch_invariant, "checkpoint_every": 64}
    x["write_indices"][:2] = x["read_indices"][:2]
    o, strided = run(kind, x, backend)
    at = at_offsets(x, (40, 1, 0, 128, 16, 64, 5, 5))
    same, found = run(kind, at, backend)
    late, last = run(kind, at_offsets(x, (69, 1, 0, 130, 7, 63, 0, 0)), backend)
    kept = at["checkpoint_indices"]
    assert torch.equal(same, o)
    assert torch.equal(late, o)
    assert torch.equal(found[kept[3]], strided[26])
    assert torch.equal(found[kept[[1, 4, 5]]], found[[1, 12, 13]])
    assert torch.equal(last[kept[3]], last[11])
    for n, state, pool, first, stop in ((0, x["state_pool"][0], found, 0, 40), (0, strided[16], last, 64, 69)):
        decoded = state.unsqueeze(0).clone()
        for start in range(first, stop, 16):
            tokens = {name: x[name][:, start : min(start + 16, stop)] for name in TOKENS}
            others = {name: x[name] for name in x if name not in ("cu_seqlens", "batch_invariant", "has_initial_state")}
            others = {name: value for name, value in others.items() if not name.startswith("checkpoint")}
            here = {"state_pool": decoded, "read_indices": slots([0], x), "write_indices": slots([0], x)}
            KINDS[kind][0](**(others | tokens | here))
        assert torch.equal(pool[kept[n]], decoded[0])


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="other chips have one tile for any number")
@pytest.mark.parametrize("kind", ["gdn-raw", "kda"])
def test_all_tiles_give_the_same_bits(kind, monkeypatch):
    """So that batch invariance may choose among them by the number of sequences."""
    found, x = [], mixed(kind) | {"batch_invariant": True}
    for width in (16, 32, 64, 128):

        def launches(kernel, p, chip, every, *choice, width=width):
            return tuple(PoolLaunch(t, p.N) for t in scan_tiles(kernel, p, chip, True) if every or width == t.BV)

        monkeypatch.setattr(scan, "scan_launches", launches)
        _known_calls.calls.clear()
        found.append(run(kind, x, "triton"))
    _known_calls.calls.clear()
    for o, pool in found[1:]:
        assert torch.equal(o, found[0][0])
        assert torch.equal(pool, found[0][1])


@pytest.mark.parametrize(("kind", "backend"), TWO)
def test_more_prompts_than_promised(kind, backend):
    x = mixed(kind, (700, 1, 18, 130, 16, 64, 40, 70))
    o, pool = run(kind, x, backend)
    for most in (0, 1, 3, 6, 8):
        same, same_pool = run(kind, x | {"max_prompts": most}, backend)
        assert torch.equal(same, o)
        assert torch.equal(same_pool, pool)


@pytest.mark.skipif(not HOPPER, reason="of the Hopper backend")
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "module", "plan", "tiles"),
    [
        ("gdn-raw", loop, "pool_loops", (WIDE, NARROW)),
        ("kda-bounded", channel, "channel_pool_launches", (CHANNEL_WHOLE, CHANNEL_HALF)),
    ],
    ids=["gdn", "kda"],
)
def test_whole_states_and_halves_give_the_same_bits(kind, module, plan, tiles, pool, monkeypatch):
    """So that neither `max_prompts` nor, with batch invariance, the number of prompts changes a result."""
    found, x = [], mixed(kind, pool=pool)
    for tile in tiles:
        monkeypatch.setattr(module, plan, lambda p, *choice, t=tile, **options: (PoolLaunch(t, p.N),))
        _known_calls.calls.clear()  # nor may those of other tests be known
        found.append(run(kind, x, "hopper"))
    _known_calls.calls.clear()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["triton", *(["hopper"] if HOPPER else [])])
@pytest.mark.parametrize("v_first", [True, False], ids=["v-first", "k-first"])
def test_pools_of_more_than_two_to_the_31_numbers(v_first, backend):
    """The bits are those of a small pool with slots as far apart. Nothing else is touched."""
    x = mixed("gdn-raw", pool=torch.bfloat16, v_first=v_first)
    far = 2**31 // (4 * 128 * 128) + 100
    pool = torch.zeros(far + 40, 4, 128, 128, dtype=torch.bfloat16, device="cuda")
    pool[far:] = x["state_pool"]
    o, small = run("gdn-raw", x, backend)
    moved = {n: x[n].where(x[n] < 0, x[n] + far) for n in ("read_indices", "write_indices", "checkpoint_indices")}
    again = OPS["gdn-raw"](**(x | moved | {"state_pool": pool}), backend=backend)
    assert torch.equal(again, o)
    assert torch.equal(pool[far:], small)
    assert not pool[:far].any()


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_launches(kind):
    """A prompt takes four kernels, and three without short ones to look for. Of several only the device knows how many
    are prompts: for every tile that may be the one there is a scan."""
    x, launched = mixed(kind), []
    hook, note = triton.knobs.runtime.launch_enter_hook, launched.append
    alone = sequence(x, 0)
    for call, scans in ((alone, 1), (x, None), (x | {"max_prompts": 3}, 1), (alone | {"batch_invariant": True}, 0)):
        if scans is None:
            p = flash_delta.explain(OPS[kind], **call).problem
            scans = len(pool_scans(p, chip_of(p.device), every=False))
        run(kind, call, "triton")
        launched.clear()
        hook.add(note)
        try:
            run(kind, call, "triton")
        finally:
            hook.remove(note)
        assert len(launched) == 3 + scans


@pytest.mark.parametrize(("kind", "backend"), [("kda-bounded", "triton"), *HOPPERS])
def test_bits_do_not_change_from_call_to_call(kind, backend):
    x = mixed(kind)
    o, pool = run(kind, x, backend)
    for _ in range(100):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again, pool_again = run(kind, x, backend)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(again, o)
        assert torch.equal(pool_again, pool)
