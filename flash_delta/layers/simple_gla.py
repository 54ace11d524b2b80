"""Simple gated linear attention as a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_delta.layers._mixer import Mixer
from flash_delta.layers._options import ACTIVATIONS, head_width
from flash_delta.modules import GatedRMSNorm, RMSNorm
from flash_delta.ops import chunk_simple_gla
from flash_delta.ops._check.options import as_bool, as_float, as_size

NAMES = "gelu", "logsigmoid", "relu", "sigmoid", "silu", "sqrelu", "swish"


class SimpleGatedLinearAttention(Mixer):
    """Gated linear attention (arXiv:2312.06635) with one decay per head and token. It erases nothing.

    Equation, per head, where q_t, k_t are the results of projections, convolutions and the feature map::

        g_t = logsigmoid(gk_proj(x_t)) / gate_logit_normalizer
        S_t = e^{g_t} S_{t-1} + k_t v_t^T,    o_t = K^{-1/2} S_t^T q_t

    and then y_t = o_proj(RMSNorm(o_t) * gate_fn(g_proj(x_t))).

    Args:
        mode: "chunk" or "fused_recurrent"; both compute in chunks. Default "chunk".
        hidden_size: width D of the input and output. Default 1024.
        expand_k: width of all keys, H * K, as a multiple of hidden_size. Default 1.
        expand_v: width of all values, H * V, as a multiple of hidden_size. Default 1.
        num_heads: heads H of the queries and the state. Default 4.
        num_kv_heads: heads of k and v, a divisor of H. Each serves H / num_kv_heads heads of queries. None means H.
        feature_map: applied to q and k: "relu", "sigmoid", "logsigmoid", "silu", "swish", "sqrelu", "gelu". Default
            None.
        use_short_conv: whether q, k, v pass a short causal convolution and silu. Default True.
        conv_size: taps of the convolution. Default 4.
        conv_bias: whether the convolutions have a bias. Default False.
        gate_fn: the output gate's activation, one of those of feature_map. Default "swish".
        elementwise_affine: whether the output norm has a weight. Default True.
        norm_eps: eps of the output norm. Default 1e-5.
        gate_logit_normalizer: divides the log decays. Default 16.
        fuse_norm: whether norm and gate are one kernel if gate_fn is "swish". The norm's name is then
            `g_norm_swish_gate`, otherwise `g_norm`. Default True.
        layer_idx: the place of the layer in its model. The layer does not use it.
        backend: the backend of the ops, the convolutions and the norm. Default None: each chooses.

    Raises:
        ValueError: if num_kv_heads, expand_k, expand_v, mode, feature_map or gate_fn is not as above.

    Example:
        >>> import torch
        >>> from flash_delta.layers import MixerState, SimpleGatedLinearAttention
        >>> layer = SimpleGatedLinearAttention(hidden_size=64, num_heads=2).eval()
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
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_fn: str = "swish",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
        backend: str | None = None,
    ) -> None:
        layer = type(self).__name__
        num_heads = as_size(layer, "num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else as_size(layer, "num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {num_kv_heads}")
        for name, given in (("feature_map", feature_map), ("gate_fn", gate_fn)):
            if given not in NAMES and (name, given) != ("feature_map", None):
                raise ValueError(f"{name}: expected one of {', '.join(NAMES)}, got {given!r}")
        activation = "silu" if as_bool(layer, "use_short_conv", use_short_conv) else None
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
            num_kv_heads=num_kv_heads,
            use_beta=False,
            activations=(activation,) * 3,
        )
        self.num_kv_groups, self.feature_map, self.gate_fn = num_heads // num_kv_heads, feature_map, gate_fn
        self.gate_logit_normalizer = as_float(layer, "gate_logit_normalizer", gate_logit_normalizer)
        self.g_proj = nn.Linear(self.hidden_size, num_heads * self.head_v_dim, bias=False)
        self.gk_proj = nn.Linear(self.hidden_size, num_heads)
        self.fuse_norm_and_gate = as_bool(layer, "fuse_norm", fuse_norm) and gate_fn == "swish"
        norm = {"backend": backend, "elementwise_affine": elementwise_affine}
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = GatedRMSNorm(self.head_v_dim, norm_eps, **norm)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, norm_eps, **norm)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        if self.feature_map is not None:
            q, k = map(ACTIVATIONS[self.feature_map], (q, k))
        heads = super()._heads(q, k, v)
        if self.num_kv_groups > 1:
            heads |= {name: heads[name].repeat_interleave(self.num_kv_groups, dim=2) for name in ("k", "v")}
        return heads

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        raw = self.gk_proj(x)
        wide = raw.to(torch.promote_types(raw.dtype, torch.float32))
        return {"g": F.logsigmoid(wide) / self.gate_logit_normalizer}

    def _normalize(self, o: Tensor, x: Tensor) -> Tensor:
        g = self.g_proj(x).view_as(o)
        return (
            self.g_norm_swish_gate(o, g) if self.fuse_norm_and_gate else self.g_norm(o) * ACTIVATIONS[self.gate_fn](g)
        )

    def _op(self, recurrent: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return chunk_simple_gla
