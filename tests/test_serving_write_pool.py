"""A draft that reads one pool and writes another: the bits of one in place, and float64 where their dtypes differ."""

import pytest
import torch
from serving_truth import DEVICES, bits, coarser, make_call, needs_triton, run, slots, truth
from test_serving import BAD_64
from test_serving_step import make_step, run_step

from flash_delta.testing import assert_accurate

backends = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
shapes = pytest.mark.parametrize("rows", [False, True], ids=["slots", "rows"])
TREES = [[-1, 0, 0, 1], [-1, -1, 1, 0]]


def empty(t, rows, T):
    """For three rows of T tokens: nine slots, or three rows with gaps between them and a place that no token has."""
    nan = torch.full((3, T + 2, *t.shape[1:]), float("nan"), dtype=t.dtype, device=t.device)
    return nan[:, : T + 1] if rows else nan[:, :3].flatten(0, 1)


def targets(rows, x):
    """Returns the indices of two rows of four tokens, in the nine slots or in the three rows."""
    return slots([2, 0] if rows else [[8, 1, 5, 3], [0, 7, 2, 4]], x)


def filled(target, rows, states):
    """A pool in which the rows' states [2, 4, ...] are there, and nothing else."""
    target = target.clone()
    if rows:
        target[2, :4], target[0, :4] = states
    else:
        target[[8, 1, 5, 3, 0, 7, 2, 4]] = states.flatten(0, 1)
    return bits(target)


@backends
@shapes
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("kind", "pool"), [("gdn-raw", torch.bfloat16), ("kda-bounded", torch.float32)])
def test_it_is_a_call_in_place(kind, pool, tree, rows, backend):
    """Bitwise in o, states and windows; what no token writes stays, and the pools that are read."""
    x, conv = make_step(kind, B=2, T=4, slots=12, V=8, pool=pool, v_first=tree, device=DEVICES[backend])
    x |= {"parent_idx": slots(TREES, x)} if tree else {}
    table = slots([[2, 3, 4, 5], [6, 7, 8, 9]], x)
    want, states, windows = run_step(kind, x | {"write_indices": table}, conv, backend)
    target, conv_target = (empty(t, rows, 4) for t in (x["state_pool"], conv[0]))
    apart = x | {"write_indices": targets(rows, x), "write_pool": target}
    o, *written = run_step(kind, apart, (*conv, conv_target), backend)
    assert torch.equal(o, want)
    for after, before, in_place in zip(written, (target, conv_target), (states, windows), strict=True):
        assert torch.equal(bits(after), filled(before, rows, in_place[table]))


@backends
@shapes
@pytest.mark.parametrize(("read", "write"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
def test_pools_of_two_dtypes(read, write, rows, backend):
    """The state that is read counts as it is; after each token it is rounded to what is written."""
    x = make_call("gdn-raw", B=3, T=4, HV=1, V=8, pool=read, v_first=rows, device=DEVICES[backend])
    x["state_pool"] *= 1 + 2**-9  # which bfloat16 does not hold
    x |= {"read_indices": slots([4, 1, 5], x), "write_pool": empty(x["state_pool"], rows, 4).to(write)}
    write = slots([2, 0, 3] if rows else [[8, 1, 5, 3], [0, 7, 2, 4], [6, 9, 9, 9]], x)  # 3, 9 are none
    for tree in ({}, {"parent_idx": slots([*TREES, [-1] * 4], x)}):
        call = x | {"write_indices": write} | tree
        (o, pool), (want, want_pool) = run("gdn-raw", call, backend), truth("gdn-raw", call)
        assert_accurate("o", o, want, coarser(o.dtype, pool.dtype))
        assert torch.equal(o.cpu() == 0, want == 0)
        assert torch.equal(pool.cpu().isnan(), want_pool.isnan())
        assert_accurate("write_pool", pool.nan_to_num(), want_pool.nan_to_num(), pool.dtype)


@backends
@shapes
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_what_is_no_slot_is_padding(dtype, tree, rows, backend):
    """Row 0 is well. In each other row what it writes is out of range, or ``null_slot``. Neither pool that is written
    changes anywhere else."""
    bad = [-1, 3 if rows else 9, -(2**31), 2**31 - 1, 1, *(BAD_64 if dtype == torch.int64 else ())]
    x, conv = make_step("gdn-raw", B=1 + len(bad), T=3, H=1, HV=1, V=8, slots=20, device=DEVICES[backend])
    for t in (x["v"], x["q"], x["output_norm"].gate):
        t[1:] = float("nan")
    x |= {"null_slot": 1, "read_indices": slots([3] * len(x["q"]), x, dtype)}
    write = [2, *bad] if rows else [[8, 2, 5], *[[b, 7, 7] for b in bad]]
    x["write_indices"] = slots(write, x, dtype)
    if tree:
        x["parent_idx"] = slots([[-1, 0, 0], *[[-1, 0, 1]] * len(bad)], x, dtype)
    target, conv_target = (empty(t, rows, 3) for t in (x["state_pool"], conv[0]))
    o, *written = run_step("gdn-raw", x | {"write_pool": target}, (*conv, conv_target), backend)
    alone = {name: x[name][:1] for name in (*"qkv", "g", "beta", "read_indices", "write_indices")}
    alone |= {"parent_idx": x["parent_idx"][:1]} if tree else {}
    alone["output_norm"] = x["output_norm"]._replace(gate=x["output_norm"].gate[:1])
    want, *expected = run_step("gdn-raw", x | alone | {"write_pool": target}, (*conv, conv_target), backend)
    assert torch.equal(o[:1], want)
    assert want.all()
    assert not o[1:].any()
    for after, same in zip(written, expected, strict=True):
        assert torch.equal(bits(after), bits(same))
        places = after[2, :3] if rows else after[[8, 2, 5]]
        assert not places.isnan().any()
        assert int((~after.isnan()).sum()) == places.numel()


@backends
def test_only_the_last_state_of_a_row(backend):
    x = make_call("kda", T=3, device=DEVICES[backend])
    want, states = run("kda", x | {"write_indices": slots([3, 1], x)}, backend)
    target = x["state_pool"].new_full(x["state_pool"][:5].shape, float("nan"))
    o, pool = run("kda", x | {"write_indices": slots([4, 2], x), "write_pool": target}, backend)
    assert torch.equal(o, want)
    assert torch.equal(pool[[4, 2]], states[[3, 1]])
    assert torch.equal(bits(pool[[0, 1, 3]]), bits(target[[0, 1, 3]]))
