"""What the compile gate compiles for serving (see rule.py)."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from flash_delta.compiler import Launch
from flash_delta.kernels.runtime.chip import Chip, Tile
from flash_delta.kernels.runtime.run import run
from flash_delta.kernels.triton.forward.scan import run_scan
from flash_delta.kernels.triton.forward.values import values_of
from flash_delta.kernels.triton.serving.decode import run_decode
from flash_delta.kernels.triton.serving.offsets import run_scan_to_offset
from flash_delta.kernels.triton.serving.ring import plan_commit
from flash_delta.kernels.triton.serving.rows import plan_decode
from flash_delta.kernels.triton.tiles import DECODE, FEW, HELD_TOKENS, RECORDS, scan_tiles
from flash_delta.problem import Around, Inputs, Pools, Problem, Slots
from workshop.gate.cases.rule import CHUNKS, Kernels, RuleCase, problem_of


class Decoding(NamedTuple):
    """A decoding call of a model: one token, or a draft of ``tokens``, for each of two rows."""

    model: RuleCase = RuleCase(raw=True)
    dtype: torch.dtype = torch.float32  # of the pool of states
    v_first: bool = True
    tree: bool = False
    tokens: int = 1
    whole: bool = False  # with a convolution and an output norm
    apart: bool = False  # reads states outside of the pool, as recurrent ops do
    write: torch.dtype | None = None  # dtype of a second pool that is written
    rows: bool = True  # a row of the second pool has a place for every token; False: a slot holds one state
    packed: bool = False  # rows have different lengths
    rolling: bool = False  # slots of the convolution's pool also have room for a draft's inputs
    windows: torch.dtype = torch.bfloat16  # of the convolution's pool
    records: bool = False  # tokens leave records, after those of a page are applied


BOUNDED = CHUNKS["kda-128-bounded"]
DECODINGS = {  # every tile once, then every other flag that the kernel's code depends on
    **{
        f"decode-gdn-{width}-{'v' if v_first else 'k'}-first-{str(dtype).removeprefix('torch.')}": Decoding(
            RuleCase(width, raw=True), dtype, v_first
        )
        for width, dtype, v_first in product((64, 128, 256), (torch.float32, torch.bfloat16), (True, False))
    },
    "decode-gdn-128-draft": Decoding(tokens=4),
    "decode-gdn-128-draft-bfloat16": Decoding(dtype=torch.bfloat16, tokens=4),
    "decode-gdn-128-tree": Decoding(tree=True, tokens=4),
    "decode-gdn-256-tree": Decoding(RuleCase(256, raw=True), tree=True, tokens=4),
    "decode-kda-128": Decoding(CHUNKS["kda-128"]),
    "decode-kda-128-promised": Decoding(CHUNKS["kda-128-promised"]),
    "decode-kda-128-raw": Decoding(CHUNKS["kda-128-raw"]),
    "decode-kda-128-bounded": Decoding(BOUNDED),
    "decode-kda-128-bounded-k-first": Decoding(BOUNDED, v_first=False),
    "decode-kda-128-bounded-k-first-bfloat16": Decoding(BOUNDED, torch.bfloat16, v_first=False),
    "decode-gdn2-128": Decoding(CHUNKS["gdn2-128"]),
    "decode-gdn2-128-bounded": Decoding(CHUNKS["gdn2-128-bounded"]),
    "decode-gdn2-128-bounded-draft-k-first-bfloat16": Decoding(
        CHUNKS["gdn2-128-bounded"], torch.bfloat16, v_first=False, tokens=4
    ),
    "decode-gdn-128-apart": Decoding(apart=True),
    "decode-kda-128-raw-apart": Decoding(CHUNKS["kda-128-raw"], v_first=False, apart=True),
    "decode-gdn-128-whole": Decoding(whole=True),
    "decode-gdn-128-whole-k-first-bfloat16": Decoding(dtype=torch.bfloat16, v_first=False, whole=True),
    "decode-gdn-128-whole-draft": Decoding(tokens=4, whole=True),
    "decode-gdn-64-whole-tree": Decoding(RuleCase(64, raw=True), tree=True, tokens=4, whole=True),
    "decode-kda-128-bounded-whole": Decoding(BOUNDED, whole=True),
    "decode-kda-128-bounded-whole-bfloat16": Decoding(BOUNDED, torch.bfloat16, whole=True),
    "decode-kda-128-bounded-tree-bfloat16": Decoding(BOUNDED, torch.bfloat16, tree=True, tokens=4),
    "decode-gdn-128-whole-windows-float32": Decoding(whole=True, windows=torch.float32),
    "decode-gdn-128-whole-draft-rolling": Decoding(tokens=4, whole=True, rolling=True),
    "decode-gdn-128-packed": Decoding(tokens=4, packed=True),
    "decode-gdn-128-packed-bfloat16": Decoding(dtype=torch.bfloat16, tokens=4, packed=True),
    "decode-gdn-64-packed-whole-tree": Decoding(RuleCase(64, raw=True), tree=True, tokens=4, whole=True, packed=True),
    "decode-kda-128-bounded-packed-bfloat16": Decoding(BOUNDED, torch.bfloat16, tokens=4, packed=True),
    "decode-gdn-128-draft-rows": Decoding(tokens=4, write=torch.float32),
    "decode-gdn-128-draft-slots-bfloat16": Decoding(tokens=4, write=torch.bfloat16, rows=False),
    "decode-gdn-128-tree-rows-bfloat16": Decoding(dtype=torch.bfloat16, tree=True, tokens=4, write=torch.bfloat16),
    "decode-gdn-64-whole-tree-rows": Decoding(
        RuleCase(64, raw=True), tree=True, tokens=4, whole=True, write=torch.float32
    ),
}
RECORDED = {  # those that leave records
    "decode-gdn-128-records": Decoding(tokens=4, records=True),
    "decode-gdn-128-records-many": Decoding(tokens=8, records=True),
    "decode-gdn-128-records-bfloat16": Decoding(dtype=torch.bfloat16, tokens=4, records=True),
    "decode-gdn-256-records-k-first": Decoding(RuleCase(256, raw=True), v_first=False, tokens=4, records=True),
    "decode-gdn-128-records-whole-packed": Decoding(tokens=4, whole=True, rolling=True, packed=True, records=True),
    "decode-kda-128-bounded-records": Decoding(BOUNDED, tokens=4, records=True),
    "decode-gdn2-128-bounded-records": Decoding(CHUNKS["gdn2-128-bounded"], tokens=4, records=True),
}


class Prefilling(NamedTuple):
    """A prefill of a model: two sequences continue from states in a pool, in chunks or token by token."""

    model: RuleCase = RuleCase()
    dtype: torch.dtype = torch.float32  # of the pool
    v_first: bool = True
    checkpoints: bool = True
    offsets: bool = False  # one checkpoint per sequence, at its own offset


PREFILLS = {  # every tile once, then every other flag that the kernels' code depends on
    "prefill-gdn-64": Prefilling(CHUNKS["gdn-64"]),
    "prefill-gdn-128": Prefilling(),
    "prefill-gdn-128-k-first-bfloat16": Prefilling(
        RuleCase(raw=True), torch.bfloat16, v_first=False, checkpoints=False
    ),
    "prefill-gdn-256": Prefilling(CHUNKS["gdn-256"]),
    "prefill-kda-128": Prefilling(CHUNKS["kda-128"]),
    "prefill-kda-128-k-first-bfloat16": Prefilling(BOUNDED, torch.bfloat16, v_first=False),
    "prefill-gdn-128-offsets": Prefilling(RuleCase(raw=True), offsets=True),
    "prefill-gdn2-128-offsets": Prefilling(CHUNKS["gdn2-128-bounded"], offsets=True),
    "prefill-kda-128-offsets-k-first-bfloat16": Prefilling(BOUNDED, torch.bfloat16, v_first=False, offsets=True),
}


def call_decode(case: Decoding, choice: Tile | None = None, *, counted: bool = True, written: bool = True) -> None:
    N, T, new = 2, case.tokens, partial(torch.empty, device="meta")
    B, cu_seqlens = (1, new(N + 1, dtype=torch.int32)) if case.packed else (N, None)
    p, x = problem_of(case.model._replace(tokens=T))
    tokens = (None if y is None else new(B, *y.shape[1:], dtype=y.dtype) for y in (*x[:5], x.b, x.w))
    *tokens, b, w = tokens
    x = Inputs(*tokens, b=b, w=w, A_log=x.A_log, dt_bias=x.dt_bias, cu_seqlens=cu_seqlens)
    pools = Pools(
        dtype=case.dtype, write_dtype=case.write, most_tokens=T if case.packed else 0, records=T * case.records
    )
    around, D = Around(), 2 * p.H * p.K + p.HV * p.V
    if case.whole:
        windows = new(9, D, 6 if case.rolling else 4, dtype=case.windows)
        around = Around(windows, new(D, 4, dtype=p.dtype), None, x.v, new(p.V))
        window = 4 - case.rolling
        pools = pools._replace(eps=1e-6, activation="silu", rolling=case.rolling, taps=4, window=window)
    p = p._replace(B=B, N=N, packed=case.packed, recurrent=True, state_v_first=case.v_first, pools=pools)
    pool, table = new(9, *p.state_shape[1:], dtype=case.dtype), new(N, T, dtype=torch.int32)
    target, to = None, table
    if case.write is not None:
        places = (T,) if case.rows else ()
        target, to = new(9, *places, *p.state_shape[1:], dtype=case.write), table[:, 0] if case.rows else table
        around = around._replace(conv_write_pool=new(9, *places, D, 4, dtype=case.windows) if case.whole else None)
    accepted = new(N, dtype=torch.int32) if counted else None
    x = x._replace(initial_state=new(N, *p.state_shape[1:]) if case.apart else None)
    read, parents = table if counted else table[:, 0], table if case.tree else None
    s = Slots(pool, read, to if written else None, accepted, parents, write_pool=target)
    s = Slots(pool[:B], None) if case.apart else s
    if case.records:
        row, (k, u, decay) = table[:, 0], _records_of(p, (9, T))
        counts = row if case.rolling else None
        s = Slots(pool, row, row, counts, None, None, None, None, None, None, k, u, decay, row, row, row)
    run(partial(plan_decode, choice=choice), p, x, s, around)


def _records_of(p: Problem, pages: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """k, u and the decay of records in ``pages`` of so many tokens."""
    width = (p.K,) if p.gate.kind == "channel" else ()
    shapes = (p.H, p.K), (p.HV, p.V), (p.HV, *width)
    return tuple(torch.empty(*pages, *shape, device="meta") for shape in shapes)


def call_commit(case: Decoding, choice: Tile, *, kept: bool) -> None:
    """Applies records of two layers. ``kept``: rows leave checkpoints."""
    p, _ = problem_of(case.model._replace(tokens=case.tokens))
    p = p._replace(B=2, N=2, recurrent=True, state_v_first=case.v_first, pools=Pools(dtype=case.dtype))
    new = partial(torch.empty, device="meta")
    pool, index = new(2, 9, *p.state_shape[1:], dtype=case.dtype), new(2, dtype=torch.int32)
    k, u, decay = _records_of(p, (2, 9, case.tokens))
    checkpoints = (index, index) if kept else (None, None)
    s = Slots(pool, index, None, None, None, None, *checkpoints, ring_read=index, ring_counts=index)
    run(partial(plan_commit, choice=choice), p, Inputs(k, k, u, decay), s)


def call_prefill(case: Prefilling, t: Tile | None = None, *, before: bool | None = None) -> None:
    """Some launches of a prefill.

    * With a tile: the scan.
    * With ``before``: the tokens up to checkpoints at offsets, launched before or after all others.
    * With neither: the other kernels.
    """
    (p, x), new = problem_of(case.model), partial(torch.empty, device="meta")
    x = x._replace(initial_state=None)
    p, pools = p._replace(state_v_first=case.v_first), Pools(dtype=case.dtype)
    index, has, checkpoints = new(p.N, dtype=torch.int32), new(p.N, dtype=torch.bool), (None, None)
    if case.offsets:
        pools, checkpoints = pools._replace(checkpoint_offsets=True), (index, index)
    elif case.checkpoints:
        checkpoints = new(p.N, case.model.tokens // 64, dtype=torch.int32), None
        pools = pools._replace(checkpoint_every=64)
    p = p._replace(pools=pools)
    s = Slots(new(9, *p.state_shape[1:], dtype=case.dtype), index, index, None, None, has, *checkpoints)
    kernels = Kernels(p, x, s)
    (s,), o = kernels.more, kernels.results().o
    if before is not None:
        run_scan_to_offset(kernels.c, s, before=before)
    elif t is None:
        kernels.chunks()
        run_decode(kernels.c, s, o)
    else:
        c = kernels.c
        if p.channel_strength:  # `channel` has written w . v
            c = c._replace(x=c.x._replace(v=values_of(c.made, p), w=None))
        run_scan(c, kernels.channels, kernels.solved, kernels.factors, o, None, None, t, slots=s)
    kernels.launch()


def launches(target: str) -> Iterator[Launch]:
    chip = Chip(target.removesuffix("a"), 1)
    for name, case in DECODINGS.items():
        yield Launch(name, partial(call_decode, case))
    for name in ("decode-gdn-128-v-first-float32", "decode-gdn-128-v-first-bfloat16"):
        yield Launch(f"{name}-few", partial(call_decode, DECODINGS[name], FEW[DECODINGS[name].dtype.itemsize]))
    for name, case in RECORDED.items():
        usual = case.v_first and case.model.width <= 128
        held = usual and case.tokens <= HELD_TOKENS
        if held:
            yield Launch(name, partial(call_decode, case))
        for t in RECORDS[case.dtype.itemsize] if usual else DECODE[case.v_first, case.dtype.itemsize][-1:]:
            if not held:
                yield Launch(f"{name}-BV={t.BV}", partial(call_decode, case, t))
            if (held or not usual) and not case.whole:
                yield Launch(f"{name}-BV={t.BV}-commit", partial(call_commit, case, t, kept=case.v_first))
    for name, case in PREFILLS.items():
        if case.offsets:
            yield Launch(f"{name}-before", partial(call_prefill, case, before=True))
            yield Launch(f"{name}-after", partial(call_prefill, case, before=False))
        else:
            yield Launch(name, partial(call_prefill, case))
        p, _ = problem_of(case.model)
        choices = scan_tiles("scan", p, chip, every=True)
        for t in choices if case == PREFILLS["prefill-gdn-128"] or case.model.gate == "channel" else choices[-1:]:
            yield Launch(f"{name}-BV={t.BV}", partial(call_prefill, case, t))
