"""A whole decoding step in one call: convolution, rule and output norm, against float64 and against the parts."""

import re

import pytest
import torch
import torch.nn.functional as F
from prompt_truth import as_in_vllm
from serving_truth import (
    CALLS,
    DEVICES,
    KINDS,
    bits,
    coarser,
    copied,
    make_call,
    needs_triton,
    slots,
    table,
    truth,
    without_null,
)  # fmt: skip
from test_serving import BAD, hostile

from flash_delta.ops.serving import Convolution, OutputNorm
from flash_delta.testing import assert_accurate

backends = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])


HALF, WHOLE = torch.bfloat16, torch.float32
STORED = {"like-q": (WHOLE, WHOLE), "wider": (HALF, WHOLE), "narrower": (WHOLE, HALF), "other": (HALF, torch.float16)}


def make_step(kind, W=4, L=4, bias=True, activation="silu", windows=None, seed=1, **sizes):
    """A call with a convolution and an output norm; the convolution as its three tensors."""
    x = make_call(kind, **sizes)
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype=x["q"].dtype):
        return torch.randn(*shape, generator=gen).to(x["q"].device, dtype)

    (B, T, H, K), (HV, V) = x["q"].shape, x["v"].shape[2:]
    D = 2 * H * K + HV * V
    pool = randn(len(x["state_pool"]), D, L, dtype=windows or x["q"].dtype)
    conv = pool, randn(D, W, dtype=torch.float32), randn(D) if bias else None
    norm = OutputNorm(randn(B, T, HV, V), 1 + randn(V, dtype=torch.float32) / 4, 1e-3, activation)
    return x | {"output_norm": norm}, conv


def run_step(kind, x, conv, backend, convolve=True):
    """o and the pools afterwards, which are those that are written; those of the call stay as they are. ``conv``: the
    pool, the weight, the bias, and where there is one the write_pool."""
    pools = {name: copied(x[name]) for name in ("state_pool", "write_pool") if x.get(name) is not None}
    windows = [copied(conv[0]), *(copied(t) for t in conv[3:])]
    convolution = Convolution(windows[0], *conv[1:3], *windows[1:]) if convolve else None
    o = CALLS[kind][0](**(x | pools), convolution=convolution, backend=backend)
    return o, list(pools.values())[-1], windows[-1]


def step_truth(kind, x, conv):
    """By the definitions in float64: along every token's ancestors a convolution, then the rule, then the norm."""
    q, k, v, windows = convolved_rows(x, conv)
    o, states = truth(kind, x | {"q": q, "k": k, "v": v})
    return normed(o, x["output_norm"]), states, windows


def convolved_rows(x, conv):
    """q, k and v of every token after the convolution and its SiLU, and the pool of windows, in float64."""
    x = without_null(x)
    pool, weight, bias = (None if t is None else t.double().cpu() for t in conv[:3])
    q, k, v = (x[name].double().cpu() for name in ("q", "k", "v"))
    (B, T, H, K), (HV, V), L = q.shape, v.shape[2:], pool.shape[2]
    inputs = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], 2)  # [B, T, D]
    inputs = inputs.to(conv[0].dtype).double()
    read, write, counts, parents = (
        table(x.get(name)) for name in ("read_indices", "write_indices", "num_accepted_tokens", "parent_idx")
    )
    y, after = torch.zeros_like(inputs), pool.clone()
    for b in range(B):
        column = 0 if counts is None else counts[b][0] - 1
        slot = read[b][column] if 0 <= column < len(read[b]) else -1
        windows = {-1: pool[slot]} if 0 <= slot < len(pool) else {}
        for t in range(T):
            parent = t - 1 if parents is None or t == 0 else parents[b][t]
            per_token = write is not None and len(write[b]) == T and x["write_indices"].dim() == 2
            to = None if write is None else write[b][t if per_token else 0]
            if parent not in windows or (to is not None and not 0 <= to < len(pool)):
                continue
            seen = torch.cat([windows[parent], inputs[b, t, :, None]], 1)  # [D, L + 1]
            y[b, t] = (seen[:, -weight.shape[1] :] * weight).sum(1) + (0 if bias is None else bias)
            windows[t] = seen[:, -L:]
            if to is not None and (per_token or t == T - 1):
                after[to] = windows[t]
    q, k, v = F.silu(y).split([H * K, H * K, HV * V], 2)
    return q.view(B, T, H, K), k.view(B, T, H, K), v.view(B, T, HV, V), after


