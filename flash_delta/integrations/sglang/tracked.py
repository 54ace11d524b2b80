"""Prompts leave the states that SGLang's radix cache keeps in their slots of the pool.

SGLang's own kernels write such a state to a buffer. After the call, SGLang copies it from there to a slot of the pool.
Our ops write it to the slot, as a checkpoint. For this a dispatcher has to know its backend, whose metadata name the
slots. Our ops then mark the buffer, and SGLang's copies leave it out.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from pkgutil import resolve_name
from typing import Any, NamedTuple

from torch import Tensor

CHUNK = 64  # tokens between two states that the radix cache may keep
ATTENTION = "sglang.srt.layers.attention"
BACKENDS = f"{ATTENTION}.linear"
GRAPH = f"{BACKENDS}.kda_prefill_graph"  # of prompts in CUDA graphs
MODES = {"TRACK_FINAL_STATE": 1, "TRACK_CHUNK_STATE": 2}  # what SGLang keeps of a prompt in a graph; 0: nothing


class Tracked(NamedTuple):
    """Where the states that SGLang keeps go, for each sequence of a call."""

    slots: Tensor
    offsets: Tensor  # after how many tokens; negative: there is none


def find_tracked(dispatcher: Any, cache_indices: Tensor, track_chunk_idx: Tensor) -> Tracked | None:
    """Where the states that SGLang keeps go. None if these tensors are not those of the running batch, because its
    slots may be others."""
    backend = vars(dispatcher).get("_flash_delta_backend")
    for batch, indices, slots in (
        (getattr(backend, "prefill_graph_metadata", None), "cache_indices", "track_dst"),
        (getattr(backend, "forward_metadata", None), "mamba_cache_indices", "mamba_track_indices"),
    ):
        if batch is not None and batch.track_chunk_idx is track_chunk_idx and getattr(batch, indices) is cache_indices:
            found = getattr(batch, slots)
            return None if found is None else Tracked(found, track_chunk_idx * CHUNK)
    return None


def mark(buffer: Tensor) -> None:
    """Says that the states for this buffer are in the pool."""
    buffer._flash_delta_in_pool = True


def is_marked(buffer: Tensor | None) -> bool:
    return hasattr(buffer, "_flash_delta_in_pool")


def introduce(backend: Any) -> None:
    """Tells a dispatcher of its backend."""
    backend.kernel_dispatcher._flash_delta_backend = backend


def keep(
    theirs: Callable, self: Any, forward_batch: Any, h: Tensor | None, ssm_states: Tensor, forward_metadata: Any,
    track_states: Tensor | None = None, *, h_track_buf: Tensor | None = None,
) -> None:  # fmt: skip
    """SGLang's copies after prompts. States at the end of a prompt are copied from the pool to the pool."""
    if is_marked(h_track_buf):
        forward_metadata = replace(forward_metadata, track_ssm_h_src=forward_metadata.track_ssm_h_src[:0])
    theirs(self, forward_batch, h, ssm_states, forward_metadata, track_states, h_track_buf=h_track_buf)


def keep_in_graph(
    theirs: Callable, ssm_pool: Tensor, h_track: Tensor, track_mode: Tensor, track_dst: Tensor, cache_indices: Tensor
) -> None:
    """SGLang's copies after prompts in a CUDA graph. If the buffer is marked, only states at the end of a prompt are
    copied."""
    if is_marked(h_track):
        track_mode = track_mode & MODES["TRACK_FINAL_STATE"]
    theirs(ssm_pool, h_track, track_mode, track_dst, cache_indices)


HOOKS = {
    f"{ATTENTION}.hybrid_linear_attn_backend:MambaAttnBackendBase._track_mamba_state_extend": keep,
    f"{GRAPH}:kda_track_ssm_state": keep_in_graph,
}


def hooks() -> Iterator[tuple[str, Callable]]:
    """SGLang's functions and our hooks for them."""
    yield from ((path.replace(":", "."), ours) for path, ours in HOOKS.items())


def unlike() -> str | None:
    """Why these hooks do not fit SGLang, or None."""
    for path, ours in HOOKS.items():
        found = list(signature(resolve_name(path)).parameters)
        if found != list(signature(ours).parameters)[1:]:  # after theirs
            return f"{path.rpartition(':')[2]} takes {', '.join(found)}"
    if any(resolve_name(f"{GRAPH}:{name}") != value for name, value in MODES.items()):
        return f"{', '.join(MODES)} have other values"
    return None
