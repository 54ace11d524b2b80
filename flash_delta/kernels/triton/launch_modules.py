"""The launchers of what layers do around the rule (see launch.py): short convolution and RMS norm."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from flash_delta.kernels.triton.convolution import convolve, convolve_backward, convolve_token
from flash_delta.kernels.triton.launcher import Call, Plan, launch
from flash_delta.kernels.triton.norm import normalize, normalize_backward, total
from flash_delta.kernels.triton.tiles import Tile, family, next_power_of_2
from flash_delta.problem import Convolution


class Walk(NamedTuple):
    """How a convolution is cut."""

    warps: int
    BD: int  # channels of a program
    BT: int  # tokens of a program
    G: int  # of which so many are loaded at once


WALKS = {  # 16 bytes of a row of 16-bit numbers are one thread's; AMD's warps are twice as wide
    ("convolve", "nvidia"): Walk(2, 256, 64, 8),
    ("convolve", "amd"): Walk(1, 512, 64, 8),
    # With twice the channels a thread's sums spill.
    ("convolve_backward", "nvidia"): Walk(2, 256, 128, 8),
    ("convolve_backward", "amd"): Walk(1, 256, 128, 4),
}
ROWS, BACKWARD_ROWS = 4096, 1024  # numbers of a norm's tile
PROGRAMS = 1024  # of a norm's backward pass, at most: a few for each multiprocessor, and as many sums to add
TOKEN = Tile(4, 1, 256)
TOTAL = Tile(4, 1, 16)
SUMMED = 128  # rows of a step of ``total``


def walk(kernel: str, c: Call) -> Walk:
    amd = family(c.shape.chip.target) == "gfx942"
    w = WALKS[kernel, "amd" if amd else "nvidia"]
    much = c.p.W > 4 or c.x.x.element_size() > 2  # for a thread's registers
    BD = min(w.BD // 2 if much else w.BD, next_power_of_2(c.p.D))
    return w._replace(BD=BD, G=min(w.G, 4) if c.p.W > 4 else w.G)


def count_walks(p: Convolution, BT: int) -> int:
    """Programs along the tokens: an upper bound, as that of chunks (chunk.count_slots)."""
    return p.T // BT + p.N + 1 if p.packed else p.N * -(-p.T // BT)


def count_parts(c: Call) -> int:
    """Rows of what `run_convolve_backward` leaves to be summed."""
    return count_walks(c.p, walk("convolve_backward", c).BT)


def run_convolve(c: Call, y: Tensor, final: Tensor | None, chosen: Walk | None = None) -> None:
    p, x, w = c.p, c.x, chosen or walk("convolve", c)

    def plans() -> Iterator[Plan]:
        yield _along(c, w, p.N, p.T, x.x.stride(), strides(x.initial_state), **_of(c, w))

    launch(c, convolve, (*x, y, final), plans)


def run_convolve_backward(
    c: Call, dx: Tensor, dinitial: Tensor | None, parts: Tensor, chosen: Walk | None = None
) -> None:
    """``c.more``: dy, and dfinal or None."""
    p, x, (dy, dfinal), w = c.p, c.x, c.more, chosen or walk("convolve_backward", c)

    def plans() -> Iterator[Plan]:
        yield _along(
            c, w, p.N, p.T, x.x.stride(), strides(x.initial_state), dy.stride(), strides(dfinal), **_of(c, w)
        )  # fmt: skip

    launch(c, convolve_backward, (*x, dy, dfinal, dx, dinitial, parts), plans)


def run_convolve_token(c: Call, y: Tensor) -> None:
    """One token of each row, x [N, D]; the state moves on in place."""
    p, x = c.p, c.x
    BD = min(TOKEN.BV, next_power_of_2(p.D))

    def plans() -> Iterator[Plan]:
        constants = {"D": p.D, "W": p.W, "BD": BD, "SILU": p.activation is not None}
        grid = (p.N * -(-p.D // BD), 1, 1)
        yield Plan(grid, TOKEN, (x.x.stride(), x.initial_state.stride()), constants, follows=False)

    launch(c, convolve_token, (x.x, x.initial_state, x.weight, x.bias, y), plans)


def run_normalize(c: Call, y: Tensor) -> None:
    """x and the gate are rows [M, D]."""
    x, BD, rows, t = c.x, *_rows(c, ROWS)

    def plans() -> Iterator[Plan]:
        M = len(x.x)
        scalars = M, c.p.eps, x.x.stride(0), strides(x.gate)[0]
        constants = {"D": c.p.D, "BD": BD, "ROWS": rows, "ACTIVATION": c.p.activation}
        yield Plan((-(-M // rows), 1, 1), t, scalars, constants, follows=False)

    launch(c, normalize, (x.x, x.gate, x.weight, y), plans)


def count_row_parts(c: Call) -> int:
    """Programs of `run_normalize_backward`."""
    _, rows, _ = _rows(c, BACKWARD_ROWS)
    return min(PROGRAMS, -(-len(c.x.x) // rows))


def run_normalize_backward(c: Call, dx: Tensor, dgate: Tensor | None, parts: Tensor) -> None:
    """``c.more``: dy [M, D]."""
    x, (dy,), BD, rows, t = c.x, c.more, *_rows(c, BACKWARD_ROWS)

    def plans() -> Iterator[Plan]:
        programs = len(parts)
        scalars = len(x.x), c.p.eps, programs * rows, x.x.stride(0), strides(x.gate)[0], dy.stride(0)
        constants = {"D": c.p.D, "BD": BD, "ROWS": rows, "ACTIVATION": c.p.activation}
        yield Plan((programs, 1, 1), t, scalars, constants, follows=False)

    launch(c, normalize_backward, (x.x, x.gate, x.weight, dy, dx, dgate, parts), plans)


def run_total(c: Call, parts: Tensor, dweight: Tensor, dbias: Tensor | None) -> None:
    P, rows, D = parts.shape

    def plans() -> Iterator[Plan]:
        constants = {"D": D, "W": dweight.numel() // D, "ROWS": rows, "BP": SUMMED, "BD": TOTAL.BV}
        yield Plan((-(-D // TOTAL.BV), rows, 1), TOTAL, (P,), constants, follows=False)

    launch(c, total, (parts, dweight, dbias), plans)


def strides(t: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if t is None else t.stride()


def _along(c: Call, w: Walk, *scalars: int | tuple[int, ...], **constants: int | bool) -> Plan:
    grid = (count_walks(c.p, w.BT) * -(-c.p.D // w.BD), 1, 1)
    return Plan(grid, Tile(w.warps, 1), scalars, constants, follows=False)


def _of(c: Call, w: Walk) -> dict[str, int | bool]:
    p = c.p
    return {
        "D": p.D, "W": p.W, "BT": w.BT, "BD": w.BD, "G": w.G, "PACKED": p.packed, "SILU": p.activation is not None
    }  # fmt: skip


def _rows(c: Call, numbers: int) -> tuple[int, int, Tile]:
    """Columns and rows of a norm's tile, and its warps."""
    BD = next_power_of_2(c.p.D)
    return BD, max(1, numbers // BD), Tile(4 if numbers >= BD else 8, 1)
