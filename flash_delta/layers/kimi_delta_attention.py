"""Kimi Delta Attention and Gated DeltaNet 2 as layers: a decay per key channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flash_delta.layers._delta_mixer import ChannelGateMixer
from flash_delta.layers._mixer import Mixer
from flash_delta.layers._options import head_widths
from flash_delta.ops import chunk_gdn2, chunk_kda, fused_recurrent_gdn2, fused_recurrent_kda, guard_erase
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


class GatedDeltaNet2(ChannelGateMixer):
    """Gated DeltaNet 2 (GDN-2): a delta rule with a decay and an erase gate per key channel, a write gate per value
    channel.

    Equation, per value head, with l2-normalised q_t, k_t::

        g_t = -exp(A_log) * softplus(f_proj(x_t) + dt_bias),    b_t = sigmoid(b_proj(x_t))      [K]
        w_t = sigmoid(w_proj(x_t))                                                              [V]
        S~_t = diag(e^{g_t}) S_{t-1},    S_t = S~_t + k_t (w_t . v_t - S~_t^T (b_t . k_t))^T
        o_t = K^{-1/2} S_t^T q_t

    and then y_t = o_proj(RMSNorm(o_t) * sigmoid(g_proj(x_t))). f_proj and g_proj have rank V. The value heads of a key
    head share g_t and b_t. `A_log` is [H], `dt_bias` [H * K], both kept in fp32.

    Args:
        hidden_size: width D of the input and output. Default 2048.
        expand_v: value width V as a multiple of head_dim. Default 1.
        head_dim: key width K. Default 128.
        num_heads: key heads H. Default 16.
        num_v_heads: value heads HV, a multiple of H; None means H.
        mode: "chunk", or "fused_recurrent" to always run token by token. Default "chunk". Without gradients, short
            inputs run token by token in both modes.
        use_short_conv: whether q, k, v pass a short causal convolution. Default True.
        allow_neg_eigval: b in (0, 2) instead of (0, 1) (arXiv:2411.12537). w stays in (0, 1). Default False.
        conv_size: taps of the convolution. Default 4.
        conv_bias: whether the convolutions have a bias. Default False.
        layer_idx: the place of the layer in its model. The layer does not use it.
        norm_eps: eps of the output norm. Default 1e-5.
        guard: whether :func:`flash_delta.guard_erase` changes b so that no state grows. It is made of PyTorch's
            operations and takes memory for g, b and w in float32. Default False: b is as above, as in fla.
        backend: the backend of the ops, the convolutions and the norm. Default None: each chooses.

    Raises:
        ValueError: if num_v_heads, expand_v or mode is not as above.

    Example:
        >>> import torch
        >>> from flash_delta.layers import GatedDeltaNet2, MixerState
        >>> layer = GatedDeltaNet2(hidden_size=64, num_heads=2, head_dim=16).eval()
        >>> state, prompt, token = MixerState(), torch.randn(1, 50, 64), torch.randn(1, 1, 64)
        >>> y = layer(prompt, state=state)  # the layer leaves its state there
        >>> layer(token, state=state).shape
        torch.Size([1, 1, 64])

    Source: Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention. Parameters are those of fla 0.6.0.
    """

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
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        guard: bool = False,
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
            use_beta=False,
        )
        self.allow_neg_eigval = as_bool(layer, "allow_neg_eigval", allow_neg_eigval)
        self.guard = as_bool(layer, "guard", guard)
        self.b_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_k_dim, bias=False)
        self.w_proj = nn.Linear(self.hidden_size, self.num_v_heads * self.head_v_dim, bias=False)
        self._add_parts(self.num_heads, norm_eps)

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        b = self.b_proj(x).unflatten(-1, (-1, self.head_k_dim))
        w = self.w_proj(x).unflatten(-1, (-1, self.head_v_dim))
        return {"g": self._for_values(self._raw_gate(x), 2), "b": self._for_values(b, 2), "w": w}

    def _for_values(self, x: Tensor, axis: int) -> Tensor:
        """Each key head's part of ``x``, once for each of its value heads."""
        group = self.num_v_heads // self.num_heads
        return x if group == 1 else x.repeat_interleave(group, axis)

    def _activate(self, tokens: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.guard:
            return tokens
        g, k = self._log_decay(tokens["g"]), tokens["k"].to(torch.promote_types(tokens["k"].dtype, torch.float32))
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)  # the op's norm
        b, w = (torch.sigmoid(tokens[name].to(g.dtype)) for name in ("b", "w"))
        return tokens | {"g": g, "b": guard_erase(k, 2 * b if self.allow_neg_eigval else b, g), "w": w}

    def _separate(
        self, tokens: dict[str, Tensor], options: dict[str, Any], seq_idx: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.guard:  # g is the decay already
            return Mixer._separate(self, tokens, options, seq_idx)
        return super()._separate(tokens, options, seq_idx)

    def options(self) -> dict[str, Any]:
        given = super().options()
        if self.guard:
            given |= {"use_gate_in_kernel": False, "use_beta_sigmoid_in_kernel": False}
            given |= dict.fromkeys(self.gate_options())
        return given

    def gate_options(self) -> dict[str, Any]:
        given = super().gate_options()
        dt_bias = self._for_values(given["dt_bias"].unflatten(0, (-1, self.head_k_dim)), 0).flatten()
        return given | {"A_log": self._for_values(given["A_log"], 0), "dt_bias": dt_bias}

    def _op(self, recurrent: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return fused_recurrent_gdn2 if recurrent else chunk_gdn2
