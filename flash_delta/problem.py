"""What the ops and their backends exchange: the problem, its tensors, its results.

An op checks its arguments and makes a :class:`Problem`. Every backend takes ``(problem, inputs)``. Nothing here
computes, and only torch is imported.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_origin, get_type_hints

import torch
from torch import Tensor

PACKAGE = __name__.removesuffix(".problem")  # a longer name where a package has this library inside of it (`make hub`)

# Marks on fields of problems. Schemas of operators and compile keys are made from them.
Kind = TypeVar("Kind")
Schema = Annotated[Kind, "schema"]  # operators of torch.library take it as an argument: no tensor shows it
Compiled = Annotated[Kind, "compiled"]  # kernels are compiled for the field's value

MOST_TAPS, WIDEST_ROW = 8, 8192  # most taps of a convolution's kernels; widest row of a norm's, which registers hold
ENVIRONMENT = "FLASH_DELTA_BACKEND"  # the variable that chooses a backend where a call does not
SHORT = 16  # prefill runs sequences of up to so many tokens token by token: a chunk would be mostly empty


class Problem(NamedTuple):
    """One call of the gated delta rule: everything except the values of its tensors. A frozen dataclass of this size
    would take longer to make.

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
    raw_gate: Schema[Compiled[bool]] = False  # the log decay is made of a raw g with A_log, dt_bias and lower_bound
    # Of a bounded raw gate; None: the softplus gate. Of log decays as given: what is less counts as the bound.
    lower_bound: Schema[float | None] = None
    raw_beta: Schema[Compiled[bool]] = False  # beta is a logit
    beta_range: Schema[float] = 1.0  # the sigmoid is multiplied by it: 2 allows negative eigenvalues
    state_v_first: Schema[Compiled[bool]] = False  # states are [N, HV, V, K]
    keep_states: Schema[bool] = False  # also return the state at the start of every chunk
    disable_recompute: Schema[bool] = False  # the forward saves more, and the backward pass recomputes less
    needs_grad: Schema[bool] = False
    taps: Compiled[int] = 0  # serving: of the short convolution before the rule; 0: no convolution
    window: Compiled[int] = 0  # how many inputs of a channel a window in the convolution's pool holds
    rolling: Compiled[bool] = False  # a slot of it holds more: a draft's inputs, behind those of its first window
    eps: float | None = None  # of the gated norm after the rule; None: no norm
    activation: Compiled[Literal["silu", "sigmoid"] | None] = None  # of that norm's gate
    pool: torch.dtype | None = None  # serving: the dtype of the pool whose slots hold the states
    write_pool: torch.dtype | None = None  # decoding: that of the pool that is written; None: the same pool
    checkpoint_every: int = 0  # prefill: tokens between two states that are kept; 0: none is kept
    most_tokens: int = 0  # decoding of packed rows: those with more tokens are padding; 0: rows are not packed
    checkpoint_offsets: bool = False  # prefill: one state of a sequence is kept, at an offset of its own
    plain_pool: bool = True  # its slots have no gaps inside and begin at multiples of 16 bytes
    max_prompts: int | None = None  # prefill: most sequences of over SHORT tokens; None: any number
    null_slot: int = -1  # serving: this index is padding, as those out of range are
    batch_invariant: Schema[Compiled[bool]] = False  # chunk ops, prefill: no sequence changes a bit of another one's

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.N, self.HV, *((self.V, self.K) if self.state_v_first else (self.K, self.V)))

    @property
    def decodable(self) -> bool:
        """Whether serving knows this member: a decay, and keys that erase what they write from the decayed state."""
        return self.gate != "none" and self.erase == "decayed" and not self.erase_keys

    @property
    def writes_states(self) -> bool:
        """Whether the forward pass writes the states at chunks' starts: to return them, or for the backward pass."""
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
    """Where a serving call finds and leaves its states, and leaves its output. Only the device knows the values of the
    indices. Ops require ``read_indices``. A backend's ``step`` has none: every row has the slot of its own number."""

    state_pool: Tensor  # [slots, HV, K, V], or [slots, HV, V, K] with Problem.state_v_first
    read_indices: Tensor | None  # [B], packed [N]; with num_accepted_tokens [B, W]: W states, one of which is read
    write_indices: Tensor | None = None  # [B], packed [N]: for the last token's state; [B, T]: for every token's
    num_accepted_tokens: Tensor | None = None  # [B], in 1 .. W
    parent_idx: Tensor | None = None  # [B, T]: the token that a token continues; -1: it continues the row
    has_initial_state: Tensor | None = None  # [N], bool; False: it starts from zeros; None: all True
    checkpoint_indices: Tensor | None = None  # [N, M]: for states after each Problem.checkpoint_every tokens; or [N]:
    checkpoint_offsets: Tensor | None = None  # for the states after so many tokens, [N]; out of range: for none
    out: Tensor | None = None  # [B, T, HV, V] in Problem.dtype, without gaps; None: new memory
    write_pool: Tensor | None = None  # where states go instead: slots, or [rows, S, HV, ..] with token t's at [row, t]


class Around(NamedTuple):
    """What a serving call does around the rule: a short convolution before it, a gated norm after it."""

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


class Convolved(NamedTuple):
    """The tensors of a convolution. In the backward pass the same tuple holds their gradients."""

    x: Tensor  # [B, T, D]
    weight: Tensor  # [D, W]
    bias: Tensor | None = None  # [D]
    initial_state: Tensor | None = None  # [N, D, W]: the last inputs, the oldest first
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
    """A call that makes log decays of raw activations."""

    op: Schema[str]
    HV: Compiled[int]  # heads
    K: Compiled[int]  # channels of a head that have a gate each; 1 if the gate is a head's
    dtype: torch.dtype  # the widest of its tensors
    device: Compiled[torch.device]
    gate: Schema[Literal["scalar", "channel"]]  # one per value head, one per key channel
    lower_bound: Schema[float | None]  # as in Problem
    output_dtype: Schema[Compiled[torch.dtype]]


class Gated(NamedTuple):
    """The tensors of such a call. In the backward pass the same tuple holds their gradients."""

    g: Tensor  # [..., HV], or [..., HV, K] with a gate per channel
    A_log: Tensor | None = None  # HV elements; None with a lower bound only
    dt_bias: Tensor | None = None  # HV * K elements


AroundProblem = ConvolutionProblem | NormProblem | GateProblem
AroundInputs = Convolved | Normalized | Gated


@dataclass(slots=True, eq=False)
class KnownCall:
    """What is known of a call. It holds for all calls that differ from it only in the values of their tensors."""

    problem: Problem | AroundProblem
    backend: ModuleType  # that runs it
    needs_grad: bool
    launches: dict[tuple, Any] = field(default_factory=dict)  # what the backend keeps for the next such call
    # Repeats the launches, or returns None. Of serving calls: (known, x, slots, around) -> o; of a recurrent op's,
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
    states: Tensor | None = None  # [B, chunks, HV, K, V] at chunk starts, with Problem.keep_states
    planned: tuple[Tensor, ...] = ()  # saved after the others, except under torch.compile: a plan decides their sizes
