import pytest
import trained_layers


@pytest.fixture(scope="session")
def truth(tmp_path_factory):
    """By family and kind of rows, what transformers' own PyTorch code computes for `trained_layers.build`."""
    return trained_layers.read_truth(tmp_path_factory.mktemp("truth"))
