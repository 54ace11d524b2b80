"""Descriptions of calls: where their tensors are, and which optional arguments they have."""

from typing import NamedTuple


class Slice(NamedTuple):
    """Where q, k, v, g or beta lies in a larger tensor, such as the output of a fused projection. All fields count
    numbers, not bytes.

    Args:
        token: numbers from one token to the next.
        start: where the first number is. Default 0.
        head: numbers from one head to the next. Default None: heads lie side by side.

    Example:
        >>> from flash_delta.ops.serving import Slice
        >>> k = Slice(token=1024, start=256)  # of a projection with 1,024 outputs, k begins at number 256
        >>> k.head is None
        True
    """

    token: int
    start: int = 0
    head: int | None = None


class DecodeCalls(NamedTuple):
    """One form of decoding calls: which optional arguments of :func:`flash_delta.decode_gated_delta_rule` they give.

    Args:
        write_indices: whether calls give them; [B] and [B, T] make no difference here. Default True.
        num_accepted_tokens: whether calls give it. Default False.
        parent_idx: whether calls give it. Default False.
        convolution, output_norm: whether calls give one. Default False.
        write_pool: whether calls give one. Default False.
        cu_seqlens: whether calls give them. Default False.

    Example:
        >>> from flash_delta.ops.serving import DecodeCalls
        >>> plain, drafts = DecodeCalls(), DecodeCalls(num_accepted_tokens=True)
        >>> plain.write_indices, drafts.parent_idx
        (True, False)
    """

    write_indices: bool = True
    num_accepted_tokens: bool = False
    parent_idx: bool = False
    convolution: bool = False
    output_norm: bool = False
    write_pool: bool = False
    cu_seqlens: bool = False


class PrefillCalls(NamedTuple):
    """One form of prefill calls: which optional arguments of :func:`flash_delta.prefill_gated_delta_rule` they give.

    Args:
        write_indices: whether calls give them. Default True.
        has_initial_state: whether calls give it. Default False.
        checkpoint_indices: whether calls give them, with ``checkpoint_every``. Default False.
        batch_invariant: whether calls set it to True. Default False.
        checkpoint_offsets: whether calls give them, with ``checkpoint_indices`` beside them. Default False.
        convolution, output_norm: whether calls give one. Default False.

    Example:
        >>> from flash_delta.ops.serving import PrefillCalls
        >>> PrefillCalls(has_initial_state=True, batch_invariant=True).checkpoint_indices
        False
    """

    write_indices: bool = True
    has_initial_state: bool = False
    checkpoint_indices: bool = False
    batch_invariant: bool = False
    checkpoint_offsets: bool = False
    convolution: bool = False
    output_norm: bool = False
