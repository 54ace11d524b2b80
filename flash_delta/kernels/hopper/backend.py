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

from functools import partial
from operator import is_

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.hopper.channel import prefill as channel_prefill
from flash_delta.kernels.hopper.channel import run as channel
from flash_delta.kernels.hopper.device.inverse_tiles import fine
from flash_delta.kernels.hopper.plans.boxes import as_taken, describable, described, plain_state
from flash_delta.kernels.hopper.plans.columns import as_heads, joined
from flash_delta.kernels.hopper.plans.lost import check_states
from flash_delta.kernels.hopper.plans.padding import (
    Padded,
    PaddedResults,
    new_padded,
    padded,
    pads,
    run_narrow,
    run_widen,
)
from flash_delta.kernels.hopper.plans.splits import loop_tile, loop_tiles, split_endless, split_length
from flash_delta.kernels.hopper.plans.tape import Tape, new_loop_tape
from flash_delta.kernels.hopper.plans.unplanned import for_backward, name_back, new_convolved, with_contiguous_vectors
from flash_delta.kernels.hopper.scalar.backward import run as scalar_backward
from flash_delta.kernels.hopper.scalar.forward.loop import run_loop
from flash_delta.kernels.hopper.scalar.forward.rate_role import makes_rates
from flash_delta.kernels.hopper.scalar.forward.rates import new_rates, run_rates
from flash_delta.kernels.hopper.scalar.listed import lists, new_listed_scan, run_listed_scan
from flash_delta.kernels.hopper.scalar.segments.cut import cut_prompts
from flash_delta.kernels.hopper.scalar.segments.memory import SegmentedScan, new_maps, new_segmented_scan
from flash_delta.kernels.hopper.scalar.segments.run import run_segmented_scan
from flash_delta.kernels.runtime.calls import Call, make_call, on, opened
from flash_delta.kernels.runtime.chip import MOST_PROGRAMS, Chip, chip_of
from flash_delta.kernels.runtime.launch import Kernels, again, output_of, remember, remember_served, run
from flash_delta.kernels.runtime.workspace import Workspace
from flash_delta.kernels.triton import backend as triton
from flash_delta.kernels.triton.backward.results import gradients_of
from flash_delta.kernels.triton.forward.scan_launches import crowded
from flash_delta.kernels.triton.serving.decode import run_decode
from flash_delta.kernels.triton.serving.offsets import run_scan_to_offset
from flash_delta.kernels.triton.serving.prompts import convolved_bytes, run_after, run_before
from flash_delta.problem import Around, Inputs, KnownCall, Outputs, Problem, Slots

FORWARD, LISTED, PREFILL = ("hopper",), ("hopper", "listed"), ("prefill", "hopper")  # the kinds of calls
FORWARD_ALONE = (*FORWARD, False, False)  # without a backward pass
WIDTHS = (64, 128, 256)
WHOLE = 256  # heads of this width do not fit the loop; `factor_chunks` runs first, then a scan of whole sequences
MOST_VALUES = 512
NARROWEST_PADDED = 60  # columns


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.device.type != "cuda" or chip_of(problem.device).target != "sm_90":
        return f"it needs a Hopper GPU (sm_90), the tensors are on {problem.device}"
    if problem.recurrent:
        return "it runs sequences chunk by chunk"
    if problem.erase != "decayed" or problem.erase_keys:
        return "it runs the delta rule whose keys erase what they write, from the decayed state"
    if problem.keep_states:
        return "it does not return the states of chunks"
    if (problem.HV > MOST_PROGRAMS or _scans_in_triton(problem)) and (reason := crowded(problem)) is not None:
        return reason
    if problem.gate.kind == "channel":
        return channel.unsupported(problem) or _unsupported_pool(problem)
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
    return p.needs_grad and scalar_backward.unsupported(p) is not None


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


def _slow_padding(p: Problem) -> str | None:
    """Why padded heads are not faster than ``triton``, or None. Measured on an H100 (docs/notes): training is faster at
    every measured width. A forward pass alone is not faster where ``triton`` uses the copy engine."""
    if min(p.K, p.V) < NARROWEST_PADDED:
        return f"heads of {_widths(p)} were not measured padded"
    by_copy_engine = p.K % 8 == 0 and p.V % 8 == 0 and max(p.K, p.V) > 64
    if by_copy_engine and not (p.needs_grad and scalar_backward.unsupported(p) is None):
        return f"heads of {_widths(p)} are worth copies only where the backward pass is by hand, too"
    return None


