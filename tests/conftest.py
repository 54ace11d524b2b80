import pytest
import torch

# The workers of pytest-xdist share the cores: more threads than cores make small operators several times slower.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """``torch.empty`` comes filled with NaN: whatever an op forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
