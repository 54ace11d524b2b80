"""fla.layers. Their forward function takes the state from a cache of all layers and returns three results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_delta import layers
from flash_delta.integrations.fla.padding import get_layer_cache, update_layer_cache
from flash_delta.layers import MixerState
from flash_delta.ops._check.options import refuse


class FlaForward:
    """A mixin that gives a layer of :mod:`flash_delta.layers` the forward of fla's layers."""

    state_v_first = True  # states in a cache are [N, HV, V, K]

    def options(self) -> dict[str, Any]:
        """The op's arguments."""
        return super().options() | {"state_v_first": self.state_v_first}

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None, Any | None]:
        """Mix the tokens of each sequence.

        Args:
            hidden_states: [B, T, D].
            attention_mask: [B, T] or [B, past + T], zeros are padding; not allowed with cu_seqlens.
            past_key_values: the states of all layers, like fla's `Cache`: ``cache[layer_idx]`` has "recurrent_state"
                and "conv_state" if ``len(cache) > layer_idx``, and ``cache.update(...)`` takes new ones.
            use_cache: whether to update past_key_values.
            output_attentions: must be False.
            cu_seqlens: boundaries [N + 1] of sequences packed in one row (B = 1).

        Returns:
            ``(y [B, T, D], None, past_key_values)``.

        Raises:
            ValueError: naming the argument, what was expected and what came.
        """
        name = type(self).__name__
        if output_attentions:
            refuse(name, "output_attentions", "False (a delta rule has no attention weights)", output_attentions)
        last = get_layer_cache(self, past_key_values)
        state = None if past_key_values is None else MixerState()
        if last is not None:
            state = MixerState(last["conv_state"], last["recurrent_state"])
        y = super().forward(hidden_states, attention_mask, state, cu_seqlens)
        if state is not None and use_cache:
            update_layer_cache(self, past_key_values, state.recurrent, state.conv, hidden_states.shape[1])
        return y, None, past_key_values


class Comba(FlaForward, layers.Comba):
    """:class:`flash_delta.layers.Comba`, called as fla's is; the constructor has the same arguments."""

    state_v_first = False


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


class GatedDeltaNet(FlaForward, layers.GatedDeltaNet):
    """:class:`flash_delta.layers.GatedDeltaNet`, called as fla's is; the constructor has the same arguments."""


class GatedDeltaNet2(FlaForward, layers.GatedDeltaNet2):
    """:class:`flash_delta.layers.GatedDeltaNet2`, called as fla's is; the constructor has the same arguments."""

    state_v_first = False


class GatedDeltaProduct(FlaForward, layers.GatedDeltaProduct):
    """:class:`flash_delta.layers.GatedDeltaProduct`, called as fla's is; the constructor has the same arguments."""

    state_v_first = False


class KimiDeltaAttention(FlaForward, layers.KimiDeltaAttention):
    """:class:`flash_delta.layers.KimiDeltaAttention`, called as fla's is; the constructor has the same arguments."""


class SimpleGatedLinearAttention(FlaForward, layers.SimpleGatedLinearAttention):
    """:class:`flash_delta.layers.SimpleGatedLinearAttention`, called as fla's is; the constructor has the same
    arguments."""
