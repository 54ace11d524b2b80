"""The states of mixers between calls. A layer that gets a state starts from it and leaves the new state in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.layers.packing import Packing, Tokens

KEPT = 128  # the tokens that a state can be rolled back by, if so many came since the last crop


@dataclass
class MixerState:
    """The state of a delta-rule layer. Its size does not depend on the number of tokens. The first two attributes start
    as None.

    Attributes:
        conv: last W inputs of the q, k and v convolutions, three tensors [N, D, W]; None before the first token or
            without short convolutions.
        recurrent: the delta rule's matrix per value head, [N, HV, K, V].
        record_past: whether the layer keeps what `crop` needs, at least of the last 128 tokens since the last crop. It
            then runs up to 128 tokens one by one. Default False.
        replay: what it keeps.

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
    record_past: bool = False
    replay: Replay | None = field(default=None, repr=False, compare=False)

    @property
    def croppable(self) -> int:
        """How many of the last tokens `crop` can take back."""
        return 0 if self.replay is None or self.replay.last is not self.recurrent else self.replay.length

    def activate_past_recording(self) -> None:
        """Set record_past. The name is that of transformers' caches."""
        self.record_past = True

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens of every row, padding included, and forget what was kept.

        If the layer's op runs token by token, the recurrent state gets the bits that it had after the tokens that stay.
        Comba and simple GLA have no such op. Their last bits may differ.

        Raises:
            ValueError: if not so many tokens were kept.

        Example:
            >>> import torch
            >>> from flash_delta.layers import GatedDeltaNet, MixerState
            >>> layer, x = GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=16).eval(), torch.randn(1, 50, 64)
            >>> state = MixerState(record_past=True)
            >>> with torch.no_grad():
            ...     y = layer(x[:, :45], state=state)
            ...     expected = state.recurrent
            ...     y = layer(x[:, 45:], state=state)
            >>> state.crop(5)
            >>> torch.equal(state.recurrent, expected)
            True
        """
        if not 0 <= tokens <= self.croppable:
            kept = f"0 to {self.croppable} (so many are kept since the last crop)"
            raise ValueError(f"tokens: expected {kept}, got {tokens}")
        if tokens > 0:
            self.conv, self.recurrent = self.replay.after(self.replay.length - tokens)
        self.replay = None

    def next_replay(self, packing: Packing, taps: int) -> Replay:
        """What keeps the tokens of the next call, which are laid out by `packing`."""
        if packing.cu_seqlens is not None and packing.order is None:
            raise ValueError("cu_seqlens (or cp_context): expected None with a state that records its past, got one")
        if self.croppable == 0:
            self.replay = Replay(self.recurrent, self.conv, taps)
        return self.replay

    def select(self, indices: Tensor) -> None:
        """Keep the sequences `indices` [M] (repeats allowed, as in beam search) in that order. Forget what was kept."""
        self.replay = None
        if self.conv is not None:
            q, k, v = self.conv
            self.conv = (_rows(q, indices), _rows(k, indices), _rows(v, indices))
        if self.recurrent is not None:
            self.recurrent = _rows(self.recurrent, indices)


class Replay:
    """The last tokens of a state, and the state before them. From these follows the state after fewer tokens.

    The op runs once more, on the tokens that stay. So no token needs a state, and an op that runs token by token gives
    the same bits.

    Args:
        recurrent: the state before the tokens, [N, HV, K, V]. Default None: zeros.
        conv: the windows of the convolutions before the tokens, as in `MixerState`. Default None: zeros.
        taps: W. Default 0: no convolutions.
    """

    def __init__(self, recurrent: Tensor | None = None, conv: tuple[Tensor, ...] | None = None, taps: int = 0) -> None:
        self.recurrent, self.conv, self.taps = recurrent, conv, taps
        self.inputs: tuple[Tensor, ...] = ()  # of the convolutions in the next call of `run`
        self.parts: list[Tokens] = []
        self.length = 0  # the tokens of a row in all parts, padding included
        self.last: Tensor | None = None  # the state after them

    def run(
        self,
        op: Callable[..., tuple[Tensor, Tensor]],
        arguments: dict[str, Tensor | None],
        options: dict[str, Any],
        packing: Packing,
    ) -> tuple[Tensor, Tensor]:
        """Run the op on at most KEPT tokens and keep them. The arguments are laid out by `packing`."""
        o, self.last = op(**arguments, **options, cu_seqlens=packing.cu_seqlens)
        if o.numel() == 0:  # no tokens
            return o, self.last
        self.op, self.options, self.with_grad = op, options, torch.is_grad_enabled()
        tokens = Tokens(arguments, self.inputs).each(packing.unpack)._replace(valid=packing.valid)
        self.parts.append(tokens)
        self.length += tokens.op["q"].shape[1]
        if self.length > 2 * KEPT:  # so this takes time once in KEPT tokens
            self._forget(self.length - KEPT)
        return o, self.last

    def after(self, T: int) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
        """The windows of the convolutions, and the state, after the first T tokens."""
        if T == 0:
            return self.conv, self.recurrent
        tokens = Tokens.join(self.parts).part(0, T)
        packing = Packing.of(tokens.op["q"].flatten(2), tokens.valid, None)
        options = self.options | {"initial_state": self.recurrent, "output_final_state": True}
        with torch.set_grad_enabled(self.with_grad):  # as when the tokens came
            _, recurrent = self.op(**tokens.each(packing.pack).op, **options, cu_seqlens=packing.cu_seqlens)
        return self._windows(tokens) if tokens.conv else None, recurrent

    def _forget(self, T: int) -> None:
        tokens = Tokens.join(self.parts)
        self.conv, self.recurrent = self.after(T)
        self.parts, self.length = [tokens.part(T, self.length).each(torch.clone)], self.length - T

    def _windows(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """The last W inputs of every row, in tensors [B, D, W]."""
        windows, W = [], self.taps
        for i, inputs in enumerate(tokens.conv):
            B, _, D = inputs.shape
            past = inputs.new_zeros(B, D, W) if self.conv is None else self.conv[i]
            inputs = torch.cat([past.mT, inputs], dim=1)
            if tokens.valid is None:
                last = inputs[:, -W:]
            else:  # a stable sort puts padding first, and leaves tokens in their order
                order = F.pad(tokens.valid, (W, 0), value=True).int().argsort(dim=1, stable=True)[:, -W:]
                last = inputs.gather(1, order[..., None].expand(-1, -1, D))
            windows.append(last.mT.contiguous())
        return tuple(windows)


def in_two(
    forward: Callable[..., Tensor], hidden_states: Tensor, attention_mask: Tensor | None, state: MixerState
) -> Tensor:
    """A layer's output for more than KEPT tokens. The state keeps the last KEPT of them."""
    earlier = MixerState(state.conv, state.recurrent)
    y = forward(hidden_states[:, :-KEPT], None if attention_mask is None else attention_mask[:, :-KEPT], earlier)
    state.conv, state.recurrent, state.replay = earlier.conv, earlier.recurrent, None
    return torch.cat([y, forward(hidden_states[:, -KEPT:], attention_mask, state)], dim=1)


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

    @property
    def croppable(self) -> int:
        """How many of the last tokens `crop` can take back: all."""
        return self.length

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens of every row, padding included.

        Raises:
            ValueError: if there are not so many.
        """
        if not 0 <= tokens <= self.length:
            raise ValueError(f"tokens: expected 0 to {self.length} (so many were seen), got {tokens}")
        kept = self.length - tokens
        self.keys, self.values, self.mask = (
            x if x is None else x.narrow(axis, 0, kept)
            for x, axis in ((self.keys, 2), (self.values, 2), (self.mask, 1))
        )

    def select(self, indices: Tensor) -> None:
        """Keep the sequences `indices` [M] (repeats allowed, as in beam search) in that order."""
        if self.keys is not None:
            self.keys, self.values = _rows(self.keys, indices), _rows(self.values, indices)
        if self.mask is not None:
            self.mask = _rows(self.mask, indices)


def _rows(t: Tensor, indices: Tensor) -> Tensor:
    return t.index_select(0, indices.to(t.device))  # layers may be on several devices
