"""The types that ops and backends exchange: the problem, its tensors, its results.

An op checks its arguments and makes a :class:`Problem`. Every backend takes ``(problem, inputs)``. This module computes
nothing and imports only torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_origin, get_type_hints

import torch
from torch import Tensor

PACKAGE = __name__.removesuffix(".problem")  # a longer name if another package contains this library (`make hub`)

# Marks on fields of problems. Schemas of operators and compile keys are made from them.
Kind = TypeVar("Kind")
Schema = Annotated[Kind, "schema"]  # an argument of operators of torch.library, because it does not follow from tensors
Compiled = Annotated[Kind, "compiled"]  # kernels are compiled for the field's value

MOST_TAPS, WIDEST_ROW, MOST_GATES = 8, 8192, 128 * 65535  # of kernels: taps; numbers in a norm's row; a token's gates
ENVIRONMENT = "FLASH_DELTA_BACKEND"  # the variable that names a backend for calls that do not
SHORT = 16  # prefill runs sequences of at most so many tokens token by token: a chunk would be mostly empty


class Problem(NamedTuple):
    """One call of the gated delta rule, except the values of its tensors. (A frozen dataclass takes longer to make.)

    Sizes, one letter per axis: ``B`` batch rows, ``T`` tokens per row, ``H`` key heads, ``HV`` value heads (a
    multiple of ``H``; value head ``h`` uses key head ``h // (HV // H)``), ``K`` and ``V`` head widths, ``N``
    sequences.
    """

    op: Schema[str]  # the public function that was called; error messages name it
    B: int
    T: int
    H: Compiled[int]
    HV: Compiled[int]
    K: Compiled[int]
    V: Compiled[int]
    N: int
    dtype: torch.dtype  # of q, k, v and o
    device: Compiled[torch.device]
    gate: Schema[Compiled[Literal["none", "scalar", "channel"]]]  # no decay, one per value head, one per key channel
    # The state that the delta rule reads: after or before this token's decay. None: no delta rule (simple GLA).
    erase: Schema[Compiled[Literal["decayed", "undecayed"] | None]]
    scale: Schema[float]
    g_dtype: torch.dtype | None = None  # of g, often wider than q; None: there is no g
    chunk_size: Schema[int] = 64
    recurrent: Schema[bool] = False  # the forward runs token by token
    erase_keys: bool = False  # tokens erase with Inputs.p and write with k
    # Lengths of the N sequences; None: only the device knows. While torch.compile traces, the tensor cu_seqlens_cpu.
    lengths: tuple[int, ...] | None = None
    packed: Compiled[bool] = False  # B = 1 and the row holds N sequences
    l2norm: Schema[Compiled[bool]] = False  # q, k (and p) are normalised first
    raw_gate: Schema[Compiled[bool]] = False  # the log decay is computed from a raw g, A_log, dt_bias and lower_bound
    # The bound of a raw gate; None: the softplus gate. For given log decays: a smaller one counts as the bound.
    lower_bound: Schema[float | None] = None
    raw_beta: Schema[Compiled[bool]] = False  # beta is a logit
    beta_range: Schema[float] = 1.0  # the sigmoid is multiplied by it: 2 allows negative eigenvalues
    most_beta: Schema[float] = 2.0  # how large beta can be: 1 or 2
    state_v_first: Schema[Compiled[bool]] = False  # states are [N, HV, V, K]
    keep_states: Schema[bool] = False  # also return the state at the start of every chunk
    disable_recompute: Schema[bool] = False  # the forward saves more, and the backward pass recomputes less
    needs_grad: Schema[bool] = False
    taps: Compiled[int] = 0  # serving: taps of the short convolution before the rule; 0: no convolution
    window: Compiled[int] = 0  # how many inputs of a channel a window in the convolution's pool holds
    rolling: Compiled[bool] = False  # slots of that pool hold more: a draft's inputs, after those of its first window
    eps: float | None = None  # serving: eps of the gated norm after the rule; None: no norm
    activation: Compiled[Literal["silu", "sigmoid"] | None] = None  # the activation of that norm's gate
    pool: torch.dtype | None = None  # serving: the dtype of the pool whose slots hold the states
    write_pool: torch.dtype | None = None  # decoding: dtype of the pool that is written; None: the same pool
    checkpoint_every: int = 0  # prefill: tokens between two checkpoints; 0: no checkpoints
    most_tokens: int = 0  # decoding of packed rows: rows with more tokens are padding; 0: rows are not packed
    checkpoint_offsets: bool = False  # prefill: each sequence has one checkpoint, at its own offset
    plain_pool: bool = True  # slots have no gaps inside and begin at multiples of 16 bytes
    max_prompts: int | None = None  # prefill: at most so many sequences have over SHORT tokens; None: any number
    null_slot: int = -1  # serving: this index is padding, like indices out of range
    batch_invariant: Schema[Compiled[bool]] = False  # chunk ops, prefill: no sequence changes another one's bits

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.N, self.HV, *((self.V, self.K) if self.state_v_first else (self.K, self.V)))

    @property
    def decodable(self) -> bool:
        """Whether serving supports this member: a decay, and keys that erase what they write from the decayed state."""
        return self.gate != "none" and self.erase == "decayed" and not self.erase_keys

    @property
    def writes_states(self) -> bool:
        """Whether the forward pass writes the states at chunks' starts, to return them or for the backward pass."""
        return self.keep_states or (self.needs_grad and self.disable_recompute)

    @property
    def accumulate(self) -> torch.dtype:
        """The dtype of states and sums: float64 for float64 inputs, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Inputs(NamedTuple):
    """The tensors of a call, as given. In the backward pass the same tuple holds their gradients."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None = None  # [B, T, HV] or [B, T, HV, K]: log decay, or raw activation
    beta: Tensor | None = None  # [B, T, HV]: write strength, or its logit; None: 1
    p: Tensor | None = None  # [B, T, H, K]: erase keys; None: k
    initial_state: Tensor | None = None  # Problem.state_shape
    A_log: Tensor | None = None  # [HV]
    dt_bias: Tensor | None = None  # [HV] or [HV * K]
    cu_seqlens: Tensor | None = None  # [N + 1], on the device of q


class Slots(NamedTuple):
    """Where a serving call reads and writes its states, and writes its output. Only the device knows the values of the
    indices. Ops require ``read_indices``. A backend's ``step`` has none: row i uses slot i."""

    state_pool: Tensor  # [slots, HV, K, V], or [slots, HV, V, K] with Problem.state_v_first
    read_indices: Tensor | None  # [B], packed [N]; with num_accepted_tokens [B, W]: W states, one of which is read
    write_indices: Tensor | None = None  # [B], packed [N]: for the last token's state; [B, T]: for every token's
    num_accepted_tokens: Tensor | None = None  # [B], in 1 .. W
    parent_idx: Tensor | None = None  # [B, T]: the token that each continues; -1, and for the first: the row
    has_initial_state: Tensor | None = None  # [N], bool; False: start from zeros; None: all True
    checkpoint_indices: Tensor | None = None  # [N, M]: for states after each Problem.checkpoint_every tokens; or [N]:
    checkpoint_offsets: Tensor | None = None  # for the states after so many tokens, [N]; out of range: for none
    out: Tensor | None = None  # [B, T, HV, V] in Problem.dtype, without gaps; None: new memory
    write_pool: Tensor | None = None  # where states go instead: slots, or [rows, S, HV, ..] with token t's at [row, t]


class Around(NamedTuple):
    """The tensors of a short convolution before the rule, and of a gated norm after it, in a serving call."""

    conv_pool: Tensor | None = None  # [slots, D, L]: the last inputs of D = 2HK + HV V channels (q, k, v), oldest first
    conv_weight: Tensor | None = None  # [D, W]
    conv_bias: Tensor | None = None  # [D]
    norm_gate: Tensor | None = None  # [B, T, HV, V]
    norm_weight: Tensor | None = None  # [V]
    conv_write_pool: Tensor | None = None  # [slots, D, L] or [rows, S, D, L], as Slots.write_pool


class ConvolutionProblem(NamedTuple):
    """A call of the short convolution: everything except the values of its tensors."""

    op: Schema[str]
    B: int
    T: int
    D: Compiled[int]  # channels
    W: Compiled[int]  # taps
    N: int  # sequences
    dtype: torch.dtype  # the widest of its tensors
    device: Compiled[torch.device]
    packed: Compiled[bool]
    activation: Schema[Compiled[str | None]]
    output_final_state: Schema[bool] = False
    DQ: Compiled[int] = 0  # channels of q, and of k; v has the others. 0: there is one tensor x


class Convolved(NamedTuple):
    """The tensors of a convolution. In the backward pass the same tuple holds their gradients."""

    x: Tensor  # [B, T, D]
    weight: Tensor  # [D, W]
    bias: Tensor | None = None  # [D]
    initial_state: Tensor | None = None  # [N, D, W]: the last inputs, the oldest first
    cu_seqlens: Tensor | None = None  # [N + 1]


class ConvolvedHeads(NamedTuple):
    """The tensors of the three convolutions of a layer, which have no bias and no state."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    q_weight: Tensor  # [H * K, W]
    k_weight: Tensor  # [H * K, W]
    v_weight: Tensor  # [HV * V, W]
    cu_seqlens: Tensor | None = None  # [N + 1]


class NormProblem(NamedTuple):
    """A call of the RMS norm over the last axis, gated if there is an activation."""

    op: Schema[str]
    D: Compiled[int]  # the last axis
    dtype: torch.dtype  # the widest of its tensors
    device: Compiled[torch.device]
    activation: Schema[Compiled[str | None]]
    eps: Schema[float]


class Normalized(NamedTuple):
    """The tensors of a norm. In the backward pass the same tuple holds their gradients."""

    x: Tensor  # [..., D]
    weight: Tensor  # [D]
    gate: Tensor | None = None  # [..., D]


class GateProblem(NamedTuple):
    """A call that computes log decays from raw activations."""

    op: Schema[str]
    HV: Compiled[int]  # heads
    K: Compiled[int]  # gates per head: one per channel, or 1 for a gate per head
    dtype: torch.dtype  # the widest of its tensors
    device: Compiled[torch.device]
    gate: Schema[Literal["scalar", "channel"]]  # one per value head, one per key channel
    lower_bound: Schema[float | None]  # as in Problem
    output_dtype: Schema[Compiled[torch.dtype]]


class Gated(NamedTuple):
    """The tensors of a gate's call. In the backward pass the same tuple holds their gradients."""

    g: Tensor  # [..., HV], or [..., HV, K] with a gate per channel
    A_log: Tensor | None = None  # HV elements; None with a lower bound only
    dt_bias: Tensor | None = None  # HV * K elements


class Mixed(NamedTuple):
    """The tensors of a mixer, which is all of a layer that is between its projections. In the backward pass the same
    tuple holds their gradients. What is None of q, k, v, g, beta and z lies in ``packed``, except that there may be no
    z at all."""

    packed: Tensor | None  # [B, T, P]
    q: Tensor | None  # [B, T, H, K], before its convolution, as k and v
    k: Tensor | None  # [B, T, H, K]
    v: Tensor | None  # [B, T, HV, V]
    g: Tensor | None  # [B, T, HV] or [B, T, HV, K], before A_log and dt_bias
    beta: Tensor | None  # [B, T, HV], logits
    z: Tensor | None  # [B, T, HV, V]: the gate of the norm
    q_weight: Tensor  # [H * K, W], or [H * K, 1, W]
    k_weight: Tensor  # [H * K, W], or [H * K, 1, W]
    v_weight: Tensor  # [HV * V, W], or [HV * V, 1, W]
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV] or [HV * K]
    norm_weight: Tensor  # [V]
    cu_seqlens: Tensor | None = None  # [N + 1]


