"""The parts of a mixer: where they find their tensors, which kernels run them, and what these compute forward and
backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_delta.ops._backend import choose_backend, load_backend, load_elementwise
from flash_delta.ops._check.elementwise import describe_convolution, describe_norm
from flash_delta.ops._check.options import Options, cast
from flash_delta.ops._check.rule import describe
from flash_delta.ops._execute import backward, forward
from flash_delta.problem import (
    Convolved,
    ConvolvedHeads,
    Form,
    Inputs,
    KnownCall,
    Mixed,
    Normalized,
    NormProblem,
    Problem,
)

OP = "mix"
PROJECTED, TAPS = slice(0, 6), slice(6, 9)  # of Mixed


Places = tuple[tuple[int, int, int, int, int, int], ...]


class MixOptions(NamedTuple):
    """What matters about a mixer besides its tensors."""

    gate: Form
    scale: float | None
    neg_eigval: bool
    eps: float
    activation: str | None  # of the norm's gate
    # For each of q, k, v, g, beta and z in packed projections the numbers of `mixer.Place`. Without heads it is not
    # there. No places: the tensors are q, k, v, g, beta and z.
    places: Places


@dataclass(slots=True, eq=False)
class KnownMix:
    """The known calls of a mixer's parts."""

    parts: tuple[KnownCall, KnownCall, KnownCall] | None  # the convolutions, the rule, the norm; None: no such kernels
    needs_grad: bool


def find_parts(x: Mixed, options: MixOptions, backend: str | None, needs_grad: bool) -> KnownMix:
    """Checks the call, and finds what runs it. ``needs_grad``: whether there will be a backward pass."""
    with torch.no_grad():
        tokens = split(x[PROJECTED], options.places)
        of_rule = describe_rule(x, options, tokens, None)._replace(needs_grad=needs_grad)
        of_norm, taps = describe_norm_of(x, options, tokens), taps_of(x, of_rule.H * of_rule.K)
        for t, weight in zip(tokens[:3], taps, strict=True):
            convolved = Convolved(t.flatten(-2), weight, None, None, x.cu_seqlens)
            of_taps = describe_convolution(convolved, OP, "silu", False)
    HK = of_rule.H * of_rule.K
    of_taps = of_taps._replace(D=2 * HK + of_taps.D, DQ=HK)
    modules = [load_elementwise(choose_backend(p, backend, load_elementwise)) for p in (of_taps, of_norm)]
    same = len({(weight.dtype, weight.shape[1]) for weight in taps}) == 1
    if not same or not all(hasattr(module, "convolve_heads") for module in modules):
        return KnownMix(None, needs_grad)
    calls = (of_taps, modules[0]), (of_rule, load_backend(choose_backend(of_rule, backend))), (of_norm, modules[1])
    return KnownMix(tuple(KnownCall(p, module, needs_grad) for p, module in calls), needs_grad)


def describe_rule(
    x: Mixed, options: MixOptions, tokens: list[Tensor | None], bounds: Tensor | Sequence[int] | None
) -> Problem:
    return describe(inputs_of(x, tokens), cast(Options(**rule_options(options))), bounds)


def describe_norm_of(x: Mixed, options: MixOptions, tokens: list[Tensor | None]) -> NormProblem:
    return describe_norm(Normalized(tokens[2], x.norm_weight, tokens[5]), OP, options.activation, options.eps)


def inputs_of(x: Mixed, tokens: Sequence[Tensor | None]) -> Inputs:
    """The rule's inputs. ``tokens``: q, k, v, g and beta."""
    return Inputs(*tokens[:5], None, None, x.A_log, x.dt_bias, x.cu_seqlens)


