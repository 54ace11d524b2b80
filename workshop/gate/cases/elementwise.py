"""What the compile gate compiles around the rule: the backend's functions, on sizes of models (see rule.py); and for
states at rest."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from flash_delta.compiler import Launch
from flash_delta.kernels.triton.elementwise.backend import (
    convolve,
    convolve_backward,
    convolve_heads,
    convolve_heads_backward,
    convolve_token,
    gate,
    gate_backward,
    move_states,
    normalize,
    normalize_backward,
    normalize_backward_to,
)
from flash_delta.problem import (
    ConvolutionProblem,
    Convolved,
    ConvolvedHeads,
    Gated,
    GateProblem,
    Int8Problem,
    Normalized,
    NormProblem,
    Resting,
    gate_of,
)


class ConvolutionCase(NamedTuple):
    """A convolution over the projections of a layer."""

    D: int = 8192
    W: int = 4
    dtype: torch.dtype = torch.bfloat16
    whole: bool = False  # packed sequences with states and a bias


CONVOLUTIONS = {
    "convolution": ConvolutionCase(),
    "convolution-packed": ConvolutionCase(whole=True),
    "convolution-float32": ConvolutionCase(dtype=torch.float32),
    "convolution-float32-packed": ConvolutionCase(dtype=torch.float32, whole=True),
    "convolution-8-taps-packed": ConvolutionCase(W=8, whole=True),
    "convolution-narrow": ConvolutionCase(D=100),
}
MIXERS = {  # numbers of a token in the packed projection; from one key head to the next; value heads that adjoin
    "mixer": (12352, 128, 1),
    "mixer-of-qwen3-next": (12288, 768, 2),
}
NORMS = {  # columns, activation, dtype
    "norm-128": (128, None, torch.bfloat16),
    "norm-128-silu": (128, "silu", torch.bfloat16),
    "norm-128-sigmoid-float32": (128, "sigmoid", torch.float32),
    "norm-2048": (2048, None, torch.bfloat16),
    "norm-8192-silu": (8192, "silu", torch.bfloat16),
}
GATES = {  # heads, channels, bound, dtype
    "gate-gdn": (32, 1, None, torch.bfloat16),
    "gate-kda": (32, 128, None, torch.bfloat16),
    "gate-kda-bounded": (32, 128, -5.0, torch.bfloat16),
    "gate-kda-bounded-float32": (6, 100, -5.0, torch.float32),
}

STATES_AT_REST = {  # width of heads, dtypes of pool and scale, the axis along which numbers share a scale
    "int8-128": (128, torch.float32, torch.float32, -2),
    "int8-128-rows-bfloat16": (128, torch.bfloat16, torch.bfloat16, -1),
    "int8-256-float16": (256, torch.float16, torch.float32, -2),
}


def call_convolution(case: ConvolutionCase) -> None:
    new = partial(torch.empty, device="meta", dtype=case.dtype)
    x, weight, state = new(1, 256, case.D), new(case.D, case.W), new(2, case.D, case.W)
    bounds = torch.empty(3, device="meta", dtype=torch.int32)
    inputs = Convolved(x, weight, weight[:, 0], state, bounds) if case.whole else Convolved(x, weight)
    p = ConvolutionProblem(
        "launches", 1, 256, case.D, case.W, 2 if case.whole else 1, case.dtype, x.device, case.whole, "silu", case.whole
    )  # fmt: skip
    convolve(p, inputs)
    convolve_backward(p, inputs, x, state if case.whole else None)
    if case.whole:
        convolve_token(p, Convolved(x[0, :2], weight, weight[:, 0], state))


def call_norm(D: int, activation: str | None, dtype: torch.dtype) -> None:
    x, weight = torch.empty(4096, D, device="meta", dtype=dtype), torch.empty(D, device="meta", dtype=dtype)
    p = NormProblem("launches", D, dtype, x.device, activation, eps=1e-6)
    inputs = Normalized(x, weight, x if activation else None)
    normalize(p, inputs)
    normalize_backward(p, inputs, x)


def call_mixer(P: int, pitch: int, together: int) -> None:
    """The convolutions of a layer with 16 key heads and 32 value heads of 128."""
    q, k, v, _ = projections(P, pitch, together)
    new = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    x = ConvolvedHeads(q, k, v, new(2048, 4), new(2048, 4), new(4096, 4))
    p = ConvolutionProblem("launches", 1, 256, 8192, 4, 1, torch.bfloat16, q.device, False, "silu", False, 2048)
    found = convolve_heads(p, x)
    convolve_heads_backward(p, x, found, (q, k, v), weights=True)


def call_mixer_norm(P: int, pitch: int, together: int) -> None:
    """The norm of such a layer."""
    *_, z = projections(P, pitch, together)
    p = NormProblem("launches", 128, torch.bfloat16, z.device, "silu", eps=1e-6)
    o = torch.empty(1, 256, 32, 128, device="meta", dtype=torch.bfloat16)
    inputs = Normalized(o, torch.empty(128, device="meta", dtype=torch.bfloat16), z)
    normalize(p, inputs)
    normalize_backward_to(p, inputs, o, z, weights=True)


def projections(P: int, pitch: int, together: int) -> tuple[torch.Tensor, ...]:
    """q, k, v and z in a packed projection, of which groups of heads adjoin."""
    packed = torch.empty(1, 256, P, device="meta", dtype=torch.bfloat16)
    groups = (16, 128), (16, 128), (32 // together, 128 * together), (32 // together, 128 * together)
    return tuple(packed.as_strided((1, 256, *size), (256 * P, P, pitch, 1)) for size in groups)


def call_gate(HV: int, K: int, bound: float | None, dtype: torch.dtype) -> None:
    new = partial(torch.empty, device="meta")
    kind = "scalar" if K == 1 else "channel"
    inputs = Gated(new(4096, *(HV, K)[: 1 + (K > 1)], dtype=dtype), new(HV), new(HV * K))
    p = GateProblem("launches", HV, K, dtype, inputs.g.device, gate_of((kind, True, bound), *inputs), torch.float32)
    gate(p, inputs)
    gate_backward(p, inputs, inputs.g.float())


def call_move_states(width: int, pool: torch.dtype, scale: torch.dtype, axis: int, *, restores: bool) -> None:
    """Two rows of two layers of 32 heads."""
    new, shape = partial(torch.empty, device="meta"), (2, 9, 32, width, width)
    scales, rows = [*shape[:3], width, width], new(2, dtype=torch.int32)
    scales[axis] = 1
    p = Int8Problem("launches", restores, width, width, axis, pool, rows.device, -1)
    move_states(p, Resting(new(shape, dtype=pool), new(shape, dtype=torch.int8), new(scales, dtype=scale), rows, rows))


def launches(target: str) -> Iterator[Launch]:
    for name, case in CONVOLUTIONS.items():
        yield Launch(name, partial(call_convolution, case))
    for name, packing in MIXERS.items():
        yield Launch(name, partial(call_mixer, *packing))
        yield Launch(f"{name}-norm", partial(call_mixer_norm, *packing))
    for name, case in NORMS.items():
        yield Launch(name, partial(call_norm, *case))
    for name, case in GATES.items():
        yield Launch(name, partial(call_gate, *case))
    for name, case in STATES_AT_REST.items():
        yield Launch(f"{name}-quantize", partial(call_move_states, *case, restores=False))
        yield Launch(f"{name}-dequantize", partial(call_move_states, *case, restores=True))
