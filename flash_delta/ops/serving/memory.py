"""The memory that a call will allocate."""

from typing import Any

import torch

from flash_delta.ops._backend import Explain, choose_backend, load_backend
from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.serving import MOST_TOKENS
from flash_delta.ops.serving.spec import Serving
from flash_delta.ops.serving.warmup import decode_call, prefill_call
from flash_delta.problem import Inputs

META = torch.device("meta")


def workspace_bytes(spec: Serving, T: int, N: int, device: torch.device | str = "cuda") -> int:
    """The most device memory that one call allocates besides its output, in bytes.

    Decoding needs memory only with a convolution: it keeps the results q, k and v in float32 until the rule has run.
    Prefill asks torch's allocator for one buffer, in which its kernels pass results to each other, and for the
    descriptors of the copy engine. With a convolution, prefill also asks for memory for the results q, k and v. If the
    copy engine cannot describe q, k or v as they are given, prefill asks for memory for copies. When the call returns,
    all of this memory is free again for the stream of the call.

    The number is the sum of these requests. The allocator rounds each up to 512 bytes. It may use up to 1 MB more for
    each, from memory that it has kept. The number does not count the output, ``[1, T, HV, V]`` in ``dtype``, nor copies
    of A_log, dt_bias and cu_seqlens that have gaps.

    Args:
        spec: how the server calls. If there are several forms, the form that needs most memory counts.
        T: tokens of a call, all sequences together.
        N: sequences of a prefill call, or rows of a decoding call. A decoding call has at most 16 N of these T tokens.
        device: where the calls run, a GPU.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta.ops.serving import Serving, workspace_bytes
        >>> spec = Serving("gated_delta_rule", H=16, HV=32, K=128, V=128, state_v_first=True)
        >>> if torch.cuda.is_available():  # a call of 16,384 tokens in up to 64 sequences
        ...     megabytes = workspace_bytes(spec, T=16384, N=64) / 1e6
    """
    device = torch.device(device)
    if device.type != "cuda":
        refuse("workspace_bytes", "device", "a GPU", device)
    device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
    for name, size in (("T", T), ("N", N)):
        if size < 0:
            refuse("workspace_bytes", name, "a number of at least 0", size)
    prefills = (_bytes(prefill_call(spec, form, T, N, META), device, {}) for form in spec.prefill)
    decoded = {"B": 1, "T": min(T, MOST_TOKENS * N)}  # for any number of rows that share these tokens
    decodes = (_bytes(decode_call(spec, form, 1, META), device, decoded) for form in spec.decode)
    return max((*prefills, *decodes), default=0)


def _bytes(call: tuple[Any, dict[str, Any]], device: torch.device, sizes: dict[str, int]) -> int:
    """The bytes that a call allocates. ``sizes``: fields of the problem that differ from the call's."""
    op, arguments = call
    problem = op(**arguments, backend=Explain()).problem._replace(device=device, **sizes)
    inputs = Inputs(**{name: arguments.get(name) for name in Inputs._fields})
    return load_backend(choose_backend(problem, None)).workspace_bytes(problem, inputs)
