"""The loop on a pool of states. Its items are the value heads of the sequences that `list_prompts` has listed
(plans/prompt_list.py). It reads states from slots and writes them to slots, and also checkpoints (checkpoints.py).
"""

from collections.abc import Iterable

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from flash_delta.kernels.hopper.channel.loop import run_roles
from flash_delta.kernels.hopper.channel.parts import STEP
from flash_delta.kernels.hopper.channel.roles import Described, GateParameters, Places
from flash_delta.kernels.hopper.device import checkpoints
from flash_delta.kernels.hopper.device.checkpoints import Checkpoints, checkpoint_values
from flash_delta.kernels.hopper.device.work_items import Work
from flash_delta.kernels.hopper.plans.boxes import handed_by, pool, ragged, strides
from flash_delta.kernels.hopper.plans.tape import Tape
from flash_delta.kernels.hopper.plans.tiles import BY_HAND, CHANNEL_WHOLE, channel_rings
from flash_delta.kernels.runtime.arguments import PER_TOKEN, batch, launch_rule, tokens
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.pool_launches import PoolLaunch
from flash_delta.problem import Slots

NUMBERS = [
    "T", "least", "most", "q_batch", "k_batch", "v_batch", "g_batch", "b_batch", "w_batch", "beta_batch", "HV", "group",
    *checkpoints.NUMBERS,
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=[*checkpoints.POINTERS, *PER_TOKEN])
def channel_prompts(
    q_desc, k_desc, v_desc, g_desc, b_desc, w_desc, o_desc, states, handed, tape, cu_seqlens, prompts, checkpoints,
    offsets, o, beta, A_log, dt_bias, T, least, most, slots, null_slot, columns, interval, table_row, table_column,
    q_batch, k_batch, v_batch, g_batch, b_batch, w_batch, heads, scale, bound, beta_top, beta_batch, beta_token,
    beta_head, HV, group, V_FIRST: gl.constexpr, NORM: gl.constexpr, RAW_BETA: gl.constexpr, RAW_GATE: gl.constexpr,
    BOUNDED: gl.constexpr, NR: gl.constexpr, NV: gl.constexpr, NX: gl.constexpr, NO: gl.constexpr,
    HALVES: gl.constexpr, GATES: gl.constexpr, FACTORS: gl.constexpr, TAPED: gl.constexpr,
):  # fmt: skip
    """This launch works only if ``prompts`` has ``least`` to ``most`` sequences."""
    gdc_launch_dependents()  # `decode` may start: it needs nothing from this kernel, and runs where there is room
    checkpoints = Checkpoints(checkpoints, slots, null_slot, columns, interval, table_row, table_column, offsets)
    descs = Described(q_desc, k_desc, v_desc, g_desc, b_desc, w_desc, o_desc, states, states, handed)
    work = Work(cu_seqlens, T, 0, prompts, least, most)
    gate = GateParameters(A_log, dt_bias, bound, scale, beta, beta_batch, (beta_token, beta_head), beta_top)
    places = Places(q_batch, k_batch, g_batch, v_batch, b_batch, w_batch, group, *heads)
    run_roles(
        descs, checkpoints, work, tape, None, o, gate, places, HV, True, V_FIRST, NORM, RAW_BETA, RAW_GATE, BOUNDED, NR,
        NV, NX, NO, HALVES, GATES, FACTORS,
    )  # fmt: skip


def run_channel_prompts(
    c: Draft, o: Layout, prompts: Layout, tape: Tape, s: Slots, launches: Iterable[PoolLaunch]
) -> None:
    """Launches the loop, once for every tile that the number of prompts may select. With halves of states there is a
    program for every item, so they need no tape."""
    p, x = c.p, c.x
    states, kept = pool(p, s.state_pool), checkpoint_values(p, s)
    q_batch, k_batch, g_batch, v_batch, b_batch, w_batch, heads = strides(x.q, x.k, x.g, x.v, x.b, x.w)
    q, k, g, b = (ragged(y, p.K, STEP.value) for y in (x.q, x.k, x.g, x.b))
    for t, sequences, least, most, _ in launches:
        laid = tape if t == CHANNEL_WHOLE else None
        values, w = (ragged(y, 64 * t.HALVES, STEP.value) for y in (x.v, x.w))
        arguments = (
            q, k, values, g, b, w, ragged(o, 64, STEP.value), states, *handed_by(laid), x.cu_seqlens, prompts,
            *kept[:2], o, x.beta, x.A_log, x.dt_bias, p.T, least, most, *kept[2:], q_batch, k_batch, v_batch, g_batch,
            b_batch, w_batch, heads, p.scale, p.gate.bound or 0.0, p.beta_range, batch(x.beta), *tokens(x.beta),
        )  # fmt: skip
        own = channel_rings(p) | t._asdict() | {"TAPED": laid is not None}
        programs = min(sequences * p.HV, c.chip.processors) if laid is None else laid.programs
        launch_rule(c, channel_prompts, arguments, (programs, 2 // t.HALVES, 1), BY_HAND, follows=True, **own)
