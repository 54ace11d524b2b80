"""The chunkwise algorithm over whole sequences, on any device.

Sequences are processed in segments of a few chunks (`layout.py`). So time is linear in T, intermediate results stay in
the cache, and memory is bounded. Inside a segment the stages (`stages.py`) run on all chunks and heads at once. The
backward pass needs only the states at segment starts and the inputs. With ``disable_recompute`` the forward pass also
saves A and the state at every chunk's start.
"""

from functools import lru_cache

import torch
from torch import Tensor

from flash_delta.problem import Inputs, KnownCall, Outputs, Problem
from flash_delta.reference.layout import Layout
from flash_delta.reference.stages import chunk_states, factor, flat, gradients, new_residual, scan, scan_backward
from flash_delta.reference.tokens import GradientWriter, TokenReader, read_states, write_states

# Value heads x chunks of one segment: some 12 MB of float32 intermediates at K = V = 128. With smaller segments, calls
# take more of the time. Larger ones need more memory than the allocator keeps, so each gets new pages.
SEGMENT_TILES = 32


def forward(problem: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    layout = make_layout(problem)
    reader = TokenReader(problem, layout, x)
    final_state = read_states(problem, layout.order, x.initial_state)  # a copy, so that callers may write to it
    S = final_state.unflatten(1, (problem.H, -1))
    o = layout.new_tokens(x.v)
    saved, states = [], [S.new_empty(0, *S.shape[1:], dtype=problem.dtype)]
    for segment in layout.segments(max(1, SEGMENT_TILES // problem.HV)):
        tokens = reader.read(segment)
        factors = factor(tokens, fold=True)
        tokens = tokens._replace(b=None)
        if problem.needs_grad and not problem.disable_recompute:
            saved.append(S[: segment.width].clone())
        S0 = S.new_empty(segment.size, *S.shape[1:]) if problem.writes_states else None
        R, O = new_residual(tokens), torch.empty_like(tokens.v)
        for chunks, live in scan(tokens, factors, segment, S, R):
            torch.bmm(flat(factors.Qg[chunks]), flat(live), out=flat(O[chunks]))
            if problem.writes_states:
                S0[chunks] = live
        flat(O).baddbmm_(flat(factors.Y), flat(R), beta=problem.scale, alpha=problem.scale)  # O = scale (Qg S0 + Y R)
        layout.store(O.flatten(1, 2), segment, o)
        if problem.needs_grad and problem.disable_recompute:
            saved += [S0] if factors.A is None else [S0, factors.A]
        if problem.keep_states:
            states.append(S0.to(problem.dtype))
    states = layout.unpack_chunks(states, problem.B) if problem.keep_states else None
    states = states.mT.contiguous() if problem.keep_states and problem.state_v_first else states
    return Outputs(o, write_states(problem, layout.order, final_state), tuple(saved), states)


def backward(
    problem: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None,
    known: KnownCall | None = None,
) -> Inputs:  # fmt: skip
    """Gradients of ``o`` and ``final_state`` with respect to every input, in the inputs' dtypes.

    ``saved`` is what ``forward`` saved for the same problem. If it is empty (after ``step``), it is computed again.
    """
    saved = list(saved or forward(problem, x).saved)
    layout = make_layout(problem)
    reader = TokenReader(problem, layout, x)
    writer = GradientWriter(reader)
    dS = read_states(problem, layout.order, dfinal).unflatten(1, (problem.H, -1))
    for segment in reversed(layout.segments(max(1, SEGMENT_TILES // problem.HV))):
        tokens = reader.read(segment)
        dO = reader.values(do, segment) * problem.scale
        if problem.disable_recompute:
            A = None if problem.erase is None else saved.pop()
            S0 = saved.pop()
            factors = factor(tokens, A)
            R = tokens.v if factors.Eg is None else tokens.v - factors.Eg @ S0
        else:
            factors = factor(tokens)
            S = saved.pop().clone()  # a copy, since it is advanced in place and a retained graph needs it again
            S0, R = chunk_states(tokens, factors, segment, S)
        dS1, dU = scan_backward(tokens, factors, segment, dO, dS)
        writer.write(segment, tokens, gradients(tokens, factors, S0, R, dO, dS1, dU))
    return writer.finish(write_states(problem, layout.order, dS.flatten(1, 2)))


def make_layout(problem: Problem) -> Layout:
    return _layout(problem.lengths, None if problem.packed else problem.T, problem.chunk_size, problem.device)


_layout = lru_cache(maxsize=8)(Layout)  # the layers of a model need the same one
