"""The forward of fla's layers. It takes the state from a cache of all layers and returns three results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_delta.integrations.fla.layers.utils import get_layer_cache, update_layer_cache
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
