"""What the compile gate compiles: the launchers, on problems that models have."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_delta.compiler import Launch
from flash_delta.kernels.runtime.arguments import draft_of
from flash_delta.kernels.runtime.chip import Chip, Tile, chip_of, takes_tma
from flash_delta.kernels.runtime.plan import Layout, layouts_of
from flash_delta.kernels.runtime.run import ByTriton, given_to
from flash_delta.kernels.runtime.workspace import (
    Channels,
    Factors,
    HeadGradients,
    Residual,
    Scores,
    Solved,
    StateGradients,
    make_groups,
)
from flash_delta.kernels.triton.backward.chunks import find_gradients
from flash_delta.kernels.triton.backward.plan import make_gradients
from flash_delta.kernels.triton.backward.scan_backward import run_scan_backward
from flash_delta.kernels.triton.backward.segments import new_segmented_back, run_ends, run_segments_back
from flash_delta.kernels.triton.forward.channel import run_channel
from flash_delta.kernels.triton.forward.factor import run_factor
from flash_delta.kernels.triton.forward.plan import run_chunks
from flash_delta.kernels.triton.forward.scan import run_scan
from flash_delta.kernels.triton.forward.segments import (
    compose_states,
    new_segmented_scan,
    run_compose,
    run_maps,
    run_segments,
)
from flash_delta.kernels.triton.forward.solve import run_solve
from flash_delta.kernels.triton.tiles import Segments, maps_tile, scan_tiles, segment_tiles, tile, widest_key
from flash_delta.problem import Inputs, Problem
from workshop.gate.cases.members import CHUNKS, SCANS, SPLIT, RuleCase, problem_of

Tensors = dict[str, Tensor]


class Results(NamedTuple):
    """The results of a scan."""

    o: Layout
    final_state: Layout


class Planned:
    """A draft of launches on one problem. ``launch`` launches what is planned."""

    def __init__(self, p: Problem, x: Inputs, *more: NamedTuple):
        self.p, self.groups = p, (x, *more)
        self.x, *self.more = map(layouts_of, self.groups)
        self.c = draft_of(p, chip_of(p.device), self.x)
        self.made = self.c.made

    def launch(self, *groups: NamedTuple) -> Tensors:
        """Launches what is planned. Returns the tensors of these groups of the plan's memory, by field."""
        read = {name: t for group in groups for name, t in group._asdict().items() if t is not None}
        plan = self.c.plan(*read.values())
        found = ByTriton(plan, given_to(plan, self.groups))(self.p.device, self.groups)
        return dict(zip(read, found, strict=True))

    def results(self) -> Results:
        final = self.made.new("final_state", self.p.state_shape, torch.float32)
        return Results(self.made.new("o", self.p.o_shape, self.p.dtype), final)


