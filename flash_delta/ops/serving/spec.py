"""How a server calls the serving ops, said without tensors."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.ops.serving.around import Convolution, OutputNorm
from flash_delta.ops.serving.forms import DecodeCalls, PrefillCalls, Slice


@dataclass(frozen=True)
class Serving:
    """How a server calls: everything that compiled code and memory depend on. They do not depend on B, T, N, the number
    of slots, ``scale`` or ``allow_neg_eigval``. Tensors start at multiples of 16 bytes, as torch allocates them, unless
    a :class:`Slice` says otherwise.

    For the sizes and the flags see :func:`flash_delta.decode_gated_delta_rule` and :func:`flash_delta.decode_kda`.

    Args:
        rule: "gated_delta_rule" or "kda".
        H: key heads.
        HV: value heads.
        K: width of a key head.
        V: width of a value head.
        state_v_first: the layout of the pool.
        dtype: of q, k and v.
        state_dtype: of the pool.
        slot: numbers from one slot of the pool to the next. Default None: slots have no gaps.
        g_dtype: of g. Default None: ``dtype``.
        beta_dtype: of beta. Default None: ``dtype``.
        index_dtype: of all indices and of ``cu_seqlens``, torch.int32 or torch.int64.
        q, k, v, g, beta: where these lie. Default None: each in a tensor of its own without gaps.
        A_log: its dtype; None where calls have none. Read with ``use_gate_in_kernel`` only.
        dt_bias: its dtype; None where calls have none. Read with ``use_gate_in_kernel`` only.
        taps: W of the convolution. This field and those that begin with ``conv`` are read only if calls have a
            convolution.
        conv_inputs: L, how many inputs the convolution's pool holds. Default None: W.
        conv_dtype: of its weight and bias. Default None: ``dtype``.
        conv_pool_dtype: of its pool. Default None: ``dtype``.
        conv_bias: whether it has a bias.
        conv_rolling: whether it is rolling.
        conv_slot: numbers from one slot of its pool to the next. Default None: slots have no gaps.
        conv_channels_last: whether the channels of an input lie side by side in its pool and its write pool, as in
            vLLM. Such a pool is ``[slots, L, D]``, and calls get a view ``[slots, D, L]``.
        norm_gate: where the output norm's gate lies. The fields that begin with ``norm`` are read only if calls have an
            output norm. Default None: in a tensor of its own without gaps.
        norm_dtype: of its weight. Default None: ``dtype``.
        norm_activation: of its gate.
        write_dtype: of the write pool. The fields that begin with ``write`` are read only if calls have a write pool.
            Default None: ``state_dtype``.
        write_rows: whether it has rows, ``[rows, S, HV, V, K]``, or slots as the pool has.
        write_slot: numbers from one of its rows or slots to the next. Default None: they have no gaps.
        decode: the forms of decoding calls. Default: with ``write_indices`` and no other index beside ``read_indices``.
        prefill: the forms of prefill calls. Default: the same.

    Raises:
        ValueError: if rule is neither of the two, or if lower_bound is given without rule "kda".

    Example:
        >>> import torch
        >>> from flash_delta.ops.serving import DecodeCalls, PrefillCalls, Serving
        >>> spec = Serving(
        ...     "gated_delta_rule", H=16, HV=32, K=128, V=128, state_v_first=True,
        ...     state_dtype=torch.bfloat16, use_qk_l2norm_in_kernel=True,
        ...     decode=(DecodeCalls(), DecodeCalls(num_accepted_tokens=True)),
        ...     prefill=(PrefillCalls(has_initial_state=True),),
        ... )
        >>> len(spec.decode)
        2
    """

    rule: Literal["gated_delta_rule", "kda"]
    H: int
    HV: int
    K: int
    V: int
    state_v_first: bool
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    slot: int | None = None
    g_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int32
    q: Slice | None = None
    k: Slice | None = None
    v: Slice | None = None
    g: Slice | None = None
    beta: Slice | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    A_log: torch.dtype | None = torch.float32
    dt_bias: torch.dtype | None = torch.float32
    lower_bound: float | None = None
    use_beta_sigmoid_in_kernel: bool = False
    taps: int = 4
    conv_inputs: int | None = None
    conv_dtype: torch.dtype | None = None
    conv_pool_dtype: torch.dtype | None = None
    conv_bias: bool = False
    conv_rolling: bool = False
    conv_slot: int | None = None
    conv_channels_last: bool = False
    norm_gate: Slice | None = None
    norm_dtype: torch.dtype | None = None
    norm_activation: str = "silu"
    write_dtype: torch.dtype | None = None
    write_rows: bool = True
    write_slot: int | None = None
    decode: tuple[DecodeCalls, ...] = (DecodeCalls(),)
    prefill: tuple[PrefillCalls, ...] = (PrefillCalls(),)

    def __post_init__(self) -> None:
        if self.rule not in ("gated_delta_rule", "kda"):
            refuse("Serving", "rule", "'gated_delta_rule' or 'kda'", repr(self.rule))
        if self.lower_bound is not None and self.rule != "kda":
            refuse("Serving", "lower_bound", "None with rule 'gated_delta_rule'", self.lower_bound)

    def arguments(self, B: int, T: int, device: torch.device) -> dict[str, Any]:
        """The arguments of a serving op except indices. Tensors are zeros, and the pool has one slot."""
        slot = self.HV * self.K * self.V if self.slot is None else self.slot
        inner = (self.V, self.K) if self.state_v_first else (self.K, self.V)
        size, strides = (1, self.HV, *inner), (slot, self.K * self.V, inner[1], 1)
        channels = (self.K,) if self.rule == "kda" else ()

        def tokens(where: Slice | None, dtype: torch.dtype | None, heads: int, *width: int) -> Tensor:
            return strided(where, B, T, heads, *width, dtype=dtype or self.dtype, device=device)

        x = {
            "q": tokens(self.q, None, self.H, self.K),
            "k": tokens(self.k, None, self.H, self.K),
            "v": tokens(self.v, None, self.HV, self.V),
            "g": tokens(self.g, self.g_dtype, self.HV, *channels),
            "beta": tokens(self.beta, self.beta_dtype, self.HV),
            "state_pool": torch.empty_strided(size, strides, dtype=self.state_dtype, device=device),
            "state_v_first": self.state_v_first,
            "use_qk_l2norm_in_kernel": self.use_qk_l2norm_in_kernel,
            "use_gate_in_kernel": self.use_gate_in_kernel,
            "use_beta_sigmoid_in_kernel": self.use_beta_sigmoid_in_kernel,
        }
        for name, shape in (("A_log", (self.HV,)), ("dt_bias", (self.HV, *channels))):
            if self.use_gate_in_kernel and getattr(self, name) is not None:
                x[name] = torch.zeros(shape, dtype=getattr(self, name), device=device).flatten()
        return x | ({"lower_bound": self.lower_bound} if self.rule == "kda" else {})

    def write_pool(self, T: int, device: torch.device) -> Tensor:
        """Returns a write pool with one row or one slot."""
        inner = self.HV, *((self.V, self.K) if self.state_v_first else (self.K, self.V))
        pool = torch.empty(1, *self.places(T), *inner, dtype=self.write_dtype or self.state_dtype, device=device)
        return pool.as_strided(pool.shape, (self.write_slot or pool.stride(0), *pool.stride()[1:]))

    def places(self, T: int) -> tuple[int, ...]:
        """Returns the axis of places that a row of the write pool has for T tokens; () for a pool of slots."""
        return (T,) if self.write_rows else ()

    def convolution(self, device: torch.device, apart: tuple[int, ...] | None = None) -> Convolution:
        """Returns a convolution with a pool of one slot. ``apart``: its write pool has one row with these `places`."""
        D, L = 2 * self.H * self.K + self.HV * self.V, self.conv_inputs or self.taps
        dtype = self.conv_dtype or self.dtype
        bias = torch.zeros(D, dtype=dtype, device=device) if self.conv_bias else None
        weight = torch.zeros(D, self.taps, dtype=dtype, device=device)
        size = (L, D) if self.conv_channels_last else (D, L)
        pool, target = (
            None if of is None else torch.zeros(1, *of, *size, dtype=self.conv_pool_dtype or self.dtype, device=device)
            for of in ((), None if self.conv_rolling else apart)
        )
        pool = pool.as_strided(pool.shape, (self.conv_slot or D * L, *pool.stride()[1:]))
        if self.conv_channels_last:
            pool, target = pool.mT, target if target is None else target.mT
        return Convolution(pool, weight, bias, target, self.conv_rolling)

    def output_norm(self, B: int, T: int, device: torch.device) -> OutputNorm:
        gate = strided(self.norm_gate, B, T, self.HV, self.V, dtype=self.dtype, device=device)
        weight = torch.zeros(self.V, dtype=self.norm_dtype or self.dtype, device=device)
        return OutputNorm(gate, weight, activation=self.norm_activation)


def strided(where: Slice | None, B: int, T: int, heads: int, *width: int, dtype: torch.dtype, device) -> Tensor:
    """Zeros ``[B, T, heads]`` or ``[B, T, heads, width]`` as they lie in a larger tensor."""
    token, start, head = where or Slice(heads * width[0] if width else heads)
    head = head or (width[0] if width else 1)
    size, strides = (B, T, heads, *width), (T * token, token, head, 1)[: 3 + len(width)]
    end = start + 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    return torch.zeros(end, dtype=dtype, device=device).as_strided(size, strides, start)
