"""This library, called in other ways: on a backend that the call names, by fla's layers, or with drafts that leave
records in place of states.

A row with a backend by name shows what the library's own choice costs. A row with fla's layers shows what our own layer
does.
"""

import torch
from torch import Tensor

from flash_delta import decode_gated_delta_rule, decode_kda
from flash_delta.ops.serving import Ring, commit
from flash_delta.testing import Workload, activations
from flash_delta.testing.calls import Call, pool_of, without_state
from workshop.bench.contestants import fla_layer, flash_delta


class ByName:
    """What a contestant's module exports, for one backend."""

    PACKAGE, CACHES = flash_delta.PACKAGE, flash_delta.CACHES

    def __init__(self, backend: str):
        self.backend = backend

    def unsupported(self, workload: Workload, device: torch.device) -> str | None:
        return "it is not compared on decoding" if workload.kind == "decode" else None

    def prepare(self, workload: Workload, x: dict[str, Tensor]) -> Call:
        return flash_delta.prepare(workload, x, self.backend)


class Registered:
    """What a contestant's module exports, for fla's layer after ``register()``."""

    PACKAGE, CACHES = flash_delta.PACKAGE, flash_delta.CACHES

    def unsupported(self, workload: Workload, device: torch.device) -> str | None:
        return fla_layer.unsupported()

    def prepare(self, workload: Workload, x: dict[str, Tensor]) -> Call:
        return fla_layer.prepare(workload, x, registered=True)


class Records:
    """What a contestant's module exports, for drafts that leave records. A server's call first applies the records
    that were accepted of the draft before. Here these change nothing, so that results can be compared, and there are as
    many as a draft has tokens."""

    PACKAGE, CACHES = flash_delta.PACKAGE, flash_delta.CACHES

    def unsupported(self, workload: Workload, device: torch.device) -> str | None:
        w = workload
        other = w.kind != "decode" or w.tree or w.around or w.packed or w.hidden
        return "it has drafts of one length" if other else None

    def prepare(self, workload: Workload, x: dict[str, Tensor]) -> Call:
        w, inputs, chosen = workload, without_state(x), activations(workload)
        op = decode_kda if w.member == "kda" else decode_gated_delta_rule
        pool, read, write, states = pool_of(x, 1)
        pages, target = torch.arange(2 * w.N, device=read.device, dtype=torch.int32), write[:, 0].contiguous()
        like = pool.new_empty(2 * w.N, w.T, dtype=torch.float32)
        k, u = (like.new_zeros(*like.shape, *size) for size in ((w.H, w.K), (w.HV, w.V)))
        decay = like.new_ones(*like.shape, *x["g"].shape[2:])
        ring = Ring(k, u, decay, pages[w.N :], pages[: w.N], torch.full_like(read, w.T))
        given = inputs | {"state_pool": pool, "read_indices": read, "write_indices": target, "ring": ring}

        def run() -> tuple[Tensor, Tensor]:
            return op(**given, state_v_first=True, **chosen), states

        def finished(states: Tensor) -> Tensor:
            """The states after the drafts."""
            commit(pool, ring._replace(write=None, read=ring.write), target, state_v_first=True)
            return states

        return Call(run, inputs | {"initial_state": pool}, state_v_first=True, finished=finished)
