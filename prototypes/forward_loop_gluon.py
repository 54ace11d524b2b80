"""The forward main loop by hand for Hopper: one role per warp group, one program per state.

    X = A^T Kd     Y = P A          (factor role)
    R = V - Kg S   O = Qg S + Y R   S <- gamma S + X^T R          (state role)

A = (I + diag(b) L)^-1 diag(b) is given, P = tril(Q K^T) decayed. The state is kept transposed, S^T [V, K], in float32
accumulators. Shared memory: a ring of NS slots {q, k, v, A} and one of NX slots {X, Y}. Barriers: full (the loads have
landed), xfull (X and Y are ready; q and k are scaled in place), xfree (X and Y are read), ofull (O lies in the slot of
v), free (the slot is stored and may be filled again).
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_delta.compiler import Launch
from prototypes.gluon_names import tma_load, tma_store


class Tile(NamedTuple):
    groups: int  # warp groups that hold 64 columns of the state each
    registers: int  # per thread of a state role; the factor role keeps what is left of 512 for 4 warps


@gluon.jit
def load_role(
    q_desc, k_desc, v_desc, a_desc, sq, sk, sv, sa, full, free, chunks, t0, k_head, v_head, v_col,
    NS: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    for c in range(chunks):
        s = c % NS
        phase = (c // NS) & 1
        mbarrier.wait(free.index(s), phase ^ 1)
        mbarrier.expect(full.index(s), 64 * 128 * 2 * 2 + 64 * BV * 2 + 64 * 64 * 2)
        tma_load(k_desc, [t0 + c * 64, k_head * 128], full.index(s), sk.index(s))
        tma_load(a_desc, [t0 + c * 64, v_head * 64], full.index(s), sa.index(s))
        tma_load(q_desc, [t0 + c * 64, k_head * 128], full.index(s), sq.index(s))
        tma_load(v_desc, [t0 + c * 64, v_col], full.index(s), sv.index(s))


@gluon.jit
def factor_role(sq, sk, sa, sx, sy, g_ptr, full, xfull, xfree, chunks, NS: gl.constexpr, NX: gl.constexpr):
    """Builds Y = P A and X = A^T Kd, then scales k by -e^G and q by e^G in place. g_ptr: log2 gates of this head."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    acc32: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    operand32: gl.constexpr = gl.DotOperandLayout(0, acc32, 2)
    rows: gl.constexpr = gl.SliceLayout(1, acc)
    cols: gl.constexpr = gl.SliceLayout(0, acc)
    operand_cols: gl.constexpr = gl.SliceLayout(0, operand)
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    blocked_rows: gl.constexpr = gl.SliceLayout(1, blocked)
    i = gl.arange(0, 64, layout=rows)
    j = gl.arange(0, 64, layout=cols)
    for c in range(chunks):
        s = c % NS
        x = c % NX
        mbarrier.wait(full.index(s), (c // NS) & 1)
        p = warpgroup_mma(
            sq.index(s), sk.index(s).permute([1, 0]), gl.zeros([64, 64], gl.float32, acc), use_acc=False, is_async=True
        )
        g_row = gl.load(g_ptr + c * 64 + i)
        g_col = gl.load(g_ptr + c * 64 + j)
        mbarrier.wait(xfree.index(x), ((c // NX) & 1) ^ 1)
        g_last = gl.load(g_ptr + c * 64 + 63)
        g_op = gl.load(g_ptr + c * 64 + gl.arange(0, 64, layout=operand_cols))
        at = sa.index(s).permute([1, 0]).load(operand)
        at = (at.to(gl.float32) * gl.exp2(g_last - g_op)[None, :]).to(gl.bfloat16)
        p = warpgroup_mma_wait(0, deps=[p])
        p = gl.where(i[:, None] >= j[None, :], p * gl.exp2(g_row[:, None] - g_col[None, :]), 0.0)
        y = warpgroup_mma(
            gl.convert_layout(p.to(gl.bfloat16), operand),
            sa.index(s),
            gl.zeros([64, 64], gl.float32, acc),
            use_acc=False,
            is_async=True,
        )
        y = warpgroup_mma_wait(0, deps=[y])
        sy.index(x).store(y.to(gl.bfloat16))
        at32 = gl.convert_layout(at, operand32)
        for h in gl.static_range(4):  # quarters of 32 columns: one 64 x 128 accumulator would not fit
            xq = warpgroup_mma(
                at32,
                sk.index(s).slice(32 * h, 32, 1),
                gl.zeros([64, 32], gl.float32, acc32),
                use_acc=False,
                is_async=True,
            )
            xq = warpgroup_mma_wait(0, deps=[xq])
            sx.index(x).slice(32 * h, 32, 1).store(xq.to(gl.bfloat16))
        scale = gl.exp2(gl.load(g_ptr + c * 64 + gl.arange(0, 64, layout=blocked_rows)))
        for h in gl.static_range(4):
            kk = sk.index(s).slice(32 * h, 32, 1)
            kk.store((kk.load(blocked).to(gl.float32) * (-scale)[:, None]).to(gl.bfloat16))
            qq = sq.index(s).slice(32 * h, 32, 1)
            qq.store((qq.load(blocked).to(gl.float32) * scale[:, None]).to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(xfull.index(x), count=1)


@gluon.jit
def state_role(
    gamma_ptr, h_ptr, sq, sk, sv, sx, sy, full, ofull, xfull, xfree, chunks, v_off,
    NS: gl.constexpr, NX: gl.constexpr, BV: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """The dependent chain. Two wgmma on the chain (U, S), two beside it (O)."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 64, 16])
    acc_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 128, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    operand_state: gl.constexpr = gl.DotOperandLayout(0, acc_state, 2)
    S = gl.zeros([BV, 128], gl.float32, acc_state)
    for c in range(chunks):
        s = c % NS
        x = c % NX
        sb = gl.convert_layout(S.to(gl.bfloat16), operand)
        mbarrier.wait(full.index(s), (c // NS) & 1)
        u = sv.index(s).slice(v_off, BV, 1).permute([1, 0]).load(acc).to(gl.float32)
        mbarrier.wait(xfull.index(x), (c // NX) & 1)
        u = warpgroup_mma(sb, sk.index(s).permute([1, 0]), u, is_async=True)  # k holds -Kg
        o = warpgroup_mma(
            sb, sq.index(s).permute([1, 0]), gl.zeros([BV, 64], gl.float32, acc), use_acc=False, is_async=True
        )
        S = S * gl.load(gamma_ptr + c)
        u = warpgroup_mma_wait(1, deps=[u])
        r = u.to(gl.bfloat16)
        S = warpgroup_mma(gl.convert_layout(r, operand_state), sx.index(x), S, is_async=True)
        o = warpgroup_mma(gl.convert_layout(r, operand), sy.index(x).permute([1, 0]), o, is_async=True)
        S = warpgroup_mma_wait(1, deps=[S])
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(xfree.index(x), count=1)
        sv.index(s).slice(v_off, BV, 1).permute([1, 0]).store(o.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(ofull.index(s), count=1)
    row = gl.arange(0, BV, layout=gl.SliceLayout(1, acc_state))
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, acc_state))
    gl.store(h_ptr + (v_off + row[:, None]) * 128 + col[None, :], S)


@gluon.jit
def store_role(o_desc, sv, ofull, free, chunks, t0, v_col, NS: gl.constexpr):
    for c in range(chunks):
        s = c % NS
        mbarrier.wait(ofull.index(s), (c // NS) & 1)
        tma_store(o_desc, [t0 + c * 64, v_col], sv.index(s))
        tma.store_wait(0)
        mbarrier.arrive(free.index(s), count=1)


@gluon.jit(do_not_specialize=["chunks", "group"])
def gluon_forward(
    q_desc, k_desc, v_desc, a_desc, o_desc, g_ptr, gamma_ptr, h_ptr, chunks, group,
    BV: gl.constexpr, NWG: gl.constexpr, NS: gl.constexpr, NX: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """Grid (HV value heads, N sequences, 128 / (BV NWG)). g_ptr [HV, N T]: log2; gamma_ptr [HV, N chunks]; h_ptr
    [N, HV, V, K]."""
    NW: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    v_head = gl.program_id(0)
    k_head = v_head // group
    all_chunks = gl.num_programs(1) * chunks
    t0 = gl.program_id(1) * chunks * 64
    v_start = gl.program_id(2) * BV * NWG
    v_col = v_head * 128 + v_start
    g = g_ptr + v_head * all_chunks * 64 + t0
    gamma = gamma_ptr + v_head * all_chunks + gl.program_id(1) * chunks
    h = h_ptr + ((gl.program_id(1) * gl.num_programs(0) + v_head) * 128 + v_start) * 128
    sq = gl.allocate_shared_memory(gl.bfloat16, [NS, 64, 128], layout)
    sk = gl.allocate_shared_memory(gl.bfloat16, [NS, 64, 128], layout)
    sv = gl.allocate_shared_memory(gl.bfloat16, [NS, 64, BV * NWG], layout)
    sa = gl.allocate_shared_memory(gl.bfloat16, [NS, 64, 64], layout)
    sx = gl.allocate_shared_memory(gl.bfloat16, [NX, 64, 128], layout)
    sy = gl.allocate_shared_memory(gl.bfloat16, [NX, 64, 64], layout)
    full = gl.allocate_shared_memory(gl.int64, [NS, 1], bar)
    free = gl.allocate_shared_memory(gl.int64, [NS, 1], bar)
    ofull = gl.allocate_shared_memory(gl.int64, [NS, 1], bar)
    xfull = gl.allocate_shared_memory(gl.int64, [NX, 1], bar)
    xfree = gl.allocate_shared_memory(gl.int64, [NX, 1], bar)
    for i in gl.static_range(NS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
        mbarrier.init(ofull.index(i), count=NWG)
    for i in gl.static_range(NX):
        mbarrier.init(xfull.index(i), count=1)
        mbarrier.init(xfree.index(i), count=NWG)
    fence_async_shared()
    # The first partition keeps what the others leave of 512 registers per 4 warps and thread.
    if NWG == 2:
        gl.warp_specialize([
            (factor_role, (sq, sk, sa, sx, sy, g, full, xfull, xfree, chunks, NS, NX)),
            (state_role, (gamma, h, sq, sk, sv, sx, sy, full, ofull, xfull, xfree, chunks, 0, NS, NX, BV, NW)),
            (state_role, (gamma, h, sq, sk, sv, sx, sy, full, ofull, xfull, xfree, chunks, BV, NS, NX, BV, NW)),
            (load_role, (q_desc, k_desc, v_desc, a_desc, sq, sk, sv, sa, full, free, chunks, t0, k_head, v_head, v_col,
                         NS, BV * NWG)),
            (store_role, (o_desc, sv, ofull, free, chunks, t0, v_col, NS)),
        ], [4, 4, 1, 1], [REGS, REGS, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (factor_role, (sq, sk, sa, sx, sy, g, full, xfull, xfree, chunks, NS, NX)),
            (state_role, (gamma, h, sq, sk, sv, sx, sy, full, ofull, xfull, xfree, chunks, 0, NS, NX, BV, NW)),
            (load_role, (q_desc, k_desc, v_desc, a_desc, sq, sk, sv, sa, full, free, chunks, t0, k_head, v_head, v_col,
                         NS, BV * NWG)),
            (store_role, (o_desc, sv, ofull, free, chunks, t0, v_col, NS)),
        ], [4, 1, 1], [REGS, 24, 24])  # fmt: skip


def launch(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, gamma: Tensor, sequences: int, tile: Tile
) -> tuple[Tensor, Tensor]:
    """o like v and state [N, HV, V, K]. q, k [N T, H 128]; v [N T, HV 128]; a [N T, HV 64]; g [HV, N T]: log2, summed
    within a chunk; gamma [HV, N chunks]."""
    heads, chunks = v.shape[1] // 128, v.shape[0] // (64 * sequences)
    o, state = torch.empty_like(v), torch.empty(sequences, heads, 128, 128, device=v.device)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    columns = 64 * tile.groups
    descriptors = [
        TensorDescriptor.from_tensor(tensor, [64, width], layout)
        for tensor, width in ((q, 128), (k, 128), (v, columns), (a, 64), (o, columns))
    ]
    gluon_forward[(heads, sequences, 128 // columns)](
        *descriptors, g, gamma, state, chunks, v.shape[1] // q.shape[1], BV=64, NWG=tile.groups, NS=2, NX=2,
        REGS=tile.registers, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return o, state


def launches(target: str) -> Iterator[Launch]:
    if target != "sm_90a":
        return
    N, HV, H, chunks = 4, 32, 8, 64
    T = N * chunks * 64

    def bf16(columns: int) -> Tensor:
        return torch.empty(T, columns, dtype=torch.bfloat16, device="meta")

    g, gamma = torch.empty(HV, T, device="meta"), torch.empty(HV, N * chunks, device="meta")
    tensors = (bf16(H * 128), bf16(H * 128), bf16(HV * 128), bf16(HV * 64), g, gamma)
    for tile in (Tile(1, 208), Tile(2, 192)):
        yield Launch(f"V={64 * tile.groups}", partial(launch, *tensors, N, tile))
