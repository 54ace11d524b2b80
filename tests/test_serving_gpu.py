"""What of serving only a GPU can show: graphs, no synchronisation, pools of more than 2^31 numbers, other streams."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from serving_truth import KINDS, make_call, run

from flash_delta.ops.serving import Convolution

HEADS = {"H": 2, "HV": 4, "K": 128, "V": 128, "dtype": torch.bfloat16, "device": "cuda"}


def draft(kind, **changes):
    """Eight rows of four tokens that go on from one of four states each, with a table of slots for everything."""
    x = make_call(kind, **({"B": 8, "T": 4, "slots": 40} | HEADS | changes))
    tables = torch.arange(32, dtype=torch.int32, device="cuda").view(8, 4)
    counts = torch.tensor([1, 4, 2, 3, 1, 0, 5, 2], dtype=torch.int32, device="cuda")
    return x | {"read_indices": tables, "write_indices": tables, "num_accepted_tokens": counts}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
def test_graph(kind, pool):
    """Captured once, replayed with other values everywhere; nothing but the output is allocated, nothing waits."""
    x, other = draft(kind, pool=pool), draft(kind, pool=pool, seed=1)
    other |= {
        "read_indices": other["read_indices"].flip(0),
        "num_accepted_tokens": other["num_accepted_tokens"].flip(0),
    }
    other["write_indices"] = other["read_indices"]
    want, want_pool = run(kind, other, "triton")
    static = {name: t.clone() if torch.is_tensor(t) else t for name, t in x.items()}
    KINDS[kind][0](**static)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = KINDS[kind][0](**static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = KINDS[kind][0](**static)
    for name, t in other.items():
        if torch.is_tensor(t):
            static[name].copy_(t)
    graph.replay()
    assert torch.equal(o, want)
    assert torch.equal(static["state_pool"], want_pool)


def packed_draft(kind, seed):
    """Drafts of eight rows of their own lengths, which write another pool and rolling windows."""
    x, gen = draft(kind, seed=seed), torch.Generator().manual_seed(seed)
    x |= {name: x[name].flatten(0, 1).unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    bounds = torch.randint(0, 5, (9,), generator=gen).cumsum(0)
    x["cu_seqlens"] = (bounds - bounds[0]).int().cuda()
    x["write_pool"] = torch.zeros(9, 5, *x["state_pool"].shape[1:], dtype=torch.bfloat16, device="cuda")[:, :4]
    x["write_indices"] = torch.randperm(9, generator=gen)[:8].int().cuda()
    windows, weight = torch.randn(40, 1024, 6, generator=gen), torch.randn(1024, 4, generator=gen)
    return x | {"convolution": Convolution(windows.bfloat16().cuda(), weight.cuda(), rolling=True)}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("kind", ["gdn-raw", "kda-bounded"])
def test_graph_of_packed_drafts(kind):
    """Captured once, replayed with other bounds, counts, indices and windows; nothing waits."""
    want_x, static, other = packed_draft(kind, 1), packed_draft(kind, 0), packed_draft(kind, 1)
    want = KINDS[kind][0](**want_x)
    KINDS[kind][0](**static)
    torch.cuda.set_sync_debug_mode("error")
    try:
        KINDS[kind][0](**static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = KINDS[kind][0](**static)
    for name, t in other.items():
        if torch.is_tensor(t):
            static[name].copy_(t)
    for before, now in zip(static["convolution"][:2], other["convolution"][:2], strict=True):
        before.copy_(now)
    graph.replay()
    assert torch.equal(o, want)
    assert torch.equal(static["write_pool"], want_x["write_pool"])
    assert torch.equal(static["convolution"].pool, want_x["convolution"].pool)
    assert torch.equal(static["state_pool"], other["state_pool"])


@pytest.mark.parametrize("v_first", [True, False], ids=["v-first", "k-first"])
def test_pools_of_more_than_two_to_the_31_numbers(v_first):
    """The bits are those of a small pool with slots as far apart. Nothing else is touched."""
    x = draft("gdn-raw", pool=torch.bfloat16, v_first=v_first)
    far = 2**31 // (4 * 128 * 128) + 100
    pool = torch.zeros(far + 40, 4, 128, 128, dtype=torch.bfloat16, device="cuda")
    pool[far:] = x["state_pool"]
    o, small = run("gdn-raw", x, "triton")
    tables = x["read_indices"] + far
    again = KINDS["gdn-raw"][0](**(x | {"state_pool": pool, "read_indices": tables, "write_indices": tables}))
    assert torch.equal(again, o)
    assert torch.equal(pool[far:], small)
    assert not pool[:far].any()


def test_bits_do_not_change_from_call_to_call():
    """Nor with the stream, and batches of more programs than run at once."""
    x = make_call("kda-bounded", **({"B": 256, "T": 2, "slots": 256} | HEADS))
    x["write_indices"] = x["read_indices"]
    o, pool = run("kda-bounded", x, "triton")
    for _ in range(100):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again, pool_again = run("kda-bounded", x, "triton")
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(again, o)
        assert torch.equal(pool_again, pool)


@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
def test_a_row_is_what_it_is_beside_fewer(pool, T):
    """Few rows have narrower tiles than many (tiles.FEW), and the same bits. All rows are compared: a sum of a norm in
    another order changes some rows only."""
    x = make_call("gdn-raw", B=64, T=T, slots=80, pool=pool, **HEADS)
    x["write_indices"] = x["read_indices"]
    o, states = run("gdn-raw", x, "triton")
    for b in range(0, 64, 8):
        names = ("q", "k", "v", "g", "beta", "read_indices", "write_indices")
        few, few_states = run("gdn-raw", x | {name: x[name][b : b + 8] for name in names}, "triton")
        assert torch.equal(few, o[b : b + 8])
        assert torch.equal(few_states[b : b + 8], states[b : b + 8])