def mix_forward(
    known: KnownMix, problem: Problem, places: Places, x: Mixed
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """y; and what the backward pass needs besides x: q, k and v after their convolutions, o; what the rule saves; and
    what it saves only outside of torch.compile."""
    convolution, rule, norm = known.parts
    q, k, v, g, beta, z = open_places(x[PROJECTED], places)
    q, k, v = convolution.backend.convolve_heads(
        convolution.problem, ConvolvedHeads(q, k, v, *taps_of(x, problem.H * problem.K), x.cu_seqlens), convolution
    )
    v, g, beta = by_head(problem, v, g, beta)
    out = forward(problem, rule, inputs_of(x, (q, k, v, g, beta)))
    y = norm.backend.normalize(norm.problem, Normalized(out.o, x.norm_weight, z), norm)
    return y.view(problem.B, problem.T, problem.HV * problem.V), (q, k, v, out.o, *out.saved), out.planned


def mix_backward(
    known: KnownMix, problem: Problem, places: Places, x: Mixed, kept: tuple[Tensor, ...], dy: Tensor, needs: Mixed
) -> Mixed:
    """The gradients. ``needs``: which parameters want theirs."""
    convolution, rule, norm = known.parts
    (q, k, v, o), saved = kept[:4], kept[4:]
    tokens = open_places(x[PROJECTED], places)
    alone = sources_of_gates(x, places)
    projected = (None if t is None or i in alone else t.new_empty(t.shape) for i, t in enumerate(x[PROJECTED]))
    d = Mixed(*projected, *(None,) * 7)
    to = open_places(d[PROJECTED], places)
    found = norm.backend.normalize_backward_to(
        norm.problem, Normalized(o, x.norm_weight, tokens[5]), dy, to[5], needs.norm_weight, norm
    )
    _, g, beta = by_head(problem, v, *tokens[3:5])
    of_rule = backward(problem, rule, inputs_of(x, (q, k, v, g, beta)), saved, found.x, None)
    tokens_and_taps = ConvolvedHeads(*tokens[:3], *taps_of(x, problem.H * problem.K), x.cu_seqlens)
    taps = convolution.backend.convolve_heads_backward(
        convolution.problem, tokens_and_taps, of_rule[:3], tuple(to[:3]), any(needs[TAPS]), convolution
    )
    for t, place, source in zip((of_rule.g, of_rule.beta), to[3:5], alone, strict=True):
        if source is None:
            place.copy_(t.view(place.shape))
        else:
            d = d._replace(**{Mixed._fields[source]: t.view(x[source].shape)})
    if taps is not None and x.k_weight is None:
        d = d._replace(q_weight=taps.view(x.q_weight.shape))
    elif taps is not None:
        split = taps.split([len(t) for t in x[TAPS]])
        of_taps = (t.view(like.shape) for t, like in zip(split, x[TAPS], strict=True))
        d = d._replace(**dict(zip(Mixed._fields[TAPS], of_taps, strict=True)))
    return d._replace(A_log=of_rule.A_log, dt_bias=of_rule.dt_bias, norm_weight=found.weight)


def taps_of(x: Mixed, HK: int) -> list[Tensor]:
    """The taps [D, W] of q, k and v."""
    taps = x[TAPS]
    if x.k_weight is None:
        taps = x.q_weight[:HK], x.q_weight[HK : 2 * HK], x.q_weight[2 * HK :]
    return [t.squeeze(1) if t.dim() == 3 else t for t in taps]


def open_places(projected: Sequence[Tensor | None], places: Places) -> list[Tensor | None]:
    """q, k, v, g, beta and z: of [B, T, groups, numbers of a group], or gates [B, T, heads] if no gates adjoin. Each
    is one tensor of PyTorch to make, and takes a microsecond."""
    if not places:
        return list(projected)
    found = []
    for offset, heads, width, pitch, together, source in places:
        x = projected[source]
        if not heads or x is None:
            found.append(None)
            continue
        (B, T, _), (row, token, _), start = x.shape, x.stride(), x.storage_offset() + offset
        if width or together > 1:
            size = (B, T, heads // together, together * (width or 1))
            found.append(x.as_strided(size, (row, token, pitch, 1), start))
        else:
            found.append(x.as_strided((B, T, heads), (row, token, pitch), start))
    return found


def sources_of_gates(x: Mixed, places: Places) -> list[int | None]:
    """The projections that have only g, and only beta; None for one that has more."""
    if not places:
        return [3, 4]
    sizes = [(source, heads * (width or 1)) for _, heads, width, *_, source in places[3:5]]
    return [source if x[source].shape[2] == size else None for source, size in sizes]


def by_head(p: Problem, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """v, g and beta with an axis of heads in place of groups of heads. Gates are copied."""
    if v.shape[2] != p.HV:
        v = v.view(p.B, p.T, p.HV, p.V)
    g, beta = (t.reshape(p.B, p.T, p.HV) if t.shape[2] != p.HV else t for t in (g, beta))
    return v, g, beta


def split(projected: Sequence[Tensor | None], places: Places) -> list[Tensor | None]:
    """Makes the tensors of `open_places` by PyTorch's usual operations, which autograd and compilers follow, with an
    axis of heads."""
    if not places:
        return list(projected)
    found = []
    for offset, heads, width, pitch, together, source in places:
        if not heads:
            found.append(None)
            continue
        groups, size = heads // together, together * (width or 1)
        if pitch == size:
            t = projected[source][..., offset : offset + groups * size].unflatten(-1, (groups, size))
        else:
            t = projected[source].unflatten(-1, (groups, pitch))[..., offset : offset + size]
        t = t.unflatten(-1, (together, size // together)).flatten(2, 3) if together > 1 else t
        found.append(t if width else t.flatten(2))
    return found


def rule_options(options: MixOptions) -> dict[str, Any]:
    return {
        "op": OP, "gate": options.gate, "erase": "decayed", "scale": options.scale, "l2norm": True, "raw_beta": True,
        "neg_eigval": options.neg_eigval,
    }  # fmt: skip
