"""The parts of a mixer: where they find their tensors, which kernels run them, and what these compute forward and
backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_delta.ops._backend import choose_backend, load_backend, load_modules
from flash_delta.ops._check.around import check_convolution, check_norm, describe_convolution, describe_norm
from flash_delta.ops._check.options import Options, cast
from flash_delta.ops._check.rule import describe
from flash_delta.ops._execute import backward, forward
from flash_delta.problem import (
    Convolved,
    ConvolvedHeads,
    Inputs,
    KnownCall,
    Mixed,
    Normalized,
    NormProblem,
    Problem,
)

OP = "mix"
PROJECTED = slice(1, 7)  # of Mixed: q, k, v, g, beta, z
TAPS = slice(7, 10)


Places = tuple[tuple[int, int, int, int], ...]


class MixOptions(NamedTuple):
    """What matters about a mixer besides its tensors."""

    gate: str
    scale: float | None
    lower_bound: float | None
    neg_eigval: bool
    eps: float
    activation: str | None  # of the norm's gate
    # For each of q, k, v, g, beta and z in a packed projection: where its heads lie in a token, how many they are, how
    # wide, and how far apart. Without heads it is not there.
    places: Places


@dataclass(slots=True, eq=False)
class KnownMix:
    """The known calls of a mixer's parts."""

    parts: tuple[KnownCall, KnownCall, KnownCall] | None  # the convolutions, the rule, the norm; None: no such kernels
    needs_grad: bool


def find_parts(x: Mixed, options: MixOptions, backend: str | None, needs_grad: bool) -> KnownMix:
    """Checks the call, and finds what runs it. ``needs_grad``: whether there will be a backward pass."""
    with torch.no_grad():
        tokens, taps = split(x, options.places), flat_taps(x)
        of_rule = describe_rule(x, options, tokens, None)._replace(needs_grad=needs_grad)
        of_norm = describe_norm_of(x, options, tokens)
        for t, weight in zip(tokens[:3], taps, strict=True):
            check_convolution(OP, Convolved(t.flatten(-2), weight, None, None, x.cu_seqlens), "silu", False)
        of_taps = describe_convolution(
            Convolved(tokens[2].flatten(-2), taps[2], None, None, x.cu_seqlens), OP, "silu", False
        )
    HK = of_rule.H * of_rule.K
    of_taps = of_taps._replace(D=2 * HK + of_taps.D, DQ=HK)
    modules = [load_modules(choose_backend(p, backend, load_modules)) for p in (of_taps, of_norm)]
    same = len({(weight.dtype, weight.shape[1]) for weight in taps}) == 1 and writable(options.places, of_rule)
    if not same or not all(hasattr(module, "convolve_heads") for module in modules):
        return KnownMix(None, needs_grad)
    calls = (of_taps, modules[0]), (of_rule, load_backend(choose_backend(of_rule, backend))), (of_norm, modules[1])
    return KnownMix(tuple(KnownCall(p, module, needs_grad) for p, module in calls), needs_grad)


def writable(places: Places, p: Problem) -> bool:
    """Whether kernels can write q's, k's and v's gradients there. Heads of one width may lie apart."""
    return p.K == p.V or all(pitch == width for _, _, width, pitch in places[:3])


def describe_rule(
    x: Mixed, options: MixOptions, tokens: list[Tensor | None], bounds: Tensor | Sequence[int] | None
) -> Problem:
    return describe(inputs_of(x, tokens), cast(Options(**rule_options(options))), bounds)


def describe_norm_of(x: Mixed, options: MixOptions, tokens: list[Tensor | None]) -> NormProblem:
    norm = Normalized(tokens[2], x.norm_weight, tokens[5])
    return describe_norm(norm, OP, options.activation, check_norm(OP, norm, options.eps))


def inputs_of(x: Mixed, tokens: Sequence[Tensor | None]) -> Inputs:
    """The rule's inputs. ``tokens``: q, k, v, g and beta."""
    return Inputs(*tokens[:5], None, None, x.A_log, x.dt_bias, x.cu_seqlens)


