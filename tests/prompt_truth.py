"""Prompts with what a layer does around the rule, a convolution and a gated norm on pools: the truth in float64."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from prefill_truth import OPS, WITH_GATES, bounds, make_prefill, truth
from serving_truth import coarser, slots, without_null

from flash_delta.ops.serving import Convolution, OutputNorm
from flash_delta.testing import allowed, assert_accurate, products_in, relative_error

BITS = {4: torch.int32, 2: torch.int16}


def make_prompts(
    kind="gdn-raw", lengths=(70, 3), W=4, L=4, bias=True, activation="silu", windows=None, rolling=False, seed=1,
    **shape,
):  # fmt: skip
    """Makes the call of `make_prefill` with a convolution and an output norm. ``windows``: the dtype of the windows'
    pool."""
    x = make_prefill(kind, lengths, **shape)
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype=x["q"].dtype):
        return torch.randn(*shape, generator=gen).to(x["q"].device, dtype)

    (_, T, H, K), (HV, V) = x["q"].shape, x["v"].shape[2:]
    D = 2 * H * K + HV * V
    pool = randn(len(x["state_pool"]), D, L, dtype=windows or x["q"].dtype)
    convolution = Convolution(pool, randn(D, W, dtype=torch.float32), randn(D) if bias else None, rolling=rolling)
    norm = OutputNorm(randn(1, T, HV, V), 1 + randn(V, dtype=torch.float32) / 4, 1e-3, activation)
    return x | {"convolution": convolution, "output_norm": norm}


def run_prompts(kind, x, backend):
    """o, and the pools afterwards, of states and of windows; those of the call stay as they are."""
    pools = [x["state_pool"].clone(), x["convolution"].pool.clone() if x.get("convolution") else None]
    given = x | {"state_pool": pools[0]}
    if pools[1] is not None:
        given["convolution"] = x["convolution"]._replace(pool=pools[1])
    return OPS[kind](**given, backend=backend), *pools


def part_of(x, start, stop, **indices):
    """A call with some of the tokens, as one sequence."""
    tokens = {name: x[name][:, start:stop] for name in WITH_GATES if name in x} | {
        "cu_seqlens": bounds([stop - start], x)
    }
    norm = x["output_norm"]
    tokens["output_norm"] = norm and norm._replace(gate=norm.gate[:, start:stop])
    return x | tokens | {name: slots(values, x) for name, values in indices.items()}


def resumed(kind, x, cut, backend):
    """What comes of a prompt that leaves a checkpoint after ``cut`` tokens, and of its rest, which goes on from it."""
    last, stop = len(x["state_pool"]) - 1, int(x["cu_seqlens"][1])
    at = {"checkpoint_indices": slots([last], x), "checkpoint_offsets": slots([cut], x), "checkpoint_every": None}
    whole = run_prompts(kind, x | at, backend)
    rest = part_of(x, cut, x["q"].shape[1], read_indices=[last]) | {"cu_seqlens": bounds([stop - cut], x)}
    rest |= dict.fromkeys(at) | {"state_pool": whole[1], "convolution": x["convolution"]._replace(pool=whole[2])}
    return whole, run_prompts(kind, rest, backend)


def check_resumed(kind, x, cut, backend):
    """Checks the call that goes on from the cut: its outputs and states are as accurate as their dtypes allow, its
    windows are exact, and its outputs after the last sequence are zeros."""
    whole, rest = resumed(kind, x, cut, backend)
    want, dtype = prompts_truth(kind, x), coarser(rest[0].dtype, rest[1].dtype)
    with products_in(rest[0].dtype):
        _, reference = resumed(kind, on_cpu(x), cut, "torch")
    slot = x["write_indices"].tolist()
    judged = {"o": (rest[0], reference[0], want[0][:, cut:])}
    judged["state_pool"] = tuple(of[1][slot] for of in (rest, reference, want))
    for name, (got, other, expected) in judged.items():
        if expected.any():  # there are tokens
            error, others = relative_error(got, expected), relative_error(other, expected)
            assert error <= allowed(others, dtype), f"{name} after {cut}: {error:.2e}, torch {others:.2e}"
    assert torch.equal(rest[2][slot].cpu(), want[2][slot])
    assert torch.equal(rest[0].cpu() == 0, want[0][:, cut:] == 0)
    return whole, rest


def on_cpu(x):
    def moved(y):
        return y.cpu() if torch.is_tensor(y) else type(y)(*map(moved, y)) if isinstance(y, tuple) else y

    return {name: moved(y) for name, y in x.items()}


def as_in_vllm(windows):
    """Returns the windows, transposed, on larger pages."""
    slots, D, L = windows.shape
    pages = windows.new_full((slots, L * D + 48), float("nan"))
    return pages[:, : L * D].view(slots, L, D).mT.copy_(windows)


def prompts_truth(kind, x):
    """By the definitions, token by token: o and the states in float64; the windows as they have to be, bit by bit."""
    x, windows = dict(without_null(x)), None
    convolution, norm = x.pop("convolution", None), x.pop("output_norm", None)
    if convolution is not None:
        x["q"], x["k"], x["v"], windows = convolved(x, convolution)
    o, states = truth(kind, x)
    if norm is not None:
        gate = norm.gate.double().cpu()
        gate = torch.sigmoid(gate) if norm.activation == "sigmoid" else F.silu(gate)
        y = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double().cpu() * gate
        o = torch.where(o == 0, 0, y)
    return o, states, windows


def convolved(x, convolution):
    """q, k and v in float64 after the convolution and its SiLU, and the pool of windows."""
    tokens = torch.cat([x[name][0].flatten(1) for name in "qkv"], 1).cpu()  # [T, D]
    weight, before = convolution.weight.double().cpu(), convolution.pool.cpu()
    bias = 0 if convolution.bias is None else convolution.bias.double().cpu()
    (D, W), slots = weight.shape, len(before)
    L = W - 1 if convolution.rolling else before.shape[2]
    y, after = torch.zeros(len(tokens), D, dtype=torch.float64), before.clone()
    read, write, has, checkpoints, offsets = (
        None if x.get(name) is None else x[name].tolist()
        for name in ("read_indices", "write_indices", "has_initial_state", "checkpoint_indices", "checkpoint_offsets")
    )
    for n, (start, stop) in enumerate(pairwise(x["cu_seqlens"].tolist())):
        stored = has is None or has[n]
        if (stored and not 0 <= read[n] < slots) or (write is not None and not 0 <= write[n] < slots):
            continue
        window = before[read[n], :, :L].clone() if stored else torch.zeros_like(before[0, :, :L])
        goals = {}  # tokens so far: slot
        if offsets is not None:
            goals = {offsets[n]: checkpoints[n]}
        elif checkpoints is not None:
            goals = {(m + 1) * x["checkpoint_every"]: slot for m, slot in enumerate(checkpoints[n])}
        if 0 <= goals.get(0, -1) < slots:
            after[goals[0], :, :L] = window
        for t in range(start, stop):
            seen = torch.cat([window, tokens[t, :, None].to(window.dtype)], 1)  # [D, L + 1]
            y[t], window = (seen[:, -W:].double() * weight).sum(1) + bias, seen[:, 1:]
            if 0 <= goals.get(t + 1 - start, -1) < slots:
                after[goals[t + 1 - start], :, :L] = window
        if write is not None:
            after[write[n], :, :L] = window
    heads = [x[name].shape[1:] for name in "qkv"]
    q, k, v = F.silu(y).split([shape[1] * shape[2] for shape in heads], 1)
    return *(part.reshape(1, *shape) for part, shape in zip((q, k, v), heads, strict=True)), after


def check_prompts(kind, x, backend):
    """Outputs and states are as accurate as their dtypes allow, windows are exact, and padding is zero."""
    got, (want_o, want_states, want_windows) = run_prompts(kind, x, backend), prompts_truth(kind, x)
    o, states, windows = got
    dtype, before = coarser(o.dtype, states.dtype), x["state_pool"].cpu()
    kept = (want_states == before.double()).flatten(1).all(1)
    assert_accurate("o", o, want_o, dtype)
    assert_accurate("state_pool", states.cpu()[~kept], want_states[~kept], dtype)
    assert torch.equal(states.cpu()[kept], before[kept])
    assert torch.equal(o.cpu() == 0, want_o == 0)
    if windows is not None:
        bits = BITS[windows.itemsize]
        assert torch.equal(windows.cpu().view(bits), want_windows.view(bits))
    return got
