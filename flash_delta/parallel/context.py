"""The object that ops and layers take as ``cp_context``. It describes how a batch is split over the ranks of a
group."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flash_delta.parallel.attention import attend_split
from flash_delta.parallel.borders import Borders
from flash_delta.parallel.delta_rule import LocalRun, delta_rule
from flash_delta.parallel.halo import Halo
from flash_delta.parallel.part import Part
from flash_delta.parallel.tokens import AllTokens
from flash_delta.problem import Inputs


class ContextParallel(Part):
    r"""How one packed row of tokens is split over the ranks of a group, made once per batch::

        context = ContextParallel(mesh["cp"], cu_seqlens=[0, 70_000, 131_072])
        o, _ = chunk_kda(*(context.shard(x) for x in (q, k, v, g, beta)), cp_context=context)
        y = layer(context.shard(hidden_states), cp_context=context)

    Every rank makes the context from the same numbers, on the host. All ranks call the same ops in the same order. If
    one of them needs gradients, all do, and all run the backward pass. A rank may have any number of tokens, also none,
    and a sequence may be on any number of ranks. Each stretch of a sequence on a rank has a row of its own in that
    rank's ``initial_state`` and ``final_state`` (and in a layer's states):

    * The row where a sequence begins reads its initial state. Its other rows do not read theirs, and these get no
      gradient.
    * The row of a final state holds the state after the row's last token. In the row where the sequence ends, this is
      the sequence's final state.

    By default each rank gets one run of tokens, in order. ``fragments`` describe other splits. Softmax attention that
    gathers keys, since ranks do not divide its heads, is balanced if each rank has equal parts of the beginning and of
    the end of a sequence. Trainers split tokens so::

        context = ContextParallel(mesh["cp"], cu_seqlens, fragments=head_tail(cu_seqlens, mesh["cp"].size()))

    For tensors that all ranks share, such as ``A_log`` and the weights of a layer, each rank computes a part of the
    gradient. The sum of these parts is the gradient, as with data parallelism. FSDP2 and DDP take the mean instead of
    the sum, so with them multiply the loss by the number of ranks. For each row that continues in another one, ranks
    exchange ``HV K (K + V)`` numbers forward and ``HV K V`` backward, and the last inputs of a layer's convolutions.
    This does not depend on the number of tokens, and no call waits for the device. A captured CUDA graph is for the
    same bounds; :class:`DeviceContextParallel` is for others, too.

    Args:
        group: a process group, or a `DeviceMesh` of one dimension (``mesh["cp"]``).
        cu_seqlens: the bounds ``[N + 1]`` of all sequences in the whole row, on the host. They start at 0 and do not
            decrease.
        tokens_per_rank: how many tokens each rank of the group holds. The total is at least ``cu_seqlens[-1]``, and
            tokens after that are padding. Default: ``cu_seqlens[-1]`` split evenly; the first ranks may have one more.
        fragments: instead of tokens_per_rank: the stretches ``(start, stop)`` of the row that each rank holds, in the
            order of the row. :func:`~flash_delta.parallel.head_tail` makes them. Together they cover the row. Default
            None.

    Attributes:
        rank: this rank's place in the group.
        size: the number of ranks.
        tokens: how many tokens this rank holds.
        sequences: for each row of this rank, which of the N sequences it belongs to. An empty sequence has one row.
        bounds: the rows' bounds, counted from this rank's first token.
        continued: for each row, whether its sequence began in an earlier row.
        continues: for each row, whether its sequence continues in a later row.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from flash_delta import chunk_delta_rule
        >>> from flash_delta.parallel import ContextParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun does this for many
        >>> context = ContextParallel(dist.group.WORLD, cu_seqlens=[0, 40, 100])
        >>> x, beta = (context.shard(t) for t in (torch.randn(1, 100, 2, 16), torch.rand(1, 100, 2)))
        >>> o, _ = chunk_delta_rule(x, x, x, beta, use_qk_l2norm_in_kernel=True, cp_context=context)
        >>> o.shape  # this rank's tokens
        torch.Size([1, 100, 2, 16])
        >>> dist.destroy_process_group()
    """

    def gather_tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tokens of the whole row along ``dim``, in order. ``x`` has this rank's tokens. The gradient of ``x`` is
        the sum of the gradients on all ranks."""
        return AllTokens.apply(self, dim, x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Called by softmax attention; see `flash_delta.parallel.attention`."""
        return attend_split(self, q, k, v, **options)

    def times(self, n: int) -> "ContextParallel":
        """Called by ops with n updates per token, for which it is the split of n times as many tokens."""
        if n == 1:
            return self
        if n not in self._multiples:
            bounds, held = self.split.cu_seqlens, self.split.fragments
            fragments = [[(n * start, n * stop) for start, stop in of_rank] for of_rank in held]
            self._multiples[n] = ContextParallel(self.group, [n * bound for bound in bounds], fragments=fragments)
        return self._multiples[n]

    def delta_rule(self, run: LocalRun, x: Inputs) -> tuple[Tensor, Tensor]:
        """Called by chunk ops; see `flash_delta.parallel.delta_rule`."""
        return delta_rule(self, run, x)

    def halo(self, xs: Sequence[Tensor], states: Sequence[Tensor] | None, size: int) -> Halo:
        """Called by layers before their convolutions; see `flash_delta.parallel.halo`."""
        if size not in self._borders:
            self._borders[size] = Borders(self, size) if self.split.most_continuing else None
        return Halo(self, self._borders[size], xs, states, size)
