"""Checks of serving calls. They check shapes, dtypes and devices of pools and indices, never the values of indices."""

from collections.abc import Iterable
from math import gcd

import torch
from torch import Tensor

from flash_delta.ops._check import rule
from flash_delta.ops._check.options import Options, PoolOptions, cast, refuse
from flash_delta.ops._check.pool import check_pool, is_plain
from flash_delta.ops._check.ring import check_ring
from flash_delta.ops._check.rule import INDEX_DTYPES, check_kind, check_shape
from flash_delta.ops._transforms import is_traced
from flash_delta.ops.serving.around import NAMES, check_around
from flash_delta.problem import Around, Inputs, Pools, Problem, Slots, needs_gradient

MOST_TOKENS = 16  # per row in one call
POOLS = ("convolution.pool", "convolution.write_pool")


def describe(x: Inputs, s: Slots, around: Around, options: Options) -> Problem:
    """Check a call and describe it. Raises ValueError naming the argument, what was expected and what came."""
    op, options = options.op, cast(options)
    given = PoolOptions(*options.pools)
    refuse_gradients(op, x, s, around)
    if not options.recurrent:
        check_shape(op, "cu_seqlens", x.cu_seqlens, "N + 1")
    p = rule.describe(x, options, None)
    for name in ("q", "k", "v", "g", "beta", "b", "w"):
        if (t := getattr(x, name)) is not None:
            _check_strides(op, name, t)
    check_shape(op, "state_pool", s.state_pool, "slots", *p.state_shape[1:])
    check_pool(p, "state_pool", s.state_pool)
    if p.recurrent:
        most = _check_rows(p, s)
        _check_write_pool(p, s, most)
    else:
        most = 0
        _check_sequences(p, s, given.checkpoint_every)
        _check_prompts(p, given)
    p = p._replace(pools=_pools_of(given, s, most if p.packed else 0), needs_grad=False)
    _check_indices(p, s)
    if s.ring_k is not None:
        check_ring(p, s, most)
    if s.out is not None:
        _check_out(p, s.out)
    check_around(p, s, around)
    if s.out is not None and not is_traced(s.out):
        _check_apart(p.op, s.out, _named((x, s._replace(out=None), around)))
    for name, pool in zip(POOLS, (around.conv_pool, around.conv_write_pool), strict=True):
        if pool is not None:
            check_pool(p, name, pool)
    if around.norm_gate is not None:
        _check_strides(op, "output_norm.gate", around.norm_gate)
    taps, window = (0, 0) if around.conv_pool is None else (around.conv_weight.shape[1], around.conv_pool.shape[2])
    window = taps - 1 if p.pools.rolling else window
    return p._replace(pools=p.pools._replace(taps=taps, window=window))


def _pools_of(given: PoolOptions, s: Slots, most_tokens: int) -> Pools:
    """The part of a serving call, without its convolution."""
    null = -1 if given.null_slot is None else given.null_slot
    target = None if s.write_pool is None else s.write_pool.dtype
    of_caller = given._replace(null_slot=null, checkpoint_every=given.checkpoint_every or 0)
    return Pools(
        *of_caller, s.state_pool.dtype, target, is_plain(s.state_pool), most_tokens=most_tokens,
        checkpoint_offsets=s.checkpoint_offsets is not None, records=_room(s),
    )  # fmt: skip


def refuse_gradients(op: str, *groups: Inputs | Slots | Around) -> None:
    """Refuse tensors whose gradients autograd would have to find. The results of serving calls have none."""
    for name, t in _named(groups):
        if isinstance(t, Tensor) and needs_gradient((t,)):
            expected = "a tensor without gradient (call serving ops under torch.no_grad())"
            refuse(op, name, expected, "one that requires a gradient")


def _named(groups: Iterable[Inputs | Slots | Around]) -> list[tuple[str, Tensor | None]]:
    """The tensors with their names. Not a generator: torch 2.14 does not compile `yield from`."""
    named = [(NAMES if isinstance(group, Around) else group._fields, group) for group in groups]
    return [pair for names, group in named for pair in zip(names, group, strict=True)]


def _check_strides(op: str, name: str, t: Tensor) -> None:
    """Check strides. Kernels count both in 32 bits, in units of gcd(row stride, token stride, 16) numbers."""
    (B, T), (row, token) = t.shape[:2], t.stride()[:2]
    if (B - 1) * row + (T - 1) * token >= 2**31 * gcd(row, token, 16):
        refuse(op, name, "tokens less than 2^31 numbers apart (2^35 in steps of 16)", f"strides {list(t.stride())}")


def _check_rows(p: Problem, s: Slots) -> int:
    """Check the shapes of the rows' indices. Returns how many tokens a row may have."""
    op, B, T = p.op, p.N, _most_tokens(p, s)
    if s.num_accepted_tokens is None or s.ring_k is not None:  # with a ring the count says where a window starts
        check_shape(op, "read_indices", s.read_indices, B)
    else:  # it chooses one of W columns
        check_shape(op, "read_indices", s.read_indices, B, "W")
        check_shape(op, "num_accepted_tokens", s.num_accepted_tokens, B)
    if s.write_indices is not None:
        check_shape(op, "write_indices", s.write_indices, *((B, T) if _is_table(s.write_indices) else (B,)))
    if s.parent_idx is not None:
        check_shape(op, "parent_idx", s.parent_idx, B, T)
        if s.write_indices is None or (s.write_indices.dim() == 1 and not _has_rows(s)):
            got = "None" if s.write_indices is None else f"shape {list(s.write_indices.shape)}"
            refuse(op, "write_indices", f"a tensor [{B}, {T}] with parent_idx: tokens continue from these slots", got)
    return T


