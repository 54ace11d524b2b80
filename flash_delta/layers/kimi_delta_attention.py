"""Kimi Delta Attention as a layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from flash_delta.layers._delta_mixer import ChannelGateMixer
from flash_delta.layers._options import head_widths
from flash_delta.ops import chunk_kda, fused_recurrent_kda
from flash_delta.ops._check.options import as_bool, as_lower_bound


class KimiDeltaAttention(ChannelGateMixer):
    """Kimi Delta Attention (arXiv:2510.26692): a delta rule whose state decays by one number per key channel and token.

    Equation, per value head, with l2-normalised q_t, k_t and beta_t = sigmoid(b_proj(x_t))::

        g_t = -exp(A_log) * softplus(f_proj(x_t) + dt_bias)                                     [K]
              or, with lower_bound,  lower_bound * sigmoid(exp(A_log) * (f_proj(x_t) + dt_bias))
        S_t = (I - beta_t k_t k_t^T) diag(e^{g_t}) S_{t-1} + beta_t k_t v_t^T,    o_t = K^{-1/2} S_t^T q_t

    and then y_t = o_proj(RMSNorm(o_t) * sigmoid(g_proj(x_t))). f_proj and g_proj have rank V. `A_log` is [HV],
    `dt_bias` [HV * K], both kept in fp32.

    Args:
        hidden_size: width D of the input and output. Default 2048.
        expand_v: value width V as a multiple of head_dim. Default 1.
        head_dim: key width K. Default 128.
        num_heads: key heads H. Default 16.
        num_v_heads: value heads HV, a multiple of H; None means H.
        mode: "chunk", or "fused_recurrent" to always run token by token. Default "chunk". Without gradients, short
            inputs run token by token in both modes.
        use_short_conv: whether q, k, v pass a short causal convolution. Default True.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1) (arXiv:2411.12537). Default False.
        safe_gate: A_log starts at 0, as in fla. It needs lower_bound. Default False.
        lower_bound: the least log decay per token, in [-5, 0). Default None: no bound, the softplus gate.
        conv_size: taps of the convolution. Default 4.
        conv_bias: whether the convolutions have a bias. Default False.
        layer_idx: the place of the layer in its model. The layer does not use it.
        norm_eps: eps of the output norm. Default 1e-5.
        backend: the backend of the ops, the convolutions and the norm. Default None: each chooses.

    Raises:
        ValueError: if num_v_heads, expand_v, mode or lower_bound is not as above, or safe_gate comes without a bound.

    Example:
        >>> import torch
        >>> from flash_delta.layers import KimiDeltaAttention, MixerState
        >>> layer = KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=16).eval()
        >>> state, prompt, token = MixerState(), torch.randn(1, 50, 64), torch.randn(1, 1, 64)
        >>> y = layer(prompt, state=state)  # the layer leaves its state there
        >>> layer(token, state=state).shape
        torch.Size([1, 1, 64])
    """

    gate = "channel"

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
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
        lower_bound = None if lower_bound is None else as_lower_bound(layer, lower_bound)
        safe_gate = as_bool(layer, "safe_gate", safe_gate)
        if safe_gate and lower_bound is None:
            raise ValueError("lower_bound: expected a number in [-5, 0) with safe_gate=True, got None")
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        self._add_parts(self.num_v_heads, norm_eps)

    def _projections(self) -> dict[str, nn.Module]:
        tokens = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
        return tokens | {"beta": self.b_proj, "g": self.f_proj, "z": self.g_proj}

    def _op(self, recurrent: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return fused_recurrent_kda if recurrent else chunk_kda
