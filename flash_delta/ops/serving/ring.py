"""Drafts without a state for each token: records of what tokens did to states, and a call that applies them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from flash_delta.ops._backend import choose_backend, load_backend, wished
from flash_delta.ops._check.options import NULLS, as_bool, as_int, refuse
from flash_delta.ops._check.ring import CommitOptions, Committed, describe_commit
from flash_delta.ops._known_calls import look_at
from flash_delta.ops._operators.define import define
from flash_delta.ops._transforms import is_traced
from flash_delta.problem import Inputs, KnownCall, Slots, sharing


class Ring(NamedTuple):
    r"""A ring of pages with records of tokens, for the drafts of decoding calls.

    .. math::
        S_t = \mathrm{diag}(d_t) \, S_{t-1} + k_t u_t^\top

    A token of any member changes its state like this. Its record is k, u and d as they were computed, in float32. So
    the state after the token can be computed again, with the same bits and without the token's other inputs. With heads
    of 128 a record takes 1 to 3 % of the memory of a state in float32.

    A call with a ring writes the records of its tokens to the pages ``write``, and no state after a token. There are
    two ways to apply them:

    * :func:`commit` applies records to the states of all layers at once.
    * The next call applies them before its own tokens. It names the pages as ``read``, and how many records were
      accepted as ``counts``. It writes these states to ``write_indices``. So a row needs two pages, which take turns.

    Args:
        k: ``[pages, S, H, K]``, float32 (float64 for inputs in float64), without gaps; room for S tokens per page.
        u: ``[pages, S, HV, V]``, likewise.
        decay: ``[pages, S, HV]``, or ``[pages, S, HV, K]`` with a decay per channel, likewise.
        write: ``[B]``, int32 or int64: the pages that the call writes, one for each row. For decoding only.
        read: ``[B]``: the pages whose records are applied first. Default None: none are.
        counts: ``[B]``: how many of their records, from 0 to S. With 0 the page is ignored.

    Rows must not share a page that is written, and no page may be read and written by the same call. On a CPU such a
    call is refused. On a GPU its results are undefined. A row with an index that names no page, or with a count out of
    range, is padding.

    Example:
        >>> import torch
        >>> from flash_delta import decode_gated_delta_rule
        >>> from flash_delta.ops.serving import Ring, commit
        >>> pool, row = torch.randn(8, 4, 32, 32), torch.tensor([3])
        >>> k, u, decay = torch.empty(2, 4, 2, 32), torch.empty(2, 4, 4, 32), torch.empty(2, 4, 4)  # 2 pages
        >>> q, key, v = (torch.randn(1, 4, heads, 32) for heads in (2, 2, 4))  # a draft of 4 tokens
        >>> g, beta = -torch.rand(1, 4, 4), torch.rand(1, 4, 4)
        >>> page = torch.tensor([0])
        >>> o = decode_gated_delta_rule(
        ...     q, key, v, g, beta, pool, row, ring=Ring(k, u, decay, write=page), state_v_first=True
        ... )
        >>> accepted = torch.tensor([2])
        >>> commit(pool, Ring(k, u, decay, read=page, counts=accepted), row, state_v_first=True)
    """

    k: Tensor
    u: Tensor
    decay: Tensor
    write: Tensor | None = None
    read: Tensor | None = None
    counts: Tensor | None = None


NO_RING = (None,) * len(Ring._fields)


def ring_of(op: str, ring: Ring | None) -> tuple[Tensor | None, ...]:
    """The ring's tensors, as `Slots` has them."""
    if ring is None:
        return NO_RING
    if not isinstance(ring, Ring):
        refuse(op, "ring", "a Ring or None", type(ring).__name__)
    return ring


