"""Compiles kernels while vLLM profiles, before there are states and requests.

Examples of calls have the tensors of vLLM's own trial, and caches of two blocks in vLLM's layout.
"""

from collections.abc import Callable, Iterator
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flash_delta.integrations.vllm.calls import Layer, Tokens, calls_of, decline, takes
from flash_delta.ops.serving.warmup import compile_call

BLOCKS = 2
LEAST = 32  # tokens; with fewer, vLLM does not profile but tries sizes of batches
_warm: set[tuple] = set()  # layers whose kernels are compiled


def warm(module: Any, layer_of: Callable[[Any], tuple[Layer, Tokens]]) -> bool:
    """Whether the ops run such a layer. Layers that differ only in their weights are tried once."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    try:
        key = type(module), str(module.get_state_shape()), str(module.get_state_dtype())
        if key in _warm:
            return True
        layer, x = layer_of(caches(module))
        if len(x.q) < LEAST:
            return True
        found = [calls_of(layer, x.first(batch.num_actual_tokens), batch) for batch in batches(module, x)]
        calls = [call for calls, _ in found for call in calls]
        if not takes(module, calls):
            return False
        for op, arguments in calls:
            compile_call(op, arguments)
        _warm.add(key)
    except Exception as error:  # if our kernels fail, the server starts with its own
        decline(module, f"{type(error).__name__}: {error}")
        return False
    return True


def caches(module: Any) -> tuple[Tensor, ...]:
    """Caches as vLLM makes them. A page has the windows of a block, and then its states."""
    pools = list(zip(module.get_state_shape(), module.get_state_dtype(), strict=True))
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in pools]
    page = getattr(module.cache_config, "mamba_page_size_padded", None) or sum(sizes)
    memory = torch.zeros(BLOCKS * page, dtype=torch.uint8, device=module.A_log.device)
    found, start = [], 0
    for (shape, dtype), size in zip(pools, sizes, strict=True):
        strides = page // dtype.itemsize, *torch.empty(shape, device="meta").stride()
        found.append(memory.view(dtype).as_strided((BLOCKS, *shape), strides, start // dtype.itemsize))
        start += size
    return tuple(found)


def batches(module: Any, x: Tokens) -> Iterator[SimpleNamespace]:
    """Metadata as vLLM makes them. One decoding row has other strides than several, so both are tried."""
    device = x.q.device

    def index(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    for count in (1, 2):
        rows = {"non_spec_state_indices_tensor": index(*[0] * count), "spec_sequence_masks": None}
        yield SimpleNamespace(**rows, num_prefills=0, num_decodes=count, num_actual_tokens=count)
    rows |= {"non_spec_query_start_loc": index(0, 1, len(x.q)), "has_initial_state": index(0, 0).bool()}
    yield SimpleNamespace(**rows, num_prefills=2, num_decodes=0, num_actual_tokens=len(x.q))
    drafts = getattr(module, "num_spec", 0) or getattr(module, "num_speculative_tokens", 0)
    if 0 < drafts < LEAST:
        yield SimpleNamespace(
            num_prefills=0, num_decodes=0, num_spec_decodes=1, num_actual_tokens=1 + drafts,
            spec_sequence_masks=index(1).bool(), spec_state_indices_tensor=index(*[0] * (1 + drafts))[None],
            num_accepted_tokens=index(1), spec_query_start_loc=index(0, 1 + drafts),
        )  # fmt: skip
