"""Gated DeltaNet as a layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flash_delta.layers._delta_mixer import ScalarGateMixer
from flash_delta.layers._options import head_widths
from flash_delta.ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flash_delta.ops._check.options import as_bool


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
