"""One launcher per kernel: its grid, arguments and constants. What varies from call to call is not specialised."""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_delta.kernels.hopper import layouts
from flash_delta.kernels.hopper.again import Plan
from flash_delta.kernels.hopper.again import launch as launch_described
from flash_delta.kernels.hopper.loop import forward_loop
from flash_delta.kernels.hopper.rates import rates
from flash_delta.kernels.hopper.tiles import RATES, RATES_OF_ROWS, Tile, tiles
from flash_delta.kernels.triton import launcher
from flash_delta.kernels.triton.chunk import C, count_slots
from flash_delta.kernels.triton.launcher import Call, launch
from flash_delta.kernels.triton.workspace import Solved
from flash_delta.problem import Problem


def new_rates(p: Problem) -> Tensor:
    """What `rates` writes, four vectors a row."""
    return torch.empty(count_slots(p) * p.HV * 2, 4 * C, dtype=torch.float32, device=p.device)


def run_rates(c: Call, o: Tensor, out: Tensor, s: Solved | None = None) -> None:
    """With ``s``, what the backward pass needs, too."""
    p, x = c.p, c.x
    heads = p.HV // p.H if p.l2norm else max(n for n in (1, 2, 4, 8, 16) if p.HV % n == 0)
    scalars = (
        p.N, p.T, p.scale, p.beta_range, x.q.stride(), x.k.stride(), *row_and_others(x.g), *row_and_others(x.beta)
    )  # fmt: skip
    constants = {
        # Never one column: Triton 3.6 has no scan for a layout with more warps than columns.
        "H": p.H, "HV": p.HV, "K": p.K, "V": p.V, "C": C, "HEADS": heads, "BH": max(2, triton.next_power_of_2(heads)),
        "PACKED": p.packed, "GATE": x.g is not None, "RAW_GATE": p.raw_gate, "HAS_BIAS": x.dt_bias is not None,
        "HAS_BETA": x.beta is not None, "RAW_BETA": p.raw_beta, "NORM": p.l2norm, "OVERLAP": p.device.type != "cpu",
    }  # fmt: skip
    grid, tile = (count_slots(p), p.HV // heads, 1), RATES_OF_ROWS if p.l2norm or p.V > 128 else RATES
    kept = (None, None) if s is None else (s.vectors, s.norms)
    pointers = (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, o, out, *kept)
    launch(c, rates, pointers, lambda: [launcher.Plan(grid, tile, scalars, constants, follows=False)])


def run_loop(c: Call, o: Tensor, final: Tensor, out: Tensor, A: Tensor | None, *choice: Tile) -> None:
    """At most one program per multiprocessor and block of value columns; a program walks several states. ``A``: for the
    backward pass."""
    p, x = c.p, c.x
    initial = final if x.initial_state is None else x.initial_state
    tokens = (x.q, x.k, x.v)

    def plans() -> Iterator[Plan]:
        for t in choice or tiles(p, c.shape.chip, every=c.compiling is not None):
            columns = 64 * t.groups
            arguments = (
                ragged(x.q, p.K), ragged(x.k, p.K), ragged(x.v, columns), ragged(o, 64), lines(out),
                None if A is None else squares(A), states(p, initial), states(p, final), x.cu_seqlens, p.N * p.HV, p.T,
                *(token_stride(t) for t in tokens), tuple(t.stride(2) for t in tokens), p.HV // p.H,
            )  # fmt: skip
            constants = {
                "HV": p.HV, "WIDTH": p.K, "INITIAL": x.initial_state is not None, "V_FIRST": p.state_v_first,
                "PACKED": p.packed, "KEEP": A is not None, "GROUPS": t.groups, "FACTORS": t.factors, "NS": t.slots,
                "NV": t.values, "NX": t.maps, "NO": t.outputs, "REGISTERS": t.registers,
            }  # fmt: skip
            yield Plan((min(p.N * p.HV, c.shape.chip.processors), p.V // columns), arguments, constants)

    launch_described(c, forward_loop, plans, {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True})


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


def lines(rates: Tensor) -> TensorDescriptor:
    """Describes rates, four vectors a row."""
    return TensorDescriptor.from_tensor(rates, [1, 4 * C], layouts.LINES.value)


def squares(t: Tensor) -> TensorDescriptor:
    """Describes the matrices of chunks."""
    return TensorDescriptor(t, [t.numel() // C, C], [C, 1], [C, C], layouts.TILE.value)


def states(p: Problem, t: Tensor) -> TensorDescriptor:
    """Describes states, row by row."""
    box = [64, 32] if p.state_v_first else [32, 64]
    return TensorDescriptor(t, [p.N * p.HV * p.K, p.V], [p.V, 1], box, layouts.STATE.value)
