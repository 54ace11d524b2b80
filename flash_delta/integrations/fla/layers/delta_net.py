"""fla.layers.delta_net."""

from flash_delta import layers
from flash_delta.integrations.fla.layers._forward import FlaForward
from flash_delta.layers.delta_net import sum_norm

__all__ = ["DeltaNet", "sum_norm"]


class DeltaNet(FlaForward, layers.DeltaNet):
    """:class:`flash_delta.layers.DeltaNet`, called as fla's is; ``d_model`` is an old name of ``hidden_size``."""

    state_v_first = False

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
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
        super().__init__(
            mode=mode,
            hidden_size=hidden_size if d_model is None else d_model,
            expand_k=expand_k,
            expand_v=expand_v,
            num_heads=num_heads,
            use_beta=use_beta,
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
            layer_idx=layer_idx,
            qk_activation=qk_activation,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
            backend=backend,
        )
