"""A ``cp_context`` whose bounds are on the device, for CUDA graphs."""

from collections.abc import Sequence
from copy import copy
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_delta.parallel.context import ContextParallel
from flash_delta.parallel.cut import cut_row
from flash_delta.parallel.delta_rule import LocalRun
from flash_delta.parallel.device_borders import DeviceBorders
from flash_delta.parallel.device_rule import delta_rule_on_device
from flash_delta.parallel.halo import Halo
from flash_delta.parallel.part import host_bounds, on_device, runs
from flash_delta.parallel.split import Fragments
from flash_delta.problem import Inputs


class DeviceContextParallel(ContextParallel):
    r"""A :class:`ContextParallel` whose bounds are on the device and may change between steps::

        context = DeviceContextParallel(mesh["cp"], cu_seqlens, tokens_per_rank=[65_536, 65_536])
        with torch.cuda.graph(graph):  # after a warm-up, as PyTorch describes
            y = layer(context.shard(hidden_states), cp_context=context)
            ...
        context.write(other_bounds)
        graph.replay()

    Ops and layers take it in the place of a `ContextParallel`, and compute the same. Nothing that they do depends on
    bounds that the host has read. Every rank holds one run of tokens, in order. It has a row for each of the N
    sequences in ``initial_state`` and ``final_state`` (and in a layer's states):

    * A row reads its initial state if its sequence begins on this rank (`begins`). Other rows do not read theirs, and
      these get no gradient.
    * A final state is the state after the row's last token. If the sequence ends on this rank (`ends`), this is its
      final state. A row without tokens holds zeros, unless it is an empty sequence that begins here.

    Where there are fewer sequences than N, repeat the last bound. Ranks exchange the same numbers as with a
    `ContextParallel` whose sequences cross every border. A rank between others runs an op three times forward, the
    first rank once, and the last one twice (once without gradients). If the host knows the bounds of every step, a
    `ContextParallel` computes less.

    Args:
        group: a process group, or a `DeviceMesh` of one dimension (``mesh["cp"]``).
        cu_seqlens: the bounds ``[N + 1]`` of all sequences in the whole row, int32 or int64, on the device of the
            tokens. They are copied. Tokens after ``cu_seqlens[-1]`` are padding.
        tokens_per_rank: how many tokens each rank of the group holds, padding included. They stay the same.

    Attributes:
        rank: this rank's place in the group.
        size: the number of ranks.
        tokens: how many tokens this rank holds.
        sequences: for each row of this rank, which of the N sequences it belongs to: all of them, in order.
        begins: marks ``[N]`` on the device: the sequences that begin on this rank. An empty sequence begins and ends
            on the rank that holds the token at its place, or on the last rank with tokens.
        ends: marks ``[N]`` on the device: the sequences that end on this rank.
        bounds: None, because only the device has them.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from flash_delta import chunk_delta_rule
        >>> from flash_delta.parallel import DeviceContextParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun does this for many
        >>> context = DeviceContextParallel(dist.group.WORLD, torch.tensor([0, 40, 100]), tokens_per_rank=[100])
        >>> x, beta = (context.shard(t) for t in (torch.randn(1, 100, 2, 16), torch.rand(1, 100, 2)))
        >>> context.write(torch.tensor([0, 90, 100]))
        >>> o, _ = chunk_delta_rule(x, x, x, beta, use_qk_l2norm_in_kernel=True, cp_context=context)
        >>> o.shape  # this rank's tokens
        torch.Size([1, 100, 2, 16])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh, cu_seqlens: Tensor, tokens_per_rank: Sequence[int]
    ) -> None:
        self._join(group)
        if len(tokens_per_rank) != self.size or any(share < 0 for share in tokens_per_rank) or not sum(tokens_per_rank):
            expected = f"{self.size} numbers of tokens, one per rank, in all at least 1"
            raise ValueError(f"tokens_per_rank: expected {expected}, got {list(tokens_per_rank)}")
        self._hold(Fragments(runs(tokens_per_rank)))
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            got = f"shape {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            raise ValueError(f"cu_seqlens: expected a tensor [N + 1] of at least one sequence, got {got}")
        self.bounds, self.sequences = None, tuple(range(len(cu_seqlens) - 1))
        self._starts = on_device((0, *accumulate(tokens_per_rank)), cu_seqlens.device)
        self.cut = cut_row(self._checked(cu_seqlens), self._starts, self.rank)

    @property
    def begins(self) -> Tensor:
        return self.cut.begins

    @property
    def ends(self) -> Tensor:
        return self.cut.ends

    def write(self, cu_seqlens: Tensor) -> None:
        """Replaces the bounds, in place. Every rank writes the same numbers. If they are written between a forward pass
        and its backward pass, the latter raises an error.

        Args:
            cu_seqlens: other bounds of as many sequences, on the context's device or on the host. Those on a GPU are
                not checked: bounds that decrease or leave the row are moved into it.

        Raises:
            ValueError: naming the argument, what was expected and what came.
        """
        for old, new in zip(self.cut, cut_row(self._checked(cu_seqlens), self._starts, self.rank), strict=True):
            old.copy_(new)
        for n, other in self._multiples.items():
            other.write(n * self.cut.row)

    def _checked(self, cu_seqlens: Tensor) -> Tensor:
        """The bounds on the context's device. Their values are checked if they are on the host."""
        N, device, total = len(self.sequences), self._starts.device, self.split.total
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(f"cu_seqlens: expected a tensor [{N + 1}], got a {type(cu_seqlens).__name__}")
        if cu_seqlens.shape != (N + 1,) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            raise ValueError(f"cu_seqlens: expected int32 or int64 bounds [{N + 1}], got {got}")
        if cu_seqlens.device not in (device, torch.device("cpu")):
            raise ValueError(f"cu_seqlens: expected bounds on {device} or the host, got some on {cu_seqlens.device}")
        if cu_seqlens.device.type != "cpu":
            return cu_seqlens
        bounds = host_bounds(cu_seqlens)
        if bounds[-1] > total:
            raise ValueError(f"cu_seqlens: expected bounds up to {total}, the tokens of all ranks, got {bounds[-1]}")
        return on_device(bounds, device)

    def local_bounds(self, device: torch.device) -> Tensor:
        return _on(self.cut.bounds, device)

    def row_bounds(self, device: torch.device) -> Tensor:
        return _on(self.cut.row, device)

    def padded_bounds(self, device: torch.device) -> tuple[None, Tensor]:
        return None, _on(self.cut.padded, device)

    def times(self, n: int) -> "DeviceContextParallel":
        if n == 1:
            return self
        if n not in self._multiples:
            self._multiples[n] = other = copy(self)
            other._hold(Fragments(runs([n * self.split.tokens(rank) for rank in range(self.size)])))
            other._starts = n * self._starts
            other.cut = cut_row(n * self.cut.row, other._starts, self.rank)
        return self._multiples[n]

    def delta_rule(self, run: LocalRun, x: Inputs) -> tuple[Tensor, Tensor]:
        return delta_rule_on_device(self, self.cut, run, x)

    def halo(self, xs: Sequence[Tensor], states: Sequence[Tensor] | None, size: int) -> Halo:
        borders = DeviceBorders(self, self.cut, size) if self.size > 1 else None
        return Halo(self, borders, xs, states, size)


def _on(bounds: Tensor, device: torch.device) -> Tensor:
    """The bounds, if they are on the device of the tokens."""
    if bounds.device != device:
        raise ValueError(f"cp_context: expected bounds on {device} like the tokens, got some on {bounds.device}")
    return bounds
