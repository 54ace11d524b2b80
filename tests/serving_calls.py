"""Calls of the serving ops as an engine makes them: rows of requests, and of padding that names canaries."""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from prompt_truth import convolved as convolved_prompts
from serving_drafts import DRAFT, Rolling, Scratch, convolved_rows, packed
from serving_pool import IS_SLOT, NULL, Pool
from serving_truth import KINDS, activated, bits, make_call, without_null
from test_serving_step import normed
from torch.nn.utils.rnn import pad_sequence

import flash_delta
from flash_delta.reference.recurrent import recurrent

KEPT = 2  # slots of a request for states to roll back to
EVERY = 64  # tokens between checkpoints
NOT_AN_OFFSET = (-1, -(2**31), 2**31 - 1)
NOT_A_COUNT = (0, -1, DRAFT + 1, -(2**31), 2**31 - 1)
STYLES = ((), (), ("packed",), ("apart",), ("rolling",), ("packed", "apart", "rolling"))  # of decoding calls


@dataclass
class Request:
    table: list[int]  # slots for the states after the tokens of a draft
    at: int | None = None  # the slot that it goes on from; None: from zeros
    kept: list[int] = field(default_factory=list)  # slots of earlier states, the oldest first

    def place(self, pool: Pool) -> int:
        """A slot for the next state: any but those that are kept, at times one more of these."""
        if len(self.kept) < KEPT and pool.free and pool.random.random() < 0.2:
            self.kept.append(pool.take())
            return self.kept[-1]
        return pool.random.choice(self.table)


@dataclass
class Row:
    """What a decoding call is told of a row."""

    request: Request | None  # None: padding
    read: int
    writes: list[int]  # after every token
    length: int = 0  # tokens


@dataclass
class Piece:
    """What a prefill call is told of a sequence."""

    request: Request | None  # None: padding
    length: int
    begun: bool
    read: int
    write: int
    checkpoints: list[int]  # slots, by columns
    offset: int  # of one checkpoint, for a call that leaves those at offsets


def with_padding(pool, rows, padding):
    for _ in range(pool.random.randint(0, 2)):
        rows.insert(pool.random.randint(0, len(rows)), padding())
    return rows


def make_tokens(pool, kind, B, T):
    sizes = {"H": pool.H, "HV": pool.HV, "K": pool.K, "V": pool.V}
    x = make_call(kind, B, T, **sizes, slots=0, v_first=pool.v_first, device=pool.device, seed=pool.calls)
    del x["read_indices"]
    if pool.random.random() < 0.5:
        x["out"] = torch.full_like(x["v"], float("nan"))
    return x | {"state_pool": pool.slots, "null_slot": NULL} | pool.layer(B, T)


def judge(pool, x, o, want_o, written, before, windows):
    """``before``: memory at the call's start. ``written`` and ``windows``: what has to be in slots afterwards."""
    if pool.around is not None:
        want_o = torch.where(want_o == 0, 0, normed(want_o, x["output_norm"]))
        pool.judge_windows(windows, before[1])
    pool.judge(o, want_o, written, before[0])


