"""One rank's part of a row, and what ranks of its group send each other."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_delta.parallel.split import Fragment, Fragments, Split


class Part:
    """The base of `ContextParallel`, where its arguments and attributes are described."""

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh,
        cu_seqlens: Tensor | Sequence[int],
        tokens_per_rank: Sequence[int] | None = None,
        fragments: Sequence[Sequence[Fragment]] | None = None,
    ) -> None:
        self._join(group)
        bounds = host_bounds(cu_seqlens)
        if fragments is None:
            fragments = runs(_shares(tokens_per_rank, self.size, bounds[-1]))
        elif tokens_per_rank is not None:
            raise ValueError("tokens_per_rank: expected None with fragments, which say it, got numbers")
        else:
            check_fragments(fragments, self.size, bounds[-1])
        self._hold(Split(bounds, fragments))
        self.rows = self.split.rows[self.rank]
        self.bounds = self.split.bounds(self.rank)
        self.sequences = tuple(piece.sequence for piece in self.rows)
        self.continued = tuple(piece.continued for piece in self.rows)
        self.continues = tuple(self.split.continues(piece) for piece in self.rows)
        self._on_device: dict[tuple, Tensor] = {}
        self._borders: dict[int, Any] = {}  # borders of convolutions, by the number of taps

    def _join(self, group: dist.ProcessGroup | DeviceMesh) -> None:
        self.group = _process_group(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("group: expected a group that this process belongs to, got one without it")

    def _hold(self, split: Fragments) -> None:
        self.split, self.tokens = split, split.tokens(self.rank)
        self._multiples: dict[int, Any] = {}  # of `times`

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of ``x``, which has the whole row's tokens along ``dim``. With one fragment, it is a
        view."""
        total = self.split.total
        if x.shape[dim] != total:
            raise ValueError(
                f"x: expected {total} tokens, those of all ranks, in axis {dim}, got shape {list(x.shape)}"
            )
        parts = [x.narrow(dim, start, stop - start) for start, stop in self.split.fragments[self.rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def local_bounds(self, device: torch.device) -> Tensor:
        """The bounds of this rank's rows, counted from its first token."""
        return self.place(self.bounds, device)

    def row_bounds(self, device: torch.device) -> Tensor:
        """The bounds [N + 1] of all sequences in the whole row."""
        return self.place(self.split.cu_seqlens, device)

    def padded_bounds(self, device: torch.device) -> tuple[tuple[int, ...] | None, Tensor]:
        """The whole row's bounds on the host, or None, and on the device. Padding counts as one more sequence."""
        total, bounds = self.split.total, self.split.cu_seqlens
        bounds = (*bounds, total) if total > bounds[-1] else bounds
        return bounds, self.place(bounds, device)

    def place(self, numbers: tuple[int, ...], device: torch.device) -> Tensor:
        """Bounds or indices as a tensor on ``device``. They are copied there once, without waiting."""
        if (numbers, device) not in self._on_device:
            self._on_device[numbers, device] = on_device(numbers, device)
        return self._on_device[numbers, device]

    def positions(self, device: torch.device) -> Tensor:
        """Each token's place in its sequence, [1, T]. Padding counts as one more sequence."""
        tokens, bounds = torch.arange(self.split.total, device=device), self.row_bounds(device)
        tokens = self.shard(tokens, dim=0)
        return (tokens - bounds[torch.searchsorted(bounds[1:], tokens, right=True)])[None]

    def check(self, hidden_states: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        """Checks a layer's other arguments."""
        for name, value in (("attention_mask", attention_mask), ("cu_seqlens", cu_seqlens)):
            if value is not None:
                raise ValueError(f"{name}: expected None with cp_context, which has the bounds, got a tensor")
        if hidden_states.dim() != 3 or hidden_states.shape[:2] != (1, self.tokens):
            expected = f"this rank's tokens [1, {self.tokens}, D]"
            raise ValueError(
                f"hidden_states: expected {expected} with cp_context, got shape {list(hidden_states.shape)}"
            )

    def gather(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        """``x`` of every rank ``[P, ...]``. Call ``wait`` of the second result before reading it."""
        everyones = x.new_empty(self.size, *x.shape)
        work = dist.all_gather(list(everyones), x.contiguous(), group=self.group, async_op=True)
        return everyones, work

    def exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """``sent`` rows of ``x`` go to each rank, one after the other. So many rows come from each."""
        found = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), list(received), list(sent), group=self.group)
        return found


def _process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            got = f"one with the dimensions {group.mesh_dim_names or tuple(group.shape)}"
            raise ValueError(f"group: expected a DeviceMesh of one dimension, such as mesh['cp'], got {got}")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group: expected a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    return group


def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A copy on ``device``, without waiting."""
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def host_bounds(x: Tensor | Sequence[int]) -> tuple[int, ...]:
    """The bounds [N + 1] of a row's sequences, checked."""
    if isinstance(x, Tensor) and x.device.type != "cpu":
        expected = "bounds on the CPU, where the split is planned (DeviceContextParallel takes others)"
        raise ValueError(f"cu_seqlens: expected {expected}, got a tensor on {x.device}")
    bounds = tuple(x.tolist() if isinstance(x, Tensor) else x)
    if not bounds or bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens: expected bounds [N + 1] from 0 on that do not decrease, got {list(bounds)}")
    return bounds


def runs(tokens_per_rank: Sequence[int]) -> list[list[Fragment]]:
    """The fragments of ranks that hold so many tokens each, in order."""
    return [[pair] for pair in pairwise((0, *accumulate(tokens_per_rank)))]


def _shares(tokens_per_rank: Sequence[int] | None, size: int, total: int) -> Sequence[int]:
    if tokens_per_rank is None:
        return [total // size + (rank < total % size) for rank in range(size)]
    if len(tokens_per_rank) != size or any(share < 0 for share in tokens_per_rank) or sum(tokens_per_rank) < total:
        expected = f"{size} numbers of tokens, one per rank, in all at least cu_seqlens[-1] = {total}"
        raise ValueError(f"tokens_per_rank: expected {expected}, got {list(tokens_per_rank)}")
    return tokens_per_rank


def check_fragments(fragments: Sequence[Sequence[Fragment]], size: int, total: int) -> None:
    """Checks that each rank's fragments are in the order of the row, and that all together cover the row."""
    if len(fragments) != size:
        raise ValueError(f"fragments: expected a list for each of {size} ranks, got {len(fragments)}")
    for rank, of_rank in enumerate(fragments):
        if not of_rank or any(a > b for a, b in of_rank) or any(b > c for (_, b), (c, _) in pairwise(of_rank)):
            expected = "at least one pair (start, stop), in the order of the row"
            raise ValueError(f"fragments: expected {expected}, got {list(of_rank)} for rank {rank}")
    end = 0
    for start, stop in sorted(pair for of_rank in fragments for pair in of_rank if pair[0] < pair[1]):
        if start != end:
            raise ValueError(f"fragments: expected every token once, got a fragment from {start} on after {end} tokens")
        end = stop
    if end < total:
        raise ValueError(f"fragments: expected all cu_seqlens[-1] = {total} tokens, got {end}")
