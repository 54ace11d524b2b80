"""The named problems on which every backend is checked, for every member of the family.

They are in the package because the tests and ``flash-delta check`` share them.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import flash_delta


@dataclass(frozen=True)
class Member:
    """One op of the family, and which parts of a case apply to it."""

    name: str
    gate: str  # "none", "scalar", "channel"
    delta: bool = True
    erase_keys: bool = False
    channel_strength: bool = False  # b and w in place of beta
    updates: int = 1  # of the state per token: so many rows of k, v and beta
    options: frozenset[str] = frozenset()  # the options of a case that it takes

    @property
    def op(self):
        return getattr(flash_delta, self.name)


_COMMON = {"state_v_first", "scale"}
_CHUNK = _COMMON | {"chunk_size", "disable_recompute"}
_BETA = {"use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"}
_GATE = {"use_gate_in_kernel"}
_KDA = frozenset(_COMMON | _BETA | _GATE | {"lower_bound", "safe_gate"})

MEMBERS = {
    "gdn": Member("chunk_gated_delta_rule", "scalar", options=frozenset(_CHUNK | _BETA | _GATE)),
    "gdn-recurrent": Member("fused_recurrent_gated_delta_rule", "scalar", options=frozenset(_COMMON | _BETA | _GATE)),
    "kda": Member("chunk_kda", "channel", options=_KDA | {"chunk_size", "disable_recompute"}),
    "kda-recurrent": Member("fused_recurrent_kda", "channel", options=_KDA - {"safe_gate"}),
    "gdn2": Member("chunk_gdn2", "channel", channel_strength=True, options=_KDA | {"chunk_size", "disable_recompute"}),
    "gdn2-recurrent": Member("fused_recurrent_gdn2", "channel", channel_strength=True, options=_KDA - {"safe_gate"}),
    "delta-rule": Member("chunk_delta_rule", "none", options=frozenset(_CHUNK | _BETA)),
    "gdp": Member("chunk_gated_delta_product", "scalar", updates=2, options=frozenset(_CHUNK | _BETA)),
    "gdp-recurrent": Member(
        "fused_recurrent_gated_delta_product", "scalar", updates=3, options=frozenset(_COMMON | _BETA)
    ),
    "gdp-ungated": Member("chunk_gated_delta_product", "none", updates=3, options=frozenset(_CHUNK | _BETA)),
    "comba": Member("chunk_comba", "scalar", erase_keys=True, options=frozenset(_CHUNK | _BETA | _GATE)),
    "simple-gla": Member("chunk_simple_gla", "scalar", delta=False, options=frozenset(_CHUNK)),
}
OF_UPDATES = ("k", "v", "beta")  # each update of a token has a row of these
IN_CHUNKS = ("chunk_gated_delta_rule", "chunk_kda", "chunk_delta_rule")  # the ops that hard cases are for


class Floors(NamedTuple):
    """Errors that are allowed to a 16-bit kernel in a hard case, however small the error of rounding q and k is."""

    o: float
    final_state: float
    tokens: float | None = None  # of dq, dk, dv, dbeta and dinitial_state; None: the case has no backward pass
    gates: float = 0.0  # of dg, measured against the terms that it sums


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
    decay: str | float = "mild"  # "mild", "zero", "strong", "extreme", "rising", "slow", or a log decay
    keys: str = "random"  # "random", "correlated", "some zero", "stretching", and those of `HARD`: see inputs.py
    noise: float = 0.0  # of keys "direction"
    beta: str | float = "random"  # "random", "one", "some zero", "to 2", or a number
    initial_state: bool = True
    wide_gates: bool = False  # g in float32 beside narrower q, k and v
    gaps: bool = False  # rows of all tensors have gaps, and states have the dtype of q: kernels may need copies
    options: dict[str, Any] = field(default_factory=dict)
    smoke: bool = False  # also in the short list
    floors: Floors | None = None  # of a hard case
    channel_floors: Floors | None = None  # the same for a gate per channel, if they differ

    def at_widths(self, K: int, V: int) -> "Case":
        """Returns the problem with other widths."""
        return replace(self, name=f"{self.name} {K}x{V}", K=K, V=V, smoke=False)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes in which `flash-delta check` runs the case."""
        return ("float64", "float32", "bfloat16") if self.floors is None else ("bfloat16",)

    @property
    def forward_only(self) -> bool:
        return self.floors is not None and self.floors.tokens is None

    def applies(self, member: Member) -> bool:
        if self.floors is not None:
            return member.name in IN_CHUNKS and (member.gate != "none" or self.decay == 0.0)
        if self.keys == "stretching":
            return member.channel_strength
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
    # Heads have keys of their own here, too: what rounding a key costs differs between keys, and adds up.
    Case("growing", "GDN-2's worst case: two keys in turn stretch a state by 1.25 every two tokens", B=1, T=70, H=8,
         HV=8, decay="zero", keys="stretching", smoke=True),
    Case("growing-to-2", "the same by 1.62, with an erase gate up to 2; the inverse still fits into float16", B=1,
         T=24, H=8, HV=8, decay="zero", keys="stretching", beta="to 2", smoke=True),
    Case("state-v-first", "states are [N, HV, V, K]", options={"state_v_first": True}),
    Case("scale", "a scale of the caller's", options={"scale": 0.3}),
    Case("chunk-16", "the smallest chunk", options={"chunk_size": 16}),
    Case("chunk-32", "a chunk of 32", options={"chunk_size": 32}),
    Case("saved", "A and all chunk states saved for the backward", options=_RAW | {"disable_recompute": True}),
    Case("saved-packed", "the same, packed", B=1, T=130, lengths=(64, 0, 66), options={"disable_recompute": True}),
]  # fmt: skip

