"""What the compile gate compiles: copies of heads to another width, and back."""

from collections.abc import Iterator
from functools import partial

import torch

from flash_delta.compiler import Launch
from flash_delta.kernels.hopper.plans.padding import PaddedResults, gradients_in, padded, run_narrow, run_widen
from flash_delta.kernels.hopper.scalar.plan import new_results
from flash_delta.kernels.triton.backward.plan import make_gradients
from workshop.gate.cases.rule import Planned, RuleCase, problem_of

PADDED = {"padded": 100, "padded-60": 60, "padded-96": 96}  # widths of heads, of packed sequences with states


def call_padding(case: str, *, back: bool) -> None:
    """The launches before and after the kernels of a call whose heads are padded."""
    p, x = problem_of(RuleCase(PADDED[case], raw=True))
    kernels = Planned(p._replace(needs_grad=True), x)
    c, made, p = kernels.c, kernels.made, kernels.p
    if back:
        _, copies = run_widen(c, made.like("do", kernels.x.v), made.new("dfinal", p.state_shape, torch.float32))
        d, _ = make_gradients(made, p, kernels.x)
        found, wanted = (PaddedResults((t.q, t.k, t.v), t.initial_state) for t in (gradients_in(made, copies, d), d))
    else:
        run_widen(c)
        results = (new_results(made, *of) for of in ((padded(p), "wide "), (p,)))
        found, wanted = (PaddedResults((None, None, o), final) for o, final in results)
    run_narrow(c, found, wanted)
    kernels.launch()


def launches() -> Iterator[Launch]:
    for case in PADDED:
        for back in (False, True):
            yield Launch(f"{case}-back" if back else case, partial(call_padding, case, back=back))
