"""The chunkwise algorithm over whole sequences; also the ``torch`` backend, on any device.

Sequences are worked off in segments of a few chunks (`layout.py`), so that time is linear in T, intermediates stay in
the cache and memory in use is bounded; inside a segment the stages (`stages.py`) run on all its chunks and heads at
once. The states at segment starts are all that the backward pass needs besides the inputs; with ``disable_recompute``
it keeps A and the state at every chunk's start as well.
"""

from functools import lru_cache

import torch
from torch import Tensor

from flash_delta.problem import Inputs, Outputs, Problem
from flash_delta.reference.activation import (
    l2norm,
    l2norm_backward,
    log_decay,
    log_decay_backward,
    strength,
    strength_backward,
)
from flash_delta.reference.layout import Layout, Segment
from flash_delta.reference.stages import (
    TokenGradients,
    Tokens,
    factor,
    gradients,
    output,
    scan,
    scan_backward,
    shift,
    times,
)

# Value heads x chunks of one segment: about 25 MB of float32 intermediates at K = V = 128. See docs/benchmarks.md.
SEGMENT_TILES = 64
# e^-1024 is 0 in every dtype, so that the clamp changes no result; it makes a gate of -inf safe to add and subtract.
LOG_ZERO = -1024.0
PER_TOKEN = ("q", "k", "v", "g", "beta", "p")


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.lengths is None:
        return f"it plans packed sequences on the host and cu_seqlens is on {problem.device}: give cu_seqlens_cpu too"
    return None


