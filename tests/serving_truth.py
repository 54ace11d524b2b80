"""Calls of the serving ops, and what they have to give: row by row, token by token, in float64."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

import flash_delta
from flash_delta.reference.activation import (
    NORM_EPS,
    naive_gdn_gate,
    naive_kda_gate,
    naive_kda_lowerbound_gate,
)
from flash_delta.reference.recurrent import recurrent
from flash_delta.testing.accuracy import ALLOWED

GPU = torch.cuda.is_available()
DEVICES = {"torch": "cpu", "triton": "cuda" if GPU else "cpu"}  # on which a backend is tested
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
KINDS = {  # of gate: op, and how it is called
    "gdn": (flash_delta.decode_gated_delta_rule, {}),
    "gdn-raw": (flash_delta.decode_gated_delta_rule, RAW),
    "kda": (flash_delta.decode_kda, {}),
    "kda-raw": (flash_delta.decode_kda, RAW),
    "kda-bounded": (flash_delta.decode_kda, RAW | {"lower_bound": -5.0, "allow_neg_eigval": True}),
}

OF_GATES = {  # the same, with gates b and w in place of beta; fewer tests run these
    "gdn2": (flash_delta.decode_gdn2, {}),
    "gdn2-raw": (flash_delta.decode_gdn2, RAW | {"allow_neg_eigval": True}),
    "gdn2-bounded": (flash_delta.decode_gdn2, RAW | {"lower_bound": -5.0}),
}
CALLS = KINDS | OF_GATES


def make_call(
    kind="gdn", B=2, T=3, H=1, HV=2, K=16, V=24, slots=9, dtype=torch.float32, pool=torch.float32, v_first=True,
    device="cpu", seed=0,
):  # fmt: skip
    """Keyword arguments of a call whose rows read the first slots and write nowhere."""
    gen = torch.Generator().manual_seed(seed)
    options, channels = CALLS[kind][1], (K,) if kind.startswith(("kda", "gdn2")) else ()
    strengths = {"b": (K,), "w": (V,)} if kind in OF_GATES else {"beta": ()}

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    x = {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, HV, V)}
    x |= {"g": randn(B, T, HV, *channels)} | {name: randn(B, T, HV, *width) for name, width in strengths.items()}
    if not options:
        x["q"], x["k"] = F.normalize(x["q"], dim=-1), F.normalize(x["k"], dim=-1)
        x |= {"g": -x["g"].abs() / 4} | {name: torch.sigmoid(x[name]) for name in strengths}
    x = {name: t.to(device, dtype) for name, t in x.items()}
    if options:
        x |= {"A_log": randn(HV).to(device), "dt_bias": (randn(HV, *channels).flatten() - 2).to(device)}
    x["state_pool"] = randn(slots, HV, *((V, K) if v_first else (K, V))).to(device, pool)
    return x | {"read_indices": torch.arange(B, device=device), "state_v_first": v_first} | options


def slots(values, like, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=like["q"].device)


def run(kind, x, backend):
    """o, and the pool afterwards, which is a write_pool if there is one; those of the call stay as they are."""
    pools = {name: copied(x[name]) for name in ("state_pool", "write_pool") if x.get(name) is not None}
    o = CALLS[kind][0](**(x | pools), backend=backend)
    if "write_pool" in pools:
        assert torch.equal(bits(pools["state_pool"]), bits(x["state_pool"])), "a pool that is only read has changed"
    return o, list(pools.values())[-1]


def copied(t):
    """With its strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def bits(t):
    return t.view({4: torch.int32, 2: torch.int16}[t.itemsize])


def table(t):
    """An index tensor as numbers; [B] as one column."""
    return None if t is None else t.reshape(len(t), -1).tolist()


def without_null(x):
    """Returns the call with indices out of range where it has ``null_slot``."""
    null, names = x.get("null_slot"), ("read_indices", "write_indices", "checkpoint_indices")
    if null is None:
        return x
    tables = {name: torch.where(x[name] == null, -7, x[name]) for name in names if x.get(name) is not None}
    return {name: value for name, value in x.items() if name != "null_slot"} | tables


def truth(kind, x):
    """o and the pool afterwards in float64, states rounded to the dtype of the pool that is written after every token;
    which is a write_pool if there is one."""
    x = without_null(x)
    tokens, pool = activated(kind, x), x["state_pool"].cpu()
    v = tokens[2]
    B, T, slots = *v.shape[:2], len(pool)
    target = pool if x.get("write_pool") is None else x["write_pool"].cpu()
    dtype, targets = target.dtype, len(target)
    apart, pool, target = target is not pool, pool.double(), target.double()
    target = target if apart else pool
    states, written = (t.mT if x["state_v_first"] else t for t in (pool, target))
    o, write = torch.zeros_like(v), x.get("write_indices")
    read, to, counts, parents = (
        table(x.get(name)) for name in ("read_indices", "write_indices", "num_accepted_tokens", "parent_idx")
    )
    for b in range(B):
        column = 0 if counts is None else counts[b][0] - 1
        after = {}  # token -> state; -1: the row's
        if 0 <= column < len(read[b]) and 0 <= read[b][column] < slots:
            after[-1] = states[read[b][column]].clone()
        for t in range(T):
            slot = None if write is None else to[b][t if write.dim() == 2 else 0]
            parent = t - 1 if parents is None or t == 0 else parents[b][t]
            if parent not in after or (write is not None and not 0 <= slot < targets):
                continue
            token = [y[b : b + 1, t : t + 1] for y in tokens]
            out, S = recurrent(*token, scale=x.get("scale"), initial_state=after[parent].unsqueeze(0))
            o[b, t], after[t] = out[0, 0], S[0].to(dtype).double()
            if target.dim() == 5:
                written[slot, t] = after[t]
            elif write is not None and (write.dim() == 2 or t == T - 1):
                written[slot] = after[t]
    return o, target


def activated(kind, x):
    """q, k, v, g and beta in float64, by the definitions; with b and w also the erase keys."""
    q, k, v, g = (x[name].double().cpu() for name in ("q", "k", "v", "g"))
    beta, w = (x[name].double().cpu() for name in (("b", "w") if kind in OF_GATES else ("beta", "beta")))
    if CALLS[kind][1]:
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + NORM_EPS) for y in (q, k))
        beta, w = torch.sigmoid(beta) * (2 if x.get("allow_neg_eigval") else 1), torch.sigmoid(w)
        A_log, dt_bias = x["A_log"].double().cpu(), x["dt_bias"].double().cpu()
        if kind == "gdn-raw":
            g = naive_gdn_gate(g, A_log, dt_bias, torch.float64)
        elif kind in ("kda-raw", "gdn2-raw"):
            g = naive_kda_gate(g, A_log, dt_bias, torch.float64)
        else:
            g = naive_kda_lowerbound_gate(g, A_log, dt_bias, x["lower_bound"], torch.float64)
    if kind in OF_GATES:
        return q, k, w * v, g, torch.ones_like(g[..., 0]), beta * k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    return q, k, v, g, beta


def coarser(*dtypes):
    """Results are judged by the coarsest rounding on their way."""
    return max(dtypes, key=ALLOWED.__getitem__)
