"""A call of the delta rule: the problem, its tensors, its results."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flash_delta.problem.marks import Compiled, Schema
from flash_delta.problem.parts import Gate, Pools


class Problem(NamedTuple):
    """One call of the gated delta rule, except the values of its tensors. (A frozen dataclass takes longer to make.)

    Sizes, one letter per axis: ``B`` batch rows, ``T`` tokens per row, ``H`` key heads, ``HV`` value heads (a
    multiple of ``H``; value head ``h`` uses key head ``h // (HV // H)``), ``K`` and ``V`` head widths, ``N``
    sequences.
    """

    op: Schema[str]  # the public function that was called; error messages name it
    B: int
    T: int  # rows of k and v; q, g and o have T // steps
    H: Compiled[int]
    HV: Compiled[int]
    K: Compiled[int]
    V: Compiled[int]
    N: int
    dtype: torch.dtype  # of q, k, v and o
    device: Compiled[torch.device]
    gate: Schema[Gate]
    # The state that the delta rule reads: after or before this token's decay. None: no delta rule (simple GLA).
    erase: Schema[Compiled[Literal["decayed", "undecayed"] | None]]
    scale: Schema[float]
    chunk_size: Schema[int] = 64
    recurrent: Schema[bool] = False  # the forward runs token by token
    erase_keys: bool = False  # tokens erase with Inputs.p and write with k
    channel_strength: Schema[Compiled[bool]] = False  # tokens erase with b . k and write w . v; there is no beta
    strength_dtype: torch.dtype | None = None  # of b and w; of the one that differs from q if there is one
    # Lengths of the N sequences; None: only the device knows. While torch.compile traces, the tensor cu_seqlens_cpu.
    lengths: tuple[int, ...] | None = None
    packed: Compiled[bool] = False  # B = 1 and the row holds N sequences
    l2norm: Schema[Compiled[bool]] = False  # q, k (and p) are normalised first
    raw_beta: Schema[Compiled[bool]] = False  # beta is a logit, or b and w are
    beta_range: Schema[float] = 1.0  # the sigmoid (not that of w) is multiplied by it: 2 allows negative eigenvalues
    most_beta: Schema[float] = 2.0  # how large beta, or b, can be: 1 or 2
    state_v_first: Schema[Compiled[bool]] = False  # states are [N, HV, V, K]
    keep_states: Schema[bool] = False  # also return the state at the start of every chunk
    disable_recompute: Schema[bool] = False  # the forward saves more, and the backward pass recomputes less
    needs_grad: Schema[bool] = False
    batch_invariant: Schema[Compiled[bool]] = False  # chunk ops, prefill: no sequence changes another one's bits
    pools: Pools | None = None  # of a serving call
    # Updates of the state per token, a divisor of T: rows of k, v and beta for each row of q, g and o. ``lengths`` and
    # Inputs.cu_seqlens count rows of k.
    steps: Schema[Compiled[int]] = 1

    @property
    def o_shape(self) -> tuple[int, ...]:
        return self.B, self.T // self.steps, self.HV, self.V

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.N, self.HV, *((self.V, self.K) if self.state_v_first else (self.K, self.V)))

    @property
    def decodable(self) -> bool:
        """Whether serving supports this member: a decay, and keys that erase what they write from the decayed state."""
        return self.gate.kind != "none" and self.erase == "decayed" and not self.erase_keys

    @property
    def writes_states(self) -> bool:
        """Whether the forward pass writes the states at chunks' starts, to return them or for the backward pass."""
        return self.keep_states or (self.needs_grad and self.disable_recompute)

    @property
    def accumulate(self) -> torch.dtype:
        """The dtype of states and sums: float64 for float64 inputs, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


_parts: dict[Gate | Pools | None, Gate | Pools | None] = {}


def sharing(p: Problem) -> Problem:
    """The problem, with the first gate and the first pools that were equal to its own. Known calls of many lengths keep
    these, because Python's garbage collector visits every object that a new length leaves."""
    gate, pools = (_parts.setdefault(part, part) for part in (p.gate, p.pools))
    return p._replace(gate=gate, pools=pools)


class Inputs(NamedTuple):
    """The tensors of a call, as given. In the backward pass the same tuple holds their gradients."""

    q: Tensor  # [B, T / steps, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None = None  # [B, T / steps, HV] or [B, T, HV, K]: log decay, or raw activation
    beta: Tensor | None = None  # [B, T, HV]: write strength, or its logit; None: 1
    p: Tensor | None = None  # [B, T, H, K]: erase keys; None: k
    initial_state: Tensor | None = None  # Problem.state_shape
    A_log: Tensor | None = None  # [HV]
    dt_bias: Tensor | None = None  # [HV] or [HV * K]
    cu_seqlens: Tensor | None = None  # [N + 1], on the device of q
    b: Tensor | None = None  # [B, T, HV, K]: erase gate, or its logit; with Problem.channel_strength
    w: Tensor | None = None  # [B, T, HV, V]: write gate, or its logit; with Problem.channel_strength


def strength_dtype(x: Inputs) -> torch.dtype | None:
    """`Problem.strength_dtype` of a call with these tensors."""
    return None if x.b is None or x.w is None else x.w.dtype if x.b.dtype == x.q.dtype else x.b.dtype


class Slots(NamedTuple):
    """Where a serving call reads and writes its states, and writes its output. Only the device knows the values of the
    indices. Ops require ``read_indices``. A backend's ``step`` has none: row i uses slot i."""

    state_pool: Tensor  # [slots, HV, K, V], or [slots, HV, V, K] with Problem.state_v_first
    read_indices: Tensor | None  # [B], packed [N]; with num_accepted_tokens [B, W]: W states, one of which is read
    write_indices: Tensor | None = None  # [B], packed [N]: for the last token's state; [B, T]: for every token's
    num_accepted_tokens: Tensor | None = None  # [B], in 1 .. W
    parent_idx: Tensor | None = None  # [B, T]: the token that each continues; -1, and for the first: the row
    has_initial_state: Tensor | None = None  # [N], bool; False: start from zeros; None: all True
    checkpoint_indices: Tensor | None = None  # [N, M]: for states after each Pools.checkpoint_every tokens; or [N]:
    checkpoint_offsets: Tensor | None = None  # for the states after so many tokens, [N]; out of range: for none
    out: Tensor | None = None  # [B, T, HV, V] in Problem.dtype, without gaps; None: new memory
    write_pool: Tensor | None = None  # where states go instead: slots, or [rows, S, HV, ..] with token t's at [row, t]
    # A ring of records: pages of S tokens, with what each did to the state. S_t = decay_t S_{t-1} + k_t u_t^T. With
    # it write_indices [B] are for the states after the records that are read, and no token writes a state.
    ring_k: Tensor | None = None  # [pages, S, H, K]
    ring_u: Tensor | None = None  # [pages, S, HV, V]
    ring_decay: Tensor | None = None  # [pages, S, HV], or [pages, S, HV, K] with a decay per channel
    ring_write: Tensor | None = None  # [B]: the pages that the call writes
    ring_read: Tensor | None = None  # [B]: the pages whose records it applies to states first,
    ring_counts: Tensor | None = None  # [B]: and how many of them, in 0 .. S


class Around(NamedTuple):
    """The tensors of a short convolution before the rule, and of a gated norm after it, in a serving call."""

    conv_pool: Tensor | None = None  # [slots, D, L]: the last inputs of D = 2HK + HV V channels (q, k, v), oldest first
    conv_weight: Tensor | None = None  # [D, W]
    conv_bias: Tensor | None = None  # [D]
    norm_gate: Tensor | None = None  # [B, T, HV, V]
    norm_weight: Tensor | None = None  # [V]
    conv_write_pool: Tensor | None = None  # [slots, D, L] or [rows, S, D, L], as Slots.write_pool


class Outputs(NamedTuple):
    """What a backend's forward returns."""

    o: Tensor  # [B, T / steps, HV, V]
    final_state: Tensor  # Problem.state_shape, in Problem.accumulate
    saved: tuple[Tensor, ...] = ()  # for the same backend's backward; empty unless Problem.needs_grad
    states: Tensor | None = None  # [B, chunks, *Problem.state_shape[1:]] at chunk starts, with Problem.keep_states
    planned: tuple[Tensor, ...] = ()  # saved after the others, except under torch.compile: a plan decides their sizes
