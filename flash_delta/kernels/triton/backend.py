"""The ``triton`` backend: the chunkwise algorithm on NVIDIA and AMD GPUs.

``solve`` and ``factor`` turn every chunk into a map of the state (A, then X and Y), all chunks at once. ``scan`` scans
the state through the chunks. With a decay per channel, ``channel`` computes everything that depends on the decay, and
``factor`` is not needed. With a strength per channel (GDN-2) the same kernels take two gates, b and w, in place of
beta. If the caller wants the states at the chunks' starts, ``scan`` writes the same tensors as for the backward pass.

The forward pass saves the results of ``solve``, and with ``disable_recompute`` everything. The backward pass runs
``factor`` (or ``channel``) again. Then one launch runs ``scan`` for the states and, beside it, ``scan_backward`` from
right to left. After that, gradients are computed for all chunks at once: by ``pairs``, and by the kernels of
gradients.py or, with a decay per channel, by ``channel_gradients``, ``halved_gradients`` and ``key_head_gradients``.
"""

from itertools import accumulate

import torch
import triton
from torch import Tensor

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.runtime.chip import CPU, chip_of, takes_tma, unknown
from flash_delta.kernels.runtime.plan import Making, Plan, layout_of, layouts_of
from flash_delta.kernels.runtime.run import by_sizes, run, tensor_of
from flash_delta.kernels.runtime.workspace import count_bytes, groups_in
from flash_delta.kernels.triton import backward as passes_back
from flash_delta.kernels.triton import forward as passes
from flash_delta.kernels.triton import serving
from flash_delta.kernels.triton.backward.results import OutputGradients, Saved, gradients_of
from flash_delta.kernels.triton.forward.scan_launches import crowded, scratch_bytes
from flash_delta.kernels.triton.tiles import plan_back, plan_segments, widest_key
from flash_delta.problem import Around, Inputs, KnownCall, Outputs, Problem, Slots

NARROWEST, WIDEST_KEY, WIDEST_VALUE = 8, 256, 512
GATED = "a strength per channel (b, w) comes with a decay per channel"
DECODED = "the delta rule with a decay, whose keys erase what they write"


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.device.type != "cuda" and not (problem.device.type == "cpu" and triton.knobs.runtime.interpret):
        return f"it needs a GPU, the tensors are on {problem.device}"
    pools = problem.pools
    if torch.float64 in (problem.dtype, *(() if pools is None else (pools.dtype, pools.write_dtype))):
        pool = "" if pools is None else f", the pool is {pools.write_dtype or pools.dtype}"
        return f"it computes in float32, the tensors are {problem.dtype}{pool}"
    if problem.channel_strength and problem.gate.kind != "channel":
        return GATED
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


def takes_steps(p: Problem) -> bool:
    """Whether kernels read q and g once per token. Chunks must not cut a token."""
    return p.gate.kind != "channel" and p.pools is None and not p.recurrent and C % p.steps == 0


def empty_saved(p: Problem, x: Inputs) -> tuple[Tensor, ...]:
    """Empty tensors like those that ``forward`` saves: those of `solve`, and with ``disable_recompute`` all."""
    fixed = p._replace(H=int(p.H), HV=int(p.HV), K=int(p.K), V=int(p.V))  # never symbols: kernels are compiled for them
    return (torch.empty(count_bytes(fixed, *passes.plan.saved_groups(p)), dtype=torch.uint8, device=p.device),)


