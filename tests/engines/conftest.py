import pytest
import qwen_layer


@pytest.fixture(scope="session")
def truth(tmp_path_factory):
    """By kind of rows, what transformers' own PyTorch code computes for `qwen_layer.build`."""
    return qwen_layer.read_truth(tmp_path_factory.mktemp("truth"))
