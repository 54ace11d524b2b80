"""What calls need that are not planned (runtime/plan.py): memory for gradients, copies of vectors, and the backward
pass in which `triton` scans the states."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.runtime import compile_key, fastcall
from flash_delta.kernels.runtime.calls import Call, make_call, on
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.launch import Kernels, again, launch, remember, run
from flash_delta.kernels.runtime.plan import Making, laid_out
from flash_delta.kernels.runtime.workspace import (
    Channels,
    Factors,
    HeadGradients,
    Residual,
    Scores,
    StateGradients,
    Workspace,
)
from flash_delta.kernels.triton.backward.chunks import find_gradients
from flash_delta.kernels.triton.backward.results import gradients_of
from flash_delta.kernels.triton.backward.scan_backward import run_scan_backward
from flash_delta.kernels.triton.backward.segments import memory_of, new_segmented_back, run_segmented_back
from flash_delta.kernels.triton.elementwise.total import sum_parts
from flash_delta.kernels.triton.forward.chunks import run_chunks
from flash_delta.kernels.triton.forward.plan import saved_groups
from flash_delta.kernels.triton.serving.prompts import make_convolved
from flash_delta.kernels.triton.tiles import Segments, plan_back
from flash_delta.problem import Inputs, KnownCall, Problem


class Chunks(NamedTuple):
    """The kernels of a backward pass that work on one chunk at a time, before and after the states are scanned."""

    name: str
    hands: tuple[type, ...]  # the groups of tensors that the kernels of ``find`` pass to each other
    prepare: Callable[[Call, tuple[Workspace, ...], bool], None]
    """Computes again what the scans need. It gets the call, its memory, and whether nothing was saved."""
    find: Callable[[Call, tuple[Workspace, ...], Inputs], None]
    """Gets the call, its memory, and where gradients go: of A_log and dt_bias as sums per chunk."""


def _prepare(c: Call, memory: tuple[Workspace, ...], anew: bool) -> None:
    run_chunks(c, *c.parts(*memory)[:3], saved=not anew)


def _find(c: Call, memory: tuple[Workspace, ...], d: Inputs) -> None:
    find_gradients(c, *c.parts(*memory), c.more[0], d)


CHUNKS = Chunks("triton", (Scores, HeadGradients), _prepare, _find)


def for_backward(p: Problem, buffer: Tensor | None = None) -> Workspace:
    """The workspace of what the forward pass of ``triton`` saves."""
    return Workspace(p, *saved_groups(p), buffer=buffer)


def backward_by(
    chunks: Chunks, p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None,
    known: KnownCall | None,
) -> Inputs:  # fmt: skip
    """The backward pass of ``triton``, with own kernels before and after the scans."""
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
        call = make_call(p, x, kind, do, dfinal, known=known, name=(kind, split, compile_key.laid_out(*x, do, dfinal)))
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
        if segments is None or c.every:
            run_scan_backward(*operands, recompute=recompute)
        run_segmented_back(*operands, segments, recompute=recompute)
        chunks.find(c, memory, d)

    return kernels, (*(w.buffer for w in memory[len(saved) :]), *memory_of(segments))


def name_back(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None
) -> tuple[Hashable, ...]:
    """The name under which a backward pass is known: the layouts of its tensors. Even inputs may have other layouts
    than in the forward pass, since hooks may have moved them (`torch.autograd.graph.saved_tensors_hooks`)."""
    return p.lengths, fastcall.key(False, x, (do, dfinal), saved)


def summing(p: Problem, kernels: Kernels, d: Inputs) -> tuple[Kernels, Inputs, tuple[Tensor, ...]]:
    """``kernels`` that also sum the gradients of A_log and dt_bias over chunks, the gradients with these sums, and the
    parts. With a gate per channel PyTorch sums."""
    parts = {name: getattr(d, name) for name in ("A_log", "dt_bias") if getattr(d, name) is not None}
    if p.gate.kind == "channel" or not parts:
        return kernels, d, ()
    sums = {name: torch.empty(p.HV, dtype=torch.float32, device=p.device) for name in parts}

    def all_kernels(c: Call) -> None:
        kernels(c)
        for name, t in parts.items():
            step = sum_parts(laid_out((len(t), 1, p.HV), t.dtype), sums[name])
            launch(c, step._replace(arguments=(t, *step.arguments[1:])))

    return all_kernels, d._replace(**sums), tuple(parts.values())


def new_gradients(p: Problem, x: Inputs) -> Inputs:
    """Contiguous memory for the gradients, on the device of ``p``. For A_log and dt_bias it is for their sums per
    chunk, [slots, HV] or [slots, HV, K]."""
    d = Inputs(*(None if t is None else torch.empty(t.shape, dtype=t.dtype, device=p.device) for t in x[:7]))
    sums = count_slots(p), p.HV, *((p.K,) if p.gate.kind == "channel" else ())
    new = partial(torch.empty, sums, dtype=torch.float32, device=p.device)
    return d._replace(**{name: new() for name in ("A_log", "dt_bias") if getattr(x, name) is not None})


def new_convolved(p: Problem) -> tuple[Tensor, ...]:
    """The memory of `make_convolved`."""
    layouts = make_convolved(Making(), p)
    return tuple(torch.empty_strided(t.shape, t.strides, dtype=t.dtype, device=p.device) for t in layouts)


def with_contiguous_vectors(x: Inputs) -> Inputs:
    """The inputs with contiguous parameters per head and bounds, as they nearly always are. Kernels take no strides of
    these."""
    vectors = {"A_log": x.A_log, "dt_bias": x.dt_bias, "cu_seqlens": x.cu_seqlens}
    flat = {name: t.contiguous() for name, t in vectors.items() if t is not None and not t.is_contiguous()}
    return x._replace(**flat) if flat else x