def commit(
    state_pool: Tensor,
    ring: Ring,
    slots: Tensor,
    checkpoint_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    null_slot: int | None = None,
    *,
    state_v_first: bool,
    backend: str | None = None,
) -> None:
    r"""Applies the records of accepted tokens to states in the slots of a pool, in place, in all layers at once.

    .. math::
        S_t = \mathrm{diag}(d_t) \, S_{t-1} + k_t u_t^\top, \qquad t = 1 .. \text{counts}_b

    S is rounded to the dtype of the pool after every token. So the state has the bits of decoding the accepted tokens
    one by one. It takes one launch. The host reads no index, so a call can be captured in a CUDA graph.

    Row b applies the first ``ring.counts[b]`` records of page ``ring.read[b]`` to the state in slot ``slots[b]``. A
    count of 0 leaves it as it is. Afterwards the count of that page is 0: records may be applied once.

    A prefix cache may need the state after fewer tokens, too. The state after ``checkpoint_offsets[b]`` records goes to
    slot ``checkpoint_indices[b]``. Offset 0 copies the state as it was. An offset below 0 or above the row's count
    leaves no checkpoint.

    Args:
        state_pool: ``[slots, HV, V, K]`` if ``state_v_first``, else ``[slots, HV, K, V]``; float32, bfloat16 or
            float16, any strides. With layers ``[layers, slots, HV, V, K]``.
        ring: the records, with ``read`` and ``counts``. With layers each of k, u and decay has a first axis of layers.
        slots: the slots of the rows' states, ``[B]``, int32 or int64, for all layers. An index that names no slot, or
            that is ``null_slot``, is padding.
        checkpoint_indices: ``[B]``, slots for checkpoints. Default None: none are left.
        checkpoint_offsets: ``[B]``, for ``checkpoint_indices`` only, which needs it.
        null_slot: an index that also counts as padding. Default None.
        state_v_first: the layout of ``state_pool``.
        backend: the backend that runs the call, or refuses it. Default None: the one that ``FLASH_DELTA_BACKEND``
            names, or else the first that can run the call.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta.ops.serving import Ring, commit
        >>> pool = torch.zeros(2, 8, 4, 32, 32)  # of two layers
        >>> k, u, decay = torch.ones(2, 1, 4, 2, 32), torch.ones(2, 1, 4, 4, 32), torch.ones(2, 1, 4, 4)  # one page
        >>> ring = Ring(k, u, decay, read=torch.tensor([0]), counts=torch.tensor([3]))
        >>> commit(pool, ring, torch.tensor([5]), state_v_first=True)
        >>> float(pool[1, 5].mean()), float(pool.sum() - pool[:, 5].sum())
        (3.0, 0.0)

    Source: the records are those of SGLang's ReplaySSM.
    """
    k, u, decay, _, read, counts = ring_of("commit", ring)
    x = Committed(state_pool, k, u, decay, slots, read, counts, checkpoint_indices, checkpoint_offsets)
    null_slot = None if null_slot is None else as_int("commit", "null_slot", null_slot, NULLS, 0)
    options = CommitOptions(null_slot, as_bool("commit", "state_v_first", state_v_first))
    if not is_traced(k):
        _commit(x, options, backend)
        return
    if not torch.compiler.is_compiling():
        describe_commit(x, options)
    operator(*x, *options, wished(backend))


def _commit(x: Committed, options: CommitOptions, backend: str | None) -> None:
    known = look_at(_look, is_grad_enabled(), (backend, *options), options._asdict(), x)
    pool, *records = x[:4] if x.state_pool.ndim == 5 else [t.unsqueeze(0) for t in x[:4]]
    k, u, decay = records
    slots = Slots(
        pool, x.slots, None, None, None, None, x.checkpoint_indices, x.checkpoint_offsets,
        ring_read=x.read, ring_counts=x.counts,
    )  # fmt: skip
    known.backend.commit(known.problem, Inputs(k, k, u, decay), slots, known)


def _look(given: tuple[Any, ...], options: dict[str, Any], x: Committed) -> KnownCall:
    problem = sharing(describe_commit(x, CommitOptions(**options)))
    return KnownCall(problem, load_backend(choose_backend(problem, given[0])), needs_grad=False)


operator = define("commit", _commit, lambda *_: None, writes=("state_pool",))
