"""The ``hopper`` backend for sm_90a: the delta rule with one decay per value head, and in part with one per channel.

`rates` sums the gates, and one more kernel does all the rest (scalar/forward/loop.py). Long sequences on few heads are
scanned in segments, all at the same time, by four kernels (scalar/segments/): `factor_chunks`, `find_maps`,
`compose_maps` and `scan_segments`. Heads of 256 leave no memory for an inverse beside states and chunks. For them
`factor_chunks` runs first, and `scan_segments` scans whole sequences. Values wider than keys are scanned as several
heads (columns.py). The loop also scans prompts on a pool, and reads and writes the slots. Long prompts on few heads are
cut into parts, which the loop scans at the same time. Before it `factor_chunks`, `find_maps` and `compose_starts` find
the states that these parts start from.

With a decay per channel, one kernel does everything if there are many states, or few states and gates that forget
(channel/loop.py). Otherwise `prepare` computes all products between the tokens of a chunk. Then `scan_channels` scans
the states. If sequences are split, if states of chunks are saved, and with ``batch_invariant``, it is `scan` of the
``triton`` backend (channel/). In the backward pass `prepare` runs again, and ``triton`` scans the states and their
gradients. After that `chunk_back` computes the gradients of each chunk, or ``triton`` if it cannot (channel/backward/).
Prompts on a pool are scanned by a loop as well, or by `prepare` and `scan_channels` (channel/prefill.py).

The backward pass in bfloat16 for heads of 64 and 128 is also written by hand (scalar/backward/). For other calls with
one decay per value head nothing is saved, and ``triton`` runs the backward pass, which computes everything again. It
also runs everything that this backend cannot run.
"""

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.hopper import channel, scalar
from flash_delta.kernels.hopper.device.inverse_tiles import fine
from flash_delta.kernels.hopper.plans.columns import as_heads, joined, layouts_as_heads
from flash_delta.kernels.hopper.plans.lost import check_states
from flash_delta.kernels.hopper.plans.padding import padded, pads
from flash_delta.kernels.hopper.plans.tiles import WHOLE
from flash_delta.kernels.hopper.scalar.choices import goes_back, lists, saved_bytes, segment_length, unsupported_back
from flash_delta.kernels.hopper.scalar.segments.cut import cut_prompts
from flash_delta.kernels.runtime.chip import MOST_PROGRAMS, chip_of
from flash_delta.kernels.runtime.plan import Plan, layouts_of
from flash_delta.kernels.runtime.run import Planner, by_sizes, run
from flash_delta.kernels.triton import backend as triton
from flash_delta.kernels.triton import backward as triton_backward
from flash_delta.kernels.triton.backward.results import OutputGradients, Saved, gradients_of
from flash_delta.kernels.triton.forward.scan_launches import crowded
from flash_delta.kernels.triton.tiles import plan_back
from flash_delta.problem import Around, Inputs, KnownCall, Outputs, Problem, Slots

WIDTHS = (64, 128, 256)
MOST_VALUES = 512
NARROWEST_PADDED = 60  # columns


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.device.type != "cuda" or chip_of(problem.device).target != "sm_90":
        return f"it needs a Hopper GPU (sm_90), the tensors are on {problem.device}"
    if problem.recurrent:
        return "it runs sequences chunk by chunk"
    if problem.channel_strength and problem.gate.kind != "channel":
        return triton.GATED
    if problem.erase != "decayed" or problem.erase_keys:
        return "it runs the delta rule whose keys erase what they write, from the decayed state"
    if problem.keep_states:
        return "it does not return the states of chunks"
    if (problem.HV > MOST_PROGRAMS or _scans_in_triton(problem)) and (reason := crowded(problem)) is not None:
        return reason
    if problem.gate.kind == "channel":
        return channel.plan.unsupported(problem) or _unsupported_pool(problem)
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"its products are of 16 bits, the tensors are {problem.dtype}"
    wide = padded(problem)
    if wide.K not in WIDTHS or wide.V % wide.K or wide.V > MOST_VALUES:
        widths = f"K has to be one of {', '.join(map(str, WIDTHS))}, and V a multiple of it up to {MOST_VALUES}"
        return f"{widths}, or both up to 128 without a pool; they are {problem.K} and {problem.V}"
    if problem.pools is not None and not problem.decodable:  # prefill decodes its short sequences
        return f"on a pool it runs {triton.DECODED}"
    if problem.pools is not None and (problem.K == WHOLE or problem.V != problem.K):
        return f"on a pool K and V have to be 64 or 128, both; they are {problem.K} and {problem.V}"
    if problem.scale <= 0:
        return f"scale has to be positive, it is {problem.scale}"
    return _unsupported_pool(problem)


