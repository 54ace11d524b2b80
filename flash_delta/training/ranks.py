"""The processes that train together: their meshes, their rows, sums over all ranks, and parameters in parts.

Ranks have two layouts. For the data it is `[rows, context parallel]`: neighbours share the tokens of their rows. For
the parameters it is `[copies, shard]`, under FSDP2: neighbours share one copy, layer by layer. Gradients of all ranks
are summed, since each token belongs to one rank.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from flash_delta.training.batches import Batch
from flash_delta.training.config import Layout

T = TypeVar("T")


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Joins the group that torchrun started, if it did. Yields this process's own device.

    A rank that fails does not tell the others, which may wait for it. torchrun ends them.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield device
        return
    gpu = device.type == "cuda"
    if gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    yield device
    dist.destroy_process_group()


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. A process that was started alone is the only rank."""

    rank: int = 0
    size: int = 1
    row: int = 0  # this rank's row in the data's mesh
    rows: int = 1
    cp: DeviceMesh | None = None  # the ranks with the same rows; None: only this rank
    parameters: DeviceMesh | None = None  # [copies, shard]; None: this rank is alone and has all parameters
    device: torch.device | None = None  # the device for exchanging numbers; None: this rank is alone

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> "Ranks":
        size = dist.get_world_size() if dist.is_initialized() else 1
        shard = size if layout.shard is None else layout.shard
        for name, value in (("context_parallel", layout.context_parallel), ("shard", shard)):
            if size % value:
                raise ValueError(f"{name}: expected a divisor of the number of ranks, {size}, got {value}")
        if size == 1:
            return cls()
        shape = (size // layout.context_parallel, layout.context_parallel)
        data = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp"))
        parameters = init_device_mesh(device.type, (size // shard, shard), mesh_dim_names=("copies", "shard"))
        row, cp = data["dp"].get_local_rank(), data["cp"] if layout.context_parallel > 1 else None
        return cls(dist.get_rank(), size, row, data.size(0), cp, parameters, device)

    @property
    def first(self) -> bool:
        """Whether this rank is the first one, which writes files."""
        return self.rank == 0

    def own(self, batch: Batch) -> Batch:
        """This rank's rows of a batch that has the rows of all ranks."""
        return batch.padded(self.rows).rows(slice(self.row, None, self.rows))

    def sum(self, x: Tensor) -> float:
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> float:
        return self._reduced(x, dist.ReduceOp.MAX)

    def largest(self, value: int) -> int:
        """The largest of all ranks' values. Ranks wait for each other here."""
        return value if self.size == 1 else int(self.max(torch.tensor(value, device=self.device)))

    def first_does(self, act: Callable[[], T]) -> T | None:
        """Runs ``act`` on the first rank and returns its result there. All ranks wait for it, and all raise its error.

        Raises:
            OSError, ValueError: on every rank, if ``act`` does.
        """
        done, errors = None, [None]
        if self.first:
            try:
                done = act()
            except (OSError, ValueError) as error:
                errors = [error]
        if self.size > 1:
            dist.broadcast_object_list(errors, src=0)
        if errors[0] is not None:
            raise errors[0]
        return done

    def _reduced(self, x: Tensor, op: dist.ReduceOp) -> float:
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x, op)
        return x.item()

    def require_same(self, name: str, value: object) -> None:
        """Raises an error on every rank if one rank has another value."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        if any(other != value for other in values):
            raise ValueError(f"{name}: expected the same on all {self.size} ranks, got {values}")

    def distribute(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Splits the parameters so that this rank has its part on its device, and makes gradients means over all ranks.

        A layer is gathered when it is needed. Weights of linear maps are gathered in ``dtype``, since autocast would
        round them anyway. The gates' A_log and dt_bias, norms and convolutions stay in float32. Gradients are summed in
        float32.
        """
        if self.parameters is None:
            return
        whole = self.parameters.size(0) == 1
        mesh = self.parameters["shard"] if whole else self.parameters
        rounded = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for module in (*model.model.layers, model):
            if dtype != torch.float32:
                linear = [m for m in module.modules() if isinstance(m, nn.Linear) and not isinstance(m, FSDPModule)]
                fully_shard(linear, mesh=mesh, mp_policy=rounded)
            fully_shard(module, mesh=mesh)
