"""What tests, benchmarks and ``flash-delta check`` share: named cases, the truth and the one comparison."""

from flash_delta.testing.accuracy import assert_accurate, limit, relative_error, run, truth
from flash_delta.testing.cases import CASES, MEMBERS, Case, Member, make_inputs

__all__ = [
    "CASES",
    "MEMBERS",
    "Case",
    "Member",
    "assert_accurate",
    "limit",
    "make_inputs",
    "relative_error",
    "run",
    "truth",
]
