"""The scan of packed sequences whose lengths only the device knows: prompts on a pool, and inference without a pool.

`rates` lists the sequences, and cuts long ones into parts (plans/prompt_list.py). Other kernels find the states that
parts start from (scalar/segments/). The loop scans all that is listed."""

from typing import NamedTuple

from torch import Tensor

from flash_delta.kernels.hopper.plans.padding import padded
from flash_delta.kernels.hopper.plans.prompt_list import new_prompt_list
from flash_delta.kernels.hopper.plans.tape import Tape, new_pool_tape
from flash_delta.kernels.hopper.scalar.forward.loop import run_pool_loops
from flash_delta.kernels.hopper.scalar.forward.rates import new_rates, run_rates
from flash_delta.kernels.hopper.scalar.segments.cut import cut_prompts
from flash_delta.kernels.hopper.scalar.segments.maps import run_find_starts
from flash_delta.kernels.hopper.scalar.segments.memory import PromptParts, new_parts
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.chip import Chip, chip_of
from flash_delta.problem import Problem, Slots


class ListedScan(NamedTuple):
    """The tensors that the kernels pass to each other."""

    rates: Tensor
    prompts: Tensor  # the list
    tape: Tape
    parts: PromptParts | None  # None if no sequence of such heads is cut

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return self.rates, self.prompts, *self.tape.memory, *(() if self.parts is None else self.parts.memory)


def lists(p: Problem) -> bool:
    """Whether the device lists the sequences of a forward pass without a pool, and cuts long ones, since it alone knows
    their lengths. The host plans for one sequence, which has at most T tokens. With ``batch_invariant`` none is cut,
    because a sequence without bounds is not cut either."""
    if not p.packed or p.N < 2 or p.lengths is not None or p.needs_grad or p.batch_invariant:
        return False
    wide = padded(p)
    return wide.K <= 128 and cut_prompts(wide, chip_of(p.device).processors) is not None


def new_listed_scan(p: Problem, chip: Chip) -> ListedScan:
    parts = new_parts(p, chip.processors)
    starts = 0 if parts is None else parts.starts
    return ListedScan(new_rates(p), new_prompt_list(p, starts), new_pool_tape(p, chip, starts), parts)


def run_listed_scan(c: Call, o: Tensor, w: ListedScan, slots: Slots, final: Tensor) -> None:
    """Launches the scan. States are read from ``slots.state_pool`` and written to ``final`` (`run_pool_loops`)."""
    parts = w.parts
    if c.every and parts is not None:  # the kernels for parts, too
        parts = new_parts(c.p._replace(N=1, T=1), c.chip.processors, starts=1)
    run_rates(c, o, w.rates, None, w.prompts, slots, w.tape, parts)
    if parts is not None and parts.starts > 0:
        run_find_starts(c, w.rates, w.prompts, w.tape, parts, slots, final)
    run_pool_loops(c, o, w.rates, w.prompts, w.tape, parts, slots, final)
