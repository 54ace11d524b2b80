"""Everything compiled before the first request."""

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flash_delta.ops.serving.decode import decode_gated_delta_rule, decode_kda
from flash_delta.ops.serving.forms import DecodeCalls, PrefillCalls
from flash_delta.ops.serving.prefill import prefill_gated_delta_rule, prefill_kda
from flash_delta.ops.serving.spec import Serving

DECODE = {"gated_delta_rule": decode_gated_delta_rule, "kda": decode_kda}
PREFILL = {"gated_delta_rule": prefill_gated_delta_rule, "kda": prefill_kda}


def warmup(spec: Serving, device: torch.device | str = "cuda", backend: str | None = None) -> dict[str, float]:
    """Compile everything that the calls in ``spec`` can need, for any B, T, N and number of slots.

    It makes such calls, on a few tokens that are all padding. This creates a CUDA context. It does not touch the
    caller's tensors, and it frees what the calls allocate. Run it in every process, outside of the capture of a CUDA
    graph, and once for each way in which a model makes calls. :func:`flash_delta.forbid_compilation` then shows whether
    you forgot something.

    At its end it calls ``gc.freeze()``, because a full garbage collection visits every object of every library and
    stops requests for some 100 ms. After ``gc.freeze()`` Python still frees objects to which nothing refers, except
    cycles that existed before. ``gc.unfreeze()`` undoes it.

    Args:
        spec: how the server calls.
        device: where the server will call.
        backend: as given to the ops. Default None.

    Returns:
        Seconds by call, such as ``{"decode_kda(write_indices)": 1.9}``. The time is near zero if Triton has the kernels
        on disk, or if an earlier call has compiled them.

    Raises:
        ValueError: the op says what is wrong with such a call.

    Example:
        >>> from flash_delta.ops.serving import Serving, warmup
        >>> spec = Serving("kda", H=2, HV=2, K=16, V=16, state_v_first=True)
        >>> seconds = warmup(spec, device="cpu")  # nothing to compile there
        >>> sorted(seconds)
        ['decode_kda(write_indices)', 'prefill_kda(write_indices)']
    """
    seconds = {}
    for name, op, arguments in calls(spec, torch.device(device)):
        start = time.perf_counter()
        op(**arguments, backend=backend)
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    gc.collect()
    gc.freeze()
    return seconds


def calls(spec: Serving, device: torch.device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields names, ops and arguments. Decoding one token compiles another kernel than decoding several. Prefill
    compiles for two kinds of row stride: multiples of 16, and others."""
    for form in spec.decode:
        for T in (1, 2):
            yield called(DECODE[spec.rule], form), *decode_call(spec, form, T, device)
    for form in spec.prefill:
        for T in (1, 16):
            yield called(PREFILL[spec.rule], form), *prefill_call(spec, form, T, 1, device)


def decode_call(spec: Serving, form: DecodeCalls, T: int, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Op and arguments, for one row."""
    columns = () if not form.num_accepted_tokens else (1,)
    x = spec.arguments(1, T, device) | {"read_indices": padding(spec, device, 1, *columns)}
    x |= {name: padding(spec, device, 1) for name in ("write_indices", "num_accepted_tokens") if getattr(form, name)}
    rows = form.write_pool and spec.write_rows
    if form.cu_seqlens and form.write_indices and not rows:  # the columns of a table limit the tokens of a row
        x["write_indices"] = padding(spec, device, 1, T)
    if form.cu_seqlens:
        x["cu_seqlens"] = torch.tensor([0, T], dtype=spec.index_dtype, device=device)
    if form.write_pool:
        x["write_pool"] = spec.write_pool(T, device)
    x |= around(spec, form, T, device, spec.places(T) if form.write_pool else None)
    if form.parent_idx:
        tables = ("parent_idx",) if rows else ("write_indices", "parent_idx")
        x |= {name: padding(spec, device, 1, T) for name in tables}
    return DECODE[spec.rule], x


def prefill_call(spec: Serving, form: PrefillCalls, T: int, N: int, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Op and arguments; the first sequence has all tokens."""
    x = spec.arguments(1, T, device) | {
        "read_indices": padding(spec, device, N),
        "batch_invariant": form.batch_invariant,
    }
    x["cu_seqlens"] = torch.arange(N + 1, dtype=spec.index_dtype, device=device).clamp(max=1) * T
    if form.write_indices:
        x["write_indices"] = padding(spec, device, N)
    if form.has_initial_state:
        x["has_initial_state"] = torch.ones(N, dtype=torch.bool, device=device)
    if form.checkpoint_offsets:
        x |= {name: padding(spec, device, N) for name in ("checkpoint_indices", "checkpoint_offsets")}
    elif form.checkpoint_indices:
        x |= {"checkpoint_indices": padding(spec, device, N, 1), "checkpoint_every": 64}
    x |= around(spec, form, T, device)
    return PREFILL[spec.rule], x


def around(
    spec: Serving, form: DecodeCalls | PrefillCalls, T: int, device: torch.device, apart: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """What a call in one row has around the rule; ``apart``: as `Serving.convolution` has it."""
    x: dict[str, Any] = {}
    if form.convolution:
        x["convolution"] = spec.convolution(device, apart)
    if form.output_norm:
        x["output_norm"] = spec.output_norm(1, T, device)
    return x


def padding(spec: Serving, device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, -1, dtype=spec.index_dtype, device=device)


def called(op: Any, form: tuple) -> str:
    return f"{op.__name__}({', '.join(name for name, given in form._asdict().items() if given)})"
