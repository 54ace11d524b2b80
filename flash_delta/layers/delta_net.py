"""DeltaNet as a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.layers._mixer import Mixer
from flash_delta.layers._options import ACTIVATIONS, head_width
from flash_delta.modules._shards import own_shard
from flash_delta.ops import chunk_delta_rule, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flash_delta.ops._check.options import as_bool

QK_ACTIVATIONS = "silu", "relu", "elu", "identity"


class DeltaNet(Mixer):
    """DeltaNet (arXiv:2406.06484): a delta rule without a decay.

    Equation, per head, with beta_t = sigmoid(b_proj(x_t)) and normalised q_t, k_t::

        S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = K^{-1/2} S_t^T q_t

    and then y_t = o_proj(RMSNorm(o_t)), with `use_gate` o_proj(RMSNorm(o_t) * silu(g_proj(x_t))).

    Args:
        mode: "chunk", or "fused_recurrent" to always run token by token. Default "chunk". Without gradients, short
            inputs run token by token in both modes.
        hidden_size: width D of the input and output. Default 1024.
        expand_k: width of all keys, H * K, as a multiple of hidden_size. Default 1.
        expand_v: width of all values, H * V, as a multiple of hidden_size. Default 1.
        num_heads: heads H. Default 4.
        use_beta: whether b_proj computes the write strength. Otherwise it is 1. Default True.
        use_gate: whether the output norm is gated by g_proj. Default False.
        use_short_conv: whether q, k, v pass a short causal convolution. Default True.
        conv_size: taps of the convolution. Default 4.
        conv_bias: whether the convolutions have a bias. Default False.
        allow_neg_eigval: beta twice as large (arXiv:2411.12537). Default False.
        layer_idx: the place of the layer in its model. The layer does not use it.
        qk_activation: the activation of q and k after the convolution: "silu", "relu", "elu" (plus 1) or "identity".
            Default "silu". v always has "silu".
        qk_norm: "l2", or "sum", which divides q and k by the sums of their absolute values. Default "l2".
        norm_eps: eps of the output norm. Default 1e-5.
        backend: the backend of the ops, the convolutions and the norm. Default None: each chooses.

    Raises:
        ValueError: if expand_k, expand_v, mode, qk_activation or qk_norm is not as above.

    Example:
        >>> import torch
        >>> from flash_delta.layers import DeltaNet, MixerState
        >>> layer = DeltaNet(hidden_size=64, num_heads=2).eval()
        >>> state, prompt, token = MixerState(), torch.randn(1, 50, 64), torch.randn(1, 1, 64)
        >>> y = layer(prompt, state=state)  # the layer leaves its state there
        >>> layer(token, state=state).shape
        torch.Size([1, 1, 64])
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        layer = type(self).__name__
        if qk_activation not in QK_ACTIVATIONS:
            raise ValueError(f"qk_activation: expected one of {', '.join(QK_ACTIVATIONS)}, got {qk_activation!r}")
        if qk_norm not in ("l2", "sum"):
            raise ValueError(f"qk_norm: expected 'l2' or 'sum', got {qk_norm!r}")
        activation = "silu" if qk_activation == "silu" else None
        super().__init__(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=None,
            head_k_dim=head_width(layer, "expand_k", hidden_size, expand_k, num_heads),
            head_v_dim=head_width(layer, "expand_v", hidden_size, expand_v, num_heads),
            mode=mode,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            layer_idx=layer_idx,
            backend=backend,
            use_beta=as_bool(layer, "use_beta", use_beta),
            activations=(activation, activation, "silu"),
        )
        self.qk_activation, self.qk_norm, self.use_beta = qk_activation, qk_norm, hasattr(self, "b_proj")
        self.allow_neg_eigval = as_bool(layer, "allow_neg_eigval", allow_neg_eigval)
        self._add_norm(as_bool(layer, "use_gate", use_gate), norm_eps)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        if self.qk_activation != "silu":  # the convolution applies "silu"
            q, k = map(ACTIVATIONS[self.qk_activation], (q, k))
        heads = super()._heads(q, k, v)
        if self.qk_norm == "sum":
            heads |= {name: sum_norm(heads[name]) for name in ("q", "k")}
        return heads

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        if self.use_beta:
            return {"beta": self.b_proj(x)}
        heads = own_shard(self.v_proj.weight).shape[0] // self.head_v_dim  # of this rank
        return {"beta": x.new_full((*x.shape[:2], heads), 2.0 if self.allow_neg_eigval else 1.0)}

    def _separate(
        self, tokens: dict[str, Tensor], options: dict[str, Any], seq_idx: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return super()._separate(tokens | {"g": _no_decay(tokens["beta"])}, options, seq_idx)

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "use_qk_l2norm_in_kernel": self.qk_norm == "l2",
            "use_beta_sigmoid_in_kernel": self.use_beta,
            "allow_neg_eigval": self.allow_neg_eigval,
        }

    def _op(self, recurrent: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return partial(_delta_rule, recurrent)


def sum_norm(x: Tensor) -> Tensor:
    """x divided by the sum of its absolute values over the last axis, or by 1e-6 if that is more."""
    return F.normalize(x, p=1, dim=-1, eps=1e-6)


def _delta_rule(recurrent: bool, beta: Tensor, g: Tensor | None = None, **rest: Any) -> tuple[Tensor, Tensor | None]:
    """Calls the op. Only documents and single tokens need an op with a log decay. A log decay of 0 is exact."""
    if not recurrent:
        return chunk_delta_rule(beta=beta, **rest) if g is None else chunk_gated_delta_rule(beta=beta, g=g, **rest)
    return fused_recurrent_gated_delta_rule(beta=beta, g=_no_decay(beta) if g is None else g, **rest)


def _no_decay(beta: Tensor) -> Tensor:
    """Log decays [B, T, H] that are 0."""
    return beta.new_zeros(beta.shape, dtype=torch.promote_types(beta.dtype, torch.float32))
