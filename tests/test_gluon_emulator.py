"""What the emulator of Gluon does otherwise than a tensor would, or Python."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.gluon_emulator import Value


def test_values_are_compared_number_by_number():
    x = Value(torch.tensor([1.0, 2.0]))
    assert (x == 1.0).t.tolist() == [True, False]
    assert (x != Value(torch.tensor([1.0, 3.0]))).t.tolist() == [False, True]
