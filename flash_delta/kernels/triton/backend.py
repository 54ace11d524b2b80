"""The ``triton`` backend: the chunkwise algorithm on NVIDIA and AMD GPUs.

``solve`` and ``factor`` turn every chunk into a map of the state (A, then X and Y), all chunks at once. ``scan`` scans
the state through the chunks. With a decay per channel, ``channel`` computes everything that depends on the decay, and
``factor`` is not needed. If the caller wants the states at the chunks' starts, ``scan`` writes the same tensors as for
the backward pass.

The forward pass saves the results of ``solve``, and with ``disable_recompute`` everything. The backward pass runs
``factor`` (or ``channel``) again. Then one launch runs ``scan`` for the states and, beside it, ``scan_backward`` from
right to left. After that, gradients are computed for all chunks at once: by ``pairs``, and by the kernels of
gradients.py or, with a decay per channel, by ``channel_gradients``, ``halved_gradients`` and ``key_head_gradients``.
"""

from collections.abc import Hashable
from functools import partial
from itertools import accumulate

import torch
import triton
from torch import Tensor

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.runtime import fastcall
from flash_delta.kernels.runtime.arguments import every
from flash_delta.kernels.runtime.calls import Call, make_call, on
from flash_delta.kernels.runtime.chip import CPU, chip_of, takes_tma, unknown
from flash_delta.kernels.runtime.compile_key import PREFILL, laid_out
from flash_delta.kernels.runtime.launch import Kernels, again, remember, run
from flash_delta.kernels.runtime.run import run as run_plan
from flash_delta.kernels.runtime.workspace import (
    Channels,
    Factors,
    Residual,
    Solved,
    StateGradients,
    Workspace,
    count_bytes,
)
from flash_delta.kernels.triton.backward.chunks import CHUNKS, Chunks
from flash_delta.kernels.triton.backward.results import gradients_of, new_gradients, summing
from flash_delta.kernels.triton.backward.scan_backward import run_scan_backward
from flash_delta.kernels.triton.backward.segments import memory_of, new_segmented_back, run_segmented_back
from flash_delta.kernels.triton.forward.chunks import run_chunks
from flash_delta.kernels.triton.forward.scan import run_scan
from flash_delta.kernels.triton.forward.scan_launches import crowded, scratch_bytes
from flash_delta.kernels.triton.forward.segments import new_segmented_scan, run_segmented_scan
from flash_delta.kernels.triton.serving.decode import run_decode
from flash_delta.kernels.triton.serving.offsets import run_scan_to_offset
from flash_delta.kernels.triton.serving.prompts import (
    convolved_bytes,
    new_convolved,
    run_after,
    run_before,
    with_convolved,
)
from flash_delta.kernels.triton.serving.rows import plan_decode, plan_step
from flash_delta.kernels.triton.tiles import Segments, plan_back, plan_segments, widest_key
from flash_delta.problem import Around, Inputs, KnownCall, Outputs, Problem, Slots

NARROWEST, WIDEST_KEY, WIDEST_VALUE = 8, 256, 512
DECODED = "the delta rule with a decay, whose keys erase what they write"
HANDED = (Solved, Factors, Channels)  # passed from kernel to kernel in a call without gradients


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.device.type != "cuda" and not (problem.device.type == "cpu" and triton.knobs.runtime.interpret):
        return f"it needs a GPU, the tensors are on {problem.device}"
    pools = problem.pools
    if torch.float64 in (problem.dtype, *(() if pools is None else (pools.dtype, pools.write_dtype))):
        pool = "" if pools is None else f", the pool is {pools.write_dtype or pools.dtype}"
        return f"it computes in float32, the tensors are {problem.dtype}{pool}"
    if problem.gate.kind == "channel" and not problem.decodable:
        return "with a decay per channel keys erase what they write, from the decayed state"
    if pools is not None and not problem.decodable:  # prefill decodes its short sequences
        return f"on a pool it runs {DECODED}"
    if problem.recurrent:
        reason = _cannot_decode(problem)
        if reason is not None or not problem.needs_grad:  # the backward pass runs whole chunks
            return reason
    if problem.keep_states and problem.chunk_size != C:
        return f"it returns the states of chunks of {C} tokens, chunk_size is {problem.chunk_size}"
    if problem.keep_states and problem.lengths is None:
        return f"it counts chunks on the host, but cu_seqlens is on {problem.device}: give cu_seqlens_cpu too"
    if (reason := crowded(problem)) is not None:
        return reason
    by_chip = problem.dtype == torch.float32 or problem.erase == "undecayed"
    widest = widest_key(problem, chip_of(problem.device)) if by_chip else WIDEST_KEY
    if not (NARROWEST <= problem.K <= widest and NARROWEST <= problem.V <= WIDEST_VALUE):
        limits = f"K has to be from {NARROWEST} to {widest} and V from {NARROWEST} to {WIDEST_VALUE}"
        return f"in {problem.dtype} {limits}, they are {problem.K} and {problem.V}"
    return None


