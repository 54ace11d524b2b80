"""Makes operators of torch.library: their schema, their fake results for tracers, and their autograd.

An operator is a function of named tuples. Its arguments are the fields of these tuples, one after the other. A field
that is a named tuple stands for its own fields. The annotations of the fields are its schema. So an option that is
added to a named tuple becomes an argument of every operator that takes this tuple.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain
from string import ascii_lowercase
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from flash_delta.ops._transforms import differentiable_once
from flash_delta.problem import PACKAGE, Gate, Schema, marked

NAMESPACE = PACKAGE.replace(".", "_")
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # operators live as long as this object


def named(name: str, fields: dict[str, Any], *without: str, **kinds: Any) -> Any:
    """A named tuple with these fields, ``without`` some of them, and with ``kinds`` of others."""
    return NamedTuple(name, [(field, kind) for field, kind in (fields | kinds).items() if field not in without])


GateFields = named("GateFields", marked(Gate, Schema))


def take(x: Any, fields: type) -> list[Any]:
    """The attributes of ``x`` that have the names of a named tuple's fields, as arguments of an operator. Of an
    attribute that is a tuple, as many values as the field's kind has."""
    found = []
    for name, kind in fields.__annotations__.items():
        value = getattr(x, name)
        found += value[: len(kind._fields)] if isinstance(value, tuple) else [value]
    return found


class BackwardArguments(NamedTuple):
    """The arguments of an operator's backward pass after its tensors."""

    saved: list[Tensor]
    do: Tensor | None  # the gradients of its first two results
    dfinal: Tensor | None


