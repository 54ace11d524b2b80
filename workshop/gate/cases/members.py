"""The members of the family, as the compile gate compiles them."""

from functools import partial
from typing import NamedTuple

import torch

from flash_delta.problem import Inputs, Problem, gate_of


class RuleCase(NamedTuple):
    """A member of the family as the gate compiles it, with two packed sequences and two value heads per key head."""

    width: int = 128  # K, and V if they are the same
    dtype: torch.dtype = torch.bfloat16
    gate: str = "scalar"
    erase: str | None = "decayed"
    raw: bool = False  # with norms and activations
    bound: float | None = None
    tokens: int = 128
    gap: int = 0  # elements between heads; with odd ones kernels cannot use the copy engine
    values: int | None = None  # V
    strength: bool = False  # gates b and w in place of beta
    steps: int = 1  # updates of the state per token


# Every combination of flags that the code of a kernel depends on, once. Scans need fewer (SCANS): they do not depend on
# raw gates, norms, activations and strengths, except that those of the backward pass load w, which may be a logit.
CHUNKS = {
    "gdn-64": RuleCase(64),
    "gdn-128": RuleCase(),
    "gdn-128-raw": RuleCase(raw=True),
    "gdn-128-steps": RuleCase(raw=True, steps=2),
    "gdn-256": RuleCase(256),
    "gdn-100": RuleCase(100, raw=True),
    "gdn-256-512": RuleCase(256, values=512),
    "gdn-64-float32": RuleCase(64, torch.float32),
    "comba-128-raw": RuleCase(erase="undecayed", raw=True),
    "comba-256-512": RuleCase(256, erase="undecayed", values=512),
    "delta-rule-128": RuleCase(gate="none"),
    "simple-gla-128": RuleCase(erase=None),
    "kda-64": RuleCase(64, gate="channel"),
    "kda-128": RuleCase(gate="channel"),
    "kda-128-raw": RuleCase(gate="channel", raw=True),
    "kda-100": RuleCase(100, gate="channel"),
    "kda-256-512": RuleCase(256, gate="channel", values=512),
    "kda-128-bounded": RuleCase(gate="channel", raw=True, bound=-5.0),
    "kda-128-promised": RuleCase(gate="channel", bound=-5.0),
    "gdn2-64": RuleCase(64, gate="channel", strength=True),
    "gdn2-128": RuleCase(gate="channel", strength=True),
    "gdn2-128-bounded": RuleCase(gate="channel", raw=True, bound=-5.0, strength=True),
    "gdn2-256-512": RuleCase(256, gate="channel", values=512, strength=True),
    "gdn2-64-float32": RuleCase(64, torch.float32, gate="channel", strength=True),
}
SCANS = {
    name: CHUNKS[name]
    for name in (
        "gdn-64", "gdn-128", "gdn-128-steps", "gdn-256", "gdn-100", "gdn-256-512", "gdn-64-float32", "simple-gla-128",
        "kda-128", "kda-100", "kda-256-512", "gdn2-64", "gdn2-128", "gdn2-128-bounded", "gdn2-256-512",
        "gdn2-64-float32",
    )
}  # fmt: skip
SPLIT = ("gdn-64", "gdn-128", "simple-gla-128", "kda-128", "gdn2-128", "gdn2-128-bounded")  # that also run in segments


def describe(
    x: Inputs, gate: str = "scalar", erase: str | None = "decayed", raw: bool = False, bound: float | None = None
) -> Problem:
    (B, T, H, K), (HV, V) = x.k.shape, x.v.shape[2:]
    packed = x.cu_seqlens is not None
    N = x.cu_seqlens.numel() - 1 if packed else B
    return Problem(
        "launches", B, T, H, HV, K, V, N, x.q.dtype, x.q.device, gate_of((gate, raw, bound), x.g, x.A_log, x.dt_bias),
        erase, K**-0.5, lengths=None if packed else (T,) * B, packed=packed, l2norm=raw, raw_beta=raw,
        most_beta=1.0 if raw else 2.0,
    )  # fmt: skip


def problem_of(case: RuleCase) -> tuple[Problem, Inputs]:
    new = partial(torch.empty, device="meta")
    H, HV, T, K, V = 2, 4, case.tokens, case.width, case.values or case.width
    q, k = (new(1, rows, H, K + case.gap, dtype=case.dtype)[..., :K] for rows in (T // case.steps, T))
    v = new(1, T, HV, V + case.gap, dtype=case.dtype)[..., :V]
    g = {"none": None, "scalar": new(1, T // case.steps, HV), "channel": new(1, T, HV, K, dtype=case.dtype)}[case.gate]
    beta = None if case.erase is None or case.strength else new(1, T, HV)
    A_log = new(HV) if case.raw else None
    dt_bias = new(HV * K) if case.raw and case.gate == "channel" else A_log
    own = q if case.erase == "undecayed" else None
    x = Inputs(q, k, v, g, beta, own, new(2, HV, K, V), A_log, dt_bias, new(3, dtype=torch.int32))
    x = x._replace(b=new(g.shape, dtype=case.dtype), w=v) if case.strength else x
    p = describe(x, case.gate, case.erase, case.raw, case.bound)
    return p._replace(channel_strength=case.strength, steps=case.steps), x
