"""The part that serving ops share. A call is checked once. Under torch.compile it is one operator."""

from typing import Any, get_type_hints

import torch
from torch import Tensor, is_grad_enabled

from flash_delta.ops._backend import Explain, Explanation, choose_backend, load_backend, wished
from flash_delta.ops._check.options import Options, PoolOptions, cast
from flash_delta.ops._check.rule import read_lengths
from flash_delta.ops._check.serving import describe, refuse_gradients
from flash_delta.ops._execute import serve
from flash_delta.ops._known_calls import look_at
from flash_delta.ops._operators.define import GateFields, define, named, take
from flash_delta.ops._transforms import is_traced
from flash_delta.ops.serving.around import NOTHING
from flash_delta.problem import Around, Inputs, KnownCall, Slots, sharing


def run(
    x: Inputs, s: Slots, options: dict[str, Any], backend: str | Explain | None, around: Around = NOTHING
) -> Tensor | Explanation:
    """Returns ``o``. A call is checked once (`look_at`). ``options`` is a dictionary, since an `Options` takes 1 us."""
    if isinstance(backend, Explain):
        return backend.of(describe(x, s, around, Options(**options)), x, s, around)
    if is_traced(x.q):
        chosen = cast(Options(**options))
        if torch.compiler.is_compiling():  # the operator checks the rest when it runs
            refuse_gradients(chosen.op, x, s, around)
        else:
            describe(x, s, around, chosen)
        s = s._replace(out=x.v.new_empty(x.v.shape)) if s.out is None else s
        operator(*take(x, Tensors), *s, *around, *take(chosen, Chosen), wished(backend))
        return s.out
    return _run_known(x, s, options, (backend, *options.values()), around)


def _run_known(
    x: Inputs, s: Slots, options: "dict[str, Any] | Chosen", given: tuple[Any, ...], around: Around
) -> Tensor:
    """Looks at a new call, and runs it. ``given``: the backend that is asked for, and the values of ``options``."""
    known = look_at(_look, is_grad_enabled(), given, options, x, s, around)
    if known.again is not None:  # only kernels run, launched as before
        return known.again(known.problem, x, s, around, known)
    problem = known.problem
    if problem.lengths is not None and problem.packed:  # a known call does not remember these values
        problem = problem._replace(lengths=read_lengths(problem.op, x, None))
    return serve(problem, known, x, s, around)


def _look(given: tuple[Any, ...], options: "dict[str, Any] | Chosen", x: Inputs, s: Slots, around: Around) -> KnownCall:
    named = options if isinstance(options, dict) else options._asdict()
    problem = sharing(describe(x, s, around, Options(**named)))
    return KnownCall(problem, load_backend(choose_backend(problem, given[0])), needs_grad=False)


# Without fields that no serving op has. For an operator that writes tensors, PyTorch compares all pairs of arguments.
Tensors = named("Tensors", get_type_hints(Inputs), "p", "initial_state")
OTHERS = ("optional_beta", "chunk_size", "steps", "keep_states", "disable_recompute")
Chosen = named("Chosen", get_type_hints(Options), *OTHERS, gate=GateFields, pools=PoolOptions)


def _serve(x: Tensors, s: Slots, around: Around, options: Chosen, backend: str | None) -> None:
    """The operator. It always writes to ``out``, because operators may not return their arguments."""
    _run_known(Inputs(*x[:5], None, None, *x[5:]), s, options, (backend, *options), around)


WRITTEN = ("state_pool", "write_pool", "out", "ring_k", "ring_u", "ring_decay", "conv_pool", "conv_write_pool")
operator = define("serve", _serve, lambda *_: None, writes=WRITTEN)
