"""Problems of a real size: heads, lengths, dtypes, and tensors as a freshly initialised model would make them.

They are for timing, and for faults that only large problems show. The named problems of ``cases.py`` are small and
hard.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal

import torch
from torch import Tensor

from flash_delta.testing.cases import MEMBERS, Member

LOWER_BOUND = -5.0  # of a gate per channel
ERASED = 0.731  # what erases of what writes, in a fresh layer of Comba: sigmoid(1)
NAMED = 4  # so many runs of equal lengths are named; if there are more, the least and the greatest length


@dataclass(frozen=True)
class Workload:
    """One row of a table. Its ``kind`` says what is called:

    * "forward": a call without gradients
    * "training": a call with its backward pass
    * "decode": one token per sequence, on states that are updated in place; or drafts of T tokens, keeping all states
    * "prefill": prompts on such states

    With a ``hidden`` size the row is a whole layer around the rule. With a ``form`` it is a step as users run it. The
    benchmarks make these."""

    group: str
    kind: Literal["forward", "training", "decode", "prefill"]
    member: Literal["gdn", "kda", "gdn2", "gdp", "comba", "delta-rule", "simple-gla"]
    H: int
    HV: int
    N: int  # sequences
    T: int  # tokens of each sequence; with kind "decode" 1, or up to 16 for a draft
    dtype: str = "bfloat16"  # of q, k, v; gates and beta are float32 unless ``raw``
    packed: bool = True  # sequences are packed in one row, with cu_seqlens; else they are batch rows
    states: bool = True  # there is an initial state, and the final state is returned
    l2norm: bool = False  # the op normalises q and k; else they are given normalised
    raw: bool = False  # the op computes gates and beta from activations; else it gets log decays and strengths
    gates: Literal["", "dt_bias = 0", "unbounded", "log decays"] = ""  # per channel, if rows of a group differ in them
    K: int = 128
    V: int = 128
    updates: int = 1  # of the state per token, of Gated DeltaProduct
    disable_recompute: bool = False  # all is saved for the backward pass; else it computes most of it again
    state_dtype: str = "float32"  # of initial states; with kind "decode" also of the updated states
    lengths: tuple[int, ...] = ()  # of packed or padded sequences, if not all have T tokens; T is then the longest
    on_device: bool = False  # only the device knows the lengths of packed sequences; else the host does, too
    tree: bool = False  # with kind "decode": drafts are binary trees, in which token t continues token (t - 1) // 2
    batch_invariant: bool = False  # with kind "prefill"
    checkpoint_every: int = 0  # with kind "prefill": tokens between two checkpoints; 0: no checkpoints
    hidden: int = 0  # width of a layer; 0: the op alone
    of_fla: bool = False  # the layer is one of fla, not of transformers
    layers: int = 1  # so many layers, one after the other
    frozen: bool = False  # with kind "training": of a layer only the hidden states get a gradient, as below adapters
    form: Literal["", "called", "compiled", "reduce-overhead", "graphed"] = ""  # how a step of a layer is run
    around: bool = False  # with kind "prefill" or "decode": also convolution and output norm

    @property
    def name(self) -> str:
        runs = [f"{len(list(same))}x{length}" for length, same in groupby(self.lengths or [self.T] * self.N)]
        shape = " + ".join(runs) if len(runs) <= NAMED else f"{self.N}x{min(self.lengths)} to {self.T}"
        if self.kind == "decode":
            count = f"{min(self.lengths)} to {self.T}" if self.lengths else self.T
            shape = f"batch {self.N}" + (f", {'trees' if self.tree else 'drafts'} of {count}" if self.T > 1 else "")
        dtype = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        state = "" if self.state_dtype == "float32" else f", {self.state_dtype} states"
        option = " disable_recompute" if self.disable_recompute else " batch_invariant" if self.batch_invariant else ""
        checkpoints = f", a checkpoint every {self.checkpoint_every}" if self.checkpoint_every else ""
        layer = f"{self.hidden} wide, " if self.hidden else ""
        layer = f"{self.layers} layers, {layer}" if self.layers > 1 else layer
        step = " padded" * self.padded + ", frozen weights" * self.frozen + (f", {self.form}" if self.form else "")
        widths = "" if self.K == self.V == 128 else f", K = {self.K}, V = {self.V}"
        gates = f", {self.gates}" if self.gates else ""
        bounds = ", lengths on the device" if self.on_device else ""
        widths = f", {self.updates} updates a token{widths}" if self.updates > 1 else widths
        return f"{layer}{self.H}/{self.HV} {shape}{widths}{dtype}{state}{option}{checkpoints}{gates}{bounds}{step}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths) or self.N * self.T

    @property
    def padded(self) -> bool:
        """Whether shorter sequences are batch rows with padding behind them."""
        return bool(self.lengths) and not self.packed

    @property
    def parents(self) -> list[int]:
        """The token that each token of a draft continues; -1: the state before the draft."""
        return [(t - 1) // 2 if self.tree else t - 1 for t in range(self.T)]

    @property
    def gate(self) -> str:
        return MEMBERS[self.member].gate

    @property
    def recurrent(self) -> bool:
        """Whether the op runs token by token."""
        return self.kind == "decode"

    @property
    def lower_bound(self) -> float | None:
        return LOWER_BOUND if self.gate == "channel" and self.gates != "unbounded" else None

    @property
    def op(self) -> Member:
        """The library's own op for this row. With kind "decode", it is the op that computes the truth."""
        return MEMBERS[self.member + ("-recurrent" if self.recurrent else "")]


