"""The named problems on which every backend is checked, for every member of the family.

They are in the package because the tests and ``flash-delta check`` share them.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import flash_delta


@dataclass(frozen=True)
class Member:
    """One op of the family, and which parts of a case apply to it."""

    name: str
    gate: str  # "none", "scalar", "channel"
    delta: bool = True
    erase_keys: bool = False
    options: frozenset[str] = frozenset()  # the options of a case that it takes

    @property
    def op(self):
        return getattr(flash_delta, self.name)


_COMMON = {"state_v_first", "scale"}
_CHUNK = _COMMON | {"chunk_size", "disable_recompute"}
_BETA = {"use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"}
_GATE = {"use_gate_in_kernel"}

MEMBERS = {
    "gdn": Member("chunk_gated_delta_rule", "scalar", options=frozenset(_CHUNK | _BETA | _GATE)),
    "gdn-recurrent": Member("fused_recurrent_gated_delta_rule", "scalar", options=frozenset(_COMMON | _BETA | _GATE)),
    "kda": Member("chunk_kda", "channel", options=frozenset(_CHUNK | _BETA | _GATE | {"lower_bound", "safe_gate"})),
    "kda-recurrent": Member(
        "fused_recurrent_kda", "channel", options=frozenset(_COMMON | _BETA | _GATE | {"lower_bound"})
    ),
    "delta-rule": Member("chunk_delta_rule", "none", options=frozenset(_CHUNK | _BETA)),
    "comba": Member("chunk_comba", "scalar", erase_keys=True, options=frozenset(_CHUNK | _BETA | _GATE)),
    "simple-gla": Member("chunk_simple_gla", "scalar", delta=False, options=frozenset(_CHUNK)),
}


@dataclass(frozen=True)
class Case:
    """A named problem, and the reason for it."""

    name: str
    why: str
    B: int = 2
    T: int = 150
    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24
    lengths: tuple[int, ...] | None = None  # packed sequences; if T exceeds their sum, the rest are guard rows of NaN
    decay: str = "mild"  # "mild", "zero", "strong", "extreme", "rising": see `_log_decay`
    keys: str = "random"  # "random", "correlated", "some zero"
    beta: str = "random"  # "random", "one", "some zero"
    initial_state: bool = True
    wide_gates: bool = False  # g in float32 beside narrower q, k and v
    gaps: bool = False  # rows of all tensors have gaps, and states have the dtype of q: kernels may need copies
    options: dict[str, Any] = field(default_factory=dict)
    smoke: bool = False  # also in the short list

    def at_widths(self, K: int, V: int) -> "Case":
        """The same problem with other widths."""
        return replace(self, name=f"{self.name} {K}x{V}", K=K, V=V, smoke=False)

    def applies(self, member: Member) -> bool:
        needs = self.options.keys() - {"use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel"}
        gated = member.gate != "none" or self.decay == "mild"
        return needs <= member.options and gated and (member.delta or self.beta == "random")


_RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}

CASES = [
    Case("ragged", "T is no multiple of the chunk", smoke=True),
    Case("aligned", "T is a multiple of the chunk", T=128),
    Case("one-token", "a decoding step", T=1),
    Case("short", "less than the smallest block", T=7),
    Case("long", "several segments, states that have settled", B=1, T=700, H=1, HV=2),
    Case("no-tokens", "T = 0: the state passes through", T=0),
    Case("no-sequences", "N = 0", T=3, B=1, lengths=()),
    Case("packed", "lengths around the chunk, empty ones at all places, NaN rows behind", B=1, T=205,
         lengths=(0, 1, 63, 0, 0, 64, 65, 7, 0), smoke=True),
    Case("all-empty", "packed sequences without a token", B=1, T=4, lengths=(0, 0, 0)),
    Case("no-initial-state", "states start from zero", initial_state=False),
    Case("one-head", "no grouping", H=1, HV=1),
    Case("grouped-by-3", "a group that is no power of two", H=2, HV=6),
    Case("heads-of-64", "the narrower of the usual widths", B=1, T=200, K=64, V=64),
    Case("heads-of-128", "the usual width, and the only one of some peers", B=1, T=200, K=128, V=128, smoke=True),
    Case("odd-widths", "rows that are no multiple of 16 bytes: the widths of fla's own tests", B=1, T=130, K=60, V=100),
    Case("widest-values", "the widths of fla's default layers", B=1, T=130, H=1, HV=2, K=256, V=512),
    Case("values-of-192", "states of many sequences, which are no whole tiles of 128 columns", B=1, T=205, K=64, V=192,
         lengths=(70, 5, 0, 64, 9, 1, 30, 20, 6)),
    Case("gaps", "kernels may get copies", B=1, T=70, H=1, HV=2, K=128, V=128, options=_RAW, gaps=True),
    Case("wide-keys", "K > V", K=40, V=8),
    Case("wide-values", "V > K", K=8, V=40),
    Case("zero-decay", "g = 0 everywhere", decay="zero"),
    Case("strong-decay", "log decay down to -100 per token", decay="strong", smoke=True),
    Case("extreme-decay", "log decay -1000 and -inf between mild tokens", decay="extreme"),
    Case("rising", "log decays on both sides of 0, so that states grow", B=1, T=100, decay="rising"),
    Case("correlated-keys", "keys nearly equal and beta = 1: the inverse at its worst", keys="correlated", beta="one"),
    Case("zero-beta", "tokens that write nothing; db must not divide by beta", beta="some zero"),
    Case("in-kernel", "norm, gate and sigmoid inside the op", options=_RAW, smoke=True),
    Case("in-kernel-strong", "raw gates with A = 16 and large activations", decay="strong", options=_RAW),
    Case("in-kernel-packed", "gate parameters' gradients must not see padding", B=1, T=140, lengths=(5, 0, 64, 66),
         options=_RAW),
    Case("float32-gates", "log decays as most callers have them, and the norm", B=1, T=200, HV=2, K=128, V=128,
         wide_gates=True, options={"use_qk_l2norm_in_kernel": True}),
    Case("float32-raw-gates", "the same before their activation", B=1, T=140, HV=2, K=128, V=128, lengths=(64, 0, 70),
         wide_gates=True, options=_RAW),
    Case("zero-keys", "zero rows under the norm have finite gradients", keys="some zero", options=_RAW),
    Case("negative-eigenvalues", "beta up to 2", options=_RAW | {"allow_neg_eigval": True}),
    Case("lower-bound", "the bounded gate", options=_RAW | {"lower_bound": -5.0}, smoke=True),
    Case("promised-bound", "given log decays below the promised bound count as it", T=70, decay="strong",
         options={"safe_gate": True, "lower_bound": -5.0}),
    Case("state-v-first", "states are [N, HV, V, K]", options={"state_v_first": True}),
    Case("scale", "a scale of the caller's", options={"scale": 0.3}),
    Case("chunk-16", "the smallest chunk", options={"chunk_size": 16}),
    Case("chunk-32", "a chunk of 32", options={"chunk_size": 32}),
    Case("saved", "A and all chunk states saved for the backward", options=_RAW | {"disable_recompute": True}),
    Case("saved-packed", "the same, packed", B=1, T=130, lengths=(64, 0, 66), options={"disable_recompute": True}),
]  # fmt: skip

# K and V of `flash-delta check --widths`: rows that are no multiples of 16 bytes, and the widest values.
WIDTHS = ((60, 100), (24, 512))


def make_inputs(
    case: Case, member: Member, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Arguments for ``member.op``, with gradients. Random numbers are drawn on the CPU, so all devices get the same."""
    gen = torch.Generator().manual_seed(seed)
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    options = {name: value for name, value in case.options.items() if name in member.options}
    x = {"q": _randn(gen, B, T, H, K), "k": _keys(case, gen, B, T, H, K), "v": _randn(gen, B, T, HV, V)}
    if member.erase_keys:  # with equal keys a p of its own is no contraction: states would grow without bound
        x["p"] = x["k"].clone() if case.keys == "correlated" else _keys(case, gen, B, T, H, K)
    if member.gate != "none":
        shape = (B, T, HV, K) if member.gate == "channel" else (B, T, HV)
        x |= _gate(case, gen, shape, raw="use_gate_in_kernel" in options)
    if member.delta:
        x["beta"] = _beta(case, gen, (B, T, HV), raw="use_beta_sigmoid_in_kernel" in options)
    N = B if case.lengths is None else len(case.lengths)
    if case.initial_state:
        state = _randn(gen, N, HV, K, V)
        x["initial_state"] = state.mT.contiguous() if options.get("state_v_first") else state
    if case.lengths is not None:
        for name in x.keys() & {"q", "k", "v", "p", "g", "beta"}:
            x[name][:, sum(case.lengths) :] = math.nan
        bounds = torch.tensor([0, *case.lengths]).cumsum(0)
        options |= {"cu_seqlens": bounds.to(device), "cu_seqlens_cpu": bounds}
        options = {n: v for n, v in options.items() if n != "cu_seqlens_cpu" or torch.device(device).type != "cpu"}
    wide = {"A_log", "dt_bias"}  # parameters and mostly states are kept in at least float32
    wide |= (set() if case.gaps else {"initial_state"}) | ({"g"} if case.wide_gates else set())
    dtypes = {name: torch.promote_types(dtype, torch.float32) if name in wide else dtype for name in x}
    x = {name: t.to(device, dtypes[name]) for name, t in x.items()}
    x = {name: with_gaps(t) for name, t in x.items()} if case.gaps else x
    return {name: t.requires_grad_() for name, t in x.items()} | options | {"output_final_state": True}