AroundProblem = ConvolutionProblem | NormProblem | GateProblem
AroundInputs = Convolved | ConvolvedHeads | Normalized | Gated


@dataclass(slots=True, eq=False)
class KnownCall:
    """What is known about a call. It is valid for all calls that differ only in the values of their tensors."""

    problem: Problem | AroundProblem
    backend: ModuleType  # the backend that runs it
    needs_grad: bool
    launches: dict[tuple, Any] = field(default_factory=dict)  # what the backend keeps for the next such call
    # Repeats the launches, or returns None. For serving calls: (known, x, slots, around) -> o. For a recurrent op
    # without gradients: (known, x) -> (o, states).
    again: Callable[..., Any] | None = None


def marked(fields: type, mark: Any) -> dict[str, Any]:
    """Names and types of the fields of a named tuple that have ``mark``: `Schema` or `Compiled`."""
    hints = get_type_hints(fields, include_extras=True)
    marks = {name: hint.__metadata__ for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: hints[name].__origin__ for name in marks if mark.__metadata__[0] in marks[name]}


def addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def needs_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd has to record a call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class Outputs(NamedTuple):
    """What a backend's forward returns."""

    o: Tensor  # [B, T, HV, V]
    final_state: Tensor  # Problem.state_shape, in Problem.accumulate
    saved: tuple[Tensor, ...] = ()  # for the same backend's backward; empty unless Problem.needs_grad
    states: Tensor | None = None  # [B, chunks, *Problem.state_shape[1:]] at chunk starts, with Problem.keep_states
    planned: tuple[Tensor, ...] = ()  # saved after the others, except under torch.compile: a plan decides their sizes
