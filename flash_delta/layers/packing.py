"""Turns a padded batch into one packed row and back, without reading a number from the device.

A padding token must not reach the delta rule. Even with zero inputs its gate would decay the state (Gated DeltaNet:
softplus(dt_bias) > 0), and the convolution would read it. So the layers remove padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.ops._transforms import is_traced


@dataclass(frozen=True)
class Packing:
    """How the tokens of hidden states [B, T, D] are laid out while they are mixed.

    valid: [B, T] bool, the tokens that count; None if all tokens count.
    cu_seqlens: [N + 1] boundaries of the packed sequences; None for a plain batch.
    order, inverse: [B * T], the tokens in packed order (valid tokens first, row by row, in order of time) and the place
        of each token in that order; None if tokens keep their places.
    """

    valid: Tensor | None = None
    cu_seqlens: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None

    @classmethod
    def of(cls, hidden_states: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Packing:
        """Check the three arguments of a layer's forward and lay the tokens out; see `check_inputs`."""
        mask = check_inputs(hidden_states, attention_mask, cu_seqlens)
        if cu_seqlens is not None:
            tokens = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            return cls(valid=(tokens < cu_seqlens[-1])[None], cu_seqlens=cu_seqlens)
        if mask is None or _counts_all(mask):
            return cls()
        # A stable sort keeps the (batch, time) order of the valid tokens.
        order = torch.argsort(mask.flatten(), descending=True, stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(mask, F.pad(mask.sum(1).cumsum(0), (1, 0)), order, inverse)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D] or, reordered, [1, B * T, D]. Tokens that do not count become 0, even if NaN."""
        if self.valid is not None:
            x = x.where(self.valid[..., None], 0)
        return x if self.order is None else x.flatten(0, 1).index_select(0, self.order)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of `pack` on rows of any width."""
        if self.inverse is None:
            return x
        return x[0].index_select(0, self.inverse).view(*self.valid.shape, x.shape[-1])


class Tokens(NamedTuple):
    """Some tokens of every row, padded.

    op: the op's arguments, [B, T, ...], or [B, n T, ...] with n updates per token; or None.
    conv: the inputs of the convolutions, [B, T, D].
    valid: [B, T] bool, False for padding; None if all tokens count.
    """

    op: dict[str, Tensor | None]
    conv: tuple[Tensor, ...] = ()
    valid: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """The tokens after `change`, which takes and returns one row of channels per token, [B, T, channels]."""
        T = self.op["q"].shape[1]

        def change_argument(x: Tensor) -> Tensor:
            rows = change(x.reshape(x.shape[0], T, -1))
            return rows.reshape(rows.shape[0], -1, *x.shape[2:])

        op = {name: None if x is None else change_argument(x) for name, x in self.op.items()}
        return Tokens(op, tuple(change(x) for x in self.conv), self.valid)

    def part(self, start: int, end: int) -> Tokens:
        """Tokens start to end - 1 of every row."""
        valid = None if self.valid is None else self.valid[:, start:end]
        return self.each(lambda rows: rows[:, start:end])._replace(valid=valid)

    @staticmethod
    def join(parts: list[Tokens]) -> Tokens:
        """The tokens of all parts, one after the other."""
        first = parts[0]
        if len(parts) == 1:
            return first
        op = {name: None if x is None else torch.cat([p.op[name] for p in parts], 1) for name, x in first.op.items()}
        conv = tuple(torch.cat(inputs, dim=1) for inputs in zip(*(p.conv for p in parts), strict=True))
        if all(p.valid is None for p in parts):
            return Tokens(op, conv)
        queries = [p.op["q"] for p in parts]
        whole = [q.new_ones(q.shape[:2], dtype=torch.bool) for q in queries]
        valid = [w if p.valid is None else p.valid for p, w in zip(parts, whole, strict=True)]
        return Tokens(op, conv, torch.cat(valid, dim=1))


def check_inputs(hidden_states: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """Check a layer's inputs and return the mask of the T given tokens, [B, T] bool, or None.

    Args:
        hidden_states: [B, T, D].
        attention_mask: [B, T], or [B, past + T] of which the last T columns are used, bool or integers; nonzero
            marks a token.
        cu_seqlens: [N + 1], int32 or int64, for B = 1.

    Raises:
        ValueError: if a shape or dtype is not as above, or if both a mask and cu_seqlens are given.
    """
    if hidden_states.dim() != 3:
        raise ValueError(f"hidden_states: expected shape [B, T, D], got {list(hidden_states.shape)}")
    B, T, _ = hidden_states.shape
    if cu_seqlens is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask: expected None together with cu_seqlens, got a tensor")
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(f"cu_seqlens: expected a tensor [N + 1], got a {type(cu_seqlens).__name__}")
        if B != 1 or cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            got = f"B = {B} and {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            raise ValueError(f"cu_seqlens: expected B = 1 and int32 or int64 boundaries [N + 1], got {got}")
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        got = list(attention_mask.shape)
        raise ValueError(f"attention_mask: expected shape [B, T] = {[B, T]} or [B, past + T], got {got}")
    refuse_floats("attention_mask", attention_mask)
    return attention_mask[:, attention_mask.shape[1] - T :].bool()


def refuse_floats(name: str, mask: Tensor) -> None:
    """Refuse a mask of floats. In one convention 0 means padding, in another one a token."""
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(
            f"{name}: expected bool or integers, nonzero for a token, got {mask.dtype}: give `{name} != 0` if tokens "
            f"are 1 and padding is 0, or `{name} == 0` if the mask is additive (tokens are 0 and padding is -inf)"
        )


def check_positions(hidden_states: Tensor, position_ids: Tensor) -> None:
    """Refuse positions that are neither [B, T] nor [1, T] (the same for all rows)."""
    B, T, _ = hidden_states.shape
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, B) or position_ids.shape[1] != T:
        expected, got = f"[B, T] = {[B, T]} or [1, T] = {[1, T]}", list(position_ids.shape)
        raise ValueError(f"position_ids: expected shape {expected}, got {got}")


def check_width(hidden_states: Tensor, width: int) -> None:
    """Refuse hidden states [B, T, D] of another width than the layer's."""
    if hidden_states.shape[-1] != width:
        raise ValueError(f"hidden_states: expected shape [B, T, {width}], got {list(hidden_states.shape)}")


def _counts_all(mask: Tensor) -> bool:
    """Whether the host can see that there is no padding. It does not wait for a GPU, and a tracer has no values."""
    return mask.device.type == "cpu" and not is_traced(mask) and bool(mask.all())