def normed(o, norm):
    gate = norm.gate.double().cpu()
    gate = torch.sigmoid(gate) if norm.activation == "sigmoid" else F.silu(gate)
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double().cpu() * gate


def check(kind, x, conv, backend):
    (o, pool, window), (want_o, want_pool, want_window) = run_step(kind, x, conv, backend), step_truth(kind, x, conv)
    dtype = coarser(o.dtype, pool.dtype)
    assert_accurate("o", o, want_o, dtype)
    assert_accurate("state_pool", pool, want_pool, dtype)
    assert torch.equal(window.cpu().double(), want_window)  # inputs, as they came
    return o, pool, window


@backends
@pytest.mark.parametrize("v_first", [True, False], ids=["v-first", "k-first"])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gdn-raw", "kda", "kda-bounded"])
def test_against_the_definitions(kind, pool, v_first, backend):
    """In place: a draft of three, each token in a slot of its own, the first one where the row was read."""
    dtype = torch.bfloat16 if pool == torch.bfloat16 else torch.float32
    sizes = {"H": 2, "HV": 4, "dtype": dtype, "pool": pool, "v_first": v_first, "device": DEVICES[backend]}
    x, conv = make_step(kind, activation="sigmoid" if kind == "kda" else "silu", **sizes)
    check(kind, x | {"write_indices": slots([[0, 4, 5], [1, 8, 6]], x)}, conv, backend)
    check(kind, x | {"write_indices": slots([0, 1], x, torch.int32)}, conv, backend)


@backends
@pytest.mark.parametrize(("W", "L"), [(4, 3), (3, 2), (3, 4), (2, 1), (1, 1)])
def test_taps_and_windows(W, L, backend):
    x, conv = make_step("gdn-raw", W=W, L=L, bias=W % 2 == 0, T=5, slots=12, K=24, V=17, device=DEVICES[backend])
    check("gdn-raw", x | {"write_indices": slots([[2, 3, 4, 5, 6], [7, 8, 9, 10, 11]], x)}, conv, backend)


@backends
@pytest.mark.parametrize("dtypes", STORED.values(), ids=STORED)
def test_windows_of_another_dtype(dtypes, backend):
    """An input counts as it is stored, also when it is new."""
    x, conv = make_step("gdn-raw", T=3, dtype=dtypes[0], windows=dtypes[1], V=8, device=DEVICES[backend])
    check("gdn-raw", x | {"write_indices": slots([[2, 3, 4], [5, 6, 7]], x)}, conv, backend)


@backends
def test_hostile_indices_and_counts(backend):
    x, conv = make_step("gdn-raw", B=4, T=3, HV=2, slots=9, device=DEVICES[backend])
    x |= {"read_indices": slots([[0, 1], [2, 99], [3, 4], [-5, 2**40]], x)}
    x |= {"num_accepted_tokens": slots([2, 2, 7, 1], x), "write_indices": slots([[1, 5, -1], *[[6, 7, 8]] * 3], x)}
    o, *_ = check("gdn-raw", x, conv, backend)
    assert torch.all(o[1:] == 0)
    assert torch.all(o[0, 2] == 0)
    assert not torch.any(o[0, :2] == 0)