def empty_saved(p: Problem, x: Inputs) -> tuple[Tensor, ...]:
    """Empty tensors like those that ``forward`` saves. If columns run as heads, nothing is saved, since the backward
    pass needs whole heads. It computes everything again."""
    fixed = p._replace(H=int(p.H), HV=int(p.HV), K=int(p.K), V=int(p.V))  # not symbols: kernels are compiled for them
    if p.gate.kind == "channel" and not channel.saves(fixed):
        return ()
    saved = _for_backward(padded(fixed))
    return () if saved is None else (saved.buffer,)


def forward(p: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    check_states(p.op)
    if p.gate.kind == "channel" and p.N * p.T:
        return channel.forward(p, x, known)
    if p.V != p.K and not pads(p):
        return joined(p, forward(*as_heads(p, x), known))
    kind = LISTED if lists(p) else (*FORWARD, p.needs_grad, p.needs_grad and p.disable_recompute)
    made = again(known, (p.lengths, *kind), x)
    if made is not None:
        return Outputs(*made[:2], made[2:3], planned=made[3:])
    wide = padded(p)
    given, x = x, as_taken(x) if wide is p else with_contiguous_vectors(x)
    o, final = _new_outputs(p)
    saved = _for_backward(wide) if p.needs_grad else None
    kept = () if saved is None else (saved.buffer,)
    if p.N * p.T == 0:  # without tokens or sequences nothing is compiled or launched
        final.zero_() if x.initial_state is None else final.copy_(x.initial_state)
        return Outputs(o.zero_(), final, kept)
    chip, wanted = chip_of(p.device), Outputs(o, final, kept)
    if kind == LISTED:
        name, planned, (kernels, spare) = kind, (), _prepare_listed(p, x, wanted, chip)
        later = partial(_later_call, FORWARD_ALONE, p, x)
    else:
        length = _length(wide, chip)
        maps = None if length is None or saved is None else new_maps(wide, length)
        planned = () if maps is None else (maps,)
        chosen, kernels, spare = _prepare(p, x, wanted, saved, maps, chip)
        name, later = (*kind, *chosen), None
        if saved is not None and scalar_backward.unsupported(p) is None:
            later = partial(scalar_backward.later_call, p, x)
        elif lists(p._replace(N=2)):
            later = partial(_later_call, LISTED, p, x)
    with on(p.device):
        call = make_call(p, x, kind, known=known, name=name)
        run(call, kernels, o, final, *kept, *planned, spare=spare, later=later)
    remember(call, given, known, (p.lengths, *kind))
    return wanted._replace(planned=planned)


def _prepare(
    p: Problem, x: Inputs, outputs: Outputs, saved: Workspace | None, maps: Tensor | None, chip: Chip
) -> tuple[tuple, Kernels, tuple[Tensor | None, ...]]:
    """What was chosen for a call; the function that launches all kernels; and the memory that only these need."""
    wide, (o, final) = padded(p), outputs[:2]
    length, makes = _length(wide, chip), makes_rates(p)
    views = [] if saved is None else saved.views()
    A, trace = views[0].A if views else None, views[-1] if len(views) > 1 else None
    segmented = _new_scan(wide, length, A, maps)
    rates = None if makes and segmented is None else new_rates(p)
    tile = loop_tile(wide, chip, trace is not None)
    tape = None if segmented is not None else new_loop_tape(wide, chip, tile)
    copies, (o_wide, final_wide), made = _new_copies(p, x, o, final)

    def kernels(given: Call) -> None:
        c = run_widen(given, copies)
        w, r = _every_scan(wide, chip) if c.every else (segmented, rates)
        launched = loop_tiles(wide.K, trace is not None) if c.every else (tile,)
        parts = [] if saved is None else c.parts(saved)
        if w is not None or not makes:
            run_rates(c, o_wide, r, parts[0] if parts else None)
        if w is None or (c.every and wide.K != WHOLE):
            run_loop(c, o_wide, final_wide, None if makes else r, A, *launched, trace=trace, tape=tape)
        if w is not None:
            run_segmented_scan(c, o_wide, final_wide, r, w, trace)
        run_narrow(given, PaddedResults((None, None, o_wide), final_wide), PaddedResults((None, None, o), final))

    spare = (rates, *_handed(segmented, tape, planned=maps is not None, saved=saved is not None), *made)
    return (length, tile, tape is None), kernels, spare


def _prepare_listed(p: Problem, x: Inputs, outputs: Outputs, chip: Chip) -> tuple[Kernels, tuple[Tensor | None, ...]]:
    """The launching function and memory of `_prepare`, for packed sequences that the device lists. Sequence n has slot
    n, as on a pool."""
    o, final = outputs[:2]
    copies, (o_wide, final_wide), made = _new_copies(p, x, o, final)
    w = new_listed_scan(padded(p), chip)

    def kernels(given: Call) -> None:
        c = run_widen(given, copies)
        run_listed_scan(c, o_wide, w, Slots(c.x.initial_state, None), final_wide)
        run_narrow(given, PaddedResults((None, None, o_wide), final_wide), PaddedResults((None, None, o), final))

    return kernels, (*w.memory, *made)


def _later_call(kind: tuple, p: Problem, x: Inputs) -> tuple[Call, Kernels]:
    """A call like this one, of the other kind of inference. A number of sequences may choose either, so both are
    compiled together."""
    nowhere, chip = p._replace(device=torch.device("meta")), chip_of(p.device)
    outputs = Outputs(*_new_outputs(nowhere))
    if kind == LISTED:
        kernels, _ = _prepare_listed(nowhere, x, outputs, chip)
    else:
        _, kernels, _ = _prepare(nowhere, x, outputs, None, None, chip)
    return make_call(p, x, kind), kernels


def _new_outputs(p: Problem) -> tuple[Tensor, Tensor]:
    """o, and the final states."""
    final = torch.empty(*p.state_shape, dtype=torch.float32, device=p.device)
    return torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device), final


