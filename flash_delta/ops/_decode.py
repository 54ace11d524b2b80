"""What the serving ops share: a call is looked at once, and while compiling it is one operator."""

from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._backend import Explain, Explanation, choose_backend, load_backend, wished
from flash_delta.ops._problem import Options
from flash_delta.ops._slots import describe
from flash_delta.problem import Inputs, Problem, Slots

REMEMBERED = 1024  # calls; each takes some kilobytes
_remembered: dict[tuple, tuple[Problem, str]] = {}

# The tensors of the operator, and the fields of Options that the serving ops set.
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", *Slots._fields)
FIELDS = {
    "op": "str",
    "gate": "str",
    "erase": "str",
    "scale": "float?",
    "recurrent": "bool",
    "l2norm": "bool",
    "raw_gate": "bool",
    "lower_bound": "float?",
    "raw_beta": "bool",
    "neg_eigval": "bool",
    "state_v_first": "bool",
}
OPTIONAL = {"A_log", "dt_bias", *Slots._field_defaults}


def run(x: Inputs, s: Slots, options: Options, backend: str | Explain | None) -> Tensor | Explanation:
    """``o``. What was found of a call is remembered for those that differ in their tensors' values only: to check a
    call takes longer than to launch it."""
    if isinstance(backend, Explain):
        return backend.of(describe(x, s, options))
    wish = wished(backend)
    if torch.compiler.is_compiling():
        tensors = x._asdict() | s._asdict()
        return operator(*(tensors[name] for name in TENSORS), *(getattr(options, name) for name in FIELDS), wish)
    try:
        key = (options, wish, *map(_traits, x), *map(_traits, s))
        known = _remembered.get(key)
    except (AttributeError, TypeError):  # an argument that is no tensor or no number, which the checks will name
        known = None
    if known is None:
        problem = describe(x, s, options)
        known = problem, choose_backend(problem, wish)
        if len(_remembered) == REMEMBERED:
            _remembered.clear()
        _remembered[key] = known
    problem, name = known
    return load_backend(name).decode(problem, x, s)


def _traits(t: Tensor | None) -> tuple | None:
    """All that can change how a call runs, but for the values. Strides of what has no gaps follow from the shape."""
    if t is None:
        return None
    return t.shape, t.is_contiguous() or t.stride(), t.dtype, t.get_device(), t.data_ptr() % 16


def _type_of(name: str) -> str:
    return "Tensor(a!)" if name == "state_pool" else "Tensor?" if name in OPTIONAL else "Tensor"


@torch.library.custom_op(
    "flash_delta::decode",
    mutates_args=("state_pool",),
    schema=f"({', '.join(f'{_type_of(name)} {name}' for name in TENSORS)}, "
    f"{', '.join(f'{kind} {name}' for name, kind in FIELDS.items())}, str? backend) -> Tensor",
)
def operator(*args: Any) -> Tensor:
    """``o``; the pool is written in place."""
    tensors, (*values, wish) = dict(zip(TENSORS, args, strict=False)), args[len(TENSORS) :]
    x = Inputs(**{name: tensors[name] for name in Inputs._fields if name in tensors})
    s = Slots(*(tensors[name] for name in Slots._fields))
    return run(x, s, Options(**dict(zip(FIELDS, values, strict=True))), wish)


@operator.register_fake
def _(*args: Any) -> Tensor:
    v = args[TENSORS.index("v")]
    return v.new_empty(v.shape)
