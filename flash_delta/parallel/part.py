"""One rank's part of a row, and the group's one collective."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_delta.parallel.split import Split


class Part:
    """What `ContextParallel` says of a rank; its arguments and attributes are described there."""

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh,
        cu_seqlens: Tensor | Sequence[int],
        tokens_per_rank: Sequence[int] | None = None,
    ) -> None:
        self.group = _process_group(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("group: expected a group that this process belongs to, got one without it")
        bounds = _host_bounds(cu_seqlens)
        self.split = Split(bounds, (0, *accumulate(_shares(tokens_per_rank, self.size, bounds[-1]))))
        self.tokens = self.split.tokens(self.rank)
        self.sequences = self.split.rows(self.rank)
        self.bounds = self.split.bounds(self.rank)
        self.continued = self.split.crossed(self.rank)
        self.continues = self.split.crossed(self.rank + 1)
        self.left, self.right = self.split.left(self.rank), self.split.right(self.rank)
        self._on_device: dict[tuple, Tensor] = {}

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of ``x``, which holds the whole row's along ``dim``. A view."""
        total = self.split.starts[-1]
        if x.shape[dim] != total:
            raise ValueError(
                f"x: expected {total} tokens, those of all ranks, in axis {dim}, got shape {list(x.shape)}"
            )
        return x.narrow(dim, self.split.starts[self.rank], self.tokens)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """``bounds`` as a tensor on ``device``."""
        return self.place(self.bounds, device)

    def place(self, bounds: tuple[int, ...], device: torch.device) -> Tensor:
        """Bounds as a tensor on ``device``, copied there once and without waiting."""
        if (bounds, device) not in self._on_device:
            host = torch.tensor(bounds, pin_memory=device.type == "cuda")
            self._on_device[bounds, device] = host.to(device, non_blocking=True)
        return self._on_device[bounds, device]

    def check(self, hidden_states: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        """What a layer's other arguments have to be."""
        for name, value in (("attention_mask", attention_mask), ("cu_seqlens", cu_seqlens)):
            if value is not None:
                raise ValueError(f"{name}: expected None with cp_context, which has the bounds, got a tensor")
        if hidden_states.dim() != 3 or hidden_states.shape[:2] != (1, self.tokens):
            expected = f"this rank's tokens [1, {self.tokens}, D]"
            raise ValueError(
                f"hidden_states: expected {expected} with cp_context, got shape {list(hidden_states.shape)}"
            )

    def gather(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        """``x`` of every rank ``[P, ...]``, to be read when the second result has been waited for."""
        everyones = x.new_empty(self.size, *x.shape)
        work = dist.all_gather(list(everyones), x.contiguous(), group=self.group, async_op=True)
        return everyones, work


def _process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            got = f"one with the dimensions {group.mesh_dim_names or tuple(group.shape)}"
            raise ValueError(f"group: expected a DeviceMesh of one dimension, such as mesh['cp'], got {got}")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group: expected a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    return group


def _host_bounds(x: Tensor | Sequence[int]) -> tuple[int, ...]:
    if isinstance(x, Tensor) and x.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens: expected bounds on the CPU, where the split is planned, got a tensor on {x.device}"
        )
    bounds = tuple(x.tolist() if isinstance(x, Tensor) else x)
    if not bounds or bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens: expected bounds [N + 1] from 0 on that do not decrease, got {list(bounds)}")
    return bounds


def _shares(given: Sequence[int] | None, size: int, total: int) -> Sequence[int]:
    if given is None:
        return [total // size + (rank < total % size) for rank in range(size)]
    if len(given) != size or any(share < 0 for share in given) or sum(given) < total:
        expected = f"{size} numbers of tokens, one per rank, in all at least cu_seqlens[-1] = {total}"
        raise ValueError(f"tokens_per_rank: expected {expected}, got {list(given)}")
    return given