def forward(problem: Problem, x: Inputs) -> Outputs:
    layout = make_layout(problem, problem.chunk_size)
    S = load_states(problem, layout, x.initial_state)
    o = layout.new_tokens(x.v)
    saved, states = [], []
    for segment in layout.segments(max(1, SEGMENT_TILES // problem.HV)):
        tokens = load_tokens(problem, layout, segment, x)
        factors = factor(tokens)
        if problem.needs_grad and not problem.disable_recompute:
            saved.append(S[: segment.width].clone())
        S0, R = scan(tokens, factors, segment, S)
        layout.store(output(tokens, factors, S0, R, problem.scale), segment, o)
        if problem.needs_grad and problem.disable_recompute:
            saved += [S0] if factors.A is None else [S0, factors.A]
        if problem.keep_states:
            states.append(S0.to(problem.dtype))
    states = layout.unpack_chunks(states, problem.B) if problem.keep_states else None
    return Outputs(o, store_states(problem, layout, S), tuple(saved), states)


def backward(problem: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None) -> Inputs:
    """Gradients of ``o`` and ``final_state`` with respect to every input, in the inputs' dtypes.

    ``saved`` is what ``forward`` saved for the same problem; empty (after ``step``) it is computed again.
    """
    saved = saved or forward(problem, x).saved
    layout = make_layout(problem, problem.chunk_size)
    grads = Gradients(problem, layout, x)
    dS = load_states(problem, layout, dfinal)
    saved = list(saved)
    for segment in reversed(layout.segments(max(1, SEGMENT_TILES // problem.HV))):
        tokens = load_tokens(problem, layout, segment, x)
        dO = load_values(problem, layout, segment, do).mul_(problem.scale)
        if problem.disable_recompute:
            A = None if problem.erase is None else saved.pop()
            S0 = saved.pop()
            factors = factor(tokens, A)
            R = tokens.v if factors.Eg is None else tokens.v - factors.Eg @ S0
        else:
            factors = factor(tokens)
            S0, R = scan(tokens, factors, segment, saved.pop())
        dS1, dU = scan_backward(tokens, factors, segment, dO, dS)
        grads.store(segment, tokens, gradients(tokens, factors, S0, R, dO, dS1, dU))
    return grads.finish(dS)


class Gradients:
    """The gradients of a call's inputs, filled segment by segment; undoes the activations of ``load_tokens``."""

    def __init__(self, problem: Problem, layout: Layout, x: Inputs):
        self.problem, self.layout, self.x = problem, layout, x
        self.tokens = {n: layout.new_tokens(t) for n, t in x._asdict().items() if t is not None and n in PER_TOKEN}
        rate, bias = gate_parameters(problem, x)
        self.dA_log = None if rate is None else torch.zeros_like(rate)
        self.ddt_bias = None if bias is None else torch.zeros_like(bias)

    def store(self, segment: Segment, t: Tokens, d: TokenGradients) -> None:
        problem, x = self.problem, self.x
        dk = d.dk if d.dp is None or x.p is not None else d.dk + d.dp  # without erase keys of its own, p is k
        keys = [("q", t.q, d.dq), ("k", t.k, dk)] + ([("p", t.p, d.dp)] if x.p is not None else [])
        for i, (name, y, dy) in enumerate(keys):
            dy = l2norm_backward(dy, y.squeeze(2), t.norms[i].squeeze(2)) if problem.l2norm else dy
            self._put(name, dy, segment)
        self._put("v", d.dv, segment)
        if x.beta is not None:
            self._put("beta", strength_backward(d.db, t.b, problem.beta_range) if problem.raw_beta else d.db, segment)
        if x.g is not None:
            self._put("g", self._raw_gate(segment, d.dg) if problem.raw_gate else d.dg, segment)

    def _raw_gate(self, segment: Segment, dg: Tensor) -> Tensor:
        """Gradient of the raw activation; those of A_log and dt_bias are summed in the accumulation dtype."""
        a = load_values(self.problem, self.layout, segment, self.x.g)
        dg = self.layout.mask_(dg, segment)  # the slots behind a sequence's end decay nothing
        da, dA = log_decay_backward(dg, a, *gate_parameters(self.problem, self.x), self.problem.lower_bound)
        if self.ddt_bias is not None:
            self.ddt_bias += da.sum((0, 3)).unsqueeze(-2)
        if self.dA_log is not None:
            self.dA_log += dA.sum((0, 3, 4))[..., None, None]
        return da

    def _put(self, name: str, tile: Tensor, segment: Segment) -> None:
        tile = tile if tile.dim() == 4 else tile.flatten(1, 2)
        x = self.tokens[name]
        self.layout.store(tile, segment, x if x.dim() == 4 else x.unsqueeze(-1))

    def finish(self, dS: Tensor) -> Inputs:
        """``dS``: the gradient of the states at the sequences' starts, in the layout's order."""
        x = self.x

        def cast(gradient: Tensor, like: Tensor | None) -> Tensor | None:
            return None if like is None else gradient.reshape(like.shape).to(like.dtype)

        return Inputs(
            **{name: self.tokens.get(name) for name in PER_TOKEN},
            initial_state=None
            if x.initial_state is None
            else cast(store_states(self.problem, self.layout, dS), x.initial_state),
            A_log=cast(self.dA_log, x.A_log),
            dt_bias=cast(self.ddt_bias, x.dt_bias),
        )


def step(problem: Problem, x: Inputs) -> Outputs:
    """The recurrence itself, one token of every sequence at a time; for decoding."""
    layout = make_layout(problem, 1)
    S = load_states(problem, layout, x.initial_state)
    o = layout.new_tokens(x.v)
    for segment in layout.segments(1):  # a position at a time: torch's vectorised sigmoid rounds by where a number lies
        t = load_tokens(problem, layout, segment, x)
        live = S[: segment.width]
        u = t.v
        if problem.erase == "undecayed":
            u = u - t.p @ live
        if t.G is not None:
            live *= t.G.to(live.dtype).exp().mT
        if problem.erase == "decayed":
            u = u - t.p @ live
        live += t.k.mT * times(t.b, u)
        layout.store((t.q @ live).mul_(problem.scale).flatten(1, 2), segment, o)
    return Outputs(o, store_states(problem, layout, S))


def make_layout(problem: Problem, chunk_size: int) -> Layout:
    return _layout(problem.lengths, None if problem.packed else problem.T, chunk_size, problem.device)


_layout = lru_cache(maxsize=8)(Layout)  # the layers of a model ask for the same one, call after call


def load_states(problem: Problem, layout: Layout, state: Tensor | None) -> Tensor:
    """States in the layout's order, ``[N, H, r, K, V]``, for the scan to advance in place."""
    shape = (problem.N, problem.H, problem.HV // problem.H, problem.K, problem.V)
    if state is None:
        return torch.zeros(shape, dtype=problem.accumulate, device=problem.device)
    state = state.mT if problem.state_v_first else state
    return state[layout.order].to(problem.accumulate, memory_format=torch.contiguous_format).view(shape)


def store_states(problem: Problem, layout: Layout, S: Tensor) -> Tensor:
    """The inverse of ``load_states``."""
    state = torch.empty_like(S)
    state[layout.order] = S
    state = state.flatten(1, 2)
    return state.mT.contiguous() if problem.state_v_first else state


def load_tokens(problem: Problem, layout: Layout, segment: Segment, x: Inputs) -> Tokens:
    """Load and activate a segment's tokens; stage ``cumulate``."""
    dtype = problem.accumulate
    erasers = () if problem.erase is None else (x.k if x.p is None else x.p,)
    keys = [layout.load(t, segment, dtype).unsqueeze(2) for t in (x.q, x.k, *erasers[x.p is None :])]
    norms = ()
    if problem.l2norm:
        keys, norms = zip(*(l2norm(t) for t in keys), strict=True)
    b = H = G = None
    if x.beta is not None:
        b = load_values(problem, layout, segment, x.beta)
        b = strength(b, problem.beta_range) if problem.raw_beta else b
    if x.g is not None:
        g = load_values(problem, layout, segment, x.g)
        if problem.raw_gate:
            g = layout.mask_(log_decay(g, *gate_parameters(problem, x), problem.lower_bound), segment)
        G = H = g.clamp(min=LOG_ZERO).cumsum(-2, dtype=torch.float64)
        if problem.erase == "undecayed":
            H = shift(G)
    v = load_values(problem, layout, segment, x.v)
    return Tokens(keys[0], keys[1], v, None if problem.erase is None else keys[-1], b, G, H, norms)


def load_values(problem: Problem, layout: Layout, segment: Segment, x: Tensor) -> Tensor:
    """What value heads own: ``[B, T, HV]`` or ``[B, T, HV, V]`` to ``[M, H, r, C, 1 or V]``."""
    x = x.unsqueeze(-1) if x.dim() == 3 else x
    return layout.load(x, segment, problem.accumulate).unflatten(1, (problem.H, -1))


def gate_parameters(problem: Problem, x: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """``exp(A_log)`` and ``dt_bias``, to broadcast over ``[M, H, r, C, 1 or K]``."""
    shape = (problem.H, problem.HV // problem.H, 1, -1)
    rate = None if x.A_log is None else x.A_log.to(problem.accumulate).exp().reshape(shape)
    return rate, None if x.dt_bias is None else x.dt_bias.to(problem.accumulate).reshape(shape)