def decode(pool, kind, backend, requests, T, writes, tree=False):
    """T tokens of some requests. ``writes``: "none", "last" or "each" state. Judged by the recurrence."""
    style = pool.random.choice(STYLES)
    rows = [decoding_row(pool, request, T, writes) for request in requests]
    rows = with_padding(pool, rows, lambda: decoding_padding(pool, T, writes))
    x = make_tokens(pool, kind, len(rows), T)
    counted = pool.random.random() < 0.5
    x |= tables(pool, rows) if counted else {"read_indices": pool.index("read_indices", [row.read for row in rows])}
    rolling = Rolling(pool, rows, x) if "rolling" in style and pool.around is not None and not tree else None
    scratch = Scratch(pool, rows, T, writes) if "apart" in style and writes != "none" else None
    if rolling is not None:
        x["convolution"] = rolling.convolution
    elif scratch is not None and pool.around is not None:
        x["convolution"] = pool.convolution._replace(write_pool=scratch.windows)
    if scratch is not None:
        x |= {"write_pool": scratch.slots, "write_indices": pool.index("write_indices", scratch.indices)}
    elif writes != "none":
        slots = [row.writes if writes == "each" else row.writes[-1] for row in rows]
        x["write_indices"] = pool.index("write_indices", slots)
    parents = [[pool.random.choice(range(-1, t)) if tree else t - 1 for t in range(T)] for _ in rows]
    if tree:
        ignored = (-1, 0, T, -(2**31))  # for the first token
        x["parent_idx"] = pool.index("parent_idx", [[pool.random.choice(ignored), *row[1:]] for row in parents])
    x["v"][[row.request is None for row in rows]] = float("nan")
    for row in rows:  # without tokens nothing would be written to a slot that is kept
        row.length = pool.random.randint(int(writes == "last"), T) if "packed" in style else T
    live = [live_tokens(row, of) for row, of in zip(rows, parents, strict=True)]
    convolved, windows, inputs = (x, None, None) if pool.around is None else convolved_rows(pool, x, rows, live)
    before = pool.memory.clone(), pool.window_memory.clone()
    op = KINDS[kind][0]
    o = packed(op, x, rows, backend, wide=writes == "each") if "packed" in style else op(**x, backend=backend)
    want_o, after = expected_of_decoding(pool, activated(kind, convolved), rows, live)
    kept = [kept_states(row, states, writes) for row, states in zip(rows, after, strict=True)]
    here = [(row.writes[t], b, t) for b, row in enumerate(rows) for t in kept[b] if scratch is None]
    left = {} if windows is None or rolling is not None else {slot: windows[b][t] for slot, b, t in here}
    judge(pool, x, o, want_o, {slot: kept[b][t] for slot, b, t in here}, before, left)
    if rolling is not None:
        rolling.judge(inputs, live, writes != "none")
    if scratch is not None:
        scratch.judge(kept, None if rolling is not None else windows)
    go_on(pool, rows, kept, windows, scratch)


def go_on(pool, rows, kept, windows, scratch):
    """Draws the last accepted token of each draft. Copies what a call has left elsewhere, as an engine does."""
    for n, (row, states) in enumerate(zip(rows, kept, strict=True)):
        if not states:
            continue
        t = pool.random.choice(list(states))
        row.request.at = row.writes[t]
        if scratch is not None:
            scratch.accept(n, row, t, states[t])
        for token in states if scratch is None else (t,):
            if windows is not None:
                pool.windows[row.writes[token]] = windows[n][token].to(pool.windows)


def kept_states(row, states, writes):
    """Returns the states that are written, of those after a row's tokens."""
    return {t: S for t, S in states.items() if writes == "each" or (writes == "last" and t == row.length - 1)}


def decoding_row(pool, request, T, writes):
    if writes == "each":  # drafts of some are shorter
        drafted = pool.random.randint(1, T)
        return Row(request, request.at, request.table[:drafted] + [pool.no_slot()] * (T - drafted))
    return Row(request, request.at, [request.place(pool) if writes == "last" else request.at] * T)


def decoding_padding(pool, T, writes):
    if writes == "none" or pool.random.random() < 0.5:
        return Row(None, pool.no_slot(), [pool.canary()] * T)
    return Row(None, pool.canary(), [pool.no_slot() for _ in range(T)])


def tables(pool, rows):
    """Columns to read from, and counts that choose one: a request's table wherever its state lies in there."""
    columns, counts = [], []
    for row in rows:
        column = pool.random.randrange(DRAFT)
        table = [pool.no_slot() for _ in range(DRAFT)]
        table[column] = row.read
        count = column + 1
        if row.request is not None and row.read in row.request.table:
            table, count = row.request.table, row.request.table.index(row.read) + 1
        elif row.request is None and pool.random.random() < 0.5:
            table, count = [pool.canary()] * DRAFT, pool.random.choice(NOT_A_COUNT)
        columns.append(table)
        counts.append(count)
    indices = {"read_indices": columns, "num_accepted_tokens": counts}
    return {name: pool.index(name, values) for name, values in indices.items()}


