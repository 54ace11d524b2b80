"""The scan of packed sequences whose lengths only the device knows: prompts on a pool, and inference without a pool.

`rates` lists the sequences, and cuts long ones into parts (plans/prompt_list.py). Other kernels find the states that
parts start from (scalar/segments/). The loop scans all that is listed."""

from typing import NamedTuple

from flash_delta.kernels.hopper.plans.prompt_list import new_prompt_list
from flash_delta.kernels.hopper.plans.tape import Tape, new_pool_tape
from flash_delta.kernels.hopper.scalar import segments
from flash_delta.kernels.hopper.scalar.forward.loop import run_pool_loops
from flash_delta.kernels.hopper.scalar.forward.rates import new_rates, run_rates
from flash_delta.kernels.hopper.scalar.segments.memory import PromptParts, new_parts
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import Draft, Layout, Making
from flash_delta.problem import Problem, Slots


class ListedScan(NamedTuple):
    """The tensors that the kernels pass to each other."""

    rates: Layout
    prompts: Layout  # the list
    tape: Tape
    parts: PromptParts | None  # None if no sequence of such heads is cut


def new_listed_scan(made: Making, p: Problem, chip: Chip) -> ListedScan:
    parts = new_parts(made, p, chip.processors)
    starts = 0 if parts is None else parts.starts
    return ListedScan(new_rates(made, p), new_prompt_list(made, p, starts), new_pool_tape(made, p, chip, starts), parts)


def run_listed_scan(c: Draft, o: Layout, w: ListedScan, slots: Slots, final: Layout) -> None:
    """Launches the scan. States are read from ``slots.state_pool`` and written to ``final`` (`run_pool_loops`)."""
    parts = w.parts
    if c.every and parts is not None:  # the kernels for parts, too
        parts = new_parts(c.made, c.p._replace(N=1, T=1), c.chip.processors, starts=1)
    run_rates(c, o, w.rates, None, w.prompts, slots, w.tape, parts)
    if parts is not None and parts.starts > 0:
        segments.maps.run_find_starts(c, w.rates, w.prompts, w.tape, parts, slots, final)
    run_pool_loops(c, o, w.rates, w.prompts, w.tape, parts, slots, final)
