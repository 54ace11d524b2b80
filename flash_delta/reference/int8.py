"""States at rest in int8, on the CPU: the definition.

    s = amax / 127, rounded so that q s is exact in float32        q = round(x / s)        y = q s

Numbers that share a scale are a row here. amax is the largest |x| of a row.
"""

import torch
from torch import Tensor

from flash_delta.problem import Int8Problem, KnownCall, Resting
from flash_delta.reference.slots import Use, refuse_shared

MOST = 127
SMALLEST = torch.finfo(torch.float32).smallest_normal  # of scales except 0


def round_to_int8(x: Tensor, axis: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns q, and the scales in ``dtype``. Numbers along ``axis`` share one.

    q has 7 bits without its sign. A scale in float32 has 17 bits, and one in bfloat16 has 8. So q s is exact.

    * float32: clearing the last 7 bits of amax / 127 makes it smaller by less than a part in 2^16. So amax / s is from
      127 to 127.002.
    * bfloat16: rounding to nearest changes amax / 127 by at most a part in 2^8. So amax / s is from 126.504 to 127.497.

    Either way the largest |q| of a row is exactly 127. If y is rounded again, its amax is 127 s, and so the scale and
    all q are the same. The smallest normal number is the least scale. Rows whose numbers would all be rounded to 0 have
    the scale 0. Rows with NaN or infinity have the scale NaN.
    """
    x = x.float()
    amax = x.abs().amax(axis, keepdim=True)
    finite = amax.isfinite()
    s = (amax / MOST).clamp(min=SMALLEST)
    s = (s.view(torch.int32) & -128).view(torch.float32) if dtype == torch.float32 else s.to(dtype)
    s = s.where(amax > SMALLEST / 2, 0).where(finite, torch.nan)
    inverse = 1 / s.float().where(s > 0, 1)
    return (x.where(finite, 0) * inverse).round().to(torch.int8), s


def restore(q: Tensor, s: Tensor) -> Tensor:
    """The states in float32."""
    return q.float() * s.float()


@torch.no_grad()
def move_states(problem: Int8Problem, x: Resting, known: KnownCall | None = None) -> None:
    """Rounds states of the pool to int8, or restores them."""
    read, write = _slots(problem, x)
    if problem.restores:
        x.state_pool[:, write] = restore(x.states[:, read], x.scale[:, read]).to(x.state_pool.dtype)
    else:
        x.states[:, write], x.scale[:, write] = round_to_int8(x.state_pool[:, read], problem.axis, x.scale.dtype)


def _slots(problem: Int8Problem, x: Resting) -> tuple[Tensor, Tensor]:
    """The slots that rows read, and those that they write. Raises ValueError if a slot is written twice."""
    source, target = (x.states, x.state_pool) if problem.restores else (x.state_pool, x.states)
    pairs = zip(x.read_indices.tolist(), x.write_indices.tolist(), strict=True)
    limits, null = (source.shape[1], target.shape[1]), problem.null_slot
    live = {
        b: pair for b, pair in enumerate(pairs)
        if all(0 <= slot < limit and slot != null for slot, limit in zip(pair, limits, strict=True))
    }  # fmt: skip
    refuse_shared(problem.op, [Use(b, None, [(write, "write_indices")]) for b, (_, write) in live.items()])
    found = torch.tensor(list(live.values()), dtype=torch.long).view(-1, 2)
    return found[:, 0], found[:, 1]