def _new_copies(
    p: Problem, x: Inputs, o: Tensor, final: Tensor
) -> tuple[Padded | None, tuple[Tensor, Tensor], tuple[Tensor | None, ...]]:
    """Copies, if heads are padded; the tensors to which kernels write o and final states; and all new tensors."""
    copies = new_padded(p, x)
    if copies is None:
        return None, (o, final), ()
    outputs = _new_outputs(padded(p))
    return copies, outputs, (*copies, *outputs)


def _every_scan(p: Problem, chip: Chip) -> tuple[SegmentedScan | None, Tensor]:
    """The scan for compiling everything that a call may launch."""
    one = p._replace(N=1, T=1)
    return _new_scan(one, split_endless(p, chip.processors, back=_goes_back(p)), None, None), new_rates(one)


def backward(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None, known: KnownCall | None = None
) -> Inputs:
    """Gradients of every input. ``saved``: what ``forward`` has saved. Without it ``triton`` computes all again."""
    name = name_back(p, x, saved, do, dfinal)
    made = again(known, name, x, (do, dfinal), saved)
    if made is not None:
        return gradients_of(x, made)
    if p.gate.kind == "channel" and p.N * p.T:
        return channel.backward(p, x, saved, do, dfinal, known)
    if not saved or p.N * p.T == 0 or scalar_backward.unsupported(p) is not None:
        return triton.backward(p, x, (), do, dfinal, known)
    # Copies with padding can be made of any layout.
    given = (with_contiguous_vectors(x), do, dfinal) if pads(p) else (as_taken(x), described(do), plain_state(dfinal))
    if not all(map(is_, given, (x, do, dfinal))):
        d = backward(p, given[0], saved, *given[1:], known)
        return d if d.initial_state is None else d._replace(initial_state=d.initial_state.to(x.initial_state.dtype))
    made = scalar_backward.run_backward(p, x, saved, do, dfinal, known, _length(padded(p), chip_of(p.device)), name)
    return gradients_of(x, made)


