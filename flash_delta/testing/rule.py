"""The rule: what the results of a case are compared with, and how far off each may be."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flash_delta.reference import stages
from flash_delta.reference.activation import NORM_EPS
from flash_delta.testing.accuracy import (
    ALLOWED,
    Results,
    allowed,
    infer,
    products_in,
    relative_error,
    run,
    tensors_of,
    truth,
    with_gradients,
)
from flash_delta.testing.cases import Case, Floors, Member
from flash_delta.testing.inputs import make_inputs

OF_GATES = ("dg", "dA_log", "ddt_bias")


class Standard:
    """What the results of a case are compared with, and what is allowed.

    Errors are relative to the result's norm. Gradients of gates sum terms that may cancel, each with its own roundings,
    so their errors are relative to the norm of these terms (`sizes_of_terms`).

    * A hard case allows three times the error of rounding q and k, or its floor.
    * The torch backend may be off by `ALLOWED`. ``kernels``: another backend was called, which may round operands of
      products. It is allowed twice the error of the torch backend with such products. Gradients of gates may also be
      off by no more than twice `ALLOWED` of their terms.
    """

    def __init__(self, case: Case, member: Member, inputs: dict[str, Any], kernels: bool = True):
        self.hard, dtype = case.floors is not None, inputs["v"].dtype
        # The recurrence needs every token's state for the gradients: too much for hard cases. The tests show that the
        # torch backend in float64 gives the same.
        self.want = run_wide(case, member, inputs) if self.hard else truth(member, inputs)
        self.scales = {name: float(value.norm()) for name, value in self.want.items()}
        if self.want.keys() & set(OF_GATES):
            terms = run_wide(case, member, inputs, sizes_of_terms())
            self.scales |= {name: float(terms[name].norm()) for name in OF_GATES if name in terms}
        self.reference: dict[str, float] = {}  # errors of rounding q and k, or of the torch backend
        if self.hard:
            rounded = run_wide(case, member, inputs, keys_in=dtype)
        elif kernels:
            with products_in(dtype):
                rounded = run(member, make_inputs(case, member, dtype), "torch")
        else:
            rounded = {}
        self.reference = {name: self.error(name, value) for name, value in rounded.items()}
        self.allowed = {name: self._allowed(name, case, member, dtype) for name in self.want}

    def error(self, name: str, got: Tensor) -> float:
        return relative_error(got, self.want[name], self.scales[name])

    def wrong(self, results: Results) -> dict[str, tuple[float, float]]:
        """Results that are off by more than is allowed, with both numbers."""
        judged = {name: (self.error(name, value), self.allowed[name]) for name, value in results.items()}
        return {name: (error, limit) for name, (error, limit) in judged.items() if error > limit}

    def _allowed(self, name: str, case: Case, member: Member, dtype: torch.dtype) -> float:
        if self.hard:
            floors = (case.channel_floors if member.gate == "channel" else None) or case.floors
            return max(3 * self.reference[name], floor_of(name, floors))
        part = float(self.want[name].norm()) / (self.scales[name] + 1e-30)
        if name not in self.reference:
            return part * ALLOWED[dtype]
        limit = allowed(self.reference[name], dtype, part)
        return min(limit, 2 * ALLOWED[dtype]) if name in OF_GATES else limit


def floor_of(name: str, floors: Floors) -> float:
    if name in OF_GATES:
        return floors.gates
    return {"o": floors.o, "final_state": floors.final_state}.get(name, floors.tokens)


def sizes_of_terms() -> AbstractContextManager:
    """Inside of this context the torch backend adds the absolute values of the four sums that are dg (section 4 of
    docs/mathematics.md)."""
    return patch.object(stages, "total", lambda *terms: sum(term.abs() for term in terms))


def run_wide(
    case: Case,
    member: Member,
    inputs: dict[str, Any],
    inside: AbstractContextManager | None = None,
    keys_in: torch.dtype | None = None,
) -> Results:
    """The results of the torch backend in float64, on the CPU. ``keys_in``: q and k are normalised and then rounded to
    this dtype. Their gradients go back through the norm."""
    wide = {n: inputs[n].detach().cpu().double().requires_grad_() for n in tensors_of(inputs)}
    given = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in inputs.items()} | wide
    if keys_in is not None:
        given |= {"use_qk_l2norm_in_kernel": False}
        for name in ("q", "k"):
            y = wide[name] * torch.rsqrt(wide[name].square().sum(-1, keepdim=True) + NORM_EPS)
            given[name] = y + (y.to(keys_in).double() - y).detach()
    with inside or nullcontext():
        if case.forward_only:
            return infer(member, given, "torch")
        o, final_state = member.op(**given, backend="torch")
        return with_gradients(o, final_state, wide, inputs["v"].dtype)
