"""What the compile gate compiles around the rule for prompts on a pool (see rule.py)."""

from collections.abc import Iterator
from functools import partial

import torch

from flash_delta.compiler import Launch
from flash_delta.kernels.triton.serving.prompts import make_convolved, run_after, run_before
from flash_delta.problem import Around, Pools, Slots
from workshop.gate.cases.rule import CHUNKS, Kernels, RuleCase, problem_of

PROMPTS = {
    "prompts-gdn-128": RuleCase(),
    "prompts-gdn-64-float32": CHUNKS["gdn-64-float32"],
    "prompts-gdn-100-apart": RuleCase(100, gap=5),
}


def call_prompts(case: RuleCase, offsets: bool = False) -> None:
    """The launches before and after the rule, with checkpoints at strides or at ``offsets``."""
    (p, x), new = problem_of(case), partial(torch.empty, device="meta")
    index, has = new(p.N, dtype=torch.int32), new(p.N, dtype=torch.bool)
    checkpoints = (index, index) if offsets else (new(p.N, 2, dtype=torch.int32), None)
    s = Slots(new(9, *p.state_shape[1:]), index, index, None, None, has, *checkpoints)
    D = 2 * p.H * p.K + p.HV * p.V
    weight, bias = new(D, 4, dtype=p.dtype), new(D, dtype=p.dtype)
    around = Around(new(9, D, 4, dtype=p.dtype), weight, bias, x.v, new(p.V))
    pools = Pools(1e-6, "silu", checkpoint_every=64, checkpoint_offsets=offsets, taps=4, window=4)
    p = p._replace(pools=pools)
    kernels = Kernels(p, x._replace(initial_state=None), s, around)
    run_before(kernels.c, *kernels.more, make_convolved(kernels.c.made, p))
    run_after(kernels.c, *kernels.more, kernels.results().o)
    kernels.launch()


def launches(target: str) -> Iterator[Launch]:
    for name, case in PROMPTS.items():
        yield Launch(name, partial(call_prompts, case))
    yield Launch("prompts-gdn-128-offsets", partial(call_prompts, RuleCase(), offsets=True))
