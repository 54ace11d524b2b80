"""verl's forward pass on one rank's part of a row: ``python verl_ranks.py RANK RANKS FOLDER`` writes what it got."""

import sys
from importlib import import_module
from pathlib import Path

import doors
import pytest
import torch
import torch.distributed as dist
import trained_layers
from stand_ins import bare, stand_in


def patch() -> None:
    """verl's forward pass in the place of transformers'."""
    doors.enter()
    stand_in("omegaconf")
    bare("verl", "verl.models")
    forward = import_module("verl.models.transformers.qwen3_5").qwen3_5_gated_delta_net_forward
    trained_layers.modelling().Qwen3_5GatedDeltaNet.forward = forward


def main(rank: int, ranks: int, folder: Path) -> None:
    trained_layers.pretend_gpu(pytest.MonkeyPatch())
    patch()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    import_module("verl.utils.ulysses").set_ulysses_sequence_parallel_group(dist.group.WORLD)
    bounds = torch.tensor(trained_layers.BOUNDS)
    own = slice(rank * trained_layers.BOUNDS[-1] // ranks, (rank + 1) * trained_layers.BOUNDS[-1] // ranks)
    found = trained_layers.train(trained_layers.build(), "packed", own, cu_seqlens=bounds, cu_seqlens_cpu=bounds)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