def live_tokens(row, parents):
    """Tokens that are no padding, and which one each continues; -1: the row."""
    live = {}
    for t in range(row.length if row.request is not None else 0):
        if row.writes[t] in IS_SLOT and parents[t] in (-1, *live):
            live[t] = parents[t]
    return live


def expected_of_decoding(pool, x, rows, live):
    """o ``[B, T, HV, V]``, and of each row the states after its tokens by their places, all in float64."""
    o, after = torch.zeros_like(x[2]), [{} for _ in rows]
    for t in range(o.shape[1]):
        here = [b for b, tokens in enumerate(live) if t in tokens]
        if not here:
            continue
        S = torch.stack([after[b].get(live[b][t], pool.want[rows[b].read]) for b in here])
        out, S = recurrent(*(y[here, t : t + 1] for y in x), initial_state=S)
        S = S.to(pool.dtype).double()  # as the ops promise, after every token
        o[here, t] = out[:, 0]
        for n, b in enumerate(here):
            after[b][t] = S[n]
    return o, after


def prefill(pool, kind, backend, requests, lengths, writes=True):
    """So many tokens of each request, which begins with them or goes on. Judged by the recurrence."""
    offsets = pool.random.random() < 0.5  # one checkpoint of each, or several at a stride
    pieces = [prefill_piece(pool, *piece, writes, offsets) for piece in zip(requests, lengths, strict=True)]
    pieces = with_padding(pool, pieces, lambda: prefill_padding(pool, writes))
    bounds = [0, *accumulate(piece.length for piece in pieces)]
    x = make_tokens(pool, kind, 1, bounds[-1] + pool.random.randint(0, 5))
    x["v"][:, bounds[-1] :] = float("nan")
    indices = {"cu_seqlens": bounds, "read_indices": [piece.read for piece in pieces]}
    if offsets:
        indices["checkpoint_indices"] = [piece.checkpoints[0] for piece in pieces]
        indices["checkpoint_offsets"] = [piece.offset for piece in pieces]
    else:
        indices["checkpoint_indices"] = [piece.checkpoints for piece in pieces]
        x["checkpoint_every"] = EVERY
    if writes:
        indices["write_indices"] = [piece.write for piece in pieces]
    x |= {name: pool.index(name, values) for name, values in indices.items()}
    x["has_initial_state"] = torch.tensor([piece.begun for piece in pieces], device=pool.device)
    x["batch_invariant"] = pool.random.random() < 0.3
    op = flash_delta.prefill_kda if kind.startswith("kda") else flash_delta.prefill_gated_delta_rule
    before, want = (pool.memory.clone(), pool.window_memory.clone()), None
    rolling = pool.around is not None and pool.random.random() < 0.3
    if rolling:
        x["convolution"] = in_rolling_slots(pool)
    convolved = x
    if pool.around is not None:
        q, k, v, want = convolved_prompts(without_null(x), x["convolution"])
        convolved, want = x | {"q": q, "k": k, "v": v}, want.to(pool.device)
    o = op(**x, backend=backend)
    want_o, written = expected_of_prefill(pool, activated(kind, convolved), pieces, bounds, writes, offsets)
    for piece in pieces:
        if piece.request is not None and writes:
            piece.request.at = piece.write
    judge(pool, x, o, want_o, written, before, {} if rolling or want is None else dict(enumerate(want)))
    if rolling:
        assert torch.equal(bits(want.contiguous()), bits(x["convolution"].pool.contiguous())), "rolling windows"
        pool.windows.copy_(want[:, :, : pool.W - 1])


