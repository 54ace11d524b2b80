"""Stage ``cumulate``: the factors by which the loop multiplies scores and accumulators, per chunk and value head.

    G = log2 e (g_1 + .. + g_i)         the log decay g as given, or made from its raw activation
    rates [8, C]:   0   G + log2(scale r_q)
                    1   G - log2 r_k           2 to the difference of rows 0 and 1 scales and decays scores
                    2   -b r_k / (scale r_q)
                    3   b
                    4   -r_k 2^G
                    5   scale r_q 2^G
                    6   r_k 2^{G_C - G}
                    7   gamma = 2^{G_C}, in every column except column 1, which has the largest |b|

r_q and r_k are the reciprocal lengths of q and k, or 1 without a norm. G is summed in float64. Log decays below -128
count as -128, since e^-128 is 0 in float32. So |G| stays below 2^14, and float32 resolves differences of G to 2^-10,
even after 64 such tokens.

Rows after the end of a sequence get b = 0 and no decay. The kernel writes zeros to o after the last sequence of a
packed row.

The backward pass by hand needs ``norms`` of q and k. It finds dbeta from U, which has b as a factor, and divides
by b (DIVIDES). So |b| is raised to at least 2^-40. If |b| is below 2^-14, row 2 has 0 instead of b, because the
float16 numbers of `invert` cannot hold such a b. There U is b R, and `finish` takes this into account.

That pass runs this kernel again (BACK). Rates take a quarter of the memory of A, and one short launch computes them
again. Then row 2 is r_k / (scale r_q). The kernel reads ``norms``, of which the forward pass has left two vectors per
key head. With a raw gate it writes the log decays to ``decays``.

On a pool (``prompts``) the first program lists the sequences that the loop scans, in parts if they are long
(prompt_list.py), and lays the tape (tape.py). The kernel writes zeros to o of padding, and nothing for sequences that
`decode` runs.

Grid (slots, HV / HEADS). A program has HEADS value heads; with a norm they are those of one key head.
"""

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.activation import strength
from flash_delta.kernels.device.chunk import C, count_slots, find_chunk, lead, reciprocal_lengths, rows_of, store_tile
from flash_delta.kernels.device.gates import BITS, LEAST_DECAY, head_log_decay, head_parameters
from flash_delta.kernels.hopper.plans.prompt_list import find_slots, is_short, write_prompt_list
from flash_delta.kernels.hopper.plans.tape import NUMBERS as OF_TAPE
from flash_delta.kernels.hopper.plans.tape import PROGRAMS, Tape, lay
from flash_delta.kernels.hopper.plans.tiles import RATES, RATES_OF_ROWS
from flash_delta.kernels.hopper.scalar.segments.memory import PromptParts
from flash_delta.kernels.runtime.arguments import batch, launch_rule, strides, table, tokens
from flash_delta.kernels.runtime.chip import next_power_of_2
from flash_delta.kernels.runtime.plan import Draft, Layout, Making
from flash_delta.kernels.runtime.workspace import ForBackward
from flash_delta.problem import Problem, Slots

