"""What ``flash-delta check`` runs: every named case of every op, and large problems for faults that only they show."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flash_delta import erase_norm, explain
from flash_delta.testing.accuracy import allowed, infer, run
from flash_delta.testing.cases import MEMBERS, Case
from flash_delta.testing.inputs import make_inputs
from flash_delta.testing.large import judge, output_gradient, run_workload
from flash_delta.testing.rule import Standard
from flash_delta.testing.workload import Workload, make_tensors

REPEATS = 100


class Cell(NamedTuple):
    """One output or gradient of one op on one case."""

    op: str
    dtype: str
    case: str
    tensor: str
    error: float  # relative L2 against float64 (rule.py); in the case "repeats", how many repeats differed
    allowed: float
    # The torch backend's error with products in the dtype, if another backend is judged. In a hard case the error of
    # rounding q and k.
    reference: float | None = None

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Stress:
    """A large problem, for faults of grids, offsets and schedules."""

    name: str
    why: str
    workload: Workload
    repeats: int = 1


def _stress(member: str) -> list[Stress]:
    heads = (16, 32) if member == "gdn" else (16, 16)
    return [
        Stress("repeats", "grids of several waves: equal inputs, bitwise equal results",
               Workload("stress", "training", member, *heads, 8, 520), REPEATS),
        Stress("over 1,024 blocks", "more blocks than a grid's dimension may have in some launches",
               Workload("stress", "training", member, *heads, 8, 1100)),
        Stress("over 2^31 elements", "offsets of q, k, v, o and their gradients pass 32 bits",
               Workload("stress", "training", member, 16, 16, 130, 8192, packed=False, states=False)),
    ]  # fmt: skip


STRESS = [row for member in ("gdn", "kda") for row in _stress(member)]


class Judge:
    """Judges one backend (None: the one that the library chooses) on one device."""

    def __init__(self, device: torch.device, backend: str | None):
        self.device, self.backend = device, backend

    def case(self, name: str, case: Case, dtype: str) -> list[Cell]:
        """Compares every output and gradient of ``MEMBERS[name]`` with float64, by the rule. It also compares
        outputs of calls without gradients, which may run other kernels. One such call comes before the call with
        gradients and one after it. They must not differ."""
        member, torch_dtype = MEMBERS[name], getattr(torch, dtype)
        inputs = make_inputs(case, member, torch_dtype, self.device)
        kernels = explain(member.op, **inputs, backend=self.backend).backend != "torch"
        standard, inferred = Standard(case, member, inputs, kernels), infer(member, inputs, self.backend)
        got = {} if case.forward_only else run(member, inputs, self.backend)
        for tensor, value in infer(member, inputs, self.backend).items():
            same = torch.equal(value, inferred[tensor])
            got[f"inferred {tensor}"] = value if same else torch.full_like(value, torch.nan)
        cells = []
        for tensor, value in got.items():
            of = tensor.removeprefix("inferred ")
            limits = standard.allowed[of], standard.reference.get(of)
            cells.append(Cell(name, dtype, case.name, tensor, standard.error(of, value), *limits))
        return cells

    def stress(self, stress: Stress) -> list[Cell]:
        w = stress.workload
        x = make_tensors(w, self.device)
        do = output_gradient(x)
        first = run_workload(w, x, do, self.backend)
        if stress.repeats > 1:
            differing = dict.fromkeys(first, 0)
            for _ in range(stress.repeats - 1):
                for tensor, value in run_workload(w, x, do, self.backend).items():
                    differing[tensor] += not torch.equal(value, first[tensor])
            return [Cell(w.member, w.dtype, stress.name, tensor, n, 0) for tensor, n in differing.items()]
        dtype = getattr(torch, w.dtype)
        return [
            Cell(w.member, w.dtype, stress.name, tensor, error, allowed(reference, dtype), reference)
            for tensor, (error, reference) in judge(w, x, first).items()
        ]


@torch.no_grad()
def growth(case: Case) -> tuple[float, float]:
    """By how much one token's erase can stretch a state of GDN-2 in a case, and by how much all erases do."""
    member = MEMBERS["gdn2"]
    x = make_inputs(case, member, torch.float64)
    state = infer(member, x | {"w": torch.zeros_like(x["w"])}, "torch")["final_state"]
    return float(erase_norm(x["k"], x["b"]).max()), float(state.norm() / x["initial_state"].norm())
