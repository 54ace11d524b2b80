"""What the compile gate compiles of the hand-written kernels: their launches, on problems that models have."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

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
    WIDE,
    LoopTile,
)
from flash_delta.kernels.hopper.plans.unplanned import new_gradients
from flash_delta.kernels.hopper.scalar.backward.run import unsupported
from flash_delta.kernels.hopper.scalar.forward.loop import run_loop
from flash_delta.kernels.hopper.scalar.forward.rate_role import makes_rates
from flash_delta.kernels.hopper.scalar.forward.rates import new_rates, run_rates
from flash_delta.kernels.hopper.scalar.segments.memory import new_segmented_scan
from flash_delta.kernels.hopper.scalar.segments.run import run_segmented_scan
from flash_delta.kernels.runtime.calls import Call, make_call
from flash_delta.kernels.runtime.workspace import (
    Channels,
    DeepChunks,
    ForBackward,
    Prepared,
    Residual,
    Solved,
    StateGradients,
    Trace,
    Workspace,
)
from flash_delta.problem import Inputs, Problem
from workshop.gate.cases import channel_prompts, padding, pools
from workshop.gate.cases.hopper_back import call_back, call_gates_back
from workshop.gate.cases.rule import RuleCase, describe, problem_of


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
    *, packed: bool, raw: bool = True, bound: float | None = None, g_dtype: torch.dtype = torch.bfloat16
) -> tuple[Problem, Inputs]:
    """A call with a decay per channel. Without ``packed`` it has no norms, no logits of beta and no initial states."""
    p, x = problem_of(RuleCase(gate="channel", raw=raw, bound=bound))
    p, x = p._replace(gate=p.gate._replace(dtype=g_dtype)), x._replace(g=x.g.to(g_dtype))
    if packed:
        return p, x
    p = p._replace(N=1, packed=False, l2norm=False, raw_beta=False, state_v_first=True)
    return p, x._replace(cu_seqlens=None, initial_state=None)


def channel_gradients(
    *, raw: bool, bound: float | None = None, g_dtype: torch.dtype = torch.float32, l2norm: bool = True
) -> tuple[Problem, Inputs]:
    """A backward pass with as many key heads as value heads. Norms and a float32 g take the most shared memory."""
    p, x = problem_of(RuleCase(gate="channel", raw=raw, bound=bound))
    x = x._replace(q=x.v, k=x.v, g=x.g.to(g_dtype))
    return p._replace(H=p.HV, needs_grad=True, gate=p.gate._replace(dtype=g_dtype), l2norm=l2norm), x


def training(width: int, *, saving: bool = False, raw: bool = True) -> tuple[Problem, Inputs]:
    p, x = problem_of(RuleCase(width, raw=raw))
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
}
CHANNELS = {
    "channel": partial(channels, packed=True, bound=-5.0),
    "channel-rows": partial(channels, packed=False, bound=-5.0),
    "channel-free": partial(channels, packed=True),
    "channel-logs": partial(channels, packed=True, raw=False),
    "channel-logs-float32": partial(channels, packed=False, raw=False, g_dtype=torch.float32),
    "channel-promised-float32": partial(channels, packed=False, raw=False, bound=-5.0, g_dtype=torch.float32),
}
# For the backward pass: whether `prepare` writes A, and whether it writes L.
CHANNELS_BACK = {"training": (True, False), "training-back": (False, True), "training-again": (True, True)}
GRADIENTS = {
    "channel-back": partial(channel_gradients, raw=False, l2norm=False),
    "channel-back-norm": partial(channel_gradients, raw=False),
    "channel-back-raw": partial(channel_gradients, raw=True, g_dtype=torch.bfloat16),
    "channel-back-raw-float32": partial(channel_gradients, raw=True),
    "channel-back-bounded": partial(channel_gradients, raw=True, bound=-5.0, g_dtype=torch.bfloat16),
    "channel-back-promised": partial(channel_gradients, raw=False, bound=-5.0, l2norm=False),
}
TAPES = "packed", "batched"
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


def call_rates(case: str) -> None:
    c, o, _, rates, solved, _ = described(case)
    run_rates(c, o, rates, solved)


def call_loop(case: str, t: LoopTile, *, taped: bool) -> None:
    c, o, final, rates, solved, trace = described(case)
    tape = new_tape(c.p, 1, t.pace) if taped else None
    run_loop(c, o, final, None if makes_rates(c.p) else rates, solved and solved.A, t, trace=trace, tape=tape)


def call_tape(case: str, *, follows: bool) -> None:
    c = described(case)[0]
    run_lay_tape(c, new_tape(c.p, 1, WIDE.pace), follows=follows)


def call_channels(case: str, form: str) -> None:
    p, x = CHANNELS[case]()
    c, o = make_call(p, x, ("launches",))._replace(direct=False), torch.empty_like(x.v)
    final, t = torch.empty(p.state_shape, device="meta"), CHANNEL_FORMS[form]
    forgets = new_forgets(p)
    if form == "-parts":
        run_find_forgetting(c, forgets, 2)
        return run_channel_loop(c, o, final, t, forgets, 2)
    if t is not None:
        return run_channel_loop(c, o, final, t, tape=new_tape(p, 1, CHANNEL_PACE) if form == "-tape" else None)
    (w,) = Workspace(p, Prepared).views()
    run_prepare(c, w, o, None, None, forgets)
    run_scan_channels(c, w, o, final, forgets)


def call_prepare(case: str, form: str) -> None:
    """The launches of `prepare` in training."""
    p, x = CHANNELS[case]()
    c, (finds, keeps) = make_call(p, x, ("launches", form))._replace(direct=False), CHANNELS_BACK[form]
    w, s, channels_ = Workspace(p, Prepared, Solved, Channels).views()
    o = torch.empty_like(x.v) if form == "training" else None
    run_prepare(c, w._replace(A=s.A if finds else None), o, channels_.L if keeps else None, s)


def call_channel_back(case: str, *, rest: bool) -> None:
    p, x = GRADIENTS[case]()
    c, d = make_call(p, x, ("launches",))._replace(direct=False), new_gradients(p, x)
    solved, *groups = Workspace(p, Solved, Channels, Residual, StateGradients, DeepChunks).views()
    run_chunk_back(c, groups[0], solved, *groups[1:], torch.empty_like(x.v), d, rest=rest)


def call_scan(case: str) -> None:
    c, *outputs, _, trace = described(case)
    run_segmented_scan(c, *outputs, new_segmented_scan(c.p, None if c.p.K == 256 else 128), trace)


def described(case: str) -> tuple[Call, Tensor, Tensor, Tensor, ForBackward | None, Trace | None]:
    """The call, o, the final states, rates, and the tensors for the backward pass."""
    p, x = RATES[case]()
    c = make_call(p, x, ("launches",))._replace(direct=False)
    solved = Workspace(p, ForBackward).views()[0] if p.needs_grad and not unsupported(p) else None
    trace = Workspace(p, Trace).views()[0] if p.disable_recompute and not unsupported(p) else None
    return c, torch.empty_like(x.v), torch.empty(p.state_shape, device="meta"), new_rates(p), solved, trace


def launches(target: str) -> Iterator[Launch]:
    if target != "sm_90a":
        return
    for case in RATES:
        yield Launch(case, partial(call_rates, case))
    yield from (Launch(f"{case}-tape", partial(call_tape, case, follows=case != "batched")) for case in TAPES)
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
    yield from padding.launches()
    for case in CHANNELS:
        forms = [form for form in CHANNEL_FORMS if (case, form) != ("channel-free", "-parts")]  # it has no parts
        yield from (Launch(case + form, partial(call_channels, case, form)) for form in forms)
    for case in ("channel", "channel-logs-float32"):
        for form in CHANNELS_BACK:
            yield Launch(f"{case}-{form}", partial(call_prepare, case, form))
    for case in GRADIENTS:
        yield Launch(case, partial(call_channel_back, case, rest=False))
        if GRADIENTS[case]()[0].gate.bound is None:
            yield Launch(f"{case}-deep", partial(call_channel_back, case, rest=True))
    yield from pools.launches()
    yield from channel_prompts.launches()
