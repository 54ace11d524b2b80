"""Prompts with what a layer does around the rule, in several calls: a contestant's rule, and beside it this library's
convolution and norm. Windows and states are gathered from pools and scattered to them."""

from collections.abc import Callable

from torch import Tensor

from flash_delta.bench.contestants.call import Call
from flash_delta.bench.contestants.tensors import pool_of
from flash_delta.modules import causal_conv1d, gated_rms_norm
from flash_delta.testing import Workload
from flash_delta.testing.layer import EPS
from flash_delta.testing.prompt import heads_of

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k, v, first states: o, last states


def prepare(workload: Workload, x: dict[str, Tensor], rule: Rule, *, state_v_first: bool) -> Call:
    """``state_v_first``: the states that the rule takes and gives."""
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
