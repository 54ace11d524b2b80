"""Checks of rings of records: of decoding calls that write or read them, and of calls that apply them to states."""

from typing import NamedTuple

from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.pool import check_pool
from flash_delta.ops._check.rule import DTYPES, INDEX_DTYPES, check_kind, check_shape, refuse_unless_none
from flash_delta.problem import Gate, Pools, Problem, Slots, needs_gradient


class Committed(NamedTuple):
    """The tensors of a call that applies records. All but indices and counts may have a first axis of layers."""

    state_pool: Tensor
    k: Tensor
    u: Tensor
    decay: Tensor
    slots: Tensor
    read: Tensor | None
    counts: Tensor | None
    checkpoint_indices: Tensor | None
    checkpoint_offsets: Tensor | None


class CommitOptions(NamedTuple):
    null_slot: int | None
    state_v_first: bool


NAMES = ("state_pool", "ring.k", "ring.u", "ring.decay", "slots", "ring.read", "ring.counts", *Committed._fields[7:])


def describe_commit(x: Committed, options: CommitOptions) -> Problem:
    """Check a call and describe it: as decoding of tokens whose records are known."""
    op, layers = "commit", ("layers",) if isinstance(x.state_pool, Tensor) and x.state_pool.ndim == 5 else ()
    *_, room, H, K = check_shape(op, "ring.k", x.k, *layers, "pages", "S", "H", "K")
    *before, pages, _, _, _ = x.k.shape
    *_, HV, V = check_shape(op, "ring.u", x.u, *before, pages, room, "HV", "V")
    (B,) = check_shape(op, "slots", x.slots, "B")
    state = (V, K) if options.state_v_first else (K, V)
    check_shape(op, "state_pool", x.state_pool, *before, "slots", HV, *state)
    if layers and not len(x.state_pool):
        refuse(op, "state_pool", "at least one layer (axis 0)", 0)
    channel = isinstance(x.decay, Tensor) and x.decay.ndim == x.k.ndim
    gate = Gate("channel" if channel else "scalar", dtype=x.k.dtype)
    pools = Pools(
        null_slot=-1 if options.null_slot is None else options.null_slot, dtype=x.state_pool.dtype, records=room
    )
    p = Problem(
        op, B, room, H, HV, K, V, B, x.k.dtype, x.k.device, gate, "decayed", 1.0, recurrent=True,
        lengths=(room,) * B, state_v_first=options.state_v_first, pools=pools,
    )  # fmt: skip
    check_records(p, x.k, x.u, x.decay, (*before, pages))
    for name in ("read", "counts"):
        check_shape(op, f"ring.{name}", getattr(x, name), B)
    if x.checkpoint_indices is not None or x.checkpoint_offsets is not None:
        for name in ("checkpoint_indices", "checkpoint_offsets"):
            check_shape(op, name, getattr(x, name), B)
    for name, t in zip(NAMES, x, strict=True):
        if t is not None and needs_gradient((t,)):
            refuse(
                op, name, "a tensor without gradient (call it under torch.no_grad())", "one that requires a gradient"
            )
        if t is not None:
            check_kind(op, name, t, p.device, INDEX_DTYPES if name in NAMES[4:] else DTYPES)
    check_pool(p, "state_pool", x.state_pool, len(layers))
    return p


def check_records(p: Problem, k: Tensor, u: Tensor, decay: Tensor, pages: tuple[int, ...]) -> None:
    """Check the tensors of records. ``pages``: their axes of pages, or of layers and pages."""
    room, HV = p.pools.records, p.HV
    if p.H == 0 or HV % p.H:
        refuse(p.op, "ring.u", f"a multiple of {p.H} heads (axis -2), as ring.k has {p.H}", HV)
    shapes = (p.H, p.K), (HV, p.V), (HV, p.K) if p.gate.kind == "channel" else (HV,)
    for name, t, shape in zip(("ring.k", "ring.u", "ring.decay"), (k, u, decay), shapes, strict=True):
        check_shape(p.op, name, t, *pages, room, *shape)
        check_kind(p.op, name, t, p.device, (p.accumulate,))
        if not t.is_contiguous():
            refuse(p.op, name, "a tensor without gaps", f"strides {list(t.stride())}")


def check_ring(p: Problem, s: Slots, T: int) -> None:
    """Check the ring of a decoding call with rows of up to T tokens."""
    op, why = p.op, "with a ring"
    for name in ("parent_idx", "write_pool"):
        refuse_unless_none(op, name, getattr(s, name), why)
    check_shape(op, "ring.write", s.ring_write, p.N)
    for name in ("read", "counts") if s.ring_read is not None or s.ring_counts is not None else ():
        check_shape(op, f"ring.{name}", getattr(s, f"ring_{name}"), p.N)
    if s.write_indices is not None:
        check_shape(op, "write_indices", s.write_indices, p.N)
        if s.ring_read is None:
            refuse(op, "write_indices", "None with a ring without read: no state changes", "a tensor")
    if not isinstance(s.ring_k, Tensor) or s.ring_k.ndim != 4:
        check_shape(op, "ring.k", s.ring_k, "pages", "S", p.H, p.K)
    if s.ring_k.shape[1] < T:
        refuse(op, "ring.k", f"room for {T} tokens (axis 1)", s.ring_k.shape[1])
    check_records(p, s.ring_k, s.ring_u, s.ring_decay, s.ring_k.shape[:1])