class Kernels(Planned):
    """The launchers of ``triton``, with the tensors that kernels write for each other."""

    def __init__(self, p: Problem, x: Inputs, *more: NamedTuple):
        super().__init__(p, x, *more)
        groups = (Channels, Solved, Factors, Residual, StateGradients, Scores, HeadGradients)
        parts = make_groups(self.made, p, *groups)
        self.channels, self.solved, self.factors, self.residual, self.chain, self.scores, self.heads = parts
        self.memory = dict(zip(groups, parts, strict=True))

    def channel_again(self) -> None:
        """Launches it as in the backward pass, where it does not write w . v."""
        run_channel(self.c, self.solved, self.channels, valued=False)

    def solve(self) -> None:
        run_solve(self.c, self.channels, self.solved)

    def factor(self, t: Tile | None = None) -> None:
        run_factor(self.c, self.solved, self.factors, t)

    def chunks(self) -> None:
        """The kernels before the scans."""
        run_chunks(self.c, self.solved, self.factors, self.channels)

    def scan(self, save: bool, t: Tile) -> Results:
        results, residual = self.results(), self.residual if save else None
        run_scan(self.c, self.channels, self.solved, self.factors, *results, residual, t)
        return results

    def maps(self, split: Segments) -> None:
        """The maps of segments, and the states that segments start from."""
        segmented = new_segmented_scan(self.p, split, self.made)
        run_maps(self.c, self.channels, self.solved, self.factors, segmented)
        run_compose(self.c, segmented)

    def segments(self, split: Segments) -> None:
        segmented = new_segmented_scan(self.p, split, self.made)
        run_segments(self.c, self.channels, self.solved, self.factors, *self.results(), segmented)

    def segments_back(self, split: Segments, ends: bool) -> None:
        """The backward scan of segments. ``ends``: instead the launches before it, except those of maps."""
        read = (self.c, self.channels, self.solved, self.factors)
        back, state, do = new_segmented_back(self.p, split, self.made), self.x.initial_state, self.x.v
        if ends:
            run_ends(*read, do, state, back)
            compose_states(self.c, back.scan, back.D, back.ends, state, back=True)
        else:
            run_segments_back(*read, self.residual, do, self.chain, state, back, recompute=True)

    def scan_backward(self, recompute: bool, t: Tile) -> None:
        state, do = self.x.initial_state, self.x.v
        dinitial = self.made.like("dinitial_state", state)
        run_scan_backward(
            self.c, self.channels, self.solved, self.factors, self.residual, do, state, self.chain, dinitial, t,
            recompute=recompute,
        )  # fmt: skip

    def gradients(self) -> None:
        d, parts = make_gradients(self.made, self.p, self.x)
        find_gradients(self.c, self.memory, self.x.v, d._replace(**parts))
        if self.p.gate.kind == "scalar" and self.p.K != 128:
            self.c.steps.pop()  # the code of `gates` does not depend on the width


def call_chunks(case: RuleCase) -> None:
    kernels = Kernels(*problem_of(case))
    kernels.chunks()
    kernels.gradients()
    kernels.launch()


def call(form: str, case: RuleCase, *more: Any) -> None:
    """``form``: a method of `Kernels`."""
    kernels = Kernels(*problem_of(case))
    getattr(kernels, form)(*more)
    kernels.launch()


def launches(target: str) -> Iterator[Launch]:
    """Scans that save tensors (``disable_recompute``), and backward scans that read these, come with one width only.
    With a strength per channel scans in the forward pass read w . v, so they have the code of others."""
    chip = Chip(target.removesuffix("a"), 1)
    for name, case in CHUNKS.items():
        if case.width <= widest_key(problem_of(case)[0]._replace(needs_grad=True), chip):
            yield Launch(name, partial(call_chunks, case))
            if case.strength:
                yield Launch(f"{name}-again", partial(call, "channel_again", case))
    unaligned = {"gdn-128-unaligned": RuleCase(gap=1)} if takes_tma(chip) else {}
    for name, case in (SCANS | unaligned).items():
        p, _ = problem_of(case)
        forms = {
            "": ("scan", partial(call, "scan", case, False)),
            "-recomputed": ("scan_both", partial(call, "scan_backward", case, True)),
            "-saved": ("scan_kept", partial(call, "scan", case, True)),
            "-backward": ("scan_backward", partial(call, "scan_backward", case, False)),
        }
        for form in forms if name == "gdn-128" else ("-recomputed",) if case.strength else ("", "-recomputed"):
            kernel, launch = forms[form]
            for t in scan_tiles(kernel, p, chip, every=True):
                yield Launch(f"{name}-BV={t.BV}{form}", partial(launch, t))
        if name in SPLIT:
            splits = [Segments(128, maps_tile(p, chip), tile("compose", p, chip), t) for t in segment_tiles(p, chip)]
            yield Launch(f"{name}-maps", partial(call, "maps", case, splits[0]))
            yield Launch(f"{name}-segments-back", partial(call, "segments_back", case, splits[0], False))
            if case.strength:
                continue
            for split in splits:
                yield Launch(f"{name}-BV={split.scan.BV}-segments", partial(call, "segments", case, split))
            yield Launch(f"{name}-ends-back", partial(call, "segments_back", case, splits[0], True))
