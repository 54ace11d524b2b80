"""Comba as a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flash_delta.layers._delta_mixer import ScalarGateMixer
from flash_delta.layers._options import head_widths
from flash_delta.layers.documents import starts
from flash_delta.modules._shards import own_shard
from flash_delta.ops import chunk_comba
from flash_delta.ops._check.options import as_bool, as_float


class Comba(ScalarGateMixer):
    """Comba (arXiv:2506.02475): a gated delta rule that erases from the state before its decay, with keys of its own.

    Equation, per value head, with beta_t = sigmoid(b_proj(x_t)) and k_t, p_t, q_t divided by their norms::

        p_t = sigmoid(decay) k_t,    q_t = q_t - D p_t        (before the division)
        g_t = -exp(A_log) * softplus(a_proj(x_t) + dt_bias)
        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T,    o_t = K^{-1/2} S_t^T q_t

    and then y_t = o_proj(RMSNorm(o_t) * sigmoid(g_proj(x_t))). `decay` and `D` are [H], `A_log` and `dt_bias` [HV]. The
    division by the norm cancels `decay` in p_t, as in fla. So `decay` has an effect only through q_t.

    Args:
        hidden_size: width D of the input and output. Default 2048.
        expand_v: value width V as a multiple of head_dim. Default 2.
        head_dim: key width K. Default 256.
        num_heads: key heads H. Default 6.
        num_v_heads: value heads HV, a multiple of H; None means H.
        mode: "chunk" or "fused_recurrent"; both compute in chunks. Default "chunk".
        use_short_conv: whether q, k, v pass a short causal convolution. Default True.
        use_output_gate: whether the output norm is gated by g_proj. Default True.
        use_output_correction: whether D p_t is subtracted from the queries. Default True.
        use_inner_decay: whether p_t is sigmoid(decay) k_t instead of k_t. Default True.
        correction_factor: the initial value of `D`. Default 1.
        conv_size: taps of the convolution. Default 4.
        conv_bias: whether the convolutions have a bias. Default False.
        layer_idx: the place of the layer in its model. The layer does not use it.
        norm_eps: eps of the output norm. Default 1e-5.
        backend: the backend of the ops, the convolutions and the norm. Default None: each chooses.

    Raises:
        ValueError: if num_v_heads, expand_v, mode or correction_factor is not as above.

    Example:
        >>> import torch
        >>> from flash_delta.layers import Comba, MixerState
        >>> layer = Comba(hidden_size=64, num_heads=2, head_dim=16).eval()
        >>> state, prompt, token = MixerState(), torch.randn(1, 50, 64), torch.randn(1, 1, 64)
        >>> y = layer(prompt, state=state)  # the layer leaves its state there
        >>> layer(token, state=state).shape
        torch.Size([1, 1, 64])
    """

    unregularized = ScalarGateMixer.unregularized | {"D"}

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        use_output_gate: bool = True,
        use_output_correction: bool = True,
        use_inner_decay: bool = True,
        correction_factor: float = 1.0,
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
        self.use_output_correction = as_bool(layer, "use_output_correction", use_output_correction)
        self.use_inner_decay = as_bool(layer, "use_inner_decay", use_inner_decay)
        self.correction_factor = as_float(layer, "correction_factor", correction_factor)
        if self.use_inner_decay:
            self.decay = nn.Parameter(torch.empty(self.num_heads))
        if self.use_output_correction:
            self.D = nn.Parameter(torch.empty(self.num_heads))
        self._add_gate()
        self._add_norm(as_bool(layer, "use_output_gate", use_output_gate), norm_eps, "sigmoid")

    def reset_parameters(self) -> None:
        """Draw A_log and dt_bias anew, and set `decay` to 1 and `D` to the correction factor."""
        super().reset_parameters()
        if self.use_inner_decay:
            nn.init.ones_(self.decay)
        if self.use_output_correction:
            nn.init.constant_(self.D, self.correction_factor)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        heads = super()._heads(q, k, v)
        q, k = heads["q"], heads["k"]
        p = (k * own_shard(self.decay)[:, None].sigmoid()).to(k.dtype) if self.use_inner_decay else k
        q = (q - own_shard(self.D)[:, None] * p).to(q.dtype) if self.use_output_correction else q
        return heads | {"q": q, "p": p}

    def _separate(
        self, tokens: dict[str, Tensor], options: dict[str, Any], seq_idx: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        p = tokens["p"].masked_fill(starts(seq_idx)[..., None, None], 0)  # which would erase from the document before
        return super()._separate(tokens | {"p": p}, options, seq_idx)

    def _op(self, recurrent: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return chunk_comba