@backends
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("where", BAD)
def test_what_is_no_slot_is_padding(where, dtype, backend):
    """Zeros, and no canary changed in either pool, between slots and around them; NaN in such rows harms no other."""
    B = len(hostile(where, dtype, make_call())["read_indices"])
    x, conv = make_step("gdn-raw", B=B, T=3, H=1, HV=1, V=8, device=DEVICES[backend])
    x |= hostile(where, dtype, x)
    for t in (x["v"], x["q"], x["output_norm"].gate):
        t[1:] = float("nan")
    states = torch.full((13, 1, 9, 18), float("nan"), device=x["q"].device)
    windows = torch.full((13, conv[0].shape[1] + 1, 7), float("nan"), device=x["q"].device)
    pools = states[2:11, :, 1:, 2:], windows[2:11, 1:, 1:5]
    for pool, given in zip(pools, (x["state_pool"], conv[0]), strict=True):
        pool.copy_(given)
    before = states.clone(), windows.clone()
    given = x | {"state_pool": pools[0], "convolution": Convolution(pools[1], *conv[1:])}
    o = KINDS["gdn-raw"][0](**given, backend=backend)
    want_o, want_states, want_windows = step_truth("gdn-raw", x, conv)
    assert_accurate("o", o[:1], want_o[:1], torch.float32)
    assert not o[1:].any()
    assert_accurate("state_pool", pools[0], want_states, torch.float32)
    assert torch.equal(pools[1].cpu().double(), want_windows)
    for now, then in zip((states, windows), before, strict=True):
        then[3:6] = now[3:6]  # the first row's own slots
        assert torch.equal(bits(then), bits(now))


@backends
def test_a_tree_whose_first_tokens_are_padding(backend):
    """No row has a first token, and what is left goes on from the rows' states and from each other."""
    x, conv = make_step("gdn-raw", B=2, T=3, HV=2, slots=9, device=DEVICES[backend])
    x |= {"read_indices": slots([0, 1], x), "write_indices": slots([[-1, 2, 3], [99, 4, 5]], x)}
    o, *_ = check("gdn-raw", x | {"parent_idx": slots([[-1, -1, 1], [-1, -1, -1]], x)}, conv, backend)
    assert torch.all(o[:, 0] == 0)
    assert not torch.any(o[:, 1:] == 0)


@backends
def test_what_is_padding_may_hold_anything(backend):
    x, conv = make_step("gdn-raw", B=2, T=1, device=DEVICES[backend])
    x |= {"read_indices": slots([0, -1], x), "write_indices": slots([0, 3], x)}
    clean = run_step("gdn-raw", x, conv, backend)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][1] = float("nan")
    x["output_norm"].gate[1] = float("nan")
    for a, b in zip(run_step("gdn-raw", x, conv, backend), clean, strict=True):
        assert torch.equal(a, b)


