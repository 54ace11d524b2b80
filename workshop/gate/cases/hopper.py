"""What the compile gate compiles of the hand-written kernels: their launches, on problems that models have."""

from collections.abc import Iterator
from functools import partial

import torch

from flash_delta.compiler import Launch
from flash_delta.kernels.hopper.channel.backward.gradients import run_chunk_back
from flash_delta.kernels.hopper.channel.forget import new_forgets, run_find_forgetting
from flash_delta.kernels.hopper.channel.loop import run_channel_loop
from flash_delta.kernels.hopper.channel.prepare import run_prepare
from flash_delta.kernels.hopper.channel.scan import run_scan_channels
from flash_delta.kernels.hopper.plans.tape import new_tape, run_lay_tape
from flash_delta.kernels.hopper.plans.tiles import (
    CHANNEL_HALF,
    CHANNEL_PACE,
    CHANNEL_WHOLE,
    NARROW,
    SAVING,
    SLIM,
    WHOLE,
    WIDE,
    LoopTile,
)
from flash_delta.kernels.hopper.scalar.choices import goes_back, saved_groups
from flash_delta.kernels.hopper.scalar.forward.loop import run_loop
from flash_delta.kernels.hopper.scalar.forward.rate_role import makes_rates
from flash_delta.kernels.hopper.scalar.forward.rates import new_rates, run_rates
from flash_delta.kernels.hopper.scalar.segments.memory import new_segmented_scan
from flash_delta.kernels.hopper.scalar.segments.run import run_segmented_scan
from flash_delta.kernels.runtime.workspace import (
    Channels,
    DeepChunks,
    Prepared,
    Residual,
    Solved,
    StateGradients,
    make_groups,
)
from flash_delta.kernels.triton.backward.plan import make_gradients
from flash_delta.problem import Inputs, Problem
from workshop.gate.cases import channel_prompts, padding, pools
from workshop.gate.cases.hopper_back import call_back, call_gates_back
from workshop.gate.cases.members import describe
from workshop.gate.cases.rule import Planned, RuleCase, problem_of


def batched() -> tuple[Problem, Inputs]:
    """Batch rows instead of packed sequences. States start from zero, and are [V, K]."""
    new = partial(torch.empty, 2, 192, device="meta")
    q, v, g = new(2, 128, dtype=torch.bfloat16), new(4, 128, dtype=torch.bfloat16), new(4)
    x = Inputs(q, q, v, g, g)
    return describe(x)._replace(state_v_first=True), x


def alike() -> tuple[Problem, Inputs]:
    """A call with as many key heads as value heads, with norms. A program of `rates` then has one head."""
    p, x = problem_of(RuleCase())
    return p._replace(H=p.HV, l2norm=True), x._replace(q=x.v, k=x.v)


def channels(
    *, packed: bool, raw: bool = True, bound: float | None = None, g_dtype: torch.dtype = torch.bfloat16,
    strength: bool = False,
) -> tuple[Problem, Inputs]:  # fmt: skip
    """A call with a decay per channel. Without ``packed`` it has no norms, no logits of beta and no initial states."""
    p, x = problem_of(RuleCase(gate="channel", raw=raw, bound=bound, strength=strength))
    p, x = p._replace(gate=p.gate._replace(dtype=g_dtype)), x._replace(g=x.g.to(g_dtype))
    if packed:
        return p, x
    p = p._replace(N=1, packed=False, l2norm=False, raw_beta=False, state_v_first=True)
    return p, x._replace(cu_seqlens=None, initial_state=None)


def channel_gradients(
    *, raw: bool, bound: float | None = None, g_dtype: torch.dtype = torch.float32, l2norm: bool = True,
    strength: bool = False,
) -> tuple[Problem, Inputs]:  # fmt: skip
    """A backward pass with as many key heads as value heads. Norms and a float32 g take the most shared memory."""
    p, x = problem_of(RuleCase(gate="channel", raw=raw, bound=bound, strength=strength))
    x = x._replace(q=x.v, k=x.v, g=x.g.to(g_dtype))
    return p._replace(H=p.HV, needs_grad=True, gate=p.gate._replace(dtype=g_dtype), l2norm=l2norm), x


def training(width: int, *, saving: bool = False, **case: bool | int) -> tuple[Problem, Inputs]:
    p, x = problem_of(RuleCase(width, **({"raw": True} | case)))
    return p._replace(needs_grad=True, disable_recompute=saving), x


