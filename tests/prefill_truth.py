"""Calls of prefill, and what they have to give: sequence by sequence, token by token, in float64."""

from itertools import pairwise

import torch
from serving_truth import CALLS, activated, coarser, make_call, slots, without_null

import flash_delta
from flash_delta.reference.recurrent import recurrent
from flash_delta.testing import allowed, assert_accurate, products_in, relative_error

OPS = {kind: getattr(flash_delta, op.__name__.replace("decode", "prefill")) for kind, (op, _) in CALLS.items()}
TOKENS = ("q", "k", "v", "g", "beta")
WITH_GATES = (*TOKENS, "b", "w")  # a call has beta, or b and w


def bounds(lengths, like):
    return slots([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], like)


def make_prefill(kind="gdn", lengths=(70, 3), behind=0, slots=None, **shape):
    """Keyword arguments of a call whose sequences read the first slots and write the next ones."""
    N = len(lengths)
    x = make_call(kind, B=1, T=sum(lengths) + behind, slots=slots or 2 * N + 2, **shape)
    x["cu_seqlens"] = bounds(lengths, x)
    x["read_indices"] = torch.arange(N, device=x["q"].device)
    return x | {"write_indices": x["read_indices"] + N}


def sequence(x, n):
    """The arguments of a call with sequence n alone."""
    start, stop = x["cu_seqlens"][n : n + 2].tolist()
    names = ("read_indices", "write_indices", "has_initial_state", "checkpoint_indices", "checkpoint_offsets")
    alone = {name: x[name][n : n + 1] for name in names if x.get(name) is not None}
    tokens = {name: x[name][:, start:stop] for name in WITH_GATES if name in x}
    return x | tokens | alone | {"cu_seqlens": bounds([stop - start], x)}


def run(kind, x, backend):
    """o, and the pool afterwards; that of the call stays as it is."""
    given = x["state_pool"]
    pool = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device).copy_(given)
    return OPS[kind](**(x | {"state_pool": pool}), backend=backend), pool


def truth(kind, x):
    """o and the pool afterwards in float64."""
    x = without_null(x)
    tokens = activated(kind, x)
    v = tokens[2]
    before = x["state_pool"].cpu().double()
    pool = before.clone()
    o, count, every = torch.zeros_like(v), len(pool), x.get("checkpoint_every") or 1
    read, write, has, checkpoints, offsets = (
        None if x.get(name) is None else x[name].tolist()
        for name in ("read_indices", "write_indices", "has_initial_state", "checkpoint_indices", "checkpoint_offsets")
    )

    def states(of):
        return of.mT if x["state_v_first"] else of

    for n, (start, stop) in enumerate(pairwise(x["cu_seqlens"].tolist())):
        stored = has is None or has[n]
        if (stored and not 0 <= read[n] < count) or (write is not None and not 0 <= write[n] < count):
            continue
        S = states(before)[read[n]] if stored else torch.zeros_like(states(before[:1])[0] if count else v)
        S = S.unsqueeze(0)
        at, goals = start, {} if offsets is None else {start + offsets[n]: checkpoints[n]}
        if checkpoints is not None and offsets is None:
            goals = {start + (m + 1) * every: slot for m, slot in enumerate(checkpoints[n])}
        for end in sorted({goal for goal in goals if start <= goal <= stop} | {stop}):
            piece = [y[:, at:end] for y in tokens]
            if end > at:
                o[:, at:end], S = recurrent(*piece, scale=x.get("scale"), initial_state=S)
            if 0 <= goals.get(end, -1) < count:
                states(pool)[goals[end]] = S[0]
            at = end
        if write is not None:
            states(pool)[write[n]] = S[0]
    return o, pool


def check(kind, x, backend):
    """Outputs and the whole pool are as accurate as their dtypes allow; what no sequence writes keeps its bits."""
    (o, pool), (want_o, want_pool) = run(kind, x, backend), truth(kind, x)
    before, dtype = x["state_pool"].cpu(), coarser(o.dtype, pool.dtype)
    kept = (want_pool == before.double()).flatten(1).all(1)
    got, want = (o, pool.cpu()[~kept]), (want_o, want_pool[~kept])
    if backend == "torch":
        assert_accurate("o", got[0], want[0], dtype)
        assert_accurate("state_pool", got[1], want[1], dtype)
    else:
        with products_in(o.dtype):
            reference, rounded = run(kind, {n: y.cpu() if torch.is_tensor(y) else y for n, y in x.items()}, "torch")
        for name, y, z, w in zip(("o", "state_pool"), got, (reference, rounded[~kept]), want, strict=True):
            assert relative_error(y, w) <= allowed(relative_error(z, w), dtype), name
    assert torch.equal(pool.cpu()[kept], before[kept])
    assert torch.equal(o.cpu() == 0, want_o == 0)
    return o, pool