def in_rolling_slots(pool):
    """The windows of all slots, with anything behind them."""
    slots, D, inputs = pool.windows.shape
    memory = pool.randn((slots, D + 1, inputs + 4))[0].to(pool.windows.dtype)
    memory[:, 1:, 2 : 2 + inputs] = pool.windows
    return pool.convolution._replace(pool=memory[:, 1:, 2:], rolling=True)


def prefill_piece(pool, request, length, writes, offsets):
    """A checkpoint is kept while there is room; columns that no token reaches name canaries."""
    checkpoints, offset = [], pool.random.choice((*NOT_AN_OFFSET, length + 1, *(pool.random.randint(0, length),) * 9))
    for m in range(1 if offsets else 3):
        if not 0 <= offset <= length if offsets else (m + 1) * EVERY > length:
            checkpoints.append(pool.canary())
        elif len(request.kept) < KEPT and pool.free:
            request.kept.append(pool.take())
            checkpoints.append(request.kept[-1])
        else:
            checkpoints.append(pool.no_slot())
    begun = request.at is not None
    write = request.place(pool) if writes else pool.canary()
    return Piece(request, length, begun, request.at if begun else pool.canary(), write, checkpoints, offset)


def prefill_padding(pool, writes):
    length, checkpoints = pool.random.choice((0, 1, 3, 70)), [pool.canary()] * 3
    if not writes or pool.random.random() < 0.5:
        return Piece(None, length, True, pool.no_slot(), pool.canary(), checkpoints, length // 2)
    return Piece(None, length, pool.random.random() < 0.5, pool.canary(), pool.no_slot(), checkpoints, length // 2)


def expected_of_prefill(pool, x, pieces, bounds, writes, offsets):
    """o ``[1, T, HV, V]``, and the states that are written by their slots, all in float64.

    The sequences run beside each other, short ones on with tokens of zeros, which change no state."""
    o, written = torch.zeros_like(x[2]), {}
    live = [n for n, piece in enumerate(pieces) if piece.request is not None]
    zeros = torch.zeros(pool.HV, pool.K, pool.V, dtype=torch.float64)
    S = torch.stack([pool.want[pieces[n].read] if pieces[n].begun else zeros for n in live])
    states = [S]  # after so many times EVERY tokens
    rows = [pad_sequence([y[0, bounds[n] : bounds[n + 1]] for n in live], batch_first=True) for y in x]
    for start in range(0, rows[0].shape[1], EVERY):
        out, S = recurrent(*(row[:, start : start + EVERY] for row in rows), initial_state=S)
        states.append(S)
        for i, n in enumerate(live):
            here = pieces[n].length - start
            if here > 0:
                o[0, bounds[n] + start : bounds[n + 1]][:EVERY] = out[i, :here]
            if not offsets and here >= EVERY and pieces[n].checkpoints[start // EVERY] in IS_SLOT:
                written[pieces[n].checkpoints[start // EVERY]] = S[i].to(pool.dtype).double()
    for i, n in enumerate(live if offsets else ()):
        (slot,), offset, length = pieces[n].checkpoints, pieces[n].offset, pieces[n].length
        if 0 <= offset <= length and slot in IS_SLOT:
            written[slot] = at_offset(pool, [row[i : i + 1] for row in rows], states, i, offset, length)
    if writes:
        written |= {pieces[n].write: S[i].to(pool.dtype).double() for i, n in enumerate(live)}
    return o, written


def at_offset(pool, tokens, states, i, offset, length):
    """What a checkpoint holds: before its last tokens, which are not a whole chunk, it was in the pool once."""
    whole = offset // EVERY
    S = states[whole][i : i + 1]
    if whole and offset < length:
        S = S.to(pool.dtype).double()
    if offset % EVERY:
        _, S = recurrent(*(row[:, whole * EVERY : offset] for row in tokens), initial_state=S)
    return S[0].to(pool.dtype).double()
