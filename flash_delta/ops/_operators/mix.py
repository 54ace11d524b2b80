"""The operator of a mixer, which torch.compile and torch.export see. It has the tensors of the three parts once."""

from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from flash_delta.backend import plans_on_host
from flash_delta.ops._backend import choose_backend, load_backend
from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import read_lengths
from flash_delta.ops._known_calls import look_at
from flash_delta.ops._mixing.parts import (
    OP,
    PROJECTED,
    KnownMix,
    MixOptions,
    describe_rule,
    find_parts,
    inputs_of,
    mix_backward,
    mix_forward,
    split,
)
from flash_delta.ops._operators.define import BackwardArguments, define
from flash_delta.problem import Inputs, Mixed, Problem

# `MixOptions` as an operator takes them, and whether there will be a backward pass.
_kinds = get_type_hints(MixOptions) | {"places": list[int], "needs_grad": bool}
MixFields = NamedTuple("MixFields", list(_kinds.items()))


def _options(fields: MixFields) -> MixOptions:
    places = tuple(zip(*[iter(fields.places)] * 6, strict=True))
    return MixOptions(*fields[:6], places)


def _run(x: Mixed, cu_seqlens_cpu: Tensor | None, fields: MixFields, backend: str | None) -> list[Tensor]:
    """``[y, *kept]``; without a backward pass only y."""
    known, problem = _look_at(x, cu_seqlens_cpu, fields, backend)
    y, kept, _ = mix_forward(known, problem, _options(fields).places, x)
    return [y, *kept] if fields.needs_grad else [y]


def _fake(x: Mixed, cu_seqlens_cpu: Tensor | None, fields: MixFields, backend: str | None) -> list[Tensor]:
    options = _options(fields)
    tokens = split(x[PROJECTED], options.places)
    problem = describe_rule(x, options, tokens, None)._replace(needs_grad=fields.needs_grad)
    q, k, v = (t.new_empty(t.shape) for t in tokens[:3])
    y = v.new_empty(problem.B, problem.T, problem.HV * problem.V)
    if not fields.needs_grad:
        return [y]
    module = load_backend(choose_backend(problem, backend))
    saved = module.empty_saved(problem, inputs_of(x, (q, k, v, *tokens[3:5]))) if hasattr(module, "empty_saved") else ()
    return [y, q, k, v, v.new_empty(v.shape), *saved]


def _run_backward(
    x: Mixed, cu_seqlens_cpu: Tensor | None, behind: BackwardArguments, fields: MixFields, backend: str | None
) -> Mixed:
    known, problem = _look_at(x, cu_seqlens_cpu, fields, backend)
    needs = Mixed(*[True] * len(Mixed._fields))
    return mix_backward(known, problem, _options(fields).places, x, tuple(behind.saved), behind.do, needs)


mix_operator = define("mix", _run, _fake, backward=_run_backward, saved_from=lambda x, bounds, fields, wish: 1)


def _look_at(x: Mixed, cu_seqlens_cpu: Tensor | None, fields: MixFields, wish: str | None) -> tuple[KnownMix, Problem]:
    given = (mix_operator, cu_seqlens_cpu is None, fields._replace(places=tuple(fields.places)), wish)
    known = look_at(_look, False, given, None, x)
    rule, x = known.parts[1], Inputs(*[x.first] * 3, cu_seqlens=x.cu_seqlens)
    lengths = read_lengths(OP, x, cu_seqlens_cpu, wait=cu_seqlens_cpu is None and plans_on_host(rule.backend))
    return known, rule.problem._replace(lengths=lengths)


def _look(given: tuple[Any, ...], _: None, x: Mixed) -> KnownMix:
    _, _, fields, wish = given
    known = find_parts(x, _options(fields), wish, fields.needs_grad)
    if known.parts is None:
        refuse(OP, "backend", "one with convolve_heads under torch.compile", repr(wish))
    return known
