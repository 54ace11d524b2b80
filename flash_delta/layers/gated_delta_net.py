"""Gated DeltaNet and Gated DeltaProduct as layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_delta.layers._delta_mixer import ScalarGateMixer
from flash_delta.layers._mixer import Mixer
from flash_delta.layers._options import head_widths
from flash_delta.ops import (
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_product,
    fused_recurrent_gated_delta_rule,
)
from flash_delta.ops._check.options import as_bool, as_size


class GatedDeltaNet(ScalarGateMixer):
    """Gated DeltaNet (arXiv:2412.06464): a delta rule whose state decays by one number per head and token.

    Equation, per value head, with l2-normalised q_t, k_t and beta_t = sigmoid(b_proj(x_t))::

        g_t = -exp(A_log) * softplus(a_proj(x_t) + dt_bias)
        S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = K^{-1/2} S_t^T q_t

    and then y_t = o_proj(RMSNorm(o_t) * act(g_proj(x_t))). `A_log` and `dt_bias` are [HV], kept in fp32.

    Args:
        hidden_size: width D of the input and output. Default 2048.
        expand_v: value width V as a multiple of head_dim. Default 2.
        head_dim: key width K. Default 256.
        num_heads: key heads H. Default 6.
        num_v_heads: value heads HV, a multiple of H; None means H.
        mode: "chunk", or "fused_recurrent" to always run token by token. Default "chunk". Without gradients, short
            inputs run token by token in both modes.
        use_gate: whether the output norm is gated by g_proj. Default True.
        use_short_conv: whether q, k, v pass a short causal convolution. Default True.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1) (arXiv:2411.12537). Default False.
        conv_size: taps of the convolution. Default 4.
        conv_bias: whether the convolutions have a bias. Default False.
        layer_idx: the place of the layer in its model. The layer does not use it.
        norm_eps: eps of the output norm. Default 1e-5.
        output_gate_activation: "swish" (= "silu") or "sigmoid". Default "swish".
        backend: the backend of the ops, the convolutions and the norm. Default None: each chooses.

    Raises:
        ValueError: if num_v_heads, expand_v, mode or output_gate_activation is not as above.

    Example:
        >>> import torch
        >>> from flash_delta.layers import GatedDeltaNet, MixerState
        >>> layer = GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=16).eval()
        >>> state, prompt, token = MixerState(), torch.randn(1, 50, 64), torch.randn(1, 1, 64)
        >>> y = layer(prompt, state=state)  # the layer leaves its state there
        >>> layer(token, state=state).shape
        torch.Size([1, 1, 64])
    """

    gate = "scalar"

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        backend: str | None = None,
    ) -> None:
        layer = type(self).__name__
        super().__init__(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            **head_widths(layer, head_dim, expand_v),
            mode=mode,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            layer_idx=layer_idx,
            backend=backend,
        )
        self.allow_neg_eigval = as_bool(layer, "allow_neg_eigval", allow_neg_eigval)
        self._add_gate()
        self._add_norm(as_bool(layer, "use_gate", use_gate), norm_eps, output_gate_activation)
        self._let_adjoin()

    def _op(self, recurrent: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return fused_recurrent_gated_delta_rule if recurrent else chunk_gated_delta_rule


class GatedDeltaProduct(ScalarGateMixer):
    """Gated DeltaProduct (arXiv:2502.10297): Gated DeltaNet with n updates of the state per token.

    Equation, per value head, with l2-normalised q_t, k_tj, and beta_t = 2 sigmoid(b_proj(x_t)), for j = 1 to n::

        g_t  = -exp(A_log) * softplus(a_proj(x_t) + dt_bias),    S_t0 = e^{g_t} S_{t-1}
        S_tj = (I - beta_tj k_tj k_tj^T) S_{t,j-1} + beta_tj k_tj v_tj^T
        S_t  = S_tn,    o_t = K^{-1/2} S_t^T q_t

    and then y_t = o_proj(RMSNorm(o_t) * silu(g_proj(x_t))). k, v and beta have n H K, n HV V and n HV channels, those
    of the first update first. `A_log` and `dt_bias` are [HV], kept in fp32.

    Args:
        hidden_size: width D of the input and output. Default 2048.
        expand_v: value width V as a multiple of head_dim. Default 2.
        head_dim: key width K. Default 256.
        num_heads: key heads H. Default 6.
        num_v_heads: value heads HV, a multiple of H; None means H.
        mode: "chunk", or "fused_recurrent" to always run token by token. Default "chunk". Without gradients, short
            inputs run token by token in both modes.
        use_output_gate: whether the output norm is gated by g_proj. Default True.
        use_short_conv: whether q, k, v pass a short causal convolution. Default True.
        conv_size: taps of the convolution. Default 4.
        conv_bias: whether the convolutions have a bias. Default False.
        layer_idx: the place of the layer in its model. The layer does not use it.
        norm_eps: eps of the output norm. Default 1e-5.
        use_forget_gate: whether the state decays. Default True.
        allow_neg_eigval: beta in (0, 2); False: in (0, 1). Default True.
        num_householder: the number n of updates per token. Default 2.
        backend: the backend of the ops, the convolutions and the norm. Default None: each chooses.

    Raises:
        ValueError: if num_v_heads, expand_v, mode or num_householder is not as above.

    Example:
        >>> import torch
        >>> from flash_delta.layers import GatedDeltaProduct, MixerState
        >>> layer = GatedDeltaProduct(hidden_size=64, num_heads=2, head_dim=16, num_householder=3).eval()
        >>> state, prompt, token = MixerState(), torch.randn(1, 50, 64), torch.randn(1, 1, 64)
        >>> y = layer(prompt, state=state)  # the layer leaves its state there
        >>> layer(token, state=state).shape
        torch.Size([1, 1, 64])
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_output_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        num_householder: int = 2,
        backend: str | None = None,
    ) -> None:
        layer = type(self).__name__
        updates = as_size(layer, "num_householder", num_householder)
        super().__init__(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            **head_widths(layer, head_dim, expand_v),
            mode=mode,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            layer_idx=layer_idx,
            backend=backend,
            updates=updates,
        )
        self.num_householder, self.allow_neg_eigval = updates, as_bool(layer, "allow_neg_eigval", allow_neg_eigval)
        self.use_forget_gate = as_bool(layer, "use_forget_gate", use_forget_gate)
        if self.use_forget_gate:
            self._add_gate()
        self._add_norm(as_bool(layer, "use_output_gate", use_output_gate), norm_eps)

    def reset_parameters(self) -> None:
        """Draw A_log and dt_bias anew, if there are any."""
        if self.use_forget_gate:
            super().reset_parameters()

    def _by_updates(self, x: Tensor) -> Tensor:
        """[B, T, n * channels] -> [B, n T, channels]"""
        return x.unflatten(-1, (self.num_householder, -1)).flatten(1, 2)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return super()._heads(q, self._by_updates(k), self._by_updates(v))

    def _gates(self, x: Tensor) -> dict[str, Any]:
        g = self._log_decay(self._raw_gate(x)) if self.use_forget_gate else None
        return {"g": g, "beta": self._by_updates(self.b_proj(x))}

    def _separate(
        self, tokens: dict[str, Tensor], options: dict[str, Any], seq_idx: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if tokens["g"] is None:
            B, T, HV = *tokens["q"].shape[:2], tokens["beta"].shape[2]
            tokens = tokens | {"g": tokens["q"].new_zeros(B, T, HV, dtype=torch.float32)}
        return Mixer._separate(self, tokens, options, seq_idx)  # g is the decay already

    def options(self) -> dict[str, Any]:
        return Mixer.options(self) | {
            "num_householder": self.num_householder,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
        }

    def _op(self, recurrent: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return fused_recurrent_gated_delta_product if recurrent else chunk_gated_delta_product