def _scans_in_triton(p: Problem) -> bool:
    """Whether kernels of ``triton`` may scan the states, forward or back."""
    if p.gate.kind == "channel":
        return p.needs_grad or (p.batch_invariant and p.pools is None)
    return p.needs_grad and unsupported_back(p) is not None


def _unsupported_pool(p: Problem) -> str | None:
    if p.pools is not None and p.pools.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its states are float32, the pool is {p.pools.dtype}"
    if p.pools is not None and not p.pools.plain:
        return "the pool has gaps inside of its slots, or slots that do not begin at multiples of 16 bytes"
    return None


def preference(p: Problem) -> tuple[int, str | None]:
    """This backend's preference: above that of ``triton``, or below it with a reason. It must not depend on lengths or
    on the number of sequences, or else the other backend would be compiled later, during the work.

    From measurements on an H200 (for training with a decay per channel on an H100), with 132 multiprocessors
    (docs/notes): this backend is faster than ``triton``, except for one sequence of some 2,000 tokens on few heads of
    128. On a pool such a prompt is slower here until it is long enough to be cut (scalar/segments/cut.py).
    """
    if p.device.type != "cuda" or not all(isinstance(size, int) for size in (p.HV, p.K, p.V)):
        return 0, "its multiprocessors or the heads are not known"  # under torch.compile's tracing, or on "meta"
    why = _slow_padding(p) if pads(p) else None
    return (2, None) if why is None else (0, why)


def takes_steps(p: Problem) -> bool:
    """Whether kernels read q and g once per token. If heads are padded, copies have a row of q for each row of k."""
    return triton.takes_steps(p) and not pads(p)


def _slow_padding(p: Problem) -> str | None:
    """Why padded heads are not faster than ``triton``, or None. Measured on an H100 (docs/notes): training is faster at
    every measured width. A forward pass alone is not faster where ``triton`` uses the copy engine."""
    if min(p.K, p.V) < NARROWEST_PADDED:
        return f"heads of {_widths(p)} were not measured padded"
    by_copy_engine = p.K % 8 == 0 and p.V % 8 == 0 and max(p.K, p.V) > 64
    if by_copy_engine and not goes_back(p):
        return f"heads of {_widths(p)} are worth copies only where the backward pass is by hand, too"
    return None


def empty_saved(p: Problem, x: Inputs) -> tuple[Tensor, ...]:
    """Empty tensors like those that ``forward`` saves. If columns run as heads, nothing is saved, since the backward
    pass needs whole heads. It computes everything again."""
    fixed = p._replace(H=int(p.H), HV=int(p.HV), K=int(p.K), V=int(p.V))  # not symbols: kernels are compiled for them
    size = (channel.plan.saved_bytes if p.gate.kind == "channel" else saved_bytes)(fixed)
    return () if size is None else (torch.empty(size, dtype=torch.uint8, device=p.device),)


