"""Everything that a layer of the family does between its projections, as one op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import check_shape
from flash_delta.ops._mixing.function import run_mix
from flash_delta.ops._mixing.parts import MixOptions
from flash_delta.problem import Mixed


class Place(NamedTuple):
    """Where heads lie in a token of a packed projection: from ``offset`` on, each ``width`` numbers wide. Groups of
    ``together`` heads adjoin, and ``pitch`` is the number from one group to the next. Gates are one number per head;
    their width is 0. ``source`` is the index of the projection, if there are several."""

    offset: int
    heads: int
    width: int
    pitch: int
    together: int = 1
    source: int = 0


NOWHERE = Place(0, 0, 0, 0)
NAMES = ("q", "k", "v", "z", "g", "beta")


class Layout(NamedTuple):
    """Where packed projections have q, k, v, g, beta and z. There may be no z.

    Example:
        >>> from flash_delta.ops import Layout
        >>> layout = Layout.adjoining(H=2, HV=4, K=16, V=32)
        >>> layout.v.offset, layout.widths
        (64, (328,))
    """

    q: Place
    k: Place
    v: Place
    g: Place
    beta: Place
    z: Place | None = None

    @classmethod
    def adjoining(
        cls, H: int, HV: int, K: int, V: int, sources: Sequence[Sequence[str]] = (NAMES,), gate: str = "scalar",
        by_key_head: bool = False,
    ) -> Layout:  # fmt: skip
        """Projections of which ``sources`` names what each has, one after the other: by default one of q, k, v, z, g
        and beta. ``gate`` is that of :func:`mix`. ``by_key_head``: each key head has all of its own, its value heads
        included, before the next key head begins.

        Raises:
            ValueError: if ``sources`` lacks one of them, other than z, or has one twice.
        """
        make = _adjoining if torch.compiler.is_compiling() else _known_adjoining
        return make(H, HV, K, V, tuple([tuple(names) for names in sources]), gate, by_key_head)

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of a token in each projection, if the places cover it."""
        places = [place for place in self if place is not None]
        sources = range(1 + max(place.source for place in places))
        return tuple(sum(p.heads * max(p.width, 1) for p in places if p.source == source) for source in sources)


