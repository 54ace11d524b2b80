"""The states of mixers between calls. A layer that gets a state starts from it and leaves the new state in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class MixerState:
    """The state of a delta-rule layer. Its size does not depend on the number of tokens. Both attributes start as None.

    Attributes:
        conv: last W inputs of the q, k and v convolutions, three tensors [N, D, W]; None before the first token or
            without short convolutions.
        recurrent: the delta rule's matrix per value head, [N, HV, K, V].

    Example:
        >>> import torch
        >>> from flash_delta.layers import GatedDeltaNet, MixerState
        >>> state = MixerState()
        >>> y = GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=16)(torch.randn(1, 50, 64), state=state)
        >>> state.recurrent.shape
        torch.Size([1, 2, 16, 32])
    """

    conv: tuple[Tensor, Tensor, Tensor] | None = None
    recurrent: Tensor | None = None

    def select(self, indices: Tensor) -> None:
        """Keep the sequences `indices` [M] (repeats allowed, as in beam search) in that order."""
        if self.conv is not None:
            q, k, v = self.conv
            self.conv = (_rows(q, indices), _rows(k, indices), _rows(v, indices))
        if self.recurrent is not None:
            self.recurrent = _rows(self.recurrent, indices)


@dataclass
class AttentionState:
    """The state of a softmax-attention layer. It grows with the number S of tokens. All attributes start as None.

    Attributes:
        keys: [N, HKV, S, head_dim], already rotated.
        values: [N, HKV, S, head_dim].
        mask: [N, S] bool, False for padding; None as long as there was no padding.

    Example:
        >>> import torch
        >>> from flash_delta.layers import Attention, AttentionState
        >>> state = AttentionState()
        >>> y = Attention(hidden_size=64, num_heads=4)(torch.randn(1, 50, 64), state=state)
        >>> state.length
        50
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    mask: Tensor | None = None

    @property
    def length(self) -> int:
        """S, the number of tokens seen, padding included."""
        return 0 if self.keys is None else self.keys.shape[2]

    def extended_mask(self, mask: Tensor | None, T: int) -> Tensor | None:
        """The mask [N, S + T] after T more tokens with `mask` [N, T] (None: all count). None if there is no padding."""
        if mask is None and self.mask is None:
            return None
        known = self.mask if mask is None else mask
        past = known.new_ones(len(known), self.length) if self.mask is None else self.mask
        new = known.new_ones(len(known), T) if mask is None else mask
        return torch.cat([past, new], dim=1)

    def select(self, indices: Tensor) -> None:
        """Keep the sequences `indices` [M] (repeats allowed, as in beam search) in that order."""
        if self.keys is not None:
            self.keys, self.values = _rows(self.keys, indices), _rows(self.values, indices)
        if self.mask is not None:
            self.mask = _rows(self.mask, indices)


def _rows(t: Tensor, indices: Tensor) -> Tensor:
    return t.index_select(0, indices.to(t.device))  # layers may be on several devices
