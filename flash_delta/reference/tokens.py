"""From the caller's tensors to the stages and back: packing, dtypes, norm, gate and write strength."""

import torch
from torch import Tensor

from flash_delta.problem import Inputs, Problem
from flash_delta.reference.activation import (
    l2norm,
    l2norm_backward,
    log_decay,
    log_decay_backward,
    strength,
    strength_backward,
)
from flash_delta.reference.layout import Layout, Segment
from flash_delta.reference.stages import TokenGradients, Tokens, shift

# e^-1024 is 0 in every dtype, so the clamp changes no result. After it, gates of -inf can be added and subtracted.
LOG_ZERO = -1024.0
PER_TOKEN = ("q", "k", "v", "g", "beta", "p", "b", "w")


class TokenReader:
    """Loads segments of a call's tokens, with activations applied and chunks first."""

    def __init__(self, problem: Problem, layout: Layout, x: Inputs):
        self.problem, self.layout, self.x = problem, layout, x
        shape, dtype = (problem.H, problem.HV // problem.H, 1, -1), problem.accumulate  # over [M, H, r, C, 1 or K]
        self.rate = None if x.A_log is None else x.A_log.to(dtype).exp().reshape(shape)
        self.bias = None if x.dt_bias is None else x.dt_bias.to(dtype).reshape(shape)

    def read(self, segment: Segment) -> Tokens:
        """A segment's tokens. This is also the stage ``cumulate``."""
        problem, x = self.problem, self.x
        keys = [self.keys(t, segment) for t in (x.q, x.k, x.p) if t is not None]
        norms = ()
        if problem.l2norm:
            keys, norms = zip(*(l2norm(t) for t in keys), strict=True)
        b = None if x.beta is None else self.strength(x.beta, segment, problem.beta_range)
        H = G = None
        if x.g is not None:
            g = log_decay(problem.gate, self.values(x.g, segment), self.rate, self.bias)
            if problem.gate.raw:
                g = self.layout.mask_(g, segment)
            G = H = g.clamp(min=LOG_ZERO).cumsum(-2, dtype=torch.float64)
            if problem.erase == "undecayed":
                H = shift(G)
        p = None if problem.erase is None else keys[-1]  # k, unless there are erase keys
        v, gated = self.values(x.v, segment), None
        if problem.channel_strength:
            gated = self.strength(x.b, segment, problem.beta_range), self.strength(x.w, segment, 1.0), v
            p, v = gated[0] * p, gated[1] * v
        return Tokens(keys[0], keys[1], v, p, b, G, H, norms, gated)

    def strength(self, x: Tensor, segment: Segment, top: float) -> Tensor:
        """beta, b or w. ``top``: that of its sigmoid, if it is a logit."""
        return strength(self.values(x, segment), top) if self.problem.raw_beta else self.values(x, segment)

    def keys(self, x: Tensor, segment: Segment) -> Tensor:
        """Tensors of key heads: ``[B, T, H, K]`` to ``[M, H, 1, C, K]``."""
        return self.layout.load(x, segment, self.problem.accumulate).unsqueeze(2)

    def values(self, x: Tensor, segment: Segment) -> Tensor:
        """Tensors of value heads: ``[B, T, HV]`` or ``[B, T, HV, V]`` to ``[M, H, r, C, 1 or V]``."""
        x = x.unsqueeze(-1) if x.dim() == 3 else x
        tile = self.layout.load(x, segment, self.problem.accumulate)
        return tile.view(tile.shape[0], self.problem.H, -1, *tile.shape[2:])


class GradientWriter:
    """Stores the gradients of a call's inputs segment by segment, through the activations that ``read`` applied."""

    def __init__(self, reader: TokenReader):
        self.reader = reader
        layout, x = reader.layout, reader.x
        self.tokens = {n: layout.new_tokens(t) for n, t in x._asdict().items() if t is not None and n in PER_TOKEN}
        self.dA_log = None if reader.rate is None else torch.zeros_like(reader.rate)
        self.ddt_bias = None if reader.bias is None else torch.zeros_like(reader.bias)

    def write(self, segment: Segment, t: Tokens, d: TokenGradients) -> None:
        problem, x = self.reader.problem, self.reader.x
        dp, dv = d.dp, d.dv
        if t.gated is not None:
            b, w, v = t.gated
            db, dw, dp, dv = t.k * dp, v * dv, b * dp, w * dv
            self._strength("b", segment, db, b, problem.beta_range)
            self._strength("w", segment, dw, w, 1.0)
        dp = None if dp is None else dp.sum(2)
        dk = d.dk if dp is None or x.p is not None else d.dk + dp  # without separate erase keys, p is k, or b . k
        keys = [("q", t.q, d.dq), ("k", t.k, dk), ("p", t.p, dp)]
        for i, (name, y, dy) in enumerate(keys[: 2 if x.p is None else 3]):
            dy = l2norm_backward(dy, y.squeeze(2), t.norms[i].squeeze(2)) if problem.l2norm else dy
            self._store(name, dy, segment)
        self._store("v", dv, segment)
        if x.beta is not None:
            self._strength("beta", segment, d.db, t.b, problem.beta_range)
        if x.g is not None:
            self._store("g", self._gate(segment, d.dg), segment)

    def _gate(self, segment: Segment, dg: Tensor) -> Tensor:
        """The gradient of g as the caller gave it: a raw activation or a log decay. Those of A_log and dt_bias are
        summed in the accumulation dtype."""
        reader, gate = self.reader, self.reader.problem.gate
        if not gate.raw and gate.bound is None:
            return dg
        a = reader.values(reader.x.g, segment)
        if not gate.raw:
            return dg.masked_fill(a < gate.bound, 0.0)
        dg = reader.layout.mask_(dg, segment)  # slots after a sequence's end do not decay
        da, dA = log_decay_backward(gate, dg, a, reader.rate, reader.bias)
        if self.ddt_bias is not None:
            self.ddt_bias += da.sum((0, 3)).unsqueeze(-2)
        if self.dA_log is not None:
            self.dA_log += dA.sum((0, 3, 4))[..., None, None]
        return da

    def _strength(self, name: str, segment: Segment, db: Tensor, b: Tensor, top: float) -> None:
        self._store(name, strength_backward(db, b, top) if self.reader.problem.raw_beta else db, segment)

    def _store(self, name: str, tile: Tensor, segment: Segment) -> None:
        tile = tile if tile.dim() == 4 else tile.flatten(1, 2)
        x = self.tokens[name]
        self.reader.layout.store(tile, segment, x if x.dim() == 4 else x.unsqueeze(-1))

    def finish(self, dstate: Tensor) -> Inputs:
        """All gradients, in the inputs' shapes and dtypes. ``dstate`` is the gradient of the initial states."""
        x = self.reader.x

        def cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
            return None if like is None else gradient.reshape(like.shape).to(like.dtype)

        return Inputs(
            **{name: self.tokens.get(name) for name in PER_TOKEN},
            initial_state=cast(dstate, x.initial_state),
            A_log=cast(self.dA_log, x.A_log),
            dt_bias=cast(self.ddt_bias, x.dt_bias),
        )


def read_states(problem: Problem, order: Tensor | None, state: Tensor | None) -> Tensor:
    """A copy of the states ``[N, HV, K, V]``, which a scan can advance in place. ``order``: the order of the
    sequences; None: as they are."""
    new = torch.zeros if state is None else torch.empty
    S = new(problem.N, problem.HV, problem.K, problem.V, dtype=problem.accumulate, device=problem.device)
    if state is not None:
        state = state.mT if problem.state_v_first else state
        S.copy_(state if order is None else state[order])
    return S


def write_states(problem: Problem, order: Tensor | None, S: Tensor) -> Tensor:
    """The inverse of ``read_states``."""
    if order is not None:
        S = torch.empty_like(S).index_copy_(0, order, S)
    return S.mT.contiguous() if problem.state_v_first else S
