"""fla.modules.causal_conv1d: the short convolution."""

import torch
from torch import Tensor

from flash_delta import modules
from flash_delta.integrations._context import convolve as convolve_on_ranks
from flash_delta.integrations.fla.context import FLACPContext
from flash_delta.layers.packing import refuse_floats
from flash_delta.ops._check.options import as_size, refuse
from flash_delta.ops._check.rule import check_shape, refuse_unless_none
from flash_delta.ops._elementwise import compute_backward
from flash_delta.ops._operators.elementwise import CONVOLUTION, Convolved
from flash_delta.parallel import ContextParallel

Context = ContextParallel | FLACPContext
BACKENDS = ("triton", "cuda", "mix")  # names of fla's kernels, which compute the same function


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Context | None = None,
    *,
    seq_idx: None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.modules.causal_conv1d` with the arguments of fla's; docs/fla.md has each of them."""
    op = "causal_conv1d"
    refuse_unless_none(op, "seq_idx", seq_idx, "give the bounds of sequences as cu_seqlens")
    _check(op, weight, backend)
    if cp_context is None:
        y, state = modules.causal_conv1d(
            _flat(x, weight), weight, bias, _silu(activation), initial_state, bool(output_final_state), cu_seqlens
        )
    else:
        context = _context(op, cp_context, initial_state, output_final_state, cu_seqlens)
        y, state = convolve_on_ranks(context, _flat(x, weight), weight, bias, _silu(activation)), None
    y = y.view(x.shape)
    return y if residual is None else y + residual, state


@torch.no_grad()
def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`causal_conv1d` without autograd, for code that has :func:`causal_conv1d_bwd` as its backward pass."""
    return causal_conv1d(
        x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens=cu_seqlens
    )


@torch.no_grad()
def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """``(dx, dweight, dbias, dresidual, dinitial_state)``, each in its tensor's dtype or None as the tensor is."""
    _check("causal_conv1d_bwd", weight, "triton")
    tensors = Convolved(_flat(x, weight), weight, bias, initial_state, cu_seqlens)
    fields = "causal_conv1d", _silu(activation), dht is not None
    d = compute_backward(CONVOLUTION, tensors, fields, _flat(dy, weight), dht)
    return d.x.view(x.shape), d.weight, d.bias, None if residual is None else dy, d.initial_state


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`flash_delta.modules.causal_conv1d_update` of x [N, D], [N, 1, D] or [1, N, D]; ``(y, cache)``."""
    _check("causal_conv1d_update", weight, "triton")
    rows = _flat(x, weight).reshape(-1, weight.shape[0])  # [N, D]
    y = modules.causal_conv1d_update(rows, cache, weight, bias, _silu(activation)).view(x.shape)
    return y if residual is None else y + residual, cache


def causal_conv1d_update_states(
    x: Tensor, state_len: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The last ``state_len`` inputs of each sequence, [N, D, state_len], oldest first, in x's dtype.

    x is [B, T, D], or [T, D] with ``cu_seqlens``. If a sequence is shorter, the end of its ``initial_state`` or zeros
    come before it. The result is the final state of a convolution, without its output.
    """
    x = x[None] if cu_seqlens is not None and x.dim() == 2 else x
    taps = x.new_zeros(x.shape[-1], as_size("causal_conv1d_update_states", "state_len", state_len))
    _, state = modules.causal_conv1d(x, taps, None, None, initial_state, True, cu_seqlens)
    return state


class ShortConvolution(modules.ShortConvolution):
    """:class:`flash_delta.modules.ShortConvolution` with the arguments of fla's, ``use_fast_conv1d`` an old one."""

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        use_fast_conv1d: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, kernel_size, bias, _silu(activation))
        _check("ShortConvolution", self.weight, backend)
        self.kernel_size = (kernel_size,)  # as in nn.Conv1d
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        *,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: Context | None = None,
        seq_idx: None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``(y [B, T, D], state [N, D, W] or None)``. A call without gradients and with one token per sequence updates
        ``cache`` in place."""
        if mask is not None:
            if cu_seqlens is not None:
                refuse("ShortConvolution", "mask", "None with cu_seqlens", "a tensor")
            check_shape("ShortConvolution", "mask", mask, *x.shape[:2])
            refuse_floats("mask", mask)
            x = x * mask.unsqueeze(-1)
        N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        in_place = cache is not None and x.shape[0] * x.shape[1] == N and not torch.is_grad_enabled()
        y, state = causal_conv1d(
            x,
            self.weight.squeeze(1),
            self.bias,
            residual,
            cache,
            output_final_state or in_place,
            self.activation,
            cu_seqlens=cu_seqlens,
            cp_context=cp_context,
            seq_idx=seq_idx,
        )
        if in_place:
            state = cache.copy_(state)
        return y, state if output_final_state else None

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` of one token per sequence, without gradients."""
        return self.forward(x, residual, None, cache, output_final_state, cu_seqlens)

    @property
    def state_size(self) -> int:
        """The number of elements in a sequence's state."""
        return self.hidden_size * self.kernel_size[0]


def _check(op: str, weight: Tensor | None, backend: str | None) -> None:
    if weight is None:
        refuse(op, "weight", "a tensor [D, W]", "None")
    if backend not in BACKENDS:
        refuse(op, "backend", f"one of {', '.join(BACKENDS)} (the choice changes nothing here)", backend)


def _context(
    op: str, given: Context, initial_state: Tensor | None, output_final_state: bool | None, cu_seqlens: Tensor | None
) -> ContextParallel:
    context = given.context if isinstance(given, FLACPContext) else given
    if not isinstance(context, ContextParallel):
        got = f"a {type(given).__name__}" + (" without a group" if isinstance(given, FLACPContext) else "")
        refuse(op, "cp_context", "a ContextParallel, or what build_cp_context returns for a group", got)
    for name, tensor in (("initial_state", initial_state), ("cu_seqlens", cu_seqlens)):
        refuse_unless_none(op, name, tensor, "cp_context has the bounds, and a row begins with zeros")
    if output_final_state:
        refuse(op, "output_final_state", "False with cp_context", output_final_state)
    return context


def _silu(activation: str | None) -> str | None:
    return "silu" if activation == "swish" else activation


def _flat(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., D] as it is, x [B, T, H, D / H] as [B, T, D]."""
    return x if x.shape[-1] == weight.shape[0] else x.flatten(2)
