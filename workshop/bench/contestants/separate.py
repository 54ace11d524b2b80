"""Prompts and decoding steps with convolution and norm around the rule, in several calls.

The rule is the contestant's. Convolution and norm are this library's. Windows are gathered from a pool and scattered
back to it. The same holds for states, unless the rule decodes on a pool.
"""

from collections.abc import Callable

from torch import Tensor

from flash_delta.modules import causal_conv1d, causal_conv1d_update, gated_rms_norm
from flash_delta.testing import Workload
from flash_delta.testing.calls import Call, pool_of, state_pool
from workshop.check.elementwise import heads_of
from workshop.check.layer import EPS

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k, v, first states: o, last states
Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, a pool of states, slots: o


def prepare(workload: Workload, x: dict[str, Tensor], rule: Rule, *, state_v_first: bool) -> Call:
    """``state_v_first``: the layout of the rule's states."""
    first = x["initial_state"]
    pool, read, write, states = pool_of({"initial_state": first if state_v_first else first.mT}, 1)
    windows, *_ = pool_of({"initial_state": x["windows"].mT}, 1)
    read, write = read.long(), write[:, 0].long()

    def run() -> tuple[Tensor, Tensor]:
        seen = windows.index_select(0, read)
        mixed, seen = causal_conv1d(x["mixed"], x["conv_weight"], None, "silu", seen, True, x["cu_seqlens"])
        o, last = rule(*heads_of(workload, mixed), pool.index_select(0, read))
        windows.index_copy_(0, write, seen)
        pool.index_copy_(0, write, last.to(pool.dtype))
        return gated_rms_norm(o, x["norm_gate"], x["norm_weight"], EPS, "silu"), states

    return Call(run, x | {"initial_state": pool}, state_v_first=state_v_first)


def prepare_step(workload: Workload, x: dict[str, Tensor], step: Step) -> Call:
    """``step`` updates states in the pool ``[N, HV, V, K]``. It gets contiguous q, k and v, as some contestants
    need."""
    (pool, slots), windows, mixed = state_pool(x), x["windows"].clone(), x["mixed"].squeeze(1)
    places = slots.long()

    def run() -> tuple[Tensor, Tensor]:
        seen = windows.index_select(0, places)
        y = causal_conv1d_update(mixed, seen, x["conv_weight"], activation="silu")
        windows.index_copy_(0, places, seen)
        q, k, v = (t.contiguous() for t in heads_of(workload, y.unsqueeze(1)))
        o = step(q, k, v, pool, slots)
        return gated_rms_norm(o, x["norm_gate"], x["norm_weight"], EPS, "silu"), pool

    return Call(run, x | {"initial_state": pool}, state_v_first=True)


def on_gathered(rule: Rule) -> Step:
    """Makes a `Step` of a rule that returns new states ``[N, HV, V, K]``."""

    def step(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        o, last = rule(q, k, v, pool.index_select(0, slots))
        pool.index_copy_(0, slots.long(), last.to(pool.dtype))
        return o

    return step