def define(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    writes: Sequence[str] = (),
    backward: Callable[..., Sequence[Tensor | None]] | None = None,
    saved_from: Callable[..., int] | None = None,
) -> OpOverload:
    """The operator ``flash_delta::name``.

    With ``backward`` it calls ``flash_delta::name_forward``, and its gradients come from
    ``flash_delta::name_backward``. A compiled graph has only these two. They have no derivative, so no call of them
    enters Python for autograd, as it would with `torch.library.custom_op` (docs/decisions.md).

    Args:
        name: the name without the namespace.
        run: ``run(tensors, ..., options, backend)``, annotated: a named tuple of tensors, maybe more tensors, a named
            tuple of options, and the backend that is asked for. Returns fresh tensors, the first two with gradients, or
            None.
        fake: takes the same arguments. Returns empty tensors with the shapes, strides and dtypes of run's results.
        writes: the tensors that are written in place.
        backward: ``backward(tensors, ..., Behind, options, backend)``: gradients in the order of ``tensors``. It has no
            derivative, and autograd raises an error for one.
        saved_from: takes the arguments of ``run``. Returns n, if results from the n-th on are saved for ``backward``.
    """
    hints = get_type_hints(run)
    returned = hints.pop("return")
    if backward is None:
        return _define_low(name, hints, returned, run, fake, writes)
    *tensors, options, wish = hints.items()
    arguments = dict([*tensors, ("behind", BackwardArguments), options, wish])
    width, count, group = len(_opened(dict(tensors[:1]))), len(_opened(dict(tensors))), _grouping(hints)

    def run_backward(x: Sequence[Tensor | None], *more: Any) -> list[Tensor]:
        found = zip(x, backward(x, *more), strict=True)
        return [d.contiguous() for t, d in found if _has_gradient(t)]

    def fake_backward(x: Sequence[Tensor | None], *_: Any) -> list[Tensor]:
        return [t.new_empty(t.shape) for t in x if _has_gradient(t)]

    operator_forward = _define_low(f"{name}_forward", hints, returned, run, fake)
    operator_backward = _define_low(f"{name}_backward", arguments, list[Tensor], run_backward, fake_backward)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            output = operator_forward(*args)
            start = len(output) if saved_from is None else saved_from(*group(args))
            ctx.op, ctx.options = name, args[count:]
            ctx.save_for_backward(*args[:count], *output[start:])
            ctx.mark_non_differentiable(*output[2:])
            ctx.set_materialize_grads(False)
            return tuple(output)

        @staticmethod
        @differentiable_once
        def backward(ctx: Any, kept: Sequence[Tensor | None], *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            do, dfinal = [*gradients, None][:2]
            found = iter(operator_backward(*kept[:count], list(kept[count:]), do, dfinal, *ctx.options))
            inputs = [next(found) if _has_gradient(t) else None for t in kept[:width]]
            return (*inputs, *[None] * (count - width + len(ctx.options)))

    def differentiable(*args: Any) -> list[Tensor]:
        return list(Differentiable.apply(*args))

    return _register(name, _schema(hints, returned), differentiable, "CompositeImplicitAutograd")


def _define_low(
    name: str,
    hints: dict[str, Any],
    returned: Any,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    writes: Sequence[str] = (),
) -> OpOverload:
    """An operator without a derivative. Autograd records nothing in ``run``."""
    places = [place for place, argument in enumerate(_opened(hints)) if argument in writes]
    group = _grouping(hints)

    def without_gradients(*args: Any) -> Any:
        for place in places:  # kernels write without telling autograd
            if args[place] is not None:
                increment_version(args[place])
        if not torch.is_grad_enabled():  # always in compiled graphs
            return run(*group(args))
        with torch.no_grad():
            return run(*group(args))

    operator = _register(name, _schema(hints, returned, writes), without_gradients, "CompositeExplicitAutograd")
    torch.library.register_fake(operator, lambda *args: fake(*group(args)), lib=LIBRARY)
    return operator


def _register(name: str, schema: str, run: Callable[..., Any], key: str) -> OpOverload:
    # A compiler may leave gaps between rows, as it likes to do for aligned products. Asked for exact strides, it would
    # copy such a tensor for each call.
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    LIBRARY.impl(name, run, key)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _schema(hints: dict[str, Any], returned: Any, writes: Sequence[str] = ()) -> str:
    types = {argument: schema_type(hint) for argument, hint in _opened(hints).items()}
    for letter, argument in zip(ascii_lowercase, writes, strict=False):
        types[argument] = types[argument].replace("Tensor", f"Tensor({letter}!)")
    return f"({', '.join(f'{kind} {argument}' for argument, kind in types.items())}) -> {schema_type(returned)}"


def _opened(hints: dict[str, Any]) -> dict[str, Any]:
    """The annotations, with the fields of named tuples in place of the tuples."""
    fields = (_opened(get_type_hints(hint)) if _is_group(hint) else {name: hint} for name, hint in hints.items())
    return dict(chain.from_iterable(group.items() for group in fields))


def _grouping(hints: dict[str, Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """Groups an operator's arguments into the named tuples that its function takes."""
    kinds = [_group_of(kind) if _is_group(kind) else (None, 1) for kind in hints.values()]
    ends = accumulate(count for _, count in kinds)
    places = [(make, end - count, end) for (make, count), end in zip(kinds, ends, strict=True)]

    def group(args: Sequence[Any]) -> list[Any]:
        return [args[a] if make is None else make(args[a:b]) for make, a, b in places]

    return group


def _group_of(kind: type) -> tuple[Callable[[Sequence[Any]], Any], int]:
    """Makes a named tuple of an operator's arguments, and says how many it takes."""
    hints, new = get_type_hints(kind), tuple.__new__  # in half the time of a named tuple's own `_make`
    if not any(map(_is_group, hints.values())):
        return partial(new, kind), len(hints)
    group = _grouping(hints)
    return lambda args: new(kind, group(args)), len(_opened(hints))


def _is_group(hint: Any) -> bool:
    return hasattr(hint, "_fields")


def _has_gradient(t: Tensor | None) -> bool:
    """Whether the tensor can have a gradient. Bounds cannot."""
    return t is not None and t.is_floating_point()


def schema_type(hint: Any) -> str:
    """The name of a type in schemas: ``float | None`` is "float?"."""
    if hint is NoneType:
        return "()"
    if get_origin(hint) is list:
        return f"{schema_type(*get_args(hint))}[]"
    if NoneType in get_args(hint):
        return f"{schema_type(get_args(hint)[0])}?"
    names = {torch.dtype: "ScalarType"}
    return "str" if get_origin(hint) is Literal else names.get(hint, hint.__name__)
