"""Keeps gates in float32 under FSDP2.

`fully_shard` gathers all parameters of a module as one group. It refuses a group with two dtypes, and it gathers
every parameter in the dtype of its `MixedPrecisionPolicy`. Without this module, a layer with bfloat16 weights and
float32 gates cannot be trained, and a policy rounds the gates. Here the gates get a group of their own if other
parameters are gathered in fewer than 32 bits.

torch has no public way to do this (pytorch/pytorch#156784), except to shard a module that holds only the gates. Then
the gates would have other names in checkpoints than fla's. From torch 2.12 on, a module may have several groups, and
one function of torch makes them. It is wrapped here. It changes nothing for modules without our gates.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any

import torch

from flash_delta.layers._delta_mixer import DeltaMixer
from flash_delta.layers._gate import GATES

NAME = "_init_param_group"  # of torch's function


def with_gates_apart(make_group: Callable[..., None]) -> Callable[..., None]:
    """Torch's function, called once more for the gates if other parameters are gathered in fewer than 32 bits."""
    taken = signature(make_group)

    @wraps(make_group)
    def make_groups(*args: Any, **kwargs: Any) -> None:
        given = taken.bind(*args, **kwargs).arguments
        params, policy = given["params"], given["mp_policy"]
        mixers = [m for root in given["modules"] for m in root.modules() if isinstance(m, DeltaMixer)]
        of_gates = {id(p) for mixer in mixers for name, p in mixer.named_parameters(recurse=False) if name in GATES}
        if {p.dtype for p in params} | {policy.param_dtype} <= {torch.float32, torch.float64, None}:
            make_group(**given)
        else:
            make_group(**given | {"params": [p for p in params if id(p) not in of_gates]})
            gates = [p for p in params if id(p) in of_gates]
            make_group(**given | {"params": gates, "mp_policy": replace(policy, param_dtype=None, reduce_dtype=None)})
        for mixer in mixers:
            mixer.mark_gates()  # the parameters are new ones

    return make_groups


def fits(make_group: Callable[..., None] | None) -> bool:
    """Whether this torch still has the function, with the arguments that are read here."""
    return make_group is not None and {"params", "modules", "mp_policy"} <= signature(make_group).parameters.keys()


if torch.__version__ >= (2, 12) and torch.distributed.is_available():
    from torch.distributed.fsdp._fully_shard import _fully_shard

    if fits(getattr(_fully_shard, NAME, None)):
        setattr(_fully_shard, NAME, with_gates_apart(getattr(_fully_shard, NAME)))
