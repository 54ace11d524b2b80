"""What the compile gate compiles: copies of heads to another width, and back."""

from collections.abc import Iterator
from functools import partial

import torch

from flash_delta.compiler import Launch
from flash_delta.kernels.hopper.plans.padding import (
    PaddedResults,
    gradients_in,
    new_padded,
    padded,
    run_narrow,
    run_widen,
)
from flash_delta.kernels.hopper.plans.unplanned import new_gradients
from flash_delta.kernels.runtime.calls import make_call
from workshop.gate.cases.rule import RuleCase, problem_of

PADDED = {"padded": 100, "padded-60": 60, "padded-96": 96}  # widths of heads, of packed sequences with states


def call_padding(case: str, *, back: bool) -> None:
    """The launches before and after the kernels of a call whose heads are padded."""
    p, x = problem_of(RuleCase(PADDED[case], raw=True))
    p = p._replace(needs_grad=True)
    if back:
        outer, d = (torch.empty_like(x.v), torch.empty(p.state_shape, device="meta")), new_gradients(p, x)
        copies = new_padded(p, x, *outer)
        found, wanted = (PaddedResults((t.q, t.k, t.v), t.initial_state) for t in (gradients_in(copies, d), d))
    else:
        outer, copies = (), new_padded(p, x)
        found, wanted = (
            PaddedResults((None, None, x.v.new_empty(p.B, p.T, p.HV, q.V)), torch.empty(q.state_shape, device="meta"))
            for q in (padded(p), p)
        )
    c = make_call(p, x, ("launches", back), *outer)._replace(direct=False)
    run_widen(c, copies)
    run_narrow(c, found, wanted)


def launches() -> Iterator[Launch]:
    for case in PADDED:
        for back in (False, True):
            yield Launch(f"{case}-back" if back else case, partial(call_padding, case, back=back))
