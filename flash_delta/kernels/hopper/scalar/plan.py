"""Plans the forward pass with one decay per value head: of which widths, by which kernels, in segments or not.

Heads of other widths than 64, 128 and 256 are padded (plans/padding.py). If only the device knows the lengths, it may
list the sequences and cut long ones (scalar/listed.py)."""

from typing import NamedTuple

import torch

from flash_delta.kernels.hopper.plans.boxes import as_taken
from flash_delta.kernels.hopper.plans.padding import PaddedResults, padded, pads, run_narrow, run_widen
from flash_delta.kernels.hopper.plans.splits import loop_tile, loop_tiles, split_endless
from flash_delta.kernels.hopper.plans.tape import new_tape
from flash_delta.kernels.hopper.plans.tiles import WHOLE, LoopTile, Pace, count_programs, needs_tape
from flash_delta.kernels.hopper.scalar import backward, segments
from flash_delta.kernels.hopper.scalar.choices import goes_back, lists, saved_bytes, saved_groups, segment_length
from flash_delta.kernels.hopper.scalar.forward.loop import run_loop
from flash_delta.kernels.hopper.scalar.forward.rate_role import makes_rates
from flash_delta.kernels.hopper.scalar.forward.rates import new_rates, run_rates
from flash_delta.kernels.hopper.scalar.listed import new_listed_scan, run_listed_scan
from flash_delta.kernels.hopper.scalar.segments.memory import new_maps, new_segmented_scan
from flash_delta.kernels.runtime.arguments import draft_of
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import Draft, Layout, Making, Plan
from flash_delta.kernels.runtime.workspace import ForBackward, Trace, groups_in
from flash_delta.problem import Inputs, Problem, Slots


class Scan(NamedTuple):
    """How sequences are scanned."""

    length: int | None  # tokens of a segment; None: sequences are not split
    tile: LoopTile  # of the loop, which scans them if they are not split
    taped: bool  # programs of the loop share sequences


def choose_forward(p: Problem, chip: Chip) -> Scan | None:
    """How a call scans its sequences. None: the device lists them."""
    if lists(p, chip):
        return None
    wide, saving = padded(p), p.disable_recompute and goes_back(p)
    tile = loop_tile(wide, chip, saving)
    length, programs = segment_length(wide, chip), count_programs(wide, chip, tile, p.N)
    return Scan(length, tile, length is None and wide.K != WHOLE and needs_tape(wide, programs, tile.pace))


def later(p: Problem, chip: Chip, x: Inputs) -> Plan | None:
    """Plans what is compiled together with a forward pass."""
    return backward.plan.plan_usual_backward(p, chip, x) if goes_back(p) else None


def plan_forward(p: Problem, chip: Chip, x: Inputs, *, choice: Scan | None) -> Plan:
    """o, the final states, what is saved for the backward pass, and the maps of segments if that pass takes them."""
    made, wide = Making(), padded(p)
    c = draft_of(p, chip, x if pads(p) else as_taken(made, x), choice, made)
    o, final = new_results(made, p)
    saved, kept, maps = None, (None, None), None
    if goes_back(p):
        saved = made.new("saved", (saved_bytes(p),), torch.uint8)
        kept = *groups_in(saved, wide, *saved_groups(p)), None
    if saved is not None and not c.every and choice.length is not None:
        maps = new_maps(made, wide, choice.length)
    if not pads(p):
        _scan(c, o, final, choice, maps, *kept[:2])
        return c.plan(o, final, saved, maps)
    inside, _ = run_widen(c)
    found = new_results(made, wide, "wide ")
    _scan(inside, *found, choice, maps, *kept[:2])
    run_narrow(c, PaddedResults((None, None, found[0]), found[1]), PaddedResults((None, None, o), final))
    return c.plan(o, final, saved, maps)


def new_results(made: Making, p: Problem, width: str = "") -> tuple[Layout, Layout]:
    """o, and the final states."""
    o = made.new(f"{width}o", p.o_shape, p.dtype)
    return o, made.new(f"{width}final_state", p.state_shape, torch.float32)


def _scan(
    c: Draft, o: Layout, final: Layout, choice: Scan | None, maps: Layout | None, saved: ForBackward | None,
    trace: Trace | None,
) -> None:  # fmt: skip
    """Launches all kernels of heads that are not padded."""
    if c.every:
        _scan_in_every_way(c, o, final, saved, trace)
    elif choice is None:
        _scan_listed(c, o, final)
    elif choice.length is not None or c.p.K == WHOLE:
        w = new_segmented_scan(c.made, c.p, choice.length, saved and saved.A, maps)
        rates = new_rates(c.made, c.p)
        run_rates(c, o, rates, saved)
        segments.run.run_segmented_scan(c, o, final, rates, w, trace)
    else:
        t, tape = choice.tile, None
        if choice.taped:
            tape = new_tape(c.made, c.p, count_programs(c.p, c.chip, t, c.p.N), t.pace)
        run_loop(c, o, final, _rates(c, o, saved), saved and saved.A, t, trace=trace, tape=tape)


def _rates(c: Draft, o: Layout, saved: ForBackward | None) -> Layout | None:
    """What `rates` writes. None if the loop makes it."""
    if makes_rates(c.p):
        return None
    rates = new_rates(c.made, c.p)
    run_rates(c, o, rates, saved)
    return rates


def _scan_listed(c: Draft, o: Layout, final: Layout) -> None:
    """Scans packed sequences that the device lists. Sequence n has slot n, as on a pool."""
    w = new_listed_scan(c.made, c.p, c.chip)
    run_listed_scan(c, o, w, Slots(c.x.initial_state, None), final)


def _scan_in_every_way(
    c: Draft, o: Layout, final: Layout, saved: ForBackward | None, trace: Trace | None
) -> None:  # fmt: skip
    """Plans what calls of any size may launch. With another number of sequences the device may list them."""
    p, A = c.p, saved and saved.A
    one, length = p._replace(N=1, T=1), split_endless(p, c.chip.processors, back=goes_back(p))
    if p.K != WHOLE:
        tiles, tape = loop_tiles(p.K, trace is not None), new_tape(c.made, p, 1, Pace(1))
        rates = _rates(c, o, saved)
        for each in (None, tape):
            run_loop(c, o, final, rates, A, *tiles, trace=trace, tape=each)
    if length is not None or p.K == WHOLE:
        rates = new_rates(c.made, one)
        run_rates(c, o, rates, saved)
        segments.run.run_segmented_scan(c, o, final, rates, new_segmented_scan(c.made, one, length), trace)
    if lists(p._replace(N=2), c.chip):
        _scan_listed(c, o, final)