OF_POOL = ["shortest", "fewest", "most", "room", "slots", "null_slot", "read_row", "write_row", "has_row"]
NUMBERS = [*OF_TAPE, "N", "T", *OF_POOL, "g_batch", "beta_batch"]
SMALLEST, TINY = tl.constexpr(2.0**-40), tl.constexpr(2.0**-14)  # the least |b|: to divide by, to erase in its chunk
INDICES = ["read_indices", "write_indices", "has_initial_state"]  # as in `decode`


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def rates(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, o, out, norms, decays, prompts, read_indices, write_indices,
    has_initial_state, table, marks, parts, programs, word, patience, chunk_ticks, item_ticks, cut_ticks, shortest,
    fewest, most, room, N, T, slots, null_slot, read_row, write_row, has_row, scale, beta_top, q_strides, k_strides,
    g_batch, g_strides, beta_batch, beta_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr, GATE: tl.constexpr, RAW_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr, SHORT: tl.constexpr, STEPS: tl.constexpr, DIVIDES: tl.constexpr, BACK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    lead(OVERLAP)
    slot, first = tl.program_id(0), tl.program_id(1) * HEADS
    tables = (read_indices, write_indices, has_initial_state, read_row, write_row, has_row)
    slots = (slots, null_slot)
    if prompts is not None and slot + first == 0:
        cutting = (shortest, fewest, most, room, programs)
        write_prompt_list(prompts, parts, tables, cu_seqlens, N, T, slots, cutting, HV, C, SHORT)
        numbers = (programs, word, patience, chunk_ticks, item_ticks, cut_ticks)
        lay(table, marks, numbers, cu_seqlens, prompts, parts, N, T, HV, C, PACKED, PROGRAMS)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    if token >= stop:
        return
    empty = n >= N
    if prompts is not None:
        if is_short(n, cu_seqlens, N, T, SHORT):
            return
        _, _, well = find_slots(tables, tl.minimum(n, N - 1), slots)
        empty = empty | (well == 0)
    if empty:
        if not BACK:
            strides = ((T // STEPS).to(tl.int64) * HV * V, HV * V, V, 1)
            for member in range(HEADS):
                rows = rows_of(o, strides, row, first + member)
                none = tl.zeros([C, V], o.dtype.element_ty)
                store_tile(rows, strides, none, token, stop, 0, V, C, V, False, STEPS)
        return
    i, hv = tl.arange(0, C)[:, None], first + tl.arange(0, BH)[None, :]
    known = hv < first + HEADS
    live = (token + i < stop) & known
    G = tl.zeros([C, BH], tl.float32)
    if GATE:
        decaying = live if STEPS == 1 else live & (i % STEPS == 0)
        place = token + i if STEPS == 1 else (token + i) // STEPS
        at = row.to(tl.int64) * g_batch + place.to(tl.int64) * g_strides[0] + hv * g_strides[1]
        x = tl.load(g + at, mask=decaying, other=0.0).to(tl.float32)
        if RAW_GATE:
            rate, bias = head_parameters(A_log, dt_bias, hv, HAS_BIAS, known)
            x = tl.where(decaying, head_log_decay(x, rate, bias), 0.0)
        sums = tl.cumsum(tl.maximum(x, LEAST_DECAY).to(tl.float64), 0)
        G = (sums * BITS).to(tl.float32)
    b = tl.where(live, 1.0, 0.0)
    erasing = b
    if HAS_BETA:
        at = row.to(tl.int64) * beta_batch + (token + i).to(tl.int64) * beta_strides[0] + hv * beta_strides[1]
        b = tl.load(beta + at, mask=live, other=0.0).to(tl.float32)
        if RAW_BETA:
            b = tl.where(live, strength(b, beta_top), 0.0)
        erasing = b
        if DIVIDES:
            b = tl.where(live & (tl.abs(b) < SMALLEST), tl.where(b < 0, -SMALLEST, SMALLEST), b)
            erasing = tl.where(tl.abs(b) < TINY, 0.0, b)
    last = tl.sum(tl.where(i == C - 1, G, 0.0), 0)[None, :]
    # Reciprocal lengths as logarithms, so that one exponential is enough for a score.
    l_q, l_k = tl.log2(scale), 0.0
    if NORM:
        h = first // (HV // H)
        at = norms + (slot.to(tl.int64) * H + h) * (2 * C) + i if norms is not None else i
        if BACK:
            r_q, r_k = tl.load(at), tl.load(at + C)
        else:
            W: tl.constexpr = 32
            r_q = reciprocal_lengths(rows_of(q, q_strides, row, h), q_strides, token, stop, K, C, W, STEPS)[:, None]
            r_k = reciprocal_lengths(rows_of(k, k_strides, row, h), k_strides, token, stop, K, C, W)[:, None]
            if norms is not None:
                tl.store(at, r_q)
                tl.store(at + C, r_k)
        l_q += tl.log2(r_q)
        l_k = tl.log2(r_k)
    at = (slot.to(tl.int64) * HV + hv) * (8 * C) + i
    ratio = tl.exp2(l_k - l_q) + tl.zeros([C, BH], tl.float32)
    if not BACK:
        ratio *= -erasing
    gamma = tl.exp2(last) + tl.zeros([C, BH], tl.float32)
    found = G + l_q, G - l_k, ratio, b, -tl.exp2(G + l_k), tl.exp2(G + l_q), tl.exp2(last - G + l_k), gamma
    for vector in tl.static_range(8):
        tl.store(out + at + vector * C, found[vector], mask=known & ((vector < 7) | (i != 1)))
    largest = tl.max(tl.abs(b), 0)[None, :] + tl.zeros([C, BH], tl.float32)
    tl.store(out + at + 7 * C, largest, mask=known & (i == 1))
    if decays is not None:
        tl.store(decays + (slot.to(tl.int64) * HV + hv) * C + i, x, mask=known)


NO_SLOTS = Slots(None, None)


def new_rates(made: Making, p: Problem) -> Layout:
    """Memory for what `rates` writes, four vectors per line."""
    return made.new("rates", (count_slots(p) * p.HV * 2, 4 * C), torch.float32)


def run_rates(
    c: Draft, o: Layout, out: Layout, saved: ForBackward | None = None, prompts: Layout | None = None,
    slots: Slots = NO_SLOTS, tape: Tape | None = None, parts: PromptParts | None = None,
) -> None:  # fmt: skip
    """Launches `rates`. ``saved``: what the backward pass needs. ``prompts``, ``tape``, ``parts``: on a pool with
    ``slots``."""
    tables = (slots.read_indices, slots.write_indices, slots.has_initial_state)
    written = (o, out, None if saved is None else saved.norms, None)
    _run(c, (prompts, slots, tables, tape, parts), written, DIVIDES=saved is not None, BACK=False)


def run_rates_back(c: Draft, out: Layout, norms: Layout | None, decays: Layout | None) -> None:
    """Launches `rates` for the backward pass by hand. ``norms``: as the forward pass has left them."""
    _run(c, (None, NO_SLOTS, (None,) * 3, None, None), (None, out, norms, decays), DIVIDES=True, BACK=True)


def _run(c: Draft, on_pool: tuple, written: tuple[Layout | None, ...], **form: bool) -> None:
    p, x, (prompts, slots, tables, tape, parts) = c.p, c.x, on_pool
    count = 0 if slots.state_pool is None else slots.state_pool.shape[0]
    null = -1 if p.pools is None else p.pools.null_slot
    heads = p.HV // p.H if p.l2norm else max(n for n in (1, 2, 4) if p.HV % n == 0)
    of_tape, numbers = ((None, None), (0,) * len(OF_TAPE)) if tape is None else ((tape.table, tape.marks), tape.numbers)
    listed, cut, room = (None, (0, 0, 0), 0) if parts is None else (parts.listed, parts.cut, parts.starts)
    pointers = (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, *written, prompts, *tables, *of_tape, listed)
    tile = RATES_OF_ROWS if p.l2norm or p.V > 128 else RATES
    columns = max(2, next_power_of_2(heads))  # Triton 3.6 has no scan for a layout with more warps than columns
    launch_rule(
        c, rates, pointers, (count_slots(p), p.HV // heads, 1), tile,
        *numbers, *cut, room, p.N, p.T, count, null, *(table(t)[0] for t in tables), p.scale, p.beta_range,
        strides(x.q), strides(x.k), batch(x.g), tokens(x.g), batch(x.beta), tokens(x.beta),
        HEADS=heads, BH=columns, PROGRAMS=PROGRAMS, **form,
    )  # fmt: skip
