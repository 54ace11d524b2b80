"""What of states at rest only a GPU can show: its arithmetic, graphs, no synchronisation, more than 2^31 numbers."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from test_int8_states import DTYPES, axes, keep, make_pool, make_store, pools, same, scales

import flash_delta
from flash_delta.ops.serving import Int8States, dequantize_states, quantize_states

HEADS = 4, 128, 128


@pools
@scales
@axes
@pytest.mark.parametrize("heads", [HEADS, (2, 64, 64), (2, 256, 256), (3, 100, 72)], ids=str)
def test_the_bits_of_the_definition(dtype, scale, axis, heads):
    """Also of numbers below 2^-126, which a GPU could take for 0, and of quotients that are ties."""
    pool = make_pool(dtype, heads=heads, slots=6)
    pool[0, 0, 0, 2, 3], pool[1, 0, 1, 5, 6], pool[1, 1, 0] = float("nan"), float("inf"), 0
    pool[:, 2] = torch.randint(-254, 255, pool[:, 2].shape) / 2
    if dtype == torch.float16:
        pool[:, 3] *= 1e-6
        pool.clamp_(-60000, 60000)
    else:
        pool[:, 3] *= 2.0**-125
        pool[:, 4] *= 2.0**-133
        pool[:, 5] *= 2.0**100
    wanted, wanted_back = keep(pool, axis, scale, "torch")
    found, back = keep(pool.cuda(), axis, scale, "triton")
    assert torch.equal(found.states.cpu(), wanted.states)
    assert same(found.scale.cpu(), wanted.scale)
    assert same(back.cpu(), wanted_back)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_graph(dtype):
    """After a call with padding nothing is compiled, nothing waits and nothing is allocated. A graph is captured once
    and replayed with other values everywhere."""
    pool, other = (make_pool(dtype, "cuda", seed, slots=9, heads=HEADS) for seed in (0, 1))
    store, padding = make_store(pool, -2, slots=20), torch.full((3,), -1, device="cuda")
    rows, places, to = (torch.tensor(t, device="cuda") for t in ([1, 7, 0], [19, 2, 11], [3, 0, 5]))
    quantize_states(pool, padding, store, padding, 0)
    dequantize_states(store, padding, pool, padding, 0)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with flash_delta.forbid_compilation():
            quantize_states(pool, rows, store, places, 0)
            dequantize_states(store, places, pool, to, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_states(pool, rows, store, places, 0)
        dequantize_states(store, places, pool, to, 0)
    pool.copy_(other)
    for t, values in ((rows, [8, 2, 1]), (places, [4, 0, 3]), (to, [5, 6, 7])):
        t.copy_(torch.tensor(values))
    graph.replay()
    _, back = keep(other, -2, torch.float32, "triton")
    assert torch.equal(pool[:, [5, 7]], back[:, [8, 1]])
    assert torch.equal(pool[:, [0, 1, 2, 3, 4, 6, 8]], other[:, [0, 1, 2, 3, 4, 6, 8]])  # place 0 is padding


@axes
def test_pools_of_more_than_two_to_the_31_numbers(axis):
    """Slots beyond them, and layers beyond them. Nothing else is touched."""
    small = make_pool(torch.bfloat16, "cuda", slots=2, heads=HEADS)
    wanted, _ = keep(small, axis, torch.float32, "triton")
    far = 2**31 // (4 * 128 * 128) + 100
    pool = torch.zeros(2, far + 2, *HEADS, dtype=torch.bfloat16, device="cuda")
    pool[:, far:] = small
    store = make_store(pool, axis, slots=far + 2)
    store.states.fill_(0)
    rows, near = (torch.tensor(t, device="cuda") for t in ([far, far + 1], [0, 1]))
    quantize_states(pool, rows, store, rows)
    assert torch.equal(store.states[:, far:], wanted.states)
    assert torch.equal(store.scale[:, far:], wanted.scale)
    assert not store.states[:, :far].any()
    assert not pool[:, :far].any()
    pool.zero_()
    dequantize_states(store, rows, pool, rows)
    dequantize_states(Int8States(*(t[:, far:] for t in store)), near, small, near)
    assert torch.equal(pool[:, far:], small)
    assert not pool[:, :far].any()