@backends
@pytest.mark.parametrize("dtypes", STORED.values(), ids=STORED)
@pytest.mark.parametrize("T", [2, 5])
def test_tokens_in_one_call_are_tokens_in_calls(T, dtypes, backend):
    """Bitwise, states, windows and all; in a tree, too, and with another form of the indices. For inputs and for pools
    of windows of any dtypes."""
    kind, pool = (("gdn-raw", torch.bfloat16), ("kda-bounded", torch.float32))[T % 2]
    x, conv = make_step(
        kind, B=1, T=T, H=1, HV=2, V=16, slots=20, pool=pool, dtype=dtypes[0], windows=dtypes[1],
        device=DEVICES[backend],
    )  # fmt: skip
    path = slots([[0, *range(2, T + 1)]], x)
    o, after, window = run_step(kind, x | {"write_indices": path}, conv, backend)
    state, windows, singles = x["state_pool"], conv[0], []
    for t in range(T):
        token = {name: x[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        token["output_norm"] = x["output_norm"]._replace(gate=x["output_norm"].gate[:, t : t + 1])
        read = x["read_indices"] if t == 0 else path[:, t - 1]
        call = x | token | {"state_pool": state, "read_indices": read, "write_indices": path[:, t]}
        out, state, windows = run_step(kind, call, (windows, *conv[1:]), backend)
        singles.append(out)
    assert torch.equal(torch.cat(singles, 1), o)
    assert torch.equal(state, after)
    assert torch.equal(windows, window)
    again = run_step(kind, x | {"write_indices": path, "parent_idx": slots([range(-1, T - 1)], x)}, conv, backend)
    for a, b in zip(again, (o, after, window), strict=True):
        assert torch.equal(a, b)


@backends
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_a_row_is_what_it_is_alone(activation, backend):
    """Bitwise, wherever it stands, with channels that are no multiple of a processor's vectors."""
    sizes = {"H": 1, "HV": 3, "K": 9, "V": 7, "slots": 14, "device": DEVICES[backend]}
    x, conv = make_step("gdn-raw", activation=activation, B=5, T=2, **sizes)
    x["write_indices"] = slots([[5, 6], [7, 8], [9, 10], [12, 13], [4, 11]], x)
    found = run_step("gdn-raw", x, conv, backend)
    for b in range(5):
        row = {name: x[name][b : b + 1] for name in (*"qkv", "g", "beta", "read_indices", "write_indices")}
        row["output_norm"] = x["output_norm"]._replace(gate=x["output_norm"].gate[b : b + 1])
        o, pool, windows = run_step("gdn-raw", x | row, conv, backend)
        written = x["write_indices"][b]
        assert torch.equal(o[0], found[0][b])
        assert torch.equal(pool[written], found[1][written])
        assert torch.equal(windows[written], found[2][written])


@backends
@pytest.mark.parametrize("rolling", [False, True])
def test_windows_lie_as_in_vllm(rolling, backend):
    """Transposed, with gaps between slots: the same bits, and nothing is written between them."""
    x, conv = make_step("gdn-raw", B=2, T=3, L=5 if rolling else 3, V=8, device=DEVICES[backend])
    x |= {"write_indices": slots([[2, 3, 4], [5, 6, 7]], x)}
    pools = conv[0].clone(), as_in_vllm(conv[0])
    assert not pools[1].is_contiguous()
    o, again = (
        KINDS["gdn-raw"][0](
            **(x | {"state_pool": x["state_pool"].clone()}), convolution=Convolution(pool, *conv[1:], rolling=rolling),
            backend=backend,
        )
        for pool in pools
    )  # fmt: skip
    assert torch.equal(again, o)
    assert torch.equal(*pools)
    assert not torch.equal(pools[0], conv[0])
    (count, D, L), page = conv[0].shape, pools[1].stride(0)
    assert pools[1].as_strided((count - 1, page - L * D), (page, 1), L * D).isnan().all()


@backends
def test_draft_trees(backend):
    trees = [[-1, 0, 0, 1, 1, 2], [-1, -1, 1, 0, 2, -1]]
    x, conv = make_step("gdn-raw", B=2, T=6, H=1, HV=2, V=8, slots=14, device=DEVICES[backend])
    write = torch.arange(12, device=x["q"].device).view(2, 6)
    write[:, 0] = x["read_indices"] = slots([12, 13], x)  # a root takes the place of what was read
    check("gdn-raw", x | {"write_indices": write, "parent_idx": slots(trees, x)}, conv, backend)


@backends
@pytest.mark.parametrize("kind", ["gdn", "kda-bounded"])
def test_norm_alone(kind, backend):
    x, conv = make_step(kind, H=2, HV=4, device=DEVICES[backend])
    x |= {"write_indices": slots([3, 1], x)}
    o, pool, window = run_step(kind, x, conv, backend, convolve=False)
    want, want_pool = truth(kind, x)
    assert_accurate("o", o, normed(want, x["output_norm"]), o.dtype)
    assert_accurate("state_pool", pool, want_pool, o.dtype)
    assert torch.equal(window, conv[0])


def test_the_truth_is_the_definition():
    """Without a window behind it, a first token meets the last tap alone."""
    x, (pool, weight, _) = make_step("gdn", B=1, T=1, L=3, bias=False)
    o, *_ = step_truth("gdn", x, (torch.zeros_like(pool), weight, None))
    keys = x["q"].shape[2] * x["q"].shape[3]
    weights = weight.split([keys, keys, weight.shape[0] - 2 * keys])
    single = {
        name: F.silu(x[name].double() * w[:, -1].double().view(x[name].shape[2:]))
        for name, w in zip("qkv", weights, strict=True)
    }
    assert_accurate("o", o, normed(truth("gdn", x | single)[0], x["output_norm"]), torch.float64)


ROLLING = {  # of five inputs, with three tokens
    "taps": ("convolution.weight: expected 2 to 4 taps", lambda x, c: (x, c._replace(weight=c.weight[:, 3:]))),
    "inputs": (
        "convolution.pool: expected at least 5 inputs (axis 2) with rolling=True, got 4",
        lambda x, c: (x, c._replace(pool=c.pool[:, :, :4])),
    ),
    "columns": (
        "convolution.pool: expected at least 6 inputs (axis 2) with rolling=True, got 5",
        lambda x, c: (x | {"read_indices": slots([[0, 1, 2, 3]] * 2, x), "num_accepted_tokens": slots([1, 1], x)}, c),
    ),
    "tree": (
        "parent_idx: expected None with a rolling convolution",
        lambda x, c: (x | {"write_indices": slots([[0, 1, 2]] * 2, x), "parent_idx": slots([[-1] * 3] * 2, x)}, c),
    ),
    "target": (
        "convolution.write_pool: expected None with rolling=True",
        lambda x, c: (x, c._replace(write_pool=c.pool.clone())),
    ),
    "flag": ("convolution.rolling: expected True or False, got 'yes'", lambda x, c: (x, c._replace(rolling="yes"))),
}


@pytest.mark.parametrize("name", ROLLING)
def test_errors_of_rolling_windows_name_the_argument(name):
    message, change = ROLLING[name]
    x, conv = make_step("gdn-raw", L=5, T=3)
    KINDS["gdn-raw"][0](**x, convolution=Convolution(*conv, rolling=True))
    x, convolution = change(x, Convolution(*conv, rolling=True))
    with pytest.raises(ValueError, match=re.escape(message)):
        KINDS["gdn-raw"][0](**x, convolution=convolution)


WRONG = {
    "taps": ("convolution.weight: expected 1 to 4 taps", lambda c, n: (c._replace(weight=c.weight.repeat(1, 2)), n)),
    "window": ("convolution.pool: expected 3 to 4 inputs", lambda c, n: (c._replace(pool=c.pool[:, :, :2]), n)),
    "slots": ("convolution.pool: expected a tensor", lambda c, n: (c._replace(pool=c.pool[1:]), n)),
    "dtype": (
        "convolution.pool: expected a dtype among torch.float16, torch.bfloat16, torch.float32, or that of q, got tor",
        lambda c, n: (c._replace(pool=c.pool.double()), n),
    ),
    "target": (
        "convolution.write_pool: expected None without write_pool",
        lambda c, n: (c._replace(write_pool=c.pool.clone()), n),
    ),
    "bias": ("convolution.bias: expected a tensor", lambda c, n: (c._replace(bias=c.bias[1:]), n)),
    "gate": ("output_norm.gate: expected a tensor", lambda c, n: (c, n._replace(gate=n.gate[:, :1]))),
    "weight": ("output_norm.weight: expected a tensor", lambda c, n: (c, n._replace(weight=None))),
    "eps": ("output_norm.eps: expected a number of at least 0", lambda c, n: (c, n._replace(eps=-1.0))),
    "activation": ("output_norm.activation: expected one of", lambda c, n: (c, n._replace(activation="relu"))),
    "tuple": ("convolution: expected a Convolution", lambda c, n: (tuple(c), n)),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name):
    message, change = WRONG[name]
    x, conv = make_step("gdn-raw")
    convolution, norm = change(Convolution(*conv), x.pop("output_norm"))
    with pytest.raises(ValueError, match=f"decode_gated_delta_rule: {message}"):
        KINDS["gdn-raw"][0](**x, convolution=convolution, output_norm=norm)