def mix(
    projected: Tensor | Sequence[Tensor | None],
    taps: Tensor | Sequence[Tensor],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    *,
    layout: Layout | None = None,
    gate: str = "scalar",
    norm_eps: float = 1e-5,
    norm_activation: str | None = "silu",
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Mix tokens as a layer of the family does between its projections::

        q, k, v = silu(conv(q)), silu(conv(k)), silu(conv(v))
        g = raw_gate(g, A_log, dt_bias),   beta = sigmoid(beta)
        o = rule(q / |q|, k / |k|, v, g, beta)
        y = norm_weight * o / sqrt(mean(o^2) + norm_eps) * act(z)

    with the convolution of :func:`flash_delta.modules.causal_conv1d`, the rule of
    :func:`flash_delta.chunk_gated_delta_rule` or :func:`flash_delta.chunk_kda`, and the norm of
    :func:`flash_delta.modules.gated_rms_norm`. On kernels it is one node of autograd. It reads what the projections
    have where it lies, and writes each gradient to the same place of a tensor like the projection.

    Args:
        projected: with a ``layout`` [B, T, P], or up to six of such tensors. Without, ``(q, k, v, g, beta, z)``: q, k
            [B, T, H, K], v, z [B, T, HV, V], beta [B, T, HV] and g [B, T, HV] or [B, T, HV, K]; z may be None. float16,
            bfloat16, float32 or float64.
        taps: weights of the three convolutions, [H * K, W], [H * K, W], [HV * V, W], or of one over the channels of q,
            k and v. There may be an axis of 1 before W, as in `nn.Conv1d`. The last tap is for the current token.
        A_log: [HV]; None with a ``lower_bound`` only.
        dt_bias: [HV], with a gate per channel [HV * K]; or None.
        norm_weight: [V].
        layout: where packed projections have each of them. Default None: they are separate.
        gate: "scalar" for one decay per value head (Gated DeltaNet), "channel" for one per key channel (KDA).
        norm_eps: added to the mean square. Default 1e-5.
        norm_activation: "silu" or "sigmoid"; None if there is no z. Default "silu".
        lower_bound: as in :func:`flash_delta.chunk_kda`. Default None.
        allow_neg_eigval: whether beta is 2 sigmoid(beta). Default False.
        scale: as in :func:`flash_delta.chunk_gated_delta_rule`. Default None: K^-0.5.
        cu_seqlens: boundaries [N + 1] of sequences packed in one row (B = 1). Tokens after the last boundary give 0.
        cu_seqlens_cpu: the same numbers on the host. Default None.
        backend: the backend of all parts. Default None: each chooses.

    Returns:
        y [B, T, HV * V] in projected's dtype, for the output projection.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta.ops import Layout, mix
        >>> layout = Layout.adjoining(H=2, HV=4, K=16, V=16)
        >>> taps = torch.randn(32, 4), torch.randn(32, 4), torch.randn(64, 4)
        >>> x = torch.randn(1, 100, sum(layout.widths))
        >>> mix(x, taps, torch.zeros(4), torch.zeros(4), torch.ones(16), layout=layout).shape
        torch.Size([1, 100, 64])

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.
    """
    op = "mix"
    given = (projected,) if isinstance(projected, Tensor) else tuple(projected)
    if layout is None:
        if len(given) != 6:
            refuse(op, "projected", "(q, k, v, g, beta, z) without a layout", f"{len(given)} tensors")
        places = ()
    else:
        for t in given:
            check_shape(op, "projected", t, "B", "T", "P")
        find = _places if torch.compiler.is_compiling() else _known_places
        places = find(layout, tuple([t.shape[2] for t in given]))
        given = (*(t if t.stride(2) == 1 else t.contiguous() for t in given), *(None,) * (6 - len(given)))
    if gate not in ("scalar", "channel"):
        refuse(op, "gate", "'scalar' or 'channel'", repr(gate))
    has_z = given[5] is not None if layout is None else places[5] is not NOWHERE
    activations = ("silu", "sigmoid") if has_z else (None,)
    if norm_activation not in activations:
        expected = "'silu' or 'sigmoid'" if has_z else "None without a z"
        refuse(op, "norm_activation", expected, repr(norm_activation))
    taps = (taps, None, None) if isinstance(taps, Tensor) else tuple(taps)
    if len(taps) != 3:
        refuse(op, "taps", "a tensor, or three, of q, k and v", len(taps))
    options = MixOptions((gate, True, lower_bound), scale, allow_neg_eigval, norm_eps, norm_activation, places)
    return run_mix(Mixed(*given, *taps, A_log, dt_bias, norm_weight, cu_seqlens), options, cu_seqlens_cpu, backend)


def _adjoining(
    H: int, HV: int, K: int, V: int, sources: tuple[tuple[str, ...], ...], gate: str, by_key_head: bool
) -> Layout:
    names = [name for names in sources for name in names]
    if sorted({*names, "z"}) != sorted(NAMES) or len(names) != len({*names}):
        refuse("Layout.adjoining", "sources", "each of q, k, v, g and beta once, and maybe z", sources)
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "z": (HV, V), "g": (HV, K * (gate == "channel")), "beta": (HV, 0)}
    places = {}
    for source, names in enumerate(sources):
        sizes = {name: shapes[name][0] * max(shapes[name][1], 1) for name in names}
        offset, pitch = 0, sum(sizes.values()) // H
        for name in names:
            heads, width = shapes[name]
            if by_key_head:
                places[name] = Place(offset, heads, width, pitch, heads // H, source)
                offset += sizes[name] // H
            else:
                places[name] = Place(offset, heads, width, max(width, 1), 1, source)
                offset += sizes[name]
    return Layout(**places)


def _places(layout: Layout, widths: tuple[int, ...]) -> tuple[Place, ...]:
    """The places of all six, if every number of a token belongs to exactly one head, so that no gradient has a gap."""
    op, taken = "mix", []
    if widths != layout.widths:
        refuse(op, "projected", f"the layout's widths {list(layout.widths)} (axis 2)", list(widths))
    places = tuple([NOWHERE if place is None or not place.heads else place for place in layout])
    for name, place in zip(layout._fields, places, strict=True):
        if place is NOWHERE:
            continue
        offset, heads, width, pitch, together, source = place
        groups, size = heads // together, together * max(width, 1)
        if heads % together or (pitch != size and groups * pitch != widths[source]):
            refuse(op, "layout", f"groups of {name} that adjoin, or that divide a token among them", place)
        starts = range(offset, offset + groups * pitch, pitch)
        taken += [(source, start, start + size) for start in starts]
    end, last = 0, 0
    for source, start, stop in sorted(taken):
        if start != (end if source == last else 0):
            refuse(op, "layout", "heads that cover each token once", layout)
        last, end = source, stop
    return places


_known_adjoining, _known_places = lru_cache(_adjoining), lru_cache(_places)