def _most_tokens(p: Problem, s: Slots) -> int:
    """How many tokens a row may have. For packed rows, the columns of tables or the room in the write pool decide."""
    if not p.packed:
        if not 1 <= p.T <= MOST_TOKENS:
            refuse(p.op, "q", f"1 to {MOST_TOKENS} tokens (axis 1)", p.T)
        return p.T
    for name in ("write_indices", "parent_idx"):
        table = getattr(s, name)
        if _is_table(table):
            if not 1 <= table.shape[1] <= MOST_TOKENS:
                refuse(p.op, name, f"columns for 1 to {MOST_TOKENS} tokens (axis 1)", table.shape[1])
            return table.shape[1]
    if s.ring_k is not None:
        return max(1, min(MOST_TOKENS, _room(s)))
    return max(1, min(MOST_TOKENS, s.write_pool.shape[1])) if _has_rows(s) else MOST_TOKENS


def _room(s: Slots) -> int:
    """The records in a page of the ring; 0 without a ring."""
    return s.ring_k.shape[1] if isinstance(s.ring_k, Tensor) and s.ring_k.ndim == 4 else 0


def _is_table(t: Tensor | None) -> bool:
    return isinstance(t, Tensor) and t.dim() == 2


def _has_rows(s: Slots) -> bool:
    """Whether the write pool has rows, with a state for every token. A pool of slots has one axis less, four."""
    return isinstance(s.write_pool, Tensor) and s.write_pool.dim() == 5


def _check_write_pool(p: Problem, s: Slots, T: int) -> None:
    if s.write_pool is None:
        return
    op, rows, write = p.op, _has_rows(s), s.write_indices
    check_shape(op, "write_pool", s.write_pool, *(("rows", "S") if rows else ("slots",)), *p.state_shape[1:])
    check_pool(p, "write_pool", s.write_pool)
    if rows and s.write_pool.shape[1] < T:
        refuse(op, "write_pool", f"room for {T} tokens (axis 1)", s.write_pool.shape[1])
    if write is None or (rows and write.dim() == 2):
        expected = f"a tensor [{p.N}] with a write_pool of rows" if rows else "a tensor with write_pool"
        refuse(op, "write_indices", expected, "None" if write is None else f"shape {list(write.shape)}")


def _check_sequences(p: Problem, s: Slots, every: int | None) -> None:
    for name in ("read_indices", "write_indices", "has_initial_state"):
        if getattr(s, name) is not None or name == "read_indices":
            check_shape(p.op, name, getattr(s, name), p.N)
    if s.checkpoint_offsets is not None:
        if every is not None:
            refuse(p.op, "checkpoint_every", "None with checkpoint_offsets: either a stride or offsets", every)
        for name in ("checkpoint_indices", "checkpoint_offsets"):
            check_shape(p.op, name, getattr(s, name), p.N)
    elif every is not None or s.checkpoint_indices is not None:
        check_shape(p.op, "checkpoint_indices", s.checkpoint_indices, p.N, "M")
        if every is None:
            expected = f"a multiple of {p.chunk_size} with checkpoint_indices, if there are no checkpoint_offsets"
            refuse(p.op, "checkpoint_every", expected, "None")


def _check_prompts(p: Problem, given: PoolOptions) -> None:
    if given.max_prompts is not None and p.batch_invariant:
        expected = "None with batch_invariant=True, which runs all sequences as prompts"
        refuse(p.op, "max_prompts", expected, given.max_prompts)


def _check_indices(p: Problem, s: Slots) -> None:
    """Checks of indices that all serving calls share."""
    for name, t in s._asdict().items():
        if t is not None and name not in ("state_pool", "write_pool", "out", "ring_k", "ring_u", "ring_decay"):
            check_kind(
                p.op,
                name.replace("ring_", "ring."),
                t,
                p.device,
                (torch.bool,) if name == "has_initial_state" else INDEX_DTYPES,
            )


def _check_out(p: Problem, out: Tensor) -> None:
    check_shape(p.op, "out", out, p.B, p.T, p.HV, p.V)
    check_kind(p.op, "out", out, p.device, (p.dtype,))
    if not out.is_contiguous():
        refuse(p.op, "out", "a contiguous tensor", f"strides {list(out.stride())}")
    if not is_traced(out) and out.data_ptr() % 16:
        refuse(p.op, "out", "memory that begins at a multiple of 16 bytes", f"{out.data_ptr() % 16} bytes after one")


def _check_apart(op: str, out: Tensor, others: Iterable[tuple[str, Tensor | None]]) -> None:
    """Refuse an ``out`` that shares memory with another argument."""
    start, stop = _span(out)
    for name, t in others:
        if t is not None:
            first, end = _span(t)
            if start < end and first < stop:
                refuse(op, "out", "memory that no other argument has", f"memory of {name}")


def _span(t: Tensor) -> tuple[int, int]:
    """The addresses of its first byte, and of the byte after its last. Both are 0 if it has none."""
    if t.numel() == 0 or t.device.type == "meta":
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()
