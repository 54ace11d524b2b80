"""Products of flags of which the ordinary suite runs as many as meet in pairs; `-m long` runs the others."""

from itertools import combinations, product

import pytest


def pairwise(**axes):
    """Parametrizes a test by the product of its axes, each a dictionary of ids and values.

    Every value meets every value of each other axis in the ordinary suite. Which of the products that needs does not
    depend on anything but the axes.
    """
    names, rows = ",".join(axes), [*product(*axes.values())]
    left = set().union(*map(pairs, rows))
    chosen = set()
    while left:
        best = max(rows, key=lambda row: len(left & pairs(row)))  # the first of those
        chosen.add(best)
        left -= pairs(best)
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(axis[name] for axis, name in zip(axes.values(), row, strict=True)),
                id="-".join(row), marks=() if row in chosen else pytest.mark.long,
            )
            for row in rows
        ],
    )  # fmt: skip


def pairs(row):
    """The pairs of values in a row, each with its two axes."""
    return set(combinations(enumerate(row), 2))
