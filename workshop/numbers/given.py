"""Numbers in README and guide that look like measurements and are not."""

from typing import NamedTuple


class Given(NamedTuple):
    page: str
    words: str  # as they stand in the page
    reason: str


SIZES = "bytes that follow from shapes and dtypes"
BOUND = "a bound that a test of `make engines` holds"

GIVEN = [
    Given("docs/fla.md", "below 1e-4", BOUND),
    Given("docs/fla.md", "below 2e-5", BOUND),
    Given("docs/fla.md", "below 1e-5", BOUND),
    Given("docs/guide/backends.md", "2.1 MB for 64 tokens of 32 heads", SIZES),
    Given("docs/guide/backends.md", "take 50 MB in the forward pass and 88 MB in the backward pass", SIZES),
    Given("docs/guide/backends.md", "at least 3e-8 of a state is left", "2^-25"),
    Given("docs/guide/engines.md", "(some 3 GB)", "what pip downloads"),
    Given("docs/guide/serving.md", "a record takes 1 to 3 % of the memory of a state", SIZES),
    Given("docs/guide/serving.md", "takes 26 % of the memory of a float32 state, and 52 % of that", SIZES),
    Given("docs/guide/training.md", "step 101 has 0.6 of the peak", "follows from the schedule"),
    Given("docs/guide/training.md", "torchrun waits 30 seconds", "a default of torchrun"),
]
