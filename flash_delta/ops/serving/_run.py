"""What the serving ops share: a call is looked at once, and while compiling it is one operator."""

from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._backend import Explain, Explanation, choose_backend, load_backend, wished
from flash_delta.ops._check.options import Options, cast
from flash_delta.ops._check.rule import read_lengths
from flash_delta.ops._check.serving import describe
from flash_delta.ops._execute import serve
from flash_delta.ops._known_calls import look_at
from flash_delta.ops._transforms import is_traced
from flash_delta.ops.serving.around import NOTHING
from flash_delta.problem import Around, Inputs, KnownCall, Slots

# The tensors of the operator, and the fields of Options that the serving ops set.
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", *Slots._fields, *Around._fields)
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
    "checkpoint_every": "int?",
    "max_prompts": "int?",
    "batch_invariant": "bool",
    "eps": "float?",
    "activation": "str?",
}
OPTIONAL = {"A_log", "dt_bias", "cu_seqlens", *Slots._field_defaults, *Around._fields}
WRITTEN = {"state_pool": "Tensor(a!)", "conv_pool": "Tensor(b!)?"}


def run(
    x: Inputs, s: Slots, options: dict[str, Any], backend: str | Explain | None, around: Around = NOTHING
) -> Tensor | Explanation:
    """``o``. A call is looked at once (`look_at`). ``options``: fields of `Options`, which takes 1 us to make."""
    if isinstance(backend, Explain):
        return backend.of(describe(x, s, around, Options(**options)))
    if is_traced(x.q):
        given, chosen = x._asdict() | s._asdict() | around._asdict(), cast(Options(**options))
        if not torch.compiler.is_compiling():  # there the operator does it, when it runs
            describe(x, s, around, chosen)
        fields = (getattr(chosen, name) for name in FIELDS)
        return operator(*(given[name] for name in TENSORS), *fields, wished(backend))
    known = look_at(_look, False, (backend, *options.values()), options, x, s, around)
    if known.again is not None:  # kernels alone, launched as before
        o = known.again(known, x, s, around)
        if o is not None:
            return o
    problem = known.problem
    if problem.lengths is not None and problem.packed:  # these are values
        problem = problem._replace(lengths=read_lengths(problem.op, x, None))
    return serve(problem, known, x, s, around)


def _look(given: tuple[Any, ...], options: dict[str, Any], x: Inputs, s: Slots, around: Around) -> KnownCall:
    problem = describe(x, s, around, Options(**options))
    return KnownCall(problem, load_backend(choose_backend(problem, given[0])), needs_grad=False)


def _type_of(name: str) -> str:
    return WRITTEN.get(name) or ("Tensor?" if name in OPTIONAL else "Tensor")


@torch.library.custom_op(
    "flash_delta::serve",
    mutates_args=tuple(WRITTEN),
    schema=f"({', '.join(f'{_type_of(name)} {name}' for name in TENSORS)}, "
    f"{', '.join(f'{kind} {name}' for name, kind in FIELDS.items())}, str? backend) -> Tensor",
)
def operator(*args: Any) -> Tensor:
    """``o``; the pools are written in place."""
    tensors, (*values, wish) = dict(zip(TENSORS, args, strict=False)), args[len(TENSORS) :]
    x = Inputs(**{name: tensors[name] for name in Inputs._fields if name in tensors})
    s, around = (group(*(tensors[name] for name in group._fields)) for group in (Slots, Around))
    return run(x, s, dict(zip(FIELDS, values, strict=True)), wish, around)


@operator.register_fake
def _(*args: Any) -> Tensor:
    v = args[TENSORS.index("v")]
    return v.new_empty(v.shape)
