"""The memory that a call will allocate."""

from collections.abc import Callable
from typing import Any

import torch

from flash_delta.ops._backend import choose_backend, load_backend
from flash_delta.ops._check.options import refuse
from flash_delta.ops.serving.warmup import described


def workspace_bytes(op: Callable[..., Any], /, *, device: torch.device | str = "cuda", **arguments: Any) -> int:
    """The device memory that the call ``op(**arguments)`` allocates besides its output, in bytes. It does not run.

    Decoding needs memory only with a convolution: it keeps the results q, k and v in float32 until the rule has run.
    Prefill asks torch's allocator for one buffer, in which its kernels pass results to each other, and for the
    descriptors of the copy engine. With a convolution, the buffer also has the results q, k and v. If the copy engine
    cannot describe q, k or v as they are given, or if A_log, dt_bias or cu_seqlens have gaps, prefill asks for memory
    for copies. When the call returns, all of this memory is free again for the stream of the call.

    The number is the sum of these requests. The allocator rounds each up to 512 bytes. It may use up to 1 MB more for
    each, from memory that it has kept. The number does not count the output, ``[B, T, HV, V]`` in q's dtype.

    Args:
        op: a serving op, such as :func:`flash_delta.prefill_kda`.
        device: the GPU where the call runs, if its tensors are on "meta".
        arguments: the op's arguments by name. Only shapes, dtypes and strides of tensors matter, so they may be on
            "meta".

    Raises:
        ValueError: naming the argument, what was expected and what came.
        TypeError: if arguments are missing, or if the op does not have them.

    Example:
        >>> import torch
        >>> from flash_delta import prefill_kda
        >>> from flash_delta.ops.serving import workspace_bytes
        >>> q = k = v = g = torch.empty(1, 16384, 32, 128, dtype=torch.bfloat16, device="meta")
        >>> pool, rows = torch.empty(64, 32, 128, 128, device="meta"), torch.empty(64, dtype=torch.int32, device="meta")
        >>> call = {"q": q, "k": k, "v": v, "g": g, "beta": q[..., 0], "state_pool": pool, "state_v_first": True}
        >>> call |= {"cu_seqlens": rows.new_empty(65), "read_indices": rows, "write_indices": rows}
        >>> if torch.cuda.is_available():  # 16,384 tokens in up to 64 sequences
        ...     megabytes = workspace_bytes(prefill_kda, **call) / 1e6
    """
    found = described("workspace_bytes", op, arguments)
    problem = found.problem
    place = torch.device(device) if problem.device.type == "meta" else problem.device
    if place.type != "cuda":
        refuse("workspace_bytes", "device", "a GPU", place)
    place = torch.device(place.type, torch.cuda.current_device() if place.index is None else place.index)
    problem = problem._replace(device=place)
    return load_backend(choose_backend(problem, arguments.get("backend"))).workspace_bytes(problem, *found.groups)