def make_tensors(workload: Workload, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
    """Arguments of the library's own op by name, with random values as in a freshly initialised model.

    Gates: g = -A softplus(a + dt_bias) with A uniform in [0, 16] ([1, 16] for KDA), a standard normal, and
    softplus(dt_bias) log-uniform in [0.001, 0.1]; KDA, unless unbounded: g = lower_bound * sigmoid(A (a + dt_bias)).
    With dt_bias = 0 the mean of g is -2.5, so that every channel soon forgets. beta = sigmoid of a standard normal, as
    are b and w of GDN-2, which are given with raw gates, too. Its gates are those of KDA.
    """
    gen = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device)

    def uniform(low: float, high: float, count: int) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=gen, device=device)

    w, dtype = workload, getattr(torch, workload.dtype)
    B, T = (1, w.tokens) if w.packed else (w.N, w.T)
    rows = w.updates * T
    channels = (w.HV, w.K) if w.gate == "channel" else (w.HV,)
    x = {"q": randn(B, T, w.H, w.K), "k": randn(B, rows, w.H, w.K), "v": randn(B, rows, w.HV, w.V)}
    if not w.l2norm:
        x |= {name: torch.nn.functional.normalize(x[name], dim=-1) for name in ("q", "k")}
    x = {name: t.to(dtype) for name, t in x.items()}
    dt = uniform(math.log(0.001), math.log(0.1), math.prod(channels)).exp()
    dt_bias = dt + torch.log(-torch.expm1(-dt))  # softplus(dt_bias) = dt
    dt_bias = torch.zeros_like(dt_bias) if w.gates == "dt_bias = 0" else dt_bias
    A = uniform(1.0 if w.gate == "channel" else 0.0, 16.0, w.HV)
    a, beta = randn(B, T, *channels), randn(B, rows, w.HV)
    if w.raw:
        x |= {"g": a.to(dtype), "beta": beta.to(dtype), "A_log": A.log(), "dt_bias": dt_bias}
    elif w.gate != "channel":
        x |= {"g": -A * torch.nn.functional.softplus(a + dt_bias), "beta": beta.sigmoid()}
    else:
        g = LOWER_BOUND * torch.sigmoid(A[:, None] * (a + dt_bias.view(channels)))
        x |= {"g": g, "beta": beta.sigmoid()}
    if w.op.erase_keys:
        x["p"] = ERASED * x["k"]
    if w.op.channel_strength:
        x |= {"b": randn(B, T, w.HV, w.K).sigmoid().to(dtype), "w": randn(B, T, w.HV, w.V).sigmoid().to(dtype)}
    has_beta = w.op.delta and not w.op.channel_strength
    lacks = {"none": ("g", "A_log", "dt_bias")}.get(w.gate, ()) + (() if has_beta else ("beta",))
    x = {name: t for name, t in x.items() if name not in lacks}
    if w.states:
        x["initial_state"] = randn(w.N, w.HV, w.K, w.V).to(getattr(torch, w.state_dtype))
    if w.packed:
        bounds = [0, *accumulate(w.lengths or [w.T] * w.N)]
        x["cu_seqlens"] = torch.tensor(bounds, device=device, dtype=torch.int32)
    return x


def activations(workload: Workload) -> dict[str, bool | float]:
    """The arguments of the op that say which activations run inside of it."""
    w = workload
    chosen: dict[str, bool | float] = {"use_qk_l2norm_in_kernel": w.l2norm}
    if w.raw:
        chosen["use_gate_in_kernel"] = True
        if not w.op.channel_strength:
            chosen["use_beta_sigmoid_in_kernel"] = True
        if w.lower_bound is not None:
            chosen["lower_bound"] = w.lower_bound
    return {name: value for name, value in chosen.items() if name in w.op.options}


def options(workload: Workload) -> dict[str, bool | float | int]:
    """The other arguments of ``workload.op``."""
    chosen: dict[str, bool | float | int] = activations(workload) | {"output_final_state": workload.states}
    if workload.disable_recompute:
        chosen["disable_recompute"] = True
    if workload.op.updates > 1:
        chosen["num_householder"] = workload.updates
    return chosen
