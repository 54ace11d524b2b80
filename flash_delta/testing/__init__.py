"""Named problems, the truth and the comparison, which tests, benchmarks and ``flash-delta check`` share."""

from flash_delta.testing.accuracy import (
    ALLOWED,
    allowed,
    assert_accurate,
    products_in,
    relative_error,
    run,
    truth,
    with_gradients,
)
from flash_delta.testing.cases import CASES, HARD, MEMBERS, WIDTHS, Case, Member
from flash_delta.testing.inputs import make_inputs
from flash_delta.testing.isolated import Isolated, Lost, Refused, first_line
from flash_delta.testing.large import judge, output_gradient, output_like, without_padding
from flash_delta.testing.rule import Standard
from flash_delta.testing.workload import Workload, activations, make_tensors, options

__all__ = [
    "ALLOWED",
    "CASES",
    "HARD",
    "MEMBERS",
    "WIDTHS",
    "Case",
    "Isolated",
    "Lost",
    "Member",
    "Refused",
    "Standard",
    "Workload",
    "activations",
    "allowed",
    "assert_accurate",
    "first_line",
    "judge",
    "make_inputs",
    "make_tensors",
    "options",
    "output_gradient",
    "output_like",
    "products_in",
    "relative_error",
    "run",
    "truth",
    "with_gradients",
    "without_padding",
]