CASES = {
    "packed": partial(problem_of, RuleCase()),
    "packed-raw": partial(problem_of, RuleCase(raw=True)),
    "packed-float16": partial(problem_of, RuleCase(dtype=torch.float16)),
    "batched": batched,
    "training": partial(training, 128),
    "training-given": partial(training, 128, raw=False),
    "packed-64": partial(problem_of, RuleCase(64)),
    "training-64": partial(training, 64),
    "packed-256": partial(problem_of, RuleCase(256)),
    "training-256": partial(training, 256),
    "saving": partial(training, 128, saving=True),
    "saving-given": partial(training, 128, saving=True, raw=False),
    "saving-64": partial(training, 64, saving=True),
    "steps": partial(problem_of, RuleCase(steps=2)),
    "steps-training": partial(training, 128, steps=2),
    "steps-saving-64": partial(training, 64, saving=True, steps=4),
}
CHANNELS = {
    "channel": partial(channels, packed=True, bound=-5.0),
    "channel-rows": partial(channels, packed=False, bound=-5.0),
    "channel-free": partial(channels, packed=True),
    "channel-logs": partial(channels, packed=True, raw=False),
    "channel-logs-float32": partial(channels, packed=False, raw=False, g_dtype=torch.float32),
    "channel-promised-float32": partial(channels, packed=False, raw=False, bound=-5.0, g_dtype=torch.float32),
    "gdn2": partial(channels, packed=True, bound=-5.0, strength=True),
    "gdn2-rows": partial(channels, packed=False, bound=-5.0, strength=True),
    "gdn2-free": partial(channels, packed=True, strength=True),
    "gdn2-logs-float32": partial(channels, packed=True, raw=False, g_dtype=torch.float32, strength=True),
}
# In training: whether `prepare` writes A, and whether it writes L. The first is of the forward pass, and writes w . v.
CHANNELS_BACK = {"training": (True, False), "training-back": (False, True), "training-again": (True, True)}
GRADIENTS = {
    "channel-back": partial(channel_gradients, raw=False, l2norm=False),
    "channel-back-norm": partial(channel_gradients, raw=False),
    "channel-back-raw": partial(channel_gradients, raw=True, g_dtype=torch.bfloat16),
    "channel-back-raw-float32": partial(channel_gradients, raw=True),
    "channel-back-bounded": partial(channel_gradients, raw=True, bound=-5.0, g_dtype=torch.bfloat16),
    "channel-back-promised": partial(channel_gradients, raw=False, bound=-5.0, l2norm=False),
    "gdn2-back": partial(channel_gradients, raw=False, g_dtype=torch.bfloat16, strength=True),
    "gdn2-back-raw": partial(channel_gradients, raw=True, g_dtype=torch.bfloat16, strength=True),
    "gdn2-back-bounded": partial(channel_gradients, raw=True, bound=-5.0, g_dtype=torch.bfloat16, strength=True),
}
RATES = CASES | {"packed-alike": alike}
FORMS = {64: {"slim": SLIM}, 128: {"wide": WIDE, "narrow": NARROW}, 256: {}}
CHANNEL_FORMS = {
    "": None,
    "-loop": CHANNEL_WHOLE,
    "-loop-half": CHANNEL_HALF,
    "-parts": CHANNEL_WHOLE,
    "-tape": CHANNEL_WHOLE,
}
SAVING_FORMS = {64: {"slim": SAVING[64]}, 128: {"narrow": SAVING[128]}, 256: {}}


class ByHand(Planned):
    """The launchers of `hopper`, with one decay per value head, and the memory for the backward pass."""

    def __init__(self, case: str):
        super().__init__(*RATES[case]())
        p = self.p
        self.rates, saves = new_rates(self.made, p), goes_back(p)
        groups = make_groups(self.made, p, *saved_groups(p)) if saves else [None]
        self.saved, self.trace = groups[0], groups[1] if saves and p.disable_recompute else None


def call_rates(case: str) -> None:
    kernels = ByHand(case)
    run_rates(kernels.c, kernels.results().o, kernels.rates, kernels.saved)
    kernels.launch()


def call_loop(case: str, t: LoopTile, *, taped: bool) -> None:
    kernels = ByHand(case)
    p, saved = kernels.p, kernels.saved
    tape = new_tape(kernels.made, p, 1, t.pace) if taped else None
    rates, A = None if makes_rates(p) else kernels.rates, saved and saved.A
    run_loop(kernels.c, *kernels.results(), rates, A, t, trace=kernels.trace, tape=tape)
    kernels.launch()