# K and V of `flash-delta check --widths`: rows that are no multiples of 16 bytes, and the widest values.
WIDTHS = ((60, 100), (24, 512))


def _hard(name: str, why: str, keys: str, beta: str | float, floors: Floors, decay: float | str = 0.0, **other) -> Case:
    heads = {"B": 1, "T": 1024, "H": 16, "HV": 16, "K": 128, "V": 128} | other
    norm = {"use_qk_l2norm_in_kernel": True}
    return Case(name, why, **heads, keys=keys, beta=beta, decay=decay, floors=floors, wide_gates=True, options=norm)


# Where keys repeat and little decays, the rounding errors of a chunk's tokens add up. rule.py says what is allowed.
# States start from zeros, and heads have keys of their own: what rounding one key costs differs fivefold between keys.
HARD = [
    _hard("one-key-1.999", "each token reflects the state; a chunk's factor is 0.94", "one", 1.999,
          Floors(0.2, 0.3, 0.35, 0.08)),
    _hard("signs-1.999", "the same key, and its negative", "signs", 1.999, Floors(0.2, 0.3, 0.5, 0.12)),
    _hard("one-key-1.95", "a chunk's factor is 0.04", "one", 1.95, Floors(0.05, 0.08, 0.13, 0.05)),
    _hard("one-key-1.9", "a chunk's factor is 0.001", "one", 1.9, Floors(0.035, 0.05, 0.13, 0.03)),
    _hard("one-key-1.5", "also a slow decay", "one", 1.5, Floors(0.035, 0.04, 0.04, 0.008), -1e-3,
          channel_floors=Floors(0.05, 0.06, 0.2, 0.03)),
    _hard("one-key-0.9", "tokens erase what gates scale, so that dg cancels", "one", 0.9,
          Floors(0.026, 0.027, 0.03, 0.004), -1e-3, channel_floors=Floors(0.05, 0.06, 0.2, 0.03)),
    _hard("one-key-to-2", "factors of both signs", "one", "to 2", Floors(0.02, 0.035, 0.03, 0.011)),
    _hard("16-keys-1.9", "each key comes back after some tokens", "16", 1.9, Floors(0.024, 0.03, 0.045, 0.018)),
    _hard("direction-1.9", "keys are much alike", "direction", 1.9, Floors(0.016, 0.017, 0.032, 0.015), noise=0.3),
    _hard("direction-1.999", "keys are nearly equal", "direction", 1.999, Floors(0.06, 0.06, 0.09, 0.042), noise=0.1),
    _hard("two-keys-2", "two keys in turn; each token reflects the state exactly", "two", 2.0,
          Floors(0.08, 0.1, 0.17, 0.04)),
    _hard("direction-0.9", "keys are much alike, and beta is below 1", "direction", 0.9,
          Floors(0.007, 0.006, 0.015, 0.008), -1e-3, noise=0.3),
    _hard("turning-to-2", "each key is like the one before it", "turning", "to 2", Floors(0.013, 0.011, 0.013, 0.009),
          "slow"),
    _hard("one-key-4096", "four times as many tokens, forward only", "one", 1.999, Floors(0.8, 1.2), T=4096),
]  # fmt: skip
