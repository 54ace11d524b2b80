import os
from importlib.util import find_spec

import pytest
import torch

# Without a GPU kernels run in Triton's interpreter, on CPU tensors. Triton reads this when a kernel is defined.
if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    from flash_delta.testing.bounds import watch_bounds
    from flash_delta.testing.interpreter import repair_interpreter

    repair_interpreter()
    watch_bounds()

# What PyTorch's deterministic mode asks of cuBLAS, before its first call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# The workers of pytest-xdist share the cores: more threads than cores make small operators several times slower.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """``torch.empty`` comes filled with NaN: whatever an op forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def process():
    """In which Triton compiles. Its imports take longer than most of what is asked of it."""
    from flash_delta.compiler.pool import clean_processes

    with clean_processes(1) as (pool, _):
        yield pool
