"""Serving on a pool of states: both backends against float64; without a GPU, kernels in Triton's interpreter."""

import pytest
import torch
from serving_truth import DEVICES, KINDS, coarser, make_call, needs_triton, run, slots, truth

from flash_delta.testing import assert_accurate

BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
backends = pytest.mark.parametrize("backend", BACKENDS)
POOLS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check(kind, x, backend):
    """Outputs and the whole pool are as accurate as their dtypes allow; what no token writes keeps its bits."""
    (o, pool), (want_o, want_pool) = run(kind, x, backend), truth(kind, x)
    dtype = coarser(o.dtype, pool.dtype)
    assert_accurate("o", o, want_o, dtype)
    assert_accurate("state_pool", pool, want_pool, dtype)
    before = x["state_pool"].cpu()
    kept = (want_pool == before.double()).flatten(1).all(1)
    assert torch.equal(pool.cpu()[kept], before[kept])
    assert torch.equal(o.cpu() == 0, want_o == 0)
    return o, pool


@backends
@pytest.mark.parametrize("v_first", [True, False], ids=["v-first", "k-first"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_recurrence(kind, pool, v_first, backend):
    """A draft of three tokens whose states are all written, and one of which only the last is."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float32}[pool]
    x = make_call(kind, dtype=dtype, pool=POOLS[pool], v_first=v_first, device=DEVICES[backend])
    check(kind, x | {"write_indices": slots([[3, 4, 5], [1, 8, 6]], x)}, backend)
    check(kind, x | {"write_indices": slots([3, 1], x, torch.int32), "scale": 0.3}, backend)


@backends
def test_null_slot(backend):
    """An index of its own that is padding: to read from, to write to, and in a draft tree as a parent's slot."""
    x = make_call(device=DEVICES[backend], T=3) | {"null_slot": 1}
    check("gdn", x | {"write_indices": slots([4, 5], x)}, backend)  # row 1 reads it
    check("gdn", x | {"write_indices": slots([[4, 1, 5], [6, 7, 8]], x)}, backend)
    x["read_indices"] = slots([[1, 2], [3, 1]], x)
    x["num_accepted_tokens"] = slots([2, 1], x)
    o, _ = check("gdn", x | {"write_indices": slots([1, 5], x, torch.int32)}, backend)
    assert not o[0].any()
    assert o[1].any()
    x |= {"write_indices": slots([[4, 1, 5], [6, 7, 8]], x), "parent_idx": slots([[-1, 0, 1], [-1, 0, 0]], x)}
    check("gdn", x, backend)


@backends
def test_out(backend):
    """Outputs go where the caller says, also those of padding, in one call and when it is known."""
    x = make_call(T=2, V=32, device=DEVICES[backend])
    x["read_indices"] = slots([1, -1], x)
    want, _ = run("gdn", x, backend)
    memory = torch.full((4, *want.shape[1:]), 7.0, device=want.device)
    for _ in range(2):
        memory.fill_(7)
        o = KINDS["gdn"][0](**x, out=memory[1:3], backend=backend)
        assert o.data_ptr() == memory[1:].data_ptr()
        assert torch.equal(memory[1:3], want)
        assert (memory[[0, 3]] == 7).all()


SHAPES = [(64, 64), (128, 128), (256, 256), (128, 64), (64, 128), (17, 33), (100, 7), (1, 1)]


@backends
@pytest.mark.parametrize("v_first", [True, False], ids=["v-first", "k-first"])
@pytest.mark.parametrize(("K", "V"), SHAPES)
def test_widths(K, V, v_first, backend):
    x = make_call(
        "gdn-raw", B=1, T=2, H=1, HV=1, K=K, V=V, pool=torch.bfloat16, v_first=v_first, device=DEVICES[backend]
    )
    check("gdn-raw", x | {"write_indices": slots([4], x)}, backend)
    x = make_call("kda-bounded", B=1, T=1, H=1, HV=1, K=K, V=V, v_first=v_first, device=DEVICES[backend])
    check("kda-bounded", x | {"write_indices": slots([[4]], x)}, backend)


@backends
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_grouped_heads_and_decays_of_all_sizes(kind, backend):
    """Three value heads to a key head; log decays 0, -100, -1000 and -inf beside mild ones."""
    x = make_call(kind, T=4, H=2, HV=6, K=24, device=DEVICES[backend])
    sizes = torch.tensor([0.0, -0.1, -5.0, -100.0, -1000.0, float("-inf")], device=x["g"].device)
    x["g"] = sizes[torch.arange(x["g"].numel(), device=x["g"].device).view_as(x["g"]) % 6]
    check(kind, x | {"write_indices": slots([[2, 3, 4, 5], [1, 6, 7, 8]], x)}, backend)


@backends
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # a sigmoid that is 0
@pytest.mark.parametrize("kind", ["gdn-raw", "kda-raw", "kda-bounded"])
def test_strong_raw_gates(kind, backend):
    x = make_call(kind, T=2, device=DEVICES[backend])
    x |= {"g": 30 * x["g"], "A_log": x["A_log"].abs() + 2}
    check(kind, x | {"write_indices": slots([0, 1], x)}, backend)
    if kind == "kda-bounded":
        _, pool = run(kind, x | {"A_log": None, "dt_bias": None, "write_indices": slots([0, 1], x)}, backend)
        assert not torch.equal(pool, x["state_pool"])


@backends
@pytest.mark.parametrize("T", range(1, 17))
def test_tokens_in_one_call_are_tokens_in_calls(T, backend):
    """Bitwise, however the slots are named: by call, by token, by a count of what was accepted, or in a tree."""
    kind, pool = (("gdn-raw", torch.bfloat16), ("kda-bounded", torch.float32), ("kda", torch.float16))[T % 3]
    x = make_call(kind, B=1, T=T, HV=1, V=16, slots=20, pool=pool, v_first=T % 2 == 0, device=DEVICES[backend])
    path = slots([range(2, T + 2)], x)
    o, after = run(kind, x | {"write_indices": path}, backend)
    state, singles = x["state_pool"].clone(), []
    for t in range(T):
        token = {name: x[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        read = x["read_indices"] if t == 0 else path[:, t - 1]
        out, state = run(
            kind, x | token | {"state_pool": state, "read_indices": read, "write_indices": path[:, t]}, backend
        )
        singles.append(out)
    assert torch.equal(torch.cat(singles, 1), o)
    assert torch.equal(state, after)
    chain = slots([range(-1, T - 1)], x)
    counted = {"read_indices": slots([[7, 0, 9]], x), "num_accepted_tokens": slots([2], x)}
    for other in ({"parent_idx": chain}, counted):
        again, pool = run(kind, x | {"write_indices": path} | other, backend)
        assert torch.equal(again, o)
        assert torch.equal(pool, after)
    final, _ = run(kind, x | {"write_indices": path[:, -1]}, backend)
    assert torch.equal(final, o)
    assert torch.equal(run(kind, x, backend)[0], o)  # without a write, no other bits


TREES = [[-1, 0, 0, 1, 1, 2, 5], [-1, -1, 1, 0, 2, -1, 3], [-1, 0, 1, 2, 3, 4, 5], [-1, -1, -1, 1, 1, 0, 0]]


@backends
@pytest.mark.parametrize("kind", ["gdn-raw", "kda"])
def test_draft_trees(kind, backend):
    """Every token gives bitwise what a draft of its ancestors and itself gives; a root may overwrite what was read."""
    x = make_call(kind, B=4, T=7, HV=1, V=8, slots=32, pool=torch.bfloat16, device=DEVICES[backend])
    write = torch.arange(28, device=x["q"].device).view(4, 7)
    write[:, 0] = x["read_indices"] = slots([28, 29, 30, 31], x)
    o, pool = check(kind, x | {"write_indices": write, "parent_idx": slots(TREES, x)}, backend)
    for b, parents in enumerate(TREES):
        for t in (3, 6):
            path = [t]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            row = {name: x[name][b : b + 1, path] for name in ("q", "k", "v", "g", "beta")}
            row |= {"read_indices": x["read_indices"][b : b + 1], "write_indices": write[b : b + 1, path]}
            alone, alone_pool = run(kind, x | row, backend)
            assert torch.equal(alone[0], o[b, path])
            assert torch.equal(alone_pool[write[b, t]], pool[write[b, t]])


BAD = {  # for a pool of nine slots, three states per row, and the second token of a tree
    "read": [-1, 9, -(2**31), 2**31 - 1],
    "write": [-1, 9, -(2**31), 2**31 - 1],
    "token": [-1, 9, -(2**31), 2**31 - 1],
    "count": [0, 4, -(2**31), 2**31 - 1],
    "parent": [-2, 0, 1, 2, -(2**31), 2**31 - 1],
}
BAD_64 = [2**32, 2**32 + 1, 2**62, -(2**63), 2**63 - 1]


def hostile(where, dtype, x):
    """Row 0 is well; each of the others has in one place what it should not have."""
    bad = BAD[where] + (BAD_64 if dtype == torch.int64 else [])
    read, write, tables = [0] * (len(bad) + 1), [[1, 2, 3]] + [[4, 5, 6]] * len(bad), {}
    if where == "read":
        read[1:] = bad
    if where == "write":
        write = [1, *bad]
    if where == "token":
        write[1:] = [[b, 5, 6] for b in bad]
    if where == "count":
        read, tables["num_accepted_tokens"] = [[8, 0, 8]] * len(read), slots([2, *bad], x, dtype)
    if where == "parent":
        write[1:] = [[-1, 5, 6]] * len(bad)
        tables["parent_idx"] = slots([[-1, 0, 1], *[[-1, b, 1] for b in bad]], x, dtype)
    return tables | {"read_indices": slots(read, x, dtype), "write_indices": slots(write, x, dtype)}


@backends
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("where", BAD)
def test_what_is_no_slot_is_padding(where, dtype, backend):
    """Zeros, and no canary changed: between slots, around them, in those of others. NaN in such rows harms no other."""
    B = len(hostile(where, dtype, make_call())["read_indices"])
    x = make_call("gdn-raw", B=B, T=3, V=16, device=DEVICES[backend])
    x |= hostile(where, dtype, x)
    x["v"][1:] = float("nan")
    memory = torch.full((13, 2, 17, 18), float("nan"), device=x["q"].device)
    pool = memory[2:11, :, 1:, 2:]
    pool.copy_(x["state_pool"])
    before = memory.clone()
    o = KINDS["gdn-raw"][0](**(x | {"state_pool": pool}), backend=backend)
    want_o, want_pool = truth("gdn-raw", x)
    assert_accurate("o", o[:1], want_o[:1], torch.float32)
    assert not o[1:].any()
    assert_accurate("state_pool", pool, want_pool, torch.float32)
    before[3:6, :, 1:, 2:] = memory[3:6, :, 1:, 2:]  # the first row's own slots
    assert torch.equal(before.view(torch.int32), memory.view(torch.int32))


@backends
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_first_token_continues_the_row(dtype, backend):
    """Its index is ignored: 0 as in SGLang's trees, or anything."""
    bad = BAD["parent"] + (BAD_64 if dtype == torch.int64 else [])
    x = make_call("kda", B=len(bad), T=3, V=16, slots=4 * len(bad), device=DEVICES[backend])
    x |= {"read_indices": slots(range(len(bad)), x)}
    x["write_indices"] = slots(torch.arange(len(bad), 4 * len(bad)).view(-1, 3).tolist(), x)
    want = check("kda", x | {"parent_idx": slots([[-1, 0, 0]] * len(bad), x, dtype)}, backend)
    found = run("kda", x | {"parent_idx": slots([[b, 0, 0] for b in bad], x, dtype)}, backend)
    assert all(map(torch.equal, found, want))
    assert want[0].all()


@backends
def test_a_draft_ends_with_its_first_token_without_a_slot(backend):
    x = make_call("kda", T=4, device=DEVICES[backend])
    o, _ = check("kda", x | {"write_indices": slots([[3, 4, -1, 5], [6, 7, 8, 1]], x)}, backend)
    assert o[0, :2].all(-1).all()
    assert not o[0, 2:].any()


@backends
def test_no_rows_and_no_slots(backend):
    x = make_call(B=0, device=DEVICES[backend])
    assert run("gdn", x, backend)[0].shape == (0, 3, 2, 24)
    o, _ = run("gdn", make_call(slots=0, device=DEVICES[backend]), backend)
    assert o.shape == (2, 3, 2, 24)
    assert not o.any()


@backends
def test_strides_are_taken_as_they_are(backend):
    """Slices of one projection, gates beside strengths, tokens before rows, padded slots: the same bits, no copy."""
    x = make_call("gdn-raw", T=2, device=DEVICES[backend])
    x["write_indices"] = slots([[3, 4], [5, 6]], x)
    o, pool = run("gdn-raw", x, backend)
    device, views = x["q"].device, {}
    projection = torch.randn(2, 2, 16 + 16 + 48 + 5, device=device)
    gates = torch.randn(2, 2, 2, 2, device=device)
    views["q"], views["k"] = projection[..., :16].unflatten(2, (1, 16)), projection[..., 16:32].unflatten(2, (1, 16))
    views["v"] = torch.randn(2, 24, 2, 2, device=device).permute(2, 0, 3, 1)
    views["g"], views["beta"] = gates[..., 0], gates[..., 1]
    views["state_pool"] = torch.randn(9, 2 * 24 * 16 + 80, device=device)[:, 80:].view(9, 2, 24, 16)
    views["write_indices"] = torch.zeros(2, 2, 3, dtype=torch.long, device=device)[..., 1]
    for name, view in views.items():
        view.copy_(x[name])
        assert not view.is_contiguous()
    again, pool_again = run("gdn-raw", x | views, backend)
    assert torch.equal(again, o)
    assert torch.equal(pool_again, pool)


@backends
@pytest.mark.parametrize(("kind", "sizes"), [("kda-raw", {}), ("kda-raw", {"HV": 3, "K": 20}), ("gdn-raw", {"HV": 3})])
def test_a_row_is_what_it_is_alone(kind, sizes, backend):
    """Bitwise, wherever it stands and whatever the others are; rows may read the same slot. Also rows of fewer numbers
    than a processor's vectors have."""
    x = make_call(kind, B=5, T=2, **sizes, device=DEVICES[backend])
    x |= {
        "read_indices": slots([2, 7, 2, -1, 2], x),
        "write_indices": slots([[0, 1], [3, 4], [5, 6], [0, 1], [8, 2]], x),
    }
    x["write_indices"][4] = -1
    o, pool = run(kind, x, backend)
    for b in range(3):
        row = {name: x[name][b : b + 1] for name in ("q", "k", "v", "g", "beta", "read_indices", "write_indices")}
        alone, alone_pool = run(kind, x | row, backend)
        assert torch.equal(alone[0], o[b])
        assert torch.equal(alone_pool[x["write_indices"][b]], pool[x["write_indices"][b]])
