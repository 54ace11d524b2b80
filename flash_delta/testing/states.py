"""How large the states of a model's layers get on a text, and what fewer bits cost there.

Decoding rounds a state to its pool's dtype after every token. So the same is done here, with the q, k, v and gates that
the model itself has computed. A state at rest in int8, such as that of a cached prompt, is rounded once: before the
outputs that are compared. The truth is the same recurrence in float64.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flash_delta.reference.elementwise import restore, round_to_int8
from flash_delta.reference.step import activated, advance
from flash_delta.testing.accuracy import relative_error
from flash_delta.testing.machine import machine
from flash_delta.testing.recorder import Call, recording

POOLS = ("float32", "bfloat16", "float16")  # dtypes that a pool can have
AT_REST = "int8 at rest"  # and then a float32 pool, with a scale per key channel in float32
HALF = torch.finfo(torch.float16)
LAST = 512  # tokens whose outputs are compared, or the second half of a shorter text


@dataclass(frozen=True)
class LayerStates:
    """The states ``S`` of a layer, and the relative L2 error of its last outputs by how states are kept."""

    layer: str
    op: str
    largest: float  # |S| over all tokens, heads and channels
    typical: float  # the root of the mean square of the last state: of all heads,
    smallest: float  # and of the head where it is smallest
    subnormal: float  # the part of the last state's numbers that is not 0 and below the normal numbers of float16
    errors: dict[str, float]  # by the dtype of a pool, and at rest

    @property
    def ratio(self) -> float:
        """The error of a float16 pool, as a multiple of that of a bfloat16 pool."""
        return self.errors["float16"] / (self.errors["bfloat16"] + 1e-30)

    @property
    def fits_half(self) -> bool:
        """Whether float16 holds all states, and costs no more than bfloat16."""
        return self.largest <= HALF.max and self.errors["float16"] <= self.errors["bfloat16"]


@torch.no_grad()
def measure_states(model: nn.Module, tokens: Tensor) -> list[LayerStates]:
    """Lets the model read tokens [T], and follows the states of each layer.

    Raises:
        ValueError: if no layer calls an op of this library that may choose its backend.
    """
    with recording(model.eval()) as calls:
        model(input_ids=tokens[None].to(next(model.parameters()).device), use_cache=False)
        found = list(calls)
    if not found:
        got = f"a {type(model).__name__} whose layers make no such call"
        raise ValueError(f"model: expected layers that call this library's ops and name no backend, got {got}")
    return [_measure(call) for call in found]


def _measure(call: Call) -> LayerStates:
    truth, S, largest = _follow(call, torch.float64)
    size = S.square().mean((1, 2)).sqrt()  # [HV]
    low = (S != 0) & (S.abs() < HALF.smallest_normal)
    errors = {name: relative_error(_follow(call, getattr(torch, name))[0], truth) for name in POOLS}
    errors[AT_REST] = relative_error(_follow(call, torch.float32, rests=True)[0], truth)
    return LayerStates(
        call.layer, call.problem.op, largest, float(size.square().mean().sqrt()), float(size.min()),
        float(low.double().mean()), errors,
    )  # fmt: skip


def _follow(call: Call, pool: torch.dtype, rests: bool = False) -> tuple[Tensor, Tensor, float]:
    """The last outputs, the last state [HV, K, V], and the largest |S|, if states are kept in this dtype between
    tokens. ``rests``: before the last outputs the state is kept in int8 once."""
    problem = call.problem._replace(dtype=torch.promote_types(pool, torch.float32))
    S = torch.zeros(problem.HV, problem.K, problem.V, dtype=problem.accumulate, device=problem.device)
    first, largest, outputs = max(problem.T - LAST, problem.T // 2), S.new_zeros(()), []
    for t in range(problem.T):
        if rests and t == first:
            S.copy_(restore(*round_to_int8(S, -1, torch.float32)))
        o = advance(problem, activated(problem, call.x, t), S, S)
        largest = torch.maximum(largest, S.abs().max())
        S.copy_(S.to(pool))
        if t >= first:
            outputs.append(o)
    return torch.cat(outputs), S, float(largest)


def write_states(path: Path, model: str, tokens: int, layers: Sequence[LayerStates], device: torch.device) -> None:
    found = {"machine": machine(device), "model": model, "tokens": tokens, "layers": list(map(asdict, layers))}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
