"""fla.ops.cp: one packed row on many ranks, for code that exchanges the inputs of convolutions by itself."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.parallel import ContextParallel, head_tail


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
) -> FLACPContext:
    """Makes a ``cp_context`` for chunk ops and `causal_conv1d`: a row in equal parts, one or two on each rank.

    :class:`flash_delta.parallel.ContextParallel` describes any split, and also works with whole layers.

    Args:
        cu_seqlens: the bounds [N + 1] of all sequences of the whole row. If they are on a GPU, the host waits for them
            unless there are ``cu_seqlens_cpu``.
        group: the ranks.
        conv1d_kernel_size: kept as an attribute, and not used.
        cu_seqlens_cpu: the same bounds on the host.
        use_tf32x3_affine_chain: has to be True.
        layout: "contiguous": rank r has part r. "zigzag": the row has two parts for each of W ranks, and rank r has the
            parts r and 2 W - 1 - r.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if group is None:
        refuse("build_cp_context", "group", "a process group", "None")
    return get_cp_cu_seqlens(
        cu_seqlens, cu_seqlens_cpu, None, None, group, conv1d_kernel_size, use_tf32x3_affine_chain, layout
    )


def get_cp_cu_seqlens(
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    group: dist.ProcessGroup | None = None,
    conv1d_kernel_size: int | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
) -> FLACPContext:
    """:func:`build_cp_context`, also for any rank of any number of ranks. Without a ``group`` no op takes the result.

    Args:
        world_size: the number of ranks, if there is no group.
        rank: this rank, if there is no group.
    """
    op = "get_cp_cu_seqlens"
    if use_tf32x3_affine_chain is not True:
        refuse(op, "use_tf32x3_affine_chain", "True", use_tf32x3_affine_chain)
    if layout not in ("contiguous", "zigzag"):
        refuse(op, "layout", "'contiguous' or 'zigzag'", repr(layout))
    if group is not None:
        own = dist.get_world_size(group), dist.get_rank(group)
        for name, given, of_group in zip(("world_size", "rank"), (world_size, rank), own, strict=True):
            if given not in (None, of_group):
                refuse(op, name, f"None or the group's, {of_group}", given)
        world_size, rank = own
    elif world_size is None or rank is None:
        refuse(op, "group", "a process group, or numbers as world_size and rank", "None")
    if world_size < 1:
        refuse(op, "world_size", "at least 1", world_size)
    if not 0 <= rank < world_size:
        refuse(op, "rank", f"a number from 0 to {world_size - 1}", rank)
    bounds = (cu_seqlens.cpu() if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    if not bounds or bounds[0] != 0 or bounds != sorted(bounds):
        refuse(op, "cu_seqlens", "bounds that start at 0 and do not decrease", bounds)
    zigzag = layout == "zigzag"
    count = 2 * world_size if zigzag else world_size
    if bounds[-1] == 0 or bounds[-1] % count:
        parts = f"{count} parts, two for each rank," if zigzag else f"{count} ranks"
        refuse(op, "cu_seqlens", f"a number of tokens above 0 that {parts} divide", bounds[-1])
    length = bounds[-1] // count
    parts = [_part(bounds, place, length) for place in ((rank, count - 1 - rank) if zigzag else (rank,))]
    fragments = head_tail([0, bounds[-1]], world_size) if zigzag else None
    context = None if group is None else ContextParallel(group, bounds, fragments=fragments)
    return FLACPContext(context, parts, length, cu_seqlens.device, conv1d_kernel_size)


class _Part(NamedTuple):
    bounds: list[int]  # of its pieces of sequences, counted from its first token
    conv_tokens: int  # tokens of its first sequence before it
    before: int  # parts before it that have tokens of its first sequence
    after: int  # parts after it that have tokens of its last sequence


def _part(bounds: list[int], place: int, length: int) -> _Part:
    start, stop = place * length, (place + 1) * length
    inside = {bound - start for bound in bounds if start < bound < stop}
    first, last = max(b for b in bounds if b <= start), min(b for b in bounds if b >= stop)
    return _Part([0, *sorted(inside), length], start - first, place - first // length, (last - 1) // length - place)


class FLACPContext:
    """A rank's part of a row, with the attributes that ops need, and those that trainers read under fla's names.

    :func:`build_cp_context` makes it. With the layout "zigzag" a rank has two parts, front and back. Then the numbers
    of a rank are None, and those with ``_by_part`` are pairs. With the layout "contiguous" it is the other way round.

    Attributes:
        context: the same as a ContextParallel; None without a group.
        group: the ranks, or None; ``is_cp_enabled`` says whether it is there.
        cu_seqlens: the bounds of this rank's parts of sequences, counted from 0, in int32; ``cu_seqlens_cpu`` on the
            host.
        num_seqs: how many parts of sequences the rank has.
        conv1d_kernel_size: as given.
        pre_num_conv_tokens: how many tokens of the first sequence are on earlier ranks.
        pre_num_ranks: how many earlier ranks (parts) have tokens of the first sequence.
        post_num_ranks: how many later ranks (parts) have tokens of the last sequence.
        is_first_rank: whether the first sequence begins here; ``is_first_by_part``.
        is_last_rank: whether the last sequence ends here; ``is_last_by_part``.
        layout: "contiguous" or "zigzag".
        part_len: with "zigzag" the tokens of a part.
        front_num_seqs: with "zigzag" how many parts of sequences the front part has.
    """

    def __init__(
        self,
        context: ContextParallel | None,
        parts: list[NamedTuple],
        length: int,
        device: torch.device,
        conv1d_kernel_size: int | None,
    ) -> None:
        self.context, self.group, self.conv1d_kernel_size = context, None, conv1d_kernel_size
        if context is not None:
            self.group, self.tokens, self.bounds = context.group, context.tokens, context.bounds
            self.local_bounds, self.times, self.delta_rule = context.local_bounds, context.times, context.delta_rule
        bounds = [0, *(i * length + bound for i, part in enumerate(parts) for bound in part.bounds[1:])]
        self.cu_seqlens_cpu = torch.tensor(bounds, dtype=torch.int32, device="cpu")
        self.cu_seqlens = self.cu_seqlens_cpu.to(device, non_blocking=True)
        self.num_seqs = len(bounds) - 1
        self.is_cp_enabled = context is not None
        zigzag = len(parts) == 2
        self.layout, self.part_len = ("zigzag", length) if zigzag else ("contiguous", None)
        self.front_num_seqs = len(parts[0].bounds) - 1 if zigzag else None
        for name, of_parts in {
            "pre_num_conv_tokens": [part.conv_tokens for part in parts],
            "pre_num_ranks": [part.before for part in parts],
            "post_num_ranks": [part.after for part in parts],
            "is_first": [part.before == 0 for part in parts],
            "is_last": [part.after == 0 for part in parts],
        }.items():
            setattr(self, f"{name}_rank" if name.startswith("is_") else name, None if zigzag else of_parts[0])
            setattr(self, f"{name}_by_part", tuple(of_parts) if zigzag else None)

    def copy_for_backward(self) -> FLACPContext:
        """A copy with bounds of its own, for pipelines that overwrite them."""
        other = copy(self)
        other.cu_seqlens, other.cu_seqlens_cpu = self.cu_seqlens.clone(), self.cu_seqlens_cpu.clone()
        return other


def conv_cp_send_recv_fwd(tails: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ``tails`` of the rank before, or zeros on the first rank. All ranks of the group have to call this."""
    return _of_rank(dist.get_rank(group) - 1, tails, group)


def conv_cp_send_recv_bwd(d_initial_state: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The gradient from the rank after for the tails that it got, or zeros on the last rank."""
    return _of_rank(dist.get_rank(group) + 1, d_initial_state, group)


def _of_rank(rank: int, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyones = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather(list(everyones), x.contiguous(), group=group)
    return everyones[rank].clone() if 0 <= rank < len(everyones) else torch.zeros_like(x)
