"""The launcher of `decode` (see launch.py), and how it counts its way from token to token."""

from collections.abc import Iterator

from torch import Tensor

from flash_delta.kernels.triton.decode import decode
from flash_delta.kernels.triton.launch import columns, every, plan, short, states, table
from flash_delta.kernels.triton.launcher import Call, Plan, alone, launch, unit
from flash_delta.kernels.triton.tiles import Tile, decode_tiles
from flash_delta.problem import Around, Slots


def run_decode(c: Call, o: Tensor, *choice: Tile) -> None:
    """``c.more`` are the call's `Slots` and what is `Around`; a prefill's rows are its sequences. No products are
    contracted: how depends on what else is compiled with them."""
    p, x, s, around = c.p, c.x, Slots(*c.more[: len(Slots._fields)]), Around(*c.more[len(Slots._fields) :])
    write, heads = s.write_indices, p.HV // p.H if p.taps else 1
    first_written = p.T - 1 if write is not None and write.dim() == 1 else 0
    one, beside = alone(p), short(p) > 0 and not p.recurrent  # the kernels of a prefill
    per_token = [counted(y, one) for y in (x.q, x.k, x.v, x.g, x.beta, around.norm_gate)]
    conv = around.conv_pool

    def plans() -> Iterator[Plan]:
        rows = p.N if p.packed else p.B
        slot, *inner = states(p, s.state_pool)
        for chosen in choice or decode_tiles(p, c.shape.chip, every(c)):
            programs = rows * (p.HV // heads) * -(-p.V // columns(p, chosen)) + beside
            yield plan(
                c, decode, (programs, 1, 1), chosen,
                p.N, p.T, len(s.state_pool), s.read_indices.shape[-1], first_written,
                p.scale, p.lower_bound or 0.0, p.beta_range, p.eps or 0.0, slot, 0 if conv is None else conv.stride(0),
                *(count for counts, _ in per_token for count in counts),
                *table(s.read_indices), table(s.num_accepted_tokens)[0], *table(write), *table(s.parent_idx),
                table(s.has_initial_state)[0], *(strides for _, strides in per_token),
                HEADS=heads, ALONE=one, STRIDES=tuple(inner), ACTIVATION=p.activation,
                CONV=None if conv is None else (p.taps, p.window, *conv.stride()[1:]), follows=beside,
            )._replace(contracts=False)  # fmt: skip

    pointers = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, s.state_pool, s.read_indices, write)
    more = (s.num_accepted_tokens, s.parent_idx, s.has_initial_state, x.cu_seqlens)
    launch(c, decode, (*pointers, *more, *around, o), plans)


def counted(t: Tensor | None, one: bool) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Strides of (row, token) in units, and of (unit, head, channel)."""
    if t is None:
        return (0, 0), (0, 0, 0)
    row, token, *others = t.stride()
    size = unit(row, token, one)
    return (row // size, token // size), (size, *others)