def preference(problem: Problem) -> tuple[int, str | None]:
    """Last on a CPU, where kernels are interpreted for tests."""
    return (1, None) if problem.device != CPU else (-2, None)


def remark(p: Problem) -> str | None:
    """What `explain` says: the choices that depend on sizes and chip."""
    chip = chip_of(p.device)
    split, said = None if p.recurrent else plan_segments(p, chip), [unknown(chip) or ""]
    if split is not None:
        number = triton.cdiv(p.T, split.length)
        said.append(f"it scans sequences in segments of {split.length} tokens, up to {number} of them side by side")
    if takes_tma(chip) and not p.recurrent and p.dtype != torch.float32 and (p.K % 8 or p.V % 8):
        said.append("rows that are no multiples of 16 bytes are loaded without the copy engine, which is slower")
    return "; ".join(filter(None, said)) or None


def empty_saved(p: Problem, x: Inputs) -> tuple[Tensor, ...]:
    """Empty tensors like those that ``forward`` saves: those of `solve`, and with ``disable_recompute`` all."""
    fixed = p._replace(H=int(p.H), HV=int(p.HV), K=int(p.K), V=int(p.V))  # never symbols: kernels are compiled for them
    return (for_backward(fixed).buffer,)


def forward(p: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    kind = "forward", p.writes_states
    made = again(known, (p.lengths, *kind), x)
    if made is not None:
        return _outputs(p, *made)
    given, x = x, with_contiguous_vectors(x)
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    final = torch.empty(*p.state_shape, dtype=torch.float32, device=p.device)
    saved = (for_backward(p),) if p.needs_grad else ()
    kept = kept_all(p)
    shown = (Workspace(p, Residual),) if p.keep_states and not kept else ()
    buffers, split = tuple(w.buffer for w in (*saved, *shown)), plan_segments(p, chip_of(p.device))
    handed = () if kept else (Workspace(p, *((Factors, Channels) if saved else HANDED)),)
    segmented = new_segmented_scan(p, split)

    def kernels(c: Call) -> None:
        solved, factors, channels, residual = (*c.parts(*saved, *handed, *shown), None)[:4]
        run_chunks(c, solved, factors, channels)
        if segmented is None or every(c):
            run_scan(c, channels, solved, factors, o, final, residual)
        run_segmented_scan(c, channels, solved, factors, o, final, segmented)

    with on(p.device):
        call = make_call(p, x, kind, known=known, name=(*kind, split))
        spare = *(w.buffer for w in handed), *(segmented or ())[1:]
        run(call, kernels, o, final, *buffers, spare=spare)
    remember(call, given, known, (p.lengths, *kind))
    return _outputs(p, o, final, *buffers)


def backward(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None, known: KnownCall | None = None
) -> Inputs:
    """Gradients of ``o`` and ``final_state`` with respect to every input, in the inputs' dtypes.

    ``saved`` is what ``forward`` saved for the same problem. If it is empty, it is computed again.
    """
    return backward_by(CHUNKS, p, x, saved, do, dfinal, known)


def backward_by(
    chunks: Chunks, p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None,
    known: KnownCall | None,
) -> Inputs:  # fmt: skip
    """`backward`, with a backend's own kernels before and after the scans."""
    name = name_back(p, x, saved, do, dfinal)
    made = again(known, name, x, (do, dfinal), saved)
    if made is not None:
        return gradients_of(x, made)
    given = with_contiguous_vectors(x)
    if given is not x:
        return backward_by(chunks, p, given, saved, do, dfinal, known)
    d, split = new_gradients(p, x), plan_back(p, chip_of(p.device))
    kernels, spare = _prepare_back(chunks, p, saved, d, split)
    kernels, d, parts = summing(p, kernels, d)
    with on(p.device):
        kind = _kind_back(chunks, p, saved)
        call = make_call(p, x, kind, do, dfinal, known=known, name=(kind, split, laid_out(*x, do, dfinal)))
        run(call, kernels, *d, left=saved, spare=(*spare, *parts))
    remember(call, (*x, do, dfinal), known, name)
    return gradients_of(x, d)


def later_by(chunks: Chunks, p: Problem, x: Inputs, saves: bool) -> tuple[Call, Kernels]:
    """The usual call of `backward_by` after a forward call with ``x``, for compiling both together. It assumes that
    final states have no gradient, and that the gradient of o is contiguous."""
    nowhere, x = p._replace(device=torch.device("meta")), with_contiguous_vectors(x)
    saved = (for_backward(nowhere).buffer,) if saves else ()
    do = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    d, split = new_gradients(nowhere, x), plan_back(p, chip_of(p.device))
    kernels, _ = _prepare_back(chunks, nowhere, saved, d, split)
    return make_call(p, x, _kind_back(chunks, p, saved), do, None), summing(nowhere, kernels, d)[0]


def _kind_back(chunks: Chunks, p: Problem, saved: tuple[Tensor, ...]) -> tuple:
    return "backward", chunks.name, not saved, p.disable_recompute


def _prepare_back(
    chunks: Chunks, p: Problem, saved: tuple[Tensor, ...], d: Inputs, split: Segments | None
) -> tuple[Kernels, tuple[Tensor | None, ...]]:
    """The function that launches all kernels, and the memory for it on the device of ``p``."""
    anew, kept = not saved, p.disable_recompute
    recompute = anew or not kept
    own = () if kept else (Factors, Channels, Residual)
    memory = for_backward(p, *saved), Workspace(p, *own, StateGradients, *chunks.hands)
    segments = new_segmented_back(p, split)

    def kernels(c: Call) -> None:
        (do, dfinal), (solved, factors, channels, residual, chain, *_) = c.more, c.parts(*memory)
        if recompute:
            chunks.prepare(c, memory, anew)
        operands = (c, channels, solved, factors, residual, do, dfinal, chain, d.initial_state)
        if segments is None or every(c):
            run_scan_backward(*operands, recompute=recompute)
        run_segmented_back(*operands, segments, recompute=recompute)
        chunks.find(c, memory, d)

    return kernels, (*(w.buffer for w in memory[len(saved) :]), *memory_of(segments))


def decode(p: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o``, contiguous. The pools are written in place."""
    if known is not None:
        known.again = _decode_again
    return run_plan(plan_decode, p, x, s, around, chooses=True, known=known)[0]


def _decode_again(known: KnownCall, x: Inputs, s: Slots, around: Around) -> Tensor:
    return run_plan(plan_decode, known.problem, x, s, around, chooses=True, known=known)[0]


def output_of(p: Problem, s: Slots) -> Tensor:
    """The tensor for a serving call's output. For launches it counts as the call's own, even if given."""
    return torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device) if s.out is None else s.out


def remember_served(call: Call, x: Inputs, known: KnownCall | None, kind: tuple) -> None:
    """Remembers a serving call, also one of another backend, so that a known one only launches."""
    remember(call, x)
    if known is not None and call.shape.replayable:
        known.again = partial(_served_again, kind)


def _served_again(kind: tuple, known: KnownCall, x: Inputs, s: Slots, around: Around) -> Tensor | None:
    p = known.problem  # as `output_of`, which would take longer
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device) if s.out is None else s.out
    return o if again(known, kind, x, s, around, made=(o,)) else None


def step(p: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    """Runs token by token."""
    if known is not None:
        known.again = _step_again
    return Outputs(*run_plan(plan_step, p, x, chooses=True, known=known))


def _step_again(known: KnownCall, x: Inputs) -> tuple[Tensor, Tensor]:
    return run_plan(plan_step, known.problem, x, chooses=True, known=known)


def prefill(p: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o``, contiguous. The pools are written in place. `decode` runs short sequences beside the others."""
    o, memory, convolved = output_of(p, s), Workspace(p, *HANDED), new_convolved(p)

    def kernels(c: Call) -> None:
        solved, factors, channels = c.parts(memory)
        rule = run_before(c, convolved)
        slots = Slots(*rule.more)
        if p.pools.checkpoint_offsets:
            run_scan_to_offset(rule, slots, before=True)
        run_chunks(rule, solved, factors, channels)
        run_scan(rule, channels, solved, factors, o, None, None, slots=slots)
        if not p.batch_invariant:
            run_decode(rule, o)
        if p.pools.checkpoint_offsets:
            run_scan_to_offset(rule, slots, before=False)
        run_after(c, o)

    with on(p.device):
        call = make_call(p, with_contiguous_vectors(x), PREFILL, *s._replace(out=None), *around, known=known)
        run(call, kernels, o, spare=(memory.buffer, *convolved))
    remember_served(call, x, known, PREFILL)
    return o


def workspace_bytes(p: Problem, x: Inputs) -> int:
    """The bytes that ``prefill`` or ``decode`` allocates besides the output. Only the layout of ``x`` matters."""
    if p.recurrent:
        return convolved_bytes(p)
    rule = with_convolved(x, new_convolved(p._replace(device=torch.device("meta"))))
    return count_bytes(p, *HANDED) + convolved_bytes(p) + scratch_bytes(p, rule, chip_of(p.device))


def _cannot_decode(p: Problem) -> str | None:
    if not p.decodable:
        return f"token by token it runs {DECODED}"
    if p.pools is None and p.B * p.T * max(p.H * p.K, p.HV * p.V, p.HV * p.K) >= 2**31:
        return f"token by token it counts a tensor's numbers in 32 bits, there are {p.B} x {p.T} tokens"
    if p.K > WIDEST_KEY or p.V > WIDEST_VALUE:
        return f"token by token K can be up to {WIDEST_KEY} and V up to {WIDEST_VALUE}, they are {p.K} and {p.V}"
    return None


def _outputs(p: Problem, o: Tensor, final: Tensor, *buffers: Tensor) -> Outputs:
    """The results of `forward`. ``buffers``: that of `for_backward` if it is saved, and one with `Residual` if chunks'
    states are wanted and not saved. The states are copied from it, sequence after sequence."""
    states = None
    if p.keep_states:
        kept = for_backward(p, *buffers) if kept_all(p) else Workspace(p, Residual, buffer=buffers[-1])
        *_, residual = kept.views()
        states = residual.states[:, :, : p.V, : p.K]
        states = states if p.state_v_first else states.mT
        if p.packed:  # slots as in chunk.py
            places = enumerate(zip(accumulate(p.lengths, initial=0), p.lengths, strict=False))
            runs = [states.narrow(0, start // C + n, -(-length // C)) for n, (start, length) in places]
            states = torch.cat([states[:0], *runs])
        states = states.unflatten(0, (p.B, len(states) // max(p.B, 1))).contiguous()
    return Outputs(o, final, buffers[: p.needs_grad], states)


def with_contiguous_vectors(x: Inputs) -> Inputs:
    """The inputs with contiguous parameters per head and bounds, as they nearly always are. Kernels take no strides of
    these."""
    vectors = {"A_log": x.A_log, "dt_bias": x.dt_bias, "cu_seqlens": x.cu_seqlens}
    flat = {name: t.contiguous() for name, t in vectors.items() if t is not None and not t.is_contiguous()}
    return x._replace(**flat) if flat else x


def for_backward(p: Problem, buffer: Tensor | None = None) -> Workspace:
    """The workspace of what the forward pass saves. With ``disable_recompute`` it has everything."""
    groups = (Solved, Factors, Channels, Residual) if p.disable_recompute else (Solved,)
    return Workspace(p, *groups, buffer=buffer)


def kept_all(p: Problem) -> bool:
    """Whether the forward pass saves everything that the backward pass can use."""
    return p.needs_grad and p.disable_recompute


def name_back(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None
) -> tuple[Hashable, ...]:
    """The name under which a backward pass is known: the layouts of its tensors. Even inputs may have other layouts
    than in the forward pass, since hooks may have moved them (`torch.autograd.graph.saved_tensors_hooks`)."""
    return p.lengths, fastcall.key(False, x, (do, dfinal), saved)
