"""The role that makes the rates of the loop's chunks, in one warp. If it does so, `rates` is not launched.

It takes log decays and strengths as given. There are no norms. rates.py says what the rates are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_delta.kernels.device.gates import BITS, LEAST_DECAY
from flash_delta.kernels.hopper.device.layouts import TOKENS, C
from flash_delta.kernels.hopper.device.rings import rate, wait_free
from flash_delta.kernels.hopper.device.work_items import clear_padding, find_piece, find_pieces
from flash_delta.problem import Problem


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def load_gates(g, beta, g_row, beta_row, g_token, beta_token, start, token, length, STEPS: gl.constexpr):
    """Log decays and strengths of a sequence's tokens, and 0 after its end. Without ``g`` no token decays. Without
    ``beta`` every token has strength 1. With STEPS only the first row of a token has a decay."""
    live, at = token < length, (start + token).to(gl.int64)
    x = (token * 0).to(gl.float32)
    b = gl.where(live, x + 1.0, 0.0)
    if g is not None:
        decays, of_g = live, at
        if STEPS > 1:
            decays, of_g = live & (token % STEPS == 0), at // STEPS
        x = gl.load(g + (g_row + of_g * g_token), mask=decays, other=0.0).to(gl.float32)
    if beta is not None:
        b = gl.load(beta + (beta_row + at * beta_token), mask=live, other=0.0).to(gl.float32)
    return x, b


@gluon.jit
def find_rates(x, b, i, scale):
    """The eight vectors [1, 64] of a chunk, from log decays ``x`` and strengths ``b`` of its tokens ``i``."""
    sums = gl.associative_scan(gl.maximum(x, LEAST_DECAY).to(gl.float64), 1, add)
    G = (sums * BITS).to(gl.float32)
    last = gl.sum(gl.where(i == C - 1, G, 0.0), 1)[:, None]
    l_q = gl.log2((i * 0).to(gl.float32) + scale)
    erased, decayed, read = -b * gl.exp2(-l_q), -gl.exp2(G), gl.exp2(G + l_q)
    gamma = gl.where(i == 1, gl.max(gl.abs(b), 1)[:, None], gl.exp2(G * 0.0 + last))
    return G + l_q, G, erased, b, decayed, read, gl.exp2(last - G), gamma


@gluon.jit
def rate_role(gates, tiles, full, done, work, HV, STEPS: gl.constexpr):
    """Fills the ring of rates. It does nothing if `rates` makes them: then there is no ``o``."""
    g, beta, o, g_batch, g_strides, beta_batch, beta_strides, scale = gates
    if o is not None:
        g_token, g_head = g_strides
        beta_token, beta_head = beta_strides
        NS: gl.constexpr = tiles.k.shape[0]
        WIDTH: gl.constexpr = tiles.k.shape[2]
        i = gl.arange(0, C, layout=gl.SliceLayout(0, TOKENS))[None, :]
        if work.cu_seqlens is not None:
            N, program = work.items // HV, gl.program_id(0)
            clear_padding(o, work.cu_seqlens, N, work.T, i, program, gl.num_programs(0), HV * WIDTH, STEPS)
        t = 0
        pieces = find_pieces(work, HV)
        for piece in range(pieces.begin, pieces.end, pieces.step):
            own = find_piece(piece, pieces, work, HV)
            start, length, begin, end = own.start, own.size, own.begin, own.end
            rows = (i * 0).to(gl.int64)
            if work.cu_seqlens is None:
                rows += own.n
            g_row, beta_row = rows * g_batch + own.hv * g_head, rows * beta_batch + own.hv * beta_head
            x, b = load_gates(g, beta, g_row, beta_row, g_token, beta_token, start, begin + i, length, STEPS)
            for token in range(begin, end, C):
                s = t % NS
                found = find_rates(x, b, i, scale)
                wait_free(done, t, NS, NS)  # signalled by the state groups, which have left the chunk in this slot
                for row in gl.static_range(8):
                    rate(tiles.rates, s, row).store(found[row])
                mbarrier.arrive(full.index(s), count=1)
                t += 1
                later = token + C + i
                x, b = load_gates(g, beta, g_row, beta_row, g_token, beta_token, start, later, length, STEPS)


def makes_rates(p: Problem) -> bool:
    """Whether the loop makes its rates. It does so without a pool, norms and raw gates, if nothing is saved."""
    return p.pools is None and not (p.needs_grad or p.l2norm or p.gate.raw or p.raw_beta)
