"""States at rest in int8, such as those of a prefix cache. The pool of states that decoding changes stays as it is."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from flash_delta.ops._backend import choose_backend, load_elementwise, wished
from flash_delta.ops._check.int8 import Int8Options, describe_resting
from flash_delta.ops._check.options import NULLS, as_int, refuse
from flash_delta.ops._known_calls import look_at
from flash_delta.ops._operators.define import define
from flash_delta.ops._transforms import is_traced
from flash_delta.problem import KnownCall, Resting


class Int8States(NamedTuple):
    r"""States in int8, and the scales of their rows or of their columns.

    .. math::
        S = q \, s

    q has 7 bits without its sign. s has at most 17, so q s is exact in float32. With heads of 128 a state takes 26 % of
    the memory that it takes in float32, or 52 % of that in bfloat16.

    Args:
        states: q, ``[slots, HV, V, K]``, or ``[slots, HV, K, V]`` as the pool has it; int8, any strides but 0. With
            layers ``[layers, slots, HV, V, K]``.
        scale: s, likewise, but with one column or with one row: ``[slots, HV, V, 1]`` has a scale for each row of a
            state, ``[slots, HV, 1, K]`` for each column. float32 or bfloat16, any strides but 0. float16 is refused,
            because it rounds scales below 3e-8 to 0.

    Example:
        >>> import torch
        >>> from flash_delta.ops.serving import Int8States
        >>> states = torch.empty(100, 4, 32, 32, dtype=torch.int8)  # of 100 prefixes, as V x K
        >>> store = Int8States(states, torch.empty(100, 4, 1, 32))  # a scale for each key channel
    """

    states: Tensor
    scale: Tensor


def quantize_states(
    state_pool: Tensor,
    read_indices: Tensor,
    store: Int8States,
    write_indices: Tensor,
    null_slot: int | None = None,
    *,
    backend: str | None = None,
) -> None:
    r"""Rounds states in slots of a pool to int8, into slots of a store, in all layers at once.

    .. math::
        s = \frac{\max |S|}{127}, \qquad q = \mathrm{round}(S / s)

    The maximum is that of a row of the state, or of a column, as the shape of the store's ``scale`` says. Row b of the
    call reads slot ``read_indices[b]`` of the pool, and writes slot ``write_indices[b]`` of the store. It takes one
    launch. The host reads no index, so a call can be captured in a CUDA graph.

    * s is rounded so that q s is exact: in float32 downwards to 17 bits, in bfloat16 to nearest. Ties of q go to even.
    * Each number differs from q s by at most s / 2 + s / 2^16.
    * States that come back to the pool give the same q and s again, bit for bit.
    * If a number is NaN or infinite, all numbers that share its scale come back as NaN. If no number of them is above
      2^-127, all come back as zeros. The least scale apart from 0 is 2^-126.

    Args:
        state_pool: ``[slots, HV, V, K]`` or ``[slots, HV, K, V]``, float32, bfloat16 or float16, any strides but 0.
            With layers ``[layers, slots, HV, V, K]``. It is only read.
        read_indices: slots of the pool, ``[N]``, int32 or int64, for all layers. Rows may read the same slot.
        store: the states in int8, which are written. With layers both of its tensors have them.
        write_indices: slots of the store, ``[N]``, int32 or int64. Rows must not share one. On a CPU such a call is
            refused. On a GPU the state in this slot is then undefined.
        null_slot: an index that is padding in both tables. Default None. A row with an index that names no slot is
            padding in any case, and nothing is read or written for it.
        backend: the backend that runs the call, or refuses it. Default None: the one that ``FLASH_DELTA_BACKEND``
            names, or else the first that can run the call.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta.ops.serving import Int8States, dequantize_states, quantize_states
        >>> pool, rows = torch.randn(2, 8, 4, 32, 32), torch.tensor([3, 5])  # of two layers
        >>> store = Int8States(torch.empty(2, 50, 4, 32, 32, dtype=torch.int8), torch.empty(2, 50, 4, 1, 32))
        >>> quantize_states(pool, rows, store, torch.tensor([41, 7]))
        >>> dequantize_states(store, torch.tensor([41]), pool, torch.tensor([0]))  # a prompt begins as the first one
        >>> bool((pool[:, 0] - pool[:, 3]).abs().max() < pool[:, 3].abs().max() / 250)
        True

    Source: the layout with a scale for each key channel is that of SGLang's ``Int8CheckpointStore``.
    """
    x = Resting(state_pool, *_tensors_of("quantize_states", store), read_indices, write_indices)
    _call("quantize_states", x, null_slot, False, backend)


def dequantize_states(
    store: Int8States,
    read_indices: Tensor,
    state_pool: Tensor,
    write_indices: Tensor,
    null_slot: int | None = None,
    *,
    backend: str | None = None,
) -> None:
    r"""Restores states from int8: from slots of a store to slots of a pool, in all layers at once.

    .. math::
        S = q \, s

    It is exact in a float32 pool. Pools of 16 bits round it, and what is beyond their largest number becomes infinite
    (65,504 in float16). With scales in bfloat16 the largest number of a row comes back changed by up to 0.4 %, so it
    may then be beyond.
    Launches are as in :func:`quantize_states`.

    Args:
        store: the states in int8, as :func:`quantize_states` writes them. It is only read.
        read_indices: slots of the store, ``[N]``, int32 or int64, for all layers. Rows may read the same slot.
        state_pool: ``[slots, HV, V, K]`` or ``[slots, HV, K, V]``, float32, bfloat16 or float16, any strides but 0.
            With layers ``[layers, slots, HV, V, K]``. Its slots ``write_indices`` are written.
        write_indices: slots of the pool, ``[N]``, int32 or int64. Rows must not share one. On a CPU such a call is
            refused. On a GPU the state in this slot is then undefined.
        null_slot: an index that is padding in both tables. Default None. A row with an index that names no slot is
            padding in any case, and nothing is read or written for it.
        backend: the backend that runs the call, or refuses it. Default None: the one that ``FLASH_DELTA_BACKEND``
            names, or else the first that can run the call.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta.ops.serving import Int8States, dequantize_states
        >>> q, slot = torch.full((1, 4, 32, 32), 100, dtype=torch.int8), torch.tensor([0])
        >>> store, pool = Int8States(q, torch.full((1, 4, 32, 1), 0.5)), torch.zeros(8, 4, 32, 32)
        >>> dequantize_states(store, slot, pool, torch.tensor([6]))
        >>> float(pool[6].mean()), float(pool[:6].sum())
        (50.0, 0.0)

    Source: see :func:`quantize_states`.
    """
    x = Resting(state_pool, *_tensors_of("dequantize_states", store), read_indices, write_indices)
    _call("dequantize_states", x, null_slot, True, backend)


def _tensors_of(op: str, store: Int8States) -> Int8States:
    if not isinstance(store, Int8States):
        refuse(op, "store", "an Int8States", type(store).__name__)
    return store


def _call(op: str, x: Resting, null_slot: int | None, restores: bool, backend: str | None) -> None:
    options = Int8Options(None if null_slot is None else as_int(op, "null_slot", null_slot, NULLS, 0), restores)
    if not is_traced(x.state_pool):
        _run(x, options, backend)
        return
    if not torch.compiler.is_compiling():
        describe_resting(x, options)
    operators[op](*x, *options, wished(backend))


def _run(x: Resting, options: Int8Options, backend: str | None) -> None:
    known = look_at(_look, is_grad_enabled(), (backend, *options), options._asdict(), x)
    if x.state_pool.ndim == 4:
        x = x._replace(**{name: getattr(x, name).unsqueeze(0) for name in x._fields[:3]})
    known.backend.move_states(known.problem, x, known)


def _look(given: tuple[Any, ...], options: dict[str, Any], x: Resting) -> KnownCall:
    problem = describe_resting(x, Int8Options(**options))
    return KnownCall(problem, load_elementwise(choose_backend(problem, given[0], load_elementwise)), needs_grad=False)


operators = {
    "quantize_states": define("quantize_states", _run, lambda *_: None, writes=("states", "scale")),
    "dequantize_states": define("dequantize_states", _run, lambda *_: None, writes=("state_pool",)),
}
