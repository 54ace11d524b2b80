"""Finds whether gates forget. If they do, long sequences are scanned in parts at the same time (loop.py).

If some tokens decay every channel by 2^184, the state before them has no effect after them. In float32 any number below
2^35 is then zero. `find_forgetting` checks whether the EARLY tokens before each part decay so much. If so, a part is
scanned from these tokens on, from a state of zeros. Its results have the same bits as in a scan of the whole sequence.

`channel_loop` scans the parts only if gates forget before all parts of all states. Otherwise `prepare` and
`scan_channels` compute the outputs, with other roundings. The host does not know which. It launches all of these
kernels, and those that are not needed end at once.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.device.gates import log_decays
from flash_delta.kernels.hopper.channel.gate_role import SUMS, constants_of_head
from flash_delta.kernels.hopper.channel.parts import EARLY, STEP, part_length
from flash_delta.kernels.hopper.channel.scores import OWN, K
from flash_delta.kernels.hopper.device.layouts import THREADS
from flash_delta.kernels.hopper.device.segment_bounds import FADED
from flash_delta.kernels.hopper.device.work_items import Work, bounds
from flash_delta.kernels.hopper.plans.tiles import BY_HAND
from flash_delta.kernels.runtime.arguments import batch, launch_rule, tokens
from flash_delta.kernels.runtime.plan import Draft, Layout, Making

MOST = gl.constexpr(256)  # numbers of ``forgets``


@gluon.jit
def all_forget(forgets, count):
    """Whether gates forget before each part. ``count``: of all parts except first ones. False if it is 0."""
    i = gl.arange(0, MOST, layout=THREADS)
    return (count > 0) & (gl.min(gl.load(forgets + i, mask=i < count, other=1), 0) > 0)


@gluon.jit
def fallen(g, places, own, begin, constants, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """The log decay of each channel over the EARLY tokens before ``begin``, in bits."""
    batch_stride, strides, n = places
    of_token, of_head = strides
    a = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, OWN)))[:, None, None]
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    c = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, OWN)))[None, None, :]
    total = gl.zeros([2, K], gl.float32, SUMS)
    for early in gl.static_range(STEP, EARLY + STEP, STEP):
        token = own.start + begin - early + 16 * a + m
        at = n * batch_stride + token.to(gl.int64) * of_token + own.hv * of_head
        x = gl.load(g + (at + c)).to(gl.float32)
        total += gl.sum(log_decays(x, constants, RAW_GATE, BOUNDED), 1)
    return gl.sum(total, 0)


@gluon.jit(do_not_specialize=["T", "parts", "g_batch", "HV"])
def find_forgetting(
    g, A_log, dt_bias, cu_seqlens, forgets, T, parts, bound, g_batch, g_strides,
    HV, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Program (parts - 1) i + j writes its number of ``forgets``. This is 1 if gates forget before part j + 1 of state
    i, or if there is no such part. Otherwise it is 0."""
    state, part = gl.program_id(0) // (parts - 1), gl.program_id(0) % (parts - 1) + 1
    own = bounds(state, Work(cu_seqlens, T, None), HV)
    n, size = own.n, own.size
    if cu_seqlens is not None:
        n = n * 0
    begin = part * part_length(size, parts)
    constants = constants_of_head(own.hv, A_log, dt_bias, bound, RAW_GATE, BOUNDED)
    found = gl.where(begin >= size, 1, 0)
    if (begin < size) & (begin >= EARLY):
        places = g_batch, g_strides, (n + 0).to(gl.int64)
        total = fallen(g, places, own, begin, constants, RAW_GATE, BOUNDED)
        count = gl.sum(gl.where(total <= FADED, 1, 0), 0)  # NaN does not count
        found = gl.where(count == K, 1, 0)
    i = gl.arange(0, MOST, layout=THREADS)
    gl.store(forgets + gl.program_id(0) + i, i * 0 + found, mask=i < 1)


def new_forgets(made: Making) -> Layout:
    return made.new("forgets", (MOST.value,), torch.int32)


def run_find_forgetting(c: Draft, forgets: Layout, parts: int) -> None:
    p, x = c.p, c.x
    arguments = (
        x.g, x.A_log, x.dt_bias, x.cu_seqlens, forgets, p.T, parts, p.gate.bound or 0.0, batch(x.g),
        tokens(x.g)[:2],
    )  # fmt: skip
    launch_rule(c, find_forgetting, arguments, (p.N * p.HV * (parts - 1), 1, 1), BY_HAND)
