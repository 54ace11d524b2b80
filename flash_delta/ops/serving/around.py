"""What a layer does around the delta rule, for calls that do all of it: convolution and output norm."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.ops._check.options import ACTIVATIONS, refuse
from flash_delta.ops._check.rule import check_kind, check_shape
from flash_delta.problem import Around, Problem, Slots

MOST_TAPS = 4


class Convolution(NamedTuple):
    r"""A short convolution of q, k and v before the rule. Its windows are in the slots of a pool.

    .. math::
        y_{t,d} = \mathrm{silu}(b_d + \sum_{i<W} w_{d,i} \, x_{t-(W-1)+i,d})

    in float32. The channels are those of q, then of k, then of v: D = 2 H K + HV V. The same indices name the slots of
    states and of windows.

    An input is rounded to the dtype of the pool before anything is computed with it. So one call with T tokens gives
    the same bits as T calls. A pool in q's dtype, or in float32, rounds nothing.

    Args:
        pool: ``[slots, D, L]``, L from W - 1 to 4: the last L inputs, oldest first. float32, bfloat16 or float16, which
            may differ from q's dtype; any strides.
        weight: ``[D, W]``, W from 1 to 4. The last tap is for the current token. Any float dtype, without gaps.
        bias: ``[D]``, any float dtype, without gaps. Default None: no bias.
        write_pool: a second pool, which windows are written to. Give it if the call has a ``write_pool`` of states, and
            only then. It has the same slots or rows as that pool: ``[slots', D, L]`` or ``[rows, S, D, L]``, in the
            dtype of ``pool``, any strides. Default None.
        rolling: whether a row has one slot, as in vLLM. The slot holds the inputs of a draft after those before it.
            Default False: the slot of each state holds the window before the next token.

    With ``rolling`` a row's slot is column 0 of ``read_indices``, also in calls with ``num_accepted_tokens``. W is from
    2 to 4. L is at least W - 2 + T, and at least W - 2 plus the columns of ``read_indices``. Let a be the row's count
    of accepted tokens, or 1 in calls without counts. The call continues from the W - 1 inputs from input a - 1 on. If
    it writes states, it leaves the W - 2 inputs from input a on, and after them the inputs of its T tokens before the
    first padding token. The rest of the slot stays as it is. So with T = 1 the first W - 1 inputs are shifted by one. A
    call with ``parent_idx`` is refused. A prefill reads the first W - 1 inputs of a slot. It leaves its last W - 1
    inputs at the start of the slot that it writes.

    Example:
        >>> import torch
        >>> from flash_delta.ops.serving import Convolution
        >>> D = 2 * 2 * 32 + 4 * 32  # channels of q, k and v: H = 2, HV = 4, K = V = 32
        >>> convolution = Convolution(pool=torch.zeros(8, D, 4), weight=torch.randn(D, 4))
        >>> convolution.bias is None
        True
    """

    pool: Tensor
    weight: Tensor
    bias: Tensor | None = None
    write_pool: Tensor | None = None
    rolling: bool = False


class OutputNorm(NamedTuple):
    r"""A gated norm of every head's output.

    .. math::
        y = \frac{o}{\sqrt{\mathrm{mean}(o^2) + \mathrm{eps}}} \cdot w \cdot \mathrm{act}(\mathrm{gate})

    in float32. Prefill rounds o to q's dtype before the norm. Decoding on a GPU does the same. Decoding on a CPU rounds
    only the result.

    Args:
        gate: ``[B, T, HV, V]``, any float dtype and strides.
        weight: ``[V]``, any float dtype, without gaps.
        eps: added to the mean square. Default 1e-5.
        activation: "silu" ("swish" is the same) or "sigmoid". Default "silu".

    Example:
        >>> import torch
        >>> from flash_delta.ops.serving import OutputNorm
        >>> norm = OutputNorm(gate=torch.randn(3, 1, 4, 32), weight=torch.ones(32))
        >>> norm.eps, norm.activation
        (1e-05, 'silu')
    """

    gate: Tensor
    weight: Tensor
    eps: float = 1e-5
    activation: str = "silu"


NOTHING = Around()
NAMES = (  # of the fields of Around
    "convolution.pool", "convolution.weight", "convolution.bias", "output_norm.gate", "output_norm.weight",
    "convolution.write_pool",
)  # fmt: skip
STORED = (torch.float16, torch.bfloat16, torch.float32)  # inputs
PARAMETERS = ("convolution.weight", "convolution.bias", "output_norm.weight")


def around_of(
    op: str, convolution: Convolution | None, norm: OutputNorm | None
) -> tuple[Around, tuple[float | None, str | None, bool]]:
    """Returns the tensors of convolution and norm, and the first `PoolOptions`: the norm's eps, its activation by its
    one name, and whether the convolution is rolling."""
    if convolution is None and norm is None:
        return NOTHING, (None, None, False)
    if not isinstance(convolution, Convolution | None):
        refuse(op, "convolution", "a Convolution or None", type(convolution).__name__)
    if not isinstance(norm, OutputNorm | None):
        refuse(op, "output_norm", "an OutputNorm or None", type(norm).__name__)
    around, rolling = NOTHING, False
    if convolution is not None:
        pool, weight, bias, target, rolling = convolution
        around = Around(pool, weight, bias, conv_write_pool=target)
    if norm is None:
        return around, (None, None, rolling)
    if norm.activation not in ACTIVATIONS:
        refuse(op, "output_norm.activation", f"one of {', '.join(ACTIVATIONS)}", repr(norm.activation))
    if norm.eps is None:  # in a problem, None means that there is no norm
        refuse(op, "output_norm.eps", "a number of at least 0", "None")
    around = around._replace(norm_gate=norm.gate, norm_weight=norm.weight)
    return around, (norm.eps, ACTIVATIONS[norm.activation], rolling)


def check_around(p: Problem, s: Slots, around: Around) -> None:
    """Raises ValueError naming the argument, what was expected and what came."""
    gate, norm_weight = around.norm_gate, around.norm_weight
    if around.conv_pool is not None or around.conv_weight is not None:
        _check_convolution(p, s, around)
    if gate is not None or norm_weight is not None:
        check_shape(p.op, "output_norm.gate", gate, p.B, p.T, p.HV, p.V)
        check_shape(p.op, "output_norm.weight", norm_weight, p.V)
    for name, t in zip(NAMES, around, strict=True):
        if t is not None:
            check_kind(p.op, name, t, p.device)
        if t is not None and name in PARAMETERS and not t.is_contiguous():
            refuse(p.op, name, "a contiguous tensor", f"strides {list(t.stride())}")


def _check_convolution(p: Problem, s: Slots, around: Around) -> None:
    op, D, pool, weight, bias = p.op, 2 * p.H * p.K + p.HV * p.V, *around[:3]
    check_shape(op, "convolution.weight", weight, D, "W")
    check_shape(op, "convolution.pool", pool, len(s.state_pool), D, "L")
    W, L = weight.shape[1], pool.shape[2]
    if p.pools.records and not p.pools.rolling:
        refuse(op, "convolution.rolling", "True with a ring, since no token has a slot for a window", p.pools.rolling)
    if p.pools.rolling:
        _check_rolling(p, s, W, L)
    elif not 1 <= W <= MOST_TAPS:
        refuse(op, "convolution.weight", f"1 to {MOST_TAPS} taps (axis 1)", W)
    elif not max(1, W - 1) <= L <= MOST_TAPS:
        refuse(op, "convolution.pool", f"{max(1, W - 1)} to {MOST_TAPS} inputs (axis 2)", L)
    if pool.dtype not in (*STORED, p.dtype):
        refuse(op, "convolution.pool", f"a dtype among {', '.join(map(str, STORED))}, or that of q", pool.dtype)
    if bias is not None:
        check_shape(op, "convolution.bias", bias, D)
    if s.write_pool is not None and not p.pools.rolling:
        target, of_rows, T = around.conv_write_pool, s.write_pool.dim() == 5, p.pools.most_tokens or p.T
        check_shape(op, "convolution.write_pool", target, len(s.write_pool), *(("S",) if of_rows else ()), D, L)
        if of_rows and target.shape[1] < T:
            refuse(op, "convolution.write_pool", f"room for {T} tokens (axis 1)", target.shape[1])
        if target.dtype != pool.dtype:
            refuse(op, "convolution.write_pool", f"{pool.dtype} like convolution.pool", target.dtype)
    elif around.conv_write_pool is not None:
        why = "with rolling=True, which writes to pool" if p.pools.rolling else "without write_pool"
        refuse(op, "convolution.write_pool", f"None {why}", "a tensor")


def _check_rolling(p: Problem, s: Slots, W: int, L: int) -> None:
    if not 2 <= W <= MOST_TAPS:
        refuse(p.op, "convolution.weight", f"2 to {MOST_TAPS} taps (axis 1) with rolling=True", W)
    columns = 1 if s.num_accepted_tokens is None else p.pools.records or s.read_indices.shape[1]
    tokens = (p.pools.most_tokens or p.T) if p.recurrent else 1  # a prompt leaves its last W - 1 inputs
    least = W - 2 + max(tokens, columns)
    if least > L:
        refuse(p.op, "convolution.pool", f"at least {least} inputs (axis 2) with rolling=True", L)
    if s.parent_idx is not None:
        refuse(p.op, "parent_idx", "None with a rolling convolution, which has one window for each length", "a tensor")
