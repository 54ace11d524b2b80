"""What tests, benchmarks and ``flash-delta check`` share: named cases, the truth and the one comparison."""

from flash_delta.testing.accuracy import ALLOWED, assert_accurate, relative_error, run, truth
from flash_delta.testing.cases import CASES, MEMBERS, Case, Member, make_inputs

__all__ = [
    "ALLOWED",
    "CASES",
    "MEMBERS",
    "Case",
    "Member",
    "assert_accurate",
    "make_inputs",
    "relative_error",
    "run",
    "truth",
]
