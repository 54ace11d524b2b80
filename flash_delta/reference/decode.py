"""Serving on the CPU: the recurrence on the slots of a pool, a token of all rows at a time.

A row without a slot goes along like any other, on a state that is somebody else's, and is left out of what is written
and of the output: every call of one batch size computes the same for a row, whatever the others hold.
"""

import torch
from torch import Tensor

from flash_delta.problem import Around, Inputs, Problem, Slots
from flash_delta.reference.around import convolve, normalize
from flash_delta.reference.step import advance


@torch.no_grad()
def decode(problem: Problem, x: Inputs, s: Slots, around: Around) -> Tensor:
    """``o [B, T, HV, V]``; the pools are written in place."""
    B, T, HV, K, V = problem.B, problem.T, problem.HV, problem.K, problem.V
    o = torch.zeros(B, T, HV, V, dtype=problem.dtype, device=problem.device)
    pool = s.state_pool.mT if problem.state_v_first else s.state_pool  # [slots, HV, K, V]
    pools = [pool] if around.conv_pool is None else [pool, around.conv_pool]
    read, live = rows_read(s)
    if not live.any():
        return o
    now = [of[read.where(live, 0)].contiguous() for of in pools]  # what a token goes on from: a state, a window
    write, alive = rows_written(s, live, T)
    before = [now]  # with parents: the row's, and those after every token
    for t in range(T):
        if s.parent_idx is not None:
            now, alive[:, t] = goes_on(s.parent_idx[:, t], before, live, alive[:, :t], alive[:, t])
        S, rows = now[0].to(problem.accumulate), alive[:, t]
        if around.conv_pool is None:
            out = advance(problem, x, t, None, S.view(B * HV, K, V))
        else:
            token, window = convolve(problem, x, t, now[1], around)
            out = advance(problem, token, 0, None, S.view(B * HV, K, V))
        out = out.view(B, HV, V)
        if around.norm_gate is not None:
            out = normalize(problem, out, t, around)
        o[rows, t] = out[rows].to(o.dtype)
        now = [S.to(pool.dtype), *([] if around.conv_pool is None else [window])]
        if write is not None and (t + 1 == T or s.write_indices.dim() == 2):
            for of, after in zip(pools, now, strict=True):
                of[write[rows, t]] = after[rows]
        if s.parent_idx is not None:
            before.append(now)
    return o


def rows_read(s: Slots) -> tuple[Tensor, Tensor]:
    """The slots that rows read ``[B]``, and which of them are any."""
    if s.num_accepted_tokens is None:
        read = s.read_indices.long()
        return read, is_slot(read, s)
    column, W = s.num_accepted_tokens.long() - 1, s.read_indices.shape[1]
    counted = (column >= 0) & (column < W)
    if W == 0:
        return column, counted
    read = s.read_indices.gather(1, column.where(counted, 0).unsqueeze(1)).squeeze(1).long()
    return read, counted & is_slot(read, s)


def rows_written(s: Slots, live: Tensor, T: int) -> tuple[Tensor | None, Tensor]:
    """The slots that tokens write ``[B, T]``, and which tokens are no padding (not yet by their parents)."""
    if s.write_indices is None:
        return None, live.unsqueeze(1).repeat(1, T)
    write = s.write_indices.long()
    write = write if write.dim() == 2 else write.unsqueeze(1).expand(-1, T)
    written = is_slot(write, s)
    if s.parent_idx is None:  # the tokens behind one that is padding are, too
        written = written.cumprod(1).bool()
    return write, written & live.unsqueeze(1)


def goes_on(
    parent: Tensor, known: list[list[Tensor]], live: Tensor, before: Tensor, alive: Tensor
) -> tuple[list[Tensor], Tensor]:
    """What the tokens of one column go on from, and which of the tokens are no padding."""
    parent = parent.long()
    possible = (parent >= -1) & (parent < before.shape[1])
    at = (parent + 1).where(possible, 0)  # among what is known
    rows = torch.arange(len(parent))
    sources = torch.cat([live.unsqueeze(1), before], 1)
    found = [torch.stack(kinds)[at, rows] for kinds in zip(*known, strict=True)]
    return found, alive & possible & sources[rows, at]


def is_slot(index: Tensor, s: Slots) -> Tensor:
    return (index >= 0) & (index < len(s.state_pool))
