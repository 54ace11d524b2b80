"""A problem with other fields."""

from typing import Any

from flash_delta.problem import Problem


def changed(p: Problem, **changes: Any) -> Problem:
    """The problem with other fields. Names that it does not have are those of its pools' fields."""
    own = {name: value for name, value in changes.items() if name in Problem._fields}
    p, of_pools = p._replace(**own), {name: value for name, value in changes.items() if name not in own}
    return p._replace(pools=p.pools._replace(**of_pools)) if of_pools else p
