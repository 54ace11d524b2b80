"""Everything that a layer of the family does between its projections, as one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import check_shape
from flash_delta.ops._mixing.function import run_mix
from flash_delta.ops._mixing.parts import MixOptions
from flash_delta.problem import Mixed


class Place(NamedTuple):
    """Where heads lie in a token of a packed projection: from ``offset`` on, each ``width`` numbers wide, and ``pitch``
    numbers from one to the next. Gates are one number per head; their width is 0."""

    offset: int
    heads: int
    width: int
    pitch: int


NOWHERE = Place(0, 0, 0, 0)


class Layout(NamedTuple):
    """Where a packed projection has q, k, v, g, beta and z. What is None is given as a tensor of its own.

    Example:
        >>> from flash_delta.ops import Layout
        >>> layout = Layout.adjoining(H=2, HV=4, K=16, V=32)
        >>> layout.v.offset, layout.width
        (64, 328)
    """

    q: Place | None = None
    k: Place | None = None
    v: Place | None = None
    g: Place | None = None
    beta: Place | None = None
    z: Place | None = None

    @classmethod
    def adjoining(cls, H: int, HV: int, K: int, V: int, gated: bool = True) -> Layout:
        """q, k, v, z, g and beta one after the other, with one g per value head. Without ``gated`` there is no z."""
        places, offset = {}, 0
        for name, heads, width in (
            ("q", H, K),
            ("k", H, K),
            ("v", HV, V),
            ("z", HV if gated else 0, V),
            ("g", HV, 0),
            ("beta", HV, 0),
        ):
            size = max(width, 1)
            places[name] = Place(offset, heads, width, size)
            offset += heads * size
        return cls(**places)

    @property
    def width(self) -> int:
        """The numbers of a token, if the places cover it."""
        return sum(place.heads * max(place.width, 1) for place in self if place is not None)


def mix(
    projected: Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None],
    taps: tuple[Tensor, Tensor, Tensor],
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
    :func:`flash_delta.modules.gated_rms_norm`. On kernels it is one node of autograd. It reads the projections where
    they lie and writes their gradients to one tensor.

    Args:
        projected: [B, T, P] with a ``layout``, or ``(q, k, v, g, beta, z)``: q, k [B, T, H, K], v, z [B, T, HV, V],
            beta [B, T, HV] and g [B, T, HV] or [B, T, HV, K]; z may be None. float16, bfloat16, float32 or float64.
        taps: weights of the three convolutions, [H * K, W], [H * K, W], [HV * V, W], or the same with an axis of 1
            before W, as those of `nn.Conv1d`. The last tap is for the current token.
        A_log: [HV]; None with a ``lower_bound`` only.
        dt_bias: [HV], with a gate per channel [HV * K]; or None.
        norm_weight: [V].
        layout: where a packed ``projected`` has each of them. Default None: they are separate.
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
        >>> x = torch.randn(1, 100, layout.width)
        >>> mix(x, taps, torch.zeros(4), torch.zeros(4), torch.ones(16), layout=layout).shape
        torch.Size([1, 100, 64])

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.
    """
    op = "mix"
    if layout is None:
        if isinstance(projected, Tensor) or len(projected) != 6:
            refuse(op, "projected", "(q, k, v, g, beta, z) without a layout", type(projected).__name__)
        x = (None, *projected)
    else:
        *_, P = check_shape(op, "projected", projected, "B", "T", "P")
        _check_layout(op, layout, P)
        x = (projected if projected.stride(-1) == 1 else projected.contiguous(), *(None,) * 6)
    if gate not in ("scalar", "channel"):
        refuse(op, "gate", "'scalar' or 'channel'", repr(gate))
    has_z = projected[5] is not None if layout is None else layout.z is not None and layout.z.heads > 0
    activations = ("silu", "sigmoid") if has_z else (None,)
    if norm_activation not in activations:
        expected = "'silu' or 'sigmoid'" if has_z else "None without a z"
        refuse(op, "norm_activation", expected, repr(norm_activation))
    if len(taps) != 3:
        refuse(op, "taps", "three tensors, of q, k and v", len(taps))
    places = (NOWHERE,) * 6 if layout is None else tuple(NOWHERE if place is None else place for place in layout)
    options = MixOptions(gate, scale, lower_bound, allow_neg_eigval, norm_eps, norm_activation, places)
    return run_mix(Mixed(*x, *taps, A_log, dt_bias, norm_weight, cu_seqlens), options, cu_seqlens_cpu, backend)


def _check_layout(op: str, layout: Layout, P: int) -> None:
    """Every number of a token belongs to exactly one head, so that the gradient has no gap."""
    if layout.width != P:
        refuse(op, "projected", f"the layout's width {layout.width} (axis 2)", P)
    for name, place in zip(layout._fields, layout, strict=True):
        if place is None and name != "z":
            refuse(op, "layout", f"a place for {name}", "None")
        if place is None:
            continue
        size = max(place.width, 1)
        if place.pitch != size and place.heads * place.pitch != P:
            refuse(op, "layout", f"heads of {name} that adjoin, or that divide a token among them", place)
        if place.offset + (place.heads - 1) * place.pitch + size > P:
            refuse(op, "layout", f"{name} inside of {P} numbers", place)