def forward(p: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    o, final, saved, states = run(passes.plan.plan_forward, p, x, choose=plan_segments, known=known)
    if p.keep_states:
        if states is None:
            *_, residual = groups_in(layout_of(saved, "saved"), p, *passes.plan.saved_groups(p))
            states = tensor_of(residual.states, {"saved": saved})
        states = _of_chunks(p, states)
    return Outputs(o, final, () if saved is None else (saved,), states)


def _of_chunks(p: Problem, kept: Tensor) -> Tensor:
    """The states at chunks' starts, sequence after sequence, from `Residual.states`."""
    states = kept[:, :, : p.V, : p.K]
    states = states if p.state_v_first else states.mT
    if p.packed:  # slots as in chunk.py
        places = enumerate(zip(accumulate(p.lengths, initial=0), p.lengths, strict=False))
        runs = [states.narrow(0, start // C + n, -(-length // C)) for n, (start, length) in places]
        states = torch.cat([states[:0], *runs])
    return states.unflatten(0, (p.B, len(states) // max(p.B, 1))).contiguous()


def backward(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None, known: KnownCall | None = None
) -> Inputs:
    """Gradients of ``o`` and ``final_state`` with respect to every input, in the inputs' dtypes.

    ``saved`` is what ``forward`` saved for the same problem. If it is empty, it is computed again.
    """
    after = OutputGradients(do, dfinal), Saved(*saved or (None,))
    made = run(passes_back.plan.plan_backward, p, x, after=after, choose=plan_back, known=known)
    return gradients_of(x, made)


def decode(p: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o``, contiguous. The pools are written in place."""
    if known is not None:
        known.again = decode
    return run(serving.rows.plan_decode, p, x, s, around, choose=by_sizes, known=known)[0]


def commit(p: Problem, x: Inputs, s: Slots, known: KnownCall | None = None) -> None:
    """Applies records to states. The pool is written in place."""
    run(serving.ring.plan_commit, p, x, s, choose=by_sizes, known=known)


def step(p: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    """Runs token by token."""
    if known is not None:
        known.again = step
    return Outputs(*run(serving.rows.plan_step, p, x, choose=by_sizes, known=known))


def prefill(p: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o``, contiguous. The pools are written in place."""
    if known is not None:
        known.again = prefill
    return run(serving.prefill.plan_prefill, p, x, s, around, choose=by_sizes, known=known)[0]


def plans(p: Problem, x: Inputs, *on_pool: tuple) -> dict[str, Plan]:
    """The plans of a call, by name. Only layouts of tensors matter."""
    chip, (x, *on_pool) = chip_of(p.device), map(layouts_of, (x, *on_pool))
    if on_pool:
        if p.recurrent:
            return {"decode": serving.rows.plan_decode(p, chip, x, *on_pool)}
        return {"prefill": serving.prefill.plan_prefill(p, chip, x, *on_pool)}
    if p.recurrent and not p.needs_grad:
        return {"forward": serving.rows.plan_step(p, chip, x)}
    found = {"forward": passes.plan.plan_forward(p, chip, x, choice=plan_segments(p, chip))}
    if p.needs_grad:
        size = count_bytes(p, *passes.plan.saved_groups(p))
        found["backward"] = passes_back.plan.plan_usual_backward(
            p, chip, x, saved_bytes=size, choice=plan_back(p, chip)
        )
    return found


def workspace_bytes(p: Problem, x: Inputs, s: Slots, around: Around) -> int:
    """The bytes that ``prefill`` or ``decode`` allocates besides the output."""
    chip, groups = chip_of(p.device), tuple(map(layouts_of, (x, s, around)))
    if p.recurrent:
        return serving.rows.plan_decode(p, chip, *groups).workspace_bytes
    rule = serving.prompts.with_convolved(groups[0], serving.prompts.make_convolved(Making(), p))
    if p.channel_strength:
        rule = rule._replace(v=passes.values.values_of(Making(), p))
    return serving.prefill.plan_prefill(p, chip, *groups).workspace_bytes + scratch_bytes(p, rule, chip)


def _cannot_decode(p: Problem) -> str | None:
    if not p.decodable:
        return f"token by token it runs {DECODED}"
    if p.pools is None and p.B * p.T * max(p.H * p.K, p.HV * p.V, p.HV * p.K) >= 2**31:
        return f"token by token it counts a tensor's numbers in 32 bits, there are {p.B} x {p.T} tokens"
    if p.K > WIDEST_KEY or p.V > WIDEST_VALUE:
        return f"token by token K can be up to {WIDEST_KEY} and V up to {WIDEST_VALUE}, they are {p.K} and {p.V}"
    return None
