"""Windows of text for a training step: which rank gets which, where sequences begin, and the loss of their tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers.modeling_outputs import CausalLMOutputWithPast

from flash_delta.parallel import ContextParallel, head_tail

IGNORED = -100  # no target; the default of cross_entropy


@dataclass(frozen=True)
class Windows(Dataset):
    """Windows of tokens in the order in which ranks and passes take them, so that a step is the same for any layout.

    A pass of a rank takes ``rows`` windows one after the other, and the next ranks take the next ones. If ranks share
    the tokens of their windows, the ``sharers`` neighbours get the same windows.
    """

    text: Tensor  # [N] tokens
    begins: Tensor | None  # [N] where documents begin; None: every window is one sequence
    seq_len: int
    start: Callable[[int], int | None]  # where the n-th window begins; None: a row that has no targets
    count: int  # of different windows, a multiple of rows and of the ranks that have rows of their own
    rows: int
    sharers: int = 1

    def __len__(self) -> int:
        return self.count * self.sharers

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        """A window's tokens, its targets (the next tokens; IGNORED where a sequence ends) and where sequences begin."""
        block, row = divmod(n, self.rows)
        start = self.start(block // self.sharers * self.rows + row)
        place = slice(start or 0, (start or 0) + self.seq_len)
        tokens = self.text[place].long()
        begins = torch.zeros_like(tokens) if self.begins is None else self.begins[place]
        begins = begins.bool().index_fill(0, torch.tensor([0]), True)
        ends = F.pad(begins[1:], (0, 1), value=True) if start is not None else torch.ones_like(begins)
        return {"tokens": tokens, "targets": tokens.roll(-1).masked_fill(ends, IGNORED), "begins": begins}


@dataclass(frozen=True)
class Collator:
    """Makes a batch of windows: rows, or one packed row, or this rank's part of one packed row.

    ``labels`` are the targets behind a column that is IGNORED: Trainer leaves the first column out when it counts.
    """

    packed: bool
    sharers: DeviceMesh | None = None  # the ranks that share the row's tokens; None: this rank has all of them
    head_tail: bool = False  # how they do: `head_tail` of the whole row, or a contiguous run each

    def __call__(self, windows: list[dict[str, Tensor]]) -> dict[str, Any]:
        tokens, targets, begins = (torch.stack([w[name] for w in windows]) for name in ("tokens", "targets", "begins"))
        where: dict[str, Any] = {}
        if self.packed or self.sharers is not None:
            tokens, targets, begins = (x.reshape(1, -1) for x in (tokens, targets, begins))
            bounds = [*begins[0].nonzero()[:, 0].tolist(), begins.numel()]
            if self.sharers is None:
                where["cu_seqlens"] = torch.tensor(bounds)
            else:
                fragments = head_tail([0, bounds[-1]], self.sharers.size()) if self.head_tail else None
                where["cp_context"] = context = ContextParallel(self.sharers, bounds, fragments=fragments)
                tokens, targets = context.shard(tokens), context.shard(targets)
        return {"input_ids": tokens, "labels": F.pad(targets, (1, 0), value=IGNORED), **where}


def sum_of_nats(outputs: CausalLMOutputWithPast, labels: Tensor) -> Tensor:
    """The sum of -ln p over the targets of a batch that `Collator` made."""
    logits = outputs["logits"]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def mean_of_nats(outputs: CausalLMOutputWithPast, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """A pass's part of the mean over all targets of a step."""
    return sum_of_nats(outputs, labels) / num_items_in_batch