def mix_forward(
    known: KnownMix, problem: Problem, places: Places, x: Mixed
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """y; and what the backward pass needs besides x: q, k and v after their convolutions, o; what the rule saves; and
    what it saves only outside of torch.compile."""
    convolution, rule, norm = known.parts
    q, k, v, g, beta, z = open_packed(x, places)
    q, k, v = convolution.backend.convolve_heads(
        convolution.problem, ConvolvedHeads(q, k, v, *x[TAPS], x.cu_seqlens), convolution
    )
    out = forward(problem, rule, inputs_of(x, (q, k, v, g, beta)))
    y = norm.backend.normalize(norm.problem, Normalized(out.o, x.norm_weight, z), norm)
    return y.view(problem.B, problem.T, problem.HV * problem.V), (q, k, v, out.o, *out.saved), out.planned


def mix_backward(
    known: KnownMix, problem: Problem, places: Places, x: Mixed, kept: tuple[Tensor, ...], dy: Tensor, needs: Mixed
) -> Mixed:
    """The gradients. ``needs``: which parameters want theirs."""
    convolution, rule, norm = known.parts
    (q, k, v, o), saved = kept[:4], kept[4:]
    tokens = open_packed(x, places)
    packed = None if x.packed is None else x.packed.new_empty(x.packed.shape)
    d = Mixed(packed, *(None if t is None else t.new_empty(t.shape) for t in x[PROJECTED]), *(None,) * 7)
    to = open_packed(d, places)
    found = norm.backend.normalize_backward_to(
        norm.problem, Normalized(o, x.norm_weight, tokens[5]), dy, to[5], needs.norm_weight, norm
    )
    of_rule = backward(problem, rule, inputs_of(x, (q, k, v, *tokens[3:5])), saved, found.x, None)
    taps = convolution.backend.convolve_heads_backward(
        convolution.problem, ConvolvedHeads(*tokens[:3], *x[TAPS], x.cu_seqlens), of_rule[:3], tuple(to[:3]),
        any(needs[TAPS]), convolution,
    )  # fmt: skip
    for name, t, place in (("g", of_rule.g, to[3]), ("beta", of_rule.beta, to[4])):
        if getattr(x, name) is None:
            place.copy_(t)
        else:
            d = d._replace(**{name: t})
    if taps is not None:
        split = taps.split([len(t) for t in x[TAPS]])
        of_taps = (t.view(like.shape) for t, like in zip(split, x[TAPS], strict=True))
        d = d._replace(**dict(zip(Mixed._fields[TAPS], of_taps, strict=True)))
    return d._replace(A_log=of_rule.A_log, dt_bias=of_rule.dt_bias, norm_weight=found.weight)


def flat_taps(x: Mixed) -> list[Tensor]:
    """The taps [D, W]."""
    return [t.squeeze(1) if t.dim() == 3 else t for t in x[TAPS]]


def open_packed(x: Mixed, places: Places) -> list[Tensor | None]:
    """q, k, v, g, beta and z. Each is one tensor of PyTorch to make, and takes a microsecond."""
    if x.packed is None:
        return list(x[PROJECTED])
    (B, T, _), (row, token, _), start = x.packed.shape, x.packed.stride(), x.packed.storage_offset()
    found = []
    for own, (offset, heads, width, pitch) in zip(x[PROJECTED], places, strict=True):
        if own is not None or not heads:
            found.append(own)
        elif width:
            found.append(x.packed.as_strided((B, T, heads, width), (row, token, pitch, 1), start + offset))
        else:
            found.append(x.packed.as_strided((B, T, heads), (row, token, pitch), start + offset))
    return found


def split(x: Mixed, places: Places) -> list[Tensor | None]:
    """The same by PyTorch's usual operations, which autograd and compilers follow."""
    found = []
    for own, (offset, heads, width, pitch) in zip(x[PROJECTED], places, strict=True):
        if own is not None or not heads:
            found.append(own)
            continue
        size = max(width, 1)
        if pitch == size:
            t = x.packed[..., offset : offset + heads * size].unflatten(-1, (heads, size))
        else:
            t = x.packed.unflatten(-1, (heads, pitch))[..., offset : offset + size]
        found.append(t if width else t[..., 0])
    return found


def rule_options(options: MixOptions) -> dict[str, Any]:
    return {
        "op": OP,
        "gate": options.gate,
        "erase": "decayed",
        "scale": options.scale,
        "l2norm": True,
        "raw_gate": True,
        "lower_bound": options.lower_bound,
        "raw_beta": True,
        "neg_eigval": options.neg_eigval,
    }
