"""What the processes of `test_parallel_gpu` do."""

from dataclasses import replace

from parallel_ranks import Heads, LayerSplit, Split, run_all
from rank_groups import join, leave


def work(rank, size, folder, backend, kind, dtype, cases):
    """``cases``: of `run_all`; those of this kind and dtype run. Kinds "model", "weights": parameters are split over
    ranks, in float32 or with bfloat16 weights."""
    device = join(backend, rank, size, folder)
    if kind == "model":
        from training_ranks import sharded_gradients  # the others start without transformers

        found = sharded_gradients(rank, device, dtype)
    elif kind == "weights":
        from training_ranks import MIXERS, WIDE, gradients_in_bfloat16

        found = gradients_in_bfloat16(rank, device, MIXERS[:2], WIDE)
    else:
        found = run_all(device, *of_kind(kind, dtype, *cases))
    leave(found, folder / f"{rank}.pt")


def of_kind(kind, dtype, splits: list[Split], layers: list[LayerSplit], heads: Heads):
    splits = [replace(split, members=(kind,), dtypes=(dtype,)) for split in splits]
    layers = [split for split in layers if (split.layer, split.dtype) == (f"{kind}-wide", dtype)]
    return splits, layers, None, replace(heads, layers={kind: heads.layers[kind]}, dtypes=(dtype,))
