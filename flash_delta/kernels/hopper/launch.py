"""One launcher per kernel: its grid, arguments and constants. What varies from call to call is not specialised."""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_delta.kernels.hopper import layouts
from flash_delta.kernels.hopper.loop import forward_loop
from flash_delta.kernels.hopper.rates import rates
from flash_delta.kernels.hopper.tiles import Tile
from flash_delta.kernels.triton.chunk import C, count_slots
from flash_delta.problem import Inputs, Problem

WIDTH = 128  # K, and V


def new_rates(p: Problem) -> Tensor:
    """What `rates` writes, two vectors a row."""
    return torch.empty(count_slots(p) * p.HV * count_rates(p) // 2, 2 * C, dtype=torch.float32, device=p.device)


def count_rates(p: Problem) -> int:
    return 6 if p.l2norm else 4


def run_rates(p: Problem, x: Inputs, o: Tensor, out: Tensor) -> None:
    heads = p.HV // p.H if p.l2norm else max(n for n in (1, 2, 4, 8, 16) if p.HV % n == 0)
    rates[(count_slots(p), p.HV // heads)](
        x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, o, out, p.N, p.T, p.scale, p.beta_range,
        x.q.stride(), x.k.stride(), *row_and_others(x.g), *row_and_others(x.beta),
        H=p.H, HV=p.HV, K=p.K, V=p.V, C=C, R=count_rates(p), HEADS=heads, BH=triton.next_power_of_2(heads),
        PACKED=p.packed, GATE=x.g is not None, RAW_GATE=p.raw_gate, HAS_BIAS=x.dt_bias is not None,
        HAS_BETA=x.beta is not None, RAW_BETA=p.raw_beta, NORM=p.l2norm,
        OVERLAP=p.device.type != "cpu", num_warps=4 if p.l2norm else 1, enable_fp_fusion=True,
    )  # fmt: skip


def run_loop(p: Problem, x: Inputs, o: Tensor, final: Tensor, out: Tensor, t: Tile, processors: int) -> None:
    """At most one program per multiprocessor and block of value columns; a program walks several states."""
    columns = 64 * t.groups
    initial = final if x.initial_state is None else x.initial_state
    tokens = (x.q, x.k, x.v)
    forward_loop[(min(p.N * p.HV, processors), WIDTH // columns)](
        ragged(x.q, WIDTH), ragged(x.k, WIDTH), ragged(x.v, columns), ragged(o, 64),
        TensorDescriptor.from_tensor(out, [1, 2 * C], layouts.LINES.value), states(p, initial), states(p, final),
        x.cu_seqlens, p.N * p.HV, p.T, p.scale, *(token_stride(t) for t in tokens), tuple(t.stride(2) for t in tokens),
        p.HV // p.H,
        HV=p.HV, INITIAL=x.initial_state is not None, V_FIRST=p.state_v_first, PACKED=p.packed, RATES=count_rates(p),
        GROUPS=t.groups, FACTORS=t.factors, NS=t.slots, NV=t.values, NX=t.maps, NO=t.outputs, REGISTERS=t.registers,
        num_warps=4, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip


def row_and_others(t: Tensor | None) -> tuple[int, tuple[int, int]]:
    """Strides of g or beta: that of a batch row, which depends on T, and those of (token, head)."""
    return (0, (0, 0)) if t is None else (t.stride(0), t.stride()[1:])


def token_stride(t: Tensor) -> int:
    """Tokens from one batch row to the next."""
    return t.stride(0) // t.stride(1)


def ragged(t: Tensor, width: int) -> TensorDescriptor:
    """Describes all heads' tokens so that the copy engine clips at the end of any sequence: zeros come from behind it,
    and nothing goes there.

    It clips at the end of axis 2, which stands at 2^30. Of a sequence that ends before row e the row e - i is
    ``[2^30, e, 2^30 - i]``: the strides of the first and the third axis add up to 2^34 numbers of 2 bytes, and 2^30
    times that is 0 modulo 2^64 (the trick of ``triton.tools.ragged_tma``).
    """
    _, token, head, _ = t.stride()
    shape = [0x7FFF0000, 0x7FFF0000, layouts.RAGGED.value, (t.shape[2] - 1) * head + t.shape[3]]
    return TensorDescriptor(t, shape, [2**34 - token, token, token, 1], [1, 1, C, width], layouts.BOX.value)


def states(p: Problem, t: Tensor) -> TensorDescriptor:
    """Describes states, row by row."""
    box = [64, 32] if p.state_v_first else [32, 64]
    return TensorDescriptor(t, [p.N * p.HV * WIDTH, WIDTH], [WIDTH, 1], box, layouts.STATE.value)