def forward(p: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    check_states(p.op)
    if _splits_values(p):
        return joined(p, forward(*as_heads(p, x), known))
    if p.N * p.T == 0:
        return _nothing(p, x)
    maps = None
    if p.gate.kind == "channel":
        plan = channel.plan
        o, final, saved = run(plan.plan_forward, p, x, choose=plan.choose_forward, known=known, later=plan.later)
    else:
        plan = scalar.plan
        o, final, saved, maps = run(plan.plan_forward, p, x, choose=plan.choose_forward, known=known, later=plan.later)
    return Outputs(o, final, () if saved is None else (saved,), planned=() if maps is None else (maps,))


def _splits_values(p: Problem) -> bool:
    """Whether a head runs as several, each with some of its value columns."""
    return p.gate.kind != "channel" and p.V != p.K and not pads(p)


def _nothing(p: Problem, x: Inputs) -> Outputs:
    """The results of a call without tokens or sequences, for which nothing is compiled or launched."""
    o = torch.empty(p.o_shape, dtype=p.dtype, device=p.device)
    final = torch.empty(*p.state_shape, dtype=torch.float32, device=p.device)
    final.zero_() if x.initial_state is None else final.copy_(x.initial_state)
    return Outputs(o.zero_(), final, empty_saved(p, x))


def backward(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None, known: KnownCall | None = None
) -> Inputs:
    """Gradients of every input. ``saved``: what ``forward`` has saved. Without it ``triton`` computes all again."""
    outer = OutputGradients(do, dfinal)
    if p.gate.kind == "channel" and p.N * p.T:
        after = outer, Saved(*saved or (None,))
        made = run(channel.plan.plan_backward, p, x, after=after, choose=plan_back, known=known)
    elif not saved or p.N * p.T == 0:
        return triton.backward(p, x, (), do, dfinal, known)
    else:
        plan = scalar.backward.plan
        after = outer, plan.Kept(*saved)
        made = run(plan.plan_backward, p, x, after=after, choose=plan.choose_backward, known=known)
    d = gradients_of(x, made)
    return d if d.initial_state is None else d._replace(initial_state=d.initial_state.to(x.initial_state.dtype))


def prefill(p: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o``, contiguous. The pools are written in place. `decode` runs short sequences beside the others."""
    if p.N * p.T == 0:  # there is nothing to scan: at most states are copied or zeros written
        return triton.prefill(p, x, s, around, known)
    if known is not None:
        known.again = prefill
    check_states(p.op)
    return run(_plan_of_prompts(p), p, x, s, around, choose=by_sizes, known=known)[0]


def _plan_of_prompts(p: Problem) -> Planner:
    return (channel if p.gate.kind == "channel" else scalar).prefill.plan_prefill


def plans(p: Problem, x: Inputs, *on_pool: tuple) -> dict[str, Plan]:
    """The plans of a call, by name. Only layouts of tensors matter."""
    if p.N * p.T == 0:
        return triton.plans(p, x, *on_pool) if on_pool else {}
    chip, (x, *on_pool) = chip_of(p.device), map(layouts_of, (x, *on_pool))
    if on_pool:
        return {"prefill": _plan_of_prompts(p)(p, chip, x, *on_pool)}
    own = (channel if p.gate.kind == "channel" else scalar).plan
    run_as, given = layouts_as_heads(p, x) if _splits_values(p) else (p, x)
    found = {"forward": own.plan_forward(run_as, chip, given, choice=own.choose_forward(run_as, chip))}
    if p.gate.kind == "channel" and p.needs_grad:
        found["backward"] = channel.plan.plan_usual_backward(p, chip, x, plan_back(p, chip))
    elif goes_back(p):
        plan = scalar.backward.plan
        found["backward"] = plan.plan_usual_backward(p, chip, x, plan.choose_backward(p, chip))
    elif p.needs_grad:
        found["backward"] = triton_backward.plan.plan_usual_backward(p, chip, x, choice=plan_back(p, chip))
    return found


def workspace_bytes(p: Problem, x: Inputs, s: Slots, around: Around) -> int:
    """The bytes that ``prefill`` allocates besides its output."""
    return _plan_of_prompts(p)(p, chip_of(p.device), *map(layouts_of, (x, s, around))).workspace_bytes


def remark(p: Problem) -> str | None:
    """What `explain` says: whether sequences are split, which backend runs the backward pass, and how fine A is."""
    if p.gate.kind == "channel":
        return (channel.plan if p.pools is None else channel.prefill).remark(p)
    wide, said = padded(p), []
    if wide is not p:
        said.append(f"it pads heads of {_widths(p)} to {wide.K} columns, in copies of q, k, v and o")
    elif p.V != p.K:
        said.append(f"it scans every head's {p.V} values as {p.V // p.K} heads of {p.K}")
    scanned = wide._replace(HV=wide.HV * wide.V // wide.K, V=wide.K, needs_grad=p.needs_grad and wide.V == wide.K)
    chip = chip_of(p.device)
    length = segment_length(scanned, chip)
    if p.pools is not None or lists(scanned, chip):
        cut = cut_prompts(scanned, chip.processors)
        if cut is not None and (p.pools is not None or C * cut.shortest <= p.T):
            long = f"{'sequences' if p.pools is None else 'prompts'} of {C * cut.shortest} tokens or more"
            said.append(f"it scans {long} in up to {cut.most} parts, side by side")
    elif length is not None:
        number = -(-p.T // length)
        said.append(f"it scans sequences in segments of {length} tokens, up to {number} of them side by side")
    if p.needs_grad:
        reason = unsupported_back(p)
        if reason:
            said.append(f"its backward pass is that of 'triton', for which it saves nothing: {reason}")
        elif length is not None:
            said.append("so does its backward pass")
    if fine(p) and p.pools is None:
        said.append("where a beta is above 1, it keeps the inverse of a chunk in two parts")
    return "; ".join(said) or None


def _widths(p: Problem) -> str:
    return f"{p.K}" if p.K == p.V else f"{p.K} and {p.V}"