def with_gaps(t: Tensor) -> Tensor:
    """The same numbers, with three numbers between rows (in a vector, one between numbers)."""
    return torch.nn.functional.pad(t, (0, 3))[..., :-3] if t.dim() > 1 else t.repeat_interleave(2)[::2]


def _randn(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def _keys(case: Case, gen: torch.Generator, *shape: int) -> Tensor:
    x = _randn(gen, *shape)
    if case.keys == "correlated":
        x = 0.1 * x + _randn(gen, shape[-1])
    x = torch.nn.functional.normalize(x, dim=-1)
    if case.keys == "some zero":
        x[:, ::3] = 0
    return x


def _gate(case: Case, gen: torch.Generator, shape: tuple[int, ...], raw: bool) -> dict[str, Tensor]:
    HV, channels = shape[2], math.prod(shape[2:])
    if raw:
        g = _randn(gen, *shape)
        A_log = torch.rand(HV, generator=gen, dtype=torch.float64).mul_(math.log(16))
        dt_bias = _randn(gen, channels) - 2
        return {"g": 5 * g if case.decay == "strong" else g, "A_log": A_log, "dt_bias": dt_bias}
    g = -torch.rand(shape, generator=gen, dtype=torch.float64)
    scale = {"mild": 0.2, "zero": 0.0, "strong": 100.0, "extreme": 0.2, "rising": 0.16}[case.decay]
    g = g * scale
    if case.decay == "rising":
        g += 0.12
    if case.decay == "extreme":
        g[:, 3::5], g[:, 4::29] = -1000.0, -math.inf
    return {"g": g}


def _beta(case: Case, gen: torch.Generator, shape: tuple[int, ...], raw: bool) -> Tensor:
    if raw:
        return _randn(gen, *shape)
    beta = torch.rand(shape, generator=gen, dtype=torch.float64)
    if case.beta == "one":
        beta.fill_(1)
    if case.beta == "some zero":
        beta[:, ::4] = 0
    return beta