def prefill(p: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o``, contiguous. The pools are written in place. `decode` runs short sequences beside the others."""
    if p.N * p.T == 0:  # there is nothing to scan: at most states are copied or zeros written
        return triton.prefill(p, x, s, around, known)
    check_states(p.op)
    if p.gate.kind == "channel":
        return channel_prefill.prefill(p, x, s, around, known)
    o = output_of(p, s)
    w, convolved = new_listed_scan(p, chip_of(p.device)), new_convolved(p)

    def kernels(c: Call) -> None:
        slots, nearby = opened(c)
        rule = run_before(c, slots, nearby, convolved)
        if p.pools.checkpoint_offsets:
            run_scan_to_offset(rule, slots, before=True)
        run_listed_scan(rule, o, w, slots, slots.state_pool)
        if not p.batch_invariant:
            run_decode(rule, slots, o)
        if p.pools.checkpoint_offsets:
            run_scan_to_offset(rule, slots, before=False)
        run_after(c, slots, nearby, o)

    with on(p.device):
        given = x if p.pools.taps else x._replace(q=described(x.q), k=described(x.k), v=described(x.v))
        call = make_call(p, with_contiguous_vectors(given), PREFILL, *s._replace(out=None), *around, known=known)
        run(call, kernels, o, spare=(*w.memory, *convolved))
    remember_served(call, x, known, PREFILL)
    return o


def _for_backward(p: Problem) -> Workspace | None:
    """The workspace of what the forward pass saves. It is None if ``triton`` runs the backward pass. That pass computes
    everything again, since it keeps A in another form."""
    if p.gate.kind == "channel":
        return for_backward(p)
    return None if scalar_backward.unsupported(p) else scalar_backward.for_backward(p)


def _goes_back(p: Problem) -> bool:
    """Whether the backward pass is by hand."""
    return p.needs_grad and scalar_backward.unsupported(p) is None


def _length(p: Problem, chip: Chip) -> int | None:
    """Tokens of a segment, in both passes if the backward pass is by hand. None if sequences are not split."""
    return split_length(p, chip.processors, back=_goes_back(p))


def _new_scan(p: Problem, length: int | None, A: Tensor | None, maps: Tensor | None) -> SegmentedScan | None:
    """What a scan of segments, or of sequences with wide heads, needs. None if the loop does everything."""
    return None if length is None and p.K != WHOLE else new_segmented_scan(p, length, A, maps)


def _handed(segmented: SegmentedScan | None, tape: Tape | None, *, planned: bool, saved: bool) -> tuple[Tensor, ...]:
    """The memory that only kernels of a forward call use, except rates. ``planned``: maps are kept for the backward
    pass, so they are left out. ``saved``: A is kept, too."""
    if segmented is None:
        return () if tape is None else tape.memory
    return (segmented.B, *(() if planned else segmented[3:]), *(() if saved else (segmented.A,)))


def workspace_bytes(p: Problem, x: Inputs) -> int:
    """How many bytes ``prefill`` allocates besides its output. Only the layout of ``x`` matters."""
    if p.gate.kind == "channel":
        return channel_prefill.workspace_bytes(p, x)
    own = new_listed_scan(p._replace(device=torch.device("meta")), chip_of(p.device)).memory
    copied = () if p.pools.taps else (t for t in x[:3] if not describable(t))
    return sum(t.nbytes for t in (*own, *copied)) + convolved_bytes(p)


def remark(p: Problem) -> str | None:
    """What `explain` says: whether sequences are split, which backend runs the backward pass, and how fine A is."""
    if p.gate.kind == "channel":
        return channel.remark(p) if p.pools is None else channel_prefill.remark(p)
    wide, said = padded(p), []
    if wide is not p:
        said.append(f"it pads heads of {_widths(p)} to {wide.K} columns, in copies of q, k, v and o")
    elif p.V != p.K:
        said.append(f"it scans every head's {p.V} values as {p.V // p.K} heads of {p.K}")
    scanned = wide._replace(HV=wide.HV * wide.V // wide.K, V=wide.K, needs_grad=p.needs_grad and wide.V == wide.K)
    chip = chip_of(p.device)
    length = _length(scanned, chip)
    if p.pools is not None or lists(scanned):
        cut = cut_prompts(scanned, chip.processors)
        if cut is not None and (p.pools is not None or C * cut.shortest <= p.T):
            long = f"{'sequences' if p.pools is None else 'prompts'} of {C * cut.shortest} tokens or more"
            said.append(f"it scans {long} in up to {cut.most} parts, side by side")
    elif length is not None:
        number = -(-p.T // length)
        said.append(f"it scans sequences in segments of {length} tokens, up to {number} of them side by side")
    if p.needs_grad:
        reason = scalar_backward.unsupported(p)
        if reason:
            said.append(f"its backward pass is that of 'triton', for which it saves nothing: {reason}")
        elif length is not None:
            said.append("so does its backward pass")
    if fine(p) and p.pools is None:
        said.append("where a beta is above 1, it keeps the inverse of a chunk in two parts")
    return "; ".join(said) or None


def _widths(p: Problem) -> str:
    return f"{p.K}" if p.K == p.V else f"{p.K} and {p.V}"