def call_tape(case: str, *, follows: bool) -> None:
    kernels = ByHand(case)
    run_lay_tape(kernels.c, new_tape(kernels.made, kernels.p, 1, WIDE.pace), follows=follows)
    kernels.launch()


def call_channels(case: str, form: str) -> None:
    kernels = Planned(*CHANNELS[case]())
    c, t, forgets = kernels.c, CHANNEL_FORMS[form], new_forgets(kernels.made)
    results = kernels.results()
    if form == "-parts":
        run_find_forgetting(c, forgets, 2)
        run_channel_loop(c, *results, t, forgets, 2)
    elif t is not None:
        tape = new_tape(kernels.made, kernels.p, 1, CHANNEL_PACE) if form == "-tape" else None
        run_channel_loop(c, *results, t, tape=tape)
    else:
        (w,) = make_groups(kernels.made, kernels.p, Prepared)
        run_prepare(c, w, results.o, None, None, forgets)
        run_scan_channels(c, w, *results, forgets)
    kernels.launch()


def call_prepare(case: str, form: str) -> None:
    """The launches of `prepare` in training."""
    kernels, (finds, keeps) = Planned(*CHANNELS[case]()), CHANNELS_BACK[form]
    w, s, channels_ = make_groups(kernels.made, kernels.p, Prepared, Solved, Channels)
    w, L, first = w._replace(A=s.A if finds else None), channels_.L if keeps else None, form == "training"
    run_prepare(kernels.c, w, kernels.results().o if first else None, L, s, valued=first)
    kernels.launch()


def call_channel_back(case: str, *, rest: bool) -> None:
    kernels = Planned(*GRADIENTS[case]())
    made, p = kernels.made, kernels.p
    solved, *groups = make_groups(made, p, Solved, Channels, Residual, StateGradients, DeepChunks)
    d, do = make_gradients(made, p, kernels.x)[0], made.like("do", kernels.x.v)
    run_chunk_back(kernels.c, groups[0], solved, *groups[1:], do, d, rest=rest)
    kernels.launch()


def call_scan(case: str) -> None:
    kernels = ByHand(case)
    w = new_segmented_scan(kernels.made, kernels.p, None if kernels.p.K == WHOLE else 128)
    run_segmented_scan(kernels.c, *kernels.results(), kernels.rates, w, kernels.trace)
    kernels.launch()


def launches(target: str) -> Iterator[Launch]:
    if target != "sm_90a":
        return
    for case in RATES:
        yield Launch(case, partial(call_rates, case))
    for case in ("packed", "batched"):
        yield Launch(f"{case}-tape", partial(call_tape, case, follows=case != "batched"))
    for case, made in CASES.items():
        p = made()[0]
        width, forms = p.K, SAVING_FORMS if p.disable_recompute else FORMS
        for form, t in forms[width].items():
            yield Launch(f"{case}-{form}", partial(call_loop, case, t, taped=False))
            yield Launch(f"{case}-{form}-tape", partial(call_loop, case, t, taped=True))
        yield Launch(f"{case}-whole" if width == 256 else f"{case}-segments", partial(call_scan, case))
        if p.needs_grad and width != 256:
            for form in ("back", "back-tape", "back-segments", "back-ends"):
                yield Launch(f"{case}-{form}", partial(call_back, made, form))
    yield Launch("training-logs-back", call_gates_back)
    for case in CHANNELS:
        parts = case != "channel-free" and not case.startswith("gdn2")  # they have none
        forms = [form for form in CHANNEL_FORMS if form != "-parts" or parts]
        yield from (Launch(case + form, partial(call_channels, case, form)) for form in forms)
    for case in ("channel", "channel-logs-float32", "gdn2", "gdn2-logs-float32"):
        for form in CHANNELS_BACK:
            yield Launch(f"{case}-{form}", partial(call_prepare, case, form))
    for case in GRADIENTS:
        yield Launch(case, partial(call_channel_back, case, rest=False))
        if GRADIENTS[case]()[0].gate.bound is None:
            yield Launch(f"{case}-deep", partial(call_channel_back, case, rest=True))
    for module in (padding, pools, channel_prompts):
        yield from module.launches()
